"""Cancelling and forcing everything that fits a filter: bounded calls, whole batches, limits that hold."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.step_world import World
from tests.flow.test_control import hold
from tests.flow.test_dispatch import publish
from tests.processes import api
from tests.store.builders import make_definition, make_events
from tidegate import Client, Context, Unavailable, failpoints
from tidegate.flow import control
from tidegate.flow.control import BulkDone, retries
from tidegate.flow.hold.delivery_retry import DeliveryRetry
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.model.source import TRIGGER_BREAKER, RateLimit
from tidegate.model.trigger import Trigger
from tidegate.store.bulk_retries import IdRange, RetryKind
from tidegate.store.db import Connection, Database
from tidegate.store.retry_rows import RetryFilters
from tidegate.telemetry import metrics


async def hold_events(connection: Connection, count: int, source: str = "shop.api", reason: str = "paused") -> None:
    """Events of a source that wait for an hour."""
    ids = await make_events(connection, count, source=source)
    await connection.execute("delete from tidegate.event_inbox")
    await connection.execute(
        "insert into tidegate.event_scheduler_sources (source, updated_by) values ($1, 'test') on conflict do nothing",
        source,
    )
    await connection.execute(
        "insert into tidegate.event_ingress_retries (event_id, source, ingress_sequence, retry_state, attempts, "
        "next_attempt_at, reason) select id, source, ingress_sequence, 'scheduled', 1, "
        "tidegate.now() + interval '1 hour', $2 from tidegate.workflow_events where id = any ($1)",
        ids, reason,
    )  # fmt: skip


async def states(connection: Connection) -> dict[tuple[str, str], int]:
    rows = await connection.fetch(
        "select source, retry_state, count(*) from tidegate.event_ingress_retries group by 1, 2"
    )
    return {(row[0], row[1]): row[2] for row in rows}


async def act(database: Database, kind: RetryKind, verb: Any, *, limit: int = 1000, **filters: Any) -> BulkDone:
    """Call until nothing remains; all of it together."""
    done = lost = 0
    span: IdRange | None = None
    while True:
        one = await control.change_retries(
            database, kind, verb, RetryFilters(**filters), "ann", TRIGGER_BREAKER, span=span, limit=limit
        )
        done, lost, span = done + one.done, lost + one.no_longer_waiting, one.rest
        if span is None:
            assert one.remaining == 0
            return BulkDone(done, lost, 0, None)


async def count(database: Database, kind: RetryKind, **filters: Any) -> int:
    return await control.preview_retries(database, kind, RetryFilters(**filters))


async def test_events_are_cancelled_in_bounded_calls(database: Database, connection: Connection, clock: Clock) -> None:
    await hold_events(connection, 250)
    await hold_events(connection, 30, reason="rate_limit")
    await hold_events(connection, 20, source="other")
    assert await count(database, "events") == 300 and await count(database, "events", source="shop.api") == 280
    assert await count(database, "events", source="shop.api", reason="paused") == 250
    assert await count(database, "events", reason="nonsense") == 0
    assert (await states(connection))[("shop.api", "scheduled")] == 280  # a preview changes nothing
    before = metrics.EVENT_RETRIES.labels("cancelled")._value.get()
    asked = RetryFilters(source="shop.api", reason="paused")
    first = await control.change_retries(database, "events", "cancel", asked, "ann", TRIGGER_BREAKER, limit=120)
    assert (first.done, first.no_longer_waiting, first.remaining) == (120, 0, 130) and first.rest is not None
    await hold_events(connection, 5)  # whoever comes later is not meant
    span: IdRange | None = first.rest
    while span is not None:
        one = await control.change_retries(
            database, "events", "cancel", asked, "ann", TRIGGER_BREAKER, span=span, limit=120
        )
        span = one.rest
    assert await states(connection) == {
        ("shop.api", "cancelled"): 250, ("shop.api", "scheduled"): 35, ("other", "scheduled"): 20,
    }  # fmt: skip
    assert metrics.EVENT_RETRIES.labels("cancelled")._value.get() == before + 250
    noted = await connection.fetch("select * from tidegate.audit_log where action = 'events.cancel' order by id")
    assert [row["after"]["count"] for row in noted] == [100, 20, 100, 20, 10]
    assert {row["actor"] for row in noted} == {"ann"}
    assert noted[0]["before"] == {"filter": {"source": "shop.api", "reason": "paused"}}
    told = (
        "select count(distinct event_id) from tidegate.event_decisions where decision = 'cancelled' and actor = 'ann'"
    )
    assert await connection.fetchval(told) == 250
    assert len({row_id for row in noted for row_id in row["after"]["ids"]}) == 250
    assert await act(database, "events", "cancel", source="nobody") == BulkDone(0, 0, 0, None)


async def test_who_is_forced_passes_the_gate_and_is_met_once(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await hold_events(connection, 40, reason="rate_limit")
    await control.set_limit(database, "shop.api", RateLimit(limit=3, interval_ms=3_600_000), "ann")
    await connection.execute("update tidegate.event_scheduler_sources set is_replanning = false")
    retry = EventRetry(database, batch_size=100, after_launch=lambda: None)
    done = 0
    span: IdRange | None = None
    while True:  # the gate refuses what was forced, and it waits anew: it is not forced over and over
        one = await control.change_retries(
            database, "events", "force", RetryFilters(source="shop.api"), "ann", TRIGGER_BREAKER, span=span, limit=10
        )
        done, span = done + one.done, one.rest
        await retry.run_once()
        await connection.execute(
            "update tidegate.event_ingress_retries set next_attempt_at = tidegate.now() + interval '1 hour' "
            "where retry_state = 'scheduled' and next_attempt_at <= tidegate.now()"
        )
        if span is None:
            break
    assert done == 40 and (await states(connection)) == {
        ("shop.api", "completed"): 3, ("shop.api", "scheduled"): 37,
    }  # fmt: skip


async def test_what_has_gone_on_meanwhile_is_told(database: Database, connection: Connection, clock: Clock) -> None:
    await hold_events(connection, 3)
    async with database.transaction() as other:
        await other.execute(
            "update tidegate.event_ingress_retries set retry_state = 'completed' where event_id = "
            "(select event_id from tidegate.event_ingress_retries order by event_id limit 1)"
        )
        verdict = asyncio.create_task(act(database, "events", "cancel", source="shop.api"))
        await eventually(database, "select exists (select 1 from pg_locks where not granted)")
    assert await verdict == BulkDone(2, 1, 0, None)
    assert await states(connection) == {("shop.api", "completed"): 1, ("shop.api", "cancelled"): 2}


@pytest.fixture
async def trigger(database: Database) -> Trigger:
    async with database.connection() as connection:
        await make_definition(connection)
    return await control.create_trigger(
        database, "fulfil", {"name": "t", "event_type": "a", "max_concurrency": 1}, "ann"
    )


async def test_deliveries_by_filter(database: Database, connection: Connection, trigger: Trigger) -> None:
    other = await control.create_trigger(database, "fulfil", {"name": "u", "event_type": "a"}, "ann")
    for _ in range(3):
        await hold(database, trigger.id, reason="concurrency")
        await hold(database, other.id)
    assert await count(database, "deliveries", workflow="fulfil") == 6
    assert await count(database, "deliveries", trigger_id=other.id) == 3
    assert await count(database, "deliveries", source="shop.api", reason="throttle") == 3
    assert await count(database, "deliveries", workflow="x") == await count(database, "deliveries", source="x") == 0
    forced = await act(database, "deliveries", "force", trigger_id=other.id)
    assert forced.done == 3
    due = "select count(*) from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled' and " \
          "next_attempt_at <= tidegate.now() and trigger_id = $1"  # fmt: skip
    assert await connection.fetchval(due, other.id) == 3 and await connection.fetchval(due, trigger.id) == 0
    one = await control.change_retries(
        database, "deliveries", "cancel", RetryFilters(reason="concurrency"), "bob", TRIGGER_BREAKER, limit=2
    )
    assert (one.done, one.remaining) == (2, 1)
    assert await connection.fetchval(due, trigger.id) == 1  # the next in line is told that a slot may be free
    assert (await act(database, "deliveries", "cancel", workflow="fulfil")).done == 4
    lines = "select count(*) from tidegate.event_decisions where stage = 'deliver' and decision = 'cancelled'"
    assert await connection.fetchval(lines) == 6


async def test_steps_by_filter_end_their_runs(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    async def call() -> None:
        raise ConnectionError("away")

    @world.app.workflow(on="go", max_concurrency=4)
    async def work(ctx: Context) -> None:
        await ctx.step("call", call)

    @world.app.workflow(on="go")
    async def two(ctx: Context) -> None:
        await asyncio.gather(ctx.step("a", call), ctx.step("b", call), ctx.sleep("1h", name="c"))

    runner = await world.runner()
    for _ in range(6):
        await publish(connection, "go")
    await world.turn(runner)
    assert await count(database, "steps", workflow="work") == 4
    assert await count(database, "steps", workflow="two", reason="failed") == 12  # not the timers
    assert (await act(database, "steps", "force", workflow="work")).done == 4
    due = "select count(*) from tidegate.workflow_runs where status = 'pending' and next_attempt_at <= tidegate.now()"
    assert await connection.fetchval(due) == 4
    cancelled = await act(database, "steps", "cancel", workflow="work")
    assert cancelled.done == 4
    # Four slots are free at once: as many of those that waited are due.
    retry = DeliveryRetry(database, batch_size=10, after_launch=lambda: None)
    await retry.run_once()
    await world.turn(runner)
    assert await count(database, "steps", workflow="work") == 2
    # The steps of a run go together: the second of each is gone with the first, or is counted with it.
    both = await act(database, "steps", "cancel", workflow="two", limit=4)
    assert both.done + both.no_longer_waiting <= 12 and both.done >= 6
    rows = await connection.fetch(
        "select s.retry_state, r.status, count(*) from tidegate.workflow_run_steps s join tidegate.workflow_runs r "
        "on r.id = s.workflow_run_id join tidegate.workflow_definitions w on w.id = r.workflow_definition_id "
        "where w.slug = 'two' group by 1, 2"
    )
    assert [tuple(row) for row in rows] == [("cancelled", "cancelled", 18)]
    assert (await act(database, "steps", "cancel")).done == 2


async def test_cancelling_beside_busy_workers_loses_and_doubles_nothing(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    async def call() -> None:
        world.done.append("try")
        raise ConnectionError("away")

    @world.app.workflow(on="go", max_concurrency=5)
    async def work(ctx: Context) -> None:
        await ctx.step("call", call)

    runner = await world.runner()
    for _ in range(40):
        await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(1500)
    retry = DeliveryRetry(database, batch_size=10, after_launch=lambda: None)

    async def busy() -> None:
        for _ in range(10):
            await world.turn(runner)
            await retry.run_once()
            await clock.advance(1500)

    await asyncio.gather(
        busy(),
        act(database, "steps", "cancel", workflow="work", limit=2),
        act(database, "deliveries", "cancel", workflow="work", limit=7),
        act(database, "steps", "force", workflow="work", limit=2),
    )
    await world.turn(runner)
    await act(database, "steps", "cancel", workflow="work")
    await act(database, "deliveries", "cancel", workflow="work")
    left = "select count(*) from tidegate.workflow_runs where status in ('pending', 'running')"
    assert await connection.fetchval(left) == 0
    assert await count(database, "steps") == await count(database, "deliveries") == 0
    orphans = "select count(*) from tidegate.workflow_run_steps where retry_state = 'scheduled'"
    assert await connection.fetchval(orphans) == 0
    deliveries = await connection.fetch("select status, count(*) from tidegate.workflow_trigger_deliveries group by 1")
    assert sum(row[1] for row in deliveries) == 40 and {row[0] for row in deliveries} <= {"launched", "cancelled"}


@pytest.mark.parametrize(
    ("point", "done"), [("bulk_retries.before_commit=kill@2", 100), ("bulk_retries.after_commit=kill@2", 200)]
)
async def test_a_killed_call_leaves_whole_batches_and_goes_on(
    database_url: str, connection: Connection, point: str, done: int
) -> None:
    await hold_events(connection, 350)
    with api(database_url, TIDEGATE_FAILPOINTS=point) as (process, url), Client(url) as client:
        with pytest.raises(Unavailable):
            client.request("POST", "/admin/retries/events/cancel", {"source": "shop.api"})
        assert process.wait() == 137
    assert await states(connection) == {("shop.api", "cancelled"): done, ("shop.api", "scheduled"): 350 - done}
    told = "select count(*) from tidegate.event_decisions where decision = 'cancelled'"
    noted = "select coalesce(sum((after ->> 'count')::int), 0) from tidegate.audit_log where action = 'events.cancel'"
    assert await connection.fetchval(told) == done == await connection.fetchval(noted)
    with api(database_url) as (_, url), Client(url) as client:
        rest = client.request("POST", "/admin/retries/events/cancel", {"source": "shop.api"})
    assert (rest["done"], rest["remaining"], rest["cursor"]) == (350 - done, 0, None)
    assert await connection.fetchval(told) == 350 == await connection.fetchval(noted)


async def test_a_batch_that_fails_changes_nothing(database: Database, connection: Connection) -> None:
    await hold_events(connection, 150)
    failpoints.arm("bulk_retries.before_commit=raise@2")
    with pytest.raises(failpoints.FailpointHit):
        await act(database, "events", "force")
    due = "select count(*) from tidegate.event_ingress_retries where next_attempt_at <= tidegate.now()"
    assert await connection.fetchval(due) == 100
    assert await connection.fetchval("select count(*) from tidegate.audit_log where action = 'events.force'") == 1


async def test_a_call_ends_when_its_time_is_over(
    database: Database, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hold_events(connection, 250)
    monkeypatch.setattr(retries, "CALL_SECONDS", 0.0)
    asked = RetryFilters(source="shop.api")
    one = await control.change_retries(database, "events", "cancel", asked, "ann", TRIGGER_BREAKER)
    assert (one.done, one.remaining) == (100, 150)  # at least a batch, so that it comes to an end
    assert (await act(database, "events", "cancel", source="shop.api")).done == 150
