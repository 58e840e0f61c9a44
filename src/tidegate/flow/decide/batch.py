"""Batch: what happens to admitted events, new or retried: match triggers, decide deliveries, create runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from tidegate import failpoints
from tidegate.clock import epoch_ns
from tidegate.flow import trigger_backlog as backlog
from tidegate.flow.decide import deliver, delivery_state, gate, waits
from tidegate.flow.decide.deliver import Candidate, DeliveryState
from tidegate.flow.decide.delivery_state import count as count_triggers
from tidegate.flow.decide.delivery_state import load_state, save_state
from tidegate.flow.decide.gate import LockedGates
from tidegate.flow.decide.match import Filtered, Match, Matcher, match
from tidegate.flow.decide.reporting import (
    held_line,
    lags,
    log_nothing,
    log_source_moves,
    log_trigger_moves,
    measure,
    report_deliveries,
    trigger_name,
)
from tidegate.flow.decide.source_failures import SourceMove
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.flow.decide.waits import Met
from tidegate.model.event import Event
from tidegate.model.ids import EventId, RunId, TriggerId, delivery_id
from tidegate.model.retry import TRIGGER_RETRY, RetryPolicy
from tidegate.model.run import ClaimedRun
from tidegate.model.source import TRIGGER_BREAKER, BreakerPolicy, SourceBreakerPolicy
from tidegate.model.trigger_gate import TriggerMove
from tidegate.model.trigger_index import TriggerIndex
from tidegate.model.window import Window
from tidegate.store import decisions, deliveries, event_replays, totals, trigger_rates, windows
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.store.deliveries import NOBODY, Claim, Created, Decided
from tidegate.store.locks import DEFAULT
from tidegate.store.sources import SourceMetrics
from tidegate.store.totals import BatchTotals, TriggerTotals
from tidegate.telemetry import metrics

# Of the triggers that an event did not fire, at most MAX_FILTERED are recorded with the reason.
MAX_FILTERED = 20
NOBODY_WAITS = Met()


class Delivered(NamedTuple):
    """The outcome for admitted events: `failures` counted by source, `moves` and `source_moves` of breakers,
    `matching_ns` the start and end of matching, `lags` the seconds since receipt by source, `met` the runs that waited
    for the `events`, `full` windows that are due now, `superseded` runs to be cancelled, `left` what left backlogs."""

    launched: int = 0
    failed: int = 0
    failures: Mapping[str, int] = {}
    decided: Sequence[Decided] = ()
    filtered: Sequence[Filtered] = ()
    names: Mapping[TriggerId, str] = {}
    moves: Sequence[TriggerMove] = ()
    claimed: Sequence[tuple[ClaimedRun, Event]] = ()
    matching_ns: tuple[int, int] | None = None
    lags: Mapping[str, Sequence[float]] = {}
    source_moves: Sequence[SourceMove] = ()
    met: Met = NOBODY_WAITS
    events: Sequence[Event] = ()
    full: Sequence[Window] = ()
    superseded: Collection[RunId] = ()
    left: backlog.LeftBacklogs = backlog.NO_POLICY


NOTHING = Delivered()


class MatchedBatch(NamedTuple):
    """The triggers that events fire, by one version of the trigger registry."""

    triggers: TriggerIndex
    version: int
    events: Sequence[Event]
    candidates: Sequence[Candidate]
    filtered: Sequence[Filtered]
    matching_ns: tuple[int, int]

    @property
    def is_limited(self) -> bool:
        """Whether the order of decisions matters: a fired trigger has a limit."""
        return any(c.trigger.is_limited for c in self.candidates)

    @property
    def is_unrestricted(self) -> bool:
        """Whether only the state of a source or trigger (hold, breaker) could prevent a launch: no candidate has an
        error, an idempotency key or a limited trigger."""
        return not any(
            c.error is not None or c.keys.dedupe_key is not None or c.trigger.is_limited for c in self.candidates
        )

    @property
    def is_counted(self) -> bool:
        """Whether, beside that state, only counts could prevent a launch (a throttle, slots, budgets): no candidate has
        an error or an idempotency key, is collected, or skipped over a rate."""
        return not any(
            c.error is not None or c.keys.dedupe_key is not None or c.window is not None or c.rate is not None
            for c in self.candidates
        )


class Batch:
    """Delivers admitted events inside the caller's transaction. `claim` says which of the new runs this worker claims
    at their creation. After the commit `after_hold` is called with the held deliveries, `after_claim` with the claimed
    runs, `after_wake` when events have made waiting runs due, `after_full` when they have filled windows."""

    def __init__(
        self,
        breaker: SourceBreakerPolicy,
        *,
        matcher: Matcher | None = None,
        trigger_breaker: BreakerPolicy = TRIGGER_BREAKER,
        trigger_retry: RetryPolicy = TRIGGER_RETRY,
        after_hold: Callable[[Sequence[Decided]], None] = lambda _: None,
        claim: Callable[[], Claim] = lambda: NOBODY,
        after_claim: Callable[[Sequence[tuple[ClaimedRun, Event]]], None] = lambda _: None,
        after_wake: Callable[[], None] = lambda: None,
        after_full: Callable[[], None] = lambda: None,
    ) -> None:
        self._matcher = matcher or Matcher()
        self._breaker = breaker
        self._trigger_breaker = trigger_breaker
        self._trigger_retry = trigger_retry
        self._after_hold = after_hold
        self._claim = claim
        self._after_claim = after_claim
        self._after_wake = after_wake
        self._after_full = after_full

    def forget_triggers(self) -> None:
        """Read the triggers again before the next match."""
        self._matcher.forget()

    async def match(self, events: Sequence[Event]) -> MatchedBatch | None:
        """Match against the triggers that this process has loaded; None before the first load."""
        index, version = self._matcher.known
        return None if version < 0 else await _matched(index, version, events)

    async def match_at(
        self, connection: Connection, gates: LockedGates, events: Sequence[Event], matched: MatchedBatch | None = None
    ) -> MatchedBatch:
        """Match against the triggers as they are under this transaction's locks; `matched` is reused if still valid."""
        index = await self._matcher.at(connection, gates.registry_version)
        if matched is None or matched.triggers is not index or len(matched.events) != len(events):
            matched = await _matched(index, gates.registry_version, events)
        return matched

    async def load(self, connection: Connection, gates: LockedGates, candidates: Sequence[Candidate]) -> DeliveryState:
        """What the decisions about new deliveries depend on, under the locks of their triggers and budgets."""
        return await load_state(connection, candidates, policy=self._trigger_retry, now=gates.now)

    async def launch(
        self,
        connection: Connection,
        now: datetime,
        matched: MatchedBatch,
        gates: LockedGates | None = None,
        state: DeliveryState | None = None,
    ) -> Delivered | None:
        """The fast path for a batch that is unrestricted: launch and count everything in one statement. Returns None,
        and launches nothing, when the triggers have changed or a trigger has a state, or a source, or a run waits for
        the events, unless `gates` have admitted the batch: then use `deliver`. `state`: the limits of the triggers, of
        which everything is spent already that the whole batch needs."""
        candidates, filtered, events = matched.candidates, matched.filtered, matched.events
        if state is None:
            decided = list(map(deliver.launched, candidates))
        else:
            slots = (c.keys.concurrency_key if c.trigger.trigger.holds_slots else None for c in candidates)
            decided = list(map(deliver.launched, candidates, slots))
        late = lags(now, events)
        seen = measure(now, newcomers=events, lags=late, throttled=Counter(), dropped=Counter())
        counts = BatchTotals(_count_triggers(decided, filtered), seen)
        stateless = [*(one.source for one in seen), DEFAULT] if gates is None else []
        types = [*{event.type for event in events}] if gates is None else []
        # Runs are locked before the totals, which all workers update.
        met = await _meet(connection, gates, events, now) if gates is not None else NOBODY_WAITS
        if state is not None:
            now = _launched_at(gates, state, events)
        launched = await deliveries.launch_unrestricted(
            connection, decided, now, self._claim(), counts, matched.version, stateless, types
        )
        if launched is None:
            return None
        if state is not None:
            await save_state(connection, state, candidates, decided, breaker=self._trigger_breaker)
        _, source_moves = await self._record_sources(connection, gates, events, decided) if gates else (None, ())
        await decisions.insert(connection, _why_not(filtered, now))
        claimed = _claimed(candidates, decided, launched, now)
        names, took = _names(candidates), matched.matching_ns
        return Delivered(
            len(decided), decided=decided, filtered=filtered, names=names, claimed=claimed, matching_ns=took, lags=late,
            source_moves=source_moves, met=met, events=events,
        )  # fmt: skip

    async def deliver(
        self,
        connection: Connection,
        gates: LockedGates,
        events: Sequence[Event],
        matched: MatchedBatch | None = None,
        state: DeliveryState | None = None,
    ) -> Delivered:
        """The general path: match (unless `matched` is still valid), decide, launch or hold, update the breakers.
        `state`: what was loaded for all candidates."""
        if not events:
            return Delivered()
        matched = await self.match_at(connection, gates, events, matched)
        failpoints.hit("dispatch.after_match")
        candidates, filtered = await _undecided(connection, matched.candidates), matched.filtered
        if state is None or candidates is not matched.candidates:
            state = await self.load(connection, gates, candidates)
        _launched_at(gates, state, events)
        decided = deliver.decide(state, candidates, are_newcomers=True)
        collected = [d for d in decided if d.window_id is not None]
        held = [d for d in decided if d.retry_state == "scheduled" and d.window_id is None]
        final = [d for d in decided if d.retry_state != "scheduled" and d.window_id is None]
        launched = await deliveries.launch(connection, final, state.now, self._claim())
        await deliveries.hold(connection, held, state.now)
        superseded = await self._supersede(connection, state)
        full = await windows.collect(connection, collected, state.windows, state.now)
        left = await backlog.leave(connection, state, candidates)
        await deliveries.dead_letter(connection, delivery_state.dead_letters(final))
        await decisions.insert(connection, [*_why_not(filtered, state.now), *(held_line(d, state.now) for d in held)])
        met = await _meet(connection, gates, events, state.now)
        moves = await save_state(connection, state, candidates, decided, breaker=self._trigger_breaker)
        failures, source_moves = await self._record_sources(connection, gates, events, decided)
        failed = sum(d.status == "failed" for d in decided)
        claimed = _claimed(candidates, decided, launched, state.now)
        names, took, late = _names(candidates), matched.matching_ns, lags(gates.now, events)
        return Delivered(
            len(launched), failed, failures, decided, filtered, names, moves, claimed, took, late, source_moves, met,
            events, full, superseded, left,
        )  # fmt: skip

    async def _supersede(self, connection: Connection, state: DeliveryState) -> Collection[RunId]:
        """New deliveries take the place of what waits or runs; the runs that are to be cancelled."""
        if not state.superseding:
            return ()
        done = await trigger_rates.supersede(connection, state.superseding, state.now)
        await windows.follow(connection, [own_id for own_id, _ in done.skipped], state.now)
        return done.cancelled

    def begin(self, delivered: Delivered) -> None:
        """Start, after the commit, the runs that were claimed at their creation."""
        if delivered.claimed:
            self._after_claim(delivered.claimed)

    def committed(self, delivered: Delivered) -> None:
        """Count and log, after the commit, what was decided."""
        report_deliveries(delivered.decided, delivered.names, are_newcomers=True)
        log_nothing(delivered.events, delivered.decided, delivered.met.meetings)
        log_trigger_moves(delivered.moves)
        log_source_moves(delivered.source_moves)
        for one in delivered.filtered:
            metrics.evaluated(trigger_name(one.trigger), "filtered")
        if delivered.met.meetings:
            waits.report(delivered.met.meetings)
            self._after_wake()
        held = [d for d in delivered.decided if d.retry_state == "scheduled"]
        if held:
            self._after_hold(held)
        if delivered.full or delivered.left:
            self._after_full()
        if delivered.superseded:
            self._after_wake()
        if delivered.left is not backlog.NO_POLICY:
            backlog.report(delivered.left, delivered.decided, delivered.names)

    async def _record_sources(
        self, connection: Connection, gates: LockedGates, events: Sequence[Event], decided: Sequence[Decided]
    ) -> tuple[Counter[str], list[SourceMove]]:
        """Update the sources' breakers: failures by source, and the breakers that moved.

        An event counts as a failure of its source when every delivery failed, and none of them because the trigger
        exceeded its work limit, or because of a budget: both are what an operator wrote, not what the source sent."""
        failed = {d.event_id for d in decided if d.status == "failed"}
        failed -= {d.event_id for d in decided if d.status != "failed" or d.reason in deliver.NO_FAULT_OF_SOURCE}
        failures = Counter(event.source for event in events if event.id in failed)
        last = {d.source: d for d in decided if d.event_id in failed}
        admitted = Counter(event.source for event in events)
        return failures, await self._record(connection, gates, admitted, failures, last)

    async def record_failure(self, connection: Connection, gates: LockedGates, source: str) -> list[SourceMove]:
        """Count an event of the source that could not be processed at all; the breakers that moved, to be logged after
        the commit."""
        moves = await self._record(connection, gates, Counter([source]), Counter([source]), {})
        await count(connection, [SourceMetrics(source=source, total=1, dropped=1, failures=1, last_event_at=gates.now)])
        return moves

    async def _record(
        self,
        connection: Connection,
        gates: LockedGates,
        admitted: Counter[str],
        failures: Counter[str],
        last_failed: Mapping[str, Decided],
    ) -> list[SourceMove]:
        moves = await gate.record(connection, gates, admitted=admitted, failures=failures, policy=self._breaker)
        found = []
        for move in moves:
            by = last_failed.get(move.source)
            found.append(move if by is None else move._replace(
                event_id=by.event_id, correlation_id=by.correlation_id, trigger_id=by.trigger_id))  # fmt: skip
        return found


async def _meet(connection: Connection, gates: LockedGates, events: Sequence[Event], now: datetime) -> Met:
    """Give the events to the runs that wait for them. If the fast path has done so in this transaction, before it found
    that it does not apply, they are not given a second time."""
    if not gates.has_waits:
        return NOBODY_WAITS
    if gates.meetings:
        return Met(True, gates.meetings, [meeting.event for meeting in gates.meetings])
    met = await waits.meet(connection, events, now)
    gates.meetings.extend(met.meetings)
    return Met(met.is_awaited, gates.meetings, met.events)


async def count(connection: Connection, seen: Sequence[SourceMetrics], delivered: Delivered = NOTHING) -> None:
    """Add to the totals of sources and triggers. Call it last in a transaction: all workers update the same rows."""
    found = _count_triggers(delivered.decided, delivered.filtered)
    await totals.add(connection, BatchTotals(backlog.counted(found, delivered.left), seen))


def _count_triggers(decided: Sequence[Decided], filtered: Sequence[Filtered]) -> list[TriggerTotals]:
    return count_triggers(decided, (one.trigger.trigger.id for one in filtered), are_newcomers=True)


def _launched_at(gates: LockedGates | None, state: DeliveryState, events: Sequence[Event]) -> datetime:
    """The time of the launches; the sources' gates count their events then."""
    if gates is not None and state.now > gates.now:
        gate.launched_later(gates, Counter(event.source for event in events), state.now)
    return state.now


async def _undecided(connection: Connection, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The candidates without those of replayed events that their triggers have decided about before. What is collected
    is looked for in any case: a window must not count a delivery twice."""
    replayed = [c.id for c in candidates if c.event.replayed_at is not None or c.window is not None]
    if not replayed:
        return candidates
    known = await event_replays.delivered(connection, replayed)
    return [c for c in candidates if c.id not in known]


async def _matched(index: TriggerIndex, version: int, events: Sequence[Event]) -> MatchedBatch:
    began_ns, time_slice = epoch_ns(), TimeSlice()
    fired, filtered = await match(index, events, time_slice)
    candidates: list[Candidate] = []
    for one in fired:
        candidates.append(_candidate(one))
        if time_slice.is_over:
            await time_slice.next()
            time_slice.check(len({c.event.id for c in candidates}) - 1, len(events))
    return MatchedBatch(index, version, events, candidates, filtered, (began_ns, epoch_ns()))


def _candidate(one: Match) -> Candidate:
    own_id = delivery_id(one.event.id, one.trigger.trigger.id)
    if one.error is not None:
        return Candidate(own_id, one.event, one.trigger, error=one.error, is_too_much_work=one.is_too_much_work)
    return deliver.render(own_id, one.event, one.trigger, one.envelope)


def _names(candidates: Sequence[Candidate]) -> dict[TriggerId, str]:
    triggers = {c.trigger.trigger.id: c.trigger for c in candidates}
    return {trigger_id: trigger_name(trigger) for trigger_id, trigger in triggers.items()}


def _claimed(
    candidates: Sequence[Candidate], decided: Sequence[Decided], launched: Created, now: datetime
) -> list[tuple[ClaimedRun, Event]]:
    return [
        (delivery_state.claimed_run(d, c.trigger, parameters, now), c.event)
        for c, d in zip(candidates, decided, strict=True)
        if (parameters := delivery_state.claimed_with(d, launched)) is not None
    ]


def _why_not(filtered: Sequence[Filtered], now: datetime) -> list[NewDecision]:
    """One decision for each event that some triggers of its type and source did not match, with the reasons."""
    by_event: dict[EventId, list[dict[str, Any]]] = {}
    for event, trigger, reason in filtered:
        found = by_event.setdefault(event.id, [])
        if len(found) < MAX_FILTERED:
            one = trigger.trigger
            found.append({"trigger_id": one.id, "trigger": one.name, "workflow": one.workflow, "version": one.version,
                          "reason": reason})  # fmt: skip
    return [NewDecision(event_id, now, "match", "filtered", detail=detail) for event_id, detail in by_event.items()]
