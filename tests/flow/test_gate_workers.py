"""The source gate with real worker processes and the real clock: one limit, one line, whoever works and dies."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from bench import neighbours

from tests.flow.checker import inversions, least_share, milliseconds, most_in_any_interval, share_used
from tests.flow.conftest import eventually
from tests.processes import Process, tidegate
from tidegate.flow import control
from tidegate.model.source import RateLimit
from tidegate.store.db import Connection, Database

APP = """
from tidegate import Context, Tidegate

app = Tidegate()

@app.workflow(on="tick")
async def tick(ctx: Context) -> None: ...
"""
LIMIT, INTERVAL_MS = 60, 500

LAUNCHED = """
select e.ingress_sequence, d.launched_at, e.received_at from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_events e on e.id = d.event_id
 where e.source = $1 order by d.launched_at, e.ingress_sequence
"""
HELD = "select count(*) = $2 from tidegate.event_ingress_retries where source = $1 and retry_state = 'scheduled'"
COMPLETED = "select count(*) >= $2 from tidegate.event_ingress_retries where source = $1 and retry_state = 'completed'"
STATE = """
select to_jsonb(s), to_jsonb(m) from tidegate.event_scheduler_sources s
  join tidegate.event_scheduler_source_metrics m using (source) where source = any ($1::text[]) order by source
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    file = tmp_path / "ticking.py"
    file.write_text(APP)
    return file


@contextlib.contextmanager
def fleet(database_url: str, app: Path, size: int) -> Iterator[list[Process]]:
    """Worker processes that are ready. The first registers the application, the others start together."""
    settings = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_POLL_MS": "100", "TIDEGATE_BATCH_SIZE": "50"}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(tidegate("worker", str(app), **settings))
        first.wait_for_line("worker.started")
        others = [stack.enter_context(tidegate("worker", str(app), **settings)) for _ in range(size - 1)]
        for process in others:
            process.wait_for_line("worker.started")
        yield [first, *others]


async def publish(connection: Connection, source: str, count: int) -> None:
    await connection.execute("select tidegate.publish('tick', $1) from generate_series(1, $2)", source, count)


async def backlog(database: Database, connection: Connection, count: int) -> None:
    """Events of a source with a limit, all of them waiting in line."""
    rate = RateLimit(limit=LIMIT, interval_ms=INTERVAL_MS)
    await control.set_limit(database, "noisy", rate, "test")
    await control.pause(database, "noisy", actor="test")
    await publish(connection, "noisy", count)
    await eventually(database, HELD, "noisy", count)


@pytest.mark.alone
@pytest.mark.parametrize(("size", "count"), [(4, 600), (8, 420)])
async def test_workers_share_one_limit_and_one_line(
    database_url: str, database: Database, connection: Connection, app: Path, size: int, count: int
) -> None:
    with neighbours.watched() as beside, fleet(database_url, app, size):
        await backlog(database, connection, count)
        await control.resume(database, "noisy", "test")
        for done in range(0, count, count // 10):
            await eventually(database, COMPLETED, "noisy", done)
            await publish(connection, "other", 2)
        await eventually(database, COMPLETED, "noisy", count)
        await eventually(database, "select not exists (select 1 from tidegate.event_inbox)")
    rows = await connection.fetch(LAUNCHED, "noisy")
    assert len(rows) == len({row[0] for row in rows}) == count
    assert inversions([row[0] for row in rows]) == []
    times = milliseconds([row["launched_at"] for row in rows])
    assert most_in_any_interval(times, INTERVAL_MS) <= LIMIT
    assert share_used(times, LIMIT, INTERVAL_MS, since=INTERVAL_MS, until=max(times)) >= least_share(beside)
    attempts = await connection.fetchval("select sum(attempts)::float8 / count(*) from tidegate.event_ingress_retries")
    assert attempts <= 1.2
    others = await connection.fetch(LAUNCHED, "other")
    lags = [row["launched_at"] - row["received_at"] for row in others]
    assert len(lags) == 20
    assert max(lags) / timedelta(milliseconds=max(times)) < 0.2


async def test_restarted_workers_go_on_where_the_others_stopped(
    database_url: str, database: Database, connection: Connection, app: Path
) -> None:
    count, quiet = 420, ["paused", "slow"]
    await control.set_limit(database, "slow", RateLimit(limit=3, interval_ms=3_600_000), "test")
    await control.pause(database, "paused", duration_ms=3_600_000, reason="maintenance", actor="ann")

    async def state() -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await connection.fetch(STATE, quiet)]

    with fleet(database_url, app, 4) as processes:
        await publish(connection, "slow", 5)
        await publish(connection, "paused", 2)
        await eventually(database, HELD, "slow", 2)
        await eventually(database, HELD, "paused", 2)
        known = await state()
        await backlog(database, connection, count)
        await control.resume(database, "noisy", "test")
        await eventually(database, COMPLETED, "noisy", count // 4)
        for process in processes:
            process.signal(signal.SIGTERM)
        assert [process.wait() for process in processes] == [0] * 4
    assert await state() == known
    with fleet(database_url, app, 4) as processes:
        await eventually(database, COMPLETED, "noisy", count // 2)
        for process in processes:
            process.signal(signal.SIGKILL)
        for process in processes:
            process.wait()
    assert await state() == known
    with fleet(database_url, app, 4):
        await eventually(database, COMPLETED, "noisy", count)
        await publish(connection, "slow", 1)
        await eventually(database, HELD, "slow", 3)
    assert [row[0]["source"] for row in known] == quiet
    rows = await connection.fetch(LAUNCHED, "noisy")
    assert len(rows) == len({row[0] for row in rows}) == count
    assert inversions([row[0] for row in rows]) == []
    assert most_in_any_interval(milliseconds([row["launched_at"] for row in rows]), INTERVAL_MS) <= LIMIT
    runs = await connection.fetchrow("select count(*), count(distinct event_id) from tidegate.workflow_runs")
    assert runs is not None and tuple(runs) == (count + 3, count + 3)
    totals = await connection.fetchrow(
        "select total, passed, throttled from tidegate.event_scheduler_source_metrics where source = 'noisy'"
    )
    assert totals is not None and tuple(totals) == (count, count, count)
