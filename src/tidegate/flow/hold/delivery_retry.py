"""Delivery retry: due deliveries are decided again by the event and the trigger as they are now.

A waiting delivery counts against no limit: throttles count launches, concurrency counts unfinished runs. A batch takes
only as many as the throttle has room for, so that late workers cannot exceed it. When there is no room and none comes
soon, it requests a replan of the trigger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from tidegate import failpoints
from tidegate.clock import epoch_ns
from tidegate.errors import Unavailable
from tidegate.flow import trigger_backlog as backlog
from tidegate.flow.decide import deliver, delivery_state
from tidegate.flow.decide.budgets import BUDGET
from tidegate.flow.decide.deliver import Candidate
from tidegate.flow.decide.match import Matcher
from tidegate.flow.decide.one_by_one import error_text, one_by_one
from tidegate.flow.decide.reporting import held_line, log_trigger_moves, report_deliveries, trigger_name
from tidegate.flow.decide.spans import record_deliveries
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.flow.hold import budget_lines, closing
from tidegate.flow.hold.delivery_check import DeliveryFacts, claimed_run, recheck
from tidegate.flow.run.finish import Gates
from tidegate.model.event import Event
from tidegate.model.ids import DeliveryId, EventId, RunId, TriggerId
from tidegate.model.retry import TRIGGER_RETRY, RetryPolicy
from tidegate.model.run import ClaimedRun
from tidegate.model.source import TRIGGER_BREAKER, BreakerPolicy, room_soon
from tidegate.model.trigger_gate import TriggerMove
from tidegate.store import budgets, decisions, deliveries, events, locks, sources, totals, trigger_gates, windows
from tidegate.store import children as run_children
from tidegate.store.budgets import Line
from tidegate.store.db import Connection, Database
from tidegate.store.deliveries import NOBODY, Claim, Decided, DueDelivery, Taken
from tidegate.store.locks import Unlocked
from tidegate.store.totals import BatchTotals
from tidegate.store.trigger_gates import NextInLine, Slots
from tidegate.telemetry import metrics, traces
from tidegate.telemetry.logs import logger

MAX_TRIGGERS = 50
# Reasons that last until something else ends; still waiting for it is no new decision.
STILL = ("concurrency", BUDGET)
NO_LINES: set[Line] = set()
# At most this many deliveries that change from a concurrency slot's line to the throttle's do so without a replan.
MAX_WITHOUT_REPLAN = 3

_log = logger("retry")


class DeliveryTurn(NamedTuple):
    """What one pass over the due deliveries did; `room_at` is when the throttle has room for those that were
    refused."""

    due: int = 0
    launched: int = 0
    claimed: Sequence[tuple[ClaimedRun, Event]] = ()
    woken: int = 0
    decided: Sequence[Decided] = ()
    names: Mapping[TriggerId, str] = MappingProxyType({})
    moves: Sequence[TriggerMove] = ()
    replanned: tuple[TriggerId, ...] = ()
    room_at: datetime | None = None
    now: datetime | None = None
    events: Mapping[EventId, Event] = MappingProxyType({})
    began_ns: int = 0
    left: backlog.LeftBacklogs = backlog.NO_POLICY


class DeliveryRetry:
    """Launches due deliveries, or holds them again; `after_hold` is called with those after the commit."""

    def __init__(
        self,
        database: Database,
        *,
        batch_size: int,
        after_launch: Callable[[], None],
        after_hold: Callable[[Sequence[Decided]], None] = lambda _: None,
        after_plan: Callable[[], None] = lambda: None,
        after_wake: Callable[[], None] = lambda: None,
        matcher: Matcher | None = None,
        breaker: BreakerPolicy = TRIGGER_BREAKER,
        policy: RetryPolicy = TRIGGER_RETRY,
    ) -> None:
        self._database = database
        self._batch_size = batch_size
        self._after_launch = after_launch
        self._after_hold = after_hold
        self._after_plan = after_plan
        self._after_wake = after_wake
        self._matcher = matcher or Matcher()
        self._breaker = breaker
        self._policy = policy

    async def run_once(self) -> DeliveryTurn:
        """One batch of due deliveries."""
        due = await self._due()
        if not due:
            return DeliveryTurn()
        try:
            turn = await self._locking(due)
        except Unavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever the batch failed with, its deliveries are processed one by one
            _log.warning(
                "retry.batch_failed",
                error=exc,
                reason="processing its deliveries one by one to isolate the failing one",
            )
            return await self._one_by_one(due)
        self.committed(turn)
        return turn

    async def _locking(self, due: Sequence[DueDelivery], *, are_named: bool = False) -> DeliveryTurn:
        """A turn; repeated when it needs the lock of a trigger that it has not locked."""
        always: frozenset[TriggerId] = frozenset()
        while True:
            try:
                return await self._database.run(partial(self._turn, due=due, always=always, are_named=are_named))
            except Unlocked as exc:
                always |= exc.trigger_ids

    async def next_due_seconds(self) -> float | None:
        """Seconds until the next delivery is due, or None when none waits."""
        async with self._database.connection() as connection:
            return await deliveries.next_due_seconds(connection)

    async def fill(self, connection: Connection, gates: Gates, line: NextInLine, claim: Claim) -> DeliveryTurn:
        """Decide deliveries for which a slot has just become free, in the transaction that freed it: it has locked them
        and their triggers, and shares every source's advisory lock. Call `committed` after the commit."""
        index = await self._matcher.at(connection, line.registry_version)
        names = {name for locked in gates.values() for name in locked.budgets}
        held = await budgets.lock(connection, names) if names else {}  # the caller holds them already
        facts = DeliveryFacts(line.now, index, gates, line.paused_sources, frozenset(gates), held)
        return await self._decide(connection, facts, line.taken, line.slots, claim)

    async def _due(self) -> list[DueDelivery]:
        async with self._database.connection() as connection:
            triggers = await deliveries.due_triggers(connection, MAX_TRIGGERS)
            if not triggers:
                return []
            return await deliveries.list_due(connection, triggers, max(1, self._batch_size // len(triggers)))

    def committed(self, turn: DeliveryTurn) -> None:
        """Count, log and announce, after the commit, what was decided."""
        failpoints.hit("delivery_retry.after_commit")
        metrics.DELIVERY_RETRIES.labels("due").inc(turn.due)
        report_deliveries(turn.decided, turn.names, are_newcomers=False)
        log_trigger_moves(turn.moves)
        if traces.is_on:
            record_deliveries(turn.decided, turn.names, turn.events, turn.began_ns, epoch_ns())
        if turn.launched > len(turn.claimed):
            self._after_launch()
        if held := [d for d in turn.decided if d.retry_state == "scheduled"]:
            self._after_hold(held)
        backlog.report(turn.left, turn.decided, turn.names)
        if turn.woken or turn.left:
            self._after_wake()
        if turn.replanned or turn.moves:
            self._after_plan()

    async def _turn(
        self, connection: Connection, due: Sequence[DueDelivery], always: frozenset[TriggerId], are_named: bool
    ) -> DeliveryTurn:
        facts = await self._facts(connection, due, always)
        if not are_named:
            due = await self._due_now(connection, facts, due)
            due = await budget_lines.with_heads(connection, facts, due, self._batch_size)
        taken = await deliveries.take(connection, await self._with_room(connection, facts, due), facts.now)
        return await self._decide(connection, facts, taken, visited=budget_lines.lines(due))

    async def _facts(
        self, connection: Connection, due: Sequence[DueDelivery], always: frozenset[TriggerId]
    ) -> DeliveryFacts:
        names = sorted({one.source for one in due if one.source})
        if budget_lines.lines(due):
            await locks.share_all(connection)  # who is first in line is known only under the budget's lock
        else:
            await locks.share(connection, names)
        now, version = await locks.moment(connection)
        index = await self._matcher.at(connection, version)
        paused = await sources.paused(connection, names)
        wanted = {one.trigger_id for one in due} | always
        limited = {t for t in wanted if (found := index.get(t)) is not None and found.trigger.is_limited} | always
        gates = await trigger_gates.lock(connection, always=limited, others=wanted - limited)
        used = {name for t in wanted if (found := index.get(t)) is not None for name in found.trigger.budgets}
        used |= {one.budget for one in due if one.budget is not None}
        held = await budgets.lock(connection, used) if used else {}
        return DeliveryFacts(
            await locks.now(connection) if gates else now, index, gates, paused, frozenset(wanted), held
        )  # fmt: skip

    async def _due_now(
        self, connection: Connection, facts: DeliveryFacts, due: Sequence[DueDelivery]
    ) -> list[DueDelivery]:
        """The due deliveries as they are now that their triggers are locked: an earlier arrival may have become due
        meanwhile. A trigger's deliveries end before the first of a source that this transaction does not share."""
        if not facts.gates:
            return list(due)
        of_each = max(Counter(one.trigger_id for one in due).values())
        shared, has_lines = {one.source for one in due}, bool(budget_lines.lines(due))
        found = [one for one in due if one.trigger_id not in facts.gates]
        cut_off: set[TriggerId] = set()
        for one in await deliveries.list_due(connection, list(facts.gates), of_each, facts.now):
            if one.source not in shared and not has_lines:
                cut_off.add(one.trigger_id)
            if one.trigger_id not in cut_off:
                found.append(one)
        return found

    async def _decide(
        self,
        connection: Connection,
        facts: DeliveryFacts,
        taken: Sequence[Taken],
        slots: dict[tuple[TriggerId, str], Slots] | None = None,
        claim: Claim = NOBODY,
        visited: set[Line] = NO_LINES,
    ) -> DeliveryTurn:
        began_ns = epoch_ns()
        found = await events.get_many(connection, {row.event_id for row in taken})
        children = {RunId(row.id): one.step_id for row in taken if (one := found[row.event_id].child_of) is not None}
        if children:
            facts.stopped.update(await run_children.list_stopped(connection, children))
        leaders = [row for row in taken if row.window_id is not None]
        closed = await closing.close(connection, facts, leaders, found) if leaders else {}
        # A slot that a run's end has freed is filled in its transaction, however long it takes.
        candidates, decided = await _recheck(facts, taken, found, closed, is_bounded=not slots)
        state = await delivery_state.load_state(
            connection,
            candidates,
            policy=self._policy,
            now=facts.now,
            are_newcomers=False,
            gates=facts.gates,
            slots=slots,
            locked_budgets=facts.budgets,
        )
        decided += deliver.decide(state, candidates, are_newcomers=False)
        # The run of a window needs its events, which whoever claims it reads.
        launched = await deliveries.settle(connection, decided, state.now, NOBODY if leaders else claim)
        await windows.follow(connection, [row.id for row in leaders], state.now)
        left = await backlog.leave(connection, state, candidates)
        woken = await self._wake_next(connection, taken, decided)
        await _record(connection, taken, decided, state.now)
        moves = await delivery_state.save_state(connection, state, candidates, decided, breaker=self._breaker)
        if visited:
            await budget_lines.nudge(connection, facts, state.budgets, visited)
        await totals.add(connection, BatchTotals(delivery_state.count(decided, are_newcomers=False)))
        failpoints.hit("delivery_retry.before_commit")
        return DeliveryTurn(
            due=len(taken),
            launched=len(launched),
            claimed=[
                (claimed_run(d, parameters, facts), found[d.event_id])
                for d in decided
                if (parameters := delivery_state.claimed_with(d, launched)) is not None
            ],
            woken=woken,
            decided=decided,
            names={c.trigger_id: trigger_name(c.trigger) for c in candidates},
            moves=moves,
            replanned=tuple(facts.replanned),
            room_at=facts.room_at,
            now=state.now,
            events=found,
            began_ns=began_ns,
            left=left,
        )

    async def _with_room(
        self, connection: Connection, facts: DeliveryFacts, due: Sequence[DueDelivery]
    ) -> list[DeliveryId]:
        """The due deliveries that may be taken now; for triggers without room, a replan is requested if needed."""
        by_trigger: dict[TriggerId, list[DueDelivery]] = {}
        for one in due:
            by_trigger.setdefault(one.trigger_id, []).append(one)
        chosen: list[DeliveryId] = []
        for trigger_id, mine in by_trigger.items():
            locked = facts.gates.get(trigger_id)
            if locked is not None and locked.has_backlog and locked.gate.room(facts.now) == 0:
                # Whether there is room for them to wait is decided with them.
                chosen += [one.id for one in mine if one.reason == "replay"]
                mine = [one for one in mine if one.reason != "replay"]  # noqa: PLW2901
                if not mine:
                    continue
            ids = [one.id for one in mine]
            if locked is None:
                chosen += ids
            elif not locked.is_replanning:
                room = locked.gate.room(facts.now)
                if room != 0:
                    chosen += ids if room is None else ids[:room]
                elif opens := room_soon(locked.gate, facts.now):
                    facts.room_at = min(facts.room_at, opens) if facts.room_at else opens
                elif _need_no_replan(mine) and locked.gate.hold(facts.now) is None:
                    chosen += ids  # they join the throttle's line; not worth a replan of all that wait
                else:
                    await trigger_gates.begin_plan(connection, trigger_id, facts.now)
                    locked.gate.forget_plan()
                    facts.replanned.append(trigger_id)
        return chosen

    async def _wake_next(self, connection: Connection, taken: Sequence[Taken], decided: Sequence[Decided]) -> int:
        """Wake the next in line for slots that were offered to deliveries that did not use them; how many."""
        used = {d.id for d in decided if d.status == "launched" or d.reason == "concurrency"}
        return await trigger_gates.wake(
            connection,
            {(r.trigger_id, r.concurrency_key or "") for r in taken if r.reason == "concurrency" and r.id not in used},
        )

    async def _one_by_one(self, due: Sequence[DueDelivery]) -> DeliveryTurn:
        """The due deliveries, each in its own transaction; one that still fails is dead-lettered."""
        return DeliveryTurn(due=len(await one_by_one(due, self._retry_one, self._fail)))

    async def _retry_one(self, one: DueDelivery) -> None:
        self.committed(await self._locking([one], are_named=True))

    async def _fail(self, one: DueDelivery, error: Exception) -> None:
        reason = error_text(error)
        for row, correlation_id in await self._database.run(partial(self._dead_letter, one=one, reason=reason)):
            metrics.DELIVERY_RETRIES.labels("exhausted").inc()
            _log.error(
                "delivery.failed", delivery_id=row.id, event_id=row.event_id, trigger_id=row.trigger_id,
                source=row.source, correlation_id=correlation_id, attempt=row.retry_attempts, reason=reason,
            )  # fmt: skip

    async def _dead_letter(
        self, connection: Connection, one: DueDelivery, reason: str
    ) -> list[tuple[Taken, str | None]]:
        """Dead-letter the delivery if it is still due; the row and its correlation id."""
        await trigger_gates.lock(connection, always=[one.trigger_id])
        lines = budget_lines.lines([one])
        await budgets.lock(connection, [name for name, _ in lines])
        now = await locks.now(connection)
        found = []
        for row in await deliveries.take(connection, [one.id], now):
            failed = deliveries.Moved(
                row.id, "failed", "exhausted", None, row.retry_attempts, "failed", reason, {"reason": "failed"}, 0
            )
            await deliveries.move(connection, [failed])
            await windows.follow(connection, [row.id], now)
            await deliveries.dead_letter(connection, [(row.id, row.event_id, reason, {"attempts": row.retry_attempts})])
            line = decisions.NewDecision(row.event_id, now, "deliver", "failed", reason, None, row.retry_attempts,
                                      trigger_id=row.trigger_id)  # fmt: skip
            await decisions.insert(connection, [line])
            await trigger_gates.wake(connection, [(row.trigger_id, row.concurrency_key or "")])
            await budgets.nudge(connection, dict.fromkeys(lines, now))
            # The event itself is not read: an unreadable event may be the cause of the failure.
            found.append((row, await events.correlation_id(connection, row.event_id)))
        return found


async def _recheck(
    facts: DeliveryFacts,
    taken: Sequence[Taken],
    found: Mapping[EventId, Event],
    closed: Mapping[DeliveryId, closing.Closed],
    *,
    is_bounded: bool,
) -> tuple[list[Candidate], list[Decided]]:
    """The deliveries that still stand, and the decisions about the others."""
    candidates: list[Candidate] = []
    decided: list[Decided] = []
    time_slice = TimeSlice()
    for number, row in enumerate(taken):
        judged = recheck(facts, row, found[row.event_id])
        if row.window_id is not None:
            judged = closing.with_arguments(judged, closed.get(row.id))
        candidates.append(judged) if isinstance(judged, Candidate) else decided.append(judged)
        if time_slice.is_over:
            await time_slice.next()
            if is_bounded:
                time_slice.check(number + 1, len(taken))
    return candidates, decided


async def _record(connection: Connection, taken: Sequence[Taken], decided: Sequence[Decided], now: datetime) -> None:
    """The dead letters and the lines of the events' stories. Still waiting for a slot is no new decision."""
    await deliveries.dead_letter(connection, delivery_state.dead_letters(decided))
    before = {row.id: row.reason for row in taken}
    still = {d.id for d in decided if d.retry_state == "scheduled" and d.reason in STILL and d.reason == before[d.id]}
    news = [d for d in decided if d.id not in still]
    await decisions.insert(connection, [held_line(d, now) for d in news])


def _need_no_replan(mine: Sequence[DueDelivery]) -> bool:
    """Whether few deliveries join the throttle's line, all for the first time: they waited for a slot, a
    budget, or for their window to close."""
    return len(mine) <= MAX_WITHOUT_REPLAN and all(one.reason in (*STILL, "window") for one in mine)
