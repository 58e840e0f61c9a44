"""Step needs: may a step be called by what its budgets have left, and if not, where does it wait? Pure.

A step is decided like a delivery (`budgets`) and stands in the same lines, at the place of its arrival there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from functools import lru_cache
from typing import NamedTuple

from tidegate.errors import InvalidInput
from tidegate.flow.decide.budgets import BUDGET, Asking, BudgetState, Refused
from tidegate.model.budget import BudgetSpec, CannotSpend, CompiledBudget, Need, StepSpend
from tidegate.model.event import Event
from tidegate.model.ids import RunId, StepId
from tidegate.model.work_limit import WorkLeft
from tidegate.store.budget_steps import NewPlace
from tidegate.store.budgets import LockedBudget

# When one that waits for something without a time is decided again; for one that waits longer, later.
CHECKED_AFTER, CHECKED_AT_LEAST = timedelta(minutes=1), timedelta(hours=1)


class AskingStep(NamedTuple):
    """A step that asks for its budgets: the event of its run, its place in line, the budget in whose line it stands
    (None: it has come just now), how often it changed lines, and since when it waits."""

    id: StepId
    run_id: RunId
    name: str
    spend: StepSpend
    event: Event | None
    place: int = 0
    came_from: str | None = None
    moves: int = 0
    since: datetime | None = None
    attempts: int = 0


@lru_cache(maxsize=1000)
def _compiled(spec: BudgetSpec) -> CompiledBudget:
    return CompiledBudget(spec)


def needs_of(
    step: AskingStep, locked: Mapping[str, LockedBudget], own: Collection[tuple[RunId, str]]
) -> tuple[Need, ...]:
    """What a step needs of its budgets, in the order in which they are checked; `own` are the budgets of which runs
    hold slots themselves. CannotSpend names a budget of which that cannot be evaluated, or that can never be spent."""
    found, work_left = [], WorkLeft()
    for name in step.spend.budgets:
        budget = locked.get(name)
        if budget is None:
            raise CannotSpend(
                name, "there is no such budget; declare it (Budget(…)), or create it: tidegate budgets set"
            )
        if budget.spec.concurrency is not None and (step.run_id, name) in own:
            raise CannotSpend(
                name,
                "its run holds a slot of it, by budgets= of its workflow, and the step would wait for "
                "that: use it for the run or for the step, not for both",
            )
        try:
            found.append(_compiled(budget.spec).step_need(step.spend, step.event, work_left))
        except InvalidInput as exc:
            raise CannotSpend(name, str(exc)) from None
    return tuple(sorted(found))


def why_waits(state: BudgetState, step: AskingStep, needs: tuple[Need, ...], now: datetime) -> Refused | None:
    """Why a step must wait; None when each of its budgets has room."""
    is_new = step.came_from is None
    asking = Asking(step.id, needs, step.place, is_new, step.came_from, step.moves, step.since, step.run_id)
    return state.why_wait(asking, now)


def placed(step: AskingStep, refused: Refused, now: datetime) -> NewPlace:
    """Where a step waits that is refused."""
    detail = refused.waits_for[BUDGET]
    assert isinstance(detail, dict), "a budget refuses it"
    at = refused.until or now + min(CHECKED_AT_LEAST, max(CHECKED_AFTER, now - (step.since or now)))
    metadata = {
        "reason": BUDGET, "message": refused.message, "waits_for": refused.waits_for, "budgets": step.spend.budgets,
    }  # fmt: skip
    return NewPlace(
        step.id, step.run_id, step.name, detail["name"], detail["key"], detail["cost"], step.place,
        step.moves + refused.is_move, at, step.spend, step.attempts, metadata,
    )  # fmt: skip
