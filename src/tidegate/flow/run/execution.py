"""Execution: one attempt at one claimed run, from the call of its function until it ends or must wait.

The function is called from the start each time its run resumes; the results of completed steps are stored and returned
without calling them again. A step that is to be retried later, and a timer, hold no worker: the run is suspended until
then. What was written is committed before the next step begins, so a step's effect repeats only if the process died
before its commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import msgspec

from tidegate import failpoints
from tidegate.clock import monotonic, uuid7
from tidegate.errors import NonRetryable, StepFailed, first_line
from tidegate.flow.decide.reporting import run_fields
from tidegate.flow.run import user_calls
from tidegate.flow.run.endings import NON_RETRYABLE, End, Endings, step_failure
from tidegate.flow.run.journal import Cancelled, DelayedSends, Journal, LeaseLost, Put, Stop, Written
from tidegate.flow.run.spans import RunSpans
from tidegate.flow.run.states import EXECUTING, READY, STOPPING, ExecutionState
from tidegate.flow.run.stopping import StoppableCall
from tidegate.flow.run.user_calls import Failure, Threads, encode_output
from tidegate.flow.run.workflow import Context, SyncContext, Workflow, current_step
from tidegate.model.event import Event
from tidegate.model.ids import StepId
from tidegate.model.retry import RetryPolicy
from tidegate.model.run import ClaimedRun, FinishedRun, Step
from tidegate.model.step import StepKind, StepWrite, SuspendedRun
from tidegate.model.units import duration_ms
from tidegate.telemetry import traces
from tidegate.telemetry.logs import logger

# When every step of a run waits, its function gets this long to begin another before the run is suspended.
QUIET_SECONDS = 0.01

_log = logger("run")


class _Suspend(Stop):
    """The run is suspended."""


class Execution:
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
        on_abandoned: Callable[[Execution, End | None], None],
    ) -> None:
        self.run, self.event = run, event
        self.claimed_at = monotonic()
        self.state = READY
        self.task: asyncio.Task[None] | None = None  # of the worker, while the execution has something to do
        self.spans = RunSpans(run, event) if traces.is_on else None
        self._workflow = workflow
        self._policy = policy
        self._workflow_threads = workflow_threads
        self._step_threads = step_threads
        self._steps = {step.name: step for step in steps}
        self.journal = Journal(put, delayed, is_cancelled=run.cancel_requested)
        self.endings = Endings(run, workflow, policy, self._steps)
        self._used: set[str] = set()
        self._sleeps = self._active = 0
        self._calling = StoppableCall()
        self._threads = Threads()
        self._stopped_with: Callable[[], End] | None = None  # how the run ends when its function was told to stop
        self._on_abandoned = on_abandoned

    def move(self, state: ExecutionState) -> None:
        """Enter a state; RuntimeError when it cannot follow the present one (see `states`)."""
        if state not in self.state.next:
            raise RuntimeError(f"execution of run {self.run.id} is {self.state} and cannot become {state}")
        self.state = state

    def now(self) -> datetime:
        """The database's time, as far as this process can tell."""
        return self.run.now + timedelta(seconds=monotonic() - self.claimed_at)

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
        on_timeout = partial(self._stop_with, self.endings.timed_out)
        result, error = await self._calling.run(self._call(), left, on_timeout)
        return await self._ended(result, error) if self._stopped_with is None else self._stopped_with()

    def stop(self) -> bool:
        """Have the function stop, with nothing to write: `call` raises CancelledError. False when it is not called."""
        self._stopped_with = _nothing_to_write
        if self._calling.task is not None:
            self._begin_no_more_steps()
        return self._calling.stop(self._give_up)

    def _begin_no_more_steps(self) -> None:
        if self.state is EXECUTING:
            self.move(STOPPING)

    def unwritable(self, exc: BaseException) -> FinishedRun:
        """The end to write in place of one that the database refuses."""
        _log.error("run.unwritable", **run_fields(self.run, self.event), error=exc, exc_info=exc)
        return self.endings.unwritable(exc)

    async def step(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        retry: RetryPolicy | None,
        timeout: str | int | float | None,
    ) -> Any:
        """The result of a step: stored before, or from calling it now. StepFailed when its retries are exhausted."""
        if (refusal := self._refusal(name)) is not None:
            raise await self._refused(refusal)
        known = self._begin(name)
        if known is not None and known.status == "succeeded":
            return known.result
        if known is not None and known.status == "failed":
            raise StepFailed(name, known.error or "")
        self._active += 1
        try:
            if known is not None or self.journal.is_busy:
                await self._ready(name)
            else:
                self.journal.check()
            while True:
                failure = await self._try(name, partial(function, *args, **kwargs), function, timeout)
                if not isinstance(failure, Failure):
                    return failure
                await self._failed(name, failure.exc, retry or self._policy)
                await self._ready(name)
        except asyncio.CancelledError:
            self._cut_off(name, "step")
            raise
        finally:
            self._leave_step()

    async def sleep(self, duration: str | int | float, name: str | None = None, *, is_alone: bool = True) -> None:
        """Resume after a time, counted from the first time this line was reached; no worker is held meanwhile."""
        if name is None:
            if not is_alone or (self._workflow.is_async and asyncio.current_task() is not self._calling.task):
                raise NonRetryable(
                    "a sleep beside other steps needs a name, since their order may change: ctx.sleep('2h', name='…')"
                )
            self._sleeps += 1
            name = f"sleep-{self._sleeps}"
        if (refusal := self._refusal(name)) is not None:
            raise await self._refused(refusal)
        known = self._begin(name)
        if known is not None and known.status == "succeeded":
            return
        self._active += 1
        try:
            await self.journal.barrier()
            if known is None:
                await self._waits(
                    name, kind="sleep", delay_ms=duration_ms(duration), retry_metadata={"reason": "sleep"}
                )
            await self._ready(name)
            self._write(name, kind="sleep", status="succeeded", retry_state="completed")
        except asyncio.CancelledError:
            self._cut_off(name, "sleep")
            raise
        finally:
            self._leave_step()

    def _cut_off(self, name: str, kind: StepKind) -> None:
        """The function no longer waits for a step (`wait_for`, a sibling's failure), nor will it the next time."""
        task = asyncio.current_task()
        if self.state is EXECUTING and task is not None and task.cancelling():
            self._write(name, kind=kind, status="cancelled", error="cut off by the workflow", retry_state="cancelled")

    async def _refused(self, refusal: BaseException) -> BaseException:
        await asyncio.sleep(0)  # a loop that catches everything and tries again must not block the event loop
        return refusal

    def _begin(self, name: str) -> Step | None:
        self._used.add(name)
        known = self._steps.get(name)
        if known is not None and known.status == "cancelled":
            raise TimeoutError(f"step {name!r} was cut off before")
        return known

    def _refusal(self, name: str) -> BaseException | None:
        if not isinstance(name, str) or not user_calls.is_step_name(name):
            return NonRetryable(
                f"a step's name must be text of 1 to {user_calls.MAX_STEP_NAME} characters, not {name!r}"
            )
        if self.state is not EXECUTING:  # a `finally` on the way out; it runs when the run resumes
            return _Suspend()
        outer = current_step.get()
        if outer is not None:  # it could not wait: the outer step would hold the worker meanwhile
            return NonRetryable(f"step {name!r} is called inside step {outer!r}; call it from the workflow itself")
        if name in self._used:
            return NonRetryable(
                f"step {name!r} is called twice in one run; give each its own name, as in 'charge-{{i}}'"
            )
        return None

    async def _ready(self, name: str) -> None:
        """What was written so far is committed, and the step's time has come."""
        await self.journal.barrier()
        while (known := self._steps.get(name)) is not None and known.next_attempt_at is not None:
            if known.next_attempt_at <= self.now():
                break
            await self._park(known, known.next_attempt_at)
        if self.state is not EXECUTING:
            raise _Suspend

    async def _try(self, name: str, call: Callable[[], Any], function: Any, timeout: Any) -> Any:
        """Call a step's function once: its result, written down, or a Failure."""
        known, token = self._steps.get(name), current_step.set(name)
        attempts = known.retry_attempts if known else 0
        if self.spans is not None:
            self.spans.begin_step(name, attempts + 1)
        try:
            if timeout is None:
                value = await user_calls.called_in(self._step_threads, self._threads, call, function)
            else:
                value = await user_calls.called_within(timeout, name, self._step_threads, self._threads, call, function)
            result = encode_output(value, "the result", name)
        except (Stop, GeneratorExit):
            raise
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if self.state is not EXECUTING or task is None or task.cancelling():
                raise
            return Failure(exc)  # nobody cancelled this step: its function raised it
        except BaseException as exc:  # noqa: BLE001 - user code may raise anything; it is the step's failure
            return Failure(exc)
        finally:
            current_step.reset(token)
            if self.spans is not None:
                self.spans.leave_step(name)
        failpoints.hit("step.before_commit")
        self._write(name, status="succeeded", result=result, retry_attempts=attempts)
        return None if result is None else msgspec.json.decode(result)

    async def _failed(self, name: str, exc: BaseException, policy: RetryPolicy) -> None:
        """Write that an attempt failed, and when there is another; StepFailed when there is none."""
        if self.spans is not None:
            self.spans.fail_step(name, exc)
        error = user_calls.error_text(exc)
        attempt, is_final, delay_ms = step_failure(exc, self._steps.get(name), policy, self.now())
        fields = run_fields(self.run, self.event) | {"step": name, "attempt": attempt, "reason": first_line(error)}
        if is_final:
            _log.warning("step.exhausted", **fields)
            self._write(
                name, status="failed", error=error, retry_state="exhausted", retry_attempts=attempt,
                retry_metadata={"reason": "failed"} | ({NON_RETRYABLE: True} if isinstance(exc, NonRetryable) else {}),
            )  # fmt: skip
            raise StepFailed(name, error) from exc
        await self._waits(
            name, error=error, delay_ms=delay_ms, retry_attempts=attempt,
            retry_metadata={"reason": "failed", "of": policy.max_attempts}, closes=self.endings.closing(exc, delay_ms),
        )  # fmt: skip
        _log.warning("step.failed", **fields, next_attempt_at=self._steps[name].next_attempt_at)

    async def _waits(self, name: str, **fields: Any) -> None:
        """Write that a step waits; when that is committed, its time is known."""
        at = await self.journal.kept(self._write(name, status="pending", retry_state="scheduled", **fields))
        self._steps[name] = msgspec.structs.replace(self._steps[name], next_attempt_at=at)

    def _write(self, name: str, *, kind: StepKind = "step", **fields: Any) -> asyncio.Future[Written]:
        """Give a step's outcome to the journal, and remember it if it failed or waits."""
        known = self._steps.pop(name, None)
        write = StepWrite(
            id=known.id if known else StepId(uuid7()), workflow_run_id=self.run.id, name=name, kind=kind,
            claim_generation=self.run.claim_generation, is_new=known is None, **fields,
        )  # fmt: skip
        if write.status != "succeeded":  # of which nobody asks again
            self._steps[name] = Step(
                id=write.id, workflow_run_id=self.run.id, name=name, kind=kind, status=write.status, error=write.error,
                retry_state=write.retry_state, retry_attempts=write.retry_attempts,
                created_at=known.created_at if known else None,
            )  # fmt: skip
        written = self.journal.write(write)
        if self.spans is not None:
            self.spans.wrote_step(write, written)
        return written

    async def _park(self, step: Step, until: datetime) -> None:
        """Wait for a time. If all others wait too, the run is suspended, and this call does not return."""
        self.endings.park(step, until)
        if not self._workflow.is_async:
            self._begin_no_more_steps()
            raise _Suspend
        self._leave_step()
        try:
            await asyncio.sleep((until - self.now()).total_seconds())
        finally:
            self._active += 1
            if self.state is EXECUTING:
                self.endings.unpark(step)

    def _leave_step(self) -> None:
        """A run with a step in progress is not suspended because its other steps wait."""
        self._active -= 1
        if self.endings.parked and not self._active:
            asyncio.get_running_loop().call_later(QUIET_SECONDS, self._suspend_if_quiet)

    def _suspend_if_quiet(self) -> None:
        if self.endings.parked and not self._active:
            self._stop_with(self.endings.suspended)

    def _stop_with(self, end: Callable[[], End]) -> None:
        """Have the function stop; whatever it returns or raises then, `end` says how the run ends."""
        if self._calling.task is not None and self._stopped_with is None:
            self._stopped_with = end
            self._begin_no_more_steps()
            self._calling.stop(self._give_up)

    def _give_up(self) -> None:
        """The function does not stop; what is to be written is written without it."""
        _log.error("run.does_not_stop", **run_fields(self.run, self.event))
        end = self._stopped_with or _nothing_to_write
        self._on_abandoned(self, None if end is _nothing_to_write else end())

    async def _call(self) -> Any:
        self.journal.check()
        arguments = self._workflow.bind(self.run.parameters)
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
        if self.state is STOPPING or isinstance(error, _Suspend):
            return self.endings.suspended()
        try:
            if error is not None:
                raise error
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


def _nothing_to_write() -> End:
    raise asyncio.CancelledError
