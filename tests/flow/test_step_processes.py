"""Durable steps in real worker processes that are killed, stopped and frozen: nothing finished is done again."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import eventually
from tests.processes import api, run, worker
from tidegate.client import Client
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "steps_app.py"
Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
QUICK = {"TIDEGATE_LEASE_MS": "1000", "TIDEGATE_STEP_RETRY_BASE_MS": "100", "TIDEGATE_STEP_RETRY_MAX_MS": "200"}
SUCCEEDED = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"


async def test_a_killed_workers_run_goes_on_after_the_last_finished_step(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('steps.three', 'test', '{\"seconds\": 1}')")
    with worker(database_url, APP, **QUICK) as first:
        await eventually(database, "select count(*) = 2 from effects")
        first.signal(signal.SIGKILL)
        first.wait()
    with worker(database_url, APP, **QUICK):
        await eventually(database, SUCCEEDED, 1)
    assert Counter(what for _, what in await effects()) == {"first": 1, "second begun": 2, "second": 1, "third": 1}
    row = await connection.fetchrow("select output, attempts, crashes from tidegate.workflow_runs")
    assert row is not None and tuple(row) == (["first", "second", "third"], 2, 0)


async def test_a_step_repeats_only_when_the_crash_came_before_its_commit(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('steps.three', 'test')")
    with worker(database_url, APP, TIDEGATE_FAILPOINTS="step.before_commit=kill@2", **QUICK) as first:
        assert first.wait() == 137
    with worker(database_url, APP, **QUICK):
        await eventually(database, SUCCEEDED, 1)
    assert Counter(what for _, what in await effects()) == {"first": 1, "second begun": 2, "second": 2, "third": 1}


async def test_a_failed_step_is_retried_after_a_restart(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('steps.flaky', 'test')")
    with worker(database_url, APP, **QUICK) as first:
        await eventually(
            database, "select count(*) = 1 from tidegate.workflow_run_steps where retry_state = 'scheduled'"
        )
        first.signal(signal.SIGKILL)
        first.wait()
    with worker(database_url, APP, **QUICK):
        await eventually(database, SUCCEEDED, 1)
    assert len(await effects()) == 3
    step = await connection.fetchrow("select status, retry_attempts, result from tidegate.workflow_run_steps")
    assert step is not None and tuple(step) == ("succeeded", 2, "ok")


async def test_a_timer_survives_and_holds_no_worker(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    for _ in range(30):
        await connection.execute("select tidegate.publish('steps.nap', 'test')")
    with worker(database_url, APP, TIDEGATE_WORKER_CONCURRENCY="2", **QUICK) as first:
        await eventually(database, "select count(*) = 30 from tidegate.workflow_run_steps where kind = 'sleep'")
        assert await connection.fetchval("select count(*) from tidegate.workflow_runs where status = 'running'") <= 2
        first.signal(signal.SIGKILL)
        first.wait()
    with worker(database_url, APP, **QUICK):
        await eventually(database, SUCCEEDED, 30)
    done = await effects()
    # On a slow machine a nap may end before the kill; then what its worker was just doing (two runs) is done again.
    assert {what: len({run for run, each in done if each == what}) for _, what in done} == {"before": 30, "after": 30}
    assert len(done) <= 60 + 2
    early = await connection.fetchval(
        "select count(*) from tidegate.workflow_run_steps s join tidegate.workflow_run_steps t using (workflow_run_id) "
        "where s.name = 'sleep-1' and t.name = 'after' and t.created_at < s.created_at + interval '1 second'"
    )
    assert early == 0


async def test_sigterm_hands_runs_back_between_steps(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('steps.three', 'test', '{\"seconds\": 2}')")
    with worker(database_url, APP, TIDEGATE_SHUTDOWN_MS="100", **QUICK) as first:
        await eventually(database, "select count(*) = 2 from effects")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    assert await connection.fetchval("select status from tidegate.workflow_runs") == "pending"
    with worker(database_url, APP, **QUICK):
        await eventually(database, SUCCEEDED, 1)
    assert Counter(what for _, what in await effects())["first"] == 1
    assert await connection.fetchval("select crashes from tidegate.workflow_runs") == 0


async def test_a_workflow_that_keeps_the_loop_busy_keeps_its_run(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    """Its lease is 1 s, it computes for 4 s, and another worker is waiting for such a chance."""
    with worker(database_url, APP, **QUICK), worker(database_url, APP, **QUICK):
        await connection.execute("select tidegate.publish('steps.busy', 'test', '{\"seconds\": 4}')")
        await eventually(database, SUCCEEDED, 1)
    assert [what for _, what in await effects()] == ["busy"]


async def test_a_plain_function(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('steps.plain', 'test', '{\"n\": 3}')")
    with worker(database_url, APP, **QUICK):
        await eventually(database, SUCCEEDED, 1)
    assert await connection.fetchval("select output from tidegate.workflow_runs") == 12


@pytest.mark.parametrize("when", ["waiting", "running"])
async def test_cancel_over_the_api(
    database_url: str, database: Database, connection: Connection, effects: Effects, when: str
) -> None:
    with api(database_url) as (_, url), worker(database_url, APP, **QUICK), Client(url) as client:
        kind, payload = ("steps.nap", {"duration": "1h"}) if when == "waiting" else ("steps.three", {"seconds": 6})
        client.publish(kind, source="test", payload=payload)
        sleeping = "select count(*) = 1 from tidegate.workflow_runs where status = 'pending' and attempts = 1"
        await eventually(database, sleeping if when == "waiting" else "select count(*) = 2 from effects")
        run_id = await connection.fetchval("select id::text from tidegate.workflow_runs")
        said = run("runs", "cancel", run_id, env={"TIDEGATE_URL": url})
        assert said.returncode == 0, said.stderr
        assert ("is cancelled" if when == "waiting" else "stops at its next step") in said.stdout
        await eventually(database, "select status = 'cancelled' from tidegate.workflow_runs")
        again = run("runs", "cancel", run_id, env={"TIDEGATE_URL": url})
        assert again.returncode == 1 and "has already ended: it is cancelled" in again.stderr
    done = {what for _, what in await effects()}
    assert "after" not in done and "third" not in done


async def test_a_workflow_that_exits_fails_and_its_worker_lives(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    with worker(database_url, APP, **QUICK):
        await connection.execute("select tidegate.publish('steps.exit', 'test')")
        await eventually(database, "select count(*) = 1 from tidegate.workflow_runs where status = 'failed'")
        await connection.execute("select tidegate.publish('steps.three', 'test')")
        await eventually(database, SUCCEEDED, 1)
    assert await connection.fetchval("select sum(crashes) from tidegate.workflow_runs") == 0


@pytest.mark.parametrize("which", ["thread", "plain_thread"])
async def test_sigterm_ends_the_process_although_a_thread_is_busy(
    database_url: str, database: Database, connection: Connection, which: str
) -> None:
    with worker(database_url, APP, TIDEGATE_SHUTDOWN_MS="200", **QUICK) as first:
        await connection.execute(f"select tidegate.publish('steps.{which}', 'test')")
        await eventually(database, "select count(*) = 1 from tidegate.workflow_runs where status = 'running'")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0  # the thread sleeps for an hour
    assert await connection.fetchval("select status from tidegate.workflow_runs") == "pending"


@pytest.mark.parametrize("point", ["outcome.before_commit", "outcome.after_commit"])
@pytest.mark.parametrize("hit", [1, 2, 3, 4])
async def test_what_a_killed_run_publishes_is_published_once(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str, hit: int
) -> None:
    """Killed before or after the commit of each of its steps and of its end."""
    await connection.execute("select tidegate.publish('steps.tell', 'test')")
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=f"{point}=kill@{hit}", **QUICK) as first:
        assert first.wait() == 137
    with worker(database_url, APP, **QUICK):
        await eventually(database, SUCCEEDED, 3)
    types = await connection.fetch("select type, payload->>'workflow' from tidegate.workflow_events")
    assert Counter(tuple(row) for row in types) == {
        ("steps.tell", None): 1, ("steps.told", None): 1, ("tidegate.run.succeeded", "tell"): 1,
        ("tidegate.run.succeeded", "told"): 1,
    }  # fmt: skip
    assert {what for _, what in await effects()} == {"first", "second", "told", "ended"}
