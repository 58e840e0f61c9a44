"""The operator's verbs about events that their source holds back: exactly one of cancelling and launching wins."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial

from tidegate.errors import Conflict, NotFound
from tidegate.flow.control.verbs import DONE, RetryVerb
from tidegate.model.ingress_retry import IngressRetry
from tidegate.store import audit, decisions, events, ingress_retries
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("control")


async def cancel_event(database: Database, event_id: uuid.UUID, actor: str) -> None:
    """Cancel an event that waits: it will not be launched, whatever was in flight. Conflict when it does not wait."""
    known = await database.run(partial(_change_waiting, event_id=event_id, actor=actor, verb="cancel"))
    metrics.EVENT_RETRIES.labels("cancelled").inc()
    _log.info("event.retry_cancelled", event_id=event_id, **known, actor=actor)


async def force_event(database: Database, event_id: uuid.UUID, actor: str) -> None:
    """Make an event that waits due now; the gate is still asked. Conflict when it does not wait."""
    known = await database.run(partial(_change_waiting, event_id=event_id, actor=actor, verb="force"))
    _log.info("event.retry_forced", event_id=event_id, **known, actor=actor)


async def change_events(
    connection: Connection,
    event_ids: Sequence[uuid.UUID],
    verb: RetryVerb,
    actor: str,
    *,
    reason: str | None = None,
) -> list[uuid.UUID]:
    """Cancel or force those of the events that wait, for `reason` if one is given, with the lines of their stories;
    those that did."""
    if verb == "cancel":
        changed = await ingress_retries.cancel(connection, event_ids, f"cancelled by {actor}", reason=reason)
    else:
        changed = await ingress_retries.force(connection, event_ids, reason=reason)
    done = DONE[verb]
    await decisions.insert(
        connection, [NewDecision(one.event_id, None, "gate", done, None, None, one.attempts, actor) for one in changed]
    )
    return [one.event_id for one in changed]


async def _change_waiting(
    connection: Connection, *, event_id: uuid.UUID, actor: str, verb: RetryVerb
) -> dict[str, object]:
    before = await ingress_retries.get(connection, event_id)
    if not await change_events(connection, [event_id], verb, actor):
        row = await ingress_retries.get(connection, event_id)
        if row is None:
            raise NotFound(f"event {event_id} is not held: it has no retry")
        raise Conflict(f"event {event_id} is no longer waiting: its retry is {row.retry_state}")
    after = await ingress_retries.get(connection, event_id)
    await audit.insert(
        connection, actor=actor, action=f"event.{verb}", subject=str(event_id), before=_waits(before),
        after=_waits(after),
    )  # fmt: skip
    source = None if after is None else after.source
    return {"correlation_id": await events.correlation_id(connection, event_id), "source": source}


def _waits(row: IngressRetry | None) -> dict[str, object] | None:
    return None if row is None else {"retry_state": row.retry_state, "next_attempt_at": row.next_attempt_at}
