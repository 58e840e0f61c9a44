"""The interface of a queue: hints to check for work. A lost, duplicate, early or late hint costs latency only."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Literal, NamedTuple, Protocol, get_args

# inbox: new events · retries: held events that come due · plans: sources whose events need new slots ·
# deliveries: held deliveries that come due · runs: new runs
Topic = Literal["inbox", "retries", "plans", "deliveries", "runs"]
TOPICS: tuple[Topic, ...] = get_args(Topic)


class Wakeup(NamedTuple):
    """A request to check a row at a time; the row decides whether it is due."""

    topic: Topic
    job_id: str
    row_id: uuid.UUID
    due_at: datetime


class Queue(Protocol):
    """A queue; both implementations pass the same contract tests."""

    @property
    def holds_wakeups(self) -> bool:
        """Whether `schedule` stores wake-ups that can be lost."""

    def wake(self, topic: Topic) -> asyncio.Event:
        """Set whenever there may be work on the topic; a waiter clears it before it checks for work."""

    def hint(self, topic: Topic) -> None:
        """Announce that there is work now; returns immediately and never raises."""

    def schedule(self, wakeups: Sequence[Wakeup]) -> None:
        """Announce when there will be work; returns immediately and never raises."""

    async def missing(self, wakeups: Sequence[Wakeup]) -> list[Wakeup]:
        """The wake-ups that the queue does not have; empty if the queue does not answer. Never raises."""

    async def trouble(self) -> str | None:
        """A problem with the queue, if there is one; never raises, and does not contain an address."""

    def start_listening(self) -> None:
        """Start receiving hints."""

    async def close(self) -> None:
        """Stop sending and receiving."""
