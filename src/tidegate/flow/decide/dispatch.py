"""Dispatch: decide new events. One transaction per batch: claim from the inbox, gate, match, deliver, create runs.

A crash before the commit leaves everything as it was; after the commit everything is done. There is no state between.

Two paths give the same rows. The fast path (`_launch`) takes a batch that no limit, hold, breaker or idempotency key
can affect, or that the gates of its sources have admitted as a whole, and writes it in one statement; everything else
takes the general path (`_decide`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.decide import batch, gate, reporting, whole_batch
from tidegate.flow.decide.batch import Batch, Delivered, MatchedBatch
from tidegate.flow.decide.deliver import DeliveryState
from tidegate.flow.decide.gate import LockedGates
from tidegate.flow.decide.inbox import Inbox, OtherLanes
from tidegate.flow.decide.one_by_one import error_text, one_by_one
from tidegate.flow.decide.reporting import log_source_moves
from tidegate.flow.decide.source_failures import SourceMove
from tidegate.flow.decide.spans import EventSpans, newcomers_gated
from tidegate.flow.decide.time_slice import MAX_WORK_SECONDS, TooLong
from tidegate.flow.decide.waits import Met
from tidegate.model.event import Event
from tidegate.model.ids import EventId
from tidegate.model.ingress_retry import IngressRetry
from tidegate.model.source import SOURCE_BREAKER, SourceBreakerPolicy
from tidegate.store import decisions, events, ingress_retries, locks
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.store.events import DeadLettered
from tidegate.telemetry import metrics, traces
from tidegate.telemetry.logs import logger

# A transaction decides at most about MAX_DELIVERIES deliveries: when events fire many triggers, it takes fewer events.
MAX_DELIVERIES = 2000

_log = logger("dispatch")


class OutOfTurn(Exception):
    """The order of events matters to a batch, and earlier events are still undecided."""


class DispatchCounts(NamedTuple):
    """What one batch did, in numbers."""

    events: int = 0
    launched: int = 0
    failed: int = 0
    held: int = 0
    expired: int = 0
    dead_lettered: int = 0


class DecidedBatch(NamedTuple):
    """What one batch decided: the counts, held events, the outcome of admitted events, and expired events."""

    outcome: DispatchCounts = DispatchCounts()
    held: Sequence[IngressRetry] = ()
    delivered: Delivered = Delivered()
    expired: Sequence[IngressRetry] = ()
    correlation_ids: Mapping[EventId, str] = {}
    spans: EventSpans | None = None


class Dispatch:
    """Decides the events in the inbox. `after_launch` and `after_hold` are called after the commit. `after_full` is
    called as soon as a batch is full and unrestricted: a second dispatcher may then decide the next batch at the same
    time."""

    def __init__(
        self,
        database: Database,
        *,
        batch_size: int,
        after_launch: Callable[[], None],
        after_hold: Callable[[Sequence[IngressRetry]], None] = lambda _: None,
        after_full: Callable[[], None] = lambda: None,
        breaker: SourceBreakerPolicy = SOURCE_BREAKER,
        batch: Batch | None = None,
        beside: Dispatch | None = None,
    ) -> None:
        """`beside`: this one decides what other sources than that of its backlog publish."""
        self._database = database
        self._batch_size = batch_size
        self._after_launch = after_launch
        self._after_hold = after_hold
        self._after_full = after_full
        self._batch = batch or Batch(breaker)
        self._fan_out = 1.0
        self._max_events = batch_size
        self._expects_no_state = True
        self._expects_room = True
        self._was_unrestricted = False
        self._inbox: Inbox = Inbox() if beside is None else OtherLanes(beside._inbox)
        self._takes_turn = False

    async def run_once(self) -> DispatchCounts:
        """Decide one batch; an outcome of 0 events means that the inbox was empty."""
        try:
            decided = await self._in_order()
        except TooLong as exc:
            self._max_events = exc.done
            _log.warning("dispatch.batch_shrunk", error=exc, reason="retrying with a smaller batch")
            return await self.run_once()
        except Unavailable:
            self._batch.forget_triggers()  # the transaction may have ended while they were in use
            raise
        except Exception as exc:  # noqa: BLE001 - whatever the batch failed with, its events are processed one by one
            self._batch.forget_triggers()
            _log.warning(
                "dispatch.batch_failed", error=exc, reason="processing its events one by one to isolate the failing one"
            )
            return await self._one_by_one()
        await self._committed(decided)
        return decided.outcome

    async def _in_order(self) -> DecidedBatch:
        """One batch. Workers decide batches concurrently, unless the order of events matters (a limit or a hold). Then
        the batch is claimed again while holding the turn, an advisory lock that waits for all earlier batches. The next
        batch then takes the turn from the start."""
        if not self._takes_turn:
            try:
                return await self._database.run(partial(self._oldest, has_turn=False))
            except OutOfTurn:
                if not self._inbox.takes_turns:
                    return DecidedBatch()
                self._takes_turn = True
        return await self._database.run(partial(self._oldest, has_turn=True))

    @property
    def has_more(self) -> bool:
        """Whether the last batch was full. If not, later events are announced by a hint, or found by the next poll."""
        return self._inbox.has_more

    @property
    def has_backlog(self) -> bool:
        """Whether one source has more events than a batch takes."""
        return self._inbox.backlog is not None

    @property
    def allows_second_batch(self) -> bool:
        """Whether a second batch may be decided at the same time: the last one was full and unrestricted, so that the
        order does not matter."""
        return self.has_more and self._was_unrestricted

    async def _committed(self, decided: DecidedBatch) -> None:
        failpoints.hit("dispatch.after_commit")
        if decided.delivered.claimed:
            self._batch.begin(decided.delivered)
            await asyncio.sleep(0)  # the runs start before metrics and logs are written
        if decided.outcome.events:
            if self._max_events < self._batch_size and not _took_long(decided.delivered):
                self._max_events = min(self._batch_size, self._max_events * 2)
            self._fan_out = max(1.0, len(decided.delivered.decided) / decided.outcome.events)
        if decided.outcome.launched > len(decided.delivered.claimed):
            self._after_launch()
        self._batch.committed(decided.delivered)
        metrics.allowed(decided.delivered.lags)
        metrics.refused((retry.source, retry.reason) for retry in decided.held)
        for retry in (*decided.held, *decided.expired):
            is_held = retry.retry_state == "scheduled"
            if is_held:
                metrics.EVENT_RETRIES.labels("scheduled").inc()
            log = _log.info if is_held else _log.warning
            log(
                "event.held" if is_held else "event.expired",
                event_id=retry.event_id,
                correlation_id=decided.correlation_ids.get(retry.event_id),
                source=retry.source,
                attempt=retry.attempts,
                next_attempt_at=retry.next_attempt_at,
                reason=retry.reason,
            )
        if decided.held:
            self._after_hold(decided.held)
        if decided.spans is not None:
            gated = newcomers_gated(decided.spans.events, decided.held, decided.expired)
            decided.spans.record(gated, decided.delivered)

    async def _oldest(self, connection: Connection, has_turn: bool) -> DecidedBatch:
        limit = max(1, min(self._max_events, int(MAX_DELIVERIES / self._fan_out)))
        newcomers, now = await self._inbox.claim(connection, limit, has_turn=has_turn)
        if now is None:
            return DecidedBatch()
        failpoints.hit("dispatch.after_claim")
        return await _traced(connection, newcomers, partial(self._pass, connection, now, has_turn))

    async def _pass(
        self, connection: Connection, now: datetime, has_turn: bool, newcomers: Sequence[Event]
    ) -> DecidedBatch:
        # What the last batch found is expected again: no source has a state (the statement of the fast path verifies
        # it), or their limits have room, so that matching need not wait for the sources' locks.
        matched = await self._batch.match(newcomers) if self._expects_room else None
        has_expired = any(event.ttl_ms is not None and gate.is_expired(event, now) for event in newcomers)
        self._was_unrestricted = matched is not None and matched.is_unrestricted and not has_expired
        if matched is not None and self._was_unrestricted:
            if self.has_more:
                self._after_full()
            decided = await self._launch(connection, now, matched) if self._expects_no_state else None
            if decided is not None:
                self._takes_turn = False
                return decided
        return await self._decide(connection, newcomers, matched, has_turn=has_turn)

    async def _launch(
        self,
        connection: Connection,
        now: datetime,
        matched: MatchedBatch,
        gates: LockedGates | None = None,
        state: DeliveryState | None = None,
    ) -> DecidedBatch | None:
        """The fast path, for a batch that nothing limits or holds, or that `gates`, and the limits of triggers in
        `state`, have admitted as a whole; None: it needs the general path."""
        if gates is None:
            failpoints.hit("dispatch.after_gate")
        failpoints.hit("dispatch.after_match")
        delivered = await self._batch.launch(connection, now, matched, gates, state)
        if delivered is None:
            return None
        if gates is not None:
            await gate.save_gates(connection, gates)
        failpoints.hit("dispatch.before_commit")
        outcome = DispatchCounts(events=len(matched.events), launched=delivered.launched)
        return DecidedBatch(outcome, (), delivered)

    async def _decide(
        self,
        connection: Connection,
        newcomers: Sequence[Event],
        matched: MatchedBatch | None = None,
        *,
        has_turn: bool,
        are_all_new: bool = True,
    ) -> DecidedBatch:
        """The general path. `are_all_new`: none of the events is expected to be decided already."""
        gates = await gate.lock_shared(connection, (event.source for event in newcomers))
        self._expects_no_state = not gates.sources
        verdict = gate.decide(gates, newcomers)
        failpoints.hit("dispatch.after_gate")
        matched = await self._batch.match_at(connection, gates, verdict.admitted, matched)
        is_ordered = matched.is_limited or bool(verdict.held)
        if is_ordered and not has_turn and not await self._inbox.is_in_turn(connection, newcomers):
            raise OutOfTurn
        self._takes_turn &= is_ordered
        waiting = [*verdict.held, *verdict.expired]
        self._expects_room = not waiting and gate.has_room(gates, 2 * self._batch_size)
        self._was_unrestricted &= self._expects_room
        state = None
        if are_all_new and matched.is_counted and not waiting:
            state = await self._batch.load(connection, gates, matched.candidates) if matched.is_limited else None
            if state is None or whole_batch.spend(state, matched.candidates):
                decided = await self._launch(connection, gates.now, matched, gates, state)
                if decided is not None:
                    await self._check_turn(connection, decided.delivered.met, has_turn)
                    return decided
                state = None  # it has spent what was not launched
        delivered = await self._batch.deliver(connection, gates, verdict.admitted, matched, state)
        await self._check_turn(connection, delivered.met, has_turn)
        await ingress_retries.hold(connection, waiting)
        await decisions.insert(connection, [_recorded(retry) for retry in waiting])
        await gate.save_gates(connection, gates)
        seen = reporting.measure(
            gates.now,
            newcomers=newcomers,
            lags=delivered.lags,
            throttled=Counter(retry.source for retry in verdict.held),
            dropped=Counter(retry.source for retry in verdict.expired),
            failures=delivered.failures,
        )
        await batch.count(connection, seen, delivered)
        failpoints.hit("dispatch.before_commit")
        outcome = DispatchCounts(
            events=len(newcomers),
            launched=delivered.launched,
            failed=delivered.failed,
            held=len(verdict.held),
            expired=len(verdict.expired),
        )
        correlation_ids: dict[EventId, str] = {event.id: event.correlation_id for event in newcomers} if waiting else {}
        return DecidedBatch(outcome, verdict.held, delivered, verdict.expired, correlation_ids)

    async def _check_turn(self, connection: Connection, met: Met, has_turn: bool) -> None:
        """Runs are given the events that they wait for in the order of arrival."""
        self._expects_no_state &= not met.is_awaited
        if not has_turn and await self._inbox.is_overtaken(connection, met.events):
            raise OutOfTurn

    async def _one_by_one(self) -> DispatchCounts:
        """The oldest events, each in its own transaction; an event that still fails is dead-lettered."""
        async with self._database.connection() as connection:
            sequences = await self._inbox.undecided(connection, self._batch_size)
        counts = await one_by_one(sequences, self._decide_one, self._give_up)
        return DispatchCounts(*map(sum, zip(DispatchCounts(), *counts, strict=True)))

    async def _decide_one(self, sequence: int) -> DispatchCounts:
        decided = await self._single_in_order(sequence)
        await self._committed(decided)
        return decided.outcome

    async def _single_in_order(self, sequence: int) -> DecidedBatch:
        try:
            return await self._database.run(partial(self._single, sequence=sequence, has_turn=False))
        except OutOfTurn:
            return await self._database.run(partial(self._single, sequence=sequence, has_turn=True))

    async def _single(self, connection: Connection, sequence: int, has_turn: bool) -> DecidedBatch:
        if has_turn:
            await locks.hold_turn(connection)
            if await events.first_in_lane(connection, sequence) != sequence:
                return DecidedBatch()  # an earlier event is undecided again, or this one is decided
        claimed = await events.claim_inbox_one(connection, sequence)
        if not claimed:
            return DecidedBatch()
        await locks.share(connection, [event.source for event in claimed])
        decide = partial(self._decide, connection, has_turn=has_turn, are_all_new=False)
        return await _traced(connection, claimed, decide)

    async def _give_up(self, sequence: int, error: Exception) -> DispatchCounts:
        reason = error_text(error)
        found, moves = await self._database.run(partial(self._dead_letter, sequence=sequence, reason=reason))
        if found is not None:
            _log.error("event.dead_lettered", event_id=found.event_id, correlation_id=found.correlation_id,
                       source=found.source, reason=reason)  # fmt: skip
        log_source_moves(moves)
        return DispatchCounts(events=1, dead_lettered=int(found is not None))

    async def _dead_letter(
        self, connection: Connection, sequence: int, reason: str
    ) -> tuple[DeadLettered | None, Sequence[SourceMove]]:
        found = await events.dead_letter(connection, sequence, reason)
        if found is None:
            return None, ()
        gates = await gate.lock_gates(connection, [found.source])
        moves = await self._batch.record_failure(connection, gates, found.source)  # a failure of its source
        await gate.save_gates(connection, gates)
        return found, moves


async def _traced(
    connection: Connection, newcomers: Sequence[Event], decide: Callable[[Sequence[Event]], Awaitable[DecidedBatch]]
) -> DecidedBatch:
    """Decide; when tracing is on, also store the traces that begin here, so that later stages continue them."""
    if not traces.is_on:
        return await decide(newcomers)
    spans = EventSpans(newcomers)
    decided = await decide(spans.events)
    await events.set_traceparents(connection, spans.started)
    return decided._replace(spans=spans)


def _took_long(delivered: Delivered) -> bool:
    """Whether a batch of twice the size might take too long to match."""
    began, ended = delivered.matching_ns or (0, 0)
    return (ended - began) / 1e9 > MAX_WORK_SECONDS / 4


def _recorded(retry: IngressRetry) -> NewDecision:
    decision = "held" if retry.retry_state == "scheduled" else "expired"
    return NewDecision(
        retry.event_id, None, "gate", decision, retry.last_error, retry.next_attempt_at, retry.attempts or None
    )
