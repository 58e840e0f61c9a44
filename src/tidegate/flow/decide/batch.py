"""Batch: what new events and retried ones share once the gate has let them pass: match, deliver, create runs."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from tidegate import failpoints
from tidegate.clock import epoch_ns, uuid7
from tidegate.flow.decide import deliver, gate
from tidegate.flow.decide.board import close_board, open_board
from tidegate.flow.decide.board import count as count_triggers
from tidegate.flow.decide.deliver import Candidate
from tidegate.flow.decide.gate import OpenGates
from tidegate.flow.decide.match import Filtered, Match, Matcher, match
from tidegate.flow.decide.reporting import held_line, tell, tell_moves, tell_source_moves, trigger_name
from tidegate.flow.decide.slices import Slices
from tidegate.model.event import Event
from tidegate.model.ids import DeliveryId
from tidegate.model.retry import TRIGGER_RETRY, RetryPolicy
from tidegate.model.run import ClaimedRun
from tidegate.model.source import TRIGGER_BREAKER, BreakerPolicy, SourceBreakerPolicy
from tidegate.model.trigger import TriggerIndex
from tidegate.model.trigger_gate import TriggerMove
from tidegate.store import decisions, deliveries, totals
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.store.deliveries import NOBODY, Claim, Created, Decided
from tidegate.store.sources import SourceMetrics
from tidegate.store.totals import BatchTotals, TriggerTotals
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("dispatch")

# So many of the triggers that an event did not fire are recorded with the reason.
MAX_FILTERED = 20


class Delivered(NamedTuple):
    """What became of the events that passed; `failures` by source, `matching_ns` from when until when they were
    matched, `lags` by source the seconds since their receipt."""

    launched: int = 0
    failed: int = 0
    failures: Mapping[str, int] = {}
    decided: Sequence[Decided] = ()
    filtered: Sequence[Filtered] = ()
    names: Mapping[uuid.UUID, str] = {}
    moves: Sequence[TriggerMove] = ()
    claimed: Sequence[tuple[ClaimedRun, Event]] = ()
    matching_ns: tuple[int, int] | None = None
    lags: Mapping[str, Sequence[float]] = {}


NOTHING = Delivered()


class MatchedBatch(NamedTuple):
    """What events fire by the triggers of a version of the registry."""

    triggers: TriggerIndex
    version: int
    events: Sequence[Event]
    candidates: Sequence[Candidate]
    filtered: Sequence[Filtered]
    matching_ns: tuple[int, int]

    @property
    def is_limited(self) -> bool:
        """Whether the order in which they are decided decides who goes first."""
        return any(c.trigger.trigger.is_limited for c in self.candidates)

    @property
    def is_plain(self) -> bool:
        """Whether nothing but the state of a source or a trigger could keep them from being launched."""
        return not any(
            c.error is not None or c.keys.dedupe_key is not None or c.trigger.trigger.is_limited
            for c in self.candidates
        )


class Batch:
    """Delivers admitted events inside the caller's transaction. `claim` says which runs this worker takes as they are
    created. After the commit `after_hold` hears who waits, `after_claim` gets the runs."""

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
    ) -> None:
        self._matcher = matcher or Matcher()
        self._breaker = breaker
        self._trigger_breaker = trigger_breaker
        self._trigger_retry = trigger_retry
        self._after_hold = after_hold
        self._claim = claim
        self._after_claim = after_claim

    def forget_triggers(self) -> None:
        """Have the triggers read again before anything else is matched."""
        self._matcher.forget()

    async def match(self, events: Sequence[Event]) -> MatchedBatch | None:
        """What the events fire by the triggers as this process knows them; None while it knows none."""
        index, version = self._matcher.known
        return None if version < 0 else await _matched(index, version, events)

    async def match_at(
        self, connection: Connection, gates: OpenGates, events: Sequence[Event], matched: MatchedBatch | None = None
    ) -> MatchedBatch:
        """What the events fire by the triggers as they are under the locks; `matched` again, if it still holds."""
        index = await self._matcher.at(connection, gates.registry_version)
        if matched is None or matched.triggers is not index or len(matched.events) != len(events):
            matched = await _matched(index, gates.registry_version, events)
        return matched

    async def launch(self, connection: Connection, now: datetime, matched: MatchedBatch) -> Delivered | None:
        """Launch and count all that is fired, in one statement; None, and nothing is written, when it finds that the
        triggers have changed or that any of them, or of the sources, has a state. `matched` is plain."""
        candidates, filtered = matched.candidates, matched.filtered
        decided = list(map(deliver.launched, candidates))
        events = matched.events
        late = lags(now, events)
        seen = measure(now, newcomers=events, lags=late, throttled=Counter(), dropped=Counter())
        counts = BatchTotals(_count_triggers(decided, filtered), seen)
        launched = await deliveries.launch_calm(connection, decided, now, self._claim(), counts, matched.version)
        if launched is None:
            return None
        await decisions.insert(connection, _why_not(filtered, now))
        claimed = _claimed(candidates, decided, launched, now)
        names, took = _names(candidates), matched.matching_ns
        return Delivered(
            len(decided), decided=decided, filtered=filtered, names=names, claimed=claimed, matching_ns=took, lags=late
        )

    async def deliver(
        self, connection: Connection, gates: OpenGates, events: Sequence[Event], matched: MatchedBatch | None = None
    ) -> Delivered:
        """Match (or go by what is matched already), decide and launch; the breakers hear how it went."""
        if not events:
            return Delivered()
        matched = await self.match_at(connection, gates, events, matched)
        failpoints.hit("dispatch.after_match")
        candidates, filtered = matched.candidates, matched.filtered
        board = await open_board(connection, candidates, policy=self._trigger_retry, now=gates.now)
        if board.now > gates.now:
            gate.launched_later(gates, Counter(event.source for event in events), board.now)
        decided = deliver.decide(board, candidates, are_newcomers=True)
        held = [d for d in decided if d.retry_state == "scheduled"]
        settled = [d for d in decided if d.retry_state != "scheduled"]
        launched = await deliveries.launch(connection, settled, board.now, self._claim())
        await deliveries.hold(connection, held, board.now)
        await deliveries.bury(connection, deliver.given_up(settled))
        await decisions.insert(connection, [*_why_not(filtered, board.now), *(held_line(d, board.now) for d in held)])
        moves = await close_board(connection, board, candidates, decided, breaker=self._trigger_breaker)
        failures = await self._tell_sources(connection, gates, events, decided)
        failed = sum(d.status == "failed" for d in decided)
        claimed = _claimed(candidates, decided, launched, board.now)
        names, took = _names(candidates), matched.matching_ns
        late = lags(gates.now, events)
        return Delivered(len(launched), failed, failures, decided, filtered, names, moves, claimed, took, late)

    def begin(self, delivered: Delivered) -> None:
        """Begin, after the commit, the runs that were claimed as they were created."""
        if delivered.claimed:
            self._after_claim(delivered.claimed)

    def committed(self, delivered: Delivered) -> None:
        """Count and log, after the commit, what was decided."""
        tell(delivered.decided, delivered.names, are_newcomers=True)
        tell_moves(delivered.moves)
        for one in delivered.filtered:
            metrics.evaluated(trigger_name(one.trigger), "filtered")
        held = [d for d in delivered.decided if d.retry_state == "scheduled"]
        if held:
            self._after_hold(held)

    async def _tell_sources(
        self, connection: Connection, gates: OpenGates, events: Sequence[Event], decided: Sequence[Decided]
    ) -> Counter[str]:
        """An event of which every delivery failed is a failure of its source; one bad trigger among others is not, nor
        one that asks for too much."""
        failed = {d.event_id for d in decided if d.status == "failed"}
        failed -= {d.event_id for d in decided if d.status != "failed" or d.reason == deliver.OVER_BUDGET}
        failures = Counter(event.source for event in events if event.id in failed)
        last = {d.source: d for d in decided if d.event_id in failed}
        await self._record(connection, gates, Counter(event.source for event in events), failures, last)
        return failures

    async def record_failure(self, connection: Connection, gates: OpenGates, source: str) -> None:
        """An event of the source could not be processed at all."""
        await self._record(connection, gates, Counter([source]), Counter([source]), {})
        await count(connection, [SourceMetrics(source=source, total=1, dropped=1, failures=1, last_event_at=gates.now)])

    async def _record(
        self,
        connection: Connection,
        gates: OpenGates,
        admitted: Counter[str],
        failures: Counter[str],
        blamed: Mapping[str, Decided],
    ) -> None:
        moves = await gate.record(connection, gates, admitted=admitted, failures=failures, policy=self._breaker)
        told = []
        for move in moves:
            by = blamed.get(move.source)
            told.append(move if by is None else move._replace(
                event_id=by.event_id, correlation_id=by.correlation_id, trigger_id=by.trigger_id))  # fmt: skip
        tell_source_moves(told)


def measure(
    now: datetime,
    *,
    newcomers: Sequence[Event],
    lags: Mapping[str, Sequence[float]],
    throttled: Counter[str],
    dropped: Counter[str],
    failures: Mapping[str, int] | None = None,
) -> list[SourceMetrics]:
    """What a batch saw of each source, for the totals; `lags` are of those that passed."""
    total = Counter(event.source for event in newcomers)
    return [
        SourceMetrics(
            source=source,
            total=total[source],
            passed=len(lags.get(source, ())),
            throttled=throttled[source],
            dropped=dropped[source],
            failures=(failures or {}).get(source, 0),
            total_lag_ms=round(sum(lags.get(source, ())) * 1000),
            last_lag_ms=round(lags[source][-1] * 1000) if source in lags else 0,
            max_lag_ms=round(max(lags.get(source, (0.0,))) * 1000),
            last_event_at=now,
        )
        for source in sorted({*total, *lags, *throttled, *dropped})
    ]


def lags(now: datetime, passed: Sequence[Event]) -> dict[str, list[float]]:
    """The seconds since the receipt of each event that passed, by source."""
    found: dict[str, list[float]] = {}
    for event in passed:
        seconds = (now - event.counted_from).total_seconds()
        found.setdefault(event.source, []).append(seconds if seconds > 0 else 0.0)
    return found


async def count(connection: Connection, seen: Sequence[SourceMetrics], delivered: Delivered = NOTHING) -> None:
    """Add to the totals of sources and triggers; last in a transaction, since the rows are shared."""
    await totals.add(connection, BatchTotals(_count_triggers(delivered.decided, delivered.filtered), seen))


def _count_triggers(decided: Sequence[Decided], filtered: Sequence[Filtered]) -> list[TriggerTotals]:
    return count_triggers(decided, (one.trigger.trigger.id for one in filtered), are_newcomers=True)


async def _matched(index: TriggerIndex, version: int, events: Sequence[Event]) -> MatchedBatch:
    began_ns, slices = epoch_ns(), Slices()
    fired, filtered = await match(index, events, slices)
    candidates: list[Candidate] = []
    for one in fired:
        candidates.append(_candidate(one))
        if slices.is_over:
            await slices.next()
            slices.check(len({c.event.id for c in candidates}) - 1, len(events))
    return MatchedBatch(index, version, events, candidates, filtered, (began_ns, epoch_ns()))


def _names(candidates: Sequence[Candidate]) -> dict[uuid.UUID, str]:
    triggers = {c.trigger.trigger.id: c.trigger for c in candidates}
    return {trigger_id: trigger_name(trigger) for trigger_id, trigger in triggers.items()}


def _claimed(
    candidates: Sequence[Candidate], decided: Sequence[Decided], launched: Created, now: datetime
) -> list[tuple[ClaimedRun, Event]]:
    return [
        (deliver.claimed_run(d, c.trigger, parameters, now), c.event)
        for c, d in zip(candidates, decided, strict=True)
        if (parameters := deliver.claimed_with(d, launched)) is not None
    ]


def _candidate(one: Match) -> Candidate:
    if one.error is not None:
        return Candidate(
            DeliveryId(uuid7()), one.event, one.trigger, error=one.error, is_over_budget=one.is_over_budget
        )
    return deliver.render(DeliveryId(uuid7()), one.event, one.trigger, one.envelope)


def _why_not(filtered: Sequence[Filtered], now: datetime) -> list[NewDecision]:
    """One line for each event that some of its type's triggers did not take."""
    by_event: dict[uuid.UUID, list[dict[str, Any]]] = {}
    for event, trigger, reason in filtered:
        found = by_event.setdefault(event.id, [])
        if len(found) < MAX_FILTERED:
            one = trigger.trigger
            found.append({"trigger_id": one.id, "trigger": one.name, "workflow": one.workflow, "version": one.version,
                          "reason": reason})  # fmt: skip
    return [NewDecision(event_id, now, "match", "filtered", detail=detail) for event_id, detail in by_event.items()]
