"""Slices: work that takes long, done a little at a time, so that whatever else this process does goes on meanwhile."""

from __future__ import annotations

import asyncio

from tidegate.clock import monotonic

# With the longest step of the work on top (model/budget.py), the event loop is held up for some 50 ms at the worst.
SLICE_SECONDS = 0.02
# What is done inside a transaction holds its locks: others wait for them, and the server ends it after a while.
LONGEST_SECONDS = 1.0


class TooLong(Exception):
    """A batch takes too long for one transaction; `done` of its parts fit in."""

    def __init__(self, done: int) -> None:
        super().__init__(f"matching and rendering took more than {LONGEST_SECONDS:g} s; {done} were done by then")
        self.done = done


class Slices:
    """The time that one piece of work has used: `if slices.is_over: await slices.next()`."""

    __slots__ = ("_began", "_ends")

    def __init__(self) -> None:
        self._began = monotonic()
        self._ends = self._began + SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        return monotonic() > self._ends

    async def next(self) -> None:
        """Let the others go first."""
        await asyncio.sleep(0)
        self._ends = monotonic() + SLICE_SECONDS

    def check(self, done: int, of: int) -> None:
        """Raises TooLong when the work so far took too long and there is more to do. The first part is always done: a
        smaller batch would not help it."""
        if 0 < done < of and monotonic() - self._began > LONGEST_SECONDS:
            raise TooLong(done)
