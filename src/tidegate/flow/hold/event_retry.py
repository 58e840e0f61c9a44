"""Retry: events whose slot has come. They are read from Postgres and the gate is asked again, in order of arrival.

Only as many are taken as there is room for, so late workers cannot bunch over the limit. When there is no room and none
comes soon (the source was paused meanwhile, or we are late), the source's waiting events get new slots: `replan`.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.decide import batch, gate
from tidegate.flow.decide.batch import Batch, Delivered
from tidegate.flow.decide.gate import OpenGates
from tidegate.flow.decide.spans import EventSpans, Gated
from tidegate.model.event import Event
from tidegate.model.ids import EventId
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


class EventTurn(NamedTuple):
    """What one look at the due events did; `look_at` is when room returns for those that found none."""

    due: int = 0
    delivered: int = 0
    launched: int = 0
    expired: int = 0
    replanned: tuple[str, ...] = ()
    look_at: datetime | None = None
    now: datetime | None = None
    batches: Sequence[Delivered] = ()
    spans: Sequence[Spans] = ()

    def plus(self, other: EventTurn) -> EventTurn:
        """Both together; the times are the later turn's, and the look is the sooner one."""
        looks = [at for at in (self.look_at, other.look_at) if at is not None]
        return EventTurn(
            self.due + other.due, self.delivered + other.delivered, self.launched + other.launched,
            self.expired + other.expired, (*self.replanned, *other.replanned), min(looks, default=None),
            other.now or self.now, (*self.batches, *other.batches),
            (*self.spans, *other.spans),
        )  # fmt: skip


class EventRetry:
    """Lets events through whose slot has come."""

    def __init__(
        self,
        database: Database,
        *,
        batch_size: int,
        after_launch: Callable[[], None],
        after_plan: Callable[[], None] = lambda: None,
        breaker: SourceBreakerPolicy = SOURCE_BREAKER,
        batch: Batch | None = None,
    ) -> None:
        self._database = database
        self._batch_size = batch_size
        self._after_launch = after_launch
        self._after_plan = after_plan
        self._batch = batch or Batch(breaker)

    async def run_once(self) -> EventTurn:
        """One batch of due events."""
        try:
            turn = await self._database.run(self._turn)
        except Unavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever the batch failed with, its events are tried one by one
            _log.warning("retry.batch_failed", error=exc, reason="taking it apart to find the event at fault")
            turn = await self._one_by_one()
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
        return turn

    async def next_look_seconds(self) -> float | None:
        """Seconds until the next slot, or None when nobody waits."""
        async with self._database.connection() as connection:
            return await ingress_retries.next_due_seconds(connection)

    async def _one_by_one(self) -> EventTurn:
        """The next due event of each source in a transaction of its own; one that still fails is given up.

        It is named: another worker may have failed at it too and given it up, and whoever is next is not at fault.
        """
        async with self._database.connection() as connection:
            names = await ingress_retries.due_sources(connection, MAX_SOURCES)
            firsts = {name: await ingress_retries.first_due(connection, name) for name in names}
        total = EventTurn()
        for name, first in firsts.items():
            if first is None:
                continue
            try:
                one = await self._database.run(partial(self._take, names=[name], batch_size=1, only=first))
            except Unavailable:
                raise
            except Exception as exc:  # noqa: BLE001 - whatever it is, this event goes to the dead letters and the others continue
                given_up = await self._database.run(partial(self._give_up, name=name, event_id=first, exc=exc))
                one = EventTurn(due=given_up, expired=given_up)
            total = total.plus(one)
        return total

    async def _give_up(self, connection: Connection, name: str, event_id: uuid.UUID, exc: Exception) -> int:
        gates = await gate.open_gates(connection, [name])
        reason = f"{type(exc).__name__}: {exc}"[:1000]
        rows = await ingress_retries.take_due(connection, name, now=gates.now, limit=1, only=event_id)
        for row in rows:
            given_up = Settled(row.event_id, "exhausted", row.attempts, None, FAILED, reason, {"reason": FAILED}, 0)
            await ingress_retries.settle(connection, [given_up])
            await ingress_retries.bury(connection, [(row.event_id, reason, {"attempts": row.attempts})])
            decided = NewDecision(row.event_id, gates.now, "gate", "exhausted", reason, None, row.attempts)
            await decisions.insert(connection, [decided])
            # The event itself is not read: that it cannot be may be why it is given up.
            correlation_id = await events.correlation_id(connection, row.event_id)
            _log.error("event.retry_failed", event_id=row.event_id, correlation_id=correlation_id, source=name,
                       attempt=row.attempts, reason=reason)  # fmt: skip
        return len(rows)

    async def _turn(self, connection: Connection) -> EventTurn:
        names = await ingress_retries.due_sources(connection, MAX_SOURCES)
        return await self._take(connection, names, self._batch_size) if names else EventTurn()

    async def _take(
        self, connection: Connection, names: list[str], batch_size: int, only: uuid.UUID | None = None
    ) -> EventTurn:
        gates = await gate.open_gates(connection, names)
        taken: dict[str, list[DueEvent]] = {}
        replanned: list[str] = []
        look_at: datetime | None = None
        left = batch_size
        # Each source may take its part of what is left, the longest due last: a long line takes what the others leave.
        for others, name in reversed(list(enumerate(names))):
            # A source without a state has no row, and gets one with its first failure: it must stay unknown here.
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
                    look_at = min(look_at, opens) if look_at else opens
                continue
            limit = share if room is None else min(share, room)
            found = await ingress_retries.take_due(connection, name, now=gates.now, limit=limit, only=only)
            taken[name] = found
            left -= len(found)
        due = [row for rows in taken.values() for row in rows]
        passed, delivered, expired, spans = await self._let_through(connection, gates, due)
        await gate.close_gates(connection, gates)
        failpoints.hit("retry.before_commit")
        return EventTurn(
            len(due), len(passed), delivered.launched, expired, tuple(replanned), look_at, gates.now,
            (delivered,), spans,
        )  # fmt: skip

    async def _let_through(
        self, connection: Connection, gates: OpenGates, due: list[DueEvent]
    ) -> tuple[list[Event], Delivered, int, Sequence[Spans]]:
        if not due:
            return [], Delivered(), 0, ()
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
        seen = batch.measure(
            gates.now,
            newcomers=[],
            lags=delivered.lags,
            throttled=Counter(),
            dropped=Counter(found[event_id].source for event_id in expired),
            failures=delivered.failures,
        )
        await batch.count(connection, seen, delivered)
        _log_lines(due, found, expired)
        if spans is None:
            return passing, delivered, len(expired), ()
        await events.set_traceparents(connection, spans.started)
        gated = [_gated(row, event, event.id in expired) for row, event in zip(due, in_order, strict=True)]
        return passing, delivered, len(expired), [(spans, gated, delivered)]


def _settled(row: DueEvent, is_expired: bool, gates: OpenGates) -> Settled:
    if is_expired:
        message = "its ttl_ms was over before it could be let through"
        return Settled(
            row.event_id, "exhausted", row.attempts, None, gate.EXPIRED, message, {"reason": gate.EXPIRED}, 0
        )
    metadata = {"reason": row.reason, "let_through_at": gates.now}
    return Settled(row.event_id, "completed", row.attempts, None, row.reason, None, metadata, 0)


def _gated(row: DueEvent, event: Event, is_expired: bool) -> Gated:
    return Gated(event, "expired" if is_expired else "allowed", row.attempts, row.reason)


def _recorded(row: DueEvent, is_expired: bool, now: datetime) -> NewDecision:
    if is_expired:
        return NewDecision(row.event_id, now, "gate", "expired", "its ttl_ms was over", None, row.attempts)
    return NewDecision(row.event_id, now, "gate", "allowed", "its slot has come", None, row.attempts)


def _log_lines(due: list[DueEvent], found: dict[uuid.UUID, Event], expired: set[EventId]) -> None:
    for row in due:
        event = found[row.event_id]
        _log.info(
            "event.retry_expired" if row.event_id in expired else "event.retry_completed",
            event_id=row.event_id,
            source=event.source,
            correlation_id=event.correlation_id,
            attempt=row.attempts,
            reason=row.reason,
        )
