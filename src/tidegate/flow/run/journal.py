"""Journal: what one run has written of its steps, and will write in a moment.

A step's outcome waits a moment for the end of its run, to be written with it; whatever comes first sends it: that
moment, the next step, a wait, or the end. All that is written names the claim: when that is lost, nothing counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate.model.run import FinishedRun
from tidegate.model.step import RunOutcome, StepWrite, SuspendedRun

SOON_SECONDS = 0.001


class Stop(BaseException):
    """Unwinds a workflow's function; not an Exception, so that its own handlers let it pass."""


class Cancelled(Stop):
    """Someone asked for the run to be cancelled."""


class LeaseLost(Stop):
    """The run belongs to another worker now; whatever is done here does not count."""


class Written(NamedTuple):
    """Whether a write counted (the claim still held), whether the run is to be cancelled, and when the step goes on."""

    is_kept: bool
    is_cancel_requested: bool = False
    next_attempt_at: datetime | None = None


class RecordedOutcome(NamedTuple):
    """What became of an Outcome: of each of its steps, and of the end."""

    steps: list[Written]
    end: Written


Put = Callable[[RunOutcome, Callable[[RecordedOutcome | BaseException], None]], None]


class Soon:
    """Has journals send what they have taken in, a moment later; one timer serves all of a process."""

    def __init__(self) -> None:
        self._waiting: list[Journal] = []

    def add(self, journal: Journal) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_later(SOON_SECONDS, self._ring)
        self._waiting.append(journal)

    def _ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for journal in waiting:
            journal.send()


class Journal:
    """The writes of one attempt at one run. `put` hands them to the group commit."""

    __slots__ = ("_is_lost", "_put", "_sent", "_soon", "_unsent", "is_cancelled", "told")

    def __init__(self, put: Put, soon: Soon, *, is_cancelled: bool) -> None:
        self.is_cancelled = is_cancelled
        self._put = put
        self._soon = soon
        self.told: Stop | None = None
        self._is_lost = False
        self._unsent: list[tuple[StepWrite, asyncio.Future[Written]]] = []
        self._sent: set[asyncio.Future[Written]] = set()

    def write(self, write: StepWrite) -> asyncio.Future[Written]:
        """Take in the outcome of a step; it is written in a moment."""
        if not self._unsent:
            self._soon.add(self)
        written: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self._unsent.append((write, written))
        return written

    @property
    def is_busy(self) -> bool:
        """Whether something was written that is not committed yet."""
        return bool(self._unsent or self._sent)

    async def kept(self, write: asyncio.Future[Written]) -> datetime | None:
        """Wait for a write; when its step goes on."""
        self.send()
        written = await self._heard(write)
        self.check()
        return written.next_attempt_at

    async def barrier(self) -> None:
        """What was written so far is committed; nothing more is begun when the run is cancelled or not ours."""
        self.send()
        await self._hear_all()
        self.check()

    def check(self) -> None:
        """LeaseLost or Cancelled when it came to that; `told` says so too, should the function not listen."""
        if self._is_lost or self.is_cancelled:
            self.told = LeaseLost() if self._is_lost else Cancelled()
            raise self.told

    async def settle(self) -> None:
        """What was sent so far is committed; LeaseLost when it did not count."""
        if self._sent:
            await self._hear_all()
        if self._is_lost:
            raise LeaseLost

    def close(self, end: FinishedRun | SuspendedRun, then: Callable[[Written | BaseException], None]) -> None:
        """Write how the run ended, or that it rests, with what was not yet written of its steps; `then` hears of it."""
        unsent, self._unsent = self._unsent, []
        self._put(RunOutcome([write for write, _ in unsent], end), partial(_of_end, then))

    def end(self, end: FinishedRun, then: Callable[[Written | BaseException], None]) -> None:
        """Write how the run ended, and nothing else."""
        self._unsent.clear()
        self.close(end, then)

    def send(self) -> None:
        """Send what is not yet sent."""
        unsent, self._unsent = self._unsent, []
        if not unsent:
            return
        self._sent.update(written for _, written in unsent)

        def answer(recorded: RecordedOutcome | BaseException) -> None:
            for i, (_, written) in enumerate(unsent):
                if isinstance(recorded, asyncio.CancelledError):
                    written.cancel()
                elif isinstance(recorded, BaseException):
                    written.set_exception(recorded)
                else:
                    written.set_result(recorded.steps[i])

        self._put(RunOutcome([write for write, _ in unsent]), answer)

    async def _hear_all(self) -> None:
        while self._sent:
            await self._heard(next(iter(self._sent)))

    async def _heard(self, write: asyncio.Future[Written]) -> Written:
        written = await asyncio.shield(write)
        self._is_lost |= not written.is_kept
        self.is_cancelled |= written.is_cancel_requested
        self._sent.discard(write)
        return written


def _of_end(then: Callable[[Written | BaseException], None], recorded: RecordedOutcome | BaseException) -> None:
    then(recorded if isinstance(recorded, BaseException) else recorded.end)
