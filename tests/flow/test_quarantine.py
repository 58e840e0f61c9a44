"""Whose fault is it that a worker died? Only a death while a run was tried alone counts against it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World, the_run
from tests.flow.test_dispatch import publish
from tidegate import Context
from tidegate.flow import control
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.run import quarantine
from tidegate.flow.run.runner import Runner
from tidegate.model.run import MAX_TRIALS, SUSPECT_CRASHES
from tidegate.model.source import SourceBreakerPolicy
from tidegate.store import runs
from tidegate.store.db import Connection, Database

LEASE_MS = 60_000


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for is in this process
            await asyncio.sleep(0.005)


async def claim(connection: Connection, *, is_suspect: bool, count: int = 100) -> int:
    """Claim as a worker does that dies afterwards; how many runs."""
    definitions = [row[0] for row in await connection.fetch("select id from tidegate.workflow_definitions")]
    how: Any = {"definitions": definitions, "worker": "mortal", "lease_ms": LEASE_MS}
    if is_suspect:
        return int(await runs.claim_suspect(connection, **how, is_counted=True) is not None)
    return len(await runs.claim_due(connection, **how, limit=count))


async def die(database: Database, clock: Clock) -> None:
    """The leases of a dead worker run out, and its runs are released."""
    await clock.advance(LEASE_MS + 1)
    await Reconcile(database, batch_size=1000).run_once()


async def make_suspects(database: Database, connection: Connection, clock: Clock, world: World, count: int) -> None:
    """So many waiting runs of the event `go`, whose workers have died twice."""
    for n in range(count):
        await publish(connection, "go", n=n)
    await world.dispatch.run_once()
    for _ in range(SUSPECT_CRASHES):
        assert await claim(connection, is_suspect=False) == count
        await die(database, clock)


async def crashes(connection: Connection) -> list[tuple[str, int, int | None]]:
    rows = await connection.fetch("select status, crashes, trials from tidegate.workflow_runs order by id")
    return [tuple(row) for row in rows]


async def test_runs_that_a_dead_worker_had_claimed_are_not_given_up(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    """Nobody knows which of them were executing: however often it happens, none is blamed, and all take effect."""

    @world.app.workflow(on="go")
    async def work(ctx: Context, n: int) -> None:
        world.done.append(str(n))

    runner = await world.runner()
    await make_suspects(database, connection, clock, world, 20)
    assert await claim(connection, is_suspect=False) == 0, "suspects are claimed one at a time"
    for _ in range(MAX_TRIALS * 20 - 20):  # a run at a time, each less often than it takes to be given up
        assert await claim(connection, is_suspect=True) == 1
        await die(database, clock)
    assert await crashes(connection) == [("pending", SUSPECT_CRASHES + MAX_TRIALS - 1, MAX_TRIALS - 1)] * 20
    await world.turn(runner)
    assert sorted(world.done, key=int) == [str(n) for n in range(20)]
    assert await crashes(connection) == [("succeeded", 0, None)] * 20


async def test_a_run_whose_worker_dies_each_time_it_is_alone_is_given_up(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow(on="go", max_concurrency=1)
    async def work(ctx: Context, n: int) -> None: ...

    await world.runner()
    await make_suspects(database, connection, clock, world, 1)
    warning = (await the_run(connection))["warning"]
    assert warning == f"its worker died {SUSPECT_CRASHES} times in a row; it waits to be tried alone"
    for _ in range(MAX_TRIALS):
        assert await claim(connection, is_suspect=True) == 1
        await die(database, clock)
    run = await the_run(connection)
    assert run["status"] == "failed"
    assert run["error"] == (
        f"stopped retrying: {MAX_TRIALS} times in a row its worker died, or did not renew its lease in time, "
        "while this run was the only one executing there"
    )
    letter = await connection.fetchrow("select kind, subject_id, reason from tidegate.dead_letters")
    assert letter is not None and tuple(letter) == ("run", run["id"], run["error"])


async def test_a_run_that_is_given_up_counts_for_its_source(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    """Where the source counts failed runs: the second one opens its breaker, and its next event waits."""

    @world.app.workflow(on="go")
    async def work(ctx: Context, n: int) -> None: ...

    policy = SourceBreakerPolicy(threshold=2, ratio=0.5, window_ms=86_400_000, runs=True)
    await control.set_breaker(database, "shop.api", policy, "ann")
    await world.runner()
    await make_suspects(database, connection, clock, world, 2)
    for _ in range(2 * MAX_TRIALS):
        assert await claim(connection, is_suspect=True) == 1
        await die(database, clock)
    assert [status for status, _, _ in await crashes(connection)] == ["failed", "failed"]
    state = "select breaker_state from tidegate.event_scheduler_sources where source = 'shop.api'"
    assert await connection.fetchval(state) == "open"
    await publish(connection, "go", n=3)
    await world.dispatch.run_once()
    held = await connection.fetch("select reason from tidegate.event_ingress_retries")
    assert [row["reason"] for row in held] == ["breaker_open"]


async def test_nothing_executes_beside_a_suspect(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    beside: list[tuple[str, ...]] = []
    executing: list[str] = []

    async def execute(name: str) -> None:
        executing.append(name)
        await asyncio.sleep(0.02)
        beside.append(tuple(executing))
        executing.remove(name)

    @world.app.workflow(on="go")
    async def suspect(ctx: Context, n: int) -> None:
        await execute(f"suspect {n}")

    @world.app.workflow(on="other")
    async def other(ctx: Context, n: int) -> None:
        await execute(f"other {n}")

    runner = await world.runner()
    await make_suspects(database, connection, clock, world, 5)
    for n in range(30):
        await publish(connection, "other", n=n)
    await world.dispatch.run_once()
    while await runner.run_once() or len(runner._slots):
        await asyncio.sleep(0.001)
        await world.dispatch.run_once()
    assert {status for status, *_ in await crashes(connection)} == {"succeeded"}
    suspects = [names for names in beside if any(name.startswith("suspect") for name in names)]
    assert sorted(suspects) == [(f"suspect {n}",) for n in range(5)]
    assert max(len(names) for names in beside) > 1, "the others were not alone"


async def test_what_was_claimed_for_a_worker_as_a_trial_began_waits_for_its_end(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    release = asyncio.Event()

    @world.app.workflow(on="go")
    async def suspect(ctx: Context, n: int) -> None:
        world.done.append("suspect begun")
        await release.wait()
        world.done.append("suspect")

    @world.app.workflow(on="other")
    async def other(ctx: Context) -> None:
        world.done.append("other")

    runner = await world.runner()
    await make_suspects(database, connection, clock, world, 1)
    definitions = await database.run(world.app.register)
    await publish(connection, "other")
    await world.dispatch.run_once()
    [late] = await runs.claim_due(connection, definitions=definitions, limit=1, worker="test", lease_ms=LEASE_MS)
    assert await runner.run_once() == 1
    runner.start([(late, None)])
    await until(lambda: not len(runner._prefetch))  # it was given back
    assert world.done == ["suspect begun"]
    release.set()
    await asyncio.wait_for(runner.idle(), 30)
    await world.turn(runner)
    assert world.done == ["suspect begun", "suspect", "other"]


async def test_others_are_let_in_beside_a_suspect_that_lives_on(
    database: Database, connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "ALONE_SECONDS", 0.05)
    release = asyncio.Event()

    @world.app.workflow(on="go")
    async def suspect(ctx: Context, n: int) -> None:
        world.done.append("suspect")
        await release.wait()

    @world.app.workflow(on="other")
    async def other(ctx: Context) -> None:
        world.done.append("other")
        release.set()

    runner = await world.runner()
    await make_suspects(database, connection, clock, world, 1)
    await publish(connection, "other")
    await world.dispatch.run_once()
    assert await runner.run_once() == 1
    assert (await the_run(connection))["trials"] == 1
    assert runner.room == 0
    await until(lambda: runner.room > 0)
    assert (await the_run(connection))["trials"] is None, "if its worker dies now, it need not have been this one"
    await world.turn(runner)
    assert world.done == ["suspect", "other"]
    assert await crashes(connection) == [("succeeded", 0, None)] * 2


async def test_beside_runs_that_take_long_suspects_are_begun_and_not_blamed(
    database: Database, connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each would wait for hours until it is alone, and nothing else would be begun meanwhile."""
    for name in ("PATIENCE_SECONDS", "CHECK_SECONDS"):
        monkeypatch.setattr(quarantine, name, 0.05)
    monkeypatch.setattr(quarantine, "PAUSE_FACTOR", 0)
    release = asyncio.Event()

    @world.app.workflow(on="go")
    async def long(ctx: Context, n: int) -> None:
        world.done.append(str(n))
        await release.wait()

    @world.app.workflow(on="other")
    async def other(ctx: Context) -> None:
        world.done.append("other")

    runner = await world.runner()
    await publish(connection, "go", n=0)
    await world.dispatch.run_once()
    assert await runner.run_once() == 1
    for n in (1, 2, 3):
        await publish(connection, "go", n=n)
    await world.dispatch.run_once()
    await connection.execute(
        "update tidegate.workflow_runs set crashes = $1, trials = $2 where status = 'pending'",
        SUSPECT_CRASHES, MAX_TRIALS - 1,
    )  # fmt: skip
    runner.check_for_suspects()
    assert await runner.run_once() == 0
    assert runner.room == 0, "it waits until nothing executes, for a moment"
    await publish(connection, "other")
    await world.dispatch.run_once()
    async with asyncio.timeout(30):
        while len(world.done) < 5:
            await runner.run_once()
            await asyncio.sleep(0.005)
    assert sorted(world.done) == ["0", "1", "2", "3", "other"]
    rows = await connection.fetch("select trials from tidegate.workflow_runs where status = 'running' and crashes > 0")
    assert [row[0] for row in rows] == [MAX_TRIALS - 1] * 3, "none of them was alone"
    release.set()
    await asyncio.wait_for(runner.idle(), 30)
    assert {status for status, *_ in await crashes(connection)} == {"succeeded"}


@pytest.mark.parametrize("end", ["stop", "rest", "fail"])
async def test_what_comes_back_alive_has_not_killed(
    database: Database, connection: Connection, clock: Clock, world: World, end: str
) -> None:
    begun = asyncio.Event()

    @world.app.workflow(on="go")
    async def work(ctx: Context, n: int) -> None:
        begun.set()
        if end == "rest":
            await ctx.sleep("1h")
        if end == "fail":
            raise ValueError("no")
        await asyncio.sleep(30)

    runner: Runner = await world.runner()
    await make_suspects(database, connection, clock, world, 1)
    assert await runner.run_once() == 1
    await asyncio.wait_for(begun.wait(), 30)
    if end == "stop":
        runner.stop_claiming()
        await runner.stop(0)
    else:
        await asyncio.wait_for(runner.idle(), 30)
    assert await crashes(connection) == [{
        "stop": ("pending", SUSPECT_CRASHES, None), "rest": ("pending", 0, None), "fail": ("failed", 0, None),
    }[end]]  # fmt: skip


def test_each_death_makes_the_next_trial_longer() -> None:
    assert [quarantine.alone_seconds(crashes) for crashes in range(SUSPECT_CRASHES, SUSPECT_CRASHES + 4)] == [
        5.0, 20.0, 80.0, 320.0,
    ]  # fmt: skip
    assert {quarantine.alone_seconds(crashes) for crashes in (10, 100, 100_000)} == {quarantine.MAX_ALONE_SECONDS}
