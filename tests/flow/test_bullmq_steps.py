"""TIDEGATE_QUEUE=bullmq and steps that wait: each is a row and a delayed job, and losing Redis loses nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import eventually
from tests.flow.test_bullmq import fire_early, until
from tests.processes import worker
from tests.redis_server import RedisServer, client_fixture, server_fixture  # noqa: F401
from tidegate.queue.bullmq import RUNS
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "steps_app.py"
Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
SUCCEEDED = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"
WAITING = "select count(*) = $1 from tidegate.workflow_run_steps where retry_state = 'scheduled'"


@pytest.fixture
def settings(server: RedisServer) -> dict[str, str]:
    return {
        "TIDEGATE_QUEUE": "bullmq", "TIDEGATE_REDIS_URL": server.url, "TIDEGATE_POLL_MS": "1000",
        "TIDEGATE_STEP_RETRY_JITTER_RATIO": "0",
    }  # fmt: skip


async def jobs(client: Any) -> dict[str, dict[str, str]]:
    keys = [key for key in await client.keys(f"*:{RUNS}:run-step-*") if not key.endswith(":lock")]
    return {key.split(":", 2)[2]: await client.hgetall(key) for key in keys}


async def scheduled(connection: Connection) -> list[Any]:
    return list(
        await connection.fetch("select * from tidegate.workflow_run_steps where retry_state = 'scheduled' order by id")
    )


async def test_a_step_that_waits_is_a_row_and_a_delayed_job(
    database_url: str, database: Database, connection: Connection, client: Any, settings: dict[str, str],
    effects: Effects,
) -> None:  # fmt: skip
    with worker(database_url, APP, TIDEGATE_STEP_RETRY_BASE_MS="60000", **settings):
        await connection.execute("select tidegate.publish('steps.flaky', 'test')")
        await connection.execute("select tidegate.publish('steps.nap', 'test', '{\"duration\": \"30m\"}')")
        await eventually(database, WAITING, 2)
        rows = await scheduled(connection)
        expected = {f"run-step-retry:{row['id']}:{row['retry_attempts']}": row for row in rows}

        async def are_there() -> bool:
            return set(await jobs(client)) == set(expected)

        await until(are_there)
        for job_id, job in (await jobs(client)).items():
            row = expected[job_id]
            assert json.loads(job["data"])["ids"] == [str(row["id"])]
            fires_at = (int(job["timestamp"]) + int(job["delay"])) / 1000
            assert fires_at == pytest.approx(row["next_attempt_at"].timestamp(), abs=1)
    assert {row["retry_attempts"] for row in rows} == {0, 1}


async def test_flushed_redis_is_refilled_and_no_step_is_lost_or_doubled(
    database_url: str, database: Database, connection: Connection, client: Any, settings: dict[str, str],
    effects: Effects,
) -> None:  # fmt: skip
    with worker(  # fifteen seconds: several passes of the comparison
        database_url, APP, TIDEGATE_STEP_RETRY_BASE_MS="15000", TIDEGATE_STEP_RETRY_FACTOR="1", **settings
    ) as process:
        for _ in range(10):
            await connection.execute("select tidegate.publish('steps.flaky', 'test')")
        await eventually(database, WAITING, 10)
        await until(lambda: jobs(client))
        await client.flushall()
        assert '"kind":"steps"' in process.wait_for_line(r"reconcile\.requeued").string
        await eventually(database, SUCCEEDED, 10)
    assert Counter(run for run, _ in await effects()).most_common()[0][1] == 3  # two failures each, and one success
    assert len(await effects()) == 30


async def test_early_and_repeated_jobs_begin_no_step_early(
    database_url: str, database: Database, connection: Connection, client: Any, settings: dict[str, str],
    effects: Effects,
) -> None:  # fmt: skip
    with worker(database_url, APP, TIDEGATE_STEP_RETRY_BASE_MS="300000", **settings):
        await connection.execute("select tidegate.publish('steps.flaky', 'test')")
        await eventually(database, WAITING, 1)
        before = await scheduled(connection)
        await until(lambda: jobs(client))

        async def all_fired() -> bool:
            await fire_early(client, RUNS)
            return not await jobs(client)

        await until(all_fired)
        await connection.execute("select tidegate.publish('steps.three', 'test')")  # a turn later …
        await eventually(database, SUCCEEDED, 1)
        assert await scheduled(connection) == before  # … it still waits
    assert Counter(what for _, what in await effects())["try"] == 1
