"""Cancel and force waiting deliveries: of cancelling and launching, exactly one wins."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tidegate.errors import NotFound
from tidegate.flow.control.retry_verbs import DONE, ChangedRetries, RetryOrder, RetryRow
from tidegate.model.ids import DeliveryId
from tidegate.store import decisions, held_deliveries, trigger_gates
from tidegate.store.bulk_retries import WaitingMatch
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.telemetry import metrics


class DeliveryVerbs:
    """Cancelled, a delivery will not launch, whatever was in progress; forced, it is due now and meets its trigger's
    gate."""

    noun = "delivery"

    async def get(self, connection: Connection, row_id: uuid.UUID) -> RetryRow:
        row = await held_deliveries.get(connection, DeliveryId(row_id))
        if row is None:
            raise NotFound(f"no delivery {row_id}")
        return RetryRow(
            WaitingMatch(row_id, row.trigger_id, None),
            f"it is {row.status}",
            {"status": row.status, "retry_state": row.retry_state, "next_attempt_at": row.next_attempt_at},
            {"delivery_id": row.id, "event_id": row.event_id, "correlation_id": row.correlation_id,
             "source": row.source, "trigger_id": row.trigger_id, "workflow": row.workflow},
        )  # fmt: skip

    async def change(self, connection: Connection, rows: Sequence[WaitingMatch], order: RetryOrder) -> ChangedRetries:
        ids = [DeliveryId(row.id) for row in rows]
        text = f"cancelled by {order.actor}" if order.verb == "cancel" else None
        if text is not None:
            # Under the triggers' locks no other transaction decides about them. A free slot may have been offered to
            # one of them: then the next in line has to be woken.
            trigger_ids = {row.trigger_id for row in rows if row.trigger_id is not None}
            await trigger_gates.lock(connection, always=trigger_ids)
            changed = await held_deliveries.cancel(connection, ids, text, reason=order.reason)
            slots = [(one.trigger_id, one.concurrency_key) for one in changed if one.concurrency_key is not None]
            await trigger_gates.wake(connection, slots)
        else:
            changed = await held_deliveries.force(connection, ids, reason=order.reason)
        recorded = [
            NewDecision(
                one.event_id, None, "deliver", DONE[order.verb], reason=text, attempt=one.retry_attempts,
                actor=order.actor, trigger_id=one.trigger_id,
            )
            for one in changed
        ]  # fmt: skip
        await decisions.insert(connection, recorded)
        return ChangedRetries([one.id for one in changed], cancelled=len(changed))

    def count_cancelled(self, count: int) -> None:
        metrics.DELIVERY_RETRIES.labels("cancelled").inc(count)
