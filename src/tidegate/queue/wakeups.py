"""Wake-ups for waiting rows: the job ids that operators see, and how many are scheduled per second."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Protocol

from tidegate.model.ids import EventId
from tidegate.queue.port import Wakeup

# Rows due later get their wake-up once they are due within the hour; until then the row is enough.
HORIZON = timedelta(hours=1)
# One poll takes every due row: more polls within a second start nothing earlier and cost a millisecond each.
MAX_PER_SECOND = 200


class WaitingEvent(Protocol):
    """The fields of a held event that a wake-up needs."""

    @property
    def event_id(self) -> EventId: ...
    @property
    def attempts(self) -> int: ...
    @property
    def next_attempt_at(self) -> datetime | None: ...


class WaitingDelivery(Protocol):
    """The fields of a held delivery that a wake-up needs."""

    @property
    def id(self) -> uuid.UUID: ...
    @property
    def retry_attempts(self) -> int: ...
    @property
    def next_attempt_at(self) -> datetime | None: ...


def event_wakeups(retries: Iterable[WaitingEvent]) -> list[Wakeup]:
    """`event-retry:<event_id>:<attempt>` for each held event."""
    return [
        Wakeup("retries", f"event-retry:{retry.event_id}:{retry.attempts}", retry.event_id, retry.next_attempt_at)
        for retry in retries
        if retry.next_attempt_at is not None
    ]


def delivery_wakeups(deliveries: Iterable[WaitingDelivery]) -> list[Wakeup]:
    """`event-trigger-retry:<delivery_id>:<attempt>` for each held delivery."""
    return [
        Wakeup("deliveries", f"event-trigger-retry:{held.id}:{held.retry_attempts}", held.id, held.next_attempt_at)
        for held in deliveries
        if held.next_attempt_at is not None
    ]


def step_wakeups(steps: Iterable[WaitingDelivery]) -> list[Wakeup]:
    """`run-step-retry:<step_id>:<attempt>` for each step that waits for a retry, or timer."""
    return [
        Wakeup("runs", f"run-step-retry:{step.id}:{step.retry_attempts}", step.id, step.next_attempt_at)
        for step in steps
        if step.next_attempt_at is not None
    ]


class Spacing:
    """Tracks the wake-ups of each topic and second, and limits their number."""

    def __init__(self) -> None:
        self._known: defaultdict[tuple[str, int], set[int]] = defaultdict(set)

    def count(self, wakeup: Wakeup) -> None:
        """Record an existing wake-up."""
        self._known[_second(wakeup)].add(hash(wakeup.job_id))

    def admit(self, wakeup: Wakeup) -> bool:
        """Whether a wake-up is within the limit, or already exists."""
        known, job = self._known[_second(wakeup)], hash(wakeup.job_id)
        if len(known) >= MAX_PER_SECOND and job not in known:
            return False
        known.add(job)
        return True

    def forget_before(self, now: datetime) -> None:
        """Drop the seconds that have passed."""
        limit = int(now.timestamp())
        for key in [key for key in self._known if key[1] < limit]:
            del self._known[key]


def _second(wakeup: Wakeup) -> tuple[str, int]:
    return wakeup.topic, int(wakeup.due_at.timestamp())
