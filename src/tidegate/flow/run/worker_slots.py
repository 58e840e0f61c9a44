"""Worker slots: the runs that one worker executes, from the claim until their end is written.

Each execution has one state (`states`). In order:

    add ▸ take_up (ready) ▸ begin (executing) ▸ _execute ▸ _write_end (writing) ▸ _end_written (finished or suspended)

If anything fails on that way the execution is lost (`_lose`): nothing is written, and the lease ends by itself.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.errors import Unavailable
from tidegate.flow.accept.approvals import ApprovalLinks
from tidegate.flow.accept.backlog import SourceCaps
from tidegate.flow.call.endings import End
from tidegate.flow.call.execution import Execution
from tidegate.flow.call.journal import DelayedSends, LeaseLost, Put, Written
from tidegate.flow.call.spending import AskSpend
from tidegate.flow.call.states import EXECUTING, FINISHED, LOST, SUSPENDED, WRITING, ExecutionState
from tidegate.flow.call.stopping import EarlierExecutions
from tidegate.flow.call.waits import Ask
from tidegate.flow.code.workflow import Workflow
from tidegate.flow.decide.reporting import log_left, report_ended, run_fields
from tidegate.flow.run.claiming import Claims, Prefetch
from tidegate.model.event import Event, EventLimits
from tidegate.model.ids import RunId
from tidegate.model.retry import RetryPolicy
from tidegate.model.run import ClaimedRun, FinishedRun, Step
from tidegate.model.step import SuspendedRun
from tidegate.store.transactions import Transactions
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("run")


class WorkerSlots:
    """The executions of one worker, at most `concurrency` of them in slots. `put` hands what they write to the group
    commit, `ask` and `ask_spend` what they ask about events that they wait for, and about budgets; while `may_begin` is
    false, none begins; `on_free` is called when one is over."""

    def __init__(
        self,
        workflows: Mapping[str, Workflow],
        prefetch: Prefetch,
        *,
        concurrency: int,
        lease_ms: int,
        policy: RetryPolicy,
        put: Put,
        ask: Ask,
        ask_spend: AskSpend,
        transactions: Transactions,
        may_begin: Callable[[], bool],
        on_free: Callable[[], None],
        limits: EventLimits,
        links: ApprovalLinks,
        caps: SourceCaps,
    ) -> None:
        self._workflows = workflows
        self._prefetch = prefetch
        self._concurrency = concurrency
        self._lease_ms = lease_ms
        self._policy = policy
        self._put = put
        self._ask, self._ask_spend = ask, ask_spend
        self._transactions = transactions
        self._may_begin = may_begin
        self._on_free = on_free
        self._limits = limits
        self._links = links
        self._caps = caps
        self._claims = Claims(self.claimed)
        self._begun: dict[Execution, None] = {}  # those that are neither ready nor over, oldest first
        self.used = 0
        self._used_by: Counter[str] = Counter()  # the slots that each workflow uses
        self._earlier = EarlierExecutions()
        self._abandoned: set[asyncio.Task[None]] = set()  # of functions that do not stop
        self._delayed = DelayedSends()
        self._context = contextvars.copy_context()  # of every run: none sees what another one has set
        self._workflow_threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="workflow")
        self._step_threads = ThreadPoolExecutor(max_workers=concurrency, thread_name_prefix="step")

    def __len__(self) -> int:
        """How many have begun and are not over."""
        return len(self._begun)

    def claimed(self) -> list[ClaimedRun]:
        """The runs that this worker holds."""
        return [execution.run for execution in (*self._prefetch, *self._begun)]

    @property
    def has_remains(self) -> bool:
        """Whether functions may still be running that were told to stop."""
        return bool(self._abandoned or self._earlier)

    def close(self) -> None:
        """Let the threads end."""
        for threads in (self._workflow_threads, self._step_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    # From claimed to executing ---------------------------------------------------------------------------------------

    def add(self, claimed: Iterable[tuple[ClaimedRun, Event | None, list[Step]]]) -> None:
        """Execute claimed runs as soon as there are free slots. All are ready before the first begins: a free slot goes
        to the workflow whose turn it is."""
        for run, event, known in claimed:
            execution = self.take_up(run, event, known)
            if execution is not None:
                self._prefetch.add(execution)
        self.begin_ready()

    def take_up(self, run: ClaimedRun, event: Event | None, known: list[Step]) -> Execution | None:
        """An execution of a claimed run; None when this claim was taken up before."""
        if not self._claims.take(run):
            metrics.EXECUTIONS_REFUSED.inc()
            _log.error("run.refused", **run_fields(run, event), reason="this claim was taken up here before")
            return None
        for earlier in [one for one in self.held() if one.run.id == run.id] if run.attempts > 1 else ():
            self.stop(earlier)  # its lease ended, and this worker is the one that took over
        return Execution(
            run,
            self._workflows[run.workflow],
            event,
            known,
            put=self._put,
            delayed=self._delayed,
            policy=self._policy,
            workflow_threads=self._workflow_threads,
            step_threads=self._step_threads,
            ask=self._ask,
            ask_spend=self._ask_spend,
            transactions=self._transactions,
            on_abandoned=self._abandon,
            limits=self._limits,
            workflows=self._workflows,
            links=self._links,
            caps=self._caps,
        )

    def begin_ready(self) -> None:
        """Begin what is ready, as far as there are free slots; the rest waits for one, for RELEASE_SECONDS at most."""
        while (
            self._may_begin()
            and self.used < self._concurrency
            and (execution := self._prefetch.next(self._lease_ms / 3000, self._used_by)) is not None
        ):
            self.begin(execution)
        self._prefetch.release_later()

    def begin(self, execution: Execution) -> None:
        """Call the function of a run, in a slot."""
        execution.move(EXECUTING)
        self._begun[execution] = None
        self.used += 1
        self._used_by[execution.run.workflow] += 1
        self._work_on(execution, self._execute(execution))

    def _work_on(self, execution: Execution, work: Coroutine[Any, Any, None]) -> None:
        execution.task = task = asyncio.get_running_loop().create_task(work, context=self._context.copy())
        task.add_done_callback(partial(self._task_done, execution))

    async def _execute(self, execution: Execution) -> None:
        """The task of an execution: call the function, then write how it ended."""
        if execution.spans is not None:
            execution.spans.enter()
        if _log.is_debug:
            _log.debug("run.started", **run_fields(execution.run, execution.event))
        began_at = monotonic()
        if self._earlier:
            await self._earlier.stopped(execution)
        end = await execution.call()
        if execution.task is asyncio.current_task():  # or it was abandoned, and the run continues without this task
            self._prefetch.learn(monotonic() - began_at)
            await self._write_end(execution, end)

    # The end of an execution, in order -------------------------------------------------------------------------------

    async def _write_end(self, execution: Execution, end: End) -> None:
        """Write how the run ended, or until when it is suspended, after what its steps wrote before."""
        failpoints.hit("run.before_finish")
        self._move(execution, WRITING)
        try:
            await execution.journal.wait_for_sent()
        except Unavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - a step's outcome cannot be stored: the run ends as failed instead
            self._put_end(execution, execution.unwritable(exc), is_replacement=True)
        else:
            self._put_end(execution, end)
        execution.task = None  # the group commit does the rest

    def _put_end(self, execution: Execution, end: End, *, is_replacement: bool = False) -> None:
        then = partial(self._end_written, execution, end, is_replacement)
        execution.journal.write_end(end, then, with_steps=not is_replacement)

    def _end_written(
        self, execution: Execution, end: End, is_replacement: bool, written: Written | BaseException
    ) -> None:
        """The end is committed, or cannot be. In place of one that cannot, and of the suspension of a run that is to be
        cancelled, another end is written, without steps."""
        if not is_replacement and (other := _replacement(execution, end, written)) is not None:
            try:
                self._put_end(execution, other, is_replacement=True)
                return
            except Exception as exc:  # noqa: BLE001 - reported below, as the reason why nothing was written
                written = exc
        if execution.state is not WRITING:
            return  # it was lost meanwhile
        if not isinstance(written, Written) or not written.is_kept:
            self._lose(execution)
            failpoints.hit("run.after_finish")
            if isinstance(written, Exception):
                log_left(execution.run, execution.event, written)
            elif isinstance(written, Written):
                fields = run_fields(execution.run, execution.event)
                _log.warning("run.result_discarded", **fields, reason="the lease was lost")
            return
        self._move(execution, FINISHED if isinstance(end, FinishedRun) else SUSPENDED)
        failpoints.hit("run.after_finish")
        if execution.spans is not None:
            execution.spans.end(end, is_kept=True)
        if isinstance(end, FinishedRun):
            report_ended(execution.run, execution.event, end, monotonic() - execution.claimed_at)

    def _task_done(self, execution: Execution, task: asyncio.Task[None]) -> None:
        """The task of an execution has ended. If it is still the execution's, it failed before the end was handed over:
        nothing is written, and the lease ends by itself."""
        if execution.task is not task:
            return
        self._lose(execution)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, LeaseLost):
            _log.warning("run.lease_lost", **run_fields(execution.run, execution.event))
        elif error is not None:
            log_left(execution.run, execution.event, error)

    def _lose(self, execution: Execution) -> None:
        """Nothing more is written of the execution here."""
        execution.task = None
        self._move(execution, LOST)
        if execution.spans is not None:
            execution.spans.end(None, is_kept=False)

    def _move(self, execution: Execution, state: ExecutionState) -> None:
        held_slot = execution.state.holds_slot
        execution.move(state)
        if state.is_over:
            del self._begun[execution]
            self._on_free()
        if held_slot and not state.holds_slot:
            self.used -= 1
            self._used_by[execution.run.workflow] -= 1
            self.begin_ready()

    # Stopping an execution -------------------------------------------------------------------------------------------

    def held(self) -> list[Execution]:
        """The executions that are begun and not over. Called from the thread that renews leases, too."""
        return list(self._begun)

    def stop(self, execution: Execution) -> None:
        """End an execution with nothing written. A later execution of its run waits until its function has stopped."""
        if execution.task is None:  # its end is being written; that counts if it is committed before the lease ends
            self._lose(execution)
            return
        if not execution.stop():
            execution.task.cancel()
        self._earlier.add(execution)

    def _abandon(self, execution: Execution, end: End | None) -> None:
        """The function of a run does not stop. What is to be written of the run is written without it."""
        stuck, execution.task = execution.task, None
        assert stuck is not None, "a function that is called without a task"
        self._abandoned.add(stuck)
        stuck.add_done_callback(self._abandoned_ended)
        if end is None:
            self._lose(execution)
            return
        if isinstance(end, SuspendedRun):
            self._earlier.add(execution)  # should this worker resume the run, that waits until the function has stopped
        self._work_on(execution, self._write_end(execution, end))

    def _abandoned_ended(self, task: asyncio.Task[None]) -> None:
        self._abandoned.discard(task)
        if not task.cancelled():
            task.exception()  # whatever it raised in the end, nobody waits for it

    def lease_lost(self, run: ClaimedRun, is_taken: bool = True) -> None:
        """Another worker has the run; or may have it soon (`is_taken` false): then an end that is being written counts
        if it is committed first."""
        for execution in [one for one in self.held() if one.run is run and (is_taken or one.task is not None)]:
            _log.warning("run.lease_lost", **run_fields(run, execution.event))
            self.stop(execution)

    def waits_here(self, run_id: RunId, claim_generation: int) -> bool:
        """Whether a run is executing here, by that claim, and one of its steps waits."""
        return any(one.is_parked for one in self._of_claim(run_id, claim_generation))

    def woken(self, run_id: RunId, claim_generation: int, wakes: int, steps: Sequence[Step]) -> None:
        """The children of a run that may be executing here have ended: its steps, and how often it was woken. An
        execution that has lost its claim does not go on."""
        for execution in self._of_claim(run_id, claim_generation):
            execution.woken(steps, wakes)

    def _of_claim(self, run_id: RunId, claim_generation: int) -> list[Execution]:
        return [e for e in self.held() if e.run.id == run_id and e.run.claim_generation == claim_generation]

    def cancelled(self, run_id: RunId) -> None:
        """A run that may be executed here is to be cancelled."""
        for execution in self.held():
            if execution.run.id == run_id:
                execution.cancel()


def _replacement(execution: Execution, end: End, written: Written | BaseException) -> FinishedRun | None:
    """What to write in place of an end that could not be written as it is."""
    if isinstance(written, Unavailable):
        return None  # the worker stops while the database is down; the lease ends by itself
    if isinstance(written, Exception):
        return execution.unwritable(written)
    if isinstance(end, SuspendedRun) and isinstance(written, Written) and written.is_cancel_requested:
        return execution.endings.cancelled()
    return None
