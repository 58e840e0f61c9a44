"""Children of runs: made once, their end is the parent's step, cancel and timeout pass down."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World, the_steps
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker
from tidegate import ChildFailed, Context, NonRetryable, StepFailed, SyncContext, Unavailable
from tidegate.flow import control
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.keep.replay import Replay
from tidegate.flow.look.explain import explain
from tidegate.flow.run.runner import Runner
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import children
from tidegate.store.db import Connection


async def turns(world: World, runner: Runner, times: int = 4) -> None:
    reconcile = Reconcile(world.database, batch_size=100)
    replay = Replay(world.database, batch_size=100)
    for _ in range(times):
        await world.turn(runner)
        await replay.run_once()
        await reconcile.run_once()


async def parent(connection: Connection) -> Any:
    return await connection.fetchrow(
        "select r.* from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id "
        "where e.type <> 'tidegate.start'"
    )


async def of(connection: Connection, workflow: str) -> list[Any]:
    return list(
        await connection.fetch(
            "select r.* from tidegate.workflow_runs r join tidegate.workflow_definitions w "
            "on w.id = r.workflow_definition_id where w.slug = $1 order by r.created_at, r.id",
            workflow,
        )
    )


async def test_a_child_is_started_once_and_its_output_is_the_step(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def ship(ctx: Context, order_id: int) -> Any:
        world.done.append(f"ship {order_id}")
        return {"parcel": order_id}

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, n: int) -> Any:
        world.done.append("begun")
        found = await ctx.run(ship, order_id=n)
        world.done.append("after")
        return found

    runner = await world.runner()
    await publish(connection, "go", n=7)
    await turns(world, runner, 3)
    run, [child] = await parent(connection), await of(connection, "ship")
    assert (run["status"], run["output"]) == ("succeeded", {"parcel": 7})
    assert world.done == ["begun", "ship 7", "begun", "after"]
    assert child["correlation_id"] == run["correlation_id"]
    step = (await the_steps(connection))["run-1"]
    assert (step["kind"], step["status"], step["result"]) == ("child", "succeeded", {"parcel": 7})
    [listed] = await children.list_of_run(connection, run["id"], 10)
    assert (listed.run_id, listed.workflow, listed.status, listed.step) == (child["id"], "ship", "succeeded", "run-1")
    whose = (await children.of_runs(connection, [child["id"]]))[child["id"]]
    assert (whose.run_id, whose.step_id) == (run["id"], step["id"])
    assert (await explain(connection, str(child["event_id"]))).caused_by_run_id == run["id"]


@pytest.mark.parametrize("why_not", [None, "a suspect", "its key is closed", "no code for it here"])
async def test_a_parent_resumes_in_the_commit_that_ends_its_child(
    connection: Connection, world: World, why_not: str | None
) -> None:
    """Without another look at due runs, if this worker may execute it; otherwise it is due."""

    @world.app.workflow()
    async def ship(ctx: Context) -> None:
        world.done.append("ship")

    @world.app.workflow(on="go", max_concurrency=5, concurrency_key="{{ event.payload.n }}")
    async def fulfil(ctx: Context, n: int) -> None:
        await ctx.run(ship)
        world.done.append("after")

    runner = await world.runner()
    await publish(connection, "go", n=7)
    await world.turn(runner)
    await world.dispatch.run_once()
    run = await parent(connection)
    if why_not == "a suspect":
        await connection.execute("update tidegate.workflow_runs set crashes = $2 where id = $1", run["id"], 9)
    elif why_not == "its key is closed":
        await connection.execute(
            "insert into tidegate.trigger_key_holds (trigger_id, concurrency_key, until, reason) "
            "values ($1, '7', tidegate.now() + interval '1 hour', 'busy')", run["trigger_id"],
        )  # fmt: skip
    elif why_not == "no code for it here":
        runner.serve([(await of(connection, "ship"))[0]["workflow_definition_id"]])
    assert await runner.run_once() == 1
    await asyncio.wait_for(runner.idle(), 30)
    run = await parent(connection)
    if why_not is None:
        assert (run["status"], run["attempts"], world.done) == ("succeeded", 2, ["ship", "after"])
        return
    assert (run["status"], run["attempts"], run["claimed_by"], world.done) == ("pending", 1, None, ["ship"])
    is_due = await connection.fetchval("select $1 <= tidegate.now()", run["next_attempt_at"])
    assert is_due is (why_not != "its key is closed")


async def test_a_synchronous_parent_and_a_child_by_slug(connection: Connection, world: World) -> None:
    @world.app.workflow()
    def double(ctx: SyncContext, n: int) -> int:
        return 2 * n

    @world.app.workflow(on="go")
    def work(ctx: SyncContext) -> Any:
        handle = ctx.start("double", {"n": 1})
        mapped = ctx.map(double, [5, {"n": 6}], at_once=1)
        return [ctx.run(double, n=2), handle.result(), mapped]

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 8)
    assert (await parent(connection))["output"] == [4, 2, [10, 12]]


async def test_a_failed_child_raises_in_the_parent(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def ship(ctx: Context) -> None:
        raise ValueError("no truck\nand more")

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, catches: bool) -> Any:
        try:
            return await ctx.run(ship)
        except ChildFailed as exc:
            assert isinstance(exc, StepFailed)
            if not catches:
                raise
            return exc.error

    runner = await world.runner()
    for catches in (True, False):
        await publish(connection, "go", catches=catches)
        await turns(world, runner)
    good, bad = await of(connection, "fulfil")
    first, second = await of(connection, "ship")
    assert good["output"] == f"run {first['id']} of ship failed: ValueError: no truck"
    assert bad["error"].startswith(f"step 'run-1' failed: run {second['id']} of ship failed: ValueError: no truck")


async def test_wrong_children(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def ship(ctx: Context, a: int) -> None:
        return None

    def other() -> None: ...

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        told = []
        for call in (
            lambda: ctx.run(ship), lambda: ctx.run(ship, a=1, b=2), lambda: ctx.run(other),
            lambda: ctx.map(ship, [1], at_once=0), lambda: ctx.map("unknown", [1]), lambda: ctx.run("unknown", x=1),
        ):  # fmt: skip
            try:
                await call()
            except Exception as exc:
                told.append(str(exc))
        return told

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner)
    output = (await parent(connection))["output"]
    for text, wanted in zip(
        output,
        ("parameters.a: is required", "parameters.b: unknown", "other is not a workflow", "at_once: must be",
         "items[0]: unknown takes any parameters; an item must be an object",
         "a run of unknown failed: workflow unknown does not exist"),
        strict=True,
    ):  # fmt: skip
        assert wanted in text
    assert len(await of(connection, "ship")) == 0


async def test_children_side_by_side(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow()
    async def nap(ctx: Context, seconds: int) -> int:
        await ctx.sleep(seconds)
        return seconds

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        return await asyncio.gather(*(ctx.run(nap, seconds=n, name=f"nap {n}") for n in (2, 1, 3)))

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 3)
    for _ in range(3):
        await clock.advance(1000)
        await turns(world, runner, 2)
    assert (await parent(connection))["output"] == [2, 1, 3]
    assert len(await of(connection, "nap")) == 3


async def test_a_map_keeps_the_order_and_its_width(connection: Connection, world: World) -> None:
    running: list[int] = []

    @world.app.workflow()
    async def square(ctx: Context, n: int) -> int:
        count = "select count(*) from tidegate.run_children where status = 'started'"
        async with world.database.connection() as other:
            running.append(await other.fetchval(count))
        return n * n

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        world.done.append("called")
        return await ctx.map(square, list(range(50)), at_once=7)

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 25)
    assert (await parent(connection))["output"] == [n * n for n in range(50)]
    assert max(running) == 7 and len(running) == 50
    assert world.done == ["called", "called"]  # resumed once, however many children


async def test_a_map_stops_at_a_failure_or_goes_on(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def pick(ctx: Context, n: int) -> int:
        if n == 2:
            raise ValueError("no two")
        return n

    @world.app.workflow(on="go")
    async def work(ctx: Context, all: bool) -> Any:
        try:
            found = await ctx.map(pick, range(6), at_once=1, return_exceptions=all)
            return [one if isinstance(one, int) else f"{type(one).__name__}: {one.error}" for one in found]
        except ChildFailed as exc:
            return exc.error

    runner = await world.runner()
    for all in (False, True):
        await publish(connection, "go", all=all)
        await turns(world, runner, 10)
    stopped, whole = await of(connection, "work")
    assert stopped["output"].startswith("item 2, run ") and stopped["output"].endswith("failed: ValueError: no two")
    shown = whole["output"]
    assert [*shown[:2], *shown[3:]] == [0, 1, 3, 4, 5] and shown[2].endswith(": ValueError: no two")
    assert len(await of(connection, "pick")) == 3 + 6


@pytest.mark.parametrize("all", [False, True])
async def test_a_map_over_a_workflow_that_does_not_exist_ends(connection: Connection, world: World, all: bool) -> None:
    """However few run at once: none that waits to be started is forgotten."""

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        try:
            return [one.error for one in await ctx.map("nobody", [{}] * 5, at_once=2, return_exceptions=all)]
        except ChildFailed as exc:
            return exc.error

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 3)
    found = (await parent(connection))["output"]
    assert (len(found) == 5 and all) or (isinstance(found, str) and not all)
    assert "workflow nobody does not exist" in str(found)


async def test_a_thousand_children(connection: Connection, world: World) -> None:
    """In batches of 500 and with few resumptions; 10,000 take ten times as long, not a hundred times."""

    @world.app.workflow()
    async def one(ctx: Context, n: int) -> int:
        return n

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> int:
        world.done.append("called")
        return sum(await ctx.map(one, range(1000), at_once=100))

    runner = await world.runner(concurrency=100)
    await publish(connection, "go")
    for _ in range(60):
        await world.turn(runner)
        if (await parent(connection))["status"] == "succeeded":
            break
    assert (await parent(connection))["output"] == sum(range(1000))
    counts = await connection.fetchrow(
        "select count(*), count(distinct child_run_id) from tidegate.run_children where status = 'succeeded'"
    )
    assert counts is not None and tuple(counts) == (1000, 1000)
    assert len(world.done) <= 3


async def test_cancel_passes_down(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow()
    async def leaf(ctx: Context) -> None:
        await ctx.sleep("1h")

    @world.app.workflow(max_concurrency=2)
    async def branch(ctx: Context, n: int) -> None:
        await ctx.run(leaf)

    @world.app.workflow(on="go")
    async def root(ctx: Context) -> None:
        await ctx.map(branch, [1, 2, 3, 4], at_once=3)

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 3)
    run = await parent(connection)
    assert len(await of(connection, "branch")) == 2  # the third waits for a slot, the fourth is not started
    await control.cancel_run(world.database, run["id"], "ops", TRIGGER_BREAKER)
    await turns(world, runner, 6)
    rows = [row for name in ("root", "branch", "leaf") for row in await of(connection, name)]
    assert [row["status"] for row in rows] == ["cancelled"] * 5
    assert {row["cancelled_by"] for row in await of(connection, "branch")} == {f"run {run['id']}"}
    left = await connection.fetch("select status, count(*) from tidegate.run_children group by 1 order by 1")
    assert [tuple(row) for row in left] == [("cancelled", 4), ("failed", 1), ("waiting", 1)]
    assert (await children.list_of_run(connection, run["id"], 10))[3].status == "not_started"
    assert await connection.fetchval("select count(*) from tidegate.run_cancellations") == 0
    deliveries = "select status from tidegate.workflow_trigger_deliveries where status not in ('launched')"
    assert [row[0] for row in await connection.fetch(deliveries)] == ["cancelled"]


async def test_a_timeout_passes_down(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow()
    async def nap(ctx: Context) -> None:
        await ctx.sleep("1d")

    @world.app.workflow(on="go", timeout="1h")
    async def work(ctx: Context) -> None:
        await ctx.run(nap)

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 3)
    await clock.advance(3_600_001)
    await turns(world, runner, 3)
    [child] = await of(connection, "nap")
    assert ((await parent(connection))["status"], child["status"]) == ("failed", "cancelled")


async def test_a_child_that_is_never_launched_fails_its_step(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def ship(ctx: Context) -> None:
        return None

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context) -> Any:
        try:
            await ctx.run(ship)
        except ChildFailed as exc:
            return exc.error

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await connection.execute("update tidegate.workflow_event_triggers set status = 'disabled' where name = 'start'")
    await turns(world, runner, 4)
    output = (await parent(connection))["output"]
    assert output.endswith("was not launched: the trigger of the workflow was disabled or deleted")


async def test_a_parent_says_which_child_it_waits_for_and_why_that_waits(connection: Connection, world: World) -> None:
    @world.app.workflow(max_concurrency=1)
    async def deliver(ctx: Context, n: int) -> int:
        if n:
            await ctx.sleep("1h")
        return n

    @world.app.workflow()
    async def batch(ctx: Context) -> Any:
        return await ctx.map(deliver, [0, 2])

    @world.app.workflow(on="go")
    async def bake(ctx: Context) -> Any:
        return await ctx.run(batch)

    @world.app.workflow(on="block")
    async def block(ctx: Context) -> Any:
        return await ctx.run(deliver, n=1)

    runner = await world.runner()
    worker = TriggerWorker(world.database)
    event = await publish(connection, "go")
    await turns(world, runner, 3)
    for _ in range(3):
        await worker.turn()
        await turns(world, runner, 2)
    other = await publish(connection, "block")
    await turns(world, runner, 3)
    rows = await connection.fetch("select workflow, position, child_run_id, status from tidegate.run_children")
    ids = {(row["workflow"], row["position"]): row["child_run_id"] for row in rows if row["status"] == "started"}
    story = await explain(connection, event)
    first, rest = story.summary.split(", which ", 1)
    assert first == f"bake waits for its child batch {ids['batch', 0]} (step 'run-1')"
    assert rest.startswith(
        "waits for its 2 children (step 'map-1'): 1 of 2 have ended; the first that has not is item 1, "
        f"deliver {ids['deliver', 1]}, which sleeps until "
    )
    assert (story.waits_for, story.until) == (first.removeprefix("bake waits for "), None)
    held = (await explain(connection, other)).summary
    assert held.startswith(f"block waits for its child deliver {ids['deliver', 0]} (step 'run-1'), which waits for a ")
    assert "free slot: 1 of 1 slots are in use" in held
    [own] = await connection.fetch("select source from tidegate.workflow_events where id = $1", other)
    hidden = await explain(connection, other, lambda source: source == own["source"])
    assert hidden.summary == "block waits for its child of step 'run-1'"


async def test_a_child_is_held_by_its_limits_and_explained(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(throttle="1/min")
    async def ship(ctx: Context, n: int) -> int:
        return n

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context) -> Any:
        return await ctx.map(ship, [1, 2])

    runner = await world.runner()
    worker = TriggerWorker(world.database)
    await publish(connection, "go")
    await turns(world, runner, 3)
    held = await connection.fetchval(
        "select event_id from tidegate.workflow_trigger_deliveries where status = 'throttled'"
    )
    assert "throttle of 1/min" in (await explain(connection, str(held))).summary
    await clock.advance(61_000)
    await worker.turn()
    await turns(world, runner, 3)
    assert (await parent(connection))["output"] == [1, 2]


async def test_a_replayed_parent_starts_only_what_failed(connection: Connection, world: World) -> None:
    broken = [True]

    @world.app.workflow()
    async def pick(ctx: Context, n: int) -> int:
        world.done.append(f"pick {n}")
        if n == 2 and broken:
            raise ValueError("no two")
        return n

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        first = await ctx.run(pick, n=0)
        return [first, *await ctx.map(pick, [1, 2, 3], at_once=1)]

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 8)
    run = await parent(connection)
    assert run["status"] == "failed"
    broken.clear()
    letter = await connection.fetchval("select id from tidegate.dead_letters where event_id = $1", run["event_id"])
    await control.replay_letter(world.database, letter, "ops")
    await turns(world, runner, 8)
    assert (await parent(connection))["output"] == [0, 1, 2, 3]
    assert Counter(world.done) == {"pick 0": 1, "pick 1": 1, "pick 2": 2, "pick 3": 1}


async def test_a_parent_resumes_although_the_answer_of_the_commit_was_lost(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is claimed by this worker, which does not know it: it would wait for the end of its lease."""

    @world.app.workflow()
    async def ship(ctx: Context) -> None:
        world.done.append("ship")

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context) -> None:
        await ctx.run(ship)
        world.done.append("after")

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await world.dispatch.run_once()
    run_really, lost = world.database.run, []

    async def run(work: Callable[..., Any]) -> Any:
        done = await run_really(work)
        if not lost and "ship" in world.done:
            lost.append((await parent(connection))["status"])
            raise Unavailable("the answer was lost")
        return done

    monkeypatch.setattr(world.database, "run", run)
    monkeypatch.setattr("tidegate.flow.run.outcomes._RETRY_SECONDS", 0)
    assert await runner.run_once() == 1
    await asyncio.wait_for(runner.idle(), 30)
    assert lost == ["running"]
    assert ((await parent(connection))["status"], world.done) == ("succeeded", ["ship", "after"])


async def test_a_lost_answer_makes_no_second_child(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    @world.app.workflow()
    async def ship(ctx: Context) -> str:
        world.done.append("ship")
        return "parcel"

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context) -> Any:
        return await ctx.run(ship)

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    run_really, lost = world.database.run, []

    async def run(work: Callable[..., Any]) -> Any:
        done = await run_really(work)
        written = await connection.fetchval("select count(*) from tidegate.run_children")
        if len(lost) < 3 and written:
            lost.append(done)
            raise Unavailable("the answer was lost")
        return done

    monkeypatch.setattr(world.database, "run", run)
    monkeypatch.setattr("tidegate.flow.run.outcomes._RETRY_SECONDS", 0)
    monkeypatch.setattr("tidegate.flow.decide.dispatch.Dispatch.run_once", _patient(world))
    await turns(world, runner, 6)
    assert len(lost) == 3
    assert (await parent(connection))["output"] == "parcel"
    assert world.done == ["ship"] and len(await of(connection, "ship")) == 1


def _patient(world: World) -> Callable[..., Any]:
    really = type(world.dispatch).run_once

    async def run_once(self: Any) -> Any:
        while True:
            try:
                return await really(self)
            except Unavailable:
                continue

    return run_once


async def test_whoever_does_not_wait_ends_before_its_child(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def later(ctx: Context) -> str:
        return "done"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        await ctx.start(later)
        return "started"

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 3)
    assert (await parent(connection))["output"] == "started"
    [child] = await of(connection, "later")
    assert child["status"] == "succeeded"
    assert (await the_steps(connection))["run-1"]["result"] == "done"


async def test_a_child_beside_a_step_needs_a_name(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        try:
            await asyncio.gather(ctx.run("x"), ctx.sleep("1s"))
        except NonRetryable as exc:
            return str(exc)

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 1)
    assert "beside other steps needs a name" in (await parent(connection))["output"]


async def test_a_cancelled_parent_that_is_retried_resumes_its_children(
    connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow()
    async def nap(ctx: Context, n: int) -> int:
        world.done.append(f"nap {n}")
        await ctx.sleep("1h")
        return n

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        return await ctx.map(nap, [1, 2, 3], at_once=2)

    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 3)
    run = await parent(connection)
    await control.cancel_run(world.database, run["id"], "ops", TRIGGER_BREAKER)
    await turns(world, runner, 3)
    await control.retry_run(world.database, run["id"], "ops")
    for _ in range(3):
        await turns(world, runner, 4)
        await clock.advance(3_600_001)
    assert (await parent(connection))["output"] == [1, 2, 3]
    assert len(await of(connection, "nap")) == 3  # the two that were cancelled have resumed
