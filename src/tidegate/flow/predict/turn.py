"""Turn: one prediction at a time in a process, so that however many are asked for, they share one slice of its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidegate.errors import Overloaded

# Longer than one prediction takes: two callers wait for each other, more are refused.
WAIT_SECONDS = 10


class PredictionTurn:
    """`async with turn.take():` around a prediction. Overloaded when others take too long."""

    def __init__(self, wait_seconds: float = WAIT_SECONDS) -> None:
        self._lock = asyncio.Lock()
        self._wait_seconds = wait_seconds

    @asynccontextmanager
    async def take(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._lock.acquire()
        except TimeoutError as exc:
            raise Overloaded("this process is computing other predictions; retry later", 5) from exc
        try:
            yield
        finally:
            self._lock.release()
