"""Cancel a run (a waiting one ends at once, a running one at its next step, a held start launches none), resume one
that failed, was cancelled or waits for other code, or execute a finished one again from the start."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Literal

from tidegate.clock import derived_uuid
from tidegate.errors import Conflict, NotFound
from tidegate.flow.control import retries
from tidegate.flow.keep import replay
from tidegate.flow.run import finish
from tidegate.flow.run.finish import Freed
from tidegate.model.ids import RunId
from tidegate.model.run import FINAL_RUN_STATUSES, Run, risk_of_resuming
from tidegate.model.source import BreakerPolicy
from tidegate.store import audit, circumstances, dead_letters, decisions, locks, runs, starts, windows
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("control")

Cancelled = Literal["cancelled", "cancelling"]


async def cancel_run(database: Database, run_id: RunId, actor: str, breaker: BreakerPolicy) -> Cancelled:
    """`cancelled`: it was waiting, and has ended, or was held, and is not launched. `cancelling`: it is running, and
    stops at its next step.

    Conflict when it has already ended.
    """
    try:
        done, known, freed = await database.run(partial(_cancel, run_id=run_id, actor=actor, breaker=breaker))
    except NotFound:
        if await _cancel_held(database, run_id, actor):
            return "cancelled"
        done, known, freed = await database.run(partial(_cancel, run_id=run_id, actor=actor, breaker=breaker))
    if freed is not None:
        metrics.ran(known.workflow, "cancelled")
        metrics.STEP_RETRIES.labels("cancelled").inc(freed.cancelled_retries)
    _log.info(f"run.{done}", run_id=run_id, workflow=known.workflow, event_id=known.event_id,
              correlation_id=known.correlation_id, actor=actor)  # fmt: skip
    return done


async def _cancel(
    connection: Connection, run_id: RunId, actor: str, breaker: BreakerPolicy
) -> tuple[Cancelled, Run, Freed | None]:
    known = await _known(connection, run_id)
    trigger_id = await runs.trigger_of(connection, run_id)
    end = partial(runs.cancel_waiting, connection, run_id, actor)
    while True:
        freed: Freed | None = await finish.end_waiting(connection, run_id, trigger_id, end, breaker)
        done: Cancelled = "cancelled" if freed is not None else "cancelling"
        if freed is not None or await runs.request_cancel(connection, run_id, actor):
            break
        now = await runs.get(connection, run_id) or known
        if now.status in FINAL_RUN_STATUSES:
            raise Conflict(f"run {run_id} has already ended: it is {now.status}")
        # It was suspended or resumed between the two statements: try again.
    await audit.insert(
        connection, actor=actor, action="run.cancel", subject=str(run_id), before={"status": known.status},
        after={"status": done},
    )  # fmt: skip
    return done, known, freed


async def _cancel_held(database: Database, run_id: RunId, actor: str) -> bool:
    """Cancel the delivery that is to launch the run, which has its id; whether it waited. Conflict when it will launch
    nothing, or its start is not decided; False when there is none, or it has launched the run meanwhile."""
    try:
        await retries.change_retry(database, "deliveries", run_id, "cancel", actor)
    except NotFound:
        async with database.connection() as connection:
            event_id = await starts.event_of(connection, run_id)
            if event_id is not None and await runs.get(connection, run_id) is None:
                raise Conflict(f"run {run_id} is not launched: tidegate explain {event_id} says why") from None
        return False
    except Conflict:
        async with database.connection() as connection:
            if await runs.get(connection, run_id) is None:
                raise
        return False
    return True


async def resume_run(database: Database, run_id: RunId, actor: str) -> None:
    """Resume a run that waits for a version of its code, on the code that workers have now: steps that it has recorded
    so far are used where the code asks for them, and need not fit. Conflict when it does not wait for a version."""
    known = await database.run(partial(_resume, run_id=run_id, actor=actor))
    _log.info("run.resumed", run_id=run_id, workflow=known.workflow, event_id=known.event_id,
              correlation_id=known.correlation_id, actor=actor)  # fmt: skip


async def _resume(connection: Connection, run_id: RunId, actor: str) -> Run:
    known = await _known(connection, run_id)
    if not await runs.accept_version(connection, run_id):
        raise Conflict(f"run {run_id} does not wait for a version of its code: it is {known.status}")
    if known.event_id is not None:
        why = f"from version {known.version} on the code that workers have now: {risk_of_resuming(known.warning)}"
        line = NewDecision(known.event_id, None, "run", "resumed", why, actor=actor, detail={"run_id": run_id})
        await decisions.insert(connection, [line])
    await audit.insert(
        connection, actor=actor, action="run.resume", subject=str(run_id), before={"version": known.version},
        after={"version": None},
    )  # fmt: skip
    return known


RunResumed = Literal["resumed", "scheduled"]


async def retry_run(database: Database, run_id: RunId, actor: str) -> RunResumed:
    """Resume a failed or cancelled run after its completed steps, as the same run, and its failed children with it.
    `scheduled`: a worker resumes it as soon as its trigger has a free slot and its children have stopped.
    Conflict when it is not failed or cancelled, or cannot resume."""
    done, known = await database.run(partial(_retry, run_id=run_id, actor=actor))
    _log.info("run.retried", run_id=run_id, workflow=known.workflow, event_id=known.event_id,
              correlation_id=known.correlation_id, status=done, actor=actor)  # fmt: skip
    return done


async def _retry(connection: Connection, run_id: RunId, actor: str) -> tuple[RunResumed, Run]:
    known = await _known(connection, run_id)
    letter_id = await dead_letters.open_of_run(connection, run_id)
    letter = await dead_letters.lock(connection, letter_id) if letter_id is not None else None
    if letter is not None and letter.replayed_at is None:
        is_resumed = (await replay.perform(connection, letter, actor)).into is not None
    else:
        line = NewDecision(known.event_id, None, "run", "retried", actor=actor) if known.event_id else None
        into = await replay.resume(connection, run_id, line)
        is_resumed = not isinstance(into, replay.Later)
        if isinstance(into, replay.Later):
            await dead_letters.wait_for_slot(
                connection, run_id, actor=actor, why=into.why, delay_ms=replay.SLOT_WAIT_MS
            )
    done: RunResumed = "resumed" if is_resumed else "scheduled"
    await audit.insert(
        connection, actor=actor, action="run.retry", subject=str(run_id), before={"status": known.status},
        after={"status": done},
    )  # fmt: skip
    return done, known


async def rerun_run(database: Database, run_id: RunId, actor: str, call_id: uuid.UUID | str | None = None) -> RunId:
    """Execute a finished run again from the start, as a new run with the same parameters and event; its id. Once for
    a `call_id`. Conflict when it is not finished, or its trigger has no free slot."""
    part = call_id.encode() if isinstance(call_id, str) else (call_id or uuid.uuid4()).bytes
    new_id = RunId(derived_uuid(run_id, part))
    known = await database.run(partial(_rerun, run_id=run_id, new_id=new_id, actor=actor))
    _log.info("run.rerun", run_id=new_id, rerun_of=run_id, workflow=known.workflow, event_id=known.event_id,
              correlation_id=known.correlation_id, actor=actor)  # fmt: skip
    return new_id


async def _rerun(connection: Connection, run_id: RunId, new_id: RunId, actor: str) -> Run:
    known = await _known(connection, run_id)
    if await runs.get(connection, new_id) is not None:  # committed, and the answer was lost
        return known
    await locks.share_all(connection)  # excludes changes of the workflow and the trigger until the commit
    found = await dead_letters.describe_run(connection, run_id)
    if found is None or found.status not in FINAL_RUN_STATUSES:
        raise Conflict(f"run {run_id} has not ended: it is {found.status if found else 'gone'}; cancel it first")
    if found.is_workflow_deleted:
        raise Conflict(f"workflow {found.workflow} of run {run_id} was deleted: nothing could run it")
    slot = await replay.find_slot(connection, found)
    if not slot.is_free:
        raise Conflict(f"{slot.why}; try again when a run has ended")
    if not await dead_letters.keep_story(connection, run_id):
        raise Conflict(f"run {run_id} no longer exists")
    await runs.lock(connection, [run_id])
    if await runs.get(connection, new_id) is not None:  # by a call that was sent twice
        return known
    await runs.rerun(connection, run_id, new_id, slot.key, gives_back=slot.gives_back)
    if known.window_id is not None:
        await windows.keep(connection, known.window_id)
    await slot.hold(connection, new_id)
    if known.event_id is not None:
        line = NewDecision(
            known.event_id,
            None,
            "run",
            "rerun",
            f"as run {new_id}",
            actor=actor,
            trigger_id=found.trigger_id,
            detail={"run_id": run_id},
        )
        await decisions.insert(connection, [line])
    await audit.insert(
        connection, actor=actor, action="run.rerun", subject=str(run_id), before={"status": known.status},
        after={"run_id": new_id},
    )  # fmt: skip
    return known


async def _known(connection: Connection, run_id: RunId) -> Run:
    """The run. NotFound says what became of its start, if there is one that has launched no run."""
    known = await runs.get(connection, run_id)
    if known is not None:
        return known
    event_id = await circumstances.event_of_delivery(connection, run_id)
    if event_id is None:
        raise NotFound(f"no run {run_id}")
    why = (await starts.unlaunched(connection, {run_id: event_id})).get(run_id)
    if why is None:
        raise NotFound(f"run {run_id} is not launched yet: tidegate explain {event_id} says what its start waits for")
    raise NotFound(
        f"run {run_id} was not launched, and its start is not repeated: {why}. Start the workflow again with another "
        f"id, or publish the event {event_id} again with another id"
    )
