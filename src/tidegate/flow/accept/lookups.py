"""Questions to the database on behalf of those whom nobody knows yet.

Anyone can invent tokens and names of sources, each of which costs a look. A few are looked up at once and a few more
wait, so that strangers never hold the connections that those who are known need.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidegate.errors import Overloaded

AT_ONCE = 2
MAX_WAITING = 100


class Strangers:
    """Whose turn it is, in one process."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(AT_ONCE)
        self._here = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for a turn. Overloaded when too many do."""
        if self._here >= AT_ONCE + MAX_WAITING:
            raise Overloaded("too many unknown tokens or sources are being looked up; those that are known go on")
        self._here += 1
        try:
            async with self._free:
                yield
        finally:
            self._here -= 1
