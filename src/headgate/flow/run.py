"""Run: claim due runs, execute them, write what came of it. A worker that lost its claim changes nothing."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from typing import NamedTuple

from headgate import failpoints
from headgate.errors import Unavailable
from headgate.flow import slots
from headgate.flow.execution import Execution, LeaseLost, Written
from headgate.flow.leases import LeaseKeeper
from headgate.flow.slots import Fill, Freed
from headgate.flow.tell import tell_moves
from headgate.flow.workflow import Workflow
from headgate.model.event import Event
from headgate.model.retry import STEP_RETRY, RetryPolicy
from headgate.model.run import ClaimedRun, FinishedRun, Step
from headgate.model.source import TRIGGER_BREAKER, BreakerPolicy
from headgate.model.step import StepWrite, SuspendedRun
from headgate.store import events, runs, steps, trigger_gates
from headgate.store.db import Connection, Database
from headgate.store.deliveries import Claim
from headgate.store.group_commit import GroupCommit
from headgate.store.steps import Recorded
from headgate.telemetry import metrics
from headgate.telemetry.logs import logger

_WRITE_RETRY_SECONDS = 0.5

_log = logger("run")

Write = StepWrite | SuspendedRun | FinishedRun


class Waiting(NamedTuple):
    """A step that goes on at a time: what a wake-up needs to know."""

    id: uuid.UUID
    retry_attempts: int
    next_attempt_at: datetime | None


class Runner:
    """Runs the workflows of one worker process, at most `concurrency` at a time.

    The transaction that ends a run launches what waits for its slot (`fill`) and claims it: the next begins at once.
    `after_free` hears of it after the commit, `after_wait` of steps that are to be tried again.
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
        fill: Fill | None = None,
        after_free: Callable[[Freed], None] = lambda _: None,
        after_wait: Callable[[Sequence[Waiting]], None] = lambda _: None,
    ) -> None:
        self._database = database
        self._workflows = workflows
        self._worker = worker
        self._concurrency = concurrency
        self._lease_ms = lease_ms
        self._policy = policy
        self._breaker = breaker
        self._fill = fill
        self._after_free = after_free
        self._after_wait = after_wait
        self._definitions: list[uuid.UUID] = []
        self._held: dict[uuid.UUID, tuple[Execution, asyncio.Task[None]]] = {}
        self._free = asyncio.Event()
        self._closing = False
        self._workflow_threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="workflow")
        self._step_threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="step")
        self._writes: GroupCommit[Write, Written] = GroupCommit(
            self._write_all, weight=lambda _: 1, max_weight=1000, max_waiting=1_000_000
        )
        self._leases = LeaseKeeper(
            database.url, worker, lambda: self._definitions, lease_ms,
            lambda: {i: e.run for i, (e, _) in list(self._held.items())}, lost=self._lost, cancelled=self._cancelled,
        )  # fmt: skip

    def serve(self, definitions: list[uuid.UUID]) -> None:
        """The definitions whose code is in this process; runs of others are left alone."""
        self._definitions = definitions

    def start(self) -> None:
        """Begin to keep leases alive."""
        self._leases.start()

    @property
    def is_full(self) -> bool:
        """Whether every slot is taken."""
        return len(self._held) >= self._concurrency

    async def wait_for_slot(self) -> None:
        """Wait until a run ends, or nothing more is to be claimed."""
        self._free.clear()
        if self.is_full and not self._closing:
            await self._free.wait()

    async def idle(self) -> None:
        """Wait until nothing runs here."""
        while self._held:
            await asyncio.gather(*(task for _, task in list(self._held.values())), return_exceptions=True)

    def stop_claiming(self) -> None:
        """Claim nothing more; what runs goes on."""
        self._closing = True
        self._free.set()

    async def run_once(self) -> int:
        """Claim as many due runs as there are free slots and start them; how many."""
        free = self._concurrency - len(self._held)
        if free <= 0 or self._closing or not self._definitions:
            return 0
        async with self._database.transaction() as connection:
            claimed = await runs.claim_due(
                connection, definitions=self._definitions, limit=free, worker=self._worker, lease_ms=self._lease_ms
            )
            ids = {run.event_id for run in claimed if run.event_id is not None}
            found = await events.get_many(connection, ids) if ids else {}
            again = [run.id for run in claimed if run.attempts > 1]  # a fresh one has no steps yet
            known = await steps.list_of_runs(connection, again)
        failpoints.hit("run.after_claim")
        for run in claimed:
            mine = [step for step in known if step.workflow_run_id == run.id]
            self._start(run, found.get(run.event_id) if run.event_id else None, mine)
        return len(claimed)

    async def next_due_seconds(self) -> float | None:
        """Seconds until the next waiting run of this worker is due, or None."""
        async with self._database.connection() as connection:
            return await runs.next_due_seconds(connection, self._definitions)

    async def stop(self, patience_seconds: float) -> None:
        """Wait for running workflows, then hand back what is still running."""
        tasks = [task for _, task in self._held.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=patience_seconds)
        left = list(self._held.values())
        for _, task in left:
            task.cancel()
        await asyncio.gather(*(task for _, task in left), return_exceptions=True)
        await self._writes.close()
        if left:
            async with self._database.transaction() as connection:
                back = await runs.hand_back(connection, [execution.run for execution, _ in left])
            _log.info("run.handed_back", count=len(back))
        await self._leases.stop()
        for threads in (self._workflow_threads, self._step_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, run: ClaimedRun, event: Event | None, known: list[Step]) -> None:
        execution = Execution(
            run,
            self._workflows[run.workflow],
            event,
            known,
            submit=self._writes.submit,
            policy=self._policy,
            workflow_threads=self._workflow_threads,
            step_threads=self._step_threads,
        )
        self._held[run.id] = (execution, asyncio.create_task(self._execute(execution)))

    async def _execute(self, execution: Execution) -> None:
        run = execution.run
        try:
            ended = await execution.go()
            failpoints.hit("run.before_finish")
            written = await self._writes.submit(ended)
            if isinstance(ended, SuspendedRun) and written.is_cancel_requested:
                written = await self._writes.submit(execution.cancelled())
            failpoints.hit("run.after_finish")
            if not written.is_kept:
                _log.warning("run.result_discarded", run_id=str(run.id), reason="the lease was lost")
        except LeaseLost:
            _log.warning("run.lease_lost", run_id=str(run.id), workflow=run.workflow)
        finally:
            self._held.pop(run.id, None)
            self._free.set()

    def _lost(self, run_id: uuid.UUID) -> None:
        if run_id in self._held:
            execution, task = self._held[run_id]
            _log.warning("run.lease_lost", run_id=str(run_id), workflow=execution.run.workflow)
            task.cancel()

    def _cancelled(self, run_id: uuid.UUID) -> None:
        if run_id in self._held:
            self._held[run_id][0].cancel()

    async def _write_all(self, items: list[Write]) -> list[Written]:
        fill = None if self._closing else self._fill
        also: frozenset[uuid.UUID] = frozenset()
        while True:
            try:
                written, freed = await self._database.run(partial(self._write, items=items, fill=fill, also=also))
            except Unavailable as exc:
                # The work is done; keep its result until the database is back. If the lease ends first, another
                # worker runs it again, and this write will change nothing.
                _log.warning("run.finish_waits", count=len(items), error=exc)
                await asyncio.sleep(_WRITE_RETRY_SECONDS)
                continue
            except slots.Unlocked as exc:
                also |= exc.trigger_ids
                continue
            except Exception as exc:
                if fill is None:
                    raise
                # What waits for the slots cannot be decided; that must not keep these runs from ending.
                _log.warning("run.fill_failed", count=len(items), error=exc)
                fill = None
                continue
            self._committed(items, written, freed)
            return written

    async def _write(
        self, connection: Connection, items: list[Write], fill: Fill | None, also: frozenset[uuid.UUID]
    ) -> tuple[list[Written], Freed]:
        """One transaction: the outcomes of steps, runs that rest, runs that ended."""
        finished = [item for item in items if isinstance(item, FinishedRun)]
        step_writes = [item for item in items if isinstance(item, StepWrite)]
        suspended = [item for item in items if isinstance(item, SuspendedRun)]
        closing = [item.closes for item in step_writes if item.closes is not None]
        kept: dict[tuple[uuid.UUID, str], Recorded] = {}
        resting: set[uuid.UUID] = set()

        async def before() -> None:
            nonlocal kept, resting
            kept = await steps.write(connection, step_writes) if step_writes else {}
            for one in closing:
                await trigger_gates.close(
                    connection, one.trigger_id, key=one.concurrency_key, delay_ms=one.delay_ms, reason=one.reason
                )
            resting = await runs.suspend(connection, suspended) if suspended else set()

        claim = Claim(self._worker, self._lease_ms, self._definitions, len(finished))
        freed = await slots.finish(
            connection,
            finished,
            breaker=self._breaker,
            fill=fill,
            claim=claim,
            before=before,
            also=also | {one.trigger_id for one in closing},
        )
        ended = [run for run in finished if run.id in freed.written]
        await steps.end_waiting(connection, [run.id for run in ended if run.has_waiting_steps])
        await runs.bury(connection, [run for run in ended if run.status == "failed"])
        asked = await runs.cancel_requested(connection, [s.id for s in suspended if s.id not in resting])
        answers = []
        for item in items:
            if isinstance(item, StepWrite):
                row = kept.get((item.workflow_run_id, item.name))
                answers.append(Written(True, *row) if row else Written(False))
            elif isinstance(item, SuspendedRun):
                answers.append(Written(item.id in resting, item.id in asked))
            else:
                answers.append(Written(item.id in freed.written))
        return answers, freed

    def _committed(self, items: list[Write], written: list[Written], freed: Freed) -> None:
        for run, event in freed.filled.claimed if freed.filled else ():
            self._start(run, event, [])
        tell_moves(freed.moves)
        if freed.woken or freed.filled or freed.moves:
            self._after_free(freed)
        waiting: list[Waiting] = []
        for item, answer in zip(items, written, strict=True):
            if not answer.is_kept:
                continue
            if isinstance(item, FinishedRun):
                self._tell(item)
            elif isinstance(item, StepWrite) and item.kind == "step":
                outcome = {"scheduled": "scheduled", "exhausted": "exhausted"}.get(item.retry_state)
                if outcome or item.retry_attempts:
                    metrics.STEP_RETRIES.labels(outcome or "completed").inc()
            if isinstance(item, StepWrite) and item.retry_state == "scheduled":
                waiting.append(Waiting(item.id, item.retry_attempts, answer.next_attempt_at))
        if waiting:
            self._after_wait(waiting)

    def _tell(self, run: FinishedRun) -> None:
        held = self._held.get(run.id)
        if held is None:
            return
        claimed = held[0].run
        metrics.ran(claimed.workflow, run.status, (held[0].now() - claimed.started_at).total_seconds())
        log = _log.info if run.status == "succeeded" else _log.warning
        log(
            f"run.{run.status}",
            run_id=str(run.id),
            workflow=claimed.workflow,
            event_id=str(claimed.event_id),
            correlation_id=claimed.correlation_id,
            attempt=claimed.attempts,
            **({"reason": run.error.splitlines()[-1]} if run.error else {}),
        )
