"""What must not stop the others: an event that nobody can read, a log that cannot be written, a broken tracer."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

from tests.conftest import Clock
from tests.flow.conftest import World
from tests.flow.step_world import the_run, the_steps
from tests.flow.test_dispatch import dispatcher, publish
from tests.flow.test_replay import bury
from tests.flow.trigger_worker import TriggerWorker, make_trigger
from tidegate import Context
from tidegate.flow import control
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.model.source import RateLimit
from tidegate.store.db import Connection, Database
from tidegate.telemetry import traces


async def spoil(connection: Connection, event_id: uuid.UUID | str) -> None:
    """Make an event that the driver cannot read."""
    await connection.execute("alter table tidegate.workflow_events drop constraint workflow_events_occurred_at_check")
    await connection.execute(
        "update tidegate.workflow_events set occurred_at = '20000-01-01' where id::text = $1", str(event_id)
    )


async def states(connection: Connection) -> dict[uuid.UUID, str]:
    rows = await connection.fetch("select event_id, retry_state from tidegate.event_ingress_retries")
    return {row["event_id"]: row["retry_state"] for row in rows}


def retry(database: Database) -> EventRetry:
    return EventRetry(database, batch_size=100, after_launch=lambda: None)


async def replayed(database: Database, connection: Connection, count: int) -> list[uuid.UUID]:
    """Events of a source without any state that wait for a replay, the first of them unreadable."""
    ids = await bury(connection, count)
    await spoil(connection, ids[0])
    for row in await connection.fetch("select id from tidegate.dead_letters order by id"):
        await control.replay_letter(database, row["id"], "ann")
    return ids


async def test_an_event_that_cannot_be_read_is_given_up_when_its_time_comes(
    database: Database, connection: Connection, clock: Clock
) -> None:
    bad, good = await replayed(database, connection, 2)
    one = retry(database)
    for _ in range(3):
        await one.run_once()
    assert await states(connection) == {bad: "exhausted", good: "completed"}
    rows = await connection.fetch("select subject_id from tidegate.dead_letters where replayed_at is null")
    assert [row["subject_id"] for row in rows] == [bad]


async def test_a_worker_that_comes_late_gives_up_no_other_event(
    database: Database, connection: Connection, clock: Clock
) -> None:
    """Two workers fail at the same event: the slower one finds it gone, and the next in line is not at fault."""
    bad, *good = await replayed(database, connection, 3)
    faster = retry(database)

    class Slower(EventRetry):
        async def _dead_letter(self, connection: Connection, **given: Any) -> Any:
            while "exhausted" not in (await states(connection)).values():
                await faster.run_once()
            return await super()._dead_letter(connection, **given)

    slower = Slower(database, batch_size=100, after_launch=lambda: None)
    await slower.run_once()
    assert (await states(connection))[bad] == "exhausted"
    for _ in range(3):
        await slower.run_once()
    assert await states(connection) == {bad: "exhausted", **dict.fromkeys(good, "completed")}
    assert await connection.fetchval("select count(*) from tidegate.dead_letters where replayed_at is null") == 1


async def test_a_delivery_of_an_event_that_cannot_be_read_is_given_up(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await make_trigger(database, throttle_count=1, throttle_window_ms=1000)
    worker = TriggerWorker(database)
    for _ in range(3):
        await publish(connection, "tick")
    await worker.turn()
    waiting = await connection.fetch(
        "select id, event_id from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled' "
        "order by ingress_sequence"
    )
    assert len(waiting) == 2
    await spoil(connection, waiting[0]["event_id"])
    for _ in range(5):
        await clock.advance(2000)
        await worker.turn()
    rows = await connection.fetch("select id, status from tidegate.workflow_trigger_deliveries")
    found = {row["id"]: row["status"] for row in rows}
    assert (found[waiting[0]["id"]], found[waiting[1]["id"]]) == ("failed", "launched")


async def test_an_event_that_cannot_be_read_can_be_cancelled(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await control.set_limit(database, "shop.api", RateLimit(limit=1, interval_ms=60_000), "ann")
    await publish(connection, "nothing", source="shop.api")
    held = await publish(connection, "nothing", source="shop.api")
    await dispatcher(database).run_once()
    await spoil(connection, held)
    await control.change_retry(database, "events", uuid.UUID(held), "cancel", "ann")
    assert (await states(connection))[uuid.UUID(held)] == "cancelled"


class Broken(SpanProcessor):
    """Somebody's own processor with a mistake in it."""

    def __init__(self, fails: str) -> None:
        self._fails = fails
        self.calls = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self._fail("start")

    def on_end(self, span: Any) -> None:
        self._fail("end")

    def _fail(self, where: str) -> None:
        if where == self._fails:
            self.calls += 1
            raise RuntimeError(f"broken at the {where}")


@pytest.fixture(params=["start", "end"])
def broken(request: pytest.FixtureRequest) -> Iterator[Broken]:
    processor = Broken(request.param)
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(processor)
    traces.use(provider)
    yield processor
    traces.switch_off()


async def test_a_broken_tracer_changes_nothing_but_the_traces(
    database: Database, connection: Connection, clock: Clock, world: World, broken: Broken
) -> None:
    async def once() -> str:
        world.done.append("step")
        return "done"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return str(await ctx.step("once", once))

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["attempts"], world.done) == ("succeeded", 1, ["step"])
    assert (await the_steps(connection))["once"]["status"] == "succeeded"
    assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 0
    assert broken.calls > 0
