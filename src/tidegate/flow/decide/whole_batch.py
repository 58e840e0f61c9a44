"""Whole batch: every limit has room for all deliveries of a batch, and nobody waits for it. Then all are launched, and
what each limit counts is spent in one sum instead of delivery by delivery.

Pure, like `deliver`, and with the same outcome: `tests/flow/test_fast_path.py` runs one table of batches through both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime

from tidegate.flow.decide.budgets import BudgetState
from tidegate.flow.decide.deliver import Candidate, DeliveryState
from tidegate.model.ids import RunId
from tidegate.store.budgets import Holder, Line


def spend(state: DeliveryState, candidates: Sequence[Candidate]) -> bool:
    """Spend what the launches of all candidates need. False, and nothing is spent, unless all of them may be launched:
    then each is decided by itself."""
    costs = Counter[Line]()
    for candidate in candidates:
        for need in candidate.needs:
            costs[need.budget, need.key] += need.cost
    runs = Counter((need.budget, need.key) for candidate in candidates for need in candidate.needs)
    has_room = (
        _triggers_have_room(state, candidates)
        and _slots_are_free(state, candidates)
        and _budgets_have_room(state.budgets, costs, runs, state.now)
    )
    if not has_room:
        return False
    launches = Counter(candidate.trigger_id for candidate in candidates)
    for trigger_id, locked in state.gates.items():
        locked.gate.spend(state.now, launches[trigger_id])
    _spend_budgets(state.budgets, costs, runs, state.now)
    state.budgets.held += [
        Holder(RunId(candidate.id), need.budget, need.key)
        for candidate in candidates
        for need in candidate.needs
        if (budget := state.budgets.budgets.get(need.budget)) is not None and budget.spec.concurrency is not None
    ]
    return True


def _triggers_have_room(state: DeliveryState, candidates: Sequence[Candidate]) -> bool:
    launches = Counter(candidate.trigger_id for candidate in candidates)
    for trigger_id, locked in state.gates.items():
        gate, free = locked.gate, locked.gate.free(state.now)
        if trigger_id in state.lines or locked.is_replanning or gate.breaker_state != "closed":
            return False
        if gate.hold(state.now) is not None or (free is not None and free < launches[trigger_id]):
            return False
    return True


def _slots_are_free(state: DeliveryState, candidates: Sequence[Candidate]) -> bool:
    wanted = Counter(candidate.slot for candidate in candidates if candidate.slot is not None)
    most = {candidate.trigger_id: candidate.trigger.trigger.max_concurrency or 0 for candidate in candidates}
    return all(
        (slots := state.slots[slot]).closed_until is None
        and slots.waiting == 0
        and slots.in_use + count <= most[slot[0]]
        for slot, count in wanted.items()
    )


def _budgets_have_room(budgets: BudgetState, costs: Counter[Line], runs: Counter[Line], now: datetime) -> bool:
    for line, cost in costs.items():
        budget, key = budgets.budgets.get(line[0]), budgets.keys.get(line)
        if budget is None or key is None:
            continue
        most, free = budget.spec.concurrency, key.allowance.free(now)
        is_reserved = key.reserved is not None and key.reserved.until > now
        if budget.is_paused(now) or key.closed is not None or is_reserved:
            return False
        if key.first_waiting is not None or (free is not None and cost > free):
            return False
        if most is not None and key.used(None) + runs[line] > most:
            return False
    return True


def _spend_budgets(budgets: BudgetState, costs: Counter[Line], runs: Counter[Line], now: datetime) -> None:
    for line, cost in costs.items():
        if line[0] in budgets.budgets and line in budgets.keys:
            budgets.keys[line].allowance.spend(now, cost)
            budgets.keys[line].in_use += runs[line]
