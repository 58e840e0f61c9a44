"""Ends: wait for the ends of runs. One read serves all who wait in this process; nobody else pays for it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import Any, NamedTuple

from tidegate.clock import monotonic
from tidegate.errors import RunFailed, TidegateError, Unavailable
from tidegate.model.ids import EventId, RunId
from tidegate.model.run import Run
from tidegate.model.start import StartedRun
from tidegate.model.units import duration_ms
from tidegate.store import runs, starts
from tidegate.store.db import Database

# How often is looked: after the last one began to wait, the interval grows from the first number to the second.
FIRST_SECONDS, LAST_SECONDS, GROWTH = 0.02, 0.25, 1.1
# How often is checked whether a start will never launch its run.
CHECK_SECONDS = 1.0
# At most this many wait in one process; further ones get an answer at once.
MAX_WAITING = 1000
MAX_WAIT_SECONDS = 60.0


class Ended(NamedTuple):
    """How a run ended; or why its start has launched none."""

    run: Run | None = None
    not_launched: str | None = None


def output_of(run_id: RunId, ended: Ended) -> Any:
    """The output of a run that has ended; RunFailed unless it succeeded."""
    if ended.run is None:
        raise RunFailed(str(run_id), "not_launched", ended.not_launched or "")
    if ended.run.status != "succeeded":
        raise RunFailed(str(run_id), ended.run.status, ended.run.error or "")
    return ended.run.output


class RunEnds:
    """The ends of runs that this process waits for."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: dict[RunId, list[asyncio.Future[Ended | None]]] = {}
        self._is_closed = False
        self._starts: dict[RunId, EventId] = {}
        self._count = 0
        self._interval = FIRST_SECONDS
        self._check_at = 0.0
        self._newcomer = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """How many wait."""
        return self._count

    async def wait(self, run_id: RunId, seconds: float, event_id: EventId | None = None) -> Ended | None:
        """How the run ended, if it does within that time; None otherwise, at once when too many wait, also while the
        database is down. `event_id` is its start's: then it is also noticed if the start launches no run."""
        if seconds <= 0 or self._count >= MAX_WAITING or self._is_closed:
            return await self._look_once(run_id, event_id)
        ended: asyncio.Future[Ended | None] = asyncio.get_running_loop().create_future()
        self._count += 1
        self._waiting.setdefault(run_id, []).append(ended)
        if event_id is not None:
            self._starts[run_id] = event_id
        self._interval = FIRST_SECONDS
        self._newcomer.set()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="ends of runs")
        try:
            return await asyncio.wait_for(ended, seconds)
        except TimeoutError:
            return None
        finally:
            self._leave(run_id, ended)

    async def close(self) -> None:
        """Look no more; whoever still waits is told that nothing has ended."""
        self._is_closed = True
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        for each in [one for waiting in self._waiting.values() for one in waiting if not one.done()]:
            each.set_result(None)

    def _leave(self, run_id: RunId, ended: asyncio.Future[Ended | None]) -> None:
        self._count -= 1
        self._waiting[run_id].remove(ended)
        if not self._waiting[run_id]:
            del self._waiting[run_id]
            self._starts.pop(run_id, None)

    async def _look_once(self, run_id: RunId, event_id: EventId | None) -> Ended | None:
        known = {} if event_id is None else {run_id: event_id}
        try:
            return (await self._read([run_id], known)).get(run_id)
        except Unavailable:  # the start itself is committed: whoever repeated it would have two runs
            return None

    async def _look(self) -> None:
        while self._waiting:
            self._newcomer.clear()
            is_check = monotonic() >= self._check_at
            if is_check:
                self._check_at = monotonic() + CHECK_SECONDS
            try:
                found = await self._read(list(self._waiting), self._starts if is_check else {})
            except TidegateError:  # they wait for their time; the database may be back before
                found, self._interval = {}, LAST_SECONDS
            for run_id, ended in found.items():
                for one in self._waiting.get(run_id, ()):
                    if not one.done():
                        one.set_result(ended)
            await asyncio.sleep(FIRST_SECONDS)  # however many newcomers there are
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval - FIRST_SECONDS):
                    await self._newcomer.wait()
            self._interval = min(LAST_SECONDS, self._interval * GROWTH)

    async def _read(self, run_ids: list[RunId], known: dict[RunId, EventId]) -> dict[RunId, Ended]:
        async with self._database.connection() as connection:
            found = {run.id: Ended(run) for run in await runs.list_ended(connection, run_ids)}
            reasons = await starts.unlaunched(connection, {r: e for r, e in known.items() if r not in found})
        return {run_id: Ended(not_launched=reason) for run_id, reason in reasons.items()} | found


class RunHandle:
    """A run that was started; `status` is `accepted`, or `duplicate` if its id was started before."""

    def __init__(self, started: StartedRun, ends: RunEnds) -> None:
        self.run_id, self.event_id, self.status = started.run_id, started.event_id, started.status
        self._ends = ends

    async def result(self, timeout: str | int | float | None = None) -> Any:
        """Wait for the run's end; its output. RunFailed when it failed, was cancelled or is not launched; TimeoutError
        when it has not ended within `timeout` (`"30s"`; without one, this waits as long as it takes)."""
        until = math.inf if timeout is None else monotonic() + duration_ms(timeout) / 1000
        while True:
            seconds = min(MAX_WAIT_SECONDS, until - monotonic())
            if (ended := await self._ends.wait(self.run_id, seconds, self.event_id)) is not None:
                return output_of(self.run_id, ended)
            if monotonic() >= until:
                raise TimeoutError(f"run {self.run_id} has not ended within {timeout}")
            await asyncio.sleep(min(LAST_SECONDS, until - monotonic()))  # if too many wait, the answer came at once
