"""Delivery retry: deliveries whose time has come. Event and trigger are read again, predicates and limits asked again.

Its own earlier record counts nowhere: throttles count launches, concurrency counts unfinished runs. Only as many are
taken as the throttle has room for, so late workers cannot bunch over it; when there is none and none comes soon, the
trigger's deliveries get new times: `delivery_replan`.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from tidegate import failpoints
from tidegate.clock import epoch_ns
from tidegate.errors import Unavailable
from tidegate.flow.decide import board as boards
from tidegate.flow.decide import deliver, gate
from tidegate.flow.decide.deliver import Candidate
from tidegate.flow.decide.match import Matcher
from tidegate.flow.decide.reporting import held_line, tell, tell_moves, trigger_name
from tidegate.flow.decide.slices import Slices
from tidegate.flow.decide.spans import record_deliveries
from tidegate.flow.run.finish import Gates
from tidegate.model.budget import OverBudget
from tidegate.model.delivery import DeliveryStatus
from tidegate.model.event import Event
from tidegate.model.retry import TRIGGER_RETRY, RetryPolicy
from tidegate.model.run import ClaimedRun
from tidegate.model.source import OPEN_PAUSE, TRIGGER_BREAKER, BreakerPolicy, Hold, room_soon
from tidegate.model.trigger import TriggerIndex
from tidegate.model.trigger_gate import TriggerMove
from tidegate.store import decisions, deliveries, events, locks, sources, totals, trigger_gates
from tidegate.store.db import Connection, Database
from tidegate.store.deliveries import NOBODY, Claim, Decided, DueDelivery, Taken
from tidegate.store.locks import Unlocked
from tidegate.store.totals import BatchTotals
from tidegate.store.trigger_gates import LockedTrigger, NextInLine, Slots
from tidegate.telemetry import metrics, traces
from tidegate.telemetry.logs import logger

MAX_TRIGGERS = 50
FEW = 3
UNREADABLE = timedelta(seconds=30)

_log = logger("retry")


class DeliveryTurn(NamedTuple):
    """What one look at the due deliveries did; `look_at` is when room returns for those that found none."""

    due: int = 0
    launched: int = 0
    claimed: Sequence[tuple[ClaimedRun, Event]] = ()
    woken: int = 0
    decided: Sequence[Decided] = ()
    names: Mapping[uuid.UUID, str] = MappingProxyType({})
    moves: Sequence[TriggerMove] = ()
    replanned: tuple[uuid.UUID, ...] = ()
    look_at: datetime | None = None
    now: datetime | None = None
    events: Mapping[uuid.UUID, Event] = MappingProxyType({})
    began_ns: int = 0


@dataclass(slots=True)
class _Look:
    """One transaction's view: what it may decide by, under the locks."""

    now: datetime
    index: TriggerIndex
    gates: dict[uuid.UUID, LockedTrigger]
    paused_sources: dict[str, Hold]
    replanned: list[uuid.UUID] = field(default_factory=list)
    look_at: datetime | None = None


class DeliveryRetry:
    """Launches deliveries whose time has come, or gives them another; `after_hold` hears of those after the commit."""

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
        except Exception as exc:  # noqa: BLE001 - whatever the batch failed with, its deliveries are tried one by one
            _log.warning("retry.batch_failed", error=exc, reason="taking it apart to find the delivery at fault")
            return await self._one_by_one(due)
        self.committed(turn)
        return turn

    async def _locking(self, due: Sequence[DueDelivery], *, are_named: bool = False) -> DeliveryTurn:
        """A turn; begun again when a trigger that was not locked turns out to matter."""
        always: frozenset[uuid.UUID] = frozenset()
        while True:
            try:
                return await self._database.run(partial(self._turn, due=due, always=always, are_named=are_named))
            except Unlocked as exc:
                always |= exc.trigger_ids

    async def next_look_seconds(self) -> float | None:
        """Seconds until the next delivery is due, or None when nobody waits."""
        async with self._database.connection() as connection:
            return await deliveries.next_due_seconds(connection)

    async def fill(self, connection: Connection, gates: Gates, line: NextInLine, claim: Claim) -> DeliveryTurn:
        """Decide deliveries for which a slot has just become free, in the transaction that freed it: it has locked them
        and their triggers, and shares every source. `committed` is to be called afterwards."""
        index = await self._matcher.at(connection, line.registry_version)
        look = _Look(line.now, index, gates, line.paused_sources)
        return await self._decide(connection, look, line.taken, line.slots, claim)

    async def _due(self) -> list[DueDelivery]:
        async with self._database.connection() as connection:
            triggers = await deliveries.due_triggers(connection, MAX_TRIGGERS)
            if not triggers:
                return []
            return await deliveries.list_due(connection, triggers, max(1, self._batch_size // len(triggers)))

    def committed(self, turn: DeliveryTurn) -> None:
        """Count, log and pass on, after the commit, what was decided."""
        failpoints.hit("delivery_retry.after_commit")
        metrics.DELIVERY_RETRIES.labels("due").inc(turn.due)
        tell(turn.decided, turn.names, are_newcomers=False)
        tell_moves(turn.moves)
        if traces.is_on:
            record_deliveries(turn.decided, turn.names, turn.events, turn.began_ns, epoch_ns())
        if turn.launched > len(turn.claimed):
            self._after_launch()
        if held := [d for d in turn.decided if d.retry_state == "scheduled"]:
            self._after_hold(held)
        if turn.woken:
            self._after_wake()
        if turn.replanned or turn.moves:
            self._after_plan()

    async def _turn(
        self, connection: Connection, due: Sequence[DueDelivery], always: frozenset[uuid.UUID], are_named: bool
    ) -> DeliveryTurn:
        look = await self._look(connection, due, always)
        if not are_named:
            due = await self._due_now(connection, look, due)
        taken = await deliveries.take(connection, await self._with_room(connection, look, due), look.now)
        return await self._decide(connection, look, taken)

    async def _look(self, connection: Connection, due: Sequence[DueDelivery], always: frozenset[uuid.UUID]) -> _Look:
        names = sorted({one.source for one in due if one.source})
        await locks.share(connection, names)
        now, version = await locks.moment(connection)
        index = await self._matcher.at(connection, version)
        paused = await sources.paused(connection, names)
        wanted = {one.trigger_id for one in due}
        limited = {t for t in wanted if (found := index.get(t)) is not None and found.trigger.is_limited} | always
        gates = await trigger_gates.lock(connection, always=limited, others=wanted - limited)
        return _Look(await locks.now(connection) if gates else now, index, gates, paused)

    async def _due_now(self, connection: Connection, look: _Look, due: Sequence[DueDelivery]) -> list[DueDelivery]:
        """The due deliveries as they are now that their triggers are locked: someone who came first may have got an
        earlier time meanwhile. Of a source that this transaction has not said it launches for, and behind it, none."""
        if not look.gates:
            return list(due)
        of_each = max(Counter(one.trigger_id for one in due).values())
        shared = {one.source for one in due}
        found = [one for one in due if one.trigger_id not in look.gates]
        closed: set[uuid.UUID] = set()
        for one in await deliveries.list_due(connection, list(look.gates), of_each, look.now):
            if one.source not in shared:
                closed.add(one.trigger_id)
            if one.trigger_id not in closed:
                found.append(one)
        return found

    async def _decide(
        self,
        connection: Connection,
        look: _Look,
        taken: Sequence[Taken],
        slots: dict[tuple[uuid.UUID, str], Slots] | None = None,
        claim: Claim = NOBODY,
    ) -> DeliveryTurn:
        began_ns = epoch_ns()
        found = await events.get_many(connection, {row.event_id for row in taken})
        candidates: list[Candidate] = []
        decided: list[Decided] = []
        slices = Slices()
        for number, row in enumerate(taken):
            judged = _judge(look, row, found[row.event_id])
            candidates.append(judged) if isinstance(judged, Candidate) else decided.append(judged)
            if slices.is_over:
                await slices.next()
                if not slots:  # what a run's end has freed is decided with it, however long it takes
                    slices.check(number + 1, len(taken))
        board = await boards.open_board(
            connection,
            candidates,
            policy=self._policy,
            now=look.now,
            are_newcomers=False,
            gates=look.gates,
            slots=slots,
        )
        decided += deliver.decide(board, candidates, are_newcomers=False)
        launched = await deliveries.settle(connection, decided, board.now, claim)
        woken = await self._pass_on(connection, taken, decided)
        await deliveries.bury(connection, deliver.given_up(decided))
        before = {row.id: row.reason for row in taken}  # who waits for a slot still, and was looked at, has no news
        news = [d for d in decided if not d.reason == before[d.id] == "concurrency"]
        await decisions.insert(connection, [held_line(d, board.now) for d in news])
        moves = await boards.close_board(connection, board, candidates, decided, breaker=self._breaker)
        await totals.add(connection, BatchTotals(boards.count(decided, are_newcomers=False)))
        failpoints.hit("delivery_retry.before_commit")
        return DeliveryTurn(
            due=len(taken),
            launched=len(launched),
            claimed=[
                (_claimed(d, parameters, look), found[d.event_id])
                for d in decided
                if (parameters := deliver.claimed_with(d, launched)) is not None
            ],
            woken=woken,
            decided=decided,
            names={c.trigger_id: trigger_name(c.trigger) for c in candidates},
            moves=moves,
            replanned=tuple(look.replanned),
            look_at=look.look_at,
            now=board.now,
            events=found,
            began_ns=began_ns,
        )

    async def _with_room(self, connection: Connection, look: _Look, due: Sequence[DueDelivery]) -> list[uuid.UUID]:
        """Those of the due deliveries that may be taken now; the triggers of the others get new times, if need be."""
        by_trigger: dict[uuid.UUID, list[DueDelivery]] = {}
        for one in due:
            by_trigger.setdefault(one.trigger_id, []).append(one)
        chosen: list[uuid.UUID] = []
        for trigger_id, mine in by_trigger.items():
            locked, ids = look.gates.get(trigger_id), [one.id for one in mine]
            if locked is None:
                chosen += ids
            elif not locked.is_replanning:
                room = locked.gate.room(look.now)
                if room != 0:
                    chosen += ids if room is None else ids[:room]
                elif opens := room_soon(locked.gate, look.now):
                    look.look_at = min(look.look_at, opens) if look.look_at else opens
                elif _are_few_new(mine) and locked.gate.hold(look.now) is None:
                    chosen += ids  # they take their places in the line; not worth a new plan for everyone
                else:
                    await trigger_gates.begin_plan(connection, trigger_id, look.now)
                    locked.gate.forget_plan()
                    look.replanned.append(trigger_id)
        return chosen

    async def _pass_on(self, connection: Connection, taken: Sequence[Taken], decided: Sequence[Decided]) -> int:
        """Wake the next in line for slots that were offered to deliveries which did not take them; how many."""
        used = {d.id for d in decided if d.status == "launched" or d.reason == "concurrency"}
        return await trigger_gates.wake(
            connection,
            {(r.trigger_id, r.concurrency_key or "") for r in taken if r.reason == "concurrency" and r.id not in used},
        )

    async def _one_by_one(self, due: Sequence[DueDelivery]) -> DeliveryTurn:
        """The due deliveries, each in a transaction of its own; one that still fails is that delivery's failure."""
        total = 0
        for one in due:
            try:
                turn = await self._locking([one], are_named=True)
                self.committed(turn)
            except Unavailable:
                raise
            except Exception as exc:  # noqa: BLE001 - whatever it is, this delivery goes to the dead letters and the others continue
                await self._database.run(partial(self._give_up, one=one, exc=exc))
            total += 1
        return DeliveryTurn(due=total)

    async def _give_up(self, connection: Connection, one: DueDelivery, exc: Exception) -> None:
        reason = f"{type(exc).__name__}: {exc}"[:1000]
        await trigger_gates.lock(connection, always=[one.trigger_id])
        now = await locks.now(connection)
        for row in await deliveries.take(connection, [one.id], now):
            failed = deliveries.Moved(
                row.id, "failed", "exhausted", None, row.retry_attempts, "failed", reason, {"reason": "failed"}, 0
            )
            await deliveries.move(connection, [failed])
            await deliveries.bury(connection, [(row.id, row.event_id, reason, {"attempts": row.retry_attempts})])
            line = decisions.NewDecision(row.event_id, now, "deliver", "failed", reason, None, row.retry_attempts,
                                      trigger_id=row.trigger_id)  # fmt: skip
            await decisions.insert(connection, [line])
            await trigger_gates.wake(connection, [(row.trigger_id, row.concurrency_key or "")])
            metrics.DELIVERY_RETRIES.labels("exhausted").inc()
            # The event itself is not read: that it cannot be may be why it is given up.
            correlation_id = await events.correlation_id(connection, row.event_id)
            _log.error(
                "delivery.failed", delivery_id=row.id, event_id=row.event_id, trigger_id=row.trigger_id,
                source=row.source, correlation_id=correlation_id, attempt=row.retry_attempts, reason=reason,
            )  # fmt: skip


def _are_few_new(mine: Sequence[DueDelivery]) -> bool:
    """Whether a few stand in the throttle's line for the first time: they waited for a slot of their key."""
    return len(mine) <= FEW and all(one.reason == "concurrency" for one in mine)


def _judge(look: _Look, row: Taken, event: Event) -> Candidate | Decided:
    """Whether the delivery still stands, by the trigger and the event as they are now."""
    compiled = look.index.get(row.trigger_id)
    if compiled is None and row.trigger_id in look.index.invalid:
        return _without_trigger(row, event, look, "paused", "trigger_invalid", "this worker cannot read the trigger")
    if compiled is None:
        return _without_trigger(row, event, look, "cancelled", "trigger_gone", "the trigger is disabled or deleted")
    bare = Candidate(row.id, event, compiled, attempts=row.retry_attempts, waited_for=row.reason)
    paused = look.paused_sources.get(event.source)
    if paused is not None:
        until = paused.until or look.now + OPEN_PAUSE
        metadata = {"reason": "source_paused", "message": paused.message, "until": until,
                    "waits_for": {"source": event.source}}  # fmt: skip
        return deliver.decided(
            bare, "paused", last_error=paused.message, retry_state="scheduled", next_attempt_at=until,
            reason="source_paused", metadata=metadata, plan_version=_plan_version(look, row),
        )  # fmt: skip
    if gate.is_expired(event, look.now):
        text = "its event's ttl_ms was over before it could be launched"
        return deliver.decided(bare, "exhausted", last_error=text, retry_state="exhausted", reason=gate.EXPIRED)
    envelope = event.envelope()
    try:
        reason = compiled.why_not(event, envelope)
    except OverBudget as exc:
        return bare._replace(error=str(exc), is_over_budget=True)
    if reason is not None:
        text = f"the trigger (version {compiled.trigger.version}) does not take the event any more: {reason}"
        return deliver.decided(bare, "skipped", last_error=text, reason="filtered")
    return deliver.render(row.id, event, compiled, envelope, attempts=row.retry_attempts, waited_for=row.reason)


def _claimed(one: Decided, parameters: dict[str, Any], look: _Look) -> ClaimedRun:
    compiled = look.index.get(one.trigger_id)
    assert compiled is not None, "it was launched by this trigger"
    return deliver.claimed_run(one, compiled, parameters, look.now)


def _plan_version(look: _Look, row: Taken) -> int:
    locked = look.gates.get(row.trigger_id)
    return locked.plan_version if locked else 0


def _without_trigger(row: Taken, event: Event, look: _Look, status: DeliveryStatus, reason: str, text: str) -> Decided:
    """A delivery whose trigger is gone, or is one that only a newer worker understands: that one waits for it."""
    is_waiting = status == "paused"
    return Decided(
        id=row.id,
        trigger_id=row.trigger_id,
        event_id=row.event_id,
        trigger_version=row.trigger_version,
        status=status,
        last_error=text,
        run_id=None,
        workflow_definition_id=uuid.UUID(int=0),
        correlation_id=event.correlation_id,
        parameters="{}",
        concurrency_key=row.concurrency_key,
        retry_state="scheduled" if is_waiting else "cancelled",
        next_attempt_at=look.now + UNREADABLE if is_waiting else None,
        retry_attempts=row.retry_attempts,
        reason=reason,
        metadata={"reason": reason, "message": text},
        source=event.source,
    )
