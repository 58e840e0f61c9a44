"""Journal: what one execution writes of its steps.

The outcome of a step is kept for a millisecond, to be written with the end of its run; the next step, a wait, or the
end sends it earlier. Everything that is written names the claim: when the claim is lost, no write takes effect.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate.model.run import ClaimedRun, FinishedRun
from tidegate.model.step import RunNotes, RunOutcome, StepWrite, SuspendedRun

DELAY_SECONDS = 0.001


class Stop(BaseException):
    """Unwinds a workflow's function; not an Exception, so that the function's own handlers let it pass."""


class Cancelled(Stop):
    """An operator cancelled the run."""


class LeaseLost(Stop):
    """The run belongs to another worker now; what is done here has no effect."""


class Written(NamedTuple):
    """Whether a write took effect (the claim was still held), whether the run is to be cancelled, when the step is
    due, and what was written in place of what was asked for, if anything."""

    is_kept: bool
    is_cancel_requested: bool = False
    next_attempt_at: datetime | None = None
    instead: StepWrite | None = None


class RecordedOutcome(NamedTuple):
    """What became of a RunOutcome: of each of its steps, and of the end."""

    steps: list[Written]
    end: Written


Put = Callable[[RunOutcome, Callable[[RecordedOutcome | BaseException], None]], None]


class DelayedSends:
    """Has journals send what they hold after DELAY_SECONDS; one timer serves all executions of a worker."""

    def __init__(self) -> None:
        self._waiting: list[Journal] = []

    def add(self, journal: Journal) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_later(DELAY_SECONDS, self._send)
        self._waiting.append(journal)

    def _send(self) -> None:
        waiting, self._waiting = self._waiting, []
        for journal in waiting:
            journal.send()


class Journal:
    """The writes of one execution. `put` hands them to the group commit."""

    __slots__ = (
        "_delayed",
        "_is_lost",
        "_put",
        "_sent",
        "_unsent",
        "before_barrier",
        "is_cancelled",
        "notes",
        "raised",
    )

    def __init__(self, put: Put, delayed: DelayedSends, *, is_cancelled: bool) -> None:
        self.is_cancelled = is_cancelled
        self.raised: Stop | None = None  # by `check`; the function may have caught it
        self.notes: RunNotes | None = None  # written with what is sent next
        self.before_barrier: Callable[[], Awaitable[None]] | None = None  # what a step waits for beside its journal
        self._put = put
        self._delayed = delayed
        self._is_lost = False
        self._unsent: list[tuple[StepWrite, asyncio.Future[Written]]] = []
        self._sent: set[asyncio.Future[Written]] = set()

    def write(self, write: StepWrite) -> asyncio.Future[Written]:
        """Take in the outcome of a step; it is written within DELAY_SECONDS. What was written of the same step before
        is another commit: a child that is cut off at once is started all the same."""
        if not write.is_new and any(one.id == write.id for one, _ in self._unsent):
            self.send()
        if not self._unsent:
            self._delayed.add(self)
        written: asyncio.Future[Written] = asyncio.get_running_loop().create_future()
        self._unsent.append((write, written))
        return written

    def note(self, run: ClaimedRun, *, version: str | None = None, tags: dict[str, str] | None = None) -> None:
        """Note something about the run, to be written with what is written next."""
        before = self.notes
        self.notes = RunNotes(
            id=run.id,
            claim_generation=run.claim_generation,
            version=version or (before.version if before else None),
            tags=(before.tags if before else {}) | (tags or {}),
        )

    @property
    def is_busy(self) -> bool:
        """Whether something was written that is not committed yet."""
        return bool(self._unsent or self._sent)

    async def kept(self, write: asyncio.Future[Written]) -> datetime | None:
        """Wait for a write; when its step is due."""
        self.send()
        written = await self._wait_for(write)
        self.check()
        return written.next_attempt_at

    def forget(self, write: asyncio.Future[Written]) -> None:
        """A write was refused, and whoever wrote it knows."""
        self._sent.discard(write)

    async def barrier(self, *, begins_again: bool = False) -> None:
        """Wait until what was written so far is committed. LeaseLost or Cancelled: nothing more is to begin.
        `begins_again`: for a step that the run has reached before."""
        if self.before_barrier is not None and not begins_again:
            await self.before_barrier()
        self.send()
        await self._wait_for_all()
        self.check()

    def check(self) -> None:
        """Raises LeaseLost or Cancelled if the run was lost or cancelled."""
        if self._is_lost or self.is_cancelled:
            self.raised = LeaseLost() if self._is_lost else Cancelled()
            raise self.raised

    def learn(self, *, is_kept: bool, is_cancel_requested: bool) -> None:
        """What another transaction said of the run. LeaseLost or Cancelled: nothing more is to begin."""
        self._is_lost |= not is_kept
        self.is_cancelled |= is_cancel_requested
        self.check()

    def lose(self) -> None:
        """The claim is lost: found out by something else than a write of this journal."""
        self._is_lost = True

    async def wait_for_sent(self) -> None:
        """Wait until what was sent so far is committed; LeaseLost when it had no effect."""
        if self._sent:
            await self._wait_for_all()
        if self._is_lost:
            raise LeaseLost

    def write_end(
        self,
        end: FinishedRun | SuspendedRun,
        then: Callable[[Written | BaseException], None],
        *,
        with_steps: bool = True,
    ) -> None:
        """Write how the run ended or that it is suspended, with the steps that are not sent yet, or without them;
        `then` is called when that is committed or has failed."""
        unsent, self._unsent = self._unsent, []
        steps = [write for write, _ in unsent] if with_steps else []
        notes, self.notes = self.notes, None
        self._put(RunOutcome(steps, end, notes), partial(_of_end, then))

    def send(self) -> None:
        """Send what is not sent yet."""
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

        notes, self.notes = self.notes, None
        self._put(RunOutcome([write for write, _ in unsent], notes=notes), answer)

    async def _wait_for_all(self) -> None:
        while self._sent:
            await self._wait_for(next(iter(self._sent)))

    async def _wait_for(self, write: asyncio.Future[Written]) -> Written:
        written = await asyncio.shield(write)
        self._is_lost |= not written.is_kept
        self.is_cancelled |= written.is_cancel_requested
        self._sent.discard(write)
        return written


def _of_end(then: Callable[[Written | BaseException], None], recorded: RecordedOutcome | BaseException) -> None:
    then(recorded if isinstance(recorded, BaseException) else recorded.end)
