"""The process dies while it writes what came of runs, or as it tells the queue: all of it happened, or nothing did."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import APP, eventually
from tests.processes import api, worker
from tests.redis_server import RedisServer, server_fixture  # noqa: F401
from tidegate.client import Client
from tidegate.errors import Unavailable
from tidegate.store.db import Connection, Database

STEPS_APP = Path(__file__).parent / "steps_app.py"
Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
LEASE = {"TIDEGATE_LEASE_MS": "1000"}
SUCCEEDED = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"


@pytest.mark.parametrize(
    ("point", "times_first"), [("outcome.before_commit=kill", 2), ("outcome.after_commit=kill", 1)]
)
async def test_worker_dies_around_the_commit_of_a_step(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str, times_first: int
) -> None:
    """After the commit the run goes on with the next step; before it, nothing of the step is there."""
    await connection.execute("select tidegate.publish('steps.three', 'test')")
    with worker(database_url, STEPS_APP, TIDEGATE_FAILPOINTS=point, **LEASE) as process:
        assert process.wait() == 137
    assert await connection.fetchval("select count(*) from tidegate.workflow_run_steps") == (times_first == 1)
    with worker(database_url, STEPS_APP, **LEASE):
        await eventually(database, SUCCEEDED, 1)
    done = Counter(what for _, what in await effects())
    assert done == {"first": times_first, "second begun": 1, "second": 1, "third": 1}


@pytest.mark.parametrize("point", ["outcome.before_commit=kill", "outcome.after_commit=kill"])
async def test_worker_dies_as_it_frees_a_slot(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str
) -> None:
    """The end of a run and the launch of who waits for its slot are one: no slot is lost and none is given twice."""
    await connection.execute("select tidegate.publish('work.narrow', 'test') from generate_series(1, 6)")
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=point, **LEASE) as process:
        assert process.wait() == 137
    unfinished = "select count(*) from tidegate.workflow_runs where status in ('pending', 'running')"
    assert 0 < await connection.fetchval(unfinished) <= 2
    with worker(database_url, APP, **LEASE):
        await eventually(database, SUCCEEDED, 6)
    assert await connection.fetchval("select count(distinct event_id) from tidegate.workflow_runs") == 6


async def test_worker_dies_between_a_failure_and_its_dead_letter(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('work.broken', 'test')")
    both = (
        "select (select count(*) from tidegate.workflow_runs where status = 'failed'), "
        "       (select count(*) from tidegate.dead_letters)"
    )
    with worker(database_url, APP, TIDEGATE_FAILPOINTS="outcome.before_dead_letter=kill", **LEASE) as process:
        assert process.wait() == 137
    assert tuple(await connection.fetchrow(both) or ()) == (0, 0)
    with worker(database_url, APP, **LEASE):
        await eventually(database, "select count(*) = 1 from tidegate.workflow_runs where status = 'failed'")
    assert tuple(await connection.fetchrow(both) or ()) == (1, 1)


async def test_api_dies_as_it_has_told_the_queue(
    database_url: str, database: Database, connection: Connection, effects: Effects, server: RedisServer
) -> None:
    """What is in Redis outlives who sent it, and may name what is done long since: a look that finds nothing."""
    queue = {"TIDEGATE_QUEUE": "bullmq", "TIDEGATE_REDIS_URL": server.url, **LEASE}
    point = "queue.after_send=kill"
    with api(database_url, TIDEGATE_FAILPOINTS=point, **queue) as (process, url), Client(url) as client:
        with contextlib.suppress(Unavailable):  # it may die before the answer has left
            client.publish("work.quick", source="test", id="e-1", payload={"n": 1})
        assert process.wait() == 137
    with worker(database_url, APP, **queue), api(database_url, **queue) as (_, url), Client(url) as client:
        await eventually(database, SUCCEEDED, 1)
        assert client.publish("work.quick", source="test", id="e-1", payload={"n": 1}).status == "duplicate"
        client.publish("work.quick", source="test", id="e-2", payload={"n": 2})
        await eventually(database, SUCCEEDED, 2)
    assert len({run for run, _ in await effects()}) == len(await effects()) == 2
