"""Execution: one claimed run, from the first line of its function to its end, or until it must wait.

The function is called anew each time its run goes on; what its finished steps gave is remembered and not done again. A
step that is to be tried again later, and a timer, hold no worker: the run rests until then. What was written is
committed before the next step begins; so a step's effect repeats only if the process died before its commit.
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
from tidegate.errors import NonRetryable, RetryAfter, SecretsUnreadable, StepFailed, first_line
from tidegate.flow.decide.reporting import run_fields
from tidegate.flow.run import calls
from tidegate.flow.run.calls import Failure, Threads, called_in, called_within, error_text, guarded, retry_after_ms
from tidegate.flow.run.endings import NON_RETRYABLE, End, Endings, Then, hand_in
from tidegate.flow.run.journal import Cancelled, Journal, LeaseLost, Put, Soon, Stop, Written
from tidegate.flow.run.leaving import Leaving
from tidegate.flow.run.output import encode_output
from tidegate.flow.run.spans import RunSpans
from tidegate.flow.run.workflow import Context, SyncContext, Workflow, current_step
from tidegate.model.event import Event
from tidegate.model.retry import RetryPolicy, backoff_ms, why_given_up
from tidegate.model.run import ClaimedRun, FinishedRun, Step
from tidegate.model.step import StepKind, StepWrite, SuspendedRun
from tidegate.model.units import duration_ms
from tidegate.telemetry import traces
from tidegate.telemetry.logs import logger

# When every step of a run waits, its function gets this long to begin another before the run is put to rest.
QUIET_SECONDS = 0.01

_log = logger("run")


class _Suspend(Stop):
    """The run rests."""


class Execution:
    """One attempt at one run. `abandon` hears of a function that does not leave, and what is to be written of its run
    (None: nothing); the task that it is in is lost."""

    def __init__(
        self,
        run: ClaimedRun,
        workflow: Workflow,
        event: Event | None,
        steps: list[Step],
        *,
        put: Put,
        soon: Soon,
        policy: RetryPolicy,
        workflow_threads: Executor,
        step_threads: Executor,
        abandon: Callable[[Execution, End | None], None],
    ) -> None:
        self.run = run
        self.event = event
        self.claimed_at = monotonic()
        self.spans = RunSpans(run, event) if traces.is_on else None
        self._workflow = workflow
        self._policy = policy
        self._workflow_threads = workflow_threads
        self._step_threads = step_threads
        self._steps = {step.name: step for step in steps}
        self._journal = Journal(put, soon, is_cancelled=run.cancel_requested)
        self._endings = Endings(run, workflow, policy, self._steps)
        self._used: set[str] = set()
        self._sleeps = self._active = 0
        self._leaving = Leaving()
        self._threads = Threads()
        self._stopped: Callable[[], End] | None = None
        self._abandon = abandon
        self._is_resting = self.is_abandoned = False

    def now(self) -> datetime:
        """The database's time, as far as this process can tell."""
        return self.run.now + timedelta(seconds=monotonic() - self.claimed_at)

    def cancel(self) -> None:
        """Stop at the next step."""
        self._journal.is_cancelled = True

    @property
    def is_to_be_called(self) -> bool:
        """Whether its function has anything to do: the run is not to be cancelled, and its time is not over."""
        left = self._endings.seconds_left(self.now())
        return not self._journal.is_cancelled and (left is None or left > 0)

    @property
    def is_gone(self) -> bool:
        """Whether nothing of its function is left: neither in its task nor in a thread."""
        return self._leaving.task is None and not self._threads

    async def gone(self) -> None:
        """Wait until nothing is left of its function."""
        if self._leaving.task is not None:
            await asyncio.wait([self._leaving.task])
        await self._threads.gone()

    async def go(self) -> End:
        """Call the function in this task; how the run ended, or until when it waits. LeaseLost when it belongs to
        someone else, CancelledError when it was told to `leave`."""
        left = self._endings.seconds_left(self.now())
        if left is not None and left <= 0:
            return self._endings.timed_out()
        result, error = await self._leaving.through(self._call(), left, self._time_out)
        return await self._ended(result, error) if self._stopped is None else self._stopped()

    def leave(self) -> bool:
        """Have the function leave, with nothing to write: `go` raises CancelledError. False when it is not there."""
        self._stopped = _left
        self._is_resting |= self._leaving.task is not None
        return self._leaving.tell(self._give_up)

    async def close(self, end: End, then: Then) -> None:
        """Hand in how it ended, with what was not yet written of its steps; `then` hears what was written, and whether
        it counted. LeaseLost when what was written before did not."""
        await hand_in(end, then, self._journal, self._endings.cancelled, self._unwritable)

    def _unwritable(self, exc: Exception) -> FinishedRun:
        _log.error("run.unwritable", **run_fields(self.run, self.event), error=exc, exc_info=exc)
        return self._endings.unwritable(exc)

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
        """The result of a step: remembered, or had now. StepFailed when it was given up."""
        if (refusal := self._refusal(name)) is not None:
            raise await self._refused(refusal)
        known = self._begin(name)
        if known is not None and known.status == "succeeded":
            return known.result
        if known is not None and known.status == "failed":
            raise StepFailed(name, known.error or "")
        self._active += 1
        try:
            if known is not None or self._journal.is_busy:
                await self._ready(name)
            else:
                self._journal.check()
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
        """Go on after a while, counted from the first time this line was reached; nobody waits meanwhile."""
        if name is None:
            if not is_alone or (self._workflow.is_async and asyncio.current_task() is not self._leaving.task):
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
            await self._journal.barrier()
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
        """The function does not wait for a step any more (`wait_for`, a sibling's failure): nor will it when it is
        called anew."""
        task = asyncio.current_task()
        if not self._is_resting and task is not None and task.cancelling():
            self._write(name, kind=kind, status="cancelled", error="cut off by the workflow", retry_state="cancelled")

    async def _refused(self, refusal: BaseException) -> BaseException:
        await asyncio.sleep(0)  # a loop that catches everything and tries again must not keep the worker busy
        return refusal

    def _begin(self, name: str) -> Step | None:
        self._used.add(name)
        known = self._steps.get(name)
        if known is not None and known.status == "cancelled":
            raise TimeoutError(f"step {name!r} was cut off before")
        return known

    def _refusal(self, name: str) -> BaseException | None:
        if not isinstance(name, str) or not calls.is_step_name(name):
            return NonRetryable(f"a step's name must be text of 1 to {calls.MAX_STEP_NAME} characters, not {name!r}")
        if self._is_resting:  # a `finally` that is passed on the way to rest; it has its turn when the run goes on
            return _Suspend()
        outer = current_step.get()
        if outer is not None:  # it could not wait: the outer step would hold the worker meanwhile
            return NonRetryable(f"step {name!r} is begun inside of step {outer!r}; call it from the workflow itself")
        if name in self._used:
            return NonRetryable(
                f"step {name!r} is called twice in one run; give each its own name, as in 'charge-{{i}}'"
            )
        return None

    async def _ready(self, name: str) -> None:
        """What was written so far is committed, and the step's time has come."""
        await self._journal.barrier()
        while (known := self._steps.get(name)) is not None and known.next_attempt_at is not None:
            if known.next_attempt_at <= self.now():
                break
            await self._park(known, known.next_attempt_at)
        if self._is_resting:
            raise _Suspend

    async def _try(self, name: str, call: Callable[[], Any], function: Any, timeout: Any) -> Any:
        """Call a step's function once: its result, written down, or a Failure."""
        known, token = self._steps.get(name), current_step.set(name)
        attempts = known.retry_attempts if known else 0
        if self.spans is not None:
            self.spans.begin_step(name, attempts + 1)
        try:
            if timeout is None:
                value = await called_in(self._step_threads, self._threads, call, function)
            else:
                value = await called_within(timeout, name, self._step_threads, self._threads, call, function)
            result = encode_output(value, "the result", name)
        except (Stop, GeneratorExit):
            raise
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if self._is_resting or task is None or task.cancelling():
                raise
            return Failure(exc)  # nobody cancelled this step: its function gave up by itself
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
        known, error = self._steps.get(name), error_text(exc)
        # What the worker's settings lack is no fault of the step: it waits for an operator, and uses no attempt.
        is_failure = not isinstance(exc, SecretsUnreadable)
        attempt = (known.retry_attempts if known else 0) + is_failure
        age = self.now() - known.created_at if known and known.created_at else timedelta()
        is_over = is_failure and why_given_up(policy, attempt, age) is not None
        is_final = isinstance(exc, NonRetryable) or is_over
        told = run_fields(self.run, self.event) | {"step": name, "attempt": attempt, "reason": first_line(error)}
        if is_final:
            _log.warning("step.exhausted", **told)
            self._write(
                name, status="failed", error=error, retry_state="exhausted", retry_attempts=attempt,
                retry_metadata={"reason": "failed"} | ({NON_RETRYABLE: True} if isinstance(exc, NonRetryable) else {}),
            )  # fmt: skip
            raise StepFailed(name, error) from exc
        if isinstance(exc, RetryAfter | SecretsUnreadable):
            delay_ms = retry_after_ms(exc)
        else:
            delay_ms = backoff_ms(policy, attempt)
        await self._waits(
            name, error=error, delay_ms=delay_ms, retry_attempts=attempt,
            retry_metadata={"reason": "failed", "of": policy.max_attempts}, closes=self._endings.closing(exc, delay_ms),
        )  # fmt: skip
        _log.warning("step.failed", **told, next_attempt_at=self._steps[name].next_attempt_at)

    async def _waits(self, name: str, **fields: Any) -> None:
        """Write that a step waits; when that is committed, its time is known."""
        at = await self._journal.kept(self._write(name, status="pending", retry_state="scheduled", **fields))
        self._steps[name] = msgspec.structs.replace(self._steps[name], next_attempt_at=at)

    def _write(self, name: str, *, kind: StepKind = "step", **fields: Any) -> asyncio.Future[Written]:
        """Give a step's outcome to the journal, and remember it if it failed or waits."""
        known = self._steps.pop(name, None)
        write = StepWrite(
            id=known.id if known else uuid7(), workflow_run_id=self.run.id, claim_generation=self.run.claim_generation,
            name=name, kind=kind, is_new=known is None, **fields,
        )  # fmt: skip
        if write.status != "succeeded":  # of which nobody asks again
            self._steps[name] = Step(
                id=write.id, workflow_run_id=self.run.id, name=name, kind=kind, status=write.status, error=write.error,
                retry_state=write.retry_state, retry_attempts=write.retry_attempts,
                created_at=known.created_at if known else None,
            )  # fmt: skip
        written = self._journal.write(write)
        if self.spans is not None:
            self.spans.wrote_step(write, written)
        return written

    async def _park(self, step: Step, until: datetime) -> None:
        """Wait for a time. If all others wait too, the run is put to rest, and this call does not return."""
        self._endings.park(step, until)
        if not self._workflow.is_async:
            self._is_resting = True
            raise _Suspend
        self._leave_step()
        try:
            await asyncio.sleep((until - self.now()).total_seconds())
        finally:
            self._active += 1
            if not self._is_resting:
                self._endings.unpark(step)

    def _leave_step(self) -> None:
        """While a step is under way, its run is not put to rest for the sake of others that wait."""
        self._active -= 1
        if self._endings.parked and not self._active:
            asyncio.get_running_loop().call_later(QUIET_SECONDS, self._rest_if_quiet)

    def _rest_if_quiet(self) -> None:
        if self._endings.parked and not self._active:
            self._stop(self._endings.resting)

    def _stop(self, stopped: Callable[[], End]) -> None:
        """Have the function leave; whatever comes of it, `stopped` says how the run ends."""
        if self._leaving.task is not None and self._stopped is None:
            self._is_resting = True
            self._stopped = stopped
            self._leaving.tell(self._give_up)

    def _time_out(self) -> None:
        self._stop(self._endings.timed_out)

    def _give_up(self) -> None:
        """The function does not leave; what is to be written is written without it."""
        _log.error("run.does_not_leave", **run_fields(self.run, self.event))
        self.is_abandoned = True
        self._abandon(self, None if self._stopped is None or self._stopped is _left else self._stopped())

    async def _call(self) -> Any:
        self._journal.check()
        arguments = self._workflow.bind(self.run.parameters)
        if self._workflow.is_async:
            return await guarded(self._workflow.function(Context(self), **arguments))
        loop = asyncio.get_running_loop()
        ctx = SyncContext(self, loop)

        def call() -> Any:
            ctx.called_here()
            return self._workflow.function(ctx, **arguments)

        return await self._threads.call(self._workflow_threads, call)

    async def _ended(self, result: Any, error: BaseException | None) -> End:
        """What the end of the function means. Of a run that was told to stop, it is that, whatever came of it."""
        if isinstance(self._journal.told, LeaseLost):
            raise self._journal.told
        if isinstance(self._journal.told, Cancelled):
            return self._endings.cancelled()
        if self._is_resting or isinstance(error, _Suspend):
            return self._endings.resting()
        try:
            if error is not None:
                raise error
            end: End = self._endings.succeeded(encode_output(result, "what the workflow returned"))
        except BaseException as exc:  # noqa: BLE001 - user code may raise anything; it is how the run ends
            end = self._endings.raised(exc)
            if self.spans is not None:
                self.spans.fail(exc)
        self._is_resting = True
        while self._active and isinstance(end, SuspendedRun):  # noqa: ASYNC110 - what is under way counts
            await asyncio.sleep(QUIET_SECONDS)
        return end


def _left() -> End:
    raise asyncio.CancelledError
