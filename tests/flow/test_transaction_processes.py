"""Transactions in real worker processes that are killed and frozen: one row for each step that succeeded, no other."""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.flow.conftest import eventually
from tests.processes import Process, worker
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "transactions_app.py"
QUICK = {"TIDEGATE_LEASE_MS": "1000", "TIDEGATE_STEP_RETRY_BASE_MS": "50", "TIDEGATE_STEP_RETRY_MAX_MS": "100"}
ENDED = "select count(*) = $1 from tidegate.workflow_runs where status in ('succeeded', 'failed')"
STEPS = ["a", "b", "c", "d", "e"]
POINTS = ["transaction.before_write=kill", "transaction.before_commit=kill", "transaction.after_commit=kill"]


@pytest.fixture(autouse=True)
async def ledger(connection: Connection) -> None:
    await connection.execute("create table ledger (run_id uuid not null, step text not null)")


async def check(connection: Connection) -> Counter[str]:
    """The effects are the results, to the row; how many of each step there are."""
    rows = await connection.fetch("select run_id, step from ledger")
    done = await connection.fetch(
        "select workflow_run_id, result from tidegate.workflow_run_steps where status = 'succeeded'"
    )
    effects, results = (Counter((row[0], row[1]) for row in found) for found in (rows, done))
    assert effects == results and set(effects.values()) <= {1}
    return Counter(step for _, step in effects)


@pytest.mark.parametrize("hit", [1, 2, 3, 5], ids=["asyncpg", "psycopg", "sqlalchemy", "side by side"])
@pytest.mark.parametrize("point", POINTS)
async def test_a_worker_killed_around_the_commit(
    database_url: str, database: Database, connection: Connection, point: str, hit: int
) -> None:
    await connection.execute("select tidegate.publish('ledger.entries', 'test')")
    failpoint = f"{point}@{hit}"
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=failpoint, **QUICK) as first:
        assert first.wait() == 137
    before = await check(connection)
    # Of the two side by side, the one that is not killed may be committed or not.
    least = hit if "after_commit" in point else hit - 1
    assert before.total() == least if hit < 4 else 3 <= before.total() <= 5
    with worker(database_url, APP, **QUICK):
        await eventually(database, ENDED, 1)
    assert await check(connection) == dict.fromkeys(STEPS, 1)
    assert await connection.fetchval("select output from tidegate.workflow_runs") == STEPS


async def test_workers_killed_at_random(database_url: str, database: Database, connection: Connection) -> None:
    """Two workers, of which one is killed every now and then, until all is done."""
    runs, chance = 120, random.Random(7)
    for _ in range(runs):
        await connection.execute("select tidegate.publish('ledger.entries', 'test')")
    await connection.execute("select tidegate.publish('ledger.refused', 'test')")
    kills = 0
    with ExitStack() as stack:
        workers: list[Process] = [stack.enter_context(worker(database_url, APP, **QUICK)) for _ in range(2)]
        while not await connection.fetchval(ENDED, runs + 1) and kills < 12:
            await asyncio.sleep(chance.uniform(0.05, 0.6))
            victim = workers.pop(chance.randrange(2))
            victim.signal(signal.SIGKILL)
            victim.wait()
            kills += 1
            workers.append(stack.enter_context(worker(database_url, APP, **QUICK)))
        await eventually(database, ENDED, runs + 1)
    assert kills > 0
    assert await check(connection) == dict.fromkeys(STEPS, runs)
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs where status = 'failed'") == 1


async def test_a_frozen_worker_that_wakes_up_writes_nothing(
    database_url: str, database: Database, connection: Connection
) -> None:
    """Its function has written, its lease has ended, and another worker has done the step."""
    await connection.execute("select tidegate.publish('ledger.slow', 'test', '{\"seconds\": 1.5}')")
    open_transaction = (
        "select count(*) > 0 from pg_stat_activity where application_name = 'tidegate-transaction' "
        "and state = 'idle in transaction' and datname = current_database() and query like 'insert into ledger%'"
    )
    with worker(database_url, APP, **QUICK) as frozen:
        await eventually(database, open_transaction)
        frozen.signal(signal.SIGSTOP)
        with worker(database_url, APP, **QUICK):
            await eventually(database, ENDED, 1)
            assert await check(connection) == {"slow": 1}
            frozen.signal(signal.SIGCONT)
            frozen.wait_for_line("run.lease_lost|run.result_discarded")
            frozen.signal(signal.SIGTERM)
            assert frozen.wait() == 0
    assert await check(connection) == {"slow": 1}
    assert await connection.fetchval("select claim_generation from tidegate.workflow_runs") >= 2


async def test_a_frozen_worker_that_was_about_to_commit_holds_the_run_only_for_a_while(
    database_url: str, database: Database, connection: Connection
) -> None:
    """Frozen between its last write and the commit, it has the run locked: the server ends its transaction."""
    await connection.execute("select tidegate.publish('ledger.entries', 'test')")
    with worker(database_url, APP, TIDEGATE_FAILPOINTS="transaction.before_commit=sleep:60", **QUICK) as frozen:
        await eventually(
            database,
            "select count(*) > 0 from pg_stat_activity where application_name = 'tidegate-transaction' "
            "and state = 'idle in transaction' and datname = current_database() and query like '%workflow_run_steps%'",
        )
        frozen.signal(signal.SIGSTOP)
        with worker(database_url, APP, **QUICK):
            await eventually(database, ENDED, 1)
    assert await check(connection) == dict.fromkeys(STEPS, 1)


async def test_sigterm_while_a_function_runs_rolls_back(
    database_url: str, database: Database, connection: Connection
) -> None:
    await connection.execute("select tidegate.publish('ledger.slow', 'test', '{\"seconds\": 8}')")
    with worker(database_url, APP, TIDEGATE_SHUTDOWN_MS="100", **QUICK) as first:
        await eventually(
            database,
            "select count(*) > 0 from pg_stat_activity where application_name = 'tidegate-transaction' "
            "and state = 'idle in transaction' and datname = current_database() and query like 'insert into ledger%'",
        )
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
    assert await check(connection) == {}
    assert await connection.fetchval("select status from tidegate.workflow_runs") == "pending"


async def test_a_worker_has_no_more_connections_than_documented(
    database_url: str, database: Database, connection: Connection
) -> None:
    """Of each kind as many as the setting says, in addition to the worker's own. The server shows a connection for a
    moment after it was closed: those count that are there for several looks."""
    for _ in range(30):
        await connection.execute("select tidegate.publish('ledger.entries', 'test')")
    asked = """select coalesce(array_agg(pid), '{}') from pg_stat_activity where datname = current_database()
               and application_name = 'tidegate-transaction'"""
    seen: list[set[int]] = []
    with worker(database_url, APP, TIDEGATE_TRANSACTION_CONNECTIONS="2", **QUICK):
        while not await connection.fetchval(ENDED, 30):
            seen.append(set(await connection.fetchval(asked)))
            await asyncio.sleep(0.005)
    most = max(len(set.intersection(*looks)) for looks in zip(*(seen[n:] for n in range(5)), strict=False))
    assert 1 <= most <= 4
    assert await check(connection) == dict.fromkeys(STEPS, 30)
