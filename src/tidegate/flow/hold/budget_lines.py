"""Budget lines: who of those that wait for a budget may be decided now.

A delivery that is due stands for its line: the first of the line are decided, as many as the key has room for, whatever
their own times are. So the order of arrival holds whatever the times, and what a limit or a pause that has changed lets
pass is not left waiting for times that were planned before.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from tidegate.flow.decide.budgets import BUDGET, BudgetState
from tidegate.flow.hold.delivery_check import DeliveryFacts
from tidegate.model.budget import Need
from tidegate.model.ids import RunId
from tidegate.store import budgets, sources
from tidegate.store.budgets import Head, Line
from tidegate.store.db import Connection
from tidegate.store.deliveries import DueDelivery
from tidegate.store.locks import Unlocked


def lines(due: Sequence[DueDelivery]) -> set[Line]:
    """The lines in which due deliveries stand."""
    return {(one.budget, one.budget_key or "") for one in due if one.reason == BUDGET and one.budget is not None}


async def with_heads(
    connection: Connection, facts: DeliveryFacts, due: Sequence[DueDelivery], batch_size: int
) -> list[DueDelivery]:
    """The due deliveries, and before those of a line the first of it that find room. Unlocked names triggers of which
    the locks are missing."""
    wanted = lines(due)
    if not wanted:
        return list(due)
    of_each = max(1, batch_size // len(wanted))
    found = await budgets.heads(connection, wanted, of_each)
    if missing := {one.trigger_id for one in found if one.run_id is None} - facts.wanted:
        raise Unlocked(missing)
    known = {one.id for one in due}
    state = BudgetState(facts.budgets)
    state.load(await budgets.keys(connection, facts.budgets, wanted & facts.lines(wanted), []), are_newcomers=False)
    chosen = [one for one in _fitting(state, found, facts) if one.id not in known]
    names = {one.source for one in chosen if one.source} - facts.paused_sources.keys()
    facts.paused_sources |= await sources.paused(connection, sorted(names))
    ahead = [DueDelivery(one.id, one.trigger_id, one.source, BUDGET, one.budget, one.key) for one in chosen]
    return [*ahead, *due]


async def nudge(connection: Connection, facts: DeliveryFacts, state: BudgetState, visited: set[Line]) -> None:
    """Who is first in the lines now is due when there is room, not when that was expected before."""
    missing = (visited - state.keys.keys()) & facts.lines(visited)
    if missing:
        rows = await budgets.keys(connection, facts.budgets, missing, [])
        state.load(rows, are_newcomers=False)
    await nudge_heads(connection, state, visited, facts.now)


async def nudge_heads(connection: Connection, state: BudgetState, visited: set[Line], now: datetime) -> None:
    """The same, once the keys of the lines are known."""
    heads = await budgets.heads(connection, visited, 1)
    opens = {
        (one.budget, one.key): state.opens_at((one.budget, one.key), one.id, one.cost, now, one.came_at)
        for one in heads
    }
    await budgets.nudge(connection, {line: at for line, at in opens.items() if at is not None})


def _fitting(state: BudgetState, found: Sequence[Head], facts: DeliveryFacts) -> list[Head]:
    """The first of each line, in order, as long as their key has room for them; up to a step, which is not decided here
    (`step_lines`)."""
    full: set[Line] = set()
    chosen = []
    for one in found:
        line = (one.budget, one.key)
        if line not in state.keys or line in full:
            continue
        if one.run_id is not None or state.lacks(line, one.id, one.cost, facts.now, one.came_at) is not None:
            full.add(line)
            continue
        state.spend(one.id, [Need(*line, one.cost)], RunId(one.id), facts.now)  # in this copy, which is not written
        chosen.append(one)
    return chosen
