"""Sends hints and wake-ups to a backend that may be slow or down, in the background.

The buffer is bounded, every call has a timeout, and after failures the backend is not called for a while. What does not
fit or cannot be sent is dropped and counted: workers find the due rows by polling Postgres.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.queue.port import Topic, Wakeup
from tidegate.telemetry.logs import logger

Deliver = Callable[[Sequence[Topic], Sequence[Wakeup]], Awaitable[None]]

CALL_SECONDS = 0.2
MAX_BUFFERED = 10_000
BULK = 100
MIN_GAP_SECONDS = 0.02
FAILURES_TO_OPEN = 3
OPEN_SECONDS = 5.0
_FLUSH_SECONDS = 0.3

_log = logger("queue")


class Sender:
    """One per process and backend; `hint` and `schedule` return immediately and never raise."""

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._topics: set[Topic] = set()
        self._wakeups: deque[Wakeup] = deque()
        self._task: asyncio.Task[None] | None = None
        self._failures = 0
        self._rests_until = 0.0
        self._is_stopped = False
        self.dropped = 0

    @property
    def is_backing_off(self) -> bool:
        """Whether the backend is not called for now, after failures."""
        return monotonic() < self._rests_until

    def hint(self, topic: Topic) -> None:
        self._topics.add(topic)
        self._begin()

    def schedule(self, wakeups: Iterable[Wakeup]) -> None:
        for wakeup in wakeups:
            if len(self._wakeups) < MAX_BUFFERED:
                self._wakeups.append(wakeup)
            else:
                self.dropped += 1
        self._begin()

    async def close(self) -> None:
        """Send what is buffered, within a time limit, then stop."""
        self._is_stopped = True
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_FLUSH_SECONDS)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> None:
        if self._is_stopped or self.is_backing_off:
            self._drop_all()
        elif self._task is None or self._task.done():
            self._task = asyncio.create_task(self._send())

    async def _send(self) -> None:
        while self._topics or self._wakeups:
            topics, self._topics = sorted(self._topics), set()
            wakeups = [self._wakeups.popleft() for _ in range(min(BULK, len(self._wakeups)))]
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    await self._deliver(topics, wakeups)
                failpoints.hit("queue.after_send")
                self._succeeded()
            except Exception as exc:  # noqa: BLE001 - a lost hint costs latency: workers poll
                self.dropped += len(topics) + len(wakeups)
                self._failed(exc)
            if not self._wakeups and not self._is_stopped:
                await asyncio.sleep(MIN_GAP_SECONDS)  # hints close together are merged

    def _succeeded(self) -> None:
        if self._failures >= FAILURES_TO_OPEN:
            _log.info("queue.sender_recovered", dropped=self.dropped)
        self._failures = 0

    def _failed(self, exc: Exception) -> None:
        self._failures += 1
        if self._failures >= FAILURES_TO_OPEN:
            self._rests_until = monotonic() + OPEN_SECONDS
            self._drop_all()
        if self._failures == FAILURES_TO_OPEN:  # logged once per outage
            _log.warning("queue.sender_unavailable", error=exc, reason="workers poll for due rows meanwhile")

    def _drop_all(self) -> None:
        self.dropped += len(self._topics) + len(self._wakeups)
        self._topics.clear()
        self._wakeups.clear()
