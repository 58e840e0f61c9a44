"""The loops that decide new events, each with a dispatcher of its own: batches of the inbox, a second batch at the same
time, and what others publish while a source has a backlog."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from tidegate.flow.decide.batch import Batch
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.flow.run.runner import Runner
from tidegate.worker.loop import Loop

# How often a worker looks for events of others while it decides those of a source that has a backlog.
LOOK_SECONDS = 0.01


class Dispatching:
    """The dispatchers of one worker; `first` is the one that is always at work. `hinted` is set when events arrive."""

    def __init__(
        self,
        new_dispatch: Callable[..., Dispatch],
        new_batch: Callable[..., Batch],
        first_batch: Batch,
        runner: Runner,
        hinted: asyncio.Event,
    ) -> None:
        self._runner = runner
        self._hinted = hinted
        self._is_full, self._backlog_begins = asyncio.Event(), asyncio.Event()
        self._is_deciding = False
        self.first = new_dispatch(batch=first_batch, after_full=self._is_full.set)
        self._second = new_dispatch(batch=new_batch())  # claims no runs: only the first one does
        few = new_batch(claim=runner.claim_few, after_claim=runner.start)
        self._beside = new_dispatch(batch=few, beside=self.first)

    def loops(self, poll_seconds: float) -> list[Loop]:
        return [
            Loop("dispatch", self._once, wait_seconds=poll_seconds, wake=self._hinted),
            Loop("dispatch", self._more, wait_seconds=math.inf, wake=self._is_full),
            Loop("dispatch", self._others, wait_seconds=math.inf, wake=self._backlog_begins),
        ]

    async def _once(self) -> int:
        self._is_deciding = True
        if self.first.has_backlog:
            self._backlog_begins.set()
        try:
            await self._runner.pause_for_room()
            outcome = await self.first.run_once()
        finally:
            self._is_deciding = False
        return outcome.events if self.first.has_more else 0

    async def _more(self) -> int:
        """Decide a second batch while the first is in progress, so that worker and database do not wait for each other.
        Not needed while runs are claimed as they are created: then the worker is busy with them."""
        if not self.first.allows_second_batch or not self._runner.claims_nothing:
            return 0
        return (await self._second.run_once()).events

    async def _others(self) -> int:
        """While a batch of a backlog is decided, decide what other sources publish: it does not wait for that batch. A
        hint that arrives stays set until the next batch begins."""
        await asyncio.sleep(LOOK_SECONDS)
        if not self._is_deciding or not self.first.has_backlog:
            return 0
        if self._hinted.is_set():
            await self._beside.run_once()
        return 1
