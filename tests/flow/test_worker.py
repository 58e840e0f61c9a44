"""Worker processes: they stop cleanly, take over from the dead, and a zombie changes nothing."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from typing import Any

from tests.flow.conftest import APP, eventually
from tests.processes import worker
from tidegate.store.db import Connection, Database

Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]

RUN_STATUS = "select status from tidegate.workflow_runs"


async def test_sigterm_lets_runs_finish_and_exits_with_0(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('work.slow', 'test', '{\"seconds\": 1}')")
    with worker(database_url, APP) as process:
        await eventually(database, "select count(*) = 1 from effects")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
        assert "worker.stopped" in process.output
    assert await connection.fetchval(RUN_STATUS) == "succeeded"
    assert [what for _, what in await effects()] == ["begun", "done"]


async def test_sigterm_hands_back_what_does_not_finish(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('work.slow', 'test', '{\"seconds\": 600}')")
    with worker(database_url, APP, TIDEGATE_SHUTDOWN_MS="100") as process:
        await eventually(database, "select count(*) = 1 from effects")
        process.signal(signal.SIGTERM)
        assert process.wait() == 0
    row = await connection.fetchrow("select status, attempts, claimed_by from tidegate.workflow_runs")
    assert row is not None and tuple(row) == ("pending", 1, None)


async def test_a_killed_workers_run_is_taken_over_when_its_lease_ends(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('work.slow', 'test', '{\"seconds\": 2}')")
    with worker(database_url, APP, TIDEGATE_LEASE_MS="1000") as first:
        await eventually(database, "select count(*) = 1 from effects")
        first.signal(signal.SIGKILL)
        first.wait()
    with worker(database_url, APP, TIDEGATE_LEASE_MS="1000"):
        await eventually(database, "select status = 'succeeded' from tidegate.workflow_runs")
    assert [what for _, what in await effects()] == ["begun", "begun", "done"]
    assert await connection.fetchval("select attempts from tidegate.workflow_runs") == 2


async def test_a_zombies_late_result_changes_nothing(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('work.slow', 'test', '{\"seconds\": 2}')")
    with worker(database_url, APP, TIDEGATE_LEASE_MS="1000") as zombie:
        await eventually(database, "select count(*) = 1 from effects")
        zombie.signal(signal.SIGSTOP)
        with worker(database_url, APP, TIDEGATE_LEASE_MS="1000"):
            await eventually(database, "select status = 'succeeded' from tidegate.workflow_runs")
            settled = await connection.fetchrow("select * from tidegate.workflow_runs")
            zombie.signal(signal.SIGCONT)
            zombie.wait_for_line("run.lease_lost|run.result_discarded")
    assert dict(await connection.fetchrow("select * from tidegate.workflow_runs")) == dict(settled)  # type: ignore[arg-type]


async def test_a_failing_workflow_fails_with_its_traceback(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('work.broken', 'test')")
    await connection.execute("select tidegate.publish('work.slow', 'test', '{\"seconds\": \"long\"}')")
    await connection.execute("select tidegate.publish('work.slow', 'test')")
    with worker(database_url, APP):
        await eventually(database, "select count(*) = 3 from tidegate.workflow_runs where status = 'failed'")
    in_order = (
        "select r.error from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id "
        "order by e.ingress_sequence"  # ids of one millisecond have no order
    )
    errors = [row[0] for row in await connection.fetch(in_order)]
    assert "RuntimeError: this one always fails" in errors[0] and "in broken" in errors[0]
    assert errors[1] == "NonRetryable: parameter 'seconds' of workflow slow is wrong: Expected `float`, got `str`"
    assert errors[2] == "NonRetryable: parameter 'seconds' of workflow slow is missing in the event"
    assert await effects() == []


async def test_runs_of_unknown_workflows_are_left_for_a_worker_that_has_them(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Any
) -> None:
    other = tmp_path / "other.py"
    other.write_text("from tidegate import Tidegate\napp = Tidegate()\n")
    with worker(database_url, APP):
        pass  # registers its workflows
    await connection.execute("select tidegate.publish('work.quick', 'test', '{\"n\": 1}')")
    with worker(database_url, other):
        await eventually(database, "select count(*) = 1 from tidegate.workflow_runs")
    assert await connection.fetchval(RUN_STATUS) == "pending"
    with worker(database_url, APP):
        await eventually(database, "select status = 'succeeded' from tidegate.workflow_runs")
    assert len(await effects()) == 1


async def test_log_lines_carry_the_correlation_id_from_publish_to_run(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    with worker(database_url, APP) as process:
        await connection.execute(
            "select tidegate.publish('work.quick', 'test', '{\"n\": 1}', correlation_id => 'corr-1')"
        )
        line = process.wait_for_line(r'"action": ?"run.succeeded"')
    assert '"correlation_id":"corr-1"' in line.string and '"event_id"' in line.string
