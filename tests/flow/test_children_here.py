"""A parent that is still executing when its child ends in the same worker goes on at once, without being suspended.
What it does not hear of this way it is suspended and resumed for: no wake-up is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.step_world import World, the_run, the_steps
from tests.flow.test_dispatch import publish
from tidegate import ChildFailed, Context
from tidegate.flow.call import step_parts
from tidegate.flow.run.outcomes import OutcomeWriter
from tidegate.flow.run.runner import Runner
from tidegate.store.db import Connection

CHILD_EXISTS = "select exists (select from tidegate.run_children)"


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A parent stays in its worker until its child has ended, however slow the machine is."""
    monkeypatch.setattr(step_parts, "QUIET_SECONDS", 30)


async def begin_parent(connection: Connection, world: World, runner: Runner) -> None:
    """The parent is executing, and its child is due."""
    await publish(connection, "go", n=1)
    await world.dispatch.run_once()
    assert await runner.run_once() == 1
    await eventually(world.database, CHILD_EXISTS)
    await world.dispatch.run_once()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("how", ["run", "map"])
async def test_a_parent_that_is_executing_goes_on_when_its_child_ends(
    connection: Connection, world: World, how: str
) -> None:
    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> Any:
        return {"parcel": n}

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> Any:
        world.done.append("called")
        return await ctx.run(ship, n=n) if how == "run" else await ctx.map(ship, [n])

    runner = await world.runner()
    await begin_parent(connection, world, runner)
    assert await runner.run_once() == 1
    await asyncio.wait_for(runner.idle(), 30)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", {"parcel": 1} if how == "run" else [{"parcel": 1}])
    assert (run["attempts"], world.done) == (1, ["called"])  # it was never suspended


@pytest.mark.usefixtures("patient")
async def test_a_parent_that_is_executing_is_told_why_its_child_failed(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> Any:
        raise ValueError("no truck")

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> str:
        try:
            await ctx.run(ship, n=n, name="ship")
        except ChildFailed as exc:
            return str(exc)
        return "it did not fail"

    runner = await world.runner()
    await begin_parent(connection, world, runner)
    assert await runner.run_once() == 1
    await asyncio.wait_for(runner.idle(), 30)
    run, step = await the_run(connection), (await the_steps(connection))["ship"]
    assert run["attempts"] == 1
    assert "no truck" in run["output"] and "of ship failed" in run["output"]
    assert (step["status"], step["retry_state"]) == ("failed", "exhausted")


async def test_a_wake_up_for_an_event_is_not_lost_by_the_end_of_a_child(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event ends one step while a child ends another: the parent, which hears of the child alone, is due at once
    when it is suspended, and has both."""
    monkeypatch.setattr(step_parts, "QUIET_SECONDS", 30)
    may_go_on, has_parcel = asyncio.Event(), asyncio.Event()

    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> int:
        return n

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> Any:
        paid = asyncio.create_task(ctx.wait_for("paid", timeout="1h", name="paid"))
        parcel = await ctx.run(ship, n=n, name="ship")
        has_parcel.set()
        await ctx.step("beside", may_go_on.wait)
        event = await paid
        return [parcel, event.payload["amount"]]

    runner = await world.runner()
    await begin_parent(connection, world, runner)
    looked_back = (
        "select exists (select from tidegate.workflow_run_steps where retry_metadata ->> 'looked_back' = 'true')"
    )
    await eventually(world.database, looked_back)
    await publish(connection, "paid", amount=7)
    await world.dispatch.run_once()
    assert await runner.run_once() == 1  # the child
    await eventually(
        world.database,
        "select exists (select from tidegate.workflow_run_steps where name = 'ship' and status = 'succeeded')",
    )
    await asyncio.wait_for(has_parcel.wait(), 30)
    monkeypatch.setattr(step_parts, "QUIET_SECONDS", 0.01)
    may_go_on.set()
    await asyncio.wait_for(runner.idle(), 30)
    assert (await the_run(connection))["status"] == "pending"
    assert await runner.run_once() == 1  # at once, not after an hour
    await asyncio.wait_for(runner.idle(), 30)
    assert (await the_run(connection))["output"] == [1, 7]


@pytest.mark.usefixtures("patient")
async def test_two_children_beside_each_other_end_one_by_one(connection: Connection, world: World) -> None:
    ends, arrived = ({1: asyncio.Event(), 2: asyncio.Event()} for _ in range(2))

    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> int:
        await ends[n].wait()
        return n

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> Any:
        async def one(number: int) -> None:
            world.done.append(f"parcel {await ctx.run(ship, n=number, name=f'ship-{number}')}")
            arrived[number].set()

        await asyncio.gather(one(1), one(2))

    runner = await world.runner()
    await begin_parent(connection, world, runner)
    await eventually(world.database, "select count(*) = 2 from tidegate.run_children")
    await world.dispatch.run_once()
    while await runner.run_once():
        pass
    for number in (2, 1):
        ends[number].set()
        await asyncio.wait_for(arrived[number].wait(), 30)
    await asyncio.wait_for(runner.idle(), 30)
    run = await the_run(connection)
    assert (run["status"], run["attempts"]) == ("succeeded", 1)
    assert world.done == ["parcel 2", "parcel 1"]


@pytest.mark.usefixtures("patient")
async def test_a_parent_that_was_just_woken_is_not_suspended(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time after which it is suspended is over between the end of its child and its next line."""
    woken = step_parts.StepParts.woken

    def and_quiet(self: step_parts.StepParts, *given: Any) -> None:
        woken(self, *given)
        self._suspend_if_quiet()

    monkeypatch.setattr(step_parts.StepParts, "woken", and_quiet)

    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> int:
        return n

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> int:
        return await ctx.run(ship, n=n) + await ctx.run(ship, n=n + 1)

    runner = await world.runner()
    await begin_parent(connection, world, runner)
    assert await runner.run_once() == 1
    await eventually(world.database, "select count(*) = 2 from tidegate.run_children")
    await world.dispatch.run_once()
    assert await runner.run_once() == 1
    await asyncio.wait_for(runner.idle(), 30)
    run = await the_run(connection)
    assert (run["status"], run["output"], run["attempts"]) == ("succeeded", 3, 1)


@pytest.mark.usefixtures("patient")
async def test_two_calls_that_wait_for_one_child_both_go_on(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> int:
        return n

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> Any:
        shipping = await ctx.start(ship, n=n, name="ship")
        return await asyncio.gather(shipping.result(), shipping.result())

    runner = await world.runner()
    await begin_parent(connection, world, runner)
    assert await runner.run_once() == 1
    await asyncio.wait_for(runner.idle(), 30)
    run = await the_run(connection)
    assert (run["status"], run["output"], run["attempts"]) == ("succeeded", [1, 1], 1)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("what", ["child", "approval"])
@pytest.mark.parametrize("how", ["one", "both"])
async def test_a_call_that_is_cut_off_keeps_no_other_waiting(
    connection: Connection, world: World, what: str, how: str
) -> None:
    """Whoever waits for a step that another call has cut off is told so at once, as when the run is resumed."""

    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> int:
        return n

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> Any:
        wait: Any
        if what == "child":
            wait = (await ctx.start(ship, n=n, name="ship")).result
        else:
            wait = (await ctx.approval("ship", timeout="1h")).decision

        async def first() -> Any:
            try:
                async with asyncio.timeout(0.05):
                    return await wait()
            except TimeoutError:
                return "cut off"

        async def second() -> Any:
            try:
                return await wait()
            except TimeoutError:
                return "cut off"

        return await asyncio.gather(first(), first() if how == "both" else second())

    runner = await world.runner()
    await publish(connection, "go", n=1)
    await world.dispatch.run_once()
    assert await runner.run_once() == 1
    await asyncio.wait_for(runner.idle(), 30)
    run, step = await the_run(connection), (await the_steps(connection))["ship"]
    assert (run["status"], run["output"], run["attempts"]) == ("succeeded", ["cut off", "cut off"], 1)
    assert step["status"] == "cancelled"


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("how", ["run", "start"])
async def test_a_child_that_is_cut_off_at_once_is_started_all_the_same(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch, how: str, is_busy: bool
) -> None:
    """That it is cut off is written after its start: not with it, also when both wait behind another commit."""
    may_write, failures, write_group = asyncio.Event(), [], OutcomeWriter._write_group

    async def written(self: OutcomeWriter, items: Any) -> Any:
        await asyncio.wait_for(may_write.wait(), 30)
        try:
            return await write_group(self, items)
        except Exception as exc:
            failures.append(exc)
            raise

    monkeypatch.setattr(OutcomeWriter, "_write_group", written)

    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> int:
        return n

    @world.app.workflow(on="before")
    async def before(ctx: Context) -> None: ...

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> Any:
        if how == "run":
            waiting = asyncio.create_task(ctx.run(ship, n=n, name="ship"))
        else:
            waiting = asyncio.create_task((await ctx.start(ship, n=n, name="ship")).result())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.sleep(0.05)  # until it is sent
        may_write.set()
        return "went on"

    runner = await world.runner()
    if is_busy:
        await publish(connection, "before")
        await world.dispatch.run_once()
        assert await runner.run_once() == 1
    else:
        may_write.set()
    await publish(connection, "go", n=1)
    await world.dispatch.run_once()
    assert await runner.run_once() == 1
    await asyncio.wait_for(runner.idle(), 30)
    await world.turn(runner)
    assert failures == []
    assert (await the_steps(connection))["ship"]["status"] == "cancelled"
    ended = await connection.fetch("select output, status from tidegate.workflow_runs where output is not null")
    assert sorted((str(row[0]), row[1]) for row in ended) == [("1", "succeeded"), ("went on", "succeeded")]


@pytest.mark.usefixtures("patient")
async def test_a_parent_that_another_worker_has_taken_over_does_not_go_on_here(
    connection: Connection, world: World
) -> None:
    may_end = asyncio.Event()

    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> int:
        await may_end.wait()
        return n

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> None:
        await ctx.run(ship, n=n)
        await ctx.step("bill", world.done.append, "billed")

    runner = await world.runner()
    await begin_parent(connection, world, runner)
    assert await runner.run_once() == 1
    taken = "update tidegate.workflow_runs set claim_generation = claim_generation + 1 where id = $1"
    await connection.execute(taken, (await the_run(connection))["id"])
    may_end.set()
    await eventually(world.database, "select exists (select from tidegate.workflow_runs where status = 'succeeded')")
    await asyncio.sleep(0.2)
    assert world.done == []
