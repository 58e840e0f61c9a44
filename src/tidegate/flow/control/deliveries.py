"""The operator's verbs about deliveries that wait: exactly one of cancelling and launching wins."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from functools import partial

from tidegate.errors import Conflict, NotFound
from tidegate.flow.control.verbs import DONE, RetryVerb
from tidegate.store import audit, decisions, held_deliveries, trigger_gates
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.store.held_deliveries import ChangedDelivery, HeldDelivery
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

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


async def change_deliveries(
    connection: Connection,
    delivery_ids: Sequence[uuid.UUID],
    trigger_ids: Collection[uuid.UUID],
    verb: RetryVerb,
    actor: str,
    *,
    reason: str | None = None,
) -> list[ChangedDelivery]:
    """Cancel or force those of the deliveries that wait, for `reason` if one is given, with the lines of their events'
    stories; those that did. `trigger_ids` are their triggers."""
    text = f"cancelled by {actor}" if verb == "cancel" else None
    if text is not None:
        # Under the triggers' locks nobody decides about them meanwhile. A slot may have been meant for one: then the
        # next in line has to be told.
        await trigger_gates.lock(connection, always=trigger_ids)
        changed = await held_deliveries.cancel(connection, delivery_ids, text, reason=reason)
        slots = [(one.trigger_id, one.concurrency_key) for one in changed if one.concurrency_key is not None]
        await trigger_gates.wake(connection, slots)
    else:
        changed = await held_deliveries.force(connection, delivery_ids, reason=reason)
    recorded = [
        NewDecision(
            one.event_id, None, "deliver", DONE[verb], reason=text, attempt=one.retry_attempts, actor=actor,
            trigger_id=one.trigger_id,
        )
        for one in changed
    ]  # fmt: skip
    await decisions.insert(connection, recorded)
    return changed


async def _change_waiting(
    connection: Connection, *, delivery_id: uuid.UUID, actor: str, verb: RetryVerb
) -> HeldDelivery:
    known = await held_deliveries.get(connection, delivery_id)
    if known is None:
        raise NotFound(f"no delivery {delivery_id}")
    changed = await change_deliveries(connection, [delivery_id], [known.trigger_id], verb, actor)
    now = await held_deliveries.get(connection, delivery_id) or known
    if not changed:
        raise Conflict(f"delivery {delivery_id} is no longer waiting: it is {now.status}")
    await audit.insert(
        connection, actor=actor, action=f"delivery.{verb}", subject=str(delivery_id), before=_waits(known),
        after=_waits(now),
    )  # fmt: skip
    return known


def _named(row: HeldDelivery) -> dict[str, object]:
    return {"delivery_id": row.id, "event_id": row.event_id, "correlation_id": row.correlation_id,
            "source": row.source, "trigger_id": row.trigger_id, "workflow": row.workflow}  # fmt: skip


def _waits(row: HeldDelivery) -> dict[str, object]:
    return {"status": row.status, "retry_state": row.retry_state, "next_attempt_at": row.next_attempt_at}
