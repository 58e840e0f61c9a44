"""The traps of the bullmq package that matter, and our queue's immunity.

The tests named `trap` assert what the library does wrong: one that fails after an upgrade says that a workaround may
go.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import bullmq
import pytest

from tests.redis_server import RedisServer, client_fixture, server_fixture  # noqa: F401
from tidegate.queue import bullmq as ours
from tidegate.queue import sender
from tidegate.queue.bullmq import HINT_IDS, INGRESS, QUEUES, TRIGGERS, BullmqQueue
from tidegate.queue.port import Topic, Wakeup
from tidegate.queue.wakeups import MAX_PER_SECOND
from tidegate.store.db import Database

PATIENCE_SECONDS = 60
OTHERS = {"removeOnComplete": True, "removeOnFail": True}
RawWorker = Callable[[Callable[[Any], Awaitable[None]]], Any]


@pytest.fixture
async def raw(client: Any) -> bullmq.Queue:
    """The library's queue as it comes."""
    return bullmq.Queue("raw", {"connection": client})


@pytest.fixture
async def queue(server: RedisServer, quiet: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BullmqQueue]:
    """What is sent arrives, however slow the machine is: otherwise a wake-up that takes long is dropped."""
    monkeypatch.setattr(sender, "CALL_SECONDS", PATIENCE_SECONDS)
    made = BullmqQueue(server.url, quiet)
    yield made
    await made.close()


@pytest.fixture
async def listener(server: RedisServer, quiet: Database, client: Any) -> AsyncIterator[BullmqQueue]:
    """A queue of another process, connected and quiet."""
    made = BullmqQueue(server.url, quiet)
    made.start_listening()
    await eventually(lambda: _fetching(client))
    for topic in QUEUES:
        made.wake(topic).clear()
    yield made
    await made.close()


async def _fetching(client: Any) -> bool:
    """All listeners wait for jobs."""
    blocked = [c for c in await client.client_list() if c["cmd"] == "bzpopmin"]
    return len(blocked) == len(set(QUEUES.values()))


async def eventually(holds: Callable[[], Awaitable[Any]]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.01)


def wakeup(seconds: float, attempt: int = 1, row_id: uuid.UUID | None = None, topic: Topic = "retries") -> Wakeup:
    row_id = row_id or uuid.uuid4()
    name = {"retries": "event-retry", "deliveries": "event-trigger-retry"}[topic]
    return Wakeup(topic, f"{name}:{row_id}:{attempt}", row_id, datetime.now(UTC) + timedelta(seconds=seconds))


async def jobs(client: Any) -> list[str]:
    kinds = ("event-retry", "event-trigger-retry", "wake")
    return sorted([key for kind in kinds for key in await client.keys(f"*:{kind}:*")])


async def run_raw(client: Any, name: str, handler: Any) -> asyncio.Task[None]:
    return asyncio.create_task(bullmq.Worker(name, handler, {"connection": client, "autorun": False}).run())


async def test_trap_an_id_that_exists_is_silently_ignored(raw: bullmq.Queue) -> None:
    await raw.add("x", {}, {"jobId": "event-retry:a:1", "delay": 60_000})
    await raw.add("x", {}, {"jobId": "event-retry:a:1", "delay": 1})
    assert await raw.client.hget(raw.toKey("event-retry:a:1"), "delay") == "60000"
    assert await raw.client.zcard(raw.toKey("delayed")) == 1


async def test_the_next_attempt_has_an_id_of_its_own(client: Any, queue: BullmqQueue) -> None:
    row_id = uuid.uuid4()
    queue.schedule([wakeup(60, 1, row_id), wakeup(30, 2, row_id)])
    await eventually(lambda: _count(client, 2))
    assert [key.partition("event-retry:")[2] for key in await jobs(client)] == [f"{row_id}:1", f"{row_id}:2"]


async def test_a_hint_is_not_lost_to_the_one_before(client: Any, queue: BullmqQueue, listener: BullmqQueue) -> None:
    for _ in range(2 * HINT_IDS):
        listener.wake("inbox").clear()
        queue.hint("inbox")
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert await listener.wake("inbox").wait()


async def test_hints_nobody_takes_do_not_pile_up(client: Any, queue: BullmqQueue) -> None:
    for _ in range(HINT_IDS + 10):
        queue.hint("inbox")
        await asyncio.sleep(0.025)
    assert 1 < len(await jobs(client)) <= HINT_IDS


async def test_trap_a_cancellation_in_a_handler_ends_the_worker(client: Any, raw: bullmq.Queue) -> None:
    async def handler(job: Any, _: str) -> None:
        raise asyncio.CancelledError

    running = await run_raw(client, "raw", handler)
    await raw.add("x", {}, OTHERS)
    done, _ = await asyncio.wait({running}, timeout=PATIENCE_SECONDS)
    assert done == {running}


@pytest.mark.parametrize("error", [asyncio.CancelledError(), ValueError("no"), SystemExit(1)])
async def test_nothing_leaves_our_handler(
    client: Any, queue: BullmqQueue, listener: BullmqQueue, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    failed = asyncio.Event()

    class Broken(asyncio.Event):
        def set(self) -> None:
            failed.set()
            raise error

    with monkeypatch.context() as patch:
        patch.setitem(listener._wakes, "inbox", Broken())
        queue.hint("inbox")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await failed.wait()
    queue.hint("plans")  # the same library worker
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await listener.wake("plans").wait()
    await eventually(lambda: _count(client, 0))


async def test_a_listener_whose_loop_ended_is_started_again(
    client: Any, queue: BullmqQueue, quiet: Database, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    class Dies(bullmq.Worker):  # type: ignore[misc]
        async def run(self) -> None:
            if len(ended) < 2:
                ended.append(self.name)
                raise asyncio.CancelledError  # what a raw worker does, see above
            await super().run()

    monkeypatch.setattr(ours.bullmq, "Worker", Dies)
    monkeypatch.setattr(ours, "_RESTART_SECONDS", (0.01,))
    listener = BullmqQueue(server.url, quiet)
    listener.start_listening()
    await eventually(lambda: _fetching(client))
    assert len(ended) == 2
    await listener.close()


async def test_a_listener_that_is_silent_is_started_again(
    client: Any, quiet: Database, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung: list[str] = []

    class Hangs(bullmq.Worker):  # type: ignore[misc]
        async def run(self) -> None:
            if self.name not in hung:
                hung.append(self.name)
                await asyncio.Event().wait()
            await super().run()

    monkeypatch.setattr(ours.bullmq, "Worker", Hangs)
    monkeypatch.setattr(ours, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(ours, "_WATCH_SECONDS", 0.05)
    monkeypatch.setattr(ours, "_RESTART_SECONDS", (0.01,))
    monkeypatch.setattr(ours, "WORKER_OPTIONS", {**ours.WORKER_OPTIONS, "drainDelay": 0.05})
    listener = BullmqQueue(server.url, quiet)
    listener.start_listening()
    await eventually(lambda: _fetching(client))
    assert sorted(hung) == sorted(set(QUEUES.values()))
    await listener.close()


async def test_trap_add_waits_while_redis_is_down(server: RedisServer) -> None:
    raw = bullmq.Queue("raw", {"connection": server.url})
    await raw.add("x", {}, OTHERS)
    server.stop()
    adding = asyncio.create_task(raw.add("x", {}, OTHERS))
    done, _ = await asyncio.wait({adding}, timeout=1)
    assert not done
    adding.cancel()
    await asyncio.gather(adding, return_exceptions=True)


async def test_ours_gives_up_counts_and_recovers(
    client: Any, server: RedisServer, queue: BullmqQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.queue.sender.OPEN_SECONDS", 0.1)
    server.stop()
    while not queue._sender.is_backing_off:
        queue.schedule([wakeup(60)])
        await asyncio.sleep(0.01)
    before = queue.dropped
    queue.schedule([wakeup(60)])
    assert queue.dropped > max(before, 2)
    server.start()

    async def arrives() -> bool:
        queue.schedule([wakeup(60)])
        return await queue._client.dbsize() > 0

    await eventually(arrives)


async def test_trap_kept_jobs_are_the_default(client: Any, raw: bullmq.Queue) -> None:
    async def handler(job: Any, _: str) -> None: ...

    running = await run_raw(client, "raw", handler)
    await raw.add("x", {}, {"jobId": "event-retry:a:1"})
    await eventually(lambda: client.zcard(raw.toKey("completed")))
    assert await client.exists(raw.toKey("event-retry:a:1"))
    running.cancel()
    await asyncio.wait({running}, timeout=1)


async def test_ours_keeps_none(client: Any, queue: BullmqQueue, listener: BullmqQueue) -> None:
    queue.schedule([wakeup(0.05 * n) for n in range(10)])
    queue.hint("runs")
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await listener.wake("retries").wait()
    await eventually(lambda: _count(client, 0))


@pytest.mark.parametrize("topic", ["retries", "deliveries"])
async def test_a_wakeup_comes_at_about_its_time(queue: BullmqQueue, listener: BullmqQueue, topic: Topic) -> None:
    due = wakeup(0.7, topic=topic)
    queue.schedule([due])
    async with asyncio.timeout(PATIENCE_SECONDS):
        await listener.wake(topic).wait()
    assert datetime.now(UTC) >= due.due_at - timedelta(milliseconds=5)
    assert [other for other in QUEUES if listener.wake(other).is_set()] == [topic]


@pytest.mark.parametrize(("topic", "name"), [("retries", INGRESS), ("deliveries", TRIGGERS)])
async def test_job_data_is_ids_only_and_options_are_pinned(
    client: Any, queue: BullmqQueue, topic: Topic, name: str
) -> None:
    one = wakeup(60, topic=topic)
    queue.schedule([one])
    await eventually(lambda: _count(client, 1))
    [key] = await jobs(client)
    prefix = key.partition(":")[0]
    assert key == f"{prefix}:{name}:{one.job_id}"
    job = await client.hgetall(key)
    assert (job["name"], job["data"]) == (topic, f'{{"installation":"{prefix}","ids":["{one.row_id}"]}}')
    assert 50_000 < int(job["delay"]) <= 60_000
    options = queue._client.connection_pool.connection_kwargs
    assert (options["socket_timeout"], options["socket_keepalive"], options["health_check_interval"]) == (30, True, 15)
    assert ours.WORKER_OPTIONS == {
        "autorun": False, "concurrency": 1, "maxStalledCount": 1000, "runRetryDelay": 1000, "lockDuration": 30_000,
        "stalledInterval": 5000, "drainDelay": 1, "removeOnComplete": True, "removeOnFail": True,
    }  # fmt: skip


async def test_far_and_crowded_wakeups_are_left_to_the_rows(client: Any, queue: BullmqQueue) -> None:
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=5)
    crowd = [wakeup(0)._replace(due_at=at + timedelta(milliseconds=n)) for n in range(500)]
    far, near = wakeup(3700), wakeup(30)
    queue.schedule([far])
    queue.schedule(crowd)
    queue.schedule([near])
    await eventually(lambda: _count(client, MAX_PER_SECOND + 1))
    made = {key.partition(":")[2].partition(":")[2] for key in await jobs(client)}
    assert near.job_id in made and far.job_id not in made


async def test_what_redis_has_lost_is_missing(client: Any, queue: BullmqQueue) -> None:
    at = datetime.now(UTC).replace(microsecond=0) + timedelta(minutes=5)
    made = [wakeup(0)._replace(due_at=at) for _ in range(MAX_PER_SECOND)]
    queue.schedule(made)
    await eventually(lambda: _count(client, MAX_PER_SECOND))
    assert await queue.missing(made) == []
    await client.delete((await jobs(client))[0])
    assert len(await queue.missing(made)) == 1
    await client.flushall()
    assert await queue.missing(made) == made
    queue.schedule(made)
    queue.schedule(made)
    await eventually(lambda: _count(client, MAX_PER_SECOND))


async def test_foreign_and_broken_jobs_are_ignored(client: Any, queue: BullmqQueue, listener: BullmqQueue) -> None:
    prefix = await queue._open()
    intruder = bullmq.Queue(INGRESS, {"connection": client, "prefix": prefix})
    for name, data in (("inbox", {"installation": "other"}), ("other", {"installation": prefix}), ("inbox", [1])):
        await intruder.add(name, data, OTHERS)
    await eventually(lambda: _is_empty(client, prefix))
    assert not listener.wake("inbox").is_set()
    queue.hint("inbox")
    async with asyncio.timeout(PATIENCE_SECONDS):
        await listener.wake("inbox").wait()


async def test_two_installations_on_one_redis_do_not_mix(
    client: Any, server: RedisServer, queue: BullmqQueue, empty_database_url: str, listener: BullmqQueue
) -> None:
    other_database = Database(empty_database_url, "test", size=1)
    async with other_database.connection() as connection:
        await connection.execute("create schema tidegate")
        await connection.execute("create table tidegate.installation as select gen_random_uuid() as id")
    other = BullmqQueue(server.url, other_database)
    assert await other._open() != await queue._open()
    other.hint("inbox")
    await eventually(lambda: _count(client, 1))
    assert not listener.wake("inbox").is_set()
    await other.close()
    await other_database.close()


async def _count(client: Any, expected: int) -> bool:
    return len(await jobs(client)) == expected


async def _is_empty(client: Any, prefix: str) -> bool:
    waiting: int = await client.llen(f"{prefix}:{INGRESS}:wait") + await client.llen(f"{prefix}:{INGRESS}:active")
    return waiting == 0
