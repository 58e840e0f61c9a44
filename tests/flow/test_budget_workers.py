"""Budgets with real worker processes and the real clock: rates and slots hold by key, whoever works and dies."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from bench import neighbours

from tests.flow.checker import inversions, least_share, milliseconds, most_in_any_interval, share_used
from tests.flow.conftest import eventually
from tests.flow.test_trigger_workers import APP, SUCCEEDED, WAITING, all_runs, check_slots, fleet
from tidegate.store.db import Connection, Database

Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]

LAUNCHED = """
select e.payload ->> 'key' as key, (e.payload ->> 'cost')::int as cost, e.ingress_sequence, d.launched_at,
       d.trigger_id
  from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e on e.id = d.event_id
 where d.status = 'launched' order by d.launched_at, e.ingress_sequence
"""
SECOND = """

@app.workflow(on="tock", LIMITS)
async def tock(ctx: Context, **given) -> None:
    await tick(ctx, **given)
"""


def write_app(folder: Path, limits: str) -> Path:
    """Two workflows that share budgets."""
    file = folder / "ticking.py"
    text = (
        (APP + SECOND).replace("LIMITS", limits).replace("import Context, Tidegate", "import Budget, Context, Tidegate")
    )
    file.write_text(text)
    return file


async def publish(connection: Connection, count: int, **payload: Any) -> None:
    """So many events, of both types in turn."""
    await connection.execute(
        "select tidegate.publish(case n % 2 when 0 then 'tick' else 'tock' end, 'shop', $1) "
        "from generate_series(1, $2) n", payload, count,
    )  # fmt: skip


def spent(rows: list[Any]) -> dict[str, list[datetime]]:
    """When each unit of each key was spent."""
    found: dict[str, list[datetime]] = defaultdict(list)
    for row in rows:
        found[row["key"]] += [row["launched_at"]] * (row["cost"] or 1)
    return found


@pytest.mark.alone
async def test_workers_share_one_budget_by_key_while_some_are_killed(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    """Eight workers, two triggers, three keys and costs of 1 to 3, and two of the workers are killed midway."""
    limit, window_ms, each = 24, 500, 70
    budget = f"Budget('shared', '{limit}/{window_ms}ms', key='{{{{ event.payload.key }}}}', cost='event.payload.cost')"
    app = write_app(tmp_path, f"budgets=[{budget}], retry=HASTY")
    keys = ("a", "b", "c")
    with fleet(database_url, app, 8, TIDEGATE_LEASE_MS="1000") as workers:
        for _ in range(7):
            for number, key in enumerate(keys, start=1):
                await publish(connection, each // 7, key=key, cost=number, seconds=0)
        await eventually(database, f"select ({WAITING}) > 20")
        for victim in workers[-2:]:
            victim.signal(signal.SIGKILL)
        await eventually(database, SUCCEEDED, each * len(keys))
    rows = await connection.fetch(LAUNCHED)
    assert Counter(row["key"] for row in rows) == dict.fromkeys(keys, each)
    for key, times in spent(rows).items():
        assert most_in_any_interval(milliseconds(times), window_ms) <= limit, key
        assert inversions([row["ingress_sequence"] for row in rows if row["key"] == key]) == []
    done = Counter(run for run, _ in await effects())
    assert done.keys() == {row["id"] for row in await all_runs(connection)}
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 0


@pytest.mark.alone
async def test_a_scarce_budget_is_used(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    limit, window_ms, count = 40, 500, 280
    app = write_app(tmp_path, f"budgets=[Budget('shared', '{limit}/{window_ms}ms')]")
    with neighbours.watched() as beside, fleet(database_url, app, 4):
        await publish(connection, count, seconds=0)
        await eventually(database, SUCCEEDED, count)
    times = milliseconds([row["launched_at"] for row in await connection.fetch(LAUNCHED)])
    assert most_in_any_interval(times, window_ms) <= limit
    assert share_used(times, limit, window_ms, since=window_ms, until=max(times)) >= least_share(beside)


async def test_slots_are_shared_by_key_and_handed_on_at_once(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    """The retry policy would have them wait for ten seconds; the end of each run wakes the next instead."""
    bound, slow, quick = 2, 6, 40
    app = write_app(tmp_path, f"budgets=[Budget('shared', concurrency={bound}, key='{{{{ event.payload.key }}}}')]")
    with fleet(database_url, app, 3):
        await publish(connection, slow, key="slow", seconds=1.5)
        for _ in range(4):
            await publish(connection, quick // 4, key="a")
            await publish(connection, quick // 4, key="b")
        await eventually(database, SUCCEEDED, slow + 2 * quick)
    rows = await all_runs(connection)
    by_key: dict[str, list[Any]] = defaultdict(list)
    for row in rows:
        by_key[row["parameters"]["key"]].append(row)
    for found in by_key.values():
        check_slots(found, bound)
    end = {key: max(row["finished_at"] for row in found) for key, found in by_key.items()}
    assert max(end["a"], end["b"]) < end["slow"], "a key without free slots held up the others"
    assert Counter(run for run, _ in await effects()) == {row["id"]: 1 for row in rows}


async def test_the_slots_of_a_killed_worker_are_free_when_its_runs_have_ended(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    bound, count = 3, 24
    app = write_app(tmp_path, f"budgets=[Budget('shared', concurrency={bound})], retry=HASTY")
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
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 0


async def test_ten_thousand_keys(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    keys, limit = 10_000, 1
    app = write_app(tmp_path, f"budgets=[Budget('shared', '{limit}/h', key='{{{{ event.payload.key }}}}')]")
    with fleet(database_url, app, 2, TIDEGATE_BATCH_SIZE="500"):
        await connection.execute(
            "select tidegate.publish('tick', 'shop', jsonb_build_object('key', n % $1, 'seconds', 0)) "
            "from generate_series(1, $2) n", keys, keys * limit,
        )  # fmt: skip
        await connection.execute("select tidegate.publish('tick', 'shop', '{\"key\": 7, \"seconds\": 0}')")
        await eventually(database, "select not exists (select from tidegate.event_inbox)")
    assert await connection.fetchval(f"{WAITING} and budget_key = '7'") == 1
    assert await connection.fetchval(WAITING) == 1
    launched = Counter(row["key"] for row in await connection.fetch(LAUNCHED))
    assert len(launched) == keys and set(launched.values()) == {limit}
