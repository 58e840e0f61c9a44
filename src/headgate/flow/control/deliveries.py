"""The operator's verbs about deliveries that wait: exactly one of cancelling and launching wins."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Literal

from headgate.errors import Conflict, NotFound
from headgate.store import audit, decisions, held_deliveries, trigger_gates
from headgate.store.db import Connection, Database
from headgate.store.decisions import Recorded
from headgate.store.held_deliveries import Changed, HeldDelivery
from headgate.telemetry import metrics
from headgate.telemetry.logs import logger

_log = logger("control")


async def cancel_delivery(database: Database, delivery_id: uuid.UUID, actor: str) -> None:
    """Cancel a delivery that waits: it will not launch, whatever was in flight. Conflict when it does not wait."""
    known = await database.run(partial(_change_waiting, delivery_id=delivery_id, actor=actor, verb="cancel"))
    metrics.DELIVERY_RETRIES.labels("cancelled").inc()
    _log.info("delivery.retry_cancelled", **_named(known), actor=actor)


async def force_delivery(database: Database, delivery_id: uuid.UUID, actor: str) -> None:
    """Make a delivery that waits due now; its trigger's gate is still asked. Conflict when it does not wait."""
    known = await database.run(partial(_change_waiting, delivery_id=delivery_id, actor=actor, verb="force"))
    _log.info("delivery.retry_forced", **_named(known), actor=actor)


async def _change_waiting(
    connection: Connection, *, delivery_id: uuid.UUID, actor: str, verb: Literal["cancel", "force"]
) -> HeldDelivery:
    known = await held_deliveries.get(connection, delivery_id)
    if known is None:
        raise NotFound(f"no delivery {delivery_id}")
    reason = f"cancelled by {actor}" if verb == "cancel" else None
    if reason is not None:
        changed = await _cancel(connection, known, reason)
    else:
        changed = await held_deliveries.force(connection, delivery_id)
    if changed is None:
        now = await held_deliveries.get(connection, delivery_id)
        raise Conflict(f"delivery {delivery_id} is no longer waiting: it is {(now or known).status}")
    done = "cancelled" if verb == "cancel" else "forced"
    recorded = Recorded(
        changed.event_id, None, "deliver", done, reason=reason, attempt=changed.retry_attempts, actor=actor,
        trigger_id=changed.trigger_id,
    )  # fmt: skip
    await decisions.insert(connection, [recorded])
    after = await held_deliveries.get(connection, delivery_id)
    await audit.insert(
        connection, actor=actor, action=f"delivery.{verb}", subject=str(delivery_id), before=_waits(known),
        after=_waits(after or known),
    )  # fmt: skip
    return known


def _named(row: HeldDelivery) -> dict[str, object]:
    return {"delivery_id": row.id, "event_id": row.event_id, "correlation_id": row.correlation_id,
            "source": row.source, "trigger_id": row.trigger_id, "workflow": row.workflow}  # fmt: skip


def _waits(row: HeldDelivery) -> dict[str, object]:
    return {"status": row.status, "retry_state": row.retry_state, "next_attempt_at": row.next_attempt_at}


async def _cancel(connection: Connection, known: HeldDelivery, reason: str) -> Changed | None:
    # Under the trigger's lock nobody decides about it meanwhile. A slot may have been meant for it: then the next in
    # line has to be told.
    await trigger_gates.lock(connection, always=[known.trigger_id])
    changed = await held_deliveries.cancel(connection, known.id, reason)
    now = await held_deliveries.get(connection, known.id)
    if now is not None and now.concurrency_key is not None:
        await trigger_gates.wake(connection, [(known.trigger_id, now.concurrency_key)])
    return changed
