"""Triggers with real worker processes and the real clock: limits hold across processes, whoever works and dies."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from bench import neighbours

from tests.flow.checker import least_share, milliseconds, most_in_any_interval, share_used
from tests.flow.conftest import PATIENCE_SECONDS, eventually
from tests.flow.trigger_worker import held, launches, statuses
from tests.processes import Process, api, tidegate
from tests.redis_server import RedisServer, client_fixture, server_fixture  # noqa: F401
from tidegate.flow import control
from tidegate.queue.bullmq import TRIGGERS
from tidegate.store.db import Connection, Database

Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]

# Each run leaves a row behind; one that is run again (its worker died) does not sleep a second time.
APP = """
import asyncio
import os

import asyncpg

from tidegate import Context, Tidegate
from tidegate.model.retry import RetryPolicy

app = Tidegate()
pool = None

async def effects():
    global pool
    if pool is None:
        pool = asyncpg.create_pool(os.environ["TIDEGATE_DATABASE_URL"], min_size=0, max_size=4)
    return await pool

HASTY = RetryPolicy(base_ms=250, factor=1, max_ms=250, jitter_ratio=0.1, max_attempts=10_000)

@app.workflow(on="tick", LIMITS)
async def tick(ctx: Context, seconds: float = 0.02, **given) -> None:
    done = await (await effects()).fetchval(
        "insert into effects (run_id, what) values ($1, 'tick') "
        "returning (select count(*) from effects where run_id = $1)", ctx.run_id)
    await asyncio.sleep(seconds if done == 0 else 0)
"""
SETTINGS = {"TIDEGATE_POLL_MS": "100", "TIDEGATE_BATCH_SIZE": "25"}

SUCCEEDED = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"
DECIDED = """
select count(*) = $1 and not exists (select 1 from tidegate.workflow_runs where finished_at is null)
  from tidegate.workflow_trigger_deliveries where retry_state in ('none', 'completed')
"""
WAITING = "select count(*) from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled'"


def write_app(folder: Path, limits: str) -> Path:
    file = folder / "ticking.py"
    file.write_text(APP.replace("LIMITS", limits))
    return file


@contextlib.contextmanager
def fleet(database_url: str, app: Path, size: int = 3, **env: str) -> Iterator[list[Process]]:
    """Worker processes that are ready. The first registers the application, the others start together."""
    settings = {"TIDEGATE_DATABASE_URL": database_url, **SETTINGS, **env}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(tidegate("worker", str(app), **settings))
        first.wait_for_line("worker.started")
        others = [stack.enter_context(tidegate("worker", str(app), **settings)) for _ in range(size - 1)]
        for process in others:
            process.wait_for_line("worker.started")
        yield [first, *others]


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)


async def publish(connection: Connection, count: int, **payload: Any) -> None:
    await connection.execute("select tidegate.publish('tick', 'shop', $1) from generate_series(1, $2)", payload, count)


def most_at_once(spans: Sequence[tuple[Any, Any]]) -> int:
    """The most of the spans that overlap at any instant."""
    steps = sorted([(end, -1) for _, end in spans] + [(begin, 1) for begin, _ in spans])
    return max(itertools.accumulate(step for _, step in steps))


async def all_runs(connection: Connection) -> list[Any]:
    return list(await connection.fetch("select * from tidegate.workflow_runs order by created_at, id"))


def check_slots(rows: Sequence[Any], bound: int) -> None:
    """Neither held nor worked in by more than `bound` at any instant."""
    assert most_at_once([(row["created_at"], row["finished_at"]) for row in rows]) <= bound
    assert most_at_once([(row["started_at"], row["finished_at"]) for row in rows]) <= bound


async def mean_attempts(connection: Connection) -> float:
    """How often a delivery that waited was given a time."""
    found: float = await connection.fetchval(
        "select avg(retry_attempts)::float8 from tidegate.workflow_trigger_deliveries where retry_attempts > 0"
    )
    return found


@pytest.mark.alone
async def test_workers_share_one_throttle(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    limit, window_ms, count = 40, 500, 280
    app = write_app(tmp_path, f"throttle='{limit}/{window_ms}ms'")
    with neighbours.watched() as beside, fleet(database_url, app):
        await publish(connection, count, seconds=0)
        await eventually(database, SUCCEEDED, count)
    times = milliseconds(await launches(connection))
    assert len(times) == count
    assert most_in_any_interval(times, window_ms) <= limit
    assert share_used(times, limit, window_ms, since=window_ms, until=max(times)) >= least_share(beside)
    assert await mean_attempts(connection) <= 1.2
    assert Counter(run for run, _ in await effects()) == {row["id"]: 1 for row in await all_runs(connection)}


async def test_workers_share_the_slots_and_hand_them_on_at_once(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    """The retry policy would have them wait for ten seconds; the end of each run wakes the next instead."""
    bound, count = 4, 120
    with fleet(database_url, write_app(tmp_path, f"max_concurrency={bound}")):
        for _ in range(6):  # several dispatchers at once, while runs end
            await publish(connection, count // 6)
        await eventually(database, SUCCEEDED, count)
    rows = await all_runs(connection)
    assert len(rows) == len({row["event_id"] for row in rows}) == count
    check_slots(rows, bound)
    assert most_at_once([(row["started_at"], row["finished_at"]) for row in rows]) == bound
    assert await mean_attempts(connection) <= 1.05
    assert Counter(run for run, _ in await effects()) == {row["id"]: 1 for row in rows}


async def test_each_key_has_slots_of_its_own(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    bound, slow, quick = 2, 6, 30
    limits = f"max_concurrency={bound}, concurrency_key='{{{{ event.payload.key }}}}'"
    with fleet(database_url, write_app(tmp_path, limits), 2):
        await publish(connection, slow, key="slow", seconds=1.5)
        await publish(connection, quick, key="a")
        await publish(connection, quick, key="b")
        await eventually(database, SUCCEEDED, slow + 2 * quick)
    rows = await all_runs(connection)
    by_key: dict[str, list[Any]] = {}
    for row in rows:
        by_key.setdefault(row["concurrency_key"], []).append(row)
    assert {key: len(found) for key, found in by_key.items()} == {"slow": slow, "a": quick, "b": quick}
    for found in by_key.values():
        check_slots(found, bound)
    end = {key: max(row["finished_at"] for row in found) for key, found in by_key.items()}
    assert max(end["a"], end["b"]) < end["slow"], "a key without free slots held up the others"
    assert len(await effects()) == len(rows)


async def test_throttle_slots_and_keys_together(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    limit, window_ms, bound, orders, each = 30, 250, 3, 60, 3
    limits = f"throttle='{limit}/{window_ms}ms', max_concurrency={bound}, retry=HASTY, "
    limits += "idempotency_key='{{ event.payload.order }}'"
    with fleet(database_url, write_app(tmp_path, limits)):
        for order in [*range(orders)] * each:
            await publish(connection, 1, order=order)
        await eventually(database, DECIDED, orders * each)
    assert await statuses(connection) == {"launched": orders, "skipped": orders * (each - 1)}
    rows = await all_runs(connection)
    assert sorted(int(row["parameters"]["order"]) for row in rows) == [*range(orders)]
    check_slots(rows, bound)
    assert most_in_any_interval(milliseconds(await launches(connection)), window_ms) <= limit
    strangers = await connection.fetchval(
        "select count(*) from tidegate.workflow_trigger_deliveries d where status = 'skipped' and not exists "
        "(select 1 from tidegate.workflow_trigger_deliveries k where k.status = 'launched' "
        "    and k.dedupe_key = d.dedupe_key and k.workflow_run_id = d.workflow_run_id)"
    )
    assert strangers == 0
    assert Counter(run for run, _ in await effects()) == {row["id"]: 1 for row in rows}


async def test_the_slots_of_a_killed_worker_are_free_when_its_leases_end(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    bound, count = 3, 30
    app = write_app(tmp_path, f"max_concurrency={bound}, retry=HASTY")
    lease = {"TIDEGATE_LEASE_MS": "600"}
    with fleet(database_url, app, 1, **lease) as [victim]:
        await publish(connection, bound, seconds=600)
        await eventually(database, "select count(*) = $1 from effects", bound)
        with fleet(database_url, app, 2, **lease):
            await publish(connection, count)
            await eventually(database, f"select ({WAITING}) = $1", count)
            victim.signal(signal.SIGKILL)
            assert victim.wait() == -signal.SIGKILL
            await eventually(database, SUCCEEDED, bound + count)
    rows = await all_runs(connection)
    check_slots(rows, bound)
    times = Counter(run for run, _ in await effects())
    assert times == {row["id"]: row["attempts"] for row in rows}
    assert sorted(times.values()) == [1] * count + [2] * bound
    first_end = min(row["finished_at"] for row in rows)
    late = [row for row in rows if row["attempts"] == 1]
    assert all(row["created_at"] > first_end for row in late), "a slot was given away while it was held"


async def test_bullmq_everything_launches_though_redis_forgets(
    database_url: str,
    database: Database,
    connection: Connection,
    effects: Effects,
    tmp_path: Path,
    server: RedisServer,
    client: Any,
) -> None:
    limit, window_ms, count = 15, 800, 45
    settings = {"TIDEGATE_QUEUE": "bullmq", "TIDEGATE_REDIS_URL": server.url, "TIDEGATE_POLL_MS": "1000"}

    async def has_jobs() -> bool:
        """Whether the latest of those that wait have a job; the next are being launched meanwhile."""
        rows = sorted(await held(connection), key=lambda row: row["next_attempt_at"])[-5:]
        wanted = {f"event-trigger-retry:{row['id']}:{row['retry_attempts']}" for row in rows}
        found = {key.split(":", 2)[2] for key in await client.keys(f"*:{TRIGGERS}:event-trigger-retry:*")}
        return bool(wanted) and wanted <= found

    with fleet(database_url, write_app(tmp_path, f"throttle='{limit}/{window_ms}ms'"), **settings):
        await publish(connection, count, seconds=0)
        await eventually(database, f"select ({WAITING}) > 20")
        await until(has_jobs)
        await client.flushall()
        await eventually(database, f"select ({WAITING}) < 15")
        await client.flushall()
        await eventually(database, SUCCEEDED, count)
    times = milliseconds(await launches(connection))
    assert len(times) == count
    assert most_in_any_interval(times, window_ms) <= limit
    assert Counter(run for run, _ in await effects()) == {row["id"]: 1 for row in await all_runs(connection)}


async def test_a_trigger_edited_and_disabled_over_the_api_while_workers_drain(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    count = 150
    app = write_app(tmp_path, "throttle='10/100ms', retry=HASTY, params={'mark': 1}")
    edits: list[dict[str, Any]] = [
        {"throttle_count": 15},
        {"throttle_count": None, "throttle_window_ms": None, "max_concurrency": 2},
        {"max_concurrency": 3, "throttle_count": 10, "throttle_window_ms": 100},
    ]
    by_old = (
        "select count(*) from tidegate.workflow_trigger_deliveries where status = 'launched' and trigger_version < $1"
    )
    with fleet(database_url, app), api(database_url) as (_, url):
        trigger_id: uuid.UUID = await connection.fetchval("select id from tidegate.workflow_event_triggers")
        async with httpx.AsyncClient(base_url=f"{url}/v1/workflows/tick/triggers/") as http:
            await publish(connection, count)
            for version, edit in enumerate(edits, start=2):
                before = await connection.fetchval("select count(*) from tidegate.workflow_runs")
                await eventually(database, "select count(*) > $1 + 5 from tidegate.workflow_runs", before)
                answer = await http.patch(str(trigger_id), json={**edit, "parameter_template": {"mark": version}})
                assert answer.status_code == 200 and answer.json()["version"] == version, answer.text
                committed = await connection.fetchval(by_old, version)
                await eventually(
                    database,
                    "select count(*) > 3 from tidegate.workflow_trigger_deliveries where trigger_version = $1 "
                    "and status = 'launched'",
                    version,
                )
                assert await connection.fetchval(by_old, version) == committed
            answer = await http.patch(str(trigger_id), json={"status": "disabled"})
            assert answer.status_code == 200, answer.text
            launched = await connection.fetchval("select count(*) from tidegate.workflow_runs")
            assert await connection.fetchval(WAITING) == 0
            await publish(connection, 5)
            await eventually(database, "select not exists (select 1 from tidegate.event_inbox)")
            await eventually(database, SUCCEEDED, launched)
            assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == launched
            assert 0 < launched < count
            assert await statuses(connection) == {"launched": launched, "cancelled": count - launched}
            await control.update_trigger(database, trigger_id, {"status": "active"}, "test")
            await publish(connection, 5)
            await eventually(database, SUCCEEDED, launched + 5)
    rows = await connection.fetch(
        "select d.trigger_version, (r.parameters ->> 'mark')::int as mark from tidegate.workflow_runs r "
        "  join tidegate.workflow_trigger_deliveries d on d.id = r.delivery_id where d.trigger_version < 5"
    )
    assert all(row["trigger_version"] == row["mark"] for row in rows)
    assert Counter(run for run, _ in await effects()) == {row["id"]: 1 for row in await all_runs(connection)}
