"""Lookups: bounded, cached reads on behalf of clients that are not authenticated yet.

Anyone can invent tokens and source names, and each costs a read. `UnknownLookups` bounds how many reads for unknown
clients run or wait at once, so that they never take the connections that authenticated clients need. `RecentLookups`
caches answers for KEEP_SECONDS: a change is visible everywhere after that, and a flood costs one read a second per key.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from functools import partial
from typing import Generic, TypeVar

from tidegate.errors import Overloaded
from tidegate.flow.shared_read import SharedRead

AT_ONCE = 2
MAX_WAITING = 100
KEEP_SECONDS = 1.0
MAX_KEPT = 1000

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class UnknownLookups:
    """Limits the reads for unknown clients in one process."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_ONCE)
        self._present = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until a read may begin. Overloaded when MAX_WAITING others already wait."""
        if self._present >= AT_ONCE + MAX_WAITING:
            raise Overloaded("too many unknown tokens or sources are being looked up; known ones are not affected")
        self._present += 1
        try:
            async with self._free:
                yield
        finally:
            self._present -= 1


class RecentLookups(Generic[Key, Value]):
    """The answers of `read` by key, each from a read that began less than KEEP_SECONDS ago, at most MAX_KEPT of them.

    `read` is called with the key and the answer before, if there is one. A value of None means that nothing was found.
    """

    def __init__(self, read: Callable[[Key, Value | None], Awaitable[Value]]) -> None:
        self._read = read
        self._kept: dict[Key, SharedRead[Value]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    async def get(self, key: Key) -> Value:
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= MAX_KEPT:
                self._make_room()
            kept = self._kept[key] = SharedRead(partial(self._read, key), one_at_a_time=False)
        return await kept.get(KEEP_SECONDS)

    def drop(self, key: Key) -> None:
        """Read the key again at the next call: its answer was an error that must not be cached."""
        self._kept.pop(key, None)

    def clear(self) -> None:
        """Read every key again."""
        self._kept.clear()

    def _make_room(self) -> None:
        """Keys without an answer are dropped first, so that invented keys do not evict real ones."""
        found = {key: kept for key, kept in self._kept.items() if kept.value is not None}
        self._kept = found if len(found) < MAX_KEPT else {}
