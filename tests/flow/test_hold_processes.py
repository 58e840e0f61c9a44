"""Slots held while runs execute, with real worker processes and the real clock: judged by what functions did, when."""

from __future__ import annotations

import itertools
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tests.flow.conftest import eventually
from tests.flow.test_trigger_workers import SUCCEEDED, fleet
from tests.processes import worker
from tidegate.store.db import Connection, Database

# Each function writes down when it begins and when it leaves, in a file that a killed process does not take with it.
APP = """
import asyncio
import os
import time

from tidegate import Budget, Context, Tidegate

app = Tidegate()
sink = os.open(os.environ["SINK"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(what, ctx, key):
    os.write(sink, f"{time.monotonic_ns()} {what} {ctx.run_id} {key}\\n".encode())

@app.workflow(on="tick", holds="executing", LIMITS)
async def tick(ctx: Context, key: str = "", naps: int = 2, **given) -> None:
    note("begin", ctx, key)
    try:
        for nap in range(naps):
            await asyncio.sleep(0.02)
            await ctx.sleep("80ms", name=f"nap {nap}")
        await asyncio.sleep(0.02)
    finally:
        note("leave", ctx, key)
"""
KEY = "{{ event.payload.key }}"
LIMITS = {
    "trigger": f"max_concurrency=2, concurrency_key='{KEY}'",
    "budget": f"budgets=[Budget('slots', concurrency=2, key='{KEY}')]",
}
WAITING = "select count(*) from tidegate.slot_waits"


def write_app(folder: Path, limits: str) -> Path:
    file = folder / "ticking.py"
    file.write_text(APP.replace("LIMITS", limits))
    return file


def most_at_once(sink: Path) -> dict[str, int]:
    """The most that executed at the same time, by key. What did not leave, since its process was killed, counts until
    its run begins again."""
    steps: dict[str, list[tuple[int, int]]] = defaultdict(list)
    open_runs: set[str] = set()
    for line in sorted(sink.read_text().splitlines(), key=lambda text: int(text.split(" ")[0])):
        at, what, run, key = line.split(" ")
        if what == "begin" and run in open_runs:
            continue  # it was killed while it executed, and kept its slot
        open_runs.add(run) if what == "begin" else open_runs.discard(run)
        steps[key].append((int(at), 1 if what == "begin" else -1))
    return {key: max(itertools.accumulate(step for _, step in sorted(mine))) for key, mine in steps.items()}


async def publish(connection: Connection, count: int, **payload: object) -> None:
    await connection.execute("select tidegate.publish('tick', 'shop', $1) from generate_series(1, $2)", payload, count)


@pytest.mark.alone
@pytest.mark.parametrize("limits", list(LIMITS.values()), ids=list(LIMITS))
async def test_no_more_execute_than_there_are_slots_while_workers_are_killed(
    database_url: str, database: Database, connection: Connection, tmp_path: Path, limits: str
) -> None:
    sink, each = tmp_path / "sink", 12
    settings = {"TIDEGATE_LEASE_MS": "1000", "SINK": str(sink)}
    with fleet(database_url, write_app(tmp_path, limits), 4, **settings) as workers:
        for key in "abc":
            await publish(connection, each, key=key)
        await eventually(database, f"select ({WAITING}) > 3")
        for victim in workers[-2:]:
            victim.signal(signal.SIGKILL)
        await eventually(database, SUCCEEDED, 3 * each)
    assert most_at_once(sink) == {"a": 2, "b": 2, "c": 2}
    assert await connection.fetchval(WAITING) == 0
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 0


@pytest.mark.parametrize("point", ["slot_line.before_enter=kill@2", "slot_line.before_commit=kill@2"])
@pytest.mark.parametrize("limits", list(LIMITS.values()), ids=list(LIMITS))
async def test_a_worker_dies_while_its_runs_ask_for_their_slots(
    database_url: str, database: Database, connection: Connection, tmp_path: Path, limits: str, point: str
) -> None:
    sink, app = tmp_path / "sink", write_app(tmp_path, limits)
    await publish(connection, 5, key="a", naps=1)
    settings = {"TIDEGATE_LEASE_MS": "800", "SINK": str(sink)}
    with worker(database_url, app, TIDEGATE_FAILPOINTS=point, **settings) as process:
        assert process.wait() == 137
    with worker(database_url, app, **settings):
        await eventually(database, SUCCEEDED, 5)
    assert most_at_once(sink) == {"a": 2}
    assert await connection.fetchval(WAITING) == 0
