"""Cancel and force steps that wait for a retry.

A run continues through its steps, so a step whose retry is cancelled ends its run: at once when the run is suspended,
at its next step when a worker holds it for the sake of other steps. Timers are no retries: to end one, cancel the run.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from tidegate.errors import Conflict, NotFound
from tidegate.flow.control.retry_verbs import DONE, ChangedRetries, RetryOrder, RetryRow
from tidegate.flow.run import finish
from tidegate.model.ids import StepId
from tidegate.store import decisions, held_steps, runs
from tidegate.store.bulk_retries import WaitingMatch
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.store.held_steps import StepOfRun
from tidegate.store.runs import EndedRun
from tidegate.telemetry import metrics


class StepVerbs:
    """Cancelled, a step ends its run; forced, it is due now, and its run with it, unless its trigger or key is blocked.
    A step whose run a worker holds cannot be forced."""

    noun = "step"

    async def get(self, connection: Connection, row_id: uuid.UUID) -> RetryRow:
        found = await held_steps.get(connection, [StepId(row_id)])
        if not found:
            raise NotFound(f"no step {row_id}")
        [step] = found
        if step.kind != "step":
            what = "a timer" if step.kind == "sleep" else "a wait for an event"
            raise Conflict(f"step {row_id} is {what}, not a retry; to end it, cancel its run {step.workflow_run_id}")
        return RetryRow(
            WaitingMatch(row_id, step.trigger_id, step.workflow_run_id),
            _status(step),
            {"status": step.status, "retry_state": step.retry_state, "next_attempt_at": step.next_attempt_at,
             "run_id": step.workflow_run_id, "run_status": step.run_status},
            _logged(step),
        )  # fmt: skip

    async def change(self, connection: Connection, rows: Sequence[WaitingMatch], order: RetryOrder) -> ChangedRetries:
        known = await held_steps.get(connection, [StepId(row.id) for row in rows])
        change = _cancel if order.verb == "cancel" else _force
        changed, done = await change(connection, known, order)
        lines = [
            NewDecision(one.event_id, None, "step", DONE[order.verb], reason=f"step {one.name!r}",
                        attempt=one.retry_attempts, actor=order.actor, trigger_id=one.trigger_id)
            for one in changed if one.event_id is not None
        ]  # fmt: skip
        await decisions.insert(connection, lines)
        return done._replace(ids=[one.id for one in changed], logged=[_logged(one) for one in changed])

    def count_cancelled(self, count: int) -> None:
        metrics.STEP_RETRIES.labels("cancelled").inc(count)


async def _cancel(
    connection: Connection, known: Sequence[StepOfRun], order: RetryOrder
) -> tuple[list[StepOfRun], ChangedRetries]:
    suspended: list[StepOfRun] = []
    stopping: list[StepOfRun] = []

    async def end() -> list[EndedRun]:
        now = await _locked(connection, known, order.reason)
        suspended.extend(one for one in now if one.is_suspended)
        for one in now:
            if one.waits_beside_others and await runs.request_cancel(connection, one.workflow_run_id, order.actor):
                stopping.append(one)
        ended = [
            await runs.cancel_waiting(connection, run_id, order.actor)
            for run_id in sorted({one.workflow_run_id for one in suspended})
        ]
        return [run for run in ended if run is not None]

    trigger_ids = {one.trigger_id for one in known if one.trigger_id is not None}
    run_ids = {one.workflow_run_id for one in known}
    freed = await finish.end_all_waiting(connection, run_ids, trigger_ids, end, order.breaker)
    # A worker that stops a run counts it, and the retries that waited in it.
    ended_runs = [workflow for workflow, _ in {(one.workflow, one.workflow_run_id) for one in suspended}]
    return [*suspended, *stopping], ChangedRetries(
        stopping=[one.id for one in stopping], cancelled=freed.cancelled_retries, ended_runs=ended_runs,
        moves=freed.moves,
    )  # fmt: skip


async def _force(
    connection: Connection, known: Sequence[StepOfRun], order: RetryOrder
) -> tuple[list[StepOfRun], ChangedRetries]:
    suspended = [one for one in await _locked(connection, known, order.reason) if one.is_suspended]
    forced = await held_steps.force(connection, [one.id for one in suspended])
    return [one for one in suspended if one.id in forced], ChangedRetries()


async def _locked(connection: Connection, known: Sequence[StepOfRun], reason: str | None) -> list[StepOfRun]:
    """The steps as they are now that their runs are locked, so that no other transaction can change them."""
    await runs.lock(connection, sorted({one.workflow_run_id for one in known}))
    now = await held_steps.get(connection, [one.id for one in known])
    return [one for one in now if reason is None or one.reason == reason]


def _status(step: StepOfRun) -> str:
    if not step.is_retry:
        return f"it is {step.status}"
    if step.waits_beside_others:
        return "a worker is executing other steps of its run and will retry it by itself"
    return "it is being executed"


def _logged(step: StepOfRun) -> dict[str, object]:
    return {"step_id": str(step.id), "step": step.name, "run_id": str(step.workflow_run_id),
            "workflow": step.workflow, "attempt": step.retry_attempts}  # fmt: skip
