"""Events that runs publish: stored with their step, once; and the ends of runs, for triggers that ask for them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World, the_run, the_steps
from tests.flow.test_dispatch import publish
from tidegate import Context, InvalidInput, StepFailed, SyncContext, Unavailable
from tidegate.flow import control
from tidegate.flow.keep.reconcile import KILLS_WORKERS, Reconcile
from tidegate.flow.look.explain import explain
from tidegate.flow.run.runner import Runner
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store.db import Connection

BY_RUN = "select * from tidegate.workflow_events where origin is not null order by ingress_sequence"


async def published(connection: Connection) -> list[Any]:
    return [dict(row) for row in await connection.fetch(BY_RUN)]


async def turns(world: World, runner: Runner, times: int = 4) -> None:
    for _ in range(times):
        await world.turn(runner)


async def test_a_run_publishes_once_with_its_correlation_and_its_cause(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> Any:
        told = await ctx.publish("order.fulfilled", {"n": n}, metadata={"by": "test"})
        await ctx.sleep("1s")
        world.done.append(str(told.id))
        return told.status

    @world.app.workflow(on="order.fulfilled", source="workflow.fulfil")
    async def next_one(ctx: Context, n: int) -> int:
        return n + 1

    runner = await world.runner()
    await publish(connection, "go", n=7)
    await turns(world, runner)
    [event] = await published(connection)
    run = await the_run(connection)
    assert (event["type"], event["source"], event["payload"], event["metadata"], event["external_id"]) == (
        "order.fulfilled", "workflow.fulfil", {"n": 7}, {"by": "test"}, None,
    )  # fmt: skip
    assert event["correlation_id"] == run["correlation_id"]
    assert event["origin"] == {"run_id": str(run["id"]), "event_id": str(run["event_id"])}
    outputs = await connection.fetch("select output from tidegate.workflow_runs where status = 'succeeded'")
    assert [row[0] for row in outputs] == [8]  # of the run that the event launched; the other one sleeps
    told = await explain(connection, str(event["id"]))
    assert (told.caused_by_run_id, told.caused_by_event_id) == (run["id"], run["event_id"])
    story = await explain(connection, str(run["event_id"]))
    lines = [line.reason for line in story.decisions if line.decision == "published"]
    assert lines == [f"order.fulfilled as event {event['id']}"]


async def test_the_published_event_is_returned_when_the_run_resumes(
    connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow(on="go")
    def plain(ctx: SyncContext) -> Any:
        told = ctx.publish("one", id="1")
        ctx.sleep("1m")
        world.done.append(f"{told.id} {told.external_id} {told.status}")
        return [told, ctx.publish("two")]

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(60_000)
    await world.turn(runner)
    first, second = await published(connection)
    assert world.done == [f"{first['id']} 1 accepted"]
    assert (await the_run(connection))["output"][1]["id"] == str(second["id"])
    kinds = {name: row["kind"] for name, row in (await the_steps(connection)).items()}
    assert kinds == {"publish-1": "publish", "sleep-1": "sleep", "publish-2": "publish"}


async def test_an_id_that_the_source_has_used_is_a_duplicate_or_fails_the_step(
    connection: Connection, world: World
) -> None:
    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, body: int) -> Any:
        try:
            return await ctx.publish("done", {"body": body}, source="shop", id="o-7")
        except StepFailed as exc:
            return str(exc)

    runner = await world.runner()
    for body in (1, 1, 2):
        await publish(connection, "go", body=body)
        await turns(world, runner, 1)
    [event] = await published(connection)
    rows = await connection.fetch(
        "select r.output from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id "
        "order by e.ingress_sequence"
    )
    told = {"id": str(event["id"]), "external_id": "o-7"}
    assert [row[0] for row in rows] == [
        told | {"status": "accepted"},
        told | {"status": "duplicate"},
        f"step 'publish-1' failed: id: 'o-7' was published before by shop, with another body, as event {event['id']}",
    ]
    lines = []
    for row in await connection.fetch("select id from tidegate.workflow_events where type = 'go' order by id"):
        story = await explain(connection, str(row["id"]))
        lines += [line.reason for line in story.decisions if line.decision == "published"]
    first = f"done as event {event['id']}"
    assert sorted(lines) == [first, f"{first}, which existed before: its id was used"]


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"type": "tidegate.run.failed"}, "type"),
        ({"type": "a b"}, "type"),
        ({"type": "x", "source": "a b"}, "source"),
        ({"type": "x", "payload": {"a": {1}}}, "payload.a"),
        ({"type": "x", "payload": {"a": "x" * 300_000}}, "payload"),
        ({"type": "x", "ttl_ms": 0}, "ttl_ms"),
    ],
)
async def test_an_invalid_event_is_refused_before_anything_is_written(
    connection: Connection, world: World, given: dict[str, Any], field: str
) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        try:
            await ctx.publish(**given)
        except InvalidInput as exc:
            return [error.field for error in exc.errors]

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert (await the_run(connection))["output"] == [field]
    assert await published(connection) == [] and await the_steps(connection) == {}


async def test_side_by_side_each_needs_a_name(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        try:
            await asyncio.gather(ctx.publish("x"), ctx.publish("y"))
        except Exception as exc:
            world.done.append(str(exc))
        await asyncio.gather(*(ctx.publish("x", {"i": i}, name=f"x-{i}") for i in range(20)))

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert "needs a name" in world.done[0]
    assert sorted(event["payload"]["i"] for event in await published(connection)) == list(range(20))


async def test_a_commit_whose_answer_was_lost_publishes_once(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same write comes again, and finds what it has done before."""

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        first = await ctx.publish("x", id="mine")
        return [first, await ctx.publish("y")]

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    run_really, lost = world.database.run, []

    async def run(work: Any) -> Any:
        done = await run_really(work)
        if not lost and await connection.fetchval("select exists (select from tidegate.workflow_run_steps)"):
            lost.append(done)
            raise Unavailable("the answer was lost")
        return done

    monkeypatch.setattr(world.database, "run", run)
    monkeypatch.setattr("tidegate.flow.run.outcomes._RETRY_SECONDS", 0)
    await world.turn(runner)
    assert len(lost) == 1
    assert [event["type"] for event in await published(connection)] == ["x", "y"]
    assert [one["status"] for one in (await the_run(connection))["output"]] == ["accepted", "accepted"]


async def test_a_worker_that_lost_its_run_publishes_nothing(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        if ctx.attempt == 1:
            async with world.database.connection() as other:
                await other.execute("update tidegate.workflow_runs set claim_generation = claim_generation + 1")
        await ctx.publish("x", {"attempt": ctx.attempt}, id="mine")

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert await published(connection) == []


# The ends of runs ----------------------------------------------------------------------------------------------------


async def test_ends_are_published_for_those_who_ask(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context, how: str) -> Any:
        if how == "fail":
            raise ValueError("no such order")
        if how == "sleep":
            await ctx.sleep("1h")
        return {"how": how}

    @world.app.workflow(on="tidegate.run.*", where="event.payload.workflow == 'work'")
    async def on_end(ctx: Context, status: str, error: str | None, output: Any, cancelled_by: str | None) -> Any:
        return [status, error, output, cancelled_by]

    runner = await world.runner()
    for how in ("fail", "ok", "sleep"):
        await publish(connection, "go", how=how)
        await world.turn(runner)
    run_id = await connection.fetchval("select id from tidegate.workflow_runs where status = 'pending'")
    await control.cancel_run(world.database, run_id, "ops", TRIGGER_BREAKER)
    await turns(world, runner)
    rows = await connection.fetch(
        "select r.output, e.type, e.source, e.origin, e.correlation_id from tidegate.workflow_runs r "
        "join tidegate.workflow_events e on e.id = r.event_id "
        "where e.origin is not null order by e.ingress_sequence"
    )
    assert [row["output"] for row in rows] == [
        ["failed", "ValueError: no such order", None, None],
        ["succeeded", None, {"how": "ok"}, None],
        ["cancelled", "cancelled by ops", None, "ops"],
    ]
    assert [row["type"] for row in rows] == ["tidegate.run.failed", "tidegate.run.succeeded", "tidegate.run.cancelled"]
    assert {row["source"] for row in rows} == {"workflow.work"}
    # The ends of `on_end` itself are not published: it was launched by the end of a run.
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 6


async def test_nobody_asks_and_nothing_is_published(connection: Connection, world: World) -> None:
    @world.app.workflow(on="*")
    async def everything(ctx: Context) -> None:
        return None

    @world.app.workflow(on="tidegate.run.failed")
    async def failures(ctx: Context) -> None:
        return None

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner)
    assert await published(connection) == []
    assert await connection.fetchval("select run_ends from tidegate.registry_version") == ["failed"]
    await connection.execute(
        "update tidegate.workflow_event_triggers set status = 'disabled' where event_type like 't%'"
    )
    assert await connection.fetchval("select run_ends from tidegate.registry_version") == []


async def test_a_trigger_that_appears_meanwhile_gets_the_next_end(connection: Connection, world: World) -> None:
    """The worker has learnt that nobody asks; the statement that ends runs sees the trigger."""

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        return None

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 1)

    @world.app.workflow(on="tidegate.run.succeeded")
    async def on_end(ctx: Context, workflow: str) -> str:
        return workflow

    other = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 1)
    await turns(world, other, 1)
    assert [event["type"] for event in await published(connection)] == ["tidegate.run.succeeded"]
    outputs = await connection.fetch("select output from tidegate.workflow_runs where output is not null")
    assert [row[0] for row in outputs] == ["work"]


async def test_what_comes_of_an_end_is_not_published_again(connection: Connection, world: World) -> None:
    """A handler of failures that publishes an event whose run fails does not start itself for ever."""

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        raise ValueError("broken")

    @world.app.workflow(on="tidegate.run.failed")
    async def on_failure(ctx: Context) -> None:
        world.done.append("handled")
        await ctx.publish("go")

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 8)
    assert world.done == ["handled"]


async def test_a_run_that_kills_its_workers_publishes_its_end(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        return None

    @world.app.workflow(on="tidegate.run.failed")
    async def on_failure(ctx: Context, error: str) -> str:
        return error

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await connection.execute("update tidegate.workflow_runs set crashes = 3, trials = 3")
    await Reconcile(world.database, batch_size=10).run_once()
    await turns(world, runner, 2)
    outputs = await connection.fetch("select output from tidegate.workflow_runs where output is not null")
    assert [row[0] for row in outputs] == [KILLS_WORKERS]


async def test_reserved_types_and_sources_are_refused_in_sql(connection: Connection) -> None:
    with pytest.raises(Exception, match=r"type: types that begin with tidegate\. are reserved"):
        await connection.execute("select tidegate.publish('tidegate.run.failed', 'x')")
    with pytest.raises(Exception, match=r"source: sources that begin with tidegate. are reserved"):
        await connection.execute("select tidegate.publish('x', 'tidegate.schedule')")
