"""Arrivals: events that were published for a later time meet the gate at that time, like new ones.

Until then such an event waits with the reason `scheduled`: it is in no line, takes no slot, and no plan moves it. At
its time it gets a new number in the order of arrival, and is admitted, or held behind those that already wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.decide import batch, gate, reporting
from tidegate.flow.decide.batch import Batch, Delivered
from tidegate.flow.decide.gate import LockedGates, Verdict
from tidegate.flow.decide.one_by_one import error_text, one_by_one
from tidegate.flow.decide.spans import EventSpans, newcomers_gated
from tidegate.model.event import Event
from tidegate.model.ids import EventId
from tidegate.model.ingress_retry import IngressRetry
from tidegate.store import decisions, events, ingress_retries
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.store.ingress_retries import ArrivedEvent, Settled
from tidegate.telemetry import metrics, traces
from tidegate.telemetry.logs import logger

_log = logger("arrival")

Due = tuple[EventId, str]


class ArrivedBatch(NamedTuple):
    """What one transaction decided about events whose time had come."""

    events: Sequence[Event] = ()
    verdict: Verdict = Verdict([], [], [])
    delivered: Delivered = Delivered()
    spans: EventSpans | None = None


class Arrivals:
    """Decides delayed events at their time. `after_launch` and `after_hold` are called after the commit."""

    def __init__(
        self,
        database: Database,
        *,
        batch_size: int,
        after_launch: Callable[[], None],
        after_hold: Callable[[Sequence[IngressRetry]], None],
        batch: Batch,
    ) -> None:
        self._database = database
        self._batch_size = batch_size
        self._after_launch = after_launch
        self._after_hold = after_hold
        self._batch = batch

    async def run_once(self) -> int:
        """One batch of events whose time has come; how many were decided or dead-lettered."""
        async with self._database.connection() as connection:
            due = await ingress_retries.list_arrived(connection, self._batch_size)
        if not due:
            return 0
        try:
            return await self._decide(due)
        except Unavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever the batch failed with, its events are processed one by one
            _log.warning(
                "arrival.batch_failed", error=exc, reason="processing its events one by one to isolate the failing one"
            )
            return sum(await one_by_one(due, self._decide_one, self._give_up))

    async def _decide_one(self, due: Due) -> int:
        return await self._decide([due])

    async def _decide(self, due: Sequence[Due]) -> int:
        arrived = await self._database.run(partial(self._take, due=due))
        failpoints.hit("arrival.after_commit")
        self._committed(arrived)
        return len(arrived.events)

    async def _take(self, connection: Connection, due: Sequence[Due]) -> ArrivedBatch:
        gates = await gate.lock_gates(connection, (source for _, source in due))
        rows = await ingress_retries.take_arrived(connection, [event_id for event_id, _ in due], gates.now)
        if not rows:
            return ArrivedBatch()
        found = await events.get_many(connection, (row.event_id for row in rows))
        arrived = [msgspec.structs.replace(found[row.event_id], ingress_sequence=row.arrival) for row in rows]
        await events.renumber(connection, arrived)
        spans = EventSpans(arrived) if traces.is_on else None
        if spans is not None:
            arrived = list(spans.events)
            await events.set_traceparents(connection, spans.started)
        verdict = gate.decide(gates, arrived)
        delivered = await self._batch.deliver(connection, gates, verdict.admitted)
        await self._write(connection, gates, rows, verdict)
        await gate.save_gates(connection, gates)
        seen = reporting.measure(
            gates.now,
            newcomers=arrived,
            lags=delivered.lags,
            throttled=Counter(retry.source for retry in verdict.held),
            dropped=Counter(retry.source for retry in verdict.expired),
            failures=delivered.failures,
        )
        await batch.count(connection, seen, delivered)
        failpoints.hit("arrival.before_commit")
        return ArrivedBatch(arrived, verdict, delivered, spans)

    async def _write(
        self, connection: Connection, gates: LockedGates, rows: Sequence[ArrivedEvent], verdict: Verdict
    ) -> None:
        admitted = {event.id for event in verdict.admitted}
        await ingress_retries.join_line(connection, verdict.held)
        await ingress_retries.settle(
            connection,
            [_passed(row, gates) for row in rows if row.event_id in admitted]
            + [_expired(retry) for retry in verdict.expired],
        )
        lines = [NewDecision(one.id, gates.now, "gate", "allowed", "its time has come") for one in verdict.admitted]
        lines += [NewDecision(one.event_id, gates.now, "gate", "held" if one.retry_state == "scheduled" else "expired",
                              one.last_error, one.next_attempt_at, one.attempts)
                  for one in (*verdict.held, *verdict.expired)]  # fmt: skip
        await decisions.insert(connection, lines)

    def _committed(self, arrived: ArrivedBatch) -> None:
        """Count, log and announce, after the commit, what was decided."""
        delivered, held, expired = arrived.delivered, arrived.verdict.held, arrived.verdict.expired
        self._batch.begin(delivered)
        if delivered.launched > len(delivered.claimed):
            self._after_launch()
        self._batch.committed(delivered)
        metrics.allowed(delivered.lags)
        metrics.refused((retry.source, retry.reason) for retry in held)
        metrics.EVENT_RETRIES.labels("scheduled").inc(len(held))
        waiting = {retry.event_id: retry for retry in (*held, *expired)}
        for event in arrived.events:
            retry = waiting.get(event.id)
            line = _log.bind(event_id=event.id, correlation_id=event.correlation_id, source=event.source)
            if retry is None:
                line.info("event.arrived", deliver_at=event.deliver_at)
            elif retry.retry_state == "scheduled":
                line.info(
                    "event.held", attempt=retry.attempts, next_attempt_at=retry.next_attempt_at, reason=retry.reason
                )
            else:
                line.warning("event.expired", attempt=retry.attempts, reason=retry.reason)
        if held:
            self._after_hold(held)
        if arrived.spans is not None:
            arrived.spans.record(newcomers_gated(arrived.events, held, expired), delivered)

    async def _give_up(self, due: Due, error: Exception) -> int:
        (event_id, source), reason = due, error_text(error)
        if not await self._database.run(partial(self._dead_letter, event_id=event_id, source=source, reason=reason)):
            return 0
        metrics.EVENT_RETRIES.labels("exhausted").inc()
        _log.error("event.arrival_failed", event_id=event_id, source=source, reason=reason)
        return 1

    async def _dead_letter(self, connection: Connection, event_id: EventId, source: str, reason: str) -> bool:
        """Dead-letter the event if it still waits for its time, which has come. The event itself is not read: it may be
        unreadable."""
        gates = await gate.lock_gates(connection, [source])
        for row in await ingress_retries.take_arrived(connection, [event_id], gates.now):
            exhausted = Settled(event_id, "exhausted", row.attempts, None, "failed", reason, {"reason": "failed"}, 0)
            await ingress_retries.settle(connection, [exhausted])
            await ingress_retries.dead_letter(connection, [(event_id, reason, {"attempts": row.attempts})])
            await decisions.insert(connection, [NewDecision(event_id, gates.now, "gate", "exhausted", reason)])
            return True
        return False


def _passed(row: ArrivedEvent, gates: LockedGates) -> Settled:
    metadata = {"reason": row.reason, "let_through_at": gates.now}
    return Settled(row.event_id, "completed", row.attempts, None, row.reason, None, metadata, 0)


def _expired(retry: IngressRetry) -> Settled:
    return Settled(
        retry.event_id, "exhausted", retry.attempts, None, retry.reason, retry.last_error, dict(retry.metadata), 0
    )
