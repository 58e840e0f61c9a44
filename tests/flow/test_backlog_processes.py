"""Backlogs with real worker processes and the real clock: never more waits than may, and every event is accounted for
once, whoever works and dies."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.flow.conftest import eventually
from tests.flow.test_trigger_workers import fleet
from tests.processes import tidegate
from tidegate.store.db import Connection, Database

APP = """
import asyncio
import os

import asyncpg

from tidegate import Context, Tidegate

app = Tidegate()
pool = None

async def effects():
    global pool
    if pool is None:
        pool = asyncpg.create_pool(os.environ["TIDEGATE_DATABASE_URL"], min_size=0, max_size=4)
    return await pool

@app.workflow(on="tick", POLICY)
async def handle(ctx: Context, n: int) -> int:
    async def note() -> None:
        await (await effects()).execute("insert into given (event) values ($1)", n)
    await ctx.step("note", note)
    await ctx.sleep("20ms")
    return n
"""
LEASE = {"TIDEGATE_LEASE_MS": "600"}
MOST = 4
DONE = """
select (select count(*) from tidegate.workflow_events) = $1 and not exists (select from tidegate.event_inbox)
   and not exists (select from tidegate.workflow_trigger_deliveries where retry_state in ('scheduled', 'running'))
   and not exists (select from tidegate.workflow_runs where finished_at is null)
"""
WAITING = """
select coalesce(max(number), 0) from (
  select count(*) as number
    from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e on e.id = d.event_id
   where d.retry_state = 'scheduled' group by e.payload ->> 'k') w
"""
POLICIES = {
    "skip": f"max_concurrency=2, max_waiting={MOST}",
    "drop_oldest": f"throttle='40/s', max_waiting={MOST}, when_full='drop_oldest'",
    "dead_letter": f"max_concurrency=1, max_waiting={MOST}, when_full='dead_letter'",
    "by_key": f"while_running='queue', key='{{{{ event.payload.k }}}}', max_waiting={MOST}, when_full='drop_oldest'",
    "latest": "while_running='queue', key='{{ event.payload.k }}', keep='latest'",
}


async def publish(connection: Connection, first: int, count: int, keys: int) -> None:
    await connection.execute(
        "select tidegate.publish('tick', 'shop', jsonb_build_object('n', n, 'k', n % $3::int)) "
        "from generate_series($1::int, $1 + $2::int - 1) n", first, count, keys,
    )  # fmt: skip


def write_app(folder: Path, policy: str) -> Path:
    file = folder / "waiting.py"
    file.write_text(APP.replace("POLICY", policy))
    return file


@pytest.fixture
async def given(connection: Connection) -> None:
    await connection.execute("create table given (n bigserial primary key, event int)")


async def judge(connection: Connection, published: int) -> Counter[str]:
    """The states of the deliveries; each event has one, and those that were launched did what they do."""
    rows = await connection.fetch(
        "select (e.payload ->> 'n')::int as n, d.status, d.reason, d.workflow_run_id is not null as has_run, "
        "(select count(*) from tidegate.dead_letters l where l.subject_id = d.id) as letters "
        "from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e on e.id = d.event_id"
    )
    assert sorted(row["n"] for row in rows) == list(range(published))
    launched = {row["n"] for row in rows if row["status"] == "launched"}
    assert {row[0] for row in await connection.fetch("select event from given")} == launched
    for row in rows:
        assert row["has_run"] == (row["status"] == "launched")
        assert row["letters"] == (row["status"] == "exhausted")
        assert row["status"] == "launched" or row["reason"] in ("backlog_full", "superseded", "max_wait")
    return Counter(row["status"] for row in rows)


@pytest.mark.parametrize("kind", POLICIES)
async def test_no_more_wait_than_may_although_workers_are_killed(
    database_url: str, database: Database, connection: Connection, given: None, tmp_path: Path, kind: str
) -> None:
    app, published = write_app(tmp_path, POLICIES[kind]), 0
    choose, most, seen = random.Random(kind), 1 if kind == "latest" else MOST, list[int]()
    by_key = kind in ("by_key", "latest")

    async def look() -> None:
        async with database.connection() as looking:
            while True:
                query = WAITING if by_key else WAITING.replace("group by e.payload ->> 'k'", "")
                seen.append(await looking.fetchval(query))
                await asyncio.sleep(0.003)

    looking = asyncio.create_task(look())
    with fleet(database_url, app, 3, **LEASE) as workers:
        for number in range(8):
            await publish(connection, published, count := choose.randint(5, 60), keys=3)
            published += count
            await asyncio.sleep(choose.uniform(0.01, 0.3))
            if number in (2, 5):
                victim = workers.pop()
                victim.signal(signal.SIGKILL)
                assert victim.wait() == -signal.SIGKILL
        await eventually(database, DONE, published)
    looking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await looking
    assert len(seen) > 50 and 0 < max(seen) <= most
    counts = await judge(connection, published)
    assert counts["launched"] > 0 and counts["launched"] < published


POINTS = (
    "stale.before_commit=kill", "stale.after_commit=kill", "dispatch.before_commit=kill", "dispatch.after_commit=kill",
)  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
async def test_a_kill_at_any_commit_loses_and_repeats_nothing(
    database_url: str, database: Database, connection: Connection, given: None, tmp_path: Path, point: str
) -> None:
    app = write_app(tmp_path, "throttle='1/h', max_wait='300ms', max_waiting=20, when_full='drop_oldest'")
    await publish(connection, 0, 30, keys=3)
    settings = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_BATCH_SIZE": "10", **LEASE}
    with tidegate("worker", str(app), **settings, TIDEGATE_FAILPOINTS=point) as process:
        assert process.wait() == 137
    with tidegate("worker", str(app), **settings):
        await eventually(database, DONE, 30)
    counts = await judge(connection, 30)
    assert counts == {"launched": 1, "skipped": 29}
    told = await connection.fetch(
        "select event_id, count(*) from tidegate.event_decisions where decision = 'skipped' group by 1"
    )
    assert len(told) == 29 and {row[1] for row in told} == {1}
