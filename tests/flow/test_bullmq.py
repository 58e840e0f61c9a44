"""TIDEGATE_QUEUE=bullmq with real processes: what is held becomes delayed jobs, and losing Redis loses nothing."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest

from tests.flow.conftest import APP, PATIENCE_SECONDS, eventually
from tests.processes import Process, api, worker
from tests.redis_server import RedisServer, client_fixture, server_fixture  # noqa: F401
from tests.store.builders import make_events, make_triggers
from tidegate.client import Client
from tidegate.flow import control
from tidegate.flow.keep.reconcile import Requeue
from tidegate.queue.bullmq import INGRESS, TRIGGERS, BullmqQueue
from tidegate.queue.wakeups import delivery_wakeups
from tidegate.store import deliveries
from tidegate.store.db import Connection, Database
from tidegate.telemetry import metrics

Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
Start = Callable[..., AbstractContextManager[Process]]

SUCCEEDED = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"
WAITING = "select count(*) = $1 from tidegate.event_ingress_retries where retry_state = 'scheduled'"
ALL_MET = "select count(*) = 0 from tidegate.event_inbox"
QUEUE_OF = {"events": INGRESS, "deliveries": TRIGGERS}


@pytest.fixture
def settings(server: RedisServer) -> dict[str, str]:
    return {"TIDEGATE_QUEUE": "bullmq", "TIDEGATE_REDIS_URL": server.url}


@pytest.fixture
def start(database_url: str, settings: dict[str, str]) -> Start:
    def with_limit(limit: int | None = None, interval_ms: int = 1000, **env: str) -> AbstractContextManager[Process]:
        limits = [{"source": "noisy", "limit": limit, "interval_ms": interval_ms}] if limit else []
        env = {"TIDEGATE_SOURCE_RATE_LIMITS": json.dumps(limits), "TIDEGATE_POLL_MS": "1000", **settings, **env}
        return worker(database_url, APP, **env)

    return with_limit


async def publish(connection: Connection, count: int, source: str = "noisy") -> None:
    for n in range(count):
        await connection.execute("select tidegate.publish('work.quick', $1, $2)", source, {"n": n})


async def jobs(client: Any, queue: str = INGRESS) -> dict[str, dict[str, str]]:
    """The wake-ups in a queue of Redis, by job id."""
    keys = [key for key in await client.keys(f"*:{queue}:event-*") if not key.endswith(":lock")]
    return {key.split(":", 2)[2]: await client.hgetall(key) for key in keys}


async def hold(connection: Connection, kind: str, offsets: Sequence[timedelta]) -> list[str]:
    """Rows that wait for so long from now, written just now; the ids that their jobs should have, in order."""
    [trigger] = await make_triggers(connection)
    events = await make_events(connection, len(offsets), source="noisy")
    await connection.execute("delete from tidegate.event_inbox")
    now = await connection.fetchval("select tidegate.now()")
    due = [now + offset for offset in offsets]
    if kind == "events":
        await connection.executemany(
            "insert into tidegate.event_ingress_retries (event_id, source, attempts, next_attempt_at) "
            "values ($1, 'noisy', 1, $2)",
            list(zip(events, due, strict=True)),
        )
        return [f"event-retry:{event}:1" for event in events]
    held = [uuid.uuid4() for _ in events]
    await connection.executemany(
        "insert into tidegate.workflow_trigger_deliveries "
        "(id, trigger_id, event_id, status, attempts, retry_state, next_attempt_at, retry_attempts) "
        "values ($1, $2, $3, 'throttled', 1, 'scheduled', $4, 2)",
        [(delivery, trigger, event, at) for delivery, event, at in zip(held, events, due, strict=True)],
    )
    return [f"event-trigger-retry:{delivery}:2" for delivery in held]


async def settle(connection: Connection) -> None:
    """Make what waits older, so that its jobs cannot be on their way."""
    for table in ("event_ingress_retries", "workflow_trigger_deliveries"):
        await connection.execute(f"update tidegate.{table} set updated_at = tidegate.now() - interval '9 s'")


async def rows_of_deliveries(connection: Connection) -> list[Any]:
    return list(await connection.fetch("select * from tidegate.workflow_trigger_deliveries order by id"))


async def one_pass(requeue: Requeue) -> int:
    total = await requeue.run_once()
    while requeue.is_between_pages:
        total += await requeue.run_once()
    return total


async def until(holds: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)


async def held(connection: Connection) -> list[Any]:
    return list(
        await connection.fetch(
            "select * from tidegate.event_ingress_retries where retry_state = 'scheduled' order by next_attempt_at"
        )
    )


async def has_jobs_for(client: Any, rows: list[Any]) -> bool:
    return {f"event-retry:{row['event_id']}:{row['attempts']}" for row in rows} <= set(await jobs(client))


async def test_a_throttled_event_is_a_row_and_a_delayed_job(
    database: Database, connection: Connection, client: Any, start: Start
) -> None:
    with start(1, 60_000):
        await publish(connection, 4)
        await eventually(database, WAITING, 3)
        rows = await held(connection)
        await until(lambda: has_jobs_for(client, rows))
        found = await jobs(client)
    assert len(found) == 3
    for row in rows:
        job = found[f"event-retry:{row['event_id']}:1"]
        data = json.loads(job["data"])
        assert set(data) == {"installation", "ids"} and data["ids"] == [str(row["event_id"])]
        fires_at = (int(job["timestamp"]) + int(job["delay"])) / 1000
        assert fires_at == pytest.approx(row["next_attempt_at"].timestamp(), abs=1)
    assert await client.zcard((await client.keys("*:tidegate-event-ingress:delayed"))[0]) == 3


async def test_held_events_launch_after_the_pause_and_leave_no_keys(
    database: Database, connection: Connection, client: Any, start: Start, effects: Effects
) -> None:
    with start() as one, start() as two:
        await publish(connection, 1, "warm")  # so that what both workers keep in Redis is there
        await eventually(database, SUCCEEDED, 1)
        await control.pause(database, "noisy", duration_ms=1500, reason="test", actor="test")
        before = await connection.fetchval("select tidegate.now()")
        await publish(connection, 20)
        await eventually(database, WAITING, 20)
        await until(lambda: jobs(client))
        await eventually(database, SUCCEEDED, 21)

        async def only_the_queues_own() -> bool:
            left = {key.split(":")[-1] for key in await client.keys("*")}
            return left <= {"meta", "id", "events", "marker", "stalled-check"}

        await until(only_the_queues_own)
        assert "reconcile.requeued" not in one.output + two.output  # nothing was lost, so nothing is sent again
    assert len(await effects()) == 21
    first = await connection.fetchval(
        "select min(d.launched_at) from tidegate.workflow_trigger_deliveries d "
        "join tidegate.workflow_events e on e.id = d.event_id where e.source = 'noisy'"
    )
    assert first - before >= timedelta(milliseconds=1400)


async def test_a_cancelled_event_never_launches(
    database: Database, connection: Connection, client: Any, start: Start, effects: Effects
) -> None:
    with start(1, 1000):
        await publish(connection, 3)
        await eventually(database, WAITING, 2)
        last = (await held(connection))[-1]
        await control.change_retry(database, "events", last["event_id"], "cancel", "test")
        await eventually(database, SUCCEEDED, 2)
        await until(lambda: _gone(client, str(last["event_id"])))  # its job fired and found nothing to do
    assert len(await effects()) == 2
    assert await connection.fetchval(
        "select retry_state = 'cancelled' from tidegate.event_ingress_retries where event_id = $1", last["event_id"]
    )


async def _gone(client: Any, event_id: str) -> bool:
    return not any(event_id in job_id for job_id in await jobs(client))


async def test_flushed_redis_is_refilled_and_nothing_is_lost(
    database: Database, connection: Connection, client: Any, start: Start, effects: Effects
) -> None:
    with start(5, 1000) as process:
        await publish(connection, 60)  # twelve seconds: several passes of the comparison
        await eventually(database, ALL_MET)
        await until(lambda: jobs(client))
        await eventually(database, "select count(*) > 6 from tidegate.workflow_runs")
        await client.flushall()
        found = process.wait_for_line(r"reconcile\.requeued")
        assert '"kind":"events"' in found.string
        await until(lambda: jobs(client))
        await eventually(database, SUCCEEDED, 60)
    assert len({run for run, _ in await effects()}) == len(await effects()) == 60


@pytest.mark.parametrize("kind", QUEUE_OF)
async def test_requeue_counts_what_was_lost_and_only_that(
    database: Database, connection: Connection, client: Any, server: RedisServer, kind: str
) -> None:
    offsets = [timedelta(seconds=-5), *(timedelta(minutes=n) for n in range(1, 11)), timedelta(hours=3)]
    expected = await hold(connection, kind, offsets)
    queue = BullmqQueue(server.url, database)
    requeue = Requeue(database, queue, batch_size=4)
    count = metrics.RECONCILE_REQUEUED.labels(kind)._value

    async def are_back() -> bool:
        return set(await jobs(client, QUEUE_OF[kind])) == set(expected[1:11])

    assert await one_pass(requeue) == 0  # written just now: their jobs may be on the way
    await settle(connection)
    before = count.get()
    assert await one_pass(requeue) == 10  # neither the one that is due nor the one beyond the hour
    await until(are_back)
    assert await one_pass(requeue) == 0
    await client.flushall()
    assert await one_pass(requeue) == 10
    await until(are_back)
    assert count.get() - before == 20
    await queue.close()


@pytest.mark.parametrize(("events", "deliveries"), [(9, 2), (2, 9), (8, 8)])
async def test_lines_of_different_length_are_gone_through_together(
    database: Database, connection: Connection, client: Any, server: RedisServer, events: int, deliveries: int
) -> None:
    expected = {
        kind: await hold(connection, kind, [timedelta(minutes=5)] * count)
        for kind, count in (("events", events), ("deliveries", deliveries))
    }
    await settle(connection)
    before = await rows_of_deliveries(connection)
    queue = BullmqQueue(server.url, database)
    requeue = Requeue(database, queue, batch_size=4)

    async def are_back() -> bool:
        return all([set(await jobs(client, QUEUE_OF[kind])) == set(expected[kind]) for kind in expected])

    for _ in range(2):
        assert await requeue.run_once() == min(events, 4) + min(deliveries, 4)
        assert requeue.is_between_pages
        assert await requeue.run_once() == min(max(events, deliveries) - 4, 4) * (2 if events == deliveries else 1)
        assert await one_pass(requeue) == max(events, deliveries) - 8
        await until(are_back)
        assert await one_pass(requeue) == 0
        await client.flushall()
    assert await rows_of_deliveries(connection) == before
    await queue.close()


async def test_waiting_deliveries_have_jobs_again_after_a_flush(
    database: Database, connection: Connection, client: Any, start: Start, effects: Effects
) -> None:
    expected = set(await hold(connection, "deliveries", [timedelta(minutes=30 + n) for n in range(5)]))
    await settle(connection)
    before = await rows_of_deliveries(connection)

    async def are_back() -> bool:
        return set(await jobs(client, TRIGGERS)) == expected

    with start() as process:
        await until(are_back)
        await client.flushall()
        await until(are_back)
        assert '"kind":"deliveries"' in process.wait_for_line(r"reconcile\.requeued").string
        for row in before:
            job = (await jobs(client, TRIGGERS))[f"event-trigger-retry:{row['id']}:2"]
            assert job["name"] == "deliveries"
            assert json.loads(job["data"])["ids"] == [str(row["id"])]
            fires_at = (int(job["timestamp"]) + int(job["delay"])) / 1000
            assert fires_at == pytest.approx(row["next_attempt_at"].timestamp(), abs=1)
    assert await jobs(client, INGRESS) == {}
    assert await rows_of_deliveries(connection) == before
    assert await effects() == []


async def test_a_start_refills_redis(database: Database, connection: Connection, client: Any, start: Start) -> None:
    with start(1, 600_000):
        await publish(connection, 5)
        await eventually(database, WAITING, 4)
    await client.flushall()
    rows = await held(connection)
    near = [row for row in rows if row["next_attempt_at"] - row["updated_at"] < timedelta(minutes=55)]
    with start():
        await until(lambda: has_jobs_for(client, near))
    assert near and await held(connection) == rows


async def test_pages_beyond_the_first_are_refilled(
    database: Database, connection: Connection, client: Any, start: Start
) -> None:
    with start(1, 10_000, TIDEGATE_BATCH_SIZE="10") as process:
        await publish(connection, 60)
        await eventually(database, WAITING, 59)
        rows = await held(connection)
        await until(lambda: has_jobs_for(client, rows[5:]))
        await client.flushall()
        await until(lambda: has_jobs_for(client, rows[5:]))
        assert '"kind":"events"' in process.wait_for_line(r"reconcile\.requeued").string


async def test_redis_dies_while_publishing_and_draining(
    database_url: str,
    database: Database,
    connection: Connection,
    server: RedisServer,
    settings: dict[str, str],
    start: Start,
    effects: Effects,
) -> None:
    with api(database_url, **settings) as (_, url), start(20, 1000) as process, Client(url) as producer:

        def publish_some() -> None:
            for n in range(20):
                assert producer.publish("work.quick", source="noisy", payload={"n": n}).status == "accepted"

        await asyncio.to_thread(publish_some)
        server.stop()
        await asyncio.to_thread(publish_some)
        await asyncio.to_thread(publish_some)
        await eventually(database, SUCCEEDED, 60)
        server.start()
        await asyncio.to_thread(publish_some)
        await eventually(database, SUCCEEDED, 80)
        assert not re.search(r"Traceback|loop_failed", process.output), process.output
    assert len({run for run, _ in await effects()}) == len(await effects()) == 80


async def fire_early(client: Any, queue: str) -> None:
    """Make every delayed job of a queue due since 1970."""
    for delayed in await client.keys(f"*:{queue}:delayed"):
        for job in await client.zrange(delayed, 0, -1):
            await client.zadd(delayed, {job: 1}, xx=True)
        await client.zadd(delayed.replace(":delayed", ":marker"), {"1": 0})


async def test_early_and_repeated_jobs_start_nothing_early(
    database: Database, connection: Connection, client: Any, start: Start, effects: Effects
) -> None:
    with start(1, 60_000):
        await publish(connection, 3)
        await eventually(database, WAITING, 2)
        rows = await held(connection)
        await until(lambda: has_jobs_for(client, rows))
        await fire_early(client, INGRESS)
        await until(lambda: _gone(client, str(rows[0]["event_id"])))
        await publish(connection, 1, "other")
        await eventually(database, SUCCEEDED, 2)
        after = await held(connection)
    assert [(r["event_id"], r["attempts"], r["next_attempt_at"]) for r in after] == [
        (r["event_id"], r["attempts"], r["next_attempt_at"]) for r in rows
    ]
    assert len(await effects()) == 2


async def test_early_and_repeated_jobs_leave_waiting_deliveries_alone(
    database: Database, connection: Connection, client: Any, server: RedisServer, start: Start, effects: Effects
) -> None:
    expected = set(await hold(connection, "deliveries", [timedelta(minutes=30)] * 3))
    await settle(connection)
    before = await rows_of_deliveries(connection)
    other = BullmqQueue(server.url, database)
    doubled = delivery_wakeups(await deliveries.list_scheduled(connection))

    async def all_there() -> bool:
        return set(await jobs(client, TRIGGERS)) == expected

    async def all_fired() -> bool:
        await fire_early(client, TRIGGERS)
        return not expected & set(await jobs(client, TRIGGERS))

    with start() as process:
        for _ in range(3):
            other.schedule(doubled)
            other.schedule(doubled)
            await until(all_there)
            await until(all_fired)
        await publish(connection, 1)
        await eventually(database, SUCCEEDED, 1)
        assert not re.search(r"Traceback|loop_failed|bad_job|foreign_job", process.output), process.output
    await other.close()
    assert [row for row in await rows_of_deliveries(connection) if row["status"] != "launched"] == before
    assert len(await effects()) == 1


async def test_a_wrong_or_dead_redis_does_not_keep_a_worker_from_starting(
    database: Database, connection: Connection, start: Start, effects: Effects
) -> None:
    with start(TIDEGATE_REDIS_URL="redis://user:hunter2@127.0.0.1:1/0") as process:
        await publish(connection, 3)
        await eventually(database, SUCCEEDED, 3)
        assert "hunter2" not in process.output


async def test_a_delayed_event_is_a_delayed_job_and_a_lost_job_loses_nothing(
    start: Start, database: Database, connection: Connection, client: Any, effects: Effects
) -> None:
    publish_later = "select tidegate.publish('work.quick', 'noisy', $1, delay_ms => $2)"
    soon = await connection.fetchval(publish_later, {"n": 1}, 8_000)
    later = await connection.fetchval(publish_later, {"n": 2}, 1_800_000)
    await settle(connection)
    with start():

        async def has_job() -> bool:
            return f"event-retry:{later}:0" in await jobs(client)

        await until(has_job)
        await client.flushall()
        await eventually(database, SUCCEEDED, 1)
        decided = await connection.fetchrow(
            "select r.created_at >= e.deliver_at as is_in_time, e.id::text from tidegate.workflow_runs r "
            "join tidegate.workflow_events e on e.id = r.event_id"
        )
        assert decided is not None and tuple(decided) == (True, soon)
        await control.change_retry(database, "events", uuid.UUID(later), "force", "test")
        await eventually(database, SUCCEEDED, 2)
    assert [what for _, what in await effects()] == ["quick", "quick"]
