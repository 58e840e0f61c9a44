"""Run: claim due runs, execute them, hand in what came of it. A worker that lost its claim changes nothing."""

from __future__ import annotations

import asyncio
import contextvars
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.flow.decide.reporting import run_fields, tell_ended, tell_left
from tidegate.flow.run.claimed_ahead import Ahead
from tidegate.flow.run.claims import Claims
from tidegate.flow.run.due import DueRuns
from tidegate.flow.run.earlier import Earlier
from tidegate.flow.run.endings import End
from tidegate.flow.run.execution import Execution
from tidegate.flow.run.finish import Fill, Freed
from tidegate.flow.run.journal import LeaseLost, Soon, Written
from tidegate.flow.run.leases import LeaseKeeper
from tidegate.flow.run.outcomes import OutcomeWriter, WaitingStep
from tidegate.flow.run.quarantine import Quarantine
from tidegate.flow.run.workflow import Workflow
from tidegate.model.event import Event
from tidegate.model.retry import STEP_RETRY, RetryPolicy
from tidegate.model.run import ClaimedRun, FinishedRun, Step
from tidegate.model.source import SOURCE_BREAKER, TRIGGER_BREAKER, BreakerPolicy, SourceBreakerPolicy
from tidegate.store import runs
from tidegate.store.db import Database
from tidegate.store.deliveries import NOBODY, Claim
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

# When so many are claimed ahead, new events wait a little for them: their runs are then claimed as they are created.
BUSY, BREATH_SECONDS = 50, 0.25

_log = logger("run")


class Runner:
    """Runs the workflows of one worker process, at most `concurrency` at a time.

    A run is claimed here when it is due (`run_once`), or with its creation: by whoever asks for a `claim` and passes
    the runs to `start`. `after_free` hears of what a freed slot let launch, `after_wait` of steps that wait.
    """

    def __init__(
        self,
        database: Database,
        workflows: Mapping[str, Workflow],
        *,
        worker: str,
        concurrency: int,
        lease_ms: int,
        policy: RetryPolicy = STEP_RETRY,
        breaker: BreakerPolicy = TRIGGER_BREAKER,
        source_breaker: SourceBreakerPolicy = SOURCE_BREAKER,
        fill: Fill | None = None,
        after_free: Callable[[Freed], None] = lambda _: None,
        after_wait: Callable[[Sequence[WaitingStep]], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._workflows = workflows
        self._worker = worker
        self._concurrency = concurrency
        self._lease_ms = lease_ms
        self._policy = policy
        self._after_free = after_free
        self._definitions: list[uuid.UUID] = []
        self._free = asyncio.Event()
        self._ahead = Ahead(database, concurrency, after_return=self._free.set)
        self._claims = Claims(lambda: [execution.run for execution in (*self._ahead, *self._held())])
        self._due = DueRuns(database, worker, lease_ms)
        self._quarantine = Quarantine(database, self._due, after_open=self._reopened)
        self._tasks: dict[Execution, asyncio.Task[None]] = {}  # begun
        self._executing: set[Execution] = set()  # those of them that hold a slot
        self._writing: set[Execution] = set()  # ended, and that is on its way into the database
        self._stuck: set[asyncio.Task[None]] = set()  # functions that do not leave
        self._earlier = Earlier()  # told to leave
        self._has_backlog = False
        self._soon = Soon()
        self._context = contextvars.copy_context()  # of every run: none sees what another one has set
        self._closing = False
        self._workflow_threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="workflow")
        self._step_threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="step")
        self._outcomes = OutcomeWriter(
            database, breaker=breaker, source_breaker=source_breaker, fill=fill, claim=self._claim_freed,
            after_free=self._freed, after_wait=after_wait, after_close=self._ahead.give_back_of,
        )  # fmt: skip
        self._leases = LeaseKeeper(
            database.url, worker, lambda: self._definitions, lease_ms,
            lambda: [(execution.run, execution.claimed_at) for execution in self._held()],
            lost=self._lost, overdue=partial(self._lost, is_taken=False), cancelled=self._cancelled,
        )  # fmt: skip

    def serve(self, definitions: list[uuid.UUID]) -> None:
        """The definitions whose code is in this process; runs of others are left alone."""
        self._definitions = definitions

    def keep_leases(self) -> None:
        """Begin to keep leases alive."""
        self._leases.start()

    @property
    def room(self) -> int:
        """How many runs may be claimed now."""
        claimed = len(self._ahead) + len(self._tasks) + len(self._writing)
        is_open = self._quarantine.state == "open" and not self._closing
        return max(0, self._concurrency + self._ahead.most - claimed) if is_open else 0

    @property
    def claims_nothing(self) -> bool:
        """Whether runs that are created now are left to others, or until later."""
        return self.room == 0 or not self._definitions

    def claim(self, ending: int = 0) -> Claim:
        """What this worker claims of runs that are being created, also into the slots of runs that end."""
        room = ending if ending and self._quarantine.state == "open" else self.room
        return Claim(self._worker, self._lease_ms, self._definitions, room) if room else NOBODY

    def expect(self) -> None:
        """Runs were created that this worker did not claim at once."""
        self._has_backlog = True

    def start(self, claimed: Sequence[tuple[ClaimedRun, Event | None]]) -> None:
        """Execute runs that were claimed for this worker."""
        failpoints.hit("run.after_claim")
        for run, event in claimed:
            self._start(run, event, [])

    async def wait_for_room(self) -> None:
        """Wait until more may be claimed, or nothing more is to be claimed."""
        self._free.clear()
        if self.room == 0 and not self._closing:
            await self._free.wait()

    async def breathe(self) -> None:
        """While short runs end all the time, wait a moment for room: runs that are created then are claimed at once."""
        if self._ahead.most < BUSY:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(BREATH_SECONDS):
                while (self._has_backlog or self.room < self._ahead.most // 2) and not self._closing:
                    self._free.clear()
                    await self._free.wait()

    async def idle(self) -> None:
        """Wait until nothing runs here."""
        while self._tasks or self._writing:
            self._free.clear()
            await self._free.wait()

    def stop_claiming(self) -> None:
        """Claim nothing more; what runs goes on."""
        self._closing = True
        self._free.set()

    async def run_once(self) -> int:
        """Claim as many due runs as there is room for, or one suspect if it is time for that, and start them; how
        many."""
        if self._closing or not self._definitions:
            return 0
        await self._quarantine.look(self._definitions)
        if self._quarantine.state != "open" and (started := await self._try_suspect()):
            return started
        room = self.room
        if room == 0:
            return 0
        claimed = await self._due.claim(self._definitions, room)
        if claimed:
            failpoints.hit("run.after_claim")
        self._has_backlog = len(claimed) == room
        self._free.set()
        for ready in claimed:
            self._start(*ready)
        return len(claimed) or (await self._try_suspect() if self._quarantine.has_suspects else 0)

    def look_for_suspects(self) -> None:
        """Runs of a dead worker are due again."""
        self._quarantine.look_now()

    async def _try_suspect(self) -> int:
        """Execute one suspect, and nothing beside it, once nothing else executes here; how many were begun."""
        if len(self._executing) >= self._concurrency:
            return 0
        is_busy = bool(self._executing) or len(self._ahead) > 0
        is_alone = not (self._stuck or self._earlier)  # or what kills the worker may be a function that does not leave
        found = await self._quarantine.next(self._definitions, is_busy, self._held, is_counted=is_alone)
        if found is None:
            return 0
        ready, crashes = found
        execution = self._taken_up(*ready)
        assert execution is not None, "a claim made just now was taken up before"
        self._quarantine.begin(execution, crashes, is_busy=is_busy)
        self._go_on_in_slot(execution)
        return 1

    def _reopened(self) -> None:
        self._begin()
        self._free.set()

    async def next_due_seconds(self) -> float | None:
        """Seconds until the next waiting run of this worker is due, or None."""
        if not self._definitions:
            return None
        async with self._database.connection() as connection:
            return await runs.next_due_seconds(connection, self._definitions)

    async def stop(self, patience_seconds: float) -> None:
        """Wait for running workflows, then hand back what is still running."""
        self._quarantine.stop()
        await self._ahead.give_back()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_seconds):
                await self.idle()
        left: list[Execution] = []
        while self._tasks or self._outcomes.is_busy:  # a commit that is under way may still begin what fills a slot
            left += self._held()
            for execution in self._held():
                self._leave(execution)
            await self.idle()
            await self._outcomes.close()
        await self._ahead.give_back()
        await self._ahead.settle()
        if left:
            async with self._database.transaction() as connection:
                back = await runs.hand_back(connection, [one.run for one in left if one.is_gone])
                # A function that has not left ends with the process: nobody is to begin anew before that.
                later = [one.run for one in left if not one.is_gone]
                back |= await runs.hand_back(connection, later, delay_ms=self._lease_ms)
            _log.info("run.handed_back", count=len(back))
        await self._leases.stop()
        for threads in (self._workflow_threads, self._step_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, run: ClaimedRun, event: Event | None, known: list[Step]) -> None:
        execution = self._taken_up(run, event, known)
        if execution is not None:
            self._ahead.add(execution)
            self._begin()

    def _taken_up(self, run: ClaimedRun, event: Event | None, known: list[Step]) -> Execution | None:
        if not self._claims.take(run):
            metrics.EXECUTIONS_REFUSED.inc()
            _log.error("run.refused", **run_fields(run, event), reason="this claim was taken up here before")
            return None
        for ghost in [one for one in self._held() if one.run.id == run.id] if run.attempts > 1 else ():
            self._leave(ghost)  # its lease ended, and this worker is the one that took over
        return Execution(
            run,
            self._workflows[run.workflow],
            event,
            known,
            put=self._outcomes.put,
            soon=self._soon,
            policy=self._policy,
            workflow_threads=self._workflow_threads,
            step_threads=self._step_threads,
            abandon=self._abandoned,
        )

    def _begin(self) -> None:
        """Begin what is ready, as far as there are slots; the rest waits for one, but not for long."""
        while (
            self._quarantine.state != "closed"
            and len(self._executing) < self._concurrency
            and (one := self._ahead.next(self._lease_ms / 3000)) is not None
        ):
            self._go_on_in_slot(one)
        self._ahead.return_later()

    def _go_on_in_slot(self, execution: Execution) -> None:
        self._executing.add(execution)
        self._go_on(execution, self._execute(execution))

    def _go_on(self, execution: Execution, work: Coroutine[Any, Any, None]) -> None:
        self._tasks[execution] = task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        task.add_done_callback(partial(self._over, execution))

    async def _execute(self, execution: Execution) -> None:
        if execution.spans is not None:
            execution.spans.enter()
        if _log.is_debug:
            _log.debug("run.started", **run_fields(execution.run, execution.event))
        began_at = monotonic()
        try:
            if self._earlier:
                await self._earlier.gone(execution)
            ended = await execution.go()
        except BaseException as exc:  # noqa: BLE001 - re-raised unless the lease was lost
            if not execution.is_abandoned:
                self._without_end(execution, exc)
            return
        if not execution.is_abandoned:  # or another task has gone on with it
            self._ahead.learn(monotonic() - began_at)
            await self._finish(execution, ended)

    async def _finish(self, execution: Execution, ended: End) -> None:
        """Hand in how a run ended, or until when it rests; `_written` goes on with it, without a task."""
        failpoints.hit("run.before_finish")
        self._free_slot(execution)  # what is left to do needs none
        try:
            await execution.close(ended, partial(self._written, execution))
        except BaseException as exc:  # noqa: BLE001 - re-raised unless the lease was lost
            self._without_end(execution, exc)
            return
        self._writing.add(execution)
        del self._tasks[execution]

    def _written(self, execution: Execution, ended: End, written: Written | BaseException) -> None:
        """How a run ended is committed, or will never be."""
        if execution not in self._writing:
            return  # it was left
        self._writing.remove(execution)
        self._free.set()
        failpoints.hit("run.after_finish")
        is_kept = isinstance(written, Written) and written.is_kept
        if execution.spans is not None:
            execution.spans.end(ended, is_kept=is_kept)
        if isinstance(written, Exception):
            tell_left(execution.run, execution.event, written)
        elif not is_kept:
            fields = run_fields(execution.run, execution.event)
            _log.warning("run.result_discarded", **fields, reason="the lease was lost")
        elif isinstance(ended, FinishedRun):
            tell_ended(execution.run, execution.event, ended, monotonic() - execution.claimed_at)

    def _without_end(self, execution: Execution, exc: BaseException) -> None:
        """Nothing is written of a run here any more."""
        if execution.spans is not None:
            execution.spans.end(None, is_kept=False)
        if not isinstance(exc, LeaseLost):
            raise exc
        _log.warning("run.lease_lost", **run_fields(execution.run, execution.event))

    def _abandoned(self, execution: Execution, end: End | None) -> None:
        """The function of a run does not leave. What is to be written of the run is written without it."""
        stuck = self._tasks.pop(execution)
        self._stuck.add(stuck)
        stuck.add_done_callback(self._stuck.discard)
        if end is not None:
            self._go_on(execution, self._finish(execution, end))
        else:
            self._free_slot(execution)
            self._free.set()

    def _held(self) -> list[Execution]:
        """The runs that are begun and not yet written to the end. Asked from another thread too, while one moves on."""
        return [*self._tasks, *self._writing]

    def _leave(self, execution: Execution) -> None:
        """Have a run end here, unwritten. Should it go on here, that waits until nothing is left of this."""
        if execution in self._writing:
            self._writing.remove(execution)
            self._free.set()
            if execution.spans is not None:
                execution.spans.end(None, is_kept=False)
            return
        if not execution.leave():
            self._tasks[execution].cancel()
        self._earlier.add(execution)

    def _free_slot(self, execution: Execution) -> None:
        if execution in self._executing:
            self._executing.remove(execution)
            self._begin()

    def _over(self, execution: Execution, task: asyncio.Task[None]) -> None:
        """Nothing is left of a run here, however it went. If it was not written, its lease ends by itself."""
        if self._tasks.get(execution) is not task:
            return  # it was abandoned, or is being written
        del self._tasks[execution]
        self._free_slot(execution)
        self._free.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            tell_left(execution.run, execution.event, error)

    def _lost(self, run: ClaimedRun, is_taken: bool = True) -> None:
        """Another worker has it, or may have it soon: what is being written counts if that comes first."""
        for execution in [one for one in (self._held() if is_taken else self._tasks) if one.run is run]:
            _log.warning("run.lease_lost", **run_fields(run, execution.event))
            self._leave(execution)

    def _cancelled(self, run_id: uuid.UUID) -> None:
        for execution in [one for one in self._tasks if one.run.id == run_id]:
            execution.cancel()

    def _claim_freed(self, ending: int) -> Claim | None:
        """What this worker claims of what is launched into the slots of runs that end; None: nothing is launched."""
        return None if self._closing else self.claim(ending)

    def _freed(self, freed: Freed) -> None:
        if freed.filled:
            self.start(freed.filled.claimed)
        self._after_free(freed)
