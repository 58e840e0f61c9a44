"""Step budgets: answers steps that ask for budgets before they are called. Each spends of all of its budgets or of
none, under their locks; one that is refused waits in line from the same commit on.

What was spent is lost if the worker dies before the call: a budget is never exceeded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple, Protocol

from tidegate import failpoints
from tidegate.errors import Unavailable
from tidegate.flow.call.spending import SpendAnswer, SpendQuestion
from tidegate.flow.decide.budgets import BUDGET, BudgetState
from tidegate.flow.run import step_needs as decide
from tidegate.flow.run.step_needs import AskingStep
from tidegate.model.budget import BudgetSpec, CannotSpend, Need
from tidegate.model.ids import StepId
from tidegate.model.run import ClaimedRun
from tidegate.store import budget_steps, budgets, locks, waits
from tidegate.store.budget_steps import NewPlace, StepInLine
from tidegate.store.db import Connection, Database
from tidegate.store.group_commit import GroupCommit
from tidegate.store.slot_lines import Nudged
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

MAX_QUESTIONS = 200
_RETRY_SECONDS = 0.5

_log = logger("run")


class Declare(Protocol):
    """Stores budgets as code declares them."""

    async def __call__(self, specs: Iterable[BudgetSpec]) -> None: ...


async def declare_nothing(specs: Iterable[BudgetSpec]) -> None:
    """The budgets are there."""


class StepBudgets:
    """Answers what executions ask before they call steps with budgets; many questions share a transaction. `after_move`
    is called when others in line may be due."""

    def __init__(self, database: Database, declare: Declare, after_move: Callable[[Nudged], None]) -> None:
        self._database = database
        self._declare = declare
        self._after_move = after_move
        self._declared: set[BudgetSpec] = set()
        self._is_stopping = False
        self._group: GroupCommit[SpendQuestion, SpendAnswer] = GroupCommit(
            self._answer_all, weight=lambda _: 1, max_weight=MAX_QUESTIONS, max_waiting=1_000_000
        )

    async def ask(self, question: SpendQuestion) -> SpendAnswer:
        """Whether the step may be called. The budgets that it defines are stored as the code says, once in a
        process."""
        return await self._group.submit(question)

    def stop(self) -> None:
        """The worker stops: what is asked while the database is down is not answered any more."""
        self._is_stopping = True

    async def _answer_all(self, questions: list[SpendQuestion]) -> Sequence[SpendAnswer | Exception]:
        """The answers to a group; if it fails, one by one, so that a question that cannot be answered affects no
        other."""
        try:
            return await self._answer_group(questions)
        except Exception as exc:
            if len(questions) == 1 or isinstance(exc, Unavailable):
                raise
            _log.warning("step.budgets_failed", count=len(questions), error=exc, reason="asking one by one")
        found: list[SpendAnswer | Exception] = []
        for one in questions:
            try:
                found += await self._answer_group([one])
            except Exception as exc:  # noqa: BLE001 - reported to the step that it belongs to
                found.append(exc)
        return found

    async def _answer_group(self, questions: list[SpendQuestion]) -> Sequence[SpendAnswer]:
        while True:
            try:
                if new := {spec for one in questions for spec in one.specs} - self._declared:
                    await self._declare(new)
                    self._declared |= new
                answers, held, moved = await self._database.run(partial(_answer, asked=questions))
            except Unavailable as exc:
                if self._is_stopping:
                    raise
                _log.warning("step.budget_delayed", error=exc)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            failpoints.hit("step_budget.after_commit")
            for one in held:
                metrics.held_by_budget(*why_held(one))
            if moved != Nudged():
                self._after_move(moved)
            return answers


def why_held(place: NewPlace) -> tuple[str, str]:
    """Which budget holds a step, and what it lacks."""
    waits_for = place.metadata["waits_for"]
    assert isinstance(waits_for, dict), "it waits for a budget"
    return place.budget, waits_for[BUDGET]["why"]


class _Asked(NamedTuple):
    """A question, with the step as it asks, and its place in line if it has one."""

    question: SpendQuestion
    step: AskingStep
    row: StepInLine | None


class _Decided(NamedTuple):
    """What a transaction has decided: the answers, the steps that wait from now on, and those that begin, which had to
    wait until now."""

    answers: dict[StepId, SpendAnswer]
    places: list[NewPlace]
    taken: dict[StepId, ClaimedRun]


async def _answer(
    connection: Connection, asked: Sequence[SpendQuestion]
) -> tuple[list[SpendAnswer], list[NewPlace], Nudged]:
    """One transaction: the answers, the steps that wait from now on, and who else is due."""
    locked = await budgets.lock(connection, {name for one in asked for name in one.spend.budgets})
    held = await waits.lock_held(connection, [one.run for one in asked])
    now = await locks.now(connection)
    rows = await budget_steps.of_steps(connection, [one.step_id for one in asked])
    limited = [name for name, budget in locked.items() if budget.spec.concurrency is not None]
    own = await budget_steps.own_slots(connection, {one.run.id for one in asked}, limited)
    answers = {one.step_id: SpendAnswer(one.run.id in held, held.get(one.run.id, False)) for one in asked}
    taken, needed = dict[StepId, ClaimedRun](), list[tuple[_Asked, tuple[Need, ...] | CannotSpend]]()
    for one in asked:
        if held.get(one.run.id) is not False:  # it belongs to another worker, or is to be cancelled
            continue
        row = rows.get(one.step_id)
        if row is not None and row.is_granted:
            taken[one.step_id] = one.run
            continue
        step = _asking(one, row)
        try:
            needed.append((_Asked(one, step, row), decide.needs_of(step, locked, own)))
        except CannotSpend as exc:
            needed.append((_Asked(one, step, row), exc))
    state = BudgetState(locked)
    lines = {(need.budget, need.key) for _, needs in needed if not isinstance(needs, CannotSpend) for need in needs}
    deciding = [one.step.id for one, _ in needed]
    state.load(await budgets.keys(connection, locked, lines, deciding), are_newcomers=True)
    done = _decide(state, needed, now)
    await budgets.save(connection, state.changed())
    await budgets.hold(connection, state.held)
    freed = await budget_steps.take(connection, taken | done.taken)
    for step_id, names in (await budget_steps.to_release(connection, taken)).items():
        answers[step_id] = SpendAnswer(True, is_granted=True, budgets=names)
    places = done.places
    if any(place.place == 0 for place in places):
        arrival = await budget_steps.arrival(connection)
        places = [place if place.place else place._replace(place=arrival) for place in places]
    await budget_steps.wait(connection, places)
    moved = await budgets.nudge(connection, dict.fromkeys(freed, now))
    failpoints.hit("step_budget.before_commit")
    answers |= done.answers
    return [answers[one.step_id] for one in asked], places, moved


def _decide(
    state: BudgetState, needed: Sequence[tuple[_Asked, tuple[Need, ...] | CannotSpend]], now: datetime
) -> _Decided:
    done = _Decided({}, [], {})
    for one, needs in needed:
        step = one.step
        refused = (
            state.why_unread(needs.budget, str(needs), one.row is None, now)
            if isinstance(needs, CannotSpend)
            else decide.why_waits(state, step, needs, now)
        )
        if refused is not None:
            done.places.append(decide.placed(step, refused, now))
            done.answers[step.id] = SpendAnswer(True, until=done.places[-1].at, message=refused.message)
            continue
        if isinstance(needs, CannotSpend):
            done.answers[step.id] = SpendAnswer(True, error=str(needs))
        else:
            state.spend(step.id, needs, step.run_id, now, (step.name, one.question.run.claim_generation))
            done.answers[step.id] = SpendAnswer(True, is_granted=True, budgets=_kept(state, step, needs))
            if one.row is not None:
                done.taken[step.id] = one.question.run
    return done


def _asking(one: SpendQuestion, row: StepInLine | None) -> AskingStep:
    step = AskingStep(one.step_id, one.run.id, one.name, one.spend, one.event, attempts=one.attempts)
    if row is None:
        return step
    return step._replace(place=row.place, came_from=row.budget, moves=row.moves, since=row.created_at)


def _kept(state: BudgetState, step: AskingStep, needs: Sequence[Need]) -> tuple[str, ...]:
    """The budgets that have to know when the step has ended: it holds a slot of them, or is tried first."""
    found = []
    for need in needs:
        closed = state.keys[need.budget, need.key].closed
        is_first = closed is not None and closed.probe_run_id == step.run_id
        if is_first or state.budgets[need.budget].spec.concurrency is not None:
            found.append(need.budget)
    return tuple(found)
