"""Execution: one attempt at one claimed run, from the call of its function until it ends or must wait.

The function is called from the start each time its run resumes; the results of completed steps are stored and returned
without calling them again. A step that is to be retried later, and a timer, hold no worker: the run is suspended until
then. What was written is committed before the next step begins, so a step's effect repeats only if the process died
before its commit.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from tidegate.errors import NonRetryable
from tidegate.flow.accept.approvals import ApprovalLinks
from tidegate.flow.accept.backlog import SourceCaps
from tidegate.flow.call import approvals, marks, publishing
from tidegate.flow.call.children import Children
from tidegate.flow.call.endings import End, Endings
from tidegate.flow.call.fit import Fit
from tidegate.flow.call.journal import Cancelled, DelayedSends, Journal, LeaseLost, Put
from tidegate.flow.call.spending import AskSpend
from tidegate.flow.call.states import EXECUTING, STOPPING, ExecutionState
from tidegate.flow.call.step_parts import QUIET_SECONDS, Suspend
from tidegate.flow.call.steps import RunSteps
from tidegate.flow.call.stopping import StoppableCall
from tidegate.flow.call.transaction import StepTransaction, step_name
from tidegate.flow.call.waits import Ask, register_cancel
from tidegate.flow.code import user_calls
from tidegate.flow.code.approval_call import ApprovalCall, ApprovalHandle
from tidegate.flow.code.calls import Calls
from tidegate.flow.code.child_calls import Child
from tidegate.flow.code.context import Context, Fields
from tidegate.flow.code.sync_context import SyncContext
from tidegate.flow.code.user_calls import encode_output
from tidegate.flow.code.workflow import Workflow
from tidegate.flow.decide.reporting import run_fields
from tidegate.model.event import Accepted, Event, EventLimits
from tidegate.model.retry import RetryPolicy
from tidegate.model.run import ClaimedRun, FinishedRun, Step
from tidegate.model.step import SuspendedRun
from tidegate.store.transactions import Transactions
from tidegate.telemetry.logs import logger

_log = logger("run")


class Execution(RunSteps):
    """One attempt at one run. `on_abandoned` is called when its function does not stop, with the end to write
    without it (None: nothing is written); the task that the function is in is lost."""

    def __init__(
        self,
        run: ClaimedRun,
        workflow: Workflow,
        event: Event | None,
        steps: list[Step],
        *,
        put: Put,
        delayed: DelayedSends,
        policy: RetryPolicy,
        workflow_threads: Executor,
        step_threads: Executor,
        ask: Ask,
        ask_spend: AskSpend,
        transactions: Transactions,
        on_abandoned: Callable[[Execution, End | None], None],
        limits: EventLimits,
        workflows: Mapping[str, Workflow],
        links: ApprovalLinks,
        caps: SourceCaps,
    ) -> None:
        known = {step.name: step for step in steps if not step.is_to_be_asked_again}
        super().__init__(
            run, event, known, journal=Journal(put, delayed, is_cancelled=run.cancel_requested),
            endings=Endings(run, workflow, policy, known, event.child_of if event and event.origin else None),
            policy=policy, step_threads=step_threads, ask=ask, ask_spend=ask_spend, before_step=workflow.before_step,
        )  # fmt: skip
        self.calls = Calls()
        self._again = {step.name for step in steps if step.begins_again}
        self.task: asyncio.Task[None] | None = None  # of the worker, while the execution has something to do
        self._workflow = workflow
        self._workflow_threads = workflow_threads
        self._transactions = transactions
        self._calling = StoppableCall()
        self._stopped_with: Callable[[], End] | None = None  # how the run ends when its function was told to stop
        self._on_abandoned = on_abandoned
        self._limits = limits
        self._workflows = workflows
        self._links = links
        self._caps = caps
        if self.is_other_code and steps:
            self.fit = Fit(steps, run.version_since)
            self.journal.before_barrier = self._wait_for_fit
        elif run.has_misfit:  # it has waited for this version
            self.journal.note(run, version=workflow.version)

    def move(self, state: ExecutionState) -> None:
        """Enter a state; RuntimeError when it cannot follow the present one (see `states`)."""
        if state not in self.state.next:
            raise RuntimeError(f"execution of run {self.run.id} is {self.state} and cannot become {state}")
        self.state = state

    async def transaction(
        self,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        name: str | None,
        retry: RetryPolicy | None,
        timeout: str | int | float | None,
        engine: object,
    ) -> Any:
        """The result of a step whose function writes to this database, in the same commit as its result."""
        within = StepTransaction(self._transactions, function, args, kwargs, timeout=timeout, engine=engine)
        named = step_name(function, name)
        return await self.step(named, function, (), {}, retry=retry, timeout=None, transaction=within)

    def cancel(self) -> None:
        """Stop at the next step."""
        self.journal.is_cancelled = True

    @property
    def is_to_be_called(self) -> bool:
        """Whether its function has anything to do: the run is not to be cancelled, and its time is not over."""
        left = self.endings.seconds_left(self.now())
        return not self.journal.is_cancelled and (left is None or left > 0)

    @property
    def has_stopped(self) -> bool:
        """Whether nothing of its function is left: neither in its task nor in a thread."""
        return self._calling.task is None and not self._threads

    async def stopped(self) -> None:
        """Wait until nothing is left of its function."""
        if self._calling.task is not None:
            await asyncio.wait([self._calling.task])
        await self._threads.gone()

    async def call(self) -> End:
        """Call the function in this task; how the run ended, or until when it is suspended. LeaseLost when it
        belongs to another worker, CancelledError when it was told to `stop`."""
        left = self.endings.seconds_left(self.now())
        if left is not None and left <= 0:
            return self.endings.timed_out()
        if self.run.needs_slot and not self.journal.is_cancelled:  # it has more time by this code than by that before
            return self.endings.without_slot()
        on_timeout = partial(self._stop_with, self.endings.timed_out)
        try:
            result, error = await self._calling.run(self._call(), left, on_timeout)
        finally:
            if self.fit is not None:
                self.fit.close()
        return await self._ended(result, error) if self._stopped_with is None else self._stopped_with()

    def stop(self) -> bool:
        """Have the function stop, with nothing to write: `call` raises CancelledError. False when it is not called."""
        self._stopped_with = _nothing_to_write
        if self._calling.task is not None:
            self.begin_no_more_steps()
        return self._calling.stop(self._give_up)

    def patched(self, name: str) -> bool:
        if self.state is not EXECUTING:
            raise Suspend
        return marks.patched(self, name)

    def tag(self, given: dict[str, str | int | uuid.UUID]) -> None:
        marks.tag(self, given)

    def begin_no_more_steps(self) -> None:
        if self.state is EXECUTING:
            self.move(STOPPING)

    def unwritable(self, exc: BaseException) -> FinishedRun:
        """The end to write in place of one that the database refuses."""
        _log.error("run.unwritable", **run_fields(self.run, self.event), error=exc, exc_info=exc)
        return self.endings.unwritable(exc)

    @property
    def is_other_code(self) -> bool:
        return self.run.version is not None and self.run.version != self._workflow.version

    def fits(self) -> None:
        self.fit = self.journal.before_barrier = None
        self.journal.note(self.run, version=self._workflow.version)

    @property
    def is_async(self) -> bool:
        return self._workflow.is_async

    @property
    def function_task(self) -> asyncio.Task[object] | None:
        return self._calling.task

    async def publish(self, name: str | None, fields: Fields, *, is_alone: bool = True) -> Accepted:
        return await publishing.publish(self, name, fields, self._limits, self._caps, is_alone=is_alone)

    async def approval(self, call: ApprovalCall) -> ApprovalHandle:
        link = await approvals.ask_for(self, call, self._links)
        return ApprovalHandle(call.name, link, partial(approvals.result, self, ask=self._ask), self)

    def _children(self) -> Children:
        return Children(self, self._workflows, self._limits)

    async def start_child(
        self, name: str | None, child: Child, given: Mapping[str, object], *, is_alone: bool = True
    ) -> str:
        return await self._children().start(name, child, given, is_alone=is_alone)

    async def child_result(self, name: str, child: Child) -> Any:
        return await self._children().typed_result(name, child)

    async def map_children(
        self,
        name: str | None,
        child: Child,
        items: Sequence[object],
        at_once: int,
        *,
        goes_on: bool,
        is_alone: bool = True,
    ) -> list[Any]:
        return await self._children().map(name, child, items, at_once, goes_on=goes_on, is_alone=is_alone)

    def suspend(self) -> None:
        self._stop_with(self.endings.suspended)

    def _stop_with(self, end: Callable[[], End]) -> None:
        """Have the function stop; whatever it returns or raises then, `end` says how the run ends."""
        if self._calling.task is not None and self._stopped_with is None:
            self._stopped_with = end
            self.begin_no_more_steps()
            self._calling.stop(self._give_up)

    def _give_up(self) -> None:
        """The function does not stop; what is to be written is written without it."""
        _log.error("run.does_not_stop", **run_fields(self.run, self.event))
        end = self._stopped_with or _nothing_to_write
        self._on_abandoned(self, None if end is _nothing_to_write else end())

    async def _call(self) -> Any:
        self.journal.check()
        arguments = self._workflow.bind(self.run.parameters)
        if self._workflow.cancel_on:
            await register_cancel(self, self._workflow.cancel_on, self._ask)
        if self.fit is not None:
            self.fit.watch()
        if self._workflow.is_async:
            return await user_calls.guarded(self._workflow.function(Context(self), **arguments))
        loop = asyncio.get_running_loop()
        ctx = SyncContext(self, loop)

        def call() -> Any:
            ctx.called_here()
            return self._workflow.function(ctx, **arguments)

        return await self._threads.call(self._workflow_threads, call)

    async def _ended(self, result: Any, error: BaseException | None) -> End:
        """How the run ends, now that its function has. A cancelled run or a lost lease wins over what it returned."""
        if isinstance(self.journal.raised, LeaseLost):
            raise self.journal.raised
        if isinstance(self.journal.raised, Cancelled):
            return self.endings.cancelled()
        if self.state is STOPPING or isinstance(error, Suspend):
            return self.endings.suspended()
        if self.fit is not None and (why := await self.fit.at_end(has_failed=error is not None)) is not None:
            self.misfit(why)
            return self.endings.suspended()
        try:
            if error is not None:
                raise error
            if forgotten := self.calls.forgotten():
                raise NonRetryable(_not_awaited(forgotten))
            end: End = self.endings.succeeded(encode_output(result, "what the workflow returned"))
        except BaseException as exc:  # noqa: BLE001 - user code may raise anything; it is how the run ends
            end = self.endings.raised(exc)
            if self.spans is not None:
                self.spans.fail(exc)
        if self._active and isinstance(end, SuspendedRun):
            self.move(STOPPING)
            while self._active:  # noqa: ASYNC110 - the steps in progress are part of this attempt
                await asyncio.sleep(QUIET_SECONDS)
        return end


def _not_awaited(calls: Sequence[str]) -> str:
    others = f", nor {len(calls) - 1} other calls" if len(calls) > 1 else ""
    return f"{calls[0]} was called but not awaited{others}, so it was not executed: write `await` before it"


def _nothing_to_write() -> End:
    raise asyncio.CancelledError
