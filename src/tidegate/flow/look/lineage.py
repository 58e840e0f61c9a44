"""Lineage: what an event came of, and which events a run has published."""

from __future__ import annotations

import uuid
from datetime import datetime

from tidegate.model.event import Event
from tidegate.model.ids import EventId, RunId
from tidegate.model.run import Run, Step
from tidegate.store import events, steps
from tidegate.store.db import Connection

MAX_SHOWN = 100


def cause_of(event: Event) -> tuple[RunId | None, EventId | None]:
    """The run that published an event and the event that launched that run; None for an event of a producer."""
    run_id, event_id = ((event.origin or {}).get(key) for key in ("run_id", "event_id"))
    return RunId(uuid.UUID(str(run_id))) if run_id else None, EventId(uuid.UUID(str(event_id))) if event_id else None


async def published_by(connection: Connection, run: Run) -> list[tuple[datetime | None, str]]:
    """When a run published which events, at most MAX_SHOWN."""
    if run.attempts == 0:
        return []
    mine = [s for s in await steps.list_of_run(connection, run.id) if s.kind == "publish" and s.status == "succeeded"]
    ids = {s.id: EventId(uuid.UUID(s.result["id"])) for s in mine[:MAX_SHOWN]}
    found = await events.get_many(connection, ids.values()) if ids else {}
    return [(s.updated_at, _published(s, ids[s.id], found.get(ids[s.id]))) for s in mine[:MAX_SHOWN]]


def _published(step: Step, event_id: EventId, event: Event | None) -> str:
    what = f"{event.type} as event {event_id}" if event is not None else f"event {event_id}"
    return f"{what}, which existed before: its id was used" if step.result.get("status") == "duplicate" else what
