"""Windows with real worker processes and the real clock: every event is in one run, whoever works and dies."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.flow import test_trigger_workers as trigger_workers
from tests.flow.checker import milliseconds, most_in_any_interval
from tests.flow.conftest import eventually
from tests.flow.test_trigger_workers import fleet
from tests.flow.window_checker import Collected, Given, breaches
from tests.processes import tidegate
from tests.redis_server import RedisServer, client_fixture, server_fixture  # noqa: F401
from tidegate.store.db import Connection, Database

APP = """
import asyncio
import os

import asyncpg

from tidegate import Batch, Context, Tidegate

app = Tidegate()
pool = None

async def effects():
    global pool
    if pool is None:
        pool = asyncpg.create_pool(os.environ["TIDEGATE_DATABASE_URL"], min_size=0, max_size=4)
    return await pool

@app.workflow(on="tick", WINDOW)
async def collect(ctx: Context) -> int:
    rows = [(ctx.run_id, event.payload["n"]) for event in ctx.events]
    await (await effects()).executemany("insert into given (run_id, event) values ($1, $2)", rows)
    await ctx.sleep("50ms")
    assert rows == [(ctx.run_id, event.payload["n"]) for event in ctx.events]
    return len(rows)
"""
Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
LEASE = {"TIDEGATE_LEASE_MS": "600"}
DONE = """
select (select count(*) from tidegate.workflow_events) = $1 and not exists (select from tidegate.event_inbox)
   and not exists (select from tidegate.workflow_trigger_deliveries where workflow_run_id is null)
   and not exists (select from tidegate.workflow_runs where finished_at is null)
"""
WINDOWS = {
    "batch": ('batch=Batch(7, "400ms"), key="{{ event.payload.k }}"', 7, timedelta(milliseconds=400)),
    "debounce": ('debounce="150ms", max_wait="600ms", key="{{ event.payload.k }}"', 1000, timedelta(milliseconds=600)),
    "limited": ('batch=Batch(7, "200ms"), max_concurrency=2', 7, timedelta(milliseconds=200)),
}


async def publish(connection: Connection, first: int, count: int, keys: int) -> None:
    await connection.execute(
        "select tidegate.publish('tick', 'shop', jsonb_build_object('n', n, 'k', n % $3::int)) "
        "from generate_series($1::int, $1 + $2::int - 1) n", first, count, keys,
    )  # fmt: skip


async def judge(connection: Connection, published: int, most: int, longest: timedelta) -> list[str]:
    given = [Given(*row) for row in await connection.fetch("select run_id, event from given")]
    rows = [
        Collected(*row)
        for row in await connection.fetch(
            "select d.window_id, d.workflow_run_id, (e.payload ->> 'n')::int, d.created_at "
            "from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e on e.id = d.event_id"
        )
    ]
    assert len(rows) == published
    return breaches(range(published), given, rows, most=most, longest=longest)


@pytest.fixture
async def given(connection: Connection) -> None:
    await connection.execute("create table given (n bigserial primary key, run_id uuid, event int)")


def write_app(folder: Path, window: str) -> Path:
    file = folder / "collecting.py"
    file.write_text(APP.replace("WINDOW", window))
    return file


@pytest.mark.parametrize("kind", WINDOWS)
async def test_every_event_is_in_one_run_although_workers_are_killed(
    database_url: str, database: Database, connection: Connection, given: None, tmp_path: Path, kind: str
) -> None:
    window, most, longest = WINDOWS[kind]
    app, published = write_app(tmp_path, window), 0
    choose = random.Random(kind)
    with fleet(database_url, app, 3, **LEASE) as workers:
        for number in range(8):
            await publish(connection, published, count := choose.randint(5, 60), keys=4)
            published += count
            await asyncio.sleep(choose.uniform(0.01, 0.3))
            if number in (2, 5):
                victim = workers.pop()
                victim.signal(signal.SIGKILL)
                assert victim.wait() == -signal.SIGKILL
        await eventually(database, DONE, published)
    assert await judge(connection, published, most, longest) == []
    assert await connection.fetchval("select count(*) from tidegate.trigger_windows where state <> 'taken'") == 0


POINTS = (
    "dispatch.before_commit=kill", "dispatch.after_commit=kill", "window.closing=kill", "run.after_claim=kill",
    "delivery_retry.before_commit=kill", "delivery_retry.after_commit=kill", "run.before_finish=kill",
)  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_at_any_commit_loses_and_repeats_nothing(
    database_url: str, database: Database, connection: Connection, given: None, tmp_path: Path, point: str
) -> None:
    window, most, longest = WINDOWS["batch"]
    app = write_app(tmp_path, window)
    await publish(connection, 0, 30, keys=3)
    settings = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_BATCH_SIZE": "10", **LEASE}
    with tidegate("worker", str(app), **settings, TIDEGATE_FAILPOINTS=point) as process:
        assert process.wait() == 137
    with tidegate("worker", str(app), **settings):
        await eventually(database, DONE, 30)
    assert await judge(connection, 30, most, longest) == []


async def test_workers_take_no_more_than_is_allowed(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    limit, window_ms, count = 12, 500, 400
    limits = f"skip_over='{limit}/{window_ms}ms', key='{{{{ event.payload.k }}}}'"
    app = trigger_workers.write_app(tmp_path, limits)
    with fleet(database_url, app, 3, **LEASE) as workers:
        for n in range(0, count, 20):
            await connection.execute(
                "select tidegate.publish('tick', 'shop', jsonb_build_object('k', n % 2, 'seconds', 0)) "
                "from generate_series($1::int, $1 + 19) n", n,
            )  # fmt: skip
            await asyncio.sleep(0.05)
            if n == 100:
                victim = workers.pop()
                victim.signal(signal.SIGKILL)
                assert victim.wait() == -signal.SIGKILL
        await eventually(database, trigger_workers.DECIDED, count)
    for key in (0, 1):
        rows = await connection.fetch(
            "select d.status, d.reason, d.launched_at from tidegate.workflow_trigger_deliveries d "
            "join tidegate.workflow_events e on e.id = d.event_id where e.payload @> jsonb_build_object('k', $1::int)",
        key )  # fmt: skip
        times = [row["launched_at"] for row in rows if row["status"] == "launched"]
        assert len(times) > limit and most_in_any_interval(milliseconds(times), window_ms) <= limit
        assert {row["reason"] for row in rows if row["status"] != "launched"} == {"skip_over"}
    ran = await connection.fetchval("select count(distinct run_id) from effects")
    assert ran == await connection.fetchval("select count(*) from tidegate.workflow_runs")


async def test_with_bullmq_windows_close_though_redis_forgets(
    database_url: str,
    database: Database,
    connection: Connection,
    given: None,
    tmp_path: Path,
    server: RedisServer,
    client: Any,
) -> None:
    window, most, longest = WINDOWS["batch"]
    queue = {"TIDEGATE_QUEUE": "bullmq", "TIDEGATE_REDIS_URL": server.url}
    with fleet(database_url, write_app(tmp_path, window), 2, **LEASE, **queue):
        await publish(connection, 0, 50, keys=3)
        await eventually(database, "select count(*) > 0 from given")
        await client.flushall()
        await publish(connection, 50, 50, keys=3)
        await eventually(database, DONE, 100)
    assert await judge(connection, 100, most, longest) == []
