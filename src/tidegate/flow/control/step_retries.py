"""The operator's verbs about steps that wait to be tried again.

A run goes on through its steps, so a step whose retry is cancelled ends its run: at once when the run rests, at its
next step when a worker holds it for the sake of others. Timers are no retries: to end one, cancel the run.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple

from tidegate.errors import Conflict, NotFound
from tidegate.flow.control.verbs import DONE, RetryVerb
from tidegate.flow.decide.reporting import log_trigger_moves
from tidegate.flow.run import finish
from tidegate.model.source import BreakerPolicy
from tidegate.model.trigger_gate import TriggerMove
from tidegate.store import audit, decisions, held_steps, runs
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.store.held_steps import StepOfRun
from tidegate.store.runs import EndedRun
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("control")

StepCancelled = Literal["cancelled", "cancelling"]


class StepsChanged(NamedTuple):
    """The steps whose retry was cancelled or forced, those whose run a worker is to stop, the breakers that moved, and
    how many retries ended with their runs."""

    changed: Sequence[StepOfRun] = ()
    stopping: Sequence[StepOfRun] = ()
    moves: Sequence[TriggerMove] = ()
    cancelled_retries: int = 0

    @property
    def total(self) -> int:
        return len(self.changed) + len(self.stopping)


async def cancel_step(database: Database, step_id: uuid.UUID, actor: str, breaker: BreakerPolicy) -> StepCancelled:
    """`cancelled`: its run rested, and has ended. `cancelling`: a worker does other steps of its run, and stops.

    Conflict when it does not wait to be tried again.
    """
    done = await database.run(partial(_change_waiting, step_id=step_id, verb="cancel", actor=actor, breaker=breaker))
    told(done, "cancel", actor)
    return "cancelled" if done.changed else "cancelling"


async def force_step(database: Database, step_id: uuid.UUID, actor: str, breaker: BreakerPolicy) -> None:
    """Make a step that waits due now, and its run; a closed trigger or key still holds it. Conflict when it does not
    wait, or a worker holds its run."""
    done = await database.run(partial(_change_waiting, step_id=step_id, verb="force", actor=actor, breaker=breaker))
    told(done, "force", actor)


async def change_steps(
    connection: Connection,
    step_ids: Sequence[uuid.UUID],
    verb: RetryVerb,
    actor: str,
    breaker: BreakerPolicy,
    *,
    reason: str | None = None,
) -> StepsChanged:
    """Cancel or force the retries of those of the steps that wait, for `reason` if one is given."""
    known = await held_steps.get(connection, step_ids)
    change = _cancel if verb == "cancel" else _force
    done = await change(connection, known, actor, breaker, reason)
    lines = [
        NewDecision(one.event_id, None, "step", DONE[verb], reason=f"step {one.name!r}", attempt=one.retry_attempts,
                 actor=actor, trigger_id=one.trigger_id)
        for one in (*done.changed, *done.stopping) if one.event_id is not None
    ]  # fmt: skip
    await decisions.insert(connection, lines)
    return done


def told(done: StepsChanged, verb: RetryVerb, actor: str) -> None:
    """Count and log, after the commit, what was done."""
    log_trigger_moves(done.moves)
    if verb == "cancel":
        # A worker that stops a run counts it, and what waited in it.
        metrics.STEP_RETRIES.labels("cancelled").inc(done.cancelled_retries)
        for workflow, _ in {(one.workflow, one.workflow_run_id) for one in done.changed}:
            metrics.ran(workflow, "cancelled")
    for one in (*done.changed, *done.stopping):
        _log.info(f"step.retry_{DONE[verb]}", step_id=str(one.id), step=one.name,
                  run_id=str(one.workflow_run_id), workflow=one.workflow, attempt=one.retry_attempts,
                  actor=actor)  # fmt: skip


async def _cancel(
    connection: Connection, known: Sequence[StepOfRun], actor: str, breaker: BreakerPolicy, reason: str | None
) -> StepsChanged:
    resting: list[StepOfRun] = []
    stopping: list[StepOfRun] = []

    async def end() -> list[EndedRun]:
        now = await _locked(connection, known, reason)
        resting.extend(one for one in now if one.is_resting)
        for one in now:
            if one.waits_beside_others and await runs.request_cancel(connection, one.workflow_run_id, actor):
                stopping.append(one)
        ended = [
            await runs.cancel_waiting(connection, run_id, actor)
            for run_id in sorted({one.workflow_run_id for one in resting})
        ]
        return [run for run in ended if run is not None]

    trigger_ids = {one.trigger_id for one in known if one.trigger_id is not None}
    freed = await finish.end_all_waiting(connection, trigger_ids, end, breaker)
    return StepsChanged(resting, stopping, freed.moves, freed.cancelled_retries)


async def _force(
    connection: Connection, known: Sequence[StepOfRun], actor: str, breaker: BreakerPolicy, reason: str | None
) -> StepsChanged:
    resting = [one for one in await _locked(connection, known, reason) if one.is_resting]
    forced = await held_steps.force(connection, [one.id for one in resting])
    return StepsChanged([one for one in resting if one.id in forced])


async def _locked(connection: Connection, known: Sequence[StepOfRun], reason: str | None) -> list[StepOfRun]:
    """The steps as they are now that nobody can change them: their runs are locked."""
    await runs.lock(connection, sorted({one.workflow_run_id for one in known}))
    now = await held_steps.get(connection, [one.id for one in known])
    return [one for one in now if reason is None or one.reason == reason]


async def _change_waiting(
    connection: Connection, *, step_id: uuid.UUID, verb: RetryVerb, actor: str, breaker: BreakerPolicy
) -> StepsChanged:
    known = await held_steps.get(connection, [step_id])
    if not known:
        raise NotFound(f"no step {step_id}")
    if known[0].kind == "sleep":
        raise Conflict(f"step {step_id} is a timer, not a retry; to end it, cancel its run {known[0].workflow_run_id}")
    done = await change_steps(connection, [step_id], verb, actor, breaker)
    found = await held_steps.get(connection, [step_id])
    if not found:
        raise Conflict(f"step {step_id} is no longer waiting: its run was replayed, and begins it anew")
    [now] = found
    if not done.total:
        raise Conflict(f"step {step_id} is no longer waiting: {_why_not(now)}")
    await audit.insert(
        connection, actor=actor, action=f"step.{verb}", subject=str(step_id), before=_waits(known[0]),
        after=_waits(now),
    )  # fmt: skip
    return done


def _why_not(now: StepOfRun) -> str:
    if not now.is_retry:
        return f"it is {now.status}"
    if now.waits_beside_others:
        return "a worker is doing other steps of its run, and comes to it by itself"
    return "it is being tried"


def _waits(step: StepOfRun) -> dict[str, object]:
    return {
        "status": step.status, "retry_state": step.retry_state, "next_attempt_at": step.next_attempt_at,
        "run_id": step.workflow_run_id, "run_status": step.run_status,
    }  # fmt: skip
