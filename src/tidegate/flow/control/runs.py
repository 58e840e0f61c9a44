"""Cancel a run. A waiting run ends at once, a running one at its next step."""

from __future__ import annotations

from functools import partial
from typing import Literal

from tidegate.errors import Conflict, NotFound
from tidegate.flow.run import finish
from tidegate.flow.run.finish import Freed
from tidegate.model.ids import RunId
from tidegate.model.run import FINAL_RUN_STATUSES, Run
from tidegate.model.source import BreakerPolicy
from tidegate.store import audit, runs
from tidegate.store.db import Connection, Database
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("control")

Cancelled = Literal["cancelled", "cancelling"]


async def cancel_run(database: Database, run_id: RunId, actor: str, breaker: BreakerPolicy) -> Cancelled:
    """`cancelled`: it was waiting, and has ended. `cancelling`: it is running, and stops at its next step.

    Conflict when it has already ended.
    """
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
    known = await runs.get(connection, run_id)
    if known is None:
        raise NotFound(f"no run {run_id}")
    trigger_id = await runs.trigger_of(connection, run_id)
    end = partial(runs.cancel_waiting, connection, run_id, actor)
    while True:
        freed: Freed | None = await finish.end_waiting(connection, trigger_id, end, breaker)
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
