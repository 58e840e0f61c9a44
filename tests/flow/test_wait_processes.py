"""Waits in real worker processes that are killed at every line between parking and waking: each event wakes its run
once."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import eventually
from tests.processes import worker
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "waits_app.py"
Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
QUICK = {"TIDEGATE_LEASE_MS": "1000"}
SUCCEEDED = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"
PUBLISH = "select tidegate.publish($1, 'test', $2)"

# Where the worker dies, and when the event comes: before the run begins to wait, while no worker is alive, after the
# run was suspended; or never.
DEATHS = [
    ("wait.registered=kill", "before"),
    ("wait.before_look_back=kill", "before"),
    ("wait.before_result=kill", "before"),
    ("wait.before_wake=kill", "before"),
    ("wait.before_looked_back=kill", "before"),
    ("wait.looked_back=kill", "before"),
    ("outcome.before_commit=kill", "meanwhile"),
    ("outcome.after_commit=kill", "meanwhile"),
    ("wait.registered=kill", "meanwhile"),
    ("wait.before_look_back=kill", "meanwhile"),
    ("wait.before_looked_back=kill", "meanwhile"),
    ("wait.looked_back=kill", "meanwhile"),
    ("run.before_finish=kill", "meanwhile"),
    ("run.after_finish=kill", "meanwhile"),
    ("wait.before_lock=kill", "after"),
    ("wait.before_result=kill", "after"),
    ("wait.before_wake=kill", "after"),
    ("dispatch.before_commit=kill@2", "after"),
    ("run.after_claim=kill@2", "after"),
    ("wait.before_time_out=kill", "never"),
    ("wait.before_timed_out=kill", "never"),
]


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize(("death", "when"), DEATHS)
async def test_a_worker_dies_between_parking_and_waking(
    database_url: str, database: Database, connection: Connection, effects: Effects, death: str, when: str, kind: str
) -> None:
    timeout = "1s" if when == "never" else "1h"
    await connection.execute(PUBLISH, f"wait.{kind}", {"id": 7, "timeout": timeout})

    async def answer() -> None:
        await connection.execute(PUBLISH, "answer", {"id": 8, "word": "other"})
        await connection.execute(PUBLISH, "answer", {"id": 7, "word": "yes"})
        await connection.execute(PUBLISH, "answer", {"id": 7, "word": "again"})

    if when == "before":
        await answer()
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=death, **QUICK) as first:
        if when == "after":
            suspended = "select count(*) = 1 from tidegate.workflow_runs where status = 'pending' and attempts = 1"
            await eventually(database, suspended)
            await answer()
        assert first.wait() == 137
    if when == "meanwhile":
        await answer()
    with worker(database_url, APP, **QUICK), worker(database_url, APP, **QUICK):
        await eventually(database, SUCCEEDED, 1)
        await eventually(database, "select not exists (select from tidegate.event_inbox)")
    expected = "nobody" if when == "never" else "yes"
    assert [what for _, what in await effects()] == [expected]
    assert await connection.fetchval("select output from tidegate.workflow_runs") == expected
    assert await connection.fetchval("select count(*) from tidegate.event_waits") == 0


async def test_many_waits_over_workers_that_are_killed(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    """Workers die in turn while 60 runs begin to wait and their events come; each run is told its own word, once."""
    count = 60
    deaths = [
        "wait.registered=kill@9",
        "wait.before_wake=kill@2",
        "wait.looked_back=kill@7",
        "outcome.after_commit=kill@4",
    ]
    for n in range(count):
        kind = "async" if n % 2 else "sync"
        await connection.execute(PUBLISH, f"wait.{kind}", {"id": n, "timeout": "1h"})
    for n in range(0, count, 3):
        await connection.execute(PUBLISH, "answer", {"id": n, "word": f"word {n}"})
    with worker(database_url, APP, **QUICK):
        for i, death in enumerate(deaths):
            with worker(database_url, APP, TIDEGATE_FAILPOINTS=death, **QUICK) as dying:
                for n in range(i, count, len(deaths)):
                    if n % 3:
                        await connection.execute(PUBLISH, "answer", {"id": n, "word": f"word {n}"})
                await eventually(database, "select not exists (select from tidegate.event_inbox)")
                dying.signal(signal.SIGKILL)
                dying.wait()
        await eventually(database, SUCCEEDED, count)
    told = sorted(what for _, what in await effects())
    assert sorted(set(told)) == sorted(f"word {n}" for n in range(count))
    rows = await connection.fetch("select output, parameters from tidegate.workflow_runs")
    assert all(row["output"] == f"word {row['parameters']['id']}" for row in rows)
    assert await connection.fetchval("select count(*) from tidegate.event_waits") == 0


@pytest.mark.parametrize(
    ("death", "when"),
    [
        ("wait.before_look_back=kill", "before"),
        ("wait.before_wake=kill", "before"),
        ("outcome.after_commit=kill", "meanwhile"),
        ("wait.before_lock=kill", "after"),
        ("wait.before_wake=kill", "after"),
        ("run.after_claim=kill@2", "after"),
    ],
)
async def test_a_worker_dies_while_an_event_cancels_a_run(
    database_url: str, database: Database, connection: Connection, effects: Effects, death: str, when: str
) -> None:
    await connection.execute(PUBLISH, "wait.cancelled", {"id": 7})
    if when == "before":
        await connection.execute(PUBLISH, "stop", {"id": 7})
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=death, **QUICK) as first:
        if when == "after":
            suspended = "select count(*) = 1 from tidegate.workflow_runs where status = 'pending' and attempts = 1"
            await eventually(database, suspended)
            await connection.execute(PUBLISH, "stop", {"id": 7})
        assert first.wait() == 137
    if when == "meanwhile":
        await connection.execute(PUBLISH, "stop", {"id": 7})
    with worker(database_url, APP, **QUICK):
        await eventually(database, "select status = 'cancelled' from tidegate.workflow_runs")
    row = await connection.fetchrow("select cancelled_by, error from tidegate.workflow_runs")
    event_id = await connection.fetchval("select id from tidegate.workflow_events where type = 'stop'")
    assert row is not None and tuple(row) == (f"event {event_id}", f"cancelled by event {event_id}")
    assert [what for _, what in await effects()] == (["begun"] if when == "after" else [])
    assert await connection.fetchval("select count(*) from tidegate.event_waits") == 0
