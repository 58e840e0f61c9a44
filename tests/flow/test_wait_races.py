"""Waits and children at the worst moment: an event, an answer, a child's end or an operator in between."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.step_world import World, the_run, the_steps
from tests.flow.test_children import of, parent, turns
from tests.flow.test_dispatch import publish
from tests.store.builders import new_event
from tidegate import Context, On, Unavailable
from tidegate.clock import uuid7
from tidegate.flow import control
from tidegate.flow.call.waits import WaitAnswer
from tidegate.flow.hold.event_plan import EventPlans, EventReplan
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.run import children as run_children
from tidegate.flow.run.look_back import LookBack
from tidegate.model.child import ChildEnd, ChildOf
from tidegate.model.ids import EventId
from tidegate.model.retry import EVENT_RETRY
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import children as store
from tidegate.store import events
from tidegate.store.db import Connection, TransientConflict
from tidegate.telemetry import metrics

HOUR = 3_600_000


async def publish_later(connection: Connection, clock: Clock, *, days_ago: int) -> EventId:
    """An approval for in an hour, published so many days before the order."""
    own_id = uuid.UUID(int=uuid7().int - (days_ago * 86_400_000 << 80))
    await clock.advance(-days_ago * 86_400_000)
    event = new_event(
        id=own_id, type="order.approved", source="erp", payload='{"id": 7, "by": "ann"}',
        deliver_at=clock.now + timedelta(days=days_ago, hours=1),
    )  # fmt: skip
    await events.insert(connection, [event])
    await clock.advance(days_ago * 86_400_000)
    return EventId(own_id)


@pytest.mark.parametrize("days_ago", [0, 3])
@pytest.mark.parametrize("since", [None, "3h"])
@pytest.mark.parametrize("moment", ["before the wait", "while it waits", "held at its time"])
async def test_a_delayed_event_counts_from_its_time(
    connection: Connection, clock: Clock, world: World, moment: str, since: str | None, days_ago: int
) -> None:
    """It was published before the order, and its time comes after the order: it came after it."""

    @world.app.workflow(on="order.created")
    async def fulfil(ctx: Context, id: int) -> Any:
        if moment == "before the wait":
            await ctx.sleep("2h")
        event = await ctx.wait_for("order.approved", match={"id": id}, timeout="1d", since=since)
        return event.payload["by"] if event else None

    runner = await world.runner()
    retry = EventRetry(world.database, batch_size=100, after_launch=lambda: None)
    replan = EventReplan(world.database, EventPlans(EVENT_RETRY))
    await publish_later(connection, clock, days_ago=days_ago)
    await publish(connection, "order.created", id=7)
    await world.turn(runner)
    if moment == "held at its time":
        await control.pause(world.database, "erp", actor="test", duration_ms=2 * HOUR, reason="busy")
    for _ in range(3):
        await clock.advance(HOUR + 1)
        await replan.run_once()
        await retry.run_once()
        await world.turn(runner)
    assert (await the_run(connection))["output"] == "ann"


async def test_since_finds_what_came_after_a_delayed_event(connection: Connection, clock: Clock, world: World) -> None:
    """The first event in the time looked back to is a delayed one, whose number in the order of arrival is a later
    one."""

    @world.app.workflow(on="order.created")
    async def fulfil(ctx: Context, id: int) -> Any:
        event = await ctx.wait_for("order.paid", match={"id": id}, timeout="1d", since="3h")
        return event.payload["by"] if event else None

    runner = await world.runner()
    retry = EventRetry(world.database, batch_size=100, after_launch=lambda: None)
    await publish_later(connection, clock, days_ago=0)
    await publish(connection, "order.paid", id=7, by="bob")
    await world.turn(runner)
    await clock.advance(HOUR + 1)
    await retry.run_once()
    await publish(connection, "order.created", id=7)
    await world.turn(runner)
    assert (await the_run(connection))["output"] == "bob"


async def test_a_wait_whose_commit_had_no_answer_and_whose_event_came(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is repeated: the step is done meanwhile, and its run goes on at once."""

    @world.app.workflow(on="order.created")
    async def fulfil(ctx: Context, id: int) -> Any:
        event = await ctx.wait_for("order.approved", match={"id": id}, timeout="1d")
        return event.payload["by"] if event else None

    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await world.dispatch.run_once()
    run_really, lost = world.database.run, []

    async def run(work: Callable[..., Any]) -> Any:
        done = await run_really(work)
        if not lost and await connection.fetchval("select count(*) from tidegate.event_waits"):
            lost.append(done)
            await publish(connection, "order.approved", id=7, by="ann")
            await world.dispatch.run_once()
            raise Unavailable("the answer was lost")
        return done

    monkeypatch.setattr(world.database, "run", run)
    monkeypatch.setattr("tidegate.flow.run.outcomes._RETRY_SECONDS", 0)
    await world.turn(runner)
    assert len(lost) == 1
    run_row = await the_run(connection)
    assert (run_row["status"], run_row["output"], run_row["attempts"]) == ("succeeded", "ann", 1)


async def test_an_event_that_cancelled_the_run_before_it_looked_back_does_not_do_so_again(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is lost between the registration of what cancels the run and its look-back."""

    @world.app.workflow(on="order.created", cancel_on=[On("order.cancelled", match={"id": 7})])
    async def fulfil(ctx: Context, id: int) -> None:
        world.done.append("begun")

    async def lost(self: LookBack, question: object) -> Any:
        await publish(connection, "order.cancelled", id=7)
        await world.dispatch.run_once()
        return WaitAnswer(is_kept=False)

    with monkeypatch.context() as patched:
        patched.setattr(LookBack, "ask", lost)
        runner = await world.runner()
        await publish(connection, "order.created", id=7)
        await world.turn(runner)
    assert (await the_run(connection))["status"] == "running"
    await clock.advance(HOUR)
    other = await world.runner()
    await Reconcile(world.database, batch_size=10).run_once()
    await world.turn(other)
    run = await the_run(connection)
    assert run["status"] == "cancelled"
    await control.retry_run(world.database, run["id"], "ann")
    await world.turn(other)
    assert ((await the_run(connection))["status"], world.done) == ("succeeded", ["begun"])


def napping(world: World) -> None:
    @world.app.workflow()
    async def nap(ctx: Context, n: int) -> int:
        world.done.append(f"nap {n}")
        await ctx.sleep("1h")
        return n

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        return await ctx.map(nap, [1, 2], at_once=2)


async def test_the_children_of_a_parent_that_is_retried_meanwhile_are_not_cancelled(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker has read which children are to be cancelled with their parent; an operator retries the parent."""
    napping(world)
    counted = cancelled_naps()
    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 3)
    run = await parent(connection)
    await control.cancel_run(world.database, run["id"], "ops", TRIGGER_BREAKER)
    list_really = store.list_passed_down

    async def list_passed_down(*args: Any) -> Any:
        found = await list_really(*args)
        if (await parent(connection))["status"] == "cancelled":
            await control.retry_run(world.database, run["id"], "ops")
        return found

    monkeypatch.setattr(store, "list_passed_down", list_passed_down)
    for _ in range(2):
        await turns(world, runner, 3)
        await clock.advance(HOUR + 1)
    await turns(world, runner, 3)
    assert (await parent(connection))["output"] == [1, 2]
    assert world.done.count("nap 1") == 2 and len(await of(connection, "nap")) == 2
    assert cancelled_naps() == counted


async def test_children_that_are_cancelled_with_their_parent_are_counted_once(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although another transaction is in the way of the first attempt."""
    napping(world)
    runner = await world.runner()
    counted = cancelled_naps()
    await publish(connection, "go")
    await turns(world, runner, 3)
    await control.cancel_run(world.database, (await parent(connection))["id"], "ops", TRIGGER_BREAKER)
    ask_really, asked = store.is_passed_down, []

    async def is_passed_down(*args: Any) -> bool:
        asked.append(args)
        if len(asked) == 1:
            raise TransientConflict("in the way")
        return await ask_really(*args)

    monkeypatch.setattr(store, "is_passed_down", is_passed_down)
    await turns(world, runner, 3)
    assert [row["status"] for row in await of(connection, "nap")] == ["cancelled", "cancelled"]
    assert len(asked) == 3 and cancelled_naps() == counted + 2


def cancelled_naps() -> float:
    labels = {"workflow": "nap", "status": "cancelled"}
    return metrics.REGISTRY.get_sample_value("tidegate_runs_total", labels) or 0


async def test_a_parent_is_retried_while_its_child_fails(connection: Connection, clock: Clock, world: World) -> None:
    """The child's end is not committed yet: the retry waits for it, and starts that child again."""
    napping(world)
    runner = await world.runner()
    await publish(connection, "go")
    await turns(world, runner, 3)
    run = await parent(connection)
    await control.cancel_run(world.database, run["id"], "ops", TRIGGER_BREAKER)
    first, second = await connection.fetch("select * from tidegate.run_children order by position")

    def failed(row: Any) -> ChildEnd:
        whose = ChildOf(row["run_id"], row["step_id"], row["position"])
        return ChildEnd(whose, row["child_run_id"], "failed", error="it broke")

    async with world.database.transaction() as ending:
        await run_children.lock_parents(ending, [run["id"]], [])
        await run_children.end(ending, [failed(first), failed(second)])
        retrying = asyncio.create_task(control.retry_run(world.database, run["id"], "ops"))
        await eventually(world.database, "select exists (select from pg_locks where not granted)")
    await retrying
    await turns(world, runner, 3)
    assert (await parent(connection))["status"] == "pending", (await the_steps(connection))["map-1"]
    await clock.advance(HOUR + 1)
    await turns(world, runner, 3)
    assert (await parent(connection))["output"] == [1, 2]


async def test_an_event_is_given_once_when_its_trigger_turns_out_to_be_paused(
    connection: Connection, world: World
) -> None:
    """The batch is decided a second time within its transaction, since a trigger has a state: what the first pass gave
    to one wait of a run is not given to another."""

    @world.app.workflow(on="order.created")
    async def fulfil(ctx: Context) -> Any:
        found = await asyncio.gather(*(ctx.wait_for("word", timeout="1d", name=name) for name in ("first", "second")))
        return [one.payload["n"] for one in found if one]

    @world.app.workflow(on="word")
    async def other(ctx: Context) -> None: ...

    runner = await world.runner()
    await publish(connection, "order.created")
    await world.turn(runner)
    trigger_id = await connection.fetchval(
        "select t.id from tidegate.workflow_event_triggers t join tidegate.workflow_definitions w "
        "on w.id = t.workflow_definition_id where w.slug = 'other'"
    )
    await control.pause_trigger(world.database, trigger_id, actor="test", reason="busy")
    await publish(connection, "word", n=1)
    await world.turn(runner)
    steps = await the_steps(connection)
    assert sorted(steps[name]["status"] for name in ("first", "second")) == ["pending", "succeeded"]
    await publish(connection, "word", n=2)
    await world.turn(runner)
    assert sorted((await the_run(connection))["output"]) == [1, 2]


@pytest.mark.parametrize("how", ["run", "map"])
async def test_a_child_that_is_cut_off_stays_cut_off_although_it_has_ended(
    connection: Connection, clock: Clock, world: World, how: str
) -> None:
    """The function has gone on without the child, whose end, in another worker, it did not know: it does so again when
    it is resumed."""
    has_ended = asyncio.Event()

    @world.app.workflow()
    async def ship(ctx: Context, n: int) -> int:
        return n

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context) -> str:
        beside = asyncio.create_task(ctx.step("beside", has_ended.wait))
        call = ctx.run(ship, n=1, name="child") if how == "run" else ctx.map(ship, [1], name="child")
        child = asyncio.ensure_future(call)
        await beside
        if not world.done:
            child.cancel()
        try:
            found = f"got {await child}"
        except (TimeoutError, asyncio.CancelledError):
            found = "went on without it"
        world.done.append(found)
        await ctx.sleep("1h")
        return found

    runner, other = await world.runner(), await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    assert await runner.run_once() == 1
    await eventually(world.database, "select exists (select from tidegate.run_children)")
    await world.dispatch.run_once()
    assert await other.run_once() == 1
    ended = "select exists (select from tidegate.workflow_run_steps where name = 'child' and status = 'succeeded')"
    await eventually(world.database, ended)
    has_ended.set()
    await runner.idle()
    await clock.advance(HOUR + 1)
    await turns(world, runner, 2)
    assert world.done == ["went on without it"] * 2
