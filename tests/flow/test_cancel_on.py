"""`cancel_on`: events that cancel runs, decided with the event; and the runs that they must not touch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.test_dispatch import publish
from tests.flow.test_versions import Cluster
from tests.flow.test_versions import cluster as cluster  # noqa: PLC0414 - a fixture
from tidegate import Context, On, Tidegate
from tidegate.errors import AppError
from tidegate.flow import control
from tidegate.flow.call.waits import WaitAnswer, WaitQuestion
from tidegate.flow.look.explain import explain, explain_any
from tidegate.flow.run.look_back import LookBack
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store.db import Connection

MINE = On("order.cancelled", where="event.payload.id == run.parameters.id")


async def the_runs(connection: Connection) -> dict[int, Any]:
    rows = await connection.fetch("select * from tidegate.workflow_runs")
    return {row["parameters"]["id"]: row for row in rows}


@pytest.mark.parametrize("when", ["before it started", "suspended", "executing"])
async def test_an_event_cancels_the_run_that_it_means(
    connection: Connection, clock: Clock, world: World, when: str
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def busy() -> None:
        begun.set()
        await go_on.wait()

    @world.app.workflow(on="order.created", cancel_on=MINE)
    async def fulfil(ctx: Context, id: int) -> None:
        world.done.append(f"begun {id}")
        if when == "executing" and id == 7:
            await ctx.step("busy", busy)
        await ctx.sleep("1h")
        await ctx.step("ship", world.done.append, f"ship {id}")

    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await publish(connection, "order.created", id=8)
    await world.dispatch.run_once()
    if when == "before it started":
        cancelled = await publish(connection, "order.cancelled", id=7)
        await world.dispatch.run_once()
    elif when == "suspended":
        await world.turn(runner)
        cancelled = await publish(connection, "order.cancelled", id=7)
        await world.dispatch.run_once()
    else:
        await runner.run_once()
        await begun.wait()
        cancelled = await publish(connection, "order.cancelled", id=7)
        await world.dispatch.run_once()
        go_on.set()
        await runner.idle()
    await world.turn(runner)
    await clock.advance(3_600_000)
    await world.turn(runner)
    found = await the_runs(connection)
    assert (found[7]["status"], found[8]["status"]) == ("cancelled", "succeeded")
    assert found[7]["cancelled_by"] == f"event {cancelled}"
    assert found[7]["error"] == f"cancelled by event {cancelled}"
    started = [] if when == "before it started" else ["begun 7"]
    assert [what for what in world.done if what.endswith("7")] == started
    assert "ship 8" in world.done
    assert await connection.fetchval("select count(*) from tidegate.event_waits") == 0
    assert (await explain(connection, cancelled)).summary == f"cancelled run {found[7]['id']}"


async def test_a_type_alone_means_the_runs_own_correlation(connection: Connection, world: World) -> None:
    @world.app.workflow(on="order.created", cancel_on="order.cancelled")
    async def fulfil(ctx: Context, id: int) -> None:
        await ctx.sleep("1h")

    runner = await world.runner()
    publish_in = "select tidegate.publish($1, 'shop', $2, correlation_id => $3)"
    for id in (7, 8):
        await connection.execute(publish_in, "order.created", {"id": id}, f"order {id}")
    await world.turn(runner)
    await connection.execute(publish_in, "order.cancelled", {}, "order 7")
    await world.turn(runner)
    found = await the_runs(connection)
    assert {id: row["status"] for id, row in found.items()} == {7: "cancelled", 8: "pending"}


async def test_both_in_one_batch(connection: Connection, world: World) -> None:
    """The event that launches the run and the one that cancels it are decided together."""

    @world.app.workflow(on="order.created", cancel_on=[MINE, "never"])
    async def fulfil(ctx: Context, id: int) -> None:
        world.done.append("begun")

    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await publish(connection, "order.cancelled", id=7)
    await world.turn(runner)
    assert world.done == []
    assert (await the_runs(connection))[7]["status"] == "cancelled"


async def test_a_run_that_succeeds_leaves_nothing_behind(connection: Connection, world: World) -> None:
    @world.app.workflow(on="order.created", cancel_on=MINE)
    async def fulfil(ctx: Context, id: int) -> str:
        return "done"

    runner = await world.runner()
    await publish(connection, "order.cancelled", id=7)  # of an earlier order
    await publish(connection, "order.created", id=7)
    await world.turn(runner)
    await publish(connection, "order.cancelled", id=7)
    await world.turn(runner)
    assert (await the_runs(connection))[7]["status"] == "succeeded"
    assert await connection.fetchval("select count(*) from tidegate.event_waits") == 0


@pytest.mark.parametrize(
    ("cancel_on", "told"),
    [("order.*", "cancel_on.type"), (On("a", where="run.parameters.id == 1"), "cancel_on.where"), (7, "cancel_on")],
)
def test_a_wrong_declaration_is_refused_when_the_program_starts(cancel_on: Any, told: str) -> None:
    with pytest.raises(AppError, match=told):

        @Tidegate().workflow(on="a", cancel_on=cancel_on)
        async def wrong(ctx: Context) -> None: ...


async def test_a_run_that_an_operator_cancels_meanwhile(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look-back finds the event, and the run is to be cancelled already: it ends, by the operator."""

    @world.app.workflow(on="order.created", cancel_on=MINE)
    async def fulfil(ctx: Context, id: int) -> None:
        world.done.append("begun")

    real = LookBack.ask

    async def ask(self: LookBack, question: WaitQuestion) -> WaitAnswer:
        await control.cancel_run(world.database, question.run.id, "ann", TRIGGER_BREAKER)
        return await real(self, question)

    monkeypatch.setattr(LookBack, "ask", ask)
    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await publish(connection, "order.cancelled", id=7)
    await world.turn(runner)
    run = (await the_runs(connection))[7]
    assert (world.done, run["status"], run["cancelled_by"]) == ([], "cancelled", "ann")


async def test_a_run_that_an_operator_retries_is_not_cancelled_by_the_same_event(
    connection: Connection, world: World
) -> None:
    @world.app.workflow(on="order.created", cancel_on=MINE)
    async def fulfil(ctx: Context, id: int) -> None:
        await ctx.sleep("1h")

    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await world.turn(runner)
    await publish(connection, "order.cancelled", id=7)
    await world.turn(runner)
    run = (await the_runs(connection))[7]
    assert run["status"] == "cancelled"
    await control.retry_run(world.database, run["id"], "ann")
    await world.turn(runner)
    assert (await the_runs(connection))[7]["status"] == "pending"
    await publish(connection, "order.cancelled", id=7)
    await world.turn(runner)
    assert (await the_runs(connection))[7]["status"] == "cancelled"


async def test_a_run_that_waits_for_a_version_is_cancelled_by_any_worker(
    connection: Connection, cluster: Cluster
) -> None:
    """Its function is not called: no code has to fit. A worker that is to end it is named in the answer."""

    def waits_after(name: str) -> Any:
        async def work(ctx: Context) -> None:
            await ctx.step(name, cluster.step, name)
            await ctx.wait_for("order.paid", timeout="1d", where="event.payload.id == 7")

        return work

    cancel_on = On("order.cancelled", where="event.payload.id == 7")

    first = await cluster.worker("1", waits_after("one"), cancel_on=cancel_on)
    await publish(connection, "go")
    await cluster.turn(first)
    await cluster.leave(first, connection)
    second = await cluster.worker("2", waits_after("renamed"), cancel_on=cancel_on)
    await publish(connection, "order.paid", id=7)
    await cluster.turn(second)
    row = await connection.fetchrow("select * from tidegate.workflow_runs")
    assert row is not None and row["version_held_at"] is not None
    cancelled = await publish(connection, "order.cancelled", id=7)
    await cluster.dispatch.run_once()
    found = await explain_any(connection, str(row["id"]))
    assert f"is being cancelled by event {cancelled} since" in found.summary and found.waits_for == "a worker to end it"
    await cluster.turn(second)
    row = await connection.fetchrow("select * from tidegate.workflow_runs")
    assert row is not None and (row["status"], row["error"]) == ("cancelled", f"cancelled by event {cancelled}")
    assert cluster.done == ["one"] and await connection.fetchval("select count(*) from tidegate.event_waits") == 0


async def test_its_own_step_is_not_shown_and_a_near_miss_nearly_cancelled_it(
    connection: Connection, world: World
) -> None:
    @world.app.workflow(on="order.created", cancel_on=MINE)
    async def fulfil(ctx: Context, id: int) -> None:
        await ctx.sleep("1h", name="nap")

    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await world.turn(runner)
    near = await publish(connection, "order.cancelled", id="7")
    await world.turn(runner)
    story = await explain_any(connection, str((await the_runs(connection))[7]["id"]))
    assert [line.reason for line in story.decisions if line.stage == "step"] == ["nap"]
    assert f"(event {near}) nearly cancelled it: " in story.summary
