"""What a queue is to Tidegate: a way to say "look". A hint lost, doubled, early or late costs latency only."""

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
    """Look at a row when its time has come; the row itself decides whether it is due."""

    topic: Topic
    job_id: str
    row_id: uuid.UUID
    due_at: datetime


class Queue(Protocol):
    """Both implementations pass one behaviour suite."""

    @property
    def holds_wakeups(self) -> bool:
        """Whether `schedule` leaves something behind that can be lost."""

    def wake(self, topic: Topic) -> asyncio.Event:
        """Set whenever there may be work on the topic; who waits on it clears it before looking."""

    def hint(self, topic: Topic) -> None:
        """Say that there is work now; returns at once and never fails."""

    def schedule(self, wakeups: Sequence[Wakeup]) -> None:
        """Say when there will be work; returns at once and never fails."""

    async def missing(self, wakeups: Sequence[Wakeup]) -> list[Wakeup]:
        """Those of the wake-ups that the queue does not hold; none when it cannot be asked. Never fails."""

    async def trouble(self) -> str | None:
        """What is wrong with the queue, if anything; never fails, and names no address."""

    def start_listening(self) -> None:
        """Begin to receive hints."""

    async def close(self) -> None:
        """Stop sending and receiving."""
