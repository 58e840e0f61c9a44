"""Quarantine: when a worker tries suspects, the runs whose workers died again and again, each alone.

While a suspect is tried, nothing else of users' code executes in its process: if that dies then, it was this run. A
busy worker begins nothing more until what it executes has ended, but has patience for a moment only: then the suspect
is begun beside the others, and what happens does not count. One that kills its worker leaves it idle, and the next time
it is alone. Trials take a bounded share of a worker's time. A suspect that lives on for a while is one among others
again; for how long it must be alone grows with each death, so that one which kills its worker late is found too.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Literal

from tidegate.clock import monotonic
from tidegate.errors import Unavailable
from tidegate.flow.decide.reporting import run_fields
from tidegate.flow.run.claiming import DueRuns, ReadyRun
from tidegate.flow.run.execution import Execution
from tidegate.model.run import SUSPECT_CRASHES
from tidegate.store import runs
from tidegate.store.db import Database
from tidegate.telemetry.logs import logger

# How long the first trial is alone, how many times longer each that follows another death, and how long at most:
# nothing else executes there meanwhile, and workers may die often for reasons that are not the run's.
ALONE_SECONDS, ALONE_FACTOR, MAX_ALONE_SECONDS = 5.0, 4, 3600.0
# How often a worker asks for suspects, and how long it waits until what it executes has ended.
CHECK_SECONDS, PATIENCE_SECONDS = 1.0, 1.0
# After so long it is time for something else, if there is anything, for so many times as long.
TURN_SECONDS, REST_FACTOR = 1.0, 4
_RETRY_SECONDS = 0.5

_log = logger("run")


def alone_seconds(crashes: int) -> float:
    """How long a run is tried alone whose workers died so often in a row."""
    deaths = min(max(crashes - SUSPECT_CRASHES, 0), 30)  # more make no difference
    return min(MAX_ALONE_SECONDS, ALONE_SECONDS * float(ALONE_FACTOR**deaths))


class Quarantine:
    """Of one worker: `open` to all runs, or `draining` (what was claimed goes on, nothing more is claimed), or `closed`
    (nothing but the `trial` executes). `after_open` hears that others may be begun."""

    def __init__(self, database: Database, due: DueRuns, after_open: Callable[[], None]) -> None:
        self.state: Literal["open", "draining", "closed"] = "open"
        self.trial: Execution | None = None
        # As far as is known. Where nothing else is to be done, the next trial follows at once.
        self.has_suspects = False
        self._database = database
        self._due = due
        self._after_open = after_open
        self._began_at = 0.0
        self._check_at = 0.0
        self._is_patient = True
        self._timer: asyncio.Task[None] | asyncio.TimerHandle | None = None

    def check_now(self) -> None:
        """There may be suspects."""
        self._check_at = 0.0

    async def check(self, definitions: Sequence[uuid.UUID]) -> None:
        """If it is time to: ask for suspects, and begin to drain if there are any."""
        if self.state != "open" or monotonic() < self._check_at:
            return
        async with self._database.connection() as connection:
            self.has_suspects = await runs.has_suspects(connection, definitions)
        self._check_at = monotonic() + CHECK_SECONDS
        if self.has_suspects:
            self.state, self._began_at = "draining", monotonic()
            self._is_patient = True
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._lose_patience)

    async def next(
        self,
        definitions: Sequence[uuid.UUID],
        is_busy: bool,
        *,
        is_counted: bool,
    ) -> tuple[ReadyRun, int] | None:
        """The next suspect, and how often in a row its workers have died, once nothing executes here. What was claimed
        a moment ago and arrives meanwhile is not begun. If there is none, others are let in."""
        if self.trial is not None and self.trial.state.is_over:
            self._end_trial()
            if self.state == "open":
                return None
        if self.trial is not None or (is_busy and (self.state != "draining" or self._is_patient)):
            return None
        if self.state == "open":
            self._began_at = monotonic()
        self._stop_timer()
        self.state = "closed"
        found = None
        try:
            found = await self._due.claim_suspect(definitions, is_counted=is_counted and not is_busy)
        finally:
            if found is None:
                self.has_suspects = False
                self._check_at = monotonic() + CHECK_SECONDS
                self._open()
        return found

    def begin(self, execution: Execution, crashes: int, *, is_busy: bool) -> None:
        """A trial begins; one that is not alone is a run like any other."""
        if is_busy:
            self._open_for_a_while()
            return
        fields = run_fields(execution.run, execution.event)
        _log.warning("run.tried_alone", **fields, reason=f"its worker died {crashes} times in a row")
        self.trial = execution
        self._timer = asyncio.get_running_loop().create_task(self._let_others_in(execution, alone_seconds(crashes)))

    def _end_trial(self) -> None:
        """Nothing is left of the trial here: the next one follows, or others are let in for a while."""
        self._stop_timer()
        self.trial = None
        if monotonic() - self._began_at > TURN_SECONDS:
            self._open_for_a_while()

    def stop(self) -> None:
        """Let nobody in any more."""
        self._stop_timer()

    def _open_for_a_while(self) -> None:
        now = monotonic()
        self._check_at = now + max(CHECK_SECONDS, REST_FACTOR * (now - self._began_at))
        self._open()

    def _open(self) -> None:
        self._stop_timer()
        self.state, self.trial = "open", None
        self._after_open()

    def _lose_patience(self) -> None:
        """What executes takes longer."""
        self._is_patient = False
        self._after_open()

    async def _let_others_in(self, execution: Execution, seconds: float) -> None:
        await asyncio.sleep(seconds)
        while self.trial is execution:
            try:
                async with self._database.transaction() as connection:
                    await runs.pass_trial(connection, execution.run)
            except Unavailable:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if self.trial is execution:
                self._timer = None  # it is this task
                self._open_for_a_while()
            return

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
