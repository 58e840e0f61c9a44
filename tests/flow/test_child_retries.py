"""A retry of a parent resumes its failed children, or adopts those that have succeeded since: no step is repeated."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.test_children import of, parent, turns
from tests.flow.test_dispatch import publish
from tidegate import ChildFailed, Context, NonRetryable
from tidegate.flow import control
from tidegate.flow.control.run_bulk import change_runs
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.run.runner import Runner
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import children
from tidegate.store.db import Connection
from tidegate.store.run_search import RunFilters


class Shop:
    """Orders that pay in a child: `charge` succeeds, `book` fails while the shop is broken."""

    def __init__(self, world: World) -> None:
        self.world, self.is_broken = world, True
        self.keys: list[str] = []

        async def charge(ctx: Context) -> str:
            self.keys.append(ctx.idempotency_key)
            return "paid"

        async def book(n: int) -> int:
            if self.is_broken:
                raise NonRetryable("no books")
            return n

        @world.app.workflow()
        async def payment(ctx: Context, n: int) -> int:
            await ctx.step("charge", charge, ctx)
            return await ctx.step("book", book, n)

        @world.app.workflow()
        async def deal(ctx: Context, n: int) -> Any:
            return await ctx.run(payment, n=n)

        @world.app.workflow(on="go")
        async def order(ctx: Context) -> Any:
            return await ctx.run(payment, n=7)

        @world.app.workflow(on="deal")
        async def chain(ctx: Context) -> Any:
            return await ctx.run(deal, n=7)

        @world.app.workflow(on="many")
        async def many(ctx: Context, at_once: int) -> Any:
            return await ctx.map(payment, [1, 2, 3], at_once=at_once)

    async def fail(self, connection: Connection, type: str = "go", **payload: object) -> tuple[Runner, Any]:
        """A run that has failed; then the cause is fixed."""
        runner = await self.world.runner()
        await publish(connection, type, **payload)
        await turns(self.world, runner, 6)
        run = await parent(connection)
        assert run["status"] == "failed"
        self.is_broken = False
        return runner, run


async def open_letters(connection: Connection) -> int:
    found: int = await connection.fetchval("select count(*) from tidegate.dead_letters where replayed_at is null")
    return found


async def test_a_retried_parent_resumes_its_failed_child(connection: Connection, world: World) -> None:
    shop = Shop(world)
    runner, run = await shop.fail(connection)
    [child] = await of(connection, "payment")
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner)
    assert (await parent(connection))["output"] == 7
    [same] = await of(connection, "payment")
    assert (same["id"], same["status"]) == (child["id"], "succeeded")
    assert shop.keys == [f"{child['id']}:charge"]
    assert await open_letters(connection) == 0
    [listed] = await children.list_of_run(connection, run["id"], 10)
    assert (listed.run_id, listed.status) == (child["id"], "succeeded")


async def test_a_child_that_was_retried_by_itself_is_adopted(connection: Connection, world: World) -> None:
    shop = Shop(world)
    runner, run = await shop.fail(connection)
    [child] = await of(connection, "payment")
    await control.retry_run(world.database, child["id"], "ops")
    await turns(world, runner)
    [listed] = await children.list_of_run(connection, run["id"], 10)
    assert (listed.status, listed.error) == ("succeeded", None)
    assert (await parent(connection))["status"] == "failed"
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner)
    assert ((await parent(connection))["output"], len(shop.keys)) == (7, 1)
    assert len(await of(connection, "payment")) == 1


@pytest.mark.parametrize("first", ["parent", "child"])
async def test_a_child_that_is_retried_while_its_parent_is_due(
    connection: Connection, world: World, first: str
) -> None:
    """Its parent has not reached the step, or has just had it resume."""
    shop = Shop(world)
    runner, run = await shop.fail(connection)
    [child] = await of(connection, "payment")
    for run_id in (run["id"], child["id"]) if first == "parent" else (child["id"], run["id"]):
        await control.retry_run(world.database, run_id, "ops")
    await turns(world, runner)
    assert ((await parent(connection))["output"], len(shop.keys)) == (7, 1)
    assert len(await of(connection, "payment")) == 1
    assert await open_letters(connection) == 0


async def test_a_bulk_retry_of_parent_and_child_executes_each_once(connection: Connection, world: World) -> None:
    shop = Shop(world)
    runner, _ = await shop.fail(connection)
    done = await change_runs(world.database, "retry", RunFilters(error="no books"), "ops", TRIGGER_BREAKER)
    assert (done.done, done.refused) == (2, 0)
    await turns(world, runner)
    assert ((await parent(connection))["output"], len(shop.keys)) == (7, 1)
    assert await open_letters(connection) == 0


async def test_a_retry_goes_down_the_tree(connection: Connection, world: World) -> None:
    shop = Shop(world)
    runner, run = await shop.fail(connection, "deal")
    before = [row["id"] for name in ("deal", "payment") for row in await of(connection, name)]
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner, 6)
    assert ((await parent(connection))["output"], len(shop.keys)) == (7, 1)
    assert [row["id"] for name in ("deal", "payment") for row in await of(connection, name)] == before
    assert await open_letters(connection) == 0


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("retried", [0, 1])
async def test_a_map_resumes_what_failed_and_starts_the_rest(
    connection: Connection, world: World, at_once: int, retried: int
) -> None:
    """The first one may have been retried by itself."""
    shop = Shop(world)
    runner, run = await shop.fail(connection, "many", at_once=at_once)
    before = {row["id"] for row in await of(connection, "payment")}
    assert len(before) == at_once
    for row in (await of(connection, "payment"))[:retried]:
        await control.retry_run(world.database, row["id"], "ops")
        await turns(world, runner)
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner, 8)
    assert (await parent(connection))["output"] == [1, 2, 3]
    found = await of(connection, "payment")
    assert len(found) == 3 and before <= {row["id"] for row in found}
    assert len(shop.keys) == len(set(shop.keys)) == 3


async def test_what_fails_again_fails_its_parent_again(connection: Connection, world: World) -> None:
    shop = Shop(world)
    runner, run = await shop.fail(connection)
    for is_broken in (True, False):
        shop.is_broken = is_broken
        await control.retry_run(world.database, run["id"], "ops")
        await turns(world, runner)
        assert (await parent(connection))["status"] == ("failed" if is_broken else "succeeded")
    assert len(shop.keys) == len(await of(connection, "payment")) == 1
    assert await open_letters(connection) == 0


async def test_a_child_that_cannot_resume_fails_its_parent(connection: Connection, world: World) -> None:
    shop = Shop(world)
    runner, run = await shop.fail(connection)
    await connection.execute(
        "update tidegate.workflow_definitions set deleted_at = tidegate.now() where slug = 'payment'"
    )
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner)
    found = await parent(connection)
    assert found["status"] == "failed"
    assert "(not resumed: workflow payment of run" in found["error"].splitlines()[0]
    assert len(await of(connection, "payment")) == 1


async def test_a_child_that_waits_for_its_trigger_resumes_with_its_parent(connection: Connection, world: World) -> None:
    """As a retry of the child would: its trigger launches nothing new."""
    shop = Shop(world)
    runner, run = await shop.fail(connection)
    await connection.execute("update tidegate.workflow_event_triggers set status = 'disabled' where name = 'start'")
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner)
    assert ((await parent(connection))["output"], len(shop.keys)) == (7, 1)


async def test_a_child_that_is_gone_is_started_anew(connection: Connection, world: World) -> None:
    shop = Shop(world)
    runner, run = await shop.fail(connection)
    [child] = await of(connection, "payment")
    await connection.execute("delete from tidegate.workflow_runs where id = $1", child["id"])
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner)
    assert (await parent(connection))["output"] == 7
    assert len(set(shop.keys)) == 2
    said = await connection.fetchval("select reason from tidegate.event_decisions where decision = 'replayed'")
    assert said.endswith("; 1 of its children start anew: the run that they had does not exist")


async def test_a_resumed_child_waits_for_a_slot(connection: Connection, clock: Clock, world: World) -> None:
    is_broken = [True]

    @world.app.workflow(max_concurrency=1)
    async def nap(ctx: Context, n: int) -> int:
        if n and is_broken:
            raise NonRetryable("no bed")
        if not n:
            await ctx.sleep("1h")
        return n

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        return await ctx.run(nap, n=1)

    @world.app.workflow(on="block")
    async def block(ctx: Context) -> Any:
        return await ctx.run(nap, n=0)

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner)
    run = await parent(connection)
    await publish(connection, "block")
    await turns(world, runner)
    is_broken.clear()
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner)
    [work_now] = await of(connection, "work")
    first, other = await of(connection, "nap")
    assert (work_now["status"], first["status"], other["status"]) == ("pending", "failed", "pending")
    for _ in range(3):
        await clock.advance(3_600_001)
        await turns(world, runner)
    [work_now] = await of(connection, "work")
    assert (work_now["status"], work_now["output"], len(await of(connection, "nap"))) == ("succeeded", 1, 2)


async def test_cancel_and_retry_of_a_grandparent_keeps_what_had_succeeded(
    connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow()
    async def leaf(ctx: Context, n: int) -> int:
        async def effect() -> None:
            world.done.append(f"leaf {n}")

        await ctx.step("effect", effect)
        if n:
            await ctx.sleep("1h")
        return n

    @world.app.workflow()
    async def branch(ctx: Context) -> Any:
        return await ctx.map(leaf, [0, 1])

    @world.app.workflow(on="go")
    async def root(ctx: Context) -> Any:
        return await ctx.run(branch)

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 4)
    run = await parent(connection)
    await control.cancel_run(world.database, run["id"], "ops", TRIGGER_BREAKER)
    await turns(world, runner, 4)
    assert [row["status"] for row in await of(connection, "leaf")] == ["succeeded", "cancelled"]
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner, 4)
    await clock.advance(3_600_001)
    await turns(world, runner, 4)
    assert (await parent(connection))["output"] == [0, 1]
    assert Counter(world.done) == {"leaf 0": 1, "leaf 1": 1}
    assert [len(await of(connection, name)) for name in ("branch", "leaf")] == [1, 2]


async def test_a_retry_waits_for_a_child_that_is_stopping(connection: Connection, clock: Clock, world: World) -> None:
    """Otherwise the child would end as cancelled, and fail its parent again."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    @world.app.workflow()
    async def slow(ctx: Context) -> str:
        async def effect() -> None:
            world.done.append("effect")
            reached.set()
            await go_on.wait()

        async def last() -> str:
            return "done"

        await ctx.step("effect", effect)
        return await ctx.step("last", last)

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        return await ctx.run(slow)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await world.dispatch.run_once()
    await runner.run_once()
    await asyncio.wait_for(reached.wait(), 30)
    run = await parent(connection)
    await control.cancel_run(world.database, run["id"], "ops", TRIGGER_BREAKER)
    await Reconcile(world.database, batch_size=100).run_once()
    assert await control.retry_run(world.database, run["id"], "ops") == "scheduled"
    why = await connection.fetchval("select replay_error from tidegate.dead_letters where replayed_at is null")
    assert why.startswith("waiting for its child, run ") and why.endswith(
        " to stop: it was asked to and is still running"
    )
    go_on.set()
    await asyncio.wait_for(runner.idle(), 30)
    await clock.advance(2000)
    await turns(world, runner)
    assert ((await parent(connection))["output"], world.done) == ("done", ["effect"])
    assert len(await of(connection, "slow")) == 1


async def test_what_a_sibling_cut_off_resumes_too(connection: Connection, world: World) -> None:
    is_broken = [True]

    @world.app.workflow()
    async def fail(ctx: Context, n: int) -> int:
        async def effect() -> None:
            world.done.append(f"effect {n}")

        await ctx.step("effect", effect)
        if is_broken:
            raise NonRetryable("broken")
        return n

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ctx.run(fail, n=n, name=f"fail {n}")) for n in (1, 2)]
        return [task.result() for task in tasks]

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner)
    run = await parent(connection)
    assert run["status"] == "failed"
    is_broken.clear()
    await control.retry_run(world.database, run["id"], "ops")
    await turns(world, runner)
    assert (await parent(connection))["output"] == [1, 2]
    assert Counter(world.done) == {"effect 1": 1, "effect 2": 1}


async def test_a_rerun_of_a_parent_begins_anew(connection: Connection, world: World) -> None:
    shop = Shop(world)
    runner, run = await shop.fail(connection)
    new_id = await control.rerun_run(world.database, run["id"], "ops")
    await turns(world, runner)
    status = await connection.fetchval("select status from tidegate.workflow_runs where id = $1", new_id)
    assert (status, len(await of(connection, "payment")), len(set(shop.keys))) == ("succeeded", 2, 2)


async def test_a_map_that_goes_on_keeps_its_results(connection: Connection, world: World) -> None:
    """A step that has succeeded stays: the function has seen its failures."""
    is_broken = [True]

    @world.app.workflow()
    async def pick(ctx: Context, n: int) -> int:
        world.done.append(f"pick {n}")
        if n == 2:
            raise NonRetryable("no two")
        return n

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        found = await ctx.map(pick, [1, 2], return_exceptions=True)
        if is_broken:
            raise NonRetryable("broken")
        return ["failed" if isinstance(one, ChildFailed) else one for one in found]

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner)
    is_broken.clear()
    await control.retry_run(world.database, (await parent(connection))["id"], "ops")
    await turns(world, runner)
    assert (await parent(connection))["output"] == [1, "failed"]
    assert Counter(world.done) == {"pick 1": 1, "pick 2": 1}
