"""Step lines: the turns of steps that wait in the lines of budgets, beside the deliveries that stand in the same lines.

A step that is due stands for its line, like a delivery (`budget_lines`): the first of the line are decided as long as
their key has room. A step whose turn has come has spent: its run is due, and calls it when it resumes. The first in
line may be a delivery: then that one is made due, and steps behind it wait until it is launched; and the other way
round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.flow.decide.budgets import BudgetState
from tidegate.flow.hold import budget_lines
from tidegate.flow.hold.delivery_retry import DeliveryRetry, DeliveryTurn
from tidegate.flow.run import step_needs as decide
from tidegate.flow.run.step_budgets import why_held
from tidegate.flow.run.step_needs import AskingStep
from tidegate.model.budget import CannotSpend, Need
from tidegate.model.event import Event
from tidegate.model.ids import EventId, RunId, StepId
from tidegate.store import budget_steps, budgets, events, locks, runs
from tidegate.store.budget_steps import DueStep, NewPlace, StepInLine
from tidegate.store.budgets import Head
from tidegate.store.db import Connection
from tidegate.telemetry import metrics


class StepTurn(NamedTuple):
    """What one pass over the due steps did: how many were due, the runs whose steps' turn has come, and the steps that
    wait again."""

    due: int = 0
    granted: Sequence[RunId] = ()
    held: Sequence[NewPlace] = ()


class LineRetry(DeliveryRetry):
    """Delivery retry, and the steps that stand in the same lines."""

    async def run_once(self) -> DeliveryTurn:
        turn, steps = await super().run_once(), await self.steps_once()
        return turn._replace(due=turn.due + steps.due)

    async def next_due_seconds(self) -> float | None:
        async with self._database.connection() as connection:
            of_steps = await budget_steps.next_due_seconds(connection)
        found = [one for one in (await super().next_due_seconds(), of_steps) if one is not None]
        return min(found, default=None)

    async def steps_once(self) -> StepTurn:
        """One batch of due steps."""
        async with self._database.connection() as connection:
            due = await budget_steps.due(connection, self._batch_size)
        if not due:
            return StepTurn()
        turn = await self._database.run(partial(_turn, due=due, batch_size=self._batch_size))
        failpoints.hit("step_lines.after_commit")
        for place in turn.held:
            metrics.held_by_budget(*why_held(place))
        if turn.granted:
            self._after_launch()
        return turn


async def _turn(connection: Connection, due: Sequence[DueStep], batch_size: int) -> StepTurn:
    """Who stands where is known only under the budgets' locks; what has to be locked, before. One that turns out to
    need more than is locked is decided the next time."""
    lines = {(one.budget, one.key) for one in due if one.key is not None}
    of_each = max(1, batch_size // max(1, len(lines)))
    known = await _candidates(connection, due, await budgets.heads(connection, lines, of_each))
    names = {one.budget for one in due} | {name for row in known for name in row.spend.budgets}
    locked = await budgets.lock(connection, names)
    await runs.lock(connection, sorted({row.run_id for row in known}))
    now = await locks.now(connection)
    heads = await budgets.heads(connection, lines, of_each)
    runs_locked = {row.run_id for row in known}
    rows = [
        row
        for row in await _candidates(connection, due, heads)
        if row.run_id in runs_locked and names.issuperset(row.spend.budgets)
    ]
    gone = [row.step_id for row in rows if not row.is_unfinished]
    await budget_steps.leave(connection, gone)
    waiting = [row for row in rows if row.is_unfinished and not row.is_granted]
    found = await events.get_many(connection, {row.event_id for row in waiting if row.event_id is not None})
    limited = [name for name, budget in locked.items() if budget.spec.concurrency is not None]
    own = await budget_steps.own_slots(connection, {row.run_id for row in waiting}, limited)
    needed: list[tuple[AskingStep, tuple[Need, ...] | CannotSpend]] = []
    for row in waiting:
        step = _asking(row, found)
        try:
            needed.append((step, decide.needs_of(step, locked, own)))
        except CannotSpend as exc:
            needed.append((step, exc))
    visited = {line for line in lines if line[0] in locked}
    wanted = visited | {
        (need.budget, need.key) for _, needs in needed if not isinstance(needs, CannotSpend) for need in needs
    }
    state = BudgetState(locked)
    deciding = [step.id for step, _ in needed]
    state.load(await budgets.keys(connection, locked, wanted, deciding), are_newcomers=False)
    granted, places = _decide(state, needed, {row.step_id: row for row in waiting}, {one.id for one in due}, now)
    await _write(connection, state, granted, places)
    await budget_lines.nudge_heads(connection, state, visited, now)
    failpoints.hit("step_lines.before_commit")
    return StepTurn(len(due), [step.run_id for step in granted], places)


async def _candidates(connection: Connection, due: Sequence[DueStep], heads: Sequence[Head]) -> list[StepInLine]:
    """The steps at the front of the lines, and those that are due, in the order of arrival."""
    ids = {one.id for one in due} | {StepId(one.id) for one in heads if one.run_id is not None}
    found = await budget_steps.of_steps(connection, ids)
    return sorted(found.values(), key=lambda row: (row.place, row.step_id))


def _asking(row: StepInLine, found: Mapping[EventId, Event]) -> AskingStep:
    event = found.get(row.event_id) if row.event_id is not None else None
    return AskingStep(
        row.step_id, row.run_id, row.name, row.spend, event, row.place, row.budget, row.moves, row.created_at
    )


def _decide(
    state: BudgetState,
    needed: Sequence[tuple[AskingStep, tuple[Need, ...] | CannotSpend]],
    rows: Mapping[StepId, StepInLine],
    due: set[StepId],
    now: datetime,
) -> tuple[list[AskingStep], list[NewPlace]]:
    """The steps whose turn has come, and where the others wait that were due, or whose line is another one."""
    granted, places = list[AskingStep](), list[NewPlace]()
    for step, needs in needed:
        refused = (
            state.why_unread(needs.budget, str(needs), False, now)
            if isinstance(needs, CannotSpend)
            else decide.why_waits(state, step, needs, now)
        )
        if refused is None:
            assert not isinstance(needs, CannotSpend), "what waits is never refused for good"
            state.spend(step.id, needs, step.run_id, now, (step.name, None))
            granted.append(step)
            continue
        place, row = decide.placed(step, refused, now), rows[step.id]
        if step.id in due or (place.budget, place.key, place.cost) != (row.budget, row.key, row.cost):
            places.append(place)
    return granted, places


async def _write(
    connection: Connection, state: BudgetState, granted: Sequence[AskingStep], places: Sequence[NewPlace]
) -> None:
    await budgets.save(connection, state.changed())
    await budgets.hold(connection, state.held)
    await budget_steps.grant(connection, [step.id for step in granted])
    await budget_steps.move(connection, places)
    if granted:
        await runs.wake(connection, sorted({step.run_id for step in granted}))
