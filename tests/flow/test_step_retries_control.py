"""The operator's verbs about steps that wait to be tried again: what they mean for the run, and who wins."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.step_world import World, the_run, the_steps
from tests.flow.test_dispatch import publish
from tests.processes import api, worker
from tests.redis_server import RedisServer, server_fixture  # noqa: F401
from tidegate import Client, Context, RetryAfter
from tidegate.clock import uuid7
from tidegate.errors import Conflict, NotFound
from tidegate.flow import control
from tidegate.flow.hold.delivery_retry import DeliveryRetry
from tidegate.flow.look.explain import explain
from tidegate.store import held_steps
from tidegate.store.db import Connection, Database
from tidegate.store.retry_rows import RetryFilters
from tidegate.telemetry import metrics

APP = Path(__file__).parent / "steps_app.py"


def failing(world: World, *, times: int = 100, **trigger: Any) -> None:
    """A workflow whose only step fails so often."""

    async def call() -> str:
        world.done.append("try")
        if len(world.done) <= times:
            raise ConnectionError("the service is away")
        return "ok"

    @world.app.workflow(on="go", **trigger)
    async def work(ctx: Context) -> str:
        return await ctx.step("call", call)


async def begin(connection: Connection, world: World, count: int = 1) -> Any:
    """Publish, and run until everything waits; the worker."""
    runner = await world.runner()
    for _ in range(count):
        await publish(connection, "go")
    await world.turn(runner)
    return runner


async def cancel(database: Database, step_id: uuid.UUID) -> str:
    return await control.change_retry(database, "steps", step_id, "cancel", "ann")


async def force(database: Database, step_id: uuid.UUID) -> None:
    await control.change_retry(database, "steps", step_id, "force", "ann")


async def test_cancelling_a_retry_ends_the_run_and_frees_its_slot(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    failing(world, max_concurrency=1)
    runner = await begin(connection, world, 2)
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 1
    before = metrics.STEP_RETRIES.labels("cancelled")._value.get()
    step = (await the_steps(connection))["call"]
    assert await cancel(database, step["id"]) == "cancelled"
    assert metrics.STEP_RETRIES.labels("cancelled")._value.get() == before + 1
    run, step = await the_run(connection), (await the_steps(connection))["call"]
    assert (run["status"], run["cancelled_by"], run["error"]) == ("cancelled", "ann", "cancelled by ann")
    assert (step["status"], step["retry_state"], step["next_attempt_at"]) == ("cancelled", "cancelled", None)
    assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 0
    noted = await connection.fetchrow("select * from tidegate.audit_log where action = 'step.cancel'")
    assert noted is not None and (noted["actor"], noted["subject"]) == ("ann", str(step["id"]))
    assert (noted["before"]["retry_state"], noted["after"]["run_status"]) == ("scheduled", "cancelled")
    story = await explain(connection, str(run["event_id"]))
    assert [(d.stage, d.decision, d.actor) for d in story.decisions if d.stage == "step"] == [
        ("step", "cancelled", "ann")
    ]
    assert story.decisions[-1].decision == "cancelled"
    with pytest.raises(Conflict, match="no longer waiting: it is cancelled"):
        await cancel(database, step["id"])
    with pytest.raises(Conflict, match="no longer waiting"):
        await force(database, step["id"])
    # The delivery that waited for the slot is due, and launched.
    retry = DeliveryRetry(database, batch_size=10, after_launch=lambda: None)
    await retry.run_once()
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs where status = 'pending'") == 1
    await clock.advance(60_000)
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "cancelled"


async def test_a_forced_retry_is_tried_at_once(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    failing(world, times=1)
    runner = await begin(connection, world)
    step = (await the_steps(connection))["call"]
    assert step["next_attempt_at"] > clock.now
    await force(database, step["id"])
    await force(database, step["id"])  # twice does no harm
    run, step = await the_run(connection), (await the_steps(connection))["call"]
    assert run["next_attempt_at"] == step["next_attempt_at"] == clock.now
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "succeeded" and world.done == ["try", "try"]
    with pytest.raises(Conflict, match="no longer waiting: it is succeeded"):
        await force(database, step["id"])
    noted = await connection.fetch("select * from tidegate.audit_log where action = 'step.force' order by id")
    assert len(noted) == 2 and noted[0]["before"]["next_attempt_at"] > noted[0]["after"]["next_attempt_at"]


async def test_a_forced_retry_waits_until_its_trigger_is_open(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    async def call() -> None:
        world.done.append("try")
        raise RetryAfter(600, "too many", everyone="trigger")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("call", call)

    runner = await begin(connection, world)
    step = (await the_steps(connection))["call"]
    await force(database, step["id"])
    opens = clock.now + timedelta(seconds=600)
    assert (await the_run(connection))["next_attempt_at"] == opens
    [listed] = await held_steps.list_waiting(connection, limit=10)
    assert listed.next_attempt_at == clock.now and listed.eta_seconds == 600
    await world.turn(runner)
    assert world.done == ["try"]


async def test_timers_are_listed_but_no_retries(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.sleep("1h")

    await begin(connection, world)
    timer = (await the_steps(connection))["sleep-1"]
    for verb in (cancel, force):
        with pytest.raises(Conflict, match="is a timer, not a retry; to end it, cancel its run"):
            await verb(database, timer["id"])
        with pytest.raises(NotFound):
            await verb(database, uuid7())
    [listed] = await held_steps.list_waiting(connection, limit=10)
    assert (listed.id, listed.reason, listed.step, listed.workflow) == (timer["id"], "sleep", "sleep-1", "work")
    assert await control.preview_retries(database, "steps", RetryFilters()) == 0
    assert (await the_run(connection))["status"] == "pending"


async def test_a_step_that_waits_while_others_are_done(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def long() -> None:
        begun.set()
        await may_end.wait()

    async def call() -> None:
        raise ConnectionError("away")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await asyncio.gather(ctx.step("long", long), ctx.step("call", call))
        world.done.append("after")

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    await begun.wait()
    await eventually(database, "select exists (select 1 from tidegate.workflow_run_steps where name = 'call')")
    step = (await the_steps(connection))["call"]
    with pytest.raises(Conflict, match="a worker is executing other steps of its run"):
        await force(database, step["id"])
    assert await cancel(database, step["id"]) == "cancelling"
    assert await control.preview_retries(database, "steps", RetryFilters()) == 0
    may_end.set()
    await asyncio.wait_for(runner.idle(), 30)
    run, steps = await the_run(connection), await the_steps(connection)
    assert run["status"] == "cancelled" and not world.done
    assert {row["retry_state"] for row in steps.values()} <= {"none", "cancelled"}


async def test_a_step_that_is_being_tried_is_not_cancelled(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def call() -> str:
        world.done.append("try")
        if len(world.done) == 1:
            raise ConnectionError("away")
        begun.set()
        await may_end.wait()
        return "ok"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return await ctx.step("call", call)

    runner = await begin(connection, world)
    await clock.advance(5000)
    await runner.run_once()
    await begun.wait()
    step = (await the_steps(connection))["call"]
    for verb in (cancel, force):
        with pytest.raises(Conflict, match="no longer waiting: it is being executed"):
            await verb(database, step["id"])
    may_end.set()
    await asyncio.wait_for(runner.idle(), 30)
    assert (await the_run(connection))["status"] == "succeeded"


async def test_exactly_one_of_cancelling_and_resuming_wins(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    failing(world)
    runner = await begin(connection, world, 20)
    waiting = await connection.fetch("select id, workflow_run_id from tidegate.workflow_run_steps order by id")
    tried = len(world.done)
    await clock.advance(2000)
    results = await asyncio.gather(
        *(cancel(database, row["id"]) for row in waiting), world.turn(runner), return_exceptions=True
    )
    [*cancelled, turned] = results
    assert turned is None
    words = {"cancelled", "cancelling"}
    assert all(result in words or isinstance(result, Conflict) for result in cancelled), cancelled
    won = {row["workflow_run_id"] for row, result in zip(waiting, cancelled, strict=True) if result in words}
    rows = await connection.fetch(
        "select r.id, r.status, r.attempts, s.retry_state from tidegate.workflow_runs r "
        "join tidegate.workflow_run_steps s on s.workflow_run_id = r.id"
    )
    for row in rows:
        if row["id"] in won:  # perhaps after one more try
            assert (row["status"], row["retry_state"]) == ("cancelled", "cancelled")
        else:
            assert (row["status"], row["attempts"], row["retry_state"]) == ("pending", 2, "scheduled")
    again = sum(row["attempts"] == 2 for row in rows)
    assert len(world.done) == tried + again


async def test_a_cancel_that_waited_for_the_run_sees_what_has_become_of_the_step(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    failing(world)
    await begin(connection, world)
    run, step = await the_run(connection), (await the_steps(connection))["call"]
    async with database.transaction() as other:
        await other.execute("update tidegate.workflow_runs set warning = null where id = $1", run["id"])
        await other.execute(
            "update tidegate.workflow_run_steps set status = 'succeeded', retry_state = 'none', next_attempt_at = null"
        )
        verdict = asyncio.create_task(cancel(database, step["id"]))
        await eventually(database, "select exists (select 1 from pg_locks where not granted)")
    with pytest.raises(Conflict, match="it is succeeded"):
        await verdict
    assert (await the_run(connection))["status"] == "pending"
    assert await connection.fetchval("select count(*) from tidegate.audit_log where action like 'step.%'") == 0


async def test_a_cancel_that_waited_while_a_replay_forgot_the_step(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    failing(world)
    await begin(connection, world)
    run, step = await the_run(connection), (await the_steps(connection))["call"]
    async with database.transaction() as other:
        await other.execute("update tidegate.workflow_runs set warning = null where id = $1", run["id"])
        await other.execute("delete from tidegate.workflow_run_steps where id = $1", step["id"])
        verdict = asyncio.create_task(cancel(database, step["id"]))
        await eventually(database, "select exists (select 1 from pg_locks where not granted)")
    with pytest.raises(Conflict, match="starts its steps again"):
        await verdict
    assert (await the_run(connection))["status"] == "pending"


async def test_filters_of_the_list(connection: Connection, clock: Clock, world: World) -> None:
    failing(world)
    await begin(connection, world, 2)
    everyone = await held_steps.list_waiting(connection, limit=10)
    one = everyone[0]
    assert len(everyone) == 2 and one.source and one.trigger_id and one.reason == "failed"

    async def found(**filters: Any) -> int:
        return len(await held_steps.list_waiting(connection, RetryFilters(**filters), limit=10))

    assert await found(workflow="work") == await found(source=one.source) == await found(reason="failed") == 2
    assert await found(trigger_id=one.trigger_id) == 2 and await found(workflow_run_id=one.workflow_run_id) == 1
    for other in ({"workflow": "x"}, {"source": "x"}, {"reason": "x"}, {"trigger_id": uuid7()}):
        assert await found(**other) == 0
    assert await found(workflow_run_id=uuid7()) == 0
    place = (one.next_attempt_at or clock.now, one.id)
    assert [s.id for s in await held_steps.list_waiting(connection, after=place, limit=10)] == [everyone[1].id]
    assert await held_steps.list_settled(connection, "exhausted", limit=10) == []


@pytest.mark.parametrize("queue", ["postgres", "bullmq"])
async def test_a_forced_retry_wakes_the_workers(
    database_url: str, database: Database, connection: Connection, server: RedisServer, queue: str,
    effects: Callable[[], Awaitable[list[tuple[Any, str]]]],
) -> None:  # fmt: skip
    settings = {
        "TIDEGATE_QUEUE": queue, "TIDEGATE_REDIS_URL": server.url, "TIDEGATE_POLL_MS": "60000",
        "TIDEGATE_STEP_RETRY_BASE_MS": "3000000", "TIDEGATE_STEP_RETRY_MAX_MS": "3000000",
    }  # fmt: skip
    with api(database_url, **settings) as (_, url), worker(database_url, APP, **settings), Client(url) as client:
        client.publish("steps.flaky", source="test")
        for tries in (1, 2):
            await eventually(
                database,
                "select exists (select 1 from tidegate.workflow_run_steps s join tidegate.workflow_runs r "
                "on r.id = s.workflow_run_id where r.status = 'pending' and s.retry_attempts = $1)",
                tries,
            )
            [waiting] = client.request("GET", "/admin/retries", kind="steps")["retries"]
            assert (waiting["attempts"], waiting["step"], waiting["reason"]) == (tries, "call", "failed")
            forced = client.request("POST", f"/admin/retries/steps/{waiting['id']}/force")
            assert forced == {"id": waiting["id"], "status": "forced"}
        await eventually(database, "select exists (select 1 from tidegate.workflow_runs where status = 'succeeded')")
        assert [what for _, what in await effects()] == ["try"] * 3
