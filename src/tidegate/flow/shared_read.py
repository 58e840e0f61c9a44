"""Shared read: many callers ask for a value, and one read serves them all for as long as it is recent enough."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from tidegate.clock import monotonic

Value = TypeVar("Value")


class SharedRead(Generic[Value]):
    """A value that `read` provides. `read` is called with the value of the read before, or None if that has failed.

    An error is shared like a value. With `one_at_a_time`, callers who need a newer read than the one in progress wait
    for it to end and then share the next; so they never cost the database more than one read at a time.
    """

    __slots__ = ("_began_at", "_latest", "_next", "_read", "_turn")

    def __init__(self, read: Callable[[Value | None], Awaitable[Value]], *, one_at_a_time: bool = True) -> None:
        self._read = read
        self._turn = asyncio.Lock() if one_at_a_time else contextlib.nullcontext()
        self._began_at = 0.0
        self._latest: asyncio.Task[Value] | None = None
        self._next: asyncio.Task[Value] | None = None

    @property
    def value(self) -> Value | None:
        """The value of the latest read, or None if it is still in progress or has failed."""
        task = self._latest
        if task is None or not task.done() or task.cancelled() or task.exception() is not None:
            return None
        return task.result()

    async def get(self, max_age_seconds: float) -> Value:
        """The value of a read that began less than `max_age_seconds` ago; 0: of one that begins after this call."""
        task = self._latest
        if task is None or task.cancelled() or monotonic() - self._began_at >= max_age_seconds:
            task = self._next
            if task is None:
                task = self._next = asyncio.create_task(self._run(), name="shared read")
                task.add_done_callback(_retrieve_error)
        elif task.done():
            return task.result()
        return await asyncio.shield(task)  # other callers may wait for it

    async def _run(self) -> Value:
        async with self._turn:
            before = self.value
            self._latest, self._next = self._next, None
            self._began_at = monotonic()
            return await self._read(before)


def _retrieve_error(task: asyncio.Task[Value]) -> None:
    """Keeps asyncio from logging an error that no caller was left to receive."""
    if not task.cancelled():
        task.exception()
