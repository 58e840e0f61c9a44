"""Children in real worker processes that are killed at each commit: none is made twice, none is lost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.flow.conftest import eventually
from tests.flow.test_step_processes import QUICK, SUCCEEDED, Effects
from tests.processes import worker
from tidegate.flow import control
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "steps_app.py"
WANTED = {"after": 1, "leaf 100": 1} | {f"leaf {n}": 1 for n in range(5)}
EVERY_COMMIT = [
    *(("outcome.before_commit", hit) for hit in range(1, 9)), *(("outcome.after_commit", hit) for hit in range(1, 9)),
    ("dispatch.before_commit", 2), ("dispatch.after_commit", 2), ("run.after_claim", 2), ("run.before_finish", 2),
    ("run.after_finish", 2),
]  # fmt: skip


@pytest.mark.parametrize(("point", "hit"), EVERY_COMMIT)
async def test_a_kill_at_any_commit_makes_each_child_once(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str, hit: int
) -> None:
    """The hits lie on the writing of the children, the suspension of the parent, the ends of children with the wake-up
    of the parent, and its end."""
    await connection.execute("select tidegate.publish('steps.tree', 'test')")
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=f"{point}=kill@{hit}", **QUICK) as first:
        assert first.wait() == 137
    with worker(database_url, APP, **QUICK), worker(database_url, APP, **QUICK):
        await eventually(database, SUCCEEDED, 7)
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 7
    output = "select output from tidegate.workflow_runs where jsonb_typeof(output) = 'array'"
    assert await connection.fetchval(output) == [100, 0, 1, 2, 3, 4]
    children = await connection.fetch("select status, child_run_id from tidegate.run_children")
    assert Counter(row[0] for row in children) == {"succeeded": 6} and len({row[1] for row in children}) == 6
    done = Counter(what for _, what in await effects())
    assert done.keys() == WANTED.keys()
    # A step repeats only if the kill came before its commit; the worker was executing the parent and two at most.
    assert sum(done.values()) <= len(WANTED) + 3 and done["after"] <= 2


@pytest.mark.parametrize("point", ["outcome.before_commit", "outcome.after_commit", "reconcile.mid_batch"])
async def test_cancel_passes_down_although_workers_die(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str
) -> None:
    await connection.execute("select tidegate.publish('steps.stop', 'test')")
    with worker(database_url, APP, **QUICK):
        await eventually(database, "select count(*) = 4 from effects")
        await eventually(database, "select count(*) = 5 from tidegate.workflow_runs where status = 'pending'")
    run_id = await connection.fetchval(
        "select r.id from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id "
        "where e.type = 'steps.stop'"
    )
    await control.cancel_run(database, run_id, "ops", TRIGGER_BREAKER)
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=f"{point}=kill", **QUICK) as first:
        await connection.execute("select tidegate.publish('steps.nap', 'test', '{\"duration\": \"1ms\"}')")
        assert first.wait() == 137
    with worker(database_url, APP, **QUICK):
        await eventually(database, "select count(*) = 5 from tidegate.workflow_runs where status = 'cancelled'")
        await eventually(database, "select not exists (select from tidegate.run_cancellations)")
    assert len({what for _, what in await effects() if what.startswith("sleeper")}) == 4
