"""Shared read: many callers ask for a value, and one read serves them all for as long as it is recent enough."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tidegate.clock import monotonic

Value = TypeVar("Value")


class SharedRead(Generic[Value]):
    """A value that `read` provides. `read` is called with the value of the last read that succeeded, or None.

    An error is shared like a value. With `one_at_a_time`, callers who need a newer read than the one in progress wait
    for it to end and then share the next; so they never cost the database more than one read at a time. With
    `joins_slow_reads`, callers share a read in progress however long it takes, and its age counts from its end: for
    values that must be quick rather than exact, so that a slow database is not read back to back.
    """

    __slots__ = ("_aged_since", "_joins", "_latest", "_next", "_read", "_turn", "value")

    def __init__(
        self,
        read: Callable[[Value | None], Awaitable[Value]],
        *,
        one_at_a_time: bool = True,
        joins_slow_reads: bool = False,
    ) -> None:
        self.value: Value | None = None  # of the last read that succeeded
        self._read = read
        self._turn = asyncio.Lock() if one_at_a_time else contextlib.nullcontext()
        self._joins = joins_slow_reads
        self._aged_since = 0.0
        self._latest: asyncio.Task[Value] | None = None
        self._next: asyncio.Task[Value] | None = None

    async def get(self, max_age_seconds: float) -> Value:
        """The value of a read that began less than `max_age_seconds` ago; 0: of one that begins after this call."""
        task = self._latest
        if task is None or task.cancelled() or self._is_old(task, max_age_seconds):
            task = self._next
            if task is None:
                task = self._next = asyncio.create_task(self._run(), name="shared read")
                task.add_done_callback(_retrieve_error)
        elif task.done():
            return task.result()
        return await asyncio.shield(task)  # other callers may wait for it

    async def _run(self) -> Value:
        async with self._turn:
            self._latest, self._next = self._next, None
            self._aged_since = monotonic()
            try:
                self.value = value = await self._read(self.value)
            finally:
                if self._joins:
                    self._aged_since = monotonic()
            return value

    def _is_old(self, task: asyncio.Task[Value], max_age_seconds: float) -> bool:
        if self._joins and not task.done():
            return False
        return monotonic() - self._aged_since >= max_age_seconds


def _retrieve_error(task: asyncio.Task[Value]) -> None:
    """Keeps asyncio from logging an error that no caller was left to receive."""
    if not task.cancelled():
        task.exception()
