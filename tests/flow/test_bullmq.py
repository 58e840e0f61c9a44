"""HEADGATE_QUEUE=bullmq with real processes: held events become delayed jobs, and losing Redis loses nothing."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
import redis.asyncio

from headgate.client import Client
from headgate.flow import control
from headgate.flow.reconcile import Requeue
from headgate.model.ingress_retry import IngressRetry
from headgate.queue.bullmq import BullmqQueue
from headgate.store import ingress_retries
from headgate.store.db import Connection, Database
from headgate.telemetry import metrics
from tests.flow.conftest import APP, PATIENCE_SECONDS, eventually
from tests.processes import Process, api, worker
from tests.redis_server import RedisServer, RunningRedis, redis_server

Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
Start = Callable[..., AbstractContextManager[Process]]

SUCCEEDED = "select count(*) = $1 from headgate.workflow_runs where status = 'succeeded'"
WAITING = "select count(*) = $1 from headgate.event_ingress_retries where retry_state = 'scheduled'"
ALL_MET = "select count(*) = 0 from headgate.event_inbox"


@pytest.fixture
def server() -> Iterator[RedisServer | RunningRedis]:
    with redis_server() as started:
        yield started


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[Any]:
    made = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
    await made.flushall()
    yield made
    await made.aclose()


@pytest.fixture
def settings(server: RedisServer) -> dict[str, str]:
    return {"HEADGATE_QUEUE": "bullmq", "HEADGATE_REDIS_URL": server.url}


@pytest.fixture
def start(database_url: str, settings: dict[str, str]) -> Start:
    def with_limit(limit: int | None = None, interval_ms: int = 1000, **env: str) -> AbstractContextManager[Process]:
        limits = [{"source": "noisy", "limit": limit, "interval_ms": interval_ms}] if limit else []
        env = {"HEADGATE_SOURCE_RATE_LIMITS": json.dumps(limits), "HEADGATE_POLL_MS": "1000", **settings, **env}
        return worker(database_url, APP, **env)

    return with_limit


async def publish(connection: Connection, count: int, source: str = "noisy") -> None:
    for n in range(count):
        await connection.execute("select headgate.publish('work.quick', $1, $2)", source, {"n": n})


async def jobs(client: Any) -> dict[str, dict[str, str]]:
    """The wake-ups in Redis, by job id."""
    keys = [key for key in await client.keys("*:event-retry:*") if not key.endswith(":lock")]
    return {key.split(":", 2)[2]: await client.hgetall(key) for key in keys}


async def until(holds: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)


async def held(connection: Connection) -> list[Any]:
    return list(
        await connection.fetch(
            "select * from headgate.event_ingress_retries where retry_state = 'scheduled' order by next_attempt_at"
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
    assert await client.zcard((await client.keys("*:headgate-event-ingress:delayed"))[0]) == 3


async def test_held_events_launch_after_the_pause_and_leave_no_keys(
    database: Database, connection: Connection, client: Any, start: Start, effects: Effects
) -> None:
    with start() as one, start() as two:
        await publish(connection, 1, "warm")  # so that what both workers keep in Redis is there
        await eventually(database, SUCCEEDED, 1)
        await control.pause(database, "noisy", duration_ms=1500, reason="test", actor="test")
        before = await connection.fetchval("select headgate.now()")
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
        "select min(d.launched_at) from headgate.workflow_trigger_deliveries d "
        "join headgate.workflow_events e on e.id = d.event_id where e.source = 'noisy'"
    )
    assert first - before >= timedelta(milliseconds=1400)


async def test_a_cancelled_event_never_launches(
    database: Database, connection: Connection, client: Any, start: Start, effects: Effects
) -> None:
    with start(1, 1000):
        await publish(connection, 3)
        await eventually(database, WAITING, 2)
        last = (await held(connection))[-1]
        await control.cancel_event(database, last["event_id"], "test")
        await eventually(database, SUCCEEDED, 2)
        await until(lambda: _gone(client, str(last["event_id"])))  # its job fired and found nothing to do
    assert len(await effects()) == 2
    assert await connection.fetchval(
        "select retry_state = 'cancelled' from headgate.event_ingress_retries where event_id = $1", last["event_id"]
    )


async def _gone(client: Any, event_id: str) -> bool:
    return not any(event_id in job_id for job_id in await jobs(client))


async def test_flushed_redis_is_refilled_and_nothing_is_lost(
    database: Database, connection: Connection, client: Any, start: Start, effects: Effects
) -> None:
    with start(5, 1000) as process:
        await publish(connection, 40)
        await eventually(database, ALL_MET)
        await until(lambda: jobs(client))
        await eventually(database, "select count(*) > 6 from headgate.workflow_runs")
        await client.flushall()
        found = process.wait_for_line(r"reconcile\.requeued")
        assert '"kind": "events"' in found.string
        await until(lambda: jobs(client))
        await eventually(database, SUCCEEDED, 40)
    assert len({run for run, _ in await effects()}) == len(await effects()) == 40


async def test_requeue_counts_what_was_lost_and_only_that(
    database: Database, connection: Connection, client: Any, server: RedisServer
) -> None:
    await publish(connection, 12)
    ids = [row["id"] for row in await connection.fetch("select id from headgate.workflow_events")]
    await connection.execute("delete from headgate.event_inbox")
    now = await connection.fetchval("select headgate.now()")
    offsets = [timedelta(seconds=-5), *(timedelta(minutes=n) for n in range(1, 11)), timedelta(hours=3)]
    rows = [
        IngressRetry(event_id=event_id, source="noisy", attempts=1, next_attempt_at=now + offset)
        for event_id, offset in zip(ids, offsets, strict=True)
    ]
    await ingress_retries.upsert(connection, rows)
    queue = BullmqQueue(server.url, database)
    requeue = Requeue(database, queue, batch_size=4)
    count = metrics.RECONCILE_REQUEUED.labels("events")._value

    async def one_pass() -> int:
        total = await requeue.run_once()
        while requeue.is_between_pages:
            total += await requeue.run_once()
        return total

    assert await one_pass() == 0  # written just now: their jobs may be on the way
    await connection.execute("update headgate.event_ingress_retries set updated_at = headgate.now() - interval '9 s'")
    before = count.get()
    assert await one_pass() == 10  # neither the one that is due nor the one beyond the hour
    await until(lambda: has_jobs_for(client, [{"event_id": r.event_id, "attempts": 1} for r in rows[1:11]]))
    assert await one_pass() == 0
    await client.flushall()
    assert await one_pass() == 10
    assert count.get() - before == 20
    await queue.close()


async def test_a_start_refills_redis(database: Database, connection: Connection, client: Any, start: Start) -> None:
    with start(1, 600_000):
        await publish(connection, 5)
        await eventually(database, WAITING, 4)
    await client.flushall()
    rows = await held(connection)
    near = [row for row in rows if row["next_attempt_at"] - row["updated_at"] < timedelta(minutes=55)]
    with start():
        await until(lambda: has_jobs_for(client, near))


async def test_pages_beyond_the_first_are_refilled(
    database: Database, connection: Connection, client: Any, start: Start
) -> None:
    with start(1, 10_000, HEADGATE_BATCH_SIZE="10"):
        await publish(connection, 60)
        await eventually(database, WAITING, 59)
        rows = await held(connection)
        await until(lambda: has_jobs_for(client, rows[5:]))
        await client.flushall()
        await until(lambda: has_jobs_for(client, rows[5:]))


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


async def test_early_and_repeated_jobs_start_nothing_early(
    database: Database, connection: Connection, client: Any, start: Start, effects: Effects
) -> None:
    with start(1, 60_000):
        await publish(connection, 3)
        await eventually(database, WAITING, 2)
        rows = await held(connection)
        await until(lambda: has_jobs_for(client, rows))
        [delayed] = await client.keys("*:headgate-event-ingress:delayed")
        marker = delayed.replace(":delayed", ":marker")
        for job in await client.zrange(delayed, 0, -1):
            await client.zadd(delayed, {job: 1})  # due since 1970
        await client.zadd(marker, {"1": 0})
        await until(lambda: _gone(client, str(rows[0]["event_id"])))
        await publish(connection, 1, "other")
        await eventually(database, SUCCEEDED, 2)
        after = await held(connection)
    assert [(r["event_id"], r["attempts"], r["next_attempt_at"]) for r in after] == [
        (r["event_id"], r["attempts"], r["next_attempt_at"]) for r in rows
    ]
    assert len(await effects()) == 2


async def test_a_wrong_or_dead_redis_does_not_keep_a_worker_from_starting(
    database: Database, connection: Connection, start: Start, effects: Effects
) -> None:
    with start(HEADGATE_REDIS_URL="redis://user:hunter2@127.0.0.1:1/0") as process:
        await publish(connection, 3)
        await eventually(database, SUCCEEDED, 3)
        assert "hunter2" not in process.output
