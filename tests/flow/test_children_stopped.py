"""A parent is cancelled or times out while starts of its children are held: none of them is launched any more."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.test_children import of, parent, turns
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker
from tidegate import Context
from tidegate.flow import control
from tidegate.flow.keep.children import ChildKeeper
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.model.budget import Budget
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store.db import Connection

HOUR = 3_600_000
NEXT_AT = "select next_attempt_at from tidegate.workflow_trigger_deliveries where id = $1"


def families(world: World) -> None:
    """A parent with six children of which two may run at once, beside a child of another parent."""

    @world.app.workflow(max_concurrency=2)
    async def nap(ctx: Context, n: int) -> int:
        world.done.append(f"nap {n}")
        await ctx.sleep("2h" if n else "30m")
        return n

    @world.app.workflow(on="go", timeout="1h")
    async def work(ctx: Context) -> Any:
        return await ctx.map(nap, [1, 2, 3, 4, 5, 6])

    @world.app.workflow(on="other")
    async def other(ctx: Context, n: int) -> Any:
        return await ctx.run(nap, n=n)


async def held(connection: Connection) -> int:
    found: int = await connection.fetchval(
        "select count(*) from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled'"
    )
    return found


@pytest.mark.parametrize("how", ["timeout", "cancel"])
async def test_held_starts_are_cancelled_before_their_siblings_free_their_slots(
    connection: Connection, clock: Clock, world: World, how: str
) -> None:
    families(world)
    runner = await world.runner()
    worker = TriggerWorker(world.database)
    await publish(connection, "go")
    await turns(world, runner, 3)
    assert (world.done, await held(connection)) == (["nap 1", "nap 2"], 4)
    await publish(connection, "other", n=7)
    await turns(world, runner, 3)
    if how == "timeout":
        await clock.advance(HOUR + 1)
    else:
        await control.cancel_run(world.database, (await parent(connection))["id"], "ops", TRIGGER_BREAKER)
    for _ in range(3):
        await turns(world, runner, 2)
        await worker.turn()
    await turns(world, runner, 2)
    assert world.done == ["nap 1", "nap 2", "nap 7"]
    assert [row["status"] for row in await of(connection, "nap")] == ["cancelled", "cancelled", "pending"]
    assert await held(connection) == 0


async def test_a_slot_that_becomes_free_before_the_children_are_cancelled(
    connection: Connection, clock: Clock, world: World
) -> None:
    """Of somebody else's run: it goes to the next in line whose parent is still there."""
    families(world)
    runner = await world.runner()
    worker = TriggerWorker(world.database)
    await publish(connection, "other", n=0)
    await turns(world, runner, 3)
    await publish(connection, "go")
    await turns(world, runner, 3)
    await publish(connection, "other", n=7)
    await turns(world, runner, 3)
    assert (world.done, await held(connection)) == (["nap 0", "nap 1"], 6)
    [run] = await of(connection, "work")
    await control.cancel_run(world.database, run["id"], "ops", TRIGGER_BREAKER)
    await clock.advance(HOUR // 2 + 1)
    for _ in range(8):  # no reconcile: nothing is passed down yet
        await world.turn(runner)
        await worker.turn()
    assert world.done == ["nap 0", "nap 1", "nap 0", "nap 7"]
    rows = await connection.fetch("select * from tidegate.workflow_trigger_deliveries where status = 'cancelled'")
    assert {(row["reason"], row["last_error"]) for row in rows} == {
        ("parent_stopped", "cancelled: its parent was cancelled by ops")
    }
    await Reconcile(world.database, batch_size=100).run_once()
    await turns(world, runner, 3)
    assert [row["status"] for row in await of(connection, "nap")] == ["succeeded", "cancelled", "pending"]
    assert await held(connection) == 0


@pytest.mark.parametrize("limit", ["slot", "budget"])
async def test_what_a_cancelled_start_was_offered_is_for_the_next_in_line(
    connection: Connection, clock: Clock, world: World, limit: str
) -> None:
    given: dict[str, Any] = {"max_concurrency": 1} if limit == "slot" else {"budgets": [Budget("gpu", concurrency=1)]}

    @world.app.workflow(**given)
    async def nap(ctx: Context, n: int) -> int:
        world.done.append(f"nap {n}")
        await ctx.sleep("10m")
        return n

    @world.app.workflow(on="go")
    async def go(ctx: Context, n: int) -> Any:
        return await ctx.run(nap, n=n)

    runner = await world.runner()
    for n in (1, 2, 3):
        await publish(connection, "go", n=n)
        await turns(world, runner, 3)
    assert (world.done, await held(connection)) == (["nap 1"], 2)
    second = await connection.fetchval("select id from tidegate.workflow_runs where parameters ->> 'n' = '2'")
    first = await connection.fetchval(
        "select id from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled' "
        "order by ingress_sequence limit 1"
    )
    later = clock.now + timedelta(days=1)  # no time of a plan, or of a fallback, comes meanwhile
    await connection.execute(
        "update tidegate.workflow_trigger_deliveries set next_attempt_at = $1 where retry_state = 'scheduled'", later
    )
    [nap_1] = await of(connection, "nap")
    await control.cancel_run(world.database, second, "ops", TRIGGER_BREAKER)
    await control.cancel_run(world.database, nap_1["id"], "ops", TRIGGER_BREAKER)  # the second is offered its slot
    assert await connection.fetchval(NEXT_AT, first) <= clock.now
    keeper = ChildKeeper(world.database, batch_size=100, breaker=TRIGGER_BREAKER)
    await keeper.run_once()
    await TriggerWorker(world.database).delivery_retry.run_once()
    await turns(world, runner, 2)
    assert world.done == ["nap 1", "nap 3"]
