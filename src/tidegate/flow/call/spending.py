"""Spending: a step that spends of budgets asks for them before its function is called. If one has no room, the step
waits in line for it, and the run is suspended until its turn has come."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from tidegate import failpoints
from tidegate.errors import NonRetryable
from tidegate.model.budget import BudgetSpec, Spending, StepSpend
from tidegate.model.event import Event
from tidegate.model.ids import StepId, step_id
from tidegate.model.run import ClaimedRun, Step

if TYPE_CHECKING:
    from tidegate.flow.call.steps import RunSteps

# The reason of a step that waits for a budget.
BUDGET = "budget"
# A run whose steps wait for budgets is woken when their turn comes; this is the fallback.
RECHECK = timedelta(hours=1)
# While other steps of its run are in progress, the worker asks so often whether its turn has come.
LOOK = timedelta(seconds=1)


class SpendQuestion(NamedTuple):
    """What an execution asks before it calls a step: may it, by its budgets?"""

    run: ClaimedRun
    event: Event | None
    step_id: StepId
    name: str
    attempts: int
    spend: StepSpend
    specs: Sequence[BudgetSpec]


class SpendAnswer(NamedTuple):
    """Whether the run is still held, or to be cancelled; whether the step may be called, and which budgets have to know
    when that has ended; else why not, and what an operator reads about it until when."""

    is_kept: bool
    is_cancel_requested: bool = False
    is_granted: bool = False
    budgets: tuple[str, ...] = ()
    error: str | None = None
    until: datetime | None = None
    message: str = ""


AskSpend = Callable[[SpendQuestion], Awaitable[SpendAnswer]]


async def spend(steps: RunSteps, name: str, spending: Spending, ask: AskSpend) -> BaseException | None:
    """Spend of the budgets of a step, when there is room for it; or why that failed, or is never possible."""
    while True:
        known = steps.known(name)
        attempts = known.retry_attempts if known else 0
        steps.endings.slots[name] = tuple(spending.spend.budgets)
        question = SpendQuestion(steps.run, steps.event, step_id(steps.run.id, name), name, attempts, *spending)
        try:
            answer = await _answered(ask(question))
        except Exception as exc:  # noqa: BLE001 - whatever the transaction failed with, the step is retried
            return exc
        steps.journal.learn(is_kept=answer.is_kept, is_cancel_requested=answer.is_cancel_requested)
        if answer.error is not None:
            return NonRetryable(answer.error)
        if answer.is_granted:
            failpoints.hit("step.after_spend")
            steps.endings.slots[name] = answer.budgets
            if not answer.budgets:
                del steps.endings.slots[name]
            return None
        waiting = Step(
            id=question.step_id, workflow_run_id=steps.run.id, name=name, retry_state="scheduled",
            retry_attempts=attempts, next_attempt_at=answer.until, created_at=known.created_at if known else None,
            retry_metadata={"reason": BUDGET, "budgets": spending.spend.budgets},
        )  # fmt: skip
        steps.keep_known(waiting)
        now = steps.now()
        await steps.wait_for_turn(waiting, now + RECHECK, now + LOOK, f"step {name!r} waits: {answer.message}")


async def _answered(asked: Awaitable[SpendAnswer]) -> SpendAnswer:
    """The answer. If the step is cut off meanwhile, it is waited for all the same: what was spent of slots is given
    back by the write that follows."""
    asking = asyncio.ensure_future(asked)
    try:
        return await asyncio.shield(asking)
    except asyncio.CancelledError:
        await asyncio.wait([asking])
        raise


def waits_for_budget(known: Step | None) -> bool:
    """Whether a step waits for a budget, or its turn has come."""
    return known is not None and known.retry_state == "scheduled" and known.retry_metadata.get("reason") == BUDGET
