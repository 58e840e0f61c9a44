"""Time slices: CPU-bound work yields to the event loop at short intervals, so that the process stays responsive."""

from __future__ import annotations

import asyncio

from tidegate.clock import monotonic

# Together with the work of one trigger on one event (model/work_limit.py), the event loop is blocked for at most about
# 50 ms.
SLICE_SECONDS = 0.02
# Work inside a transaction holds its locks: other transactions wait for them, and the server ends a transaction that
# is idle for too long.
MAX_WORK_SECONDS = 1.0


class TooLong(Exception):
    """A batch takes too long for one transaction; `done` of its items fit in."""

    def __init__(self, done: int) -> None:
        super().__init__(
            f"matching and rendering took more than {MAX_WORK_SECONDS:g} s; {done} items were done by then"
        )
        self.done = done


class TimeSlice:
    """The time that one piece of work has used: `if time_slice.is_over: await time_slice.next()`."""

    __slots__ = ("_began", "_ends")

    def __init__(self) -> None:
        self._began = monotonic()
        self._ends = self._began + SLICE_SECONDS

    @property
    def is_over(self) -> bool:
        return monotonic() > self._ends

    async def next(self) -> None:
        """Yield to the event loop, then start the next slice."""
        await asyncio.sleep(0)
        self._ends = monotonic() + SLICE_SECONDS

    def check(self, done: int, of: int) -> None:
        """Raises TooLong when the work has used its time and items are left. The first item is always completed: a
        smaller batch would not make it faster."""
        if 0 < done < of and monotonic() - self._began > MAX_WORK_SECONDS:
            raise TooLong(done)
