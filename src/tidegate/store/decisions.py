"""`event_decisions`: what was decided about events beyond a simple launch, for `explain`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tidegate.model.ids import EventId, TriggerId
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("decisions")


class NewDecision(NamedTuple):
    """One decision; `at` None means now. `detail` holds the triggers that an event did not fire, the runs
    that it woke, or the run that the decision is about (`run_id`)."""

    event_id: EventId
    at: datetime | None
    stage: str
    decision: str
    reason: str | None = None
    until: datetime | None = None
    attempt: int | None = None
    actor: str | None = None
    trigger_id: TriggerId | None = None
    detail: Any = None


async def insert(connection: Connection, decisions: Sequence[NewDecision]) -> None:
    """Record decisions, in the transaction that took them."""
    if decisions:
        columns = [list(column) for column in zip(*decisions, strict=True)]
        columns[-1] = [None if d is None else msgspec.json.encode(d).decode() for d in columns[-1]]
        await connection.execute(_sql["insert"], *columns)


async def list_of_event(connection: Connection, event_id: EventId) -> list[NewDecision]:
    """What was decided about one event, in order."""
    return [NewDecision(*row) for row in await connection.fetch(_sql["list_of_event"], event_id)]


class RecentDecision(msgspec.Struct, frozen=True, kw_only=True):
    """A decision as operators see it; no payload."""

    id: int
    at: datetime
    stage: str
    decision: str
    reason: str | None
    until: datetime | None
    attempt: int | None
    actor: str | None
    event_id: EventId
    external_id: str | None
    type: str | None
    source: str | None
    trigger_id: TriggerId | None
    trigger: str | None
    workflow: str | None


async def list_recent(connection: Connection, *, before_id: int | None = None, limit: int) -> list[RecentDecision]:
    """The newest decisions about all events."""
    return [RecentDecision(**dict(row)) for row in await connection.fetch(_sql["list_recent"], before_id, limit)]
