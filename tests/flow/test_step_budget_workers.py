"""Steps that spend of budgets, with real worker processes and the real clock: whoever works and dies."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from bench import neighbours

from tests.flow.checker import least_share, milliseconds, most_in_any_interval, share_used
from tests.flow.conftest import eventually
from tests.flow.test_trigger_workers import SUCCEEDED, fleet, most_at_once
from tests.processes import worker
from tidegate.store.db import Connection, Database

APP = """
import asyncio
import os

import asyncpg

from tidegate import Budget, Context, Tidegate

app = Tidegate()
pool = None
shared = BUDGET

async def call(run_id, seconds):
    global pool
    if pool is None:
        pool = asyncpg.create_pool(os.environ["TIDEGATE_DATABASE_URL"], min_size=0, max_size=4)
    calls = await pool
    number = await calls.fetchval("insert into calls (run_id) values ($1) returning n", run_id)
    first = await calls.fetchval("select count(*) = 1 from calls where run_id = $1", run_id)
    await asyncio.sleep(seconds if first else 0)
    await calls.execute("update calls set ended_at = clock_timestamp() where n = $1", number)

@app.workflow(on="tick")
async def tick(ctx: Context, seconds: float = 0, **given) -> None:
    await ctx.step("call", call, ctx.run_id, seconds, budget=shared)

@app.workflow(on="tock", budgets=TRIGGER)
async def tock(ctx: Context, **given) -> None:
    pass
"""
# What is spent of budgets, whoever does: the buckets of the ring that have grown, at the time that is recorded.
WATCH = """
create table calls (n bigserial primary key, run_id uuid, began_at timestamptz default clock_timestamp(),
                    ended_at timestamptz);
create table spent (n bigserial, budget text, key text, amount bigint, at timestamptz);
create function note_spent() returns trigger language plpgsql as $$
declare grown bigint := 0; number bigint; had bigint;
begin
  for number in select generate_series(greatest(0, new.ring_at - 65), new.ring_at) loop
    had := case when tg_op = 'INSERT' or number > old.ring_at or number <= old.ring_at - 66 then 0
                else old.ring[(number % 66 + 1)::int] end;
    grown := grown + greatest(0, coalesce(new.ring[(number % 66 + 1)::int], 0) - coalesce(had, 0));
  end loop;
  if grown > 0 then
    insert into spent (budget, key, amount, at) values (new.budget, new.key, grown, new.spent_at);
  end if;
  return new;
end $$;
create trigger note_spent after insert or update on tidegate.budget_keys for each row execute function note_spent();
"""
WAITING = "select count(*) from tidegate.budget_steps"
QUICK = {"TIDEGATE_LEASE_MS": "1000"}


@pytest.fixture
async def watched(connection: Connection) -> None:
    await connection.execute(WATCH)


def write_app(folder: Path, budget: str, trigger: str = "[]") -> Path:
    file = folder / "calling.py"
    file.write_text(APP.replace("BUDGET", budget).replace("TRIGGER", trigger))
    return file


async def publish(connection: Connection, count: int, kind: str = "tick", **payload: Any) -> None:
    await connection.execute(
        "select tidegate.publish($1, 'shop', $2) from generate_series(1, $3)", kind, payload, count
    )


async def spent(connection: Connection) -> dict[str, list[Any]]:
    """When each unit of each key was spent."""
    found: dict[str, list[Any]] = {}
    for row in await connection.fetch("select * from spent order by at"):
        found.setdefault(row["key"], []).extend([row["at"]] * row["amount"])
    return found


@pytest.mark.alone
async def test_workers_share_a_rate_by_key_with_deliveries_while_some_are_killed(
    database_url: str, database: Database, connection: Connection, watched: None, tmp_path: Path
) -> None:
    limit, window_ms, each = 12, 500, 50
    budget = f"Budget('shared', '{limit}/{window_ms}ms', key='{{{{ event.payload.key }}}}')"
    app = write_app(tmp_path, budget, "[shared]")
    keys = ("a", "b")
    with fleet(database_url, app, 6, **QUICK) as workers:
        for _ in range(5):
            for key in keys:
                await publish(connection, each // 5, key=key)
                await publish(connection, each // 5, "tock", key=key)
        await eventually(database, f"select ({WAITING}) > 20")
        for victim in workers[-2:]:
            victim.signal(signal.SIGKILL)
        await eventually(database, SUCCEEDED, 2 * each * len(keys))
    found = await spent(connection)
    assert found.keys() == {*keys}
    for key, times in found.items():
        assert most_in_any_interval(milliseconds(times), window_ms) <= limit, key
    calls = await connection.fetch("select run_id, began_at from calls")
    launched = await connection.fetchval("select count(*) from tidegate.workflow_events where type = 'tock'")
    assert sum(map(len, found.values())) >= len(calls) + launched, "a call that was not spent before"
    assert len({row["run_id"] for row in calls}) == each * len(keys)
    assert await connection.fetchval(f"select ({WAITING}) + count(*) from tidegate.budget_holders") == 0


@pytest.mark.alone
async def test_a_scarce_budget_is_used(
    database_url: str, database: Database, connection: Connection, watched: None, tmp_path: Path
) -> None:
    limit, window_ms, count = 40, 500, 280
    app = write_app(tmp_path, f"Budget('shared', '{limit}/{window_ms}ms')")
    with neighbours.watched() as beside, fleet(database_url, app, 4):
        await publish(connection, count)
        await eventually(database, SUCCEEDED, count)
    times = milliseconds((await spent(connection))[""])
    assert len(times) == count
    assert most_in_any_interval(times, window_ms) <= limit
    assert share_used(times, limit, window_ms, since=window_ms, until=max(times)) >= least_share(beside)
    assert await connection.fetchval("select avg(attempts) <= 2.2 from tidegate.workflow_runs"), "resumed for nothing"


async def test_slots_of_steps_hold_while_a_worker_is_killed_and_none_is_lost(
    database_url: str, database: Database, connection: Connection, watched: None, tmp_path: Path
) -> None:
    bound, count = 3, 30
    app = write_app(tmp_path, f"Budget('shared', concurrency={bound})")
    with fleet(database_url, app, 1, **QUICK) as [victim]:
        await publish(connection, bound, seconds=600)
        await eventually(database, "select count(*) = $1 from calls", bound)
        with fleet(database_url, app, 3, **QUICK):
            await publish(connection, count, seconds=0.02)
            await eventually(database, f"select ({WAITING}) = $1", count)
            victim.signal(signal.SIGKILL)
            assert victim.wait() == -signal.SIGKILL
            await eventually(database, SUCCEEDED, bound + count)
    calls = await connection.fetch("select * from calls where ended_at is not null")
    assert most_at_once([(row["began_at"], row["ended_at"]) for row in calls]) <= bound
    assert Counter(Counter(row["run_id"] for row in calls).values()) == {1: bound + count}
    assert await connection.fetchval(f"select ({WAITING}) + count(*) from tidegate.budget_holders") == 0


@pytest.mark.parametrize(
    ("armed", "budget"),
    [
        ("step_budget.before_commit=kill", "'5/s'"),
        ("step_budget.after_commit=kill", "'5/s'"),
        ("step_budget.after_commit=kill@2", "concurrency=1"),
        ("step.after_spend=kill", "concurrency=1"),
        ("step_lines.before_commit=kill", "'2/s'"),
        ("step_lines.after_commit=kill", "concurrency=1"),
    ],
)
async def test_a_worker_that_dies_loses_nothing(
    database_url: str,
    database: Database,
    connection: Connection,
    watched: None,
    tmp_path: Path,
    armed: str,
    budget: str,
) -> None:
    app = write_app(tmp_path, f"Budget('shared', {budget})")
    await publish(connection, 4, seconds=0.1)
    with worker(database_url, app, TIDEGATE_FAILPOINTS=armed, **QUICK) as first:
        assert first.wait() == 137
    with worker(database_url, app, **QUICK):
        await eventually(database, SUCCEEDED, 4)
    calls = await connection.fetch("select * from calls where ended_at is not null")
    assert Counter(Counter(row["run_id"] for row in calls).values()) == {1: 4}
    if "concurrency" in budget:
        assert most_at_once([(row["began_at"], row["ended_at"]) for row in calls]) == 1
    assert await connection.fetchval(f"select ({WAITING}) + count(*) from tidegate.budget_holders") == 0
