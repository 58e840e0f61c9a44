"""Event retry: held events whose slot has come pass the gate again, in arrival order.

A batch takes only as many events as the limit has room for, so that late workers cannot exceed it. When there is no
room and none comes soon (the source was paused meanwhile, or this worker is late), it requests a replan of the source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.decide import batch, gate, reporting
from tidegate.flow.decide.batch import Batch, Delivered
from tidegate.flow.decide.gate import LockedGates
from tidegate.flow.decide.one_by_one import error_text, one_by_one
from tidegate.flow.decide.spans import EventSpans, Gated
from tidegate.flow.hold.arrivals import Arrivals
from tidegate.model.event import Event
from tidegate.model.ids import EventId
from tidegate.model.ingress_retry import IngressRetry
from tidegate.model.source import SOURCE_BREAKER, SourceBreakerPolicy, room_soon
from tidegate.store import decisions, events, ingress_retries
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.store.ingress_retries import DueEvent, Settled
from tidegate.telemetry import metrics, traces
from tidegate.telemetry.logs import logger

MAX_SOURCES = 50
FAILED = "failed"

_log = logger("retry")


Spans = tuple[EventSpans, Sequence[Gated], Delivered]


class RetriedEvent(NamedTuple):
    """A due event that was let through or had expired, for the log."""

    row: DueEvent
    source: str
    correlation_id: str
    is_expired: bool


class EventTurn(NamedTuple):
    """What one pass over the due events did; `room_at` is when the limit has room for those that were refused."""

    due: int = 0
    delivered: int = 0
    launched: int = 0
    expired: int = 0
    replanned: tuple[str, ...] = ()
    room_at: datetime | None = None
    now: datetime | None = None
    batches: Sequence[Delivered] = ()
    spans: Sequence[Spans] = ()
    retried: Sequence[RetriedEvent] = ()

    def plus(self, other: EventTurn) -> EventTurn:
        """Both together, with the time of the later turn and the earlier `room_at`."""
        times = [at for at in (self.room_at, other.room_at) if at is not None]
        return EventTurn(
            self.due + other.due, self.delivered + other.delivered, self.launched + other.launched,
            self.expired + other.expired, (*self.replanned, *other.replanned), min(times, default=None),
            other.now or self.now, (*self.batches, *other.batches),
            (*self.spans, *other.spans), (*self.retried, *other.retried),
        )  # fmt: skip


class EventRetry:
    """Lets held events through when their slot has come, and delayed ones at their time. `after_hold` is called with
    delayed events that the gate held at their time."""

    def __init__(
        self,
        database: Database,
        *,
        batch_size: int,
        after_launch: Callable[[], None],
        after_plan: Callable[[], None] = lambda: None,
        after_hold: Callable[[Sequence[IngressRetry]], None] = lambda _: None,
        breaker: SourceBreakerPolicy = SOURCE_BREAKER,
        batch: Batch | None = None,
    ) -> None:
        self._database = database
        self._batch_size = batch_size
        self._after_launch = after_launch
        self._after_plan = after_plan
        self._batch = batch or Batch(breaker)
        self._arrivals = Arrivals(
            database, batch_size=batch_size, after_launch=after_launch, after_hold=after_hold, batch=self._batch
        )

    async def run_once(self) -> EventTurn:
        """One batch of events whose time has come, and one of due events."""
        arrived = await self._arrivals.run_once()
        turn = await self._held_once()
        return turn._replace(due=turn.due + arrived)

    async def _held_once(self) -> EventTurn:
        try:
            turn = await self._database.run(self._turn)
        except Unavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever the batch failed with, its events are processed one by one
            _log.warning(
                "retry.batch_failed",
                error=exc,
                reason="processing the first event of each source by itself to isolate the failing one",
            )
            return await self._one_by_one()
        self._committed(turn)
        return turn

    def _committed(self, turn: EventTurn) -> None:
        """Count, log and announce, after the commit, what was done."""
        _log_retried(turn.retried)
        metrics.EVENT_RETRIES.labels("due").inc(turn.due)
        metrics.EVENT_RETRIES.labels("completed").inc(turn.delivered)
        metrics.EVENT_RETRIES.labels("exhausted").inc(turn.expired)
        for delivered in turn.batches:
            metrics.allowed(delivered.lags)
            self._batch.begin(delivered)
            self._batch.committed(delivered)
        for spans, gated, delivered in turn.spans:
            spans.record(gated, delivered)
        if turn.launched > sum(len(delivered.claimed) for delivered in turn.batches):
            self._after_launch()
        if turn.replanned:
            self._after_plan()

    async def next_due_seconds(self) -> float | None:
        """Seconds until the next slot, or None when no event waits."""
        async with self._database.connection() as connection:
            return await ingress_retries.next_due_seconds(connection)

    async def _one_by_one(self) -> EventTurn:
        """The next due event of each source, each in its own transaction; one that still fails is dead-lettered.

        Each event is addressed by id: another worker may have failed at it too and dead-lettered it, and then the next
        event in line is not at fault.
        """
        async with self._database.connection() as connection:
            names = await ingress_retries.due_sources(connection, MAX_SOURCES)
            firsts = {name: await ingress_retries.first_due(connection, name) for name in names}
        due = [(name, first) for name, first in firsts.items() if first is not None]
        total = EventTurn()
        for turn in await one_by_one(due, self._retry_one, self._exhaust):
            total = total.plus(turn)
        return total

    async def _retry_one(self, due: tuple[str, EventId]) -> EventTurn:
        source, event_id = due
        turn = await self._database.run(partial(self._take, names=[source], batch_size=1, only=event_id))
        self._committed(turn)
        return turn

    async def _exhaust(self, due: tuple[str, EventId], error: Exception) -> EventTurn:
        (source, event_id), reason = due, error_text(error)
        found = await self._database.run(partial(self._dead_letter, source=source, event_id=event_id, reason=reason))
        for row, correlation_id in found:
            _log.error("event.retry_failed", event_id=row.event_id, correlation_id=correlation_id, source=source,
                       attempt=row.attempts, reason=reason)  # fmt: skip
        turn = EventTurn(due=len(found), expired=len(found))
        self._committed(turn)
        return turn

    async def _dead_letter(
        self, connection: Connection, source: str, event_id: EventId, reason: str
    ) -> list[tuple[DueEvent, str | None]]:
        """Dead-letter the event if it is still due; the row and its correlation id."""
        gates = await gate.lock_gates(connection, [source])
        rows = await ingress_retries.take_due(connection, source, now=gates.now, limit=1, only=event_id)
        found = []
        for row in rows:
            exhausted = Settled(row.event_id, "exhausted", row.attempts, None, FAILED, reason, {"reason": FAILED}, 0)
            await ingress_retries.settle(connection, [exhausted])
            await ingress_retries.dead_letter(connection, [(row.event_id, reason, {"attempts": row.attempts})])
            decided = NewDecision(row.event_id, gates.now, "gate", "exhausted", reason, None, row.attempts)
            await decisions.insert(connection, [decided])
            # The event itself is not read: an unreadable event may be the cause of the failure.
            found.append((row, await events.correlation_id(connection, row.event_id)))
        return found

    async def _turn(self, connection: Connection) -> EventTurn:
        names = await ingress_retries.due_sources(connection, MAX_SOURCES)
        return await self._take(connection, names, self._batch_size) if names else EventTurn()

    async def _take(
        self, connection: Connection, names: list[str], batch_size: int, only: EventId | None = None
    ) -> EventTurn:
        gates = await gate.lock_gates(connection, names)
        taken: dict[str, list[DueEvent]] = {}
        replanned: list[str] = []
        room_at: datetime | None = None
        left = batch_size
        # Each source takes its share of the rest of the batch, the longest due last: it takes what the others leave.
        for others, name in reversed(list(enumerate(names))):
            # A source without a state has no row; its first failure creates one. It must stay without a row here.
            locked = gates.sources.get(name)
            if locked is not None and locked.is_replanning:
                continue
            share = max(1, left // (others + 1))
            room = locked.gate.room(gates.now) if locked is not None else None
            if locked is not None and room == 0:
                opens = room_soon(locked.gate, gates.now)
                if opens is None:
                    await gate.begin_plan(connection, gates, name, is_refusal=True)
                    replanned.append(name)
                else:
                    room_at = min(room_at, opens) if room_at else opens
                continue
            limit = share if room is None else min(share, room)
            found = await ingress_retries.take_due(connection, name, now=gates.now, limit=limit, only=only)
            taken[name] = found
            left -= len(found)
        due = [row for rows in taken.values() for row in rows]
        delivered, retried, spans = await self._let_through(connection, gates, due)
        await gate.save_gates(connection, gates)
        failpoints.hit("retry.before_commit")
        expired = sum(one.is_expired for one in retried)
        return EventTurn(
            len(due), len(due) - expired, delivered.launched, expired, tuple(replanned), room_at, gates.now,
            (delivered,), spans, retried,
        )  # fmt: skip

    async def _let_through(
        self, connection: Connection, gates: LockedGates, due: list[DueEvent]
    ) -> tuple[Delivered, Sequence[RetriedEvent], Sequence[Spans]]:
        if not due:
            return Delivered(), (), ()
        found = await events.get_many(connection, (row.event_id for row in due))
        in_order = [found[row.event_id] for row in due]
        spans = EventSpans(in_order) if traces.is_on else None
        if spans is not None:
            in_order = spans.events
        passing = [event for event in in_order if not gate.is_expired(event, gates.now)]
        for name, count in Counter(event.source for event in passing).items():
            if (one := gates.gate(name)) is not None:
                one.spend(gates.now, count)
        delivered = await self._batch.deliver(connection, gates, passing)
        expired = {event.id for event in in_order} - {event.id for event in passing}
        await ingress_retries.settle(connection, [_settled(row, row.event_id in expired, gates) for row in due])
        await decisions.insert(connection, [_recorded(row, row.event_id in expired, gates.now) for row in due])
        seen = reporting.measure(
            gates.now,
            newcomers=[],
            lags=delivered.lags,
            throttled=Counter(),
            dropped=Counter(found[event_id].source for event_id in expired),
            failures=delivered.failures,
        )
        await batch.count(connection, seen, delivered)
        retried = [
            RetriedEvent(row, event.source, event.correlation_id, event.id in expired)
            for row, event in zip(due, in_order, strict=True)
        ]
        if spans is None:
            return delivered, retried, ()
        await events.set_traceparents(connection, spans.started)
        gated = [_gated(row, event, event.id in expired) for row, event in zip(due, in_order, strict=True)]
        return delivered, retried, [(spans, gated, delivered)]


def _settled(row: DueEvent, is_expired: bool, gates: LockedGates) -> Settled:
    if is_expired:
        message = "expired: its ttl_ms passed before it could be let through"
        return Settled(
            row.event_id, "exhausted", row.attempts, None, gate.EXPIRED, message, {"reason": gate.EXPIRED}, 0
        )
    metadata = {"reason": row.reason, "let_through_at": gates.now}
    return Settled(row.event_id, "completed", row.attempts, None, row.reason, None, metadata, 0)


def _gated(row: DueEvent, event: Event, is_expired: bool) -> Gated:
    return Gated(event, "expired" if is_expired else "allowed", row.attempts, row.reason)


def _recorded(row: DueEvent, is_expired: bool, now: datetime) -> NewDecision:
    if is_expired:
        return NewDecision(row.event_id, now, "gate", "expired", "its ttl_ms has passed", None, row.attempts)
    return NewDecision(row.event_id, now, "gate", "allowed", "its slot has come", None, row.attempts)


def _log_retried(retried: Sequence[RetriedEvent]) -> None:
    for row, source, correlation_id, is_expired in retried:
        _log.info(
            "event.retry_expired" if is_expired else "event.retry_completed",
            event_id=row.event_id,
            source=source,
            correlation_id=correlation_id,
            attempt=row.attempts,
            reason=row.reason,
        )
