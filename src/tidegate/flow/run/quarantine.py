"""Quarantine: executes suspects alone: runs whose workers died repeatedly.

While a suspect is tried, no other user code executes in its process: if the process dies then, the suspect is at fault.
A busy worker begins nothing more until what it executes has ended, but waits PATIENCE_SECONDS at most: then the suspect
is begun beside the others, and a death does not count. A suspect that kills its worker leaves it idle, and the next
time it is alone. Trials take a bounded share of a worker's time. A suspect that survives its trial is an ordinary run
again; the trial gets longer with each death, so that a run which kills its worker late is found too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Literal

from tidegate.clock import monotonic
from tidegate.errors import Unavailable
from tidegate.flow.call.execution import Execution
from tidegate.flow.decide.reporting import run_fields
from tidegate.flow.run.claiming import DueRuns, ReadyRun
from tidegate.model.ids import DefinitionId
from tidegate.model.run import SUSPECT_CRASHES
from tidegate.store import runs
from tidegate.store.db import Database
from tidegate.telemetry.logs import logger

# How long the first trial takes, by which factor it gets longer with each further death, and the longest: nothing else
# executes in that worker meanwhile, and workers may die for other reasons.
ALONE_SECONDS, ALONE_FACTOR, MAX_ALONE_SECONDS = 5.0, 4, 3600.0
# How often a worker checks for suspects, and how long it waits for other executions to end.
CHECK_SECONDS, PATIENCE_SECONDS = 1.0, 1.0
# After TURN_SECONDS of trials other runs may execute, for PAUSE_FACTOR times as long.
TURN_SECONDS, PAUSE_FACTOR = 1.0, 4
_RETRY_SECONDS = 0.5

_log = logger("run")


def alone_seconds(crashes: int) -> float:
    """How long a run is tried alone whose workers died `crashes` times in a row."""
    deaths = min(max(crashes - SUSPECT_CRASHES, 0), 30)  # more make no difference
    return min(MAX_ALONE_SECONDS, ALONE_SECONDS * float(ALONE_FACTOR**deaths))


class Quarantine:
    """Of one worker: `open` to all runs, `draining` (executions continue, nothing more is claimed) or `alone` (only
    the `trial` executes). `after_open` is called when other runs may begin."""

    def __init__(self, database: Database, due: DueRuns, after_open: Callable[[], None]) -> None:
        self.state: Literal["open", "draining", "alone"] = "open"
        self.trial: Execution | None = None
        # As far as is known. When nothing else is due, the next trial follows at once.
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

    async def check(self, definitions: Sequence[DefinitionId]) -> None:
        """Every CHECK_SECONDS: check for suspects, and begin to drain if there are any."""
        if self.state != "open" or monotonic() < self._check_at:
            return
        async with self._database.connection() as connection:
            self.has_suspects = await self._due.has_suspects(connection, definitions)
        self._check_at = monotonic() + CHECK_SECONDS
        if self.has_suspects:
            self.state, self._began_at = "draining", monotonic()
            self._is_patient = True
            self._timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._stop_waiting)

    async def next(
        self,
        definitions: Sequence[DefinitionId],
        is_busy: bool,
        *,
        is_counted: bool,
    ) -> tuple[ReadyRun, int] | None:
        """The next suspect, and how often in a row its workers have died, once nothing else executes here. Runs that
        were claimed a moment ago and arrive meanwhile do not begin. If there is no suspect, the quarantine opens."""
        if self.trial is not None and self.trial.state.is_over:
            self._end_trial()
            if self.state == "open":
                return None
        if self.trial is not None or (is_busy and (self.state != "draining" or self._is_patient)):
            return None
        if self.state == "open":
            self._began_at = monotonic()
        self._stop_timer()
        self.state = "alone"
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
        """A trial begins; a suspect that is not alone is an ordinary run."""
        if is_busy:
            self._open_for_a_while()
            return
        fields = run_fields(execution.run, execution.event)
        _log.warning("run.tried_alone", **fields, reason=f"its worker died {crashes} times in a row")
        self.trial = execution
        self._timer = asyncio.get_running_loop().create_task(self._open_after(execution, alone_seconds(crashes)))

    def _end_trial(self) -> None:
        """The trial is over: the next one follows, or other runs may execute for a while."""
        self._stop_timer()
        self.trial = None
        if monotonic() - self._began_at > TURN_SECONDS:
            self._open_for_a_while()

    def stop(self) -> None:
        """Open no more."""
        self._stop_timer()

    def _open_for_a_while(self) -> None:
        now = monotonic()
        self._check_at = now + max(CHECK_SECONDS, PAUSE_FACTOR * (now - self._began_at))
        self._open()

    def _open(self) -> None:
        self._stop_timer()
        self.state, self.trial = "open", None
        self._after_open()

    def _stop_waiting(self) -> None:
        """The executions beside the suspect take too long to wait for."""
        self._is_patient = False
        self._after_open()

    async def _open_after(self, execution: Execution, seconds: float) -> None:
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
