"""Dispatch: new events. In one transaction: take them from the inbox, gate, match, deliver, create runs.

A crash anywhere before the commit leaves everything as it was; after it, everything is done. Nothing in between exists.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.decide import batch, gate
from tidegate.flow.decide.batch import Batch, Delivered, MatchedBatch
from tidegate.flow.decide.slices import LONGEST_SECONDS, TooLong
from tidegate.flow.decide.spans import EventSpans, newcomers_gated
from tidegate.model.event import Event
from tidegate.model.ingress_retry import IngressRetry
from tidegate.model.source import SOURCE_BREAKER, SourceBreakerPolicy
from tidegate.store import decisions, events, ingress_retries, locks
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.store.events import Quarantined
from tidegate.telemetry import metrics, traces
from tidegate.telemetry.logs import logger

# A transaction decides about so many deliveries; when each event fires many triggers, it takes fewer events.
MAX_DELIVERIES = 2000

_log = logger("dispatch")


class OutOfTurn(Exception):
    """The order matters to a batch, and events that came before it are still undecided."""


class DispatchCounts(NamedTuple):
    """What one batch did, in numbers."""

    events: int = 0
    launched: int = 0
    failed: int = 0
    held: int = 0
    expired: int = 0
    quarantined: int = 0


class DecidedBatch(NamedTuple):
    """What one batch decided: the numbers, who waits, what became of those that passed, and who came too late."""

    outcome: DispatchCounts = DispatchCounts()
    held: Sequence[IngressRetry] = ()
    delivered: Delivered = Delivered()
    expired: Sequence[IngressRetry] = ()
    correlation_ids: Mapping[uuid.UUID, str] = {}
    spans: EventSpans | None = None


class Dispatch:
    """Decides what is in the inbox. The callbacks hear, after the commit, of new runs and of events that wait; and, as
    soon as it is known, that there is more in the inbox than one batch takes, and nothing that the order matters to."""

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
    ) -> None:
        self._database = database
        self._batch_size = batch_size
        self._after_launch = after_launch
        self._after_hold = after_hold
        self._after_full = after_full
        self._batch = batch or Batch(breaker)
        self._fan_out = 1.0
        self._most = batch_size
        self._is_calm = True
        self._is_plain = False
        self._has_more = False
        self._takes_turn = False

    async def run_once(self) -> DispatchCounts:
        """Decide one batch; an outcome of 0 events means that nothing was waiting."""
        try:
            decided = await self._in_order()
        except TooLong as exc:
            self._most = exc.done
            _log.warning("dispatch.batch_shrunk", error=exc, reason="a smaller batch is decided in its place")
            return await self.run_once()
        except Unavailable:
            self._batch.forget_triggers()  # a batch that outlived its transaction was matched by them
            raise
        except Exception as exc:  # noqa: BLE001 - whatever the batch failed with, its events are tried one by one
            self._batch.forget_triggers()
            _log.warning("dispatch.batch_failed", error=exc, reason="taking it apart to find the event at fault")
            return await self._one_by_one()
        await self._committed(decided)
        return decided.outcome

    async def _in_order(self) -> DecidedBatch:
        """One batch. Batches are decided side by side, unless one is limited: then whoever came first goes first, so it
        is claimed anew, behind all that others are deciding. Where that was so, the next waits for its turn at once."""
        if not self._takes_turn:
            try:
                return await self._database.run(partial(self._oldest, has_turn=False))
            except OutOfTurn:
                self._takes_turn = True
        return await self._database.run(partial(self._oldest, has_turn=True))

    @property
    def has_more(self) -> bool:
        """Whether the last batch was full. If not, whatever came since is announced, or found by the next look."""
        return self._has_more

    @property
    def is_behind(self) -> bool:
        """Whether a second batch may be decided at the same time: there is more, and nothing limited the last one, so
        that the order does not matter."""
        return self._has_more and self._is_plain

    async def _committed(self, decided: DecidedBatch) -> None:
        failpoints.hit("dispatch.after_commit")
        if decided.delivered.claimed:
            self._batch.begin(decided.delivered)
            await asyncio.sleep(0)  # the runs begin before anything is told about them
        if decided.outcome.events:
            if self._most < self._batch_size and not _took_long(decided.delivered):
                self._most = min(self._batch_size, self._most * 2)
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
        limit = max(1, min(self._most, int(MAX_DELIVERIES / self._fan_out)))
        if has_turn:
            await locks.take_turn(connection, limit)
        newcomers, now = await events.claim_inbox(connection, limit)
        self._has_more = len(newcomers) == limit
        if now is None:
            return DecidedBatch()
        failpoints.hit("dispatch.after_claim")
        return await _traced(connection, newcomers, partial(self._pass, connection, now, has_turn))

    async def _pass(
        self, connection: Connection, now: datetime, has_turn: bool, newcomers: Sequence[Event]
    ) -> DecidedBatch:
        # Where no source had any state last time, none is expected; the statement that launches makes sure.
        matched = await self._batch.match(newcomers) if self._is_calm else None
        is_late = any(event.ttl_ms is not None and gate.is_expired(event, now) for event in newcomers)
        if matched is not None and matched.is_plain and not is_late:
            self._is_plain = True
            if self._has_more:
                self._after_full()
            decided = await self._launch(connection, now, matched)
            if decided is not None:
                self._takes_turn = False
                return decided
        self._is_plain = False
        return await self._decide(connection, newcomers, matched, has_turn=has_turn)

    async def _launch(self, connection: Connection, now: datetime, matched: MatchedBatch) -> DecidedBatch | None:
        """The short way, when nothing limits or holds the batch; None: it must be decided."""
        failpoints.hit("dispatch.after_gate")
        failpoints.hit("dispatch.after_match")
        delivered = await self._batch.launch(connection, now, matched)
        if delivered is None:
            return None
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
    ) -> DecidedBatch:
        gates = await gate.open_shared(connection, (event.source for event in newcomers))
        self._is_calm = not gates.sources
        verdict = gate.decide(gates, newcomers)
        failpoints.hit("dispatch.after_gate")
        matched = await self._batch.match_at(connection, gates, verdict.admitted, matched)
        is_ordered = matched.is_limited or bool(verdict.held)
        if is_ordered and not has_turn and not await locks.is_in_turn(connection, newcomers[-1].ingress_sequence):
            raise OutOfTurn
        self._takes_turn &= is_ordered
        delivered = await self._batch.deliver(connection, gates, verdict.admitted, matched)
        waiting = [*verdict.held, *verdict.expired]
        await ingress_retries.hold(connection, waiting)
        await decisions.insert(connection, [_recorded(retry) for retry in waiting])
        await gate.close_gates(connection, gates)
        seen = batch.measure(
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
        told: dict[uuid.UUID, str] = {event.id: event.correlation_id for event in newcomers} if waiting else {}
        return DecidedBatch(outcome, verdict.held, delivered, verdict.expired, told)

    async def _one_by_one(self) -> DispatchCounts:
        """The oldest events, each in a transaction of its own; one that still fails goes to the dead letters."""
        async with self._database.connection() as connection:
            sequences = await events.list_inbox(connection, self._batch_size)
        self._has_more = True
        total = DispatchCounts()
        for sequence in sequences:
            try:
                decided = await self._single_in_order(sequence)
                await self._committed(decided)
                one = decided.outcome
            except Unavailable:
                raise
            except Exception as exc:  # noqa: BLE001 - whatever it is, this event goes to the dead letters and the others continue
                one = await self._quarantine(sequence, exc)
            total = DispatchCounts(*(a + b for a, b in zip(total, one, strict=True)))
        return total

    async def _single_in_order(self, sequence: int) -> DecidedBatch:
        try:
            return await self._database.run(partial(self._single, sequence=sequence, has_turn=False))
        except OutOfTurn:
            return await self._database.run(partial(self._single, sequence=sequence, has_turn=True))

    async def _single(self, connection: Connection, sequence: int, has_turn: bool) -> DecidedBatch:
        if has_turn:
            await locks.take_turn(connection, self._batch_size)
            if await events.list_inbox(connection, 1) != [sequence]:
                return DecidedBatch()  # who came before was let go of undecided, or it is decided
        claimed = await events.claim_inbox_one(connection, sequence)
        if not claimed:
            return DecidedBatch()
        await locks.share(connection, [event.source for event in claimed])
        return await _traced(connection, claimed, partial(self._decide, connection, has_turn=has_turn))

    async def _quarantine(self, sequence: int, exc: Exception) -> DispatchCounts:
        reason = f"{type(exc).__name__}: {exc}"[:1000]
        buried = await self._database.run(partial(self._bury, sequence=sequence, reason=reason))
        if buried is not None:
            _log.error("event.quarantined", event_id=buried.event_id, correlation_id=buried.correlation_id,
                       source=buried.source, reason=reason)  # fmt: skip
        return DispatchCounts(events=1, quarantined=int(buried is not None))

    async def _bury(self, connection: Connection, sequence: int, reason: str) -> Quarantined | None:
        buried = await events.quarantine(connection, sequence, reason)
        if buried is not None:  # a failure of its source
            gates = await gate.open_gates(connection, [buried.source])
            await self._batch.record_failure(connection, gates, buried.source)
            await gate.close_gates(connection, gates)
        return buried


async def _traced(
    connection: Connection, newcomers: Sequence[Event], decide: Callable[[Sequence[Event]], Awaitable[DecidedBatch]]
) -> DecidedBatch:
    """Decide, and when tracing is on, store the traces that begin here, so that whoever goes on continues them."""
    if not traces.is_on:
        return await decide(newcomers)
    spans = EventSpans(newcomers)
    decided = await decide(spans.events)
    await events.set_traceparents(connection, spans.started)
    return decided._replace(spans=spans)


def _took_long(delivered: Delivered) -> bool:
    """Whether a batch of twice the size might take too long to match."""
    began, ended = delivered.matching_ns or (0, 0)
    return (ended - began) / 1e9 > LONGEST_SECONDS / 4


def _recorded(retry: IngressRetry) -> NewDecision:
    decision = "held" if retry.retry_state == "scheduled" else "expired"
    return NewDecision(
        retry.event_id, None, "gate", decision, retry.last_error, retry.next_attempt_at, retry.attempts or None
    )
