"""Starting workflows by name: idempotent by id, under the limits of the workflow, with an answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from starlette.requests import Request

from tests.conftest import Clock
from tests.flow.step_world import World, the_run
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker
from tidegate import Conflict, Context, InvalidInput, NotFound, On, RunFailed, Tidegate, Unavailable
from tidegate.api.v1.starts import unless_gone
from tidegate.clock import uuid7
from tidegate.flow import control
from tidegate.flow.accept.ingest import Ingest
from tidegate.flow.accept.starts import Starts
from tidegate.flow.look import ends
from tidegate.flow.look.ends import RunEnds, RunHandle
from tidegate.flow.look.explain import explain
from tidegate.flow.run.runner import Runner
from tidegate.model.event import EventLimits
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store.db import Connection, Database


def starts_of(world: World) -> Starts:
    return Starts(world.database, Ingest(world.database, max_waiting=1000, after_commit=lambda: None), EventLimits())


async def test_a_start_runs_with_its_parameters_as_they_are(connection: Connection, world: World) -> None:
    """What the trigger asks of events is not asked of a start."""

    @world.app.workflow(
        on="order.created", source="shop", where="event.payload.amount > 100", params={"id": "{{ event.payload.no }}"},
        idempotency_key="{{ event.payload.no }}",
    )  # fmt: skip
    async def fulfil(ctx: Context, id: int, kind: str = "plain") -> Any:
        return [id, kind]

    runner = await world.runner()
    started = await starts_of(world).start("fulfil", {"id": 7, "kind": "gift"}, correlation_id="c-1")
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["id"], run["output"], run["correlation_id"]) == (started.run_id, [7, "gift"], "c-1")
    story = await explain(connection, str(started.event_id))
    assert (story.type, story.source, story.summary) == (
        "tidegate.start", "tidegate.start.fulfil", "fulfil succeeded",
    )  # fmt: skip


@dataclass
class Order:
    id: int
    customer: str = ""


async def test_the_whole_payload_is_given_as_such_or_by_the_name_of_its_argument(
    connection: Connection, world: World
) -> None:
    """So the parameters of a run have one form, and `cancel_on` and `where` mean the same for starts and events."""

    @world.app.workflow(on="order.created", cancel_on=On("gone", where="event.payload.id == run.parameters.id"))
    async def fulfil(ctx: Context, order: Order) -> int:
        await ctx.sleep("1h")
        return order.id

    @world.app.workflow(on="parent")
    async def parent(ctx: Context) -> Any:
        return await ctx.run(fulfil, order=Order(9, "c"))

    runner = await world.runner()
    starts = starts_of(world)
    await starts.start("fulfil", {"order": {"id": 7}})
    await starts.start("fulfil", {"id": 8, "customer": "b"})
    await starts.start("fulfil", {"order": Order(10)})
    await publish(connection, "parent")
    await world.turn(runner)
    await world.turn(runner)  # the child
    query = "select parameters from tidegate.workflow_runs where parameters ? 'id' order by parameters ->> 'id'"
    rows = [row[0] for row in await connection.fetch(query)]
    assert rows == [{"id": 10, "customer": ""}, {"id": 7}, {"id": 8, "customer": "b"}, {"id": 9, "customer": "c"}]
    for order in (7, 8, 10):
        await publish(connection, "gone", id=order)
    await world.turn(runner)
    query = "select parameters -> 'id' from tidegate.workflow_runs where status = 'cancelled' order by 1"
    assert [row[0] for row in await connection.fetch(query)] == [7, 8, 10]


async def test_the_same_id_is_the_same_run(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def fulfil(ctx: Context, n: int) -> int:
        world.done.append("ran")
        return n

    runner = await world.runner()
    starts = starts_of(world)
    first = await asyncio.gather(*(starts.start("fulfil", {"n": 7}, id="o-7") for _ in range(20)))
    await world.turn(runner)
    again = await starts.start("fulfil", {"n": 7}, id="o-7")
    assert {one.run_id for one in (*first, again)} == {(await the_run(connection))["id"]}
    assert sorted(one.status for one in first) == ["accepted"] + ["duplicate"] * 19
    with pytest.raises(Conflict, match="other parameters"):
        await starts.start("fulfil", {"n": 8}, id="o-7")
    await world.turn(runner)
    assert world.done == ["ran"]
    assert (await starts.start("fulfil", {"n": 7})).run_id != again.run_id


async def test_the_id_belongs_to_the_workflow(connection: Connection, world: World) -> None:
    for name in ("one", "two"):

        @world.app.workflow(name=name)
        async def work(ctx: Context) -> None:
            return None

    await world.runner()
    starts = starts_of(world)
    one, two = await starts.start("one", {}, id="x"), await starts.start("two", {}, id="x")
    assert (one.status, two.status) == ("accepted", "accepted")


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ({}, ["parameters.a"]),
        ({"a": 1, "z": 2}, ["parameters.z"]),
        ({"a": {1}}, ["parameters.a"]),
        ({"a": "x" * 300_000}, ["parameters"]),
    ],
)
async def test_wrong_parameters_are_refused_at_once(world: World, given: dict[str, Any], fields: list[str]) -> None:
    @world.app.workflow(on="x")
    async def work(ctx: Context, a: Any, b: int = 0) -> None:
        return None

    await world.runner()
    with pytest.raises(InvalidInput) as refused:
        await starts_of(world).start("work", given)
    assert [error.field for error in refused.value.errors] == fields


async def test_what_cannot_be_started(connection: Connection, world: World) -> None:
    @world.app.workflow(on="x")
    async def work(ctx: Context) -> None:
        return None

    await world.runner()
    starts = starts_of(world)
    with pytest.raises(NotFound, match="no workflow 'other'"):
        await starts.start("other", {})
    with pytest.raises(InvalidInput, match="id: must be text"):
        await starts.start("work", {}, id="")
    await connection.execute("update tidegate.workflow_event_triggers set status = 'disabled'")
    with pytest.raises(Conflict, match="trigger code of workflow work is disabled"):
        await starts.start("work", {})


async def test_a_workflow_without_a_trigger_gets_one(connection: Connection, world: World) -> None:
    @world.app.workflow(on="x")
    async def work(ctx: Context) -> None:
        return None

    runner = await world.runner()
    await connection.execute("update tidegate.workflow_event_triggers set deleted_at = tidegate.now()")
    starts = starts_of(world)
    await asyncio.gather(*(starts.start("work", {}) for _ in range(5)))
    await world.turn(runner)
    rows = await connection.fetch(
        "select t.name, count(r.id) from tidegate.workflow_event_triggers t "
        "left join tidegate.workflow_runs r on r.trigger_id = t.id where deleted_at is null group by 1"
    )
    assert [tuple(row) for row in rows] == [("start", 5)]


async def test_limits_are_shared_with_events(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(on="go", max_concurrency=1, concurrency_key="{{ event.payload.key }}")
    async def work(ctx: Context, key: str = "") -> str:
        await ctx.sleep("1h")
        return key

    runner = await world.runner()
    starts = starts_of(world)
    await publish(connection, "go", key="a")
    await world.turn(runner)
    held = await starts.start("work", {"key": "a"})
    free = await starts.start("work", {"key": "b"})
    await world.turn(runner)
    rows = await connection.fetch("select id, status, concurrency_key from tidegate.workflow_runs")
    assert {row["concurrency_key"] for row in rows} == {"a", "b"}
    assert free.run_id in {row["id"] for row in rows} and held.run_id not in {row["id"] for row in rows}
    story = await explain(connection, str(held.event_id))
    assert "1 of 1 slots of key a are in use" in story.summary
    await clock.advance(3_600_000)
    worker = TriggerWorker(world.database)
    for _ in range(2):
        await world.turn(runner)
        await worker.turn()
    await clock.advance(3_600_000)
    await world.turn(runner)
    assert await connection.fetchval("select output from tidegate.workflow_runs where id = $1", held.run_id) == "a"


# The answer ----------------------------------------------------------------------------------------------------------


def handle(world: World, waits: RunEnds, started: Any) -> RunHandle:
    return RunHandle(started, waits)


async def turning(world: World, runner: Runner) -> None:
    while True:
        await world.turn(runner)
        await asyncio.sleep(0.01)


async def test_waiting_for_the_result(connection: Connection, world: World) -> None:
    @world.app.workflow(on="x")
    async def work(ctx: Context, how: str) -> str:
        if how == "fail":
            raise ValueError("no such order")
        if how == "sleep":
            await ctx.sleep("1h")
        return how

    runner = await world.runner()
    starts, waits = starts_of(world), RunEnds(world.database)
    ok, bad, late = [handle(world, waits, await starts.start("work", {"how": h})) for h in ("ok", "fail", "sleep")]
    task = asyncio.create_task(turning(world, runner))
    try:
        assert await ok.result(timeout="30s") == "ok"
        with pytest.raises(RunFailed, match=r"failed: ValueError: no such order") as failed:
            await bad.result()
        assert (failed.value.status, failed.value.run_id) == ("failed", str(bad.run_id))
        with pytest.raises(TimeoutError, match="has not ended within 50ms"):
            await late.result(timeout="50ms")
        many = [asyncio.create_task(ok.result()) for _ in range(50)]
        assert set(await asyncio.gather(*many)) == {"ok"}
    finally:
        task.cancel()
    assert len(waits) == 0
    await waits.close()


async def test_a_start_that_launches_nothing_says_so(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    @world.app.workflow(on="x")
    async def work(ctx: Context) -> None:
        return None

    runner = await world.runner()
    waits = RunEnds(world.database)
    one = handle(world, waits, await starts_of(world).start("work", {}))
    await connection.execute("update tidegate.workflow_event_triggers set status = 'disabled'")
    await world.turn(runner)
    with pytest.raises(RunFailed, match="not launched: the trigger of the workflow was disabled or deleted"):
        await one.result(timeout="30s")
    await waits.close()


async def test_one_read_serves_all_who_wait(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    waits = RunEnds(database)
    read = waits._read

    async def counting(ids: list[Any], known: dict[Any, Any]) -> dict[Any, Any]:
        reads.append(len(ids))
        return await read(ids, known)

    monkeypatch.setattr(waits, "_read", counting)
    monkeypatch.setattr(ends, "MAX_WAITING", 100)
    tasks = [asyncio.create_task(waits.wait(uuid7(), 0.5)) for _ in range(100)]
    await asyncio.sleep(0)
    assert await waits.wait(uuid7(), 60) is None  # one more than may wait: it is answered at once
    assert await asyncio.gather(*tasks) == [None] * 100
    assert len(waits) == 0 and max(reads) == 100 and len(reads) < 30
    await waits.close()


async def test_a_result_that_too_many_wait_for(
    connection: Connection, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked for now and then, also while the database is down, and no sooner given up."""

    @world.app.workflow(on="x")
    async def work(ctx: Context) -> str:
        return "ok"

    runner = await world.runner()
    monkeypatch.setattr(ends, "MAX_WAITING", 0)
    waits = RunEnds(world.database)
    one = handle(world, waits, await starts_of(world).start("work", {}))
    read_really, reads, answered = waits._read, [], asyncio.Event()

    async def read(*args: Any) -> Any:
        reads.append(args)
        answered.set()
        if len(reads) == 1:
            raise Unavailable("the database is down")
        return await read_really(*args)

    monkeypatch.setattr(waits, "_read", read)
    result = asyncio.create_task(one.result(timeout="59s"))
    await answered.wait()
    await world.turn(runner)
    assert await result == "ok"
    await waits.close()


async def test_a_client_that_goes_away_frees_its_place(database: Database) -> None:
    waits, gone = RunEnds(database), asyncio.Event()

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    request = Request({"type": "http", "method": "GET", "path": "/", "headers": []}, receive)
    waiting = asyncio.create_task(unless_gone(request, waits.wait(uuid7(), 60)))
    await asyncio.sleep(0.05)
    assert len(waits) == 1
    gone.set()
    assert await waiting is None
    async with asyncio.timeout(30):
        while len(waits):  # noqa: ASYNC110 - the task that waits leaves when it is next scheduled
            await asyncio.sleep(0)
    await waits.close()


async def test_whoever_stops_waiting_is_forgotten(database: Database) -> None:
    waits = RunEnds(database)
    task = asyncio.create_task(waits.wait(uuid7(), 60))
    await asyncio.sleep(0.05)
    assert len(waits) == 1
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(waits) == 0
    late = asyncio.create_task(waits.wait(uuid7(), 60))
    await asyncio.sleep(0)
    await waits.close()
    assert await late is None


async def test_a_start_is_cancelled_by_the_id_of_its_run_when_it_is_held(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go", max_concurrency=1)
    async def work(ctx: Context) -> None:
        await ctx.sleep("1h")

    runner = await world.runner()
    starts = starts_of(world)
    first = await starts.start("work", {})
    cancel = partial(control.cancel_run, world.database, actor="ann", breaker=TRIGGER_BREAKER)
    with pytest.raises(Conflict, match=f"is not launched: tidegate explain {first.event_id} says why"):
        await cancel(first.run_id)
    await world.turn(runner)
    held = await starts.start("work", {})
    await world.turn(runner)
    assert await cancel(held.run_id) == "cancelled"
    assert await cancel(first.run_id) == "cancelled"
    await TriggerWorker(world.database).turn()
    await world.turn(runner)
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 1
    with pytest.raises(Conflict, match="it is cancelled"):
        await cancel(held.run_id)


async def test_an_application_takes_parameters_as_keywords_too(
    database: Database, database_url: str, connection: Connection
) -> None:
    app = Tidegate(database_url=database_url)

    @app.workflow()
    async def price(ctx: Context, amount: int, currency: str) -> None: ...

    await database.run(app.register)
    async with app:
        started = await app.start(price, {"amount": 7}, currency="EUR")
        with pytest.raises(InvalidInput, match="curency"):
            await app.start("price", amount=7, curency="EUR")
    payload = await connection.fetchval("select payload from tidegate.workflow_events where id = $1", started.event_id)
    assert payload == {"amount": 7, "currency": "EUR"}
