"""A workflow's function and the task it is called in: it may cancel itself, and must leave when it is told to; what is
to be written of its run is written either way, with that of others."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World, the_run
from tests.flow.test_dispatch import publish
from tidegate import Context, Unavailable
from tidegate.flow.call import stopping
from tidegate.flow.call.execution import Execution
from tidegate.flow.run.runner import Runner
from tidegate.model.retry import Retry
from tidegate.store.db import Connection


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopping, "STOP_SECONDS", 0.05)


@pytest.mark.parametrize("raises", [False, True])
async def test_a_function_that_cancels_its_own_task_has_failed(
    connection: Connection, clock: Clock, world: World, raises: bool
) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()  # and nothing is awaited any more
        if raises:
            raise ValueError("after all")
        return 1

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed"
    assert ("after all" if raises else "CancelledError") in run["error"]


async def test_a_function_that_swallowed_a_cancellation_has_succeeded(
    connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            return await ctx.step("one", lambda: 1)
        raise AssertionError("it was cancelled")

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", 1)


async def _stays(world: World, may_end: asyncio.Event) -> None:
    """Whatever it is told."""
    world.done.append("here")
    while not may_end.is_set():
        try:
            await asyncio.sleep(0.01)
        except BaseException:
            world.done.append("told")


async def _begun(world: World, runner: Runner) -> None:
    await world.dispatch.run_once()
    await runner.run_once()
    while "here" not in world.done:  # noqa: ASYNC110 - until the function runs
        await asyncio.sleep(0.01)


async def test_a_function_that_stays_past_its_time_is_left_alone(
    connection: Connection, clock: Clock, world: World
) -> None:
    may_end = asyncio.Event()

    @world.app.workflow(on="go", timeout="1s")
    async def work(ctx: Context) -> str:
        await _stays(world, may_end)
        return "too late"

    @world.app.workflow(on="after")
    async def after(ctx: Context) -> None:
        world.done.append("after")

    runner = await world.runner(concurrency=1)
    await publish(connection, "go")
    await _begun(world, runner)
    await runner.idle()
    run = await the_run(connection)
    assert (run["status"], run["error"]) == ("failed", "timed out after 1000 ms")
    assert world.done.count("told") == stopping.STOP_TIMES
    await publish(connection, "after")
    await world.turn(runner)
    assert "after" in world.done, "its slot is free"
    may_end.set()
    await asyncio.sleep(0.1)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("failed", None), "what it returns at last does not count"


async def test_a_worker_stops_although_a_function_stays(connection: Connection, clock: Clock, world: World) -> None:
    may_end = asyncio.Event()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await _stays(world, may_end)

    runner = await world.runner()
    await publish(connection, "go")
    await _begun(world, runner)
    await asyncio.wait_for(runner.stop(0.01), 30)
    run = await the_run(connection)
    assert run["status"] == "pending", "it was handed back"
    may_end.set()
    await asyncio.sleep(0.1)
    assert (await the_run(connection))["status"] == "pending"


async def test_a_run_resumes_when_its_function_has_stopped_at_last(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only step waits and the function does not stop: the run is suspended without it. When the step is due, the
    worker does not call the function a second time beside the first."""
    monkeypatch.setattr(stopping, "WAITING_SECONDS", 0.02)
    may_end = asyncio.Event()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        world.done.append("called")
        nap = asyncio.create_task(ctx.sleep("1h", name="nap"))
        if world.done.count("called") == 1:
            await _stays(world, may_end)
            return "too late"
        await nap
        return "resumed"

    runner = await world.runner()
    await publish(connection, "go")
    await _begun(world, runner)
    await runner.idle()
    assert (await the_run(connection))["status"] == "pending"
    await clock.advance(3_600_000)
    assert await runner.run_once() == 1
    await asyncio.sleep(0.1)
    assert world.done.count("called") == 1
    may_end.set()
    await asyncio.wait_for(runner.idle(), 30)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", "resumed")
    assert world.done.count("called") == 2


async def test_what_cannot_be_written_fails_the_run_also_while_the_worker_stops(
    connection: Connection, clock: Clock, world: World
) -> None:
    """The end is refused by the database after the worker has stopped waiting for it: the run ends as failed, and no
    other worker executes it again."""
    blocked, may_write = asyncio.Event(), asyncio.Event()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> int:
        return 1

    runner = await world.runner()
    write, refused = runner._outcomes._write_group, []

    async def refuse_once(items: Any) -> Any:
        if not refused:
            refused.append(items)
            blocked.set()
            await may_write.wait()
            raise ValueError("the database refuses it")
        return await write(items)

    runner._outcomes._write_group = refuse_once  # type: ignore[method-assign]
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    await blocked.wait()
    stopping_worker = asyncio.create_task(runner.stop(0.01))
    await asyncio.sleep(0.1)
    may_write.set()
    await asyncio.wait_for(stopping_worker, 30)
    run = await the_run(connection)
    assert run["status"] == "failed"
    assert "the database refuses it" in run["error"]


async def test_a_worker_stops_although_the_database_is_down(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it could not write is left to the lease: another worker executes the run again."""
    may_end = asyncio.Event()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> int:
        world.done.append("here")
        await may_end.wait()
        return 1

    runner = await world.runner()
    await publish(connection, "go")
    await _begun(world, runner)

    async def down(*_: Any, **__: Any) -> Any:
        raise Unavailable("the database is down")

    with monkeypatch.context() as without_database:
        without_database.setattr(world.database, "run", down)
        without_database.setattr(world.database, "transaction", _Down)
        may_end.set()
        await asyncio.wait_for(runner.stop(0.05), 30)
    assert len(runner._slots) == 0
    assert (await the_run(connection))["status"] == "running"


class _Down:
    async def __aenter__(self) -> None:
        raise Unavailable("the database is down")

    async def __aexit__(self, *_: object) -> None: ...


async def test_runs_that_end_differently_are_written_together(
    connection: Connection, clock: Clock, world: World
) -> None:
    """One transaction: some simply succeeded, some hold a slot, one fails, one rests, one tries a step again."""

    @world.app.workflow(on="go")
    async def plain(ctx: Context, how: str) -> str:
        await ctx.step("one", lambda: how)
        if how == "fail":
            raise ValueError("no")
        if how == "sleep":
            await ctx.sleep("1h")
        if how == "retry":
            await ctx.step("two", lambda: 1 / 0, retry=Retry(max_attempts=3))
        return how

    @world.app.workflow(on="go", max_concurrency=9)
    async def limited(ctx: Context, how: str) -> str:
        return await ctx.step("one", lambda: how)

    runner = await world.runner()
    for how in ("fine", "fail", "sleep", "fine", "retry"):
        await publish(connection, "go", how=how)
    await world.turn(runner)
    rows = await connection.fetch(
        """
        select w.slug || ' ' || (r.parameters ->> 'how') as run, r.status,
               count(s.id) filter (where s.status = 'succeeded')
          from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
          left join tidegate.workflow_run_steps s on s.workflow_run_id = r.id
         group by r.id, w.slug, r.parameters, r.status order by 1
        """
    )
    limited_ones = [(f"limited {how}", "succeeded", 1) for how in ("fail", "fine", "fine", "retry", "sleep")]
    assert [tuple(row) for row in rows] == [
        *limited_ones,
        ("plain fail", "failed", 1),
        ("plain fine", "succeeded", 1),
        ("plain fine", "succeeded", 1),
        ("plain retry", "pending", 1),
        ("plain sleep", "pending", 1),
    ]


async def test_nothing_is_left_of_a_run_that_has_ended(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker looks for garbage seldom: what a run held is given back as it ends, without that."""
    seen: list[weakref.ref[Execution]] = []
    real = Execution.call

    async def go(self: Execution) -> object:
        seen.append(weakref.ref(self))
        return await real(self)

    monkeypatch.setattr(Execution, "call", go)

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> int:
        return await ctx.step("one", lambda: 1)

    runner = await world.runner()
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            await publish(connection, "go")
        await world.turn(runner)
        await asyncio.sleep(0.05)
        assert len(seen) == 3
        assert [one for one in seen if one() is not None] == []
    finally:
        gc.enable()
