"""Waiting for events: an event that comes before, while or after a run begins to wait wakes it exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.step_world import World, the_run, the_steps
from tests.flow.test_dispatch import publish
from tidegate import Context, NonRetryable, On, SyncContext
from tidegate.flow import control
from tidegate.flow.call.waits import WaitAnswer, WaitQuestion
from tidegate.flow.decide import gate
from tidegate.flow.decide.batch import Batch
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.flow.look.explain import explain
from tidegate.flow.run.look_back import LookBack
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import waits as waits_store
from tidegate.store.db import Connection

DAY = 86_400_000


async def waits(connection: Connection) -> int:
    found: int = await connection.fetchval("select count(*) from tidegate.event_waits")
    return found


async def test_an_event_wakes_the_run_that_waits_for_it(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(on="order.created")
    async def fulfil(ctx: Context, id: int) -> Any:
        approved = await ctx.wait_for("order.approved", match={"id": id}, timeout="3d")
        world.done.append("approved" if approved else "nobody")
        return approved.payload if approved else None

    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await world.turn(runner)
    run, step = await the_run(connection), (await the_steps(connection))["wait order.approved"]
    assert (run["status"], step["status"], step["kind"]) == ("pending", "pending", "wait")
    assert run["next_attempt_at"] == step["next_attempt_at"] == clock.now + timedelta(days=3)
    assert "waits for event order.approved with id = 7 until" in run["warning"]
    await publish(connection, "order.approved", id=8)
    await world.turn(runner)
    assert world.done == []
    await clock.advance(3_600_000)
    await publish(connection, "order.approved", id=7, by="ann")
    await publish(connection, "order.approved", id=7, by="bob")
    await world.dispatch.run_once()
    woken = await the_run(connection)
    assert (woken["status"], woken["warning"]) == ("pending", None), "it does not wait any more"
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["output"], world.done) == ("succeeded", {"id": 7, "by": "ann"}, ["approved"])
    assert await waits(connection) == 0


Moment = Callable[[], Awaitable[None]]


def at_look_back(monkeypatch: pytest.MonkeyPatch, before: Moment | None = None, after: Moment | None = None) -> None:
    """Have something happen between the commit of a wait and its look-back, or between that and the suspension."""
    real = LookBack.ask

    async def ask(self: LookBack, question: WaitQuestion) -> WaitAnswer:
        if before is not None and not question.is_over:
            await before()
        answer = await real(self, question)
        if after is not None and not question.is_over:
            await after()
        return answer

    monkeypatch.setattr(LookBack, "ask", ask)


def waiting_workflow(world: World, kind: str, timeout: str = "1h") -> None:
    """Waits for the approval of its order, and says so at a sink outside the database."""

    async def told(what: str) -> None:
        world.done.append(what)

    if kind == "async":

        @world.app.workflow(on="order.created", name="fulfil")
        async def fulfil(ctx: Context, id: int) -> Any:
            event = await ctx.wait_for("order.approved", match={"id": id}, timeout=timeout)
            await ctx.step("tell", told, f"{id} {event.payload['by'] if event else 'nobody'}")
            return event.payload["by"] if event else None

    else:

        @world.app.workflow(on="order.created", name="fulfil")
        def fulfil_in_a_thread(ctx: SyncContext, id: int) -> Any:
            event = ctx.wait_for("order.approved", match={"id": id}, timeout=timeout)
            ctx.step("tell", world.done.append, f"{id} {event.payload['by'] if event else 'nobody'}")
            return event.payload["by"] if event else None


KINDS = pytest.mark.parametrize("kind", ["async", "sync"])


@KINDS
@pytest.mark.parametrize(
    "moment", ["undecided before", "before", "registered", "looked back", "suspended", "held", "never"]
)
async def test_an_event_wakes_the_run_exactly_once_whenever_it_comes(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch, kind: str, moment: str
) -> None:
    waiting_workflow(world, kind)
    retry = EventRetry(world.database, batch_size=100, after_launch=lambda: None)

    async def approve() -> None:
        await publish(connection, "order.approved", source="erp", id=7, by="ann")
        await publish(connection, "order.approved", source="erp", id=8, by="other")
        if moment != "undecided before":
            await world.dispatch.run_once()

    if moment in ("registered", "looked back", "held"):
        at_look_back(monkeypatch, **{"after" if moment == "looked back" else "before": approve})
    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    if moment in ("before", "undecided before"):
        await world.dispatch.run_once()
        await approve()
    if moment == "held":
        await control.pause(world.database, "erp", actor="test", duration_ms=60_000, reason="busy")
    if moment == "undecided before":
        while await runner.run_once():
            await runner.idle()
    await world.turn(runner)
    if moment in ("suspended", "held", "never"):
        assert (await the_run(connection))["status"] == "pending"
        assert world.done == []
    if moment == "suspended":
        await approve()
    if moment == "held":
        await clock.advance(60_000)
        await retry.run_once()
    await world.turn(runner)
    expected = "nobody" if moment == "never" else "ann"
    if moment == "never":
        await clock.advance(3_600_000)
        await world.turn(runner)
    run, steps = await the_run(connection), await the_steps(connection)
    assert world.done == [f"7 {expected}"]
    assert (run["status"], run["output"]) == ("succeeded", None if moment == "never" else "ann")
    step = steps["wait order.approved"]
    assert (step["status"], step["retry_state"], step["next_attempt_at"]) == ("succeeded", "completed", None)
    assert await waits(connection) == 0
    await publish(connection, "order.approved", source="erp", id=7, by="late")
    await clock.advance(3_600_000)
    await world.turn(runner)
    await retry.run_once()
    assert world.done == [f"7 {expected}"]
    assert (await the_run(connection))["wakes"] <= 1


@KINDS
async def test_a_decision_in_progress_that_did_not_see_the_wait_is_waited_for(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The event is being decided, by what was there before the wait, while the run begins to wait."""
    waiting_workflow(world, kind)
    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await world.dispatch.run_once()
    await publish(connection, "order.approved", id=7, by="ann")
    decided, go_on = asyncio.Event(), asyncio.Event()
    real = Batch.launch

    async def slow(self: Batch, *args: Any) -> Any:
        launched = await real(self, *args)
        decided.set()
        await go_on.wait()
        return launched

    monkeypatch.setattr(Batch, "launch", slow)
    deciding = asyncio.create_task(world.dispatch.run_once())
    await decided.wait()
    assert await runner.run_once() == 1
    await eventually(world.database, "select exists (select from tidegate.event_waits)")
    for _ in range(20):  # the look-back polls meanwhile
        await asyncio.sleep(0.01)
    assert world.done == []
    assert (await the_run(connection))["status"] == "running"
    go_on.set()
    await deciding
    await runner.idle()
    await world.turn(runner)
    assert world.done == ["7 ann"]
    assert await waits(connection) == 0


async def test_a_decision_that_sees_the_wait_and_its_look_back_give_the_event_once(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decision and the look-back find the same event at once: the run's lock decides who gives it."""
    waiting_workflow(world, "async")
    tasks = []

    async def publish_and_decide() -> None:
        await publish(connection, "order.approved", id=7, by="ann")
        tasks.append(asyncio.create_task(world.dispatch.run_once()))

    at_look_back(monkeypatch, before=publish_and_decide)
    runner = await world.runner()
    for _ in range(10):
        await publish(connection, "order.created", id=7)
        await world.turn(runner)
        await asyncio.gather(*tasks)
        await world.turn(runner)
    assert world.done == ["7 ann"] * 10
    assert await waits(connection) == 0


async def test_events_at_once_are_given_one_each_and_in_order(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def collect(ctx: Context) -> list[int]:
        found = []
        for n in range(4):
            event = await ctx.wait_for("line.added", timeout="1h", name=f"line-{n}")
            assert event is not None
            found.append(event.payload["n"])
        return found

    runner = await world.runner()
    await publish(connection, "go")
    await publish(connection, "line.added", n=0)
    await world.dispatch.run_once()
    await publish(connection, "line.added", n=1)
    await world.turn(runner)
    for n in (2, 3, 4):
        await publish(connection, "line.added", n=n)
    await world.turn(runner)
    assert (await the_run(connection))["output"] == [0, 1, 2, 3]
    assert await waits(connection) == 0


async def test_two_waits_of_one_run_for_the_same_events_are_given_one_each(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    @world.app.workflow(on="go")
    async def collect(ctx: Context) -> list[Any]:
        found = await asyncio.gather(*(ctx.wait_for("tick", timeout="1h", name=f"t{n}") for n in range(3)))
        return sorted(event.payload["n"] for event in found if event)

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    for n in range(2):
        await publish(connection, "tick", n=n)
    await world.turn(runner)
    assert await waits(connection) == 1
    await publish(connection, "tick", n=2)
    await publish(connection, "tick", n=3)
    await world.turn(runner)
    assert (await the_run(connection))["output"] == [0, 1, 2]


@pytest.mark.parametrize("first", ["event", "timeout"])
async def test_an_event_and_the_timeout_at_once_give_one_answer(
    connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """The event is decided a moment before the end of the wait; its transaction and the one that ends the wait meet."""
    waiting_workflow(world, "async")
    found, go_on = asyncio.Event(), asyncio.Event()
    real_lock, real_time_out = waits_store.list_path_sets, LookBack._time_out_all

    async def meet(*args: Any) -> Any:
        sets = await real_lock(*args)
        if first == "timeout":
            found.set()
            await go_on.wait()  # it has seen the wait, and has not locked the run
        return sets

    async def over(self: LookBack, questions: Any) -> Any:
        answers = await real_time_out(self, questions)
        go_on.set()
        return answers

    monkeypatch.setattr(LookBack, "_time_out_all", over)
    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await world.turn(runner)
    await clock.advance(3_599_000)
    await publish(connection, "order.approved", id=7, by="ann")
    monkeypatch.setattr(waits_store, "list_path_sets", meet)
    deciding = asyncio.create_task(world.dispatch.run_once())
    if first == "timeout":
        await found.wait()
    else:
        await deciding
    await clock.advance(1_000)
    await runner.run_once()
    await runner.idle()
    await deciding
    await world.turn(runner)
    assert world.done == ["7 ann" if first == "event" else "7 nobody"]
    assert await waits(connection) == 0


async def test_an_event_after_the_timeout_does_not_wake_a_run_that_is_late(
    connection: Connection, clock: Clock, world: World
) -> None:
    waiting_workflow(world, "async")
    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await world.turn(runner)
    await clock.advance(3_600_000)
    await publish(connection, "order.approved", id=7, by="ann")
    await world.dispatch.run_once()  # before a worker has resumed the run
    await world.turn(runner)
    assert world.done == ["7 nobody"]


async def test_the_first_of_several_patterns_and_all_of_several(
    connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow(on="go")
    async def several(ctx: Context, id: int) -> Any:
        paid = On("paid", match={"id": id})
        first = await ctx.wait_any(paid, On("refused", where="event.payload.id == run.parameters.id"), timeout="1h")
        both = await ctx.wait_all(paid, "shipped", timeout="1h")
        never = await ctx.wait_all("paid", "never", timeout="1h")
        return [
            first and [first.which, first.event.type],
            both and [event.payload.get("n") for event in both],
            never,
        ]

    runner = await world.runner()
    await publish(connection, "go", id=7)
    await world.turn(runner)
    assert await waits(connection) == 2
    await publish(connection, "refused", id=8)
    await publish(connection, "refused", id=7)
    await world.turn(runner)
    await publish(connection, "shipped", n=1)
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "pending"
    await publish(connection, "paid", id=7, n=2)
    await publish(connection, "paid", id=7, n=3)
    await world.turn(runner)
    await clock.advance(3_600_000)
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", [[1, "refused"], [2, 1], None])
    assert await waits(connection) == 0


@pytest.mark.parametrize("is_before", [True, False])
async def test_of_all_a_wide_pattern_does_not_take_what_a_narrow_one_needs(
    connection: Connection, clock: Clock, world: World, is_before: bool
) -> None:
    """An event for each is there: the assignment is found, whichever comes first, and also when the run looks back."""

    @world.app.workflow(on="go")
    async def all_of(ctx: Context, id: int) -> Any:
        if is_before:
            await ctx.sleep("1s")
        found = await ctx.wait_all("paid", On("paid", match={"id": id}), timeout="1h")
        return found and [event.payload["id"] for event in found]

    runner = await world.runner()
    await publish(connection, "go", id=7)
    await world.turn(runner)
    for id in (7, 8):
        await publish(connection, "paid", id=id)
        await world.turn(runner)
    if is_before:
        await clock.advance(1000)
        await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", [8, 7])


async def test_of_all_patterns_that_overlap_are_given_events_as_written(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def both(ctx: Context) -> Any:
        rome, hotel = On("booked", match={"city": "Rome"}), On("booked", match={"kind": "hotel"})
        found = await ctx.wait_all(rome, hotel, timeout="1h")
        return found and [event.payload["n"] for event in found]

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    for n, payload in enumerate(({"city": "Rome", "kind": "hotel"}, {"city": "Rome"}, {"kind": "hotel"})):
        assert (await the_run(connection))["status"] == "pending"
        await publish(connection, "booked", n=n, **payload)
        await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", [0, 2])


@pytest.mark.parametrize(
    ("since", "expected"), [(None, "after"), ("30m", "half an hour ago"), ("2h", "an hour ago"), (timedelta(0), None)]
)
async def test_which_events_count(
    connection: Connection, clock: Clock, world: World, since: Any, expected: str | None
) -> None:
    start = clock.now

    @world.app.workflow(on="go")
    async def late(ctx: Context) -> Any:
        from_time = start + timedelta(days=1) if isinstance(since, timedelta) else since
        event = await ctx.wait_for("word", timeout="1h", since=from_time)
        return event and event.payload["n"]

    runner = await world.runner()
    await clock.advance(-3_600_000)
    await publish(connection, "word", n="an hour ago")
    await clock.advance(1_800_000)
    await publish(connection, "word", n="half an hour ago")
    await clock.advance(1_800_000)
    await publish(connection, "go")
    await publish(connection, "word", n="after")
    await world.turn(runner)
    if expected is None:
        await clock.advance(3_600_000)
        await world.turn(runner)
    assert (await the_run(connection))["output"] == expected


async def test_where_is_read_with_the_run_and_the_source_with_its_pattern(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def picky(ctx: Context, limit: int) -> Any:
        event = await ctx.wait_for(
            "offer", where="event.payload.price < run.parameters.limit", source="shop.*", timeout="1h"
        )
        return event and event.payload["price"]

    runner = await world.runner()
    await publish(connection, "go", limit=10)
    await publish(connection, "offer", source="shop.api", price=11)
    await world.turn(runner)
    await publish(connection, "offer", source="market", price=1)
    await publish(connection, "offer", source="shop.api", price="cheap")
    await publish(connection, "offer", source="shop.api", price=9)
    await world.turn(runner)
    assert (await the_run(connection))["output"] == 9


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"where": "event.payload.id = 7"}, "ctx.wait_for: where is not a CEL expression"),
        ({"where": "event.payload.id == run.name"}, "where uses `run.name`; a run has run.id, run.parameters"),
        ({"match": {"id": [1]}}, "ctx.wait_for: match.id must be text, a number, true, false or None, not [1]"),
        ({"match": {}}, "ctx.wait_for: match must be 1 to 10 fields"),
        ({"timeout": "soon"}, "ctx.wait_for: timeout: a duration is written like"),
        ({"since": "yesterday"}, "ctx.wait_for: since: a duration is written like"),
        ({"type": "order.*"}, "ctx.wait_for: type must be the exact type of an event, without *"),
        ({"source": ""}, "ctx.wait_for: source must be 1 to 200 characters"),
    ],
)
async def test_a_wrong_wait_fails_the_run_and_names_what_is_wrong(
    connection: Connection, world: World, call: dict[str, Any], told: str
) -> None:
    @world.app.workflow(on="go")
    async def wrong(ctx: Context) -> None:
        await ctx.wait_for(**{"type": "a", "timeout": "1h"} | call)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed" and told in run["error"]
    assert await waits(connection) == 0


async def test_one_event_wakes_many_runs_and_explain_names_them(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def wait(ctx: Context) -> Any:
        event = await ctx.wait_for("open", timeout="1h")
        world.done.append("went")
        return event and str(event.id)

    runner = await world.runner()
    for _ in range(3):
        await publish(connection, "go")
    await world.turn(runner)
    opened = await publish(connection, "open")
    await world.turn(runner)
    assert world.done == ["went"] * 3
    told = await explain(connection, opened)
    assert told.summary == "woke 3 runs"
    assert [(line.stage, line.decision) for line in told.decisions][-1] == ("wait", "woke")
    listed = await connection.fetchval("select detail from tidegate.event_decisions where stage = 'wait'")
    assert {one["step"] for one in listed} == {"wait open"} and len(listed) == 3


async def test_a_wait_that_is_cut_off_stays_cut_off_even_if_its_event_came(
    connection: Connection, world: World
) -> None:
    """The function gave up waiting; the event that came meanwhile must not change its past."""

    @world.app.workflow(on="go")
    async def impatient(ctx: Context) -> Any:
        async def busy() -> None:
            is_done = "retry_metadata ->> 'looked_back' = 'true'"
            looked = f"select exists (select from tidegate.workflow_run_steps where {is_done})"
            await eventually(world.database, looked)
            await publish(connection, "word")
            await world.dispatch.run_once()

        waiting = asyncio.create_task(ctx.wait_for("word", timeout="1h", name="word"))
        await ctx.step("busy", busy)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await ctx.sleep("0s")
        world.done.append("went on")
        try:
            await waiting
        except (asyncio.CancelledError, TimeoutError):
            return "cut off"
        return "woken"

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    step = (await the_steps(connection))["word"]
    assert (step["status"], (await the_run(connection))["output"]) == ("cancelled", "cut off")
    assert await waits(connection) == 0


@pytest.mark.parametrize("how", ["cancelled", "failed", "timed out"])
async def test_a_run_that_ended_has_no_waits_left(connection: Connection, clock: Clock, world: World, how: str) -> None:
    @world.app.workflow(on="go", timeout="2h")
    async def doomed(ctx: Context) -> None:
        async def fail() -> None:
            await eventually(world.database, "select exists (select from tidegate.event_waits)")
            if how == "failed":
                raise NonRetryable("no")

        waiting = asyncio.create_task(ctx.wait_for("word", timeout="3h", name="word"))
        await ctx.step("fail", fail)
        await waiting

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    if how == "cancelled":
        await control.cancel_run(world.database, run["id"], "test", TRIGGER_BREAKER)
    if how == "timed out":
        await clock.advance(7_200_000)
        await world.turn(runner)
    await publish(connection, "word")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == ("cancelled" if how == "cancelled" else "failed")
    assert (run["wakes"], await waits(connection)) == (0, 0)


async def test_a_replayed_run_waits_again_and_finds_what_came_meanwhile(connection: Connection, world: World) -> None:
    is_broken = True

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        async def fail() -> None:
            if is_broken:
                await eventually(world.database, "select exists (select from tidegate.event_waits)")
                raise NonRetryable("no")

        waiting = asyncio.create_task(ctx.wait_for("word", timeout="3h", name="word"))
        await ctx.step("fail", fail)
        event = await waiting
        return event and event.payload["n"]

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "failed"
    await publish(connection, "word", n=1)
    await world.turn(runner)
    is_broken = False
    [letter] = await connection.fetch("select id from tidegate.dead_letters")
    await control.replay_letter(world.database, letter["id"], "test")
    await world.turn(runner)
    assert (await the_run(connection))["output"] == 1


async def test_many_runs_and_as_many_events_over_several_workers_each_get_their_own(
    connection: Connection, world: World
) -> None:
    """1,000 runs wait for one type, by key; 1,000 events come while they begin to, decided by two dispatchers."""
    count = 1000

    @world.app.workflow(on="go")
    async def wait(ctx: Context, id: int) -> Any:
        event = await ctx.wait_for("answer", match={"id": id}, timeout="1h")
        world.done.append(f"{id} {event.payload['id'] if event else 'nobody'}")
        return event and event.payload["id"]

    workers = [await world.runner(concurrency=40) for _ in range(3)]
    dispatchers = [world.dispatch, Dispatch(world.database, batch_size=60, after_launch=lambda: None)]
    many = "select tidegate.publish($1, 'shop', jsonb_build_object('id', n)) from generate_series($2::int, $3::int) n"
    is_published = False

    async def work(runner: Any) -> None:
        while not is_published or await unfinished():
            if not await runner.run_once():
                await asyncio.sleep(0.01)
            await runner.idle()

    async def decide(dispatch: Dispatch) -> None:
        while not is_published or await connection_free("select exists (select from tidegate.event_inbox)"):
            if not (await dispatch.run_once()).events:
                await asyncio.sleep(0.01)

    async def connection_free(question: str) -> Any:
        async with world.database.connection() as other:
            return await other.fetchval(question)

    async def unfinished() -> bool:
        return bool(
            await connection_free(
                "select exists (select from tidegate.workflow_runs where status in ('pending', 'running'))"
                " or exists (select from tidegate.event_inbox)"
            )
        )

    async def publish_all() -> None:
        nonlocal is_published
        await connection.fetch(many, "go", 1, count)
        for first in range(1, count, 100):
            await connection.fetch(many, "answer", first, first + 99)
            await asyncio.sleep(0.05)
        is_published = True

    async with asyncio.timeout(240):
        await asyncio.gather(publish_all(), *map(work, workers), *map(decide, dispatchers))
    assert sorted(world.done) == sorted(f"{n} {n}" for n in range(1, count + 1))
    assert await waits(connection) == 0
    wrong = "select count(*) from tidegate.workflow_runs where output is distinct from parameters -> 'id'"
    assert await connection.fetchval(wrong) == 0


async def test_events_of_types_that_nobody_waits_for_keep_to_the_fast_path(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting_workflow(world, "async")
    runner = await world.runner()
    await publish(connection, "order.created", id=7)
    await world.turn(runner)
    await world.dispatch.run_once()
    locked: list[Any] = []
    real = gate.lock_shared

    async def lock_shared(connection: Connection, names: Any) -> Any:
        locked.append(names)
        return await real(connection, names)

    monkeypatch.setattr(gate, "lock_shared", lock_shared)
    for _ in range(3):
        await publish(connection, "other")
        assert (await world.dispatch.run_once()).events == 1
    assert locked == []
    await publish(connection, "order.approved", id=8)
    assert (await world.dispatch.run_once()).events == 1
    assert len(locked) == 1
