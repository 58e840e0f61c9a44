"""Cancel and force waiting deliveries: of cancelling and launching, exactly one wins."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tidegate.errors import NotFound
from tidegate.flow.control.retry_verbs import DONE, ChangedRetries, RetryOrder, RetryRow
from tidegate.model.ids import DeliveryId
from tidegate.store import budgets, decisions, held_deliveries, locks, trigger_gates, windows
from tidegate.store.bulk_retries import WaitingMatch
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.store.windows import Left
from tidegate.telemetry import metrics


class DeliveryVerbs:
    """Cancelled, a delivery will not launch, whatever was in progress; forced, it is due now and meets its trigger's
    gate. The first delivery of a window stands for all of it; another one that is cancelled leaves the window, and if
    it is forced, the window is closed."""

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
        # Under the triggers' locks no other transaction decides about them, or puts more events into their windows.
        locked = await trigger_gates.lock(
            connection, always={row.trigger_id for row in rows if row.trigger_id is not None}
        )
        held = await budgets.lock(connection, {name for one in locked.values() for name in one.budgets})
        led_by = await windows.leaders_of(connection, ids)
        if text is not None:
            # A free slot may have been offered to one of them: then the next in line has to be woken.
            changed = await held_deliveries.cancel(connection, ids, text, reason=order.reason)
            await windows.follow(connection, [one.id for one in changed], await locks.now(connection))
            changed += await windows.leave(connection, [Left(one, "cancelled", text, "window") for one in led_by])
            slots = [(one.trigger_id, one.concurrency_key) for one in changed if one.concurrency_key is not None]
            await trigger_gates.wake(connection, slots)
            lines = [one.line for one in changed if one.line is not None and one.line[0] in held]
            await budgets.nudge(connection, dict.fromkeys(lines, await locks.now(connection)) if lines else {})
        else:
            forced = [*ids, *led_by.values()]
            changed = await held_deliveries.force(connection, forced, reason=order.reason)
            await windows.close(connection, forced)
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
