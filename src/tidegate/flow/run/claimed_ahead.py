"""Ahead: runs that a worker has claimed and not begun.

Beyond its slots it claims what they will get through in a moment, so that short runs are claimed in batches; what has
not begun a while later goes back, so that nothing waits here for long runs while another worker is idle.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from tidegate.clock import monotonic
from tidegate.errors import Unavailable
from tidegate.flow.run.execution import Execution
from tidegate.model.run import ClaimedRun
from tidegate.model.step import Closing
from tidegate.store import runs
from tidegate.store.db import Database
from tidegate.telemetry.logs import logger

SHORT_SECONDS, AHEAD_SECONDS, MAX_AHEAD = 0.01, 0.2, 2000
BACK_SECONDS = 0.3

_log = logger("run")


class Ahead:
    """`after_return` hears that something went back."""

    def __init__(self, database: Database, concurrency: int, after_return: Callable[[], None]) -> None:
        self._database = database
        self._concurrency = concurrency
        self._after_return = after_return
        self._ready: deque[Execution] = deque()
        self._typical_seconds: float | None = None
        self._returning: asyncio.Task[None] | None = None
        self._background: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._ready)

    def __iter__(self) -> Iterator[Execution]:
        return iter(self._ready)

    @property
    def most(self) -> int:
        """How many runs the slots will get through in a moment, going by the last ones."""
        if self._typical_seconds is None or self._typical_seconds > SHORT_SECONDS:
            return 0
        return min(MAX_AHEAD, int(self._concurrency * AHEAD_SECONDS / max(self._typical_seconds, 1e-6)))

    def learn(self, seconds: float) -> None:
        """Follow how long a run takes; one that took longer counts less, since it may have waited for the processor."""
        known = seconds if self._typical_seconds is None else self._typical_seconds
        self._typical_seconds = known + (seconds - known) * (0.2 if seconds < known else 0.02)

    def add(self, execution: Execution) -> None:
        self._ready.append(execution)

    def next(self, max_age_seconds: float) -> Execution | None:
        """The oldest, to be begun; None when there is none, or it was claimed so long ago that another may soon have
        it."""
        if not self._ready or monotonic() - self._ready[0].claimed_at > max_age_seconds:
            return None
        return self._ready.popleft()

    def return_later(self) -> None:
        """What is still here after a while goes back."""
        if self._ready and self._returning is None:
            self._returning = asyncio.create_task(self._return_later())

    async def give_back(self) -> None:
        """Let others have it all. If that fails, the leases end by themselves."""
        unbegun = [execution.run for execution in self._ready]
        self._ready.clear()
        if unbegun:
            await self._return(unbegun)

    def give_back_of(self, closing: Closing) -> None:
        """What belongs to a trigger or key that was closed goes back, to be begun when that is open again."""
        held = [one for one in self._ready if _is_of(one.run, closing)]
        for execution in held:
            self._ready.remove(execution)
        if held:
            self._background.add(task := asyncio.create_task(self._return([execution.run for execution in held])))
            task.add_done_callback(self._background.discard)

    async def settle(self) -> None:
        """Wait for what is on its way back."""
        await asyncio.gather(*self._background)

    async def _return_later(self) -> None:
        try:
            while self._ready:
                left = self._ready[0].claimed_at + BACK_SECONDS - monotonic()
                if left > 0:
                    await asyncio.sleep(left)
                else:
                    self._typical_seconds = None  # runs take longer than was thought
                    await self.give_back()
        finally:
            self._returning = None

    async def _return(self, unbegun: list[ClaimedRun]) -> None:
        try:
            async with self._database.transaction() as connection:
                await runs.give_back(connection, unbegun)
            _log.info("run.given_back", count=len(unbegun))
        except Unavailable as exc:
            _log.warning("run.give_back_failed", count=len(unbegun), error=exc)
        finally:
            self._after_return()


def _is_of(run: ClaimedRun, closing: Closing) -> bool:
    """Whether a run belongs to what was closed."""
    return run.trigger_id == closing.trigger_id and closing.concurrency_key in (None, run.concurrency_key)
