"""Cancel and force events that their source holds: of cancelling and launching, exactly one wins."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tidegate.errors import NotFound
from tidegate.flow.control.retry_verbs import DONE, ChangedRetries, RetryOrder, RetryRow
from tidegate.model.ids import EventId
from tidegate.model.ingress_retry import IngressRetry
from tidegate.store import decisions, events, ingress_retries
from tidegate.store.bulk_retries import WaitingMatch
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.telemetry import metrics


def _status(row: IngressRetry) -> str:
    """What became of a held event."""
    at = f" at {row.updated_at:%Y-%m-%d %H:%M:%S} UTC" if row.updated_at else ""
    if row.retry_state == "cancelled":
        why = row.last_error or "cancelled"
        return f"it was {why}{at}" if why.startswith("cancelled") else f"it was cancelled{at}: {why}"
    if row.retry_state == "completed":
        return f"its time came{at}, and it was let through"
    return f"its retry is {row.retry_state}"


class EventVerbs:
    """Cancelled, an event will not be launched, whatever was in progress; forced, it is due now and meets the gate."""

    noun = "event"

    async def get(self, connection: Connection, row_id: uuid.UUID) -> RetryRow:
        event_id = EventId(row_id)
        row = await ingress_retries.get(connection, event_id)
        if row is None:
            raise NotFound(f"event {event_id} is not held: it has no retry")
        correlation_id = await events.correlation_id(connection, event_id)
        return RetryRow(
            WaitingMatch(event_id, None, None),
            _status(row),
            {"retry_state": row.retry_state, "next_attempt_at": row.next_attempt_at},
            {"event_id": event_id, "correlation_id": correlation_id, "source": row.source},
        )

    async def change(self, connection: Connection, rows: Sequence[WaitingMatch], order: RetryOrder) -> ChangedRetries:
        ids = [EventId(row.id) for row in rows]
        if order.verb == "cancel":
            changed = await ingress_retries.cancel(connection, ids, f"cancelled by {order.actor}", reason=order.reason)
        else:
            changed = await ingress_retries.force(connection, ids, reason=order.reason)
        done = DONE[order.verb]
        await decisions.insert(
            connection,
            [NewDecision(one.event_id, None, "gate", done, None, None, one.attempts, order.actor) for one in changed],
        )
        return ChangedRetries([one.event_id for one in changed], cancelled=len(changed))

    def count_cancelled(self, count: int) -> None:
        metrics.EVENT_RETRIES.labels("cancelled").inc(count)
