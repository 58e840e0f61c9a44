"""A loop around `run_once`: immediately again while there is work, else when woken or after the poll interval."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable

from tidegate.errors import Unavailable
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_PAUSE_SECONDS = 0.5
# Between two attempts of a loop that is not vital and fails again and again.
_LONGEST_PAUSE_SECONDS = 300.0
MAX_FAILURES_IN_A_ROW = 20

_log = logger("worker")


class Loop:
    """Runs `run_once` until stopped. `run_once` returns how much it did; after 0 the loop waits."""

    def __init__(
        self,
        name: str,
        run_once: Callable[[], Awaitable[int]],
        *,
        wait_seconds: float | Callable[[], float],
        wake: asyncio.Event | None = None,
        is_vital: bool = True,
    ) -> None:
        """`is_vital`: if it fails again and again, the process ends; otherwise it is tried ever less often."""
        self.name = name
        self._run_once = run_once
        self._wait_seconds = wait_seconds
        self._wake = wake or asyncio.Event()
        self._is_vital = is_vital
        self._stopping = False

    def stop(self) -> None:
        """Finish the iteration in progress, and start no other."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        failures = 0
        while not self._stopping:
            self._wake.clear()  # before the check: what arrives during it wakes the loop again
            try:
                done = await self._run_once()
                failures = 0
            except Unavailable as exc:
                metrics.LOOP_FAILURES.labels(self.name).inc()
                _log.warning("worker.loop_waits", loop=self.name, error=exc)
                await self._wait(_PAUSE_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311
                continue
            except Exception as exc:
                failures += 1
                metrics.LOOP_FAILURES.labels(self.name).inc()
                _log.error("worker.loop_failed", loop=self.name, error=exc, failures=failures, exc_info=exc)
                if failures >= MAX_FAILURES_IN_A_ROW and self._is_vital:
                    raise
                await self._wait(_PAUSE_SECONDS if self._is_vital else _pause_after(failures))
                continue
            if not done:
                wait = self._wait_seconds
                await self._wait(wait() if callable(wait) else wait)

    async def _wait(self, seconds: float) -> None:
        if self._stopping:
            return
        try:
            async with asyncio.timeout(None if seconds == math.inf else seconds):
                await self._wake.wait()
        except TimeoutError:
            pass


def _pause_after(failures: int) -> float:
    return float(min(_LONGEST_PAUSE_SECONDS, _PAUSE_SECONDS * 2 ** min(failures, 16)))
