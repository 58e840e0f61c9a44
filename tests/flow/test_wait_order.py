"""A loop of waits is given its events in the order of arrival, whatever is decided between two of its lines."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.step_world import World, the_run, the_steps
from tests.flow.test_dispatch import publish
from tests.processes import worker
from tidegate import Context, On
from tidegate.flow.run.look_back import LookBack
from tidegate.model.ids import step_id
from tidegate.store import waits
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "waits_app.py"
HOUR = 3_600_000


def count(world: World, number: int) -> None:
    """A workflow that waits for so many ticks, one after the other, and tells their order."""

    @world.app.workflow(on="go")
    async def counter(ctx: Context) -> Any:
        await ctx.sleep("1h")
        found = [await ctx.wait_for("tick", match={"key": "k"}, timeout="1d") for _ in range(number)]
        return [event.payload["n"] if event else None for event in found]


async def tick(connection: Connection, world: World, n: int) -> None:
    await publish(connection, "tick", key="k", n=n)
    await world.dispatch.run_once()


@pytest.mark.parametrize("stored", [0, 1, 2])
@pytest.mark.parametrize("moment", ["registered", "searched"])
async def test_an_event_that_comes_while_a_wait_looks_back(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch, moment: str, stored: int
) -> None:
    """It is decided after the wait was registered and before it has looked back (or after it has searched), while
    earlier ones are stored."""
    count(world, stored + 1)
    came = []

    async def comes() -> None:
        if not came and await connection.fetchval("select count(*) from tidegate.event_waits"):
            came.append(stored)
            await tick(connection, world, stored)

    ask_really, lock_really = LookBack.ask, waits.lock_held

    async def ask(self: LookBack, question: Any) -> Any:
        await comes()
        return await ask_really(self, question)

    async def lock_held(*args: Any) -> Any:
        await comes()
        return await lock_really(*args)

    if moment == "registered":
        monkeypatch.setattr(LookBack, "ask", ask)
    else:
        monkeypatch.setattr(waits, "lock_held", lock_held)
    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    for n in range(stored):
        await tick(connection, world, n)
    await clock.advance(HOUR + 1)
    await world.turn(runner)
    run = await the_run(connection)
    assert came and (run["status"], run["output"]) == ("succeeded", list(range(stored + 1)))
    assert not any("looks_again" in step["retry_metadata"] for step in (await the_steps(connection)).values())


async def test_an_event_for_two_waits_of_which_one_has_looked_back(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one neither takes it from the first nor keeps it from it, and is given the next."""

    @world.app.workflow(on="go")
    async def both(ctx: Context) -> Any:
        first = asyncio.create_task(ctx.wait_for("tick", match={"key": "k"}, timeout="1d", name="first"))
        second = asyncio.create_task(
            ctx.wait_all(On("tick", match={"key": "k"}), On("tock"), timeout="1d", name="second")
        )
        one, two = await first, await second
        return [one.payload["n"], two[0].payload["n"]] if one and two else None

    came: list[int] = []
    ask_really, has_asked = LookBack.ask, asyncio.Event()

    async def ask(self: LookBack, question: Any) -> Any:
        if question.step_id == step_id(question.run.id, "second") and not came:
            await has_asked.wait()
            came.append(1)
            await tick(connection, world, 1)
        found = await ask_really(self, question)
        has_asked.set()
        return found

    monkeypatch.setattr(LookBack, "ask", ask)
    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await tick(connection, world, 2)
    await publish(connection, "tock")
    await world.turn(runner)
    run = await the_run(connection)
    assert came and (run["status"], run["output"]) == ("succeeded", [1, 2])


async def test_an_event_does_not_overtake_one_that_another_worker_is_deciding(
    connection: Connection, clock: Clock, world: World, database: Database
) -> None:
    count(world, 2)
    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(HOUR + 1)
    await world.turn(runner)
    await publish(connection, "tick", key="k", n=0)
    async with database.transaction() as other:
        await other.execute("select from tidegate.event_inbox for update")
        await publish(connection, "tick", key="k", n=1)
        deciding = asyncio.create_task(world.dispatch.run_once())
        await eventually(database, "select exists (select from pg_locks where not granted)")
        assert not deciding.done()
    await deciding
    await world.turn(runner)
    assert (await the_run(connection))["output"] == [0, 1]


async def test_a_wait_does_not_look_past_an_event_that_is_undecided(
    connection: Connection, clock: Clock, world: World, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waited when the second event was decided; the worker that had the first one dies."""
    count(world, 2)
    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    has_looked, lock_really = asyncio.Event(), waits.lock_held

    async def lock_held(*args: Any) -> Any:
        found = await lock_really(*args)
        has_looked.set()
        return found

    monkeypatch.setattr(waits, "lock_held", lock_held)
    await publish(connection, "tick", key="k", n=0)
    async with database.transaction() as dying:
        await dying.execute("select from tidegate.event_inbox for update")
        await tick(connection, world, 1)
        await clock.advance(HOUR + 1)
        running = asyncio.create_task(world.turn(runner))
        await has_looked.wait()
    await world.dispatch.run_once()
    await running
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", [0, 1])


async def test_an_event_that_nobody_waits_for_keeps_nobody_back(
    connection: Connection, clock: Clock, world: World, database: Database
) -> None:
    """Only the order of events that are awaited matters: others are decided concurrently."""
    count(world, 1)
    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(HOUR + 1)
    await world.turn(runner)
    await publish(connection, "other", key="k", n=0)
    async with database.transaction() as other:
        await other.execute("select from tidegate.event_inbox for update")
        await publish(connection, "tick", key="k", n=1)
        await world.turn(runner)
        assert (await the_run(connection))["output"] == [1]


async def test_a_stream_of_events_over_several_workers(
    database_url: str, database: Database, connection: Connection, effects: Any
) -> None:
    """Each event is published after the one before was accepted, while runs that wait for them are resumed by all
    workers."""
    keys, number = range(3), 20
    for key in keys:
        await connection.execute("select tidegate.publish('count', 'test', $1)", {"key": key, "number": number})
    with worker(database_url, APP), worker(database_url, APP), worker(database_url, APP):
        await eventually(database, "select count(*) = $1 from tidegate.workflow_runs", len(keys))
        for n in range(number):
            for key in keys:
                await connection.execute("select tidegate.publish('tick', 'test', $1)", {"key": key, "n": n})
        done = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"
        await eventually(database, done, len(keys))
    rows = await connection.fetch("select output from tidegate.workflow_runs")
    assert [row["output"] for row in rows] == [list(range(number))] * len(keys)
