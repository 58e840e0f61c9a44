"""One behaviour for both queues, on real servers: a hint lost, doubled, early or late costs latency only."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import pytest

from tests.redis_server import redis_server
from tidegate.embedded import EmbeddedPostgres
from tidegate.queue.bullmq import BullmqQueue
from tidegate.queue.port import TOPICS, Queue, Topic, Wakeup
from tidegate.queue.postgres import PostgresQueue
from tidegate.store.db import Database

PATIENCE_SECONDS = 60
JOBS: dict[Topic, str] = {"retries": "event-retry", "deliveries": "event-trigger-retry"}
for_each_kind = pytest.mark.parametrize("topic", JOBS)


class Server(Protocol):
    def start(self) -> object: ...
    def stop(self) -> None: ...


class Backend:
    """Queue objects as different processes would have them, and the server behind them."""

    def __init__(self, server: Server, database: Database, redis_url: str | None) -> None:
        self.server = server
        self._database = database
        self._redis_url = redis_url
        self.opened: list[Queue] = []

    def queue(self, *, listens: bool = False) -> Queue:
        made: Queue = BullmqQueue(self._redis_url, self._database) if self._redis_url else PostgresQueue(self._database)
        if listens:
            made.start_listening()
        self.opened.append(made)
        return made


@pytest.fixture(scope="module")
def own_postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A server that tests may stop."""
    server = EmbeddedPostgres(Path(tmp_path_factory.mktemp("queue")))
    server.start()
    yield server
    server.stop()


@pytest.fixture(params=["postgres", "bullmq"])
async def backend(
    request: pytest.FixtureRequest, quiet: Database, own_postgres: EmbeddedPostgres
) -> AsyncIterator[Backend]:
    if request.param == "postgres":
        own = Database(own_postgres.url(), "test", size=4)
        made = Backend(own_postgres, own, None)
        yield made
        await asyncio.gather(*(queue.close() for queue in made.opened))
        await own.close()
    else:
        with redis_server() as server:
            made = Backend(server, quiet, server.url)
            yield made
            await asyncio.gather(*(queue.close() for queue in made.opened))


def wakeup(topic: Topic = "retries", seconds: float = 0.0, attempt: int = 1) -> Wakeup:
    row_id = uuid.uuid4()
    return Wakeup(topic, f"{JOBS[topic]}:{row_id}:{attempt}", row_id, datetime.now(UTC) + timedelta(seconds=seconds))


async def woken(queue: Queue, topic: Topic) -> bool:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await queue.wake(topic).wait()


async def hears(listener: Queue, speaker: Queue, topic: Topic) -> bool:
    """The listener is connected and a hint reaches it; sent again and again, as each alone may be lost."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            listener.wake(topic).clear()
            speaker.hint(topic)
            try:
                async with asyncio.timeout(1):
                    return await woken(listener, topic)
            except TimeoutError:
                continue


@pytest.mark.parametrize("topic", TOPICS)
async def test_a_hint_wakes_a_listener_elsewhere(backend: Backend, topic: Topic) -> None:
    speaker, listener = backend.queue(), backend.queue(listens=True)
    assert await hears(listener, speaker, topic)


async def test_a_hint_wakes_this_process_at_once(backend: Backend) -> None:
    queue = backend.queue()
    queue.hint("inbox")
    assert queue.wake("inbox").is_set()
    assert not queue.wake("runs").is_set()


async def test_many_hints_are_as_one(backend: Backend) -> None:
    speaker, listener = backend.queue(), backend.queue(listens=True)
    assert await hears(listener, speaker, "runs")
    listener.wake("runs").clear()
    for _ in range(1000):
        speaker.hint("runs")
    assert await woken(listener, "runs")


async def test_what_was_said_before_anybody_listened_is_not_waited_for(backend: Backend) -> None:
    backend.queue().hint("inbox")
    listener = backend.queue(listens=True)
    assert all([await woken(listener, topic) for topic in TOPICS])  # it cannot know what it missed


@for_each_kind
async def test_schedule_makes_this_process_look_up_when_the_next_is_due(backend: Backend, topic: Topic) -> None:
    queue = backend.queue()
    queue.schedule([wakeup(topic, seconds=30)])
    assert [other for other in TOPICS if queue.wake(other).is_set()] == [topic]


@for_each_kind
async def test_any_wakeup_may_be_scheduled_any_number_of_times(backend: Backend, topic: Topic) -> None:
    speaker, listener = backend.queue(), backend.queue(listens=True)
    assert await hears(listener, speaker, topic)
    same = wakeup(topic, seconds=0.2)
    for wakeups in ([], [same, same], [same], [wakeup(topic, -3600)], [wakeup(topic, 86_400 * 365)]):
        speaker.schedule(wakeups)
    speaker.schedule([wakeup(topic, n / 1000) for n in range(20_000)])
    assert await hears(listener, speaker, topic)


async def test_nothing_is_missing_that_was_just_scheduled_or_cannot_be(backend: Backend) -> None:
    queue = backend.queue()
    made = [wakeup(topic, seconds=60) for topic in JOBS for _ in range(3)]
    queue.schedule(made)
    assert await queue.missing([]) == []
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if not await queue.missing(made):
                break
            await asyncio.sleep(0.01)


async def test_nothing_fails_or_waits_while_the_backend_is_down(backend: Backend) -> None:
    queue, listener = backend.queue(), backend.queue(listens=True)
    assert await hears(listener, queue, "inbox")
    backend.server.stop()
    try:
        for _ in range(50):
            # Neither is a coroutine, so neither can wait for the server.
            for topic in TOPICS:
                queue.hint(topic)
            queue.schedule([wakeup(seconds=1) for _ in range(100)])
            assert await queue.missing([wakeup(seconds=1)]) == []
            await asyncio.sleep(0.01)
        assert all(queue.wake(topic).is_set() for topic in TOPICS)
        async with asyncio.timeout(PATIENCE_SECONDS):
            await queue.close()
            await listener.close()
    finally:
        backend.server.start()


async def test_a_listener_survives_a_restart_of_the_backend(backend: Backend) -> None:
    speaker, listener = backend.queue(), backend.queue(listens=True)
    assert await hears(listener, speaker, "inbox")
    backend.server.stop()
    speaker.hint("inbox")
    backend.server.start()
    assert await hears(listener, speaker, "inbox")
    assert await hears(listener, speaker, "runs")


async def test_a_queue_that_starts_before_its_backend(backend: Backend) -> None:
    backend.server.stop()
    try:
        speaker, listener = backend.queue(), backend.queue(listens=True)
        for _ in range(5):
            speaker.hint("runs")
            await asyncio.sleep(0.02)
    finally:
        backend.server.start()
    assert await hears(listener, speaker, "runs")


async def test_close_leaves_nothing_behind(backend: Backend) -> None:
    before = asyncio.all_tasks()
    speaker, listener = backend.queue(), backend.queue(listens=True)
    assert await hears(listener, speaker, "inbox")
    speaker.schedule([wakeup(seconds=5)])
    async with asyncio.timeout(PATIENCE_SECONDS):
        for queue in (speaker, listener):
            await queue.close()
            await queue.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() <= before
    speaker.hint("inbox")  # a late hint is harmless
    await speaker.close()
