"""Waiting is not failing: whatever a delivery or event waits for, and however long, it is not given up by default."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker, held, make_trigger, statuses
from tidegate import Context
from tidegate.flow import control
from tidegate.flow.hold.delivery_retry import DeliveryRetry
from tidegate.flow.run.runner import Runner
from tidegate.model.retry import TRIGGER_RETRY, Retry
from tidegate.model.source import RateLimit
from tidegate.store import locks, trigger_gates
from tidegate.store.db import Connection, Database

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.mark.parametrize("retry", [None, Retry(max_attempts=2)], ids=["by default", "two attempts for failures"])
async def test_who_waits_for_a_run_that_sleeps_a_week_is_launched_when_it_ends(
    world: World, connection: Connection, clock: Clock, retry: Any
) -> None:
    """The second order of a customer, while the first one sleeps: looked at all week, and done right after it."""
    limits: dict[str, Any] = {"max_concurrency": 1, "concurrency_key": "{{ event.payload.customer }}", "retry": retry}

    @world.app.workflow(on="order", **limits)
    async def order(ctx: Context, n: int, **_: Any) -> None:
        world.done.append(f"begin {n}")
        if n == 1:
            await ctx.sleep("7d")
        world.done.append(f"end {n}")

    definitions = await world.database.run(world.app.register)
    deliveries = DeliveryRetry(world.database, batch_size=100, after_launch=lambda: None)
    runner = Runner(
        world.database, world.app.workflows, worker="test", concurrency=10, lease_ms=60_000, policy=TRIGGER_RETRY,
        fill=deliveries.fill,
    )  # fmt: skip
    runner.serve(definitions)
    world.runners.append(runner)
    for n in (1, 2, 3):
        await publish(connection, "order", "shop", customer="ann", n=n)
    await world.turn(runner)
    began = list(world.done)
    for _ in range(7 * 24):
        await clock.advance(HOUR_MS)
        await deliveries.run_once()
        if "begin 2" not in world.done:
            await world.turn(runner)
    await clock.advance(60_000)
    await world.turn(runner)
    assert began == ["begin 1"]
    assert [what for what in world.done if what.startswith("end")] == ["end 1", "end 2", "end 3"]
    assert await statuses(connection) == {"launched": 3}
    assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 0
    assert await connection.fetchval("select max(retry_attempts) from tidegate.workflow_trigger_deliveries") == 1


@pytest.mark.parametrize("what", ["throttle", "concurrency", "pause", "source pause", "breaker", "rate limit"])
async def test_nothing_that_waits_for_weeks_is_given_up_by_default(
    database: Database, connection: Connection, clock: Clock, what: str
) -> None:
    """Also when nobody looks for days, so that many are due at once and find no room."""
    worker = TriggerWorker(database, TRIGGER_RETRY)
    limits: dict[str, Any] = {"throttle": {"throttle_count": 1, "throttle_window_ms": DAY_MS},
                              "concurrency": {"max_concurrency": 1}}.get(what, {})  # fmt: skip
    trigger_id = await make_trigger(database, **limits)
    if what == "rate limit":
        await control.set_limit(database, "shop", RateLimit(limit=1, interval_ms=DAY_MS), "test")
    if what == "pause":
        await control.pause_trigger(database, trigger_id, actor="test")
    if what == "source pause":
        await control.pause(database, "shop", actor="test")
    if what == "breaker":
        for _ in range(3):
            await publish(connection, "tick", "shop")
        await worker.turn()
        await worker.end_runs(3, "failed")
    for _ in range(12):
        await publish(connection, "tick", "shop")
    await worker.turn()
    for hours in (1, 23, 24, 24 * 9, 1, 12, 24 * 10, 24 * 30):
        await clock.advance(hours * HOUR_MS)
        for _ in range(3):
            await worker.turn()
            if what == "breaker":  # the probe fails every time
                await worker.end_runs(10, "failed")
    assert "exhausted" not in await statuses(connection)
    assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 0
    assert (
        await connection.fetchval("select count(*) from tidegate.event_ingress_retries where retry_state = 'exhausted'")
        == 0
    )


async def test_an_age_that_someone_sets_ends_the_wait_for_a_slot(
    database: Database, connection: Connection, clock: Clock
) -> None:
    worker = TriggerWorker(database, TRIGGER_RETRY)
    await make_trigger(database, max_concurrency=1, retry=Retry(max_age="1h", base="1m", cap="10m"))
    for _ in range(2):
        await publish(connection, "tick", "shop")
    await worker.turn()
    for _ in range(8):
        await clock.advance(600_000)
        await worker.turn()
    assert await statuses(connection) == {"launched": 1, "exhausted": 1}
    reason = await connection.fetchval("select reason from tidegate.dead_letters")
    assert reason == "retries exhausted (older than 1:00:00): 1 of 1 slots are in use"


async def test_looks_at_who_waits_for_a_slot_become_rare_and_leave_no_lines(
    database: Database, connection: Connection, clock: Clock
) -> None:
    worker = TriggerWorker(database, TRIGGER_RETRY)
    await make_trigger(database, max_concurrency=1)
    for _ in range(2):
        await publish(connection, "tick", "shop")
    await worker.turn()
    looks = 0
    for _ in range(24 * 60):
        await clock.advance(60_000)
        looks += (await worker.delivery_retry.run_once()).due
    assert 90 <= looks <= 150
    assert len(await held(connection)) == 1
    assert await connection.fetchval("select count(*) from tidegate.event_decisions") == 1
    [row] = await held(connection)
    assert row["next_attempt_at"] - clock.now <= timedelta(minutes=15)


async def test_who_becomes_due_while_others_are_decided_is_not_launched_before_its_time(
    database: Database, connection: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches are stamped with the time by which they were decided; limits are counted by it."""
    worker = TriggerWorker(database, TRIGGER_RETRY)
    await make_trigger(database, throttle_count=2, throttle_window_ms=1000)
    for _ in range(4):
        await publish(connection, "tick", "shop")
    await worker.turn()
    planned = {
        row["id"]: row["next_attempt_at"]
        for row in await connection.fetch(
            "select id, next_attempt_at from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled'"
        )
    }
    lock = trigger_gates.lock

    async def slow(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(trigger_gates, "lock", lock)
        await TriggerWorker(database, TRIGGER_RETRY).delivery_retry.run_once()  # another worker was first
        monkeypatch.setattr(locks, "now", then_later)
        return await lock(*arguments, **named)

    async def then_later(one: Connection) -> datetime:
        found: datetime = await one.fetchval("select tidegate.now()")
        await clock.advance(2)  # the next in line is due before the rows are read
        return found

    monkeypatch.setattr(trigger_gates, "lock", slow)
    await clock.advance(1522)
    await worker.delivery_retry.run_once()
    monkeypatch.undo()
    await worker.delivery_retry.run_once()
    launched = await connection.fetch(
        "select id, launched_at from tidegate.workflow_trigger_deliveries where retry_state = 'completed'"
    )
    assert len(planned) == len(launched) == 2
    assert all(row["launched_at"] >= planned[row["id"]] for row in launched)
