"""Delivery state: load what `deliver.decide` depends on, under the triggers' locks, and save what it changed.

Shared by new events (`batch`) and waiting deliveries (`hold.delivery_retry`), inside the caller's transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from tidegate.flow import trigger_backlog as backlog
from tidegate.flow.decide.deliver import Candidate, DeliveryState
from tidegate.model.ids import DeliveryId, EventId, TriggerId
from tidegate.model.retry import RetryPolicy
from tidegate.model.run import ClaimedRun
from tidegate.model.source import BreakerPolicy
from tidegate.model.trigger import CompiledTrigger
from tidegate.model.trigger_gate import TriggerMove
from tidegate.store import budgets, held_deliveries, idempotency, locks, trigger_gates, trigger_rates, windows
from tidegate.store.budgets import LockedBudget
from tidegate.store.db import Connection
from tidegate.store.deliveries import Created, Decided
from tidegate.store.idempotency import Kept
from tidegate.store.locks import Unlocked
from tidegate.store.totals import TriggerTotals
from tidegate.store.trigger_gates import LockedTrigger, Slots


async def load_state(
    connection: Connection,
    candidates: Sequence[Candidate],
    *,
    policy: RetryPolicy,
    now: datetime,
    are_newcomers: bool = True,
    gates: dict[TriggerId, LockedTrigger] | None = None,
    slots: dict[tuple[TriggerId, str], Slots] | None = None,
    locked_budgets: dict[str, LockedBudget] | None = None,
) -> DeliveryState:
    """Lock the triggers that have a limit, a pause, a breaker state or a failure, and their budgets, and read lines,
    slots and keys."""
    if gates is None:
        limited = {c.trigger_id for c in candidates if c.error is not None or c.trigger.is_limited}
        others = {c.trigger_id for c in candidates} - limited
        gates = await trigger_gates.lock(connection, always=limited, others=others)
        wanted_budgets = {need.budget for c in candidates for need in c.needs}
        wanted_budgets |= {c.unread_budget for c in candidates if c.unread_budget is not None}
        if wanted_budgets:
            locked_budgets = await budgets.lock(connection, wanted_budgets)
        if gates:
            now = await locks.now(connection)  # launches are stamped after the lock that orders them
    elif missing := {c.trigger_id for c in candidates if c.error is not None} - gates.keys():
        raise Unlocked(missing)
    sound = [c for c in candidates if c.error is None]
    state = DeliveryState(now=now, policy=policy, gates=gates, are_newcomers=are_newcomers)
    state.budgets.budgets = locked_budgets or {}
    if are_newcomers and (limits := trigger_rates.limits_of((c.rate, c.trigger.trigger.skip_over) for c in sound)):
        state.rates = await trigger_rates.taken(connection, limits)
    state.backlogs = await backlog.load(connection, candidates, are_newcomers=are_newcomers)
    collected = {c.window for c in sound if c.window is not None} if are_newcomers else set()
    if collected:
        state.windows = await windows.open_windows(connection, collected)
        sound = [c for c in sound if c.window is None or _may_launch(c)]
    if gates and are_newcomers:
        state.lines = await trigger_gates.lines(connection, {c.trigger_id for c in sound} & gates.keys())
        for trigger_id, locked in gates.items():
            if trigger_id not in state.lines and not locked.is_replanning:
                locked.gate.forget_backlog()
    if wanted := {c.slot for c in sound if c.slot is not None} - (slots or {}).keys():
        state.slots = await trigger_gates.slots(connection, wanted)
    state.slots |= slots or {}
    if lines := {(need.budget, need.key) for c in sound for need in c.needs}:
        ids = [] if are_newcomers else [c.id for c in candidates]
        found = await budgets.keys(connection, state.budgets.budgets, lines, ids)
        state.budgets.load(found, are_newcomers=are_newcomers)
    if keys := {c.dedupe for c in sound if c.dedupe is not None}:
        state.keys = await idempotency.claim(connection, keys)
        state.taken = {key for key, holder in state.keys.items() if holder is None}
        state.now = await locks.now(connection)  # the claim may have waited for another transaction
    return state


def _may_launch(candidate: Candidate) -> bool:
    """Whether a new event of a trigger that collects may be launched at once."""
    policy = candidate.trigger.trigger.collect
    return policy is not None and policy.leading


async def save_state(
    connection: Connection,
    state: DeliveryState,
    candidates: Iterable[Candidate],
    decided: Sequence[Decided],
    *,
    breaker: BreakerPolicy,
) -> list[TriggerMove]:
    """Store the idempotency keys of launches, count failures for the breakers, write the gates; the breakers that
    moved."""
    if state.taken:
        windows = {c.id: c.trigger.trigger.idempotency_window_ms for c in candidates}
        kept = [
            Kept(d.trigger_id, d.dedupe_key, d.id, d.run_id, windows[d.id])
            for d in decided
            if d.status == "launched" and d.dedupe_key is not None and d.run_id is not None
        ]
        await idempotency.keep(connection, kept, state.now)
        await idempotency.release(connection, state.taken - {(k.trigger_id, k.dedupe_key) for k in kept})
    moves = []
    failed = [d for d in decided if d.status == "failed"]
    last = {d.trigger_id: d for d in failed}
    for trigger_id, count in Counter(d.trigger_id for d in failed).items():
        gate, policy = state.gates[trigger_id].gate, state.gates[trigger_id].breaker or breaker
        if gate.breaker_state == "closed":
            await trigger_gates.gather_outcomes(connection, gate, state.now, policy)
        move = gate.count_failures(state.now, count, policy)
        if move:
            by = last[trigger_id]
            moves.append(TriggerMove(trigger_id, move, gate.breaker_reason, by.event_id, by.correlation_id))
    await trigger_rates.save(connection, state.rates)
    await trigger_gates.save(connection, (locked.gate for locked in state.gates.values()))
    await budgets.save(connection, state.budgets.changed())
    await budgets.hold(connection, state.budgets.held)
    await held_deliveries.keep_order(connection, _overtaken(state, decided))
    for moved in moves:  # waiting deliveries get a time after the breaker's pause
        await trigger_gates.begin_plan(connection, moved.trigger_id, None)
    return moves


def _overtaken(state: DeliveryState, decided: Sequence[Decided]) -> dict[TriggerId, int]:
    """The triggers whose line already holds later arrivals, with the earliest sequence that joined late: a new delivery
    whose event its source had held, or a delivery that had waited for something else."""
    found: dict[TriggerId, int] = {}
    for one in decided:
        is_in_line = one.retry_state == "scheduled" and one.reason in held_deliveries.IN_LINE
        if is_in_line and (not state.are_newcomers or one.ingress_sequence < state.lines.get(one.trigger_id, 0)):
            found[one.trigger_id] = min(found.get(one.trigger_id, one.ingress_sequence), one.ingress_sequence)
    return found


def count(
    decided: Sequence[Decided], filtered: Iterable[TriggerId] = (), *, are_newcomers: bool
) -> list[TriggerTotals]:
    """The counts of a batch by trigger, for the totals."""
    counts: dict[TriggerId, Counter[str]] = {}
    for trigger_id, number in Counter(filtered).items():
        counts.setdefault(trigger_id, Counter())["filtered"] += number
    for (trigger_id, status), number in Counter((one.trigger_id, one.status) for one in decided).items():
        found = counts.setdefault(trigger_id, Counter())
        found[status] += number
        found["matched"] += number if are_newcomers else 0
    last: dict[TriggerId, Decided] = {one.trigger_id: one for one in decided}
    return [_totals(trigger_id, found, last.get(trigger_id)) for trigger_id, found in sorted(counts.items())]


def _totals(trigger_id: TriggerId, found: Counter[str], last: Decided | None) -> TriggerTotals:
    return TriggerTotals(
        trigger_id=trigger_id,
        filtered=found["filtered"],
        matched=found["matched"],
        launched=found["launched"],
        throttled=found["throttled"],
        skipped=found["skipped"],
        failed=found["failed"],
        paused=found["paused"],
        collected=found["collected"],
        last_status=last.status if last else "filtered",
        last_error=last.last_error if last and last.status == "failed" else None,
    )


def claimed_with(one: Decided, created: Created) -> dict[str, Any] | None:
    """The parameters of the claimed run that this delivery created, or None. A skipped delivery names the run of
    another delivery: it has none of its own."""
    return created.get(one.id)


def claimed_run(one: Decided, trigger: CompiledTrigger, parameters: dict[str, Any], now: datetime) -> ClaimedRun:
    """The run of a launched delivery, claimed by this worker at its creation."""
    assert one.status == "launched" and one.run_id is not None, f"delivery {one.id} is {one.status}"
    return ClaimedRun(
        id=one.run_id,
        workflow=trigger.trigger.workflow,
        event_id=one.event_id,
        correlation_id=one.correlation_id,
        parameters=parameters,
        attempts=1,
        claim_generation=1,
        now=now,
        started_at=now,
        trigger_id=one.trigger_id,
        concurrency_key=one.concurrency_key,
        slot_key=one.concurrency_key if trigger.trigger.gives_back else None,
        is_probe=one.is_probe,
    )


def dead_letters(all_decided: Sequence[Decided]) -> list[tuple[DeliveryId, EventId, str, dict[str, Any]]]:
    """The dead letters of deliveries that are not retried: an operator may fix the cause and replay them."""
    return [
        (d.id, d.event_id, d.last_error or "", {"attempts": d.retry_attempts})
        for d in all_decided
        if d.status in ("failed", "exhausted")
    ]
