"""The parts of the queues that need no server: which one is chosen, what is worth sending, and when to stop trying."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest

from tidegate.errors import SettingsError
from tidegate.model.delivery import Delivery
from tidegate.model.ingress_retry import IngressRetry
from tidegate.queue import sender as sender_module
from tidegate.queue.bullmq import QUEUES, TRIGGERS
from tidegate.queue.choose import open_queue
from tidegate.queue.port import TOPICS, Topic, Wakeup
from tidegate.queue.postgres import PostgresQueue
from tidegate.queue.sender import BULK, MAX_BUFFERED, Sender
from tidegate.queue.wakeups import MAX_PER_SECOND, Spacing, delivery_wakeups, event_wakeups
from tidegate.settings import Settings
from tidegate.store.db import Database

DATABASE = Database("postgresql://nobody@nowhere/none", "test", size=1)
AT = datetime(2030, 1, 1, tzinfo=UTC)


def wakeup(at: datetime = AT, topic: Topic = "retries") -> Wakeup:
    row_id = uuid.uuid4()
    return Wakeup(topic, f"event-retry:{row_id}:1", row_id, at)


def test_postgres_is_the_default() -> None:
    assert isinstance(open_queue(Settings(), DATABASE), PostgresQueue)


async def test_bullmq_when_asked_for() -> None:
    queue = open_queue(Settings(queue="bullmq", redis_url="redis://localhost:1/0"), DATABASE)
    assert type(queue).__name__ == "BullmqQueue"
    await queue.close()


def test_bullmq_without_its_packages_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tidegate.queue.bullmq", raising=False)
    monkeypatch.setitem(sys.modules, "bullmq", None)
    with pytest.raises(SettingsError, match=r"with the extra .bullmq."):
        open_queue(Settings(queue="bullmq", redis_url="redis://localhost/0"), DATABASE)


def test_bullmq_needs_a_redis() -> None:
    with pytest.raises(SettingsError, match="TIDEGATE_REDIS_URL is not set"):
        Settings(queue="bullmq")


@pytest.mark.parametrize("address", ["redis://h", "redis://u:p@h:6380/2", "rediss://:p%2Fw@h", "unix:///run/r.sock"])
def test_addresses_of_redis(address: str) -> None:
    assert Settings(queue="bullmq", redis_url=address).redis_url == address


@pytest.mark.parametrize(
    "address", ["", "h:6379", "http://h", "redis://", "redis://:hunter2/x@h", "redis://h:hunter2", "postgresql://h"]
)
def test_wrong_address_of_redis_is_refused_without_showing_it(address: str) -> None:
    with pytest.raises(SettingsError, match="TIDEGATE_REDIS_URL must be an address") as caught:
        Settings(queue="bullmq", redis_url=address)
    assert "hunter2" not in str(caught.value)


def test_a_held_event_has_a_wakeup_when_it_has_a_time() -> None:
    held = IngressRetry(event_id=uuid.uuid4(), source="s", attempts=3, next_attempt_at=AT)
    assert event_wakeups([held, msgspec.structs.replace(held, next_attempt_at=None)]) == [
        Wakeup("retries", f"event-retry:{held.event_id}:3", held.event_id, AT)
    ]


def test_a_held_delivery_has_a_wakeup_when_it_has_a_time() -> None:
    held = Delivery(
        id=uuid.uuid4(), trigger_id=uuid.uuid4(), event_id=uuid.uuid4(), status="throttled", attempts=7,
        retry_state="scheduled", retry_attempts=2, next_attempt_at=AT,
    )  # fmt: skip
    assert delivery_wakeups([held, msgspec.structs.replace(held, next_attempt_at=None)]) == [
        Wakeup("deliveries", f"event-trigger-retry:{held.id}:2", held.id, AT)
    ]


def test_every_topic_has_a_queue_in_redis() -> None:
    assert tuple(QUEUES) == TOPICS
    assert [topic for topic, name in QUEUES.items() if name == TRIGGERS] == ["deliveries"]


def test_spacing_has_room_for_so_many_in_a_second() -> None:
    spacing = Spacing()
    crowd = [wakeup(AT + timedelta(microseconds=n)) for n in range(MAX_PER_SECOND)]
    assert all(spacing.admit(one) for one in crowd)
    assert not spacing.admit(wakeup())
    assert spacing.admit(crowd[0])  # the same again is no more
    assert spacing.admit(wakeup(AT + timedelta(seconds=1)))
    assert spacing.admit(wakeup(topic="deliveries"))
    spacing.forget_before(AT + timedelta(seconds=1))
    assert spacing.admit(wakeup())


class Backend:
    """Takes what is delivered, refuses, or never answers."""

    def __init__(self) -> None:
        self.received: list[tuple[list[Topic], int]] = []
        self.does: str = "accept"

    async def __call__(self, topics: Sequence[Topic], wakeups: Sequence[Wakeup]) -> None:
        if self.does == "refuse":
            raise ConnectionError("no")
        if self.does == "hang":
            await asyncio.Event().wait()
        self.received.append((list(topics), len(wakeups)))


async def settled(sender: Sender) -> None:
    while sender._task is not None and not sender._task.done():
        await asyncio.wait({sender._task})


async def test_hints_close_together_are_one_and_wakeups_go_in_bulk() -> None:
    backend = Backend()
    sender = Sender(backend)
    for _ in range(100):
        sender.hint("inbox")
    sender.schedule(wakeup() for _ in range(BULK + 1))
    await settled(sender)
    assert backend.received == [(["inbox"], BULK), ([], 1)]
    assert sender.dropped == 0
    await sender.close()


@pytest.mark.parametrize("fault", ["refuse", "hang"])
async def test_after_failures_the_backend_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(sender_module, "CALL_SECONDS", 0.01)
    now = [1000.0]
    monkeypatch.setattr(sender_module, "monotonic", lambda: now[0])
    backend = Backend()
    backend.does = fault
    sender = Sender(backend)
    for n in range(sender_module.FAILURES_TO_OPEN):
        assert not sender.is_backing_off
        sender.hint("inbox")
        await settled(sender)
        assert sender.dropped == n + 1
    assert sender.is_backing_off
    backend.does = "accept"
    sender.hint("inbox")
    await settled(sender)
    assert backend.received == []
    now[0] += sender_module.OPEN_SECONDS
    sender.hint("runs")
    await settled(sender)
    assert backend.received == [(["runs"], 0)]
    await sender.close()


async def test_the_buffer_is_bounded() -> None:
    backend = Backend()
    sender = Sender(backend)
    sender.schedule(wakeup() for _ in range(MAX_BUFFERED + 7))
    assert sender.dropped == 7
    await settled(sender)
    assert sum(count for _, count in backend.received) == MAX_BUFFERED
    await sender.close()


async def test_close_does_not_wait_for_a_backend_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "CALL_SECONDS", 3600)
    monkeypatch.setattr(sender_module, "_FLUSH_SECONDS", 0.01)
    backend = Backend()
    backend.does = "hang"
    sender = Sender(backend)
    sender.hint("inbox")
    await asyncio.sleep(0)
    await sender.close()
    task: Any = sender._task
    assert task.cancelled()
    sender.hint("inbox")
    assert sender.dropped == 1
