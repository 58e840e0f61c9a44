"""Execution: one claimed run, from the first line of its function to its end, or until it must wait.

The function is called anew each time its run goes on; what its finished steps gave is remembered and not done again. A
step that is to be tried again later, and a timer, hold no worker: the run rests until then. Writes are handed to the
group commit at once and are committed before the next step begins; so a step's effect repeats only if the process died
before its commit.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec

from headgate import failpoints
from headgate.clock import monotonic, uuid7
from headgate.errors import NonRetryable, RetryAfter, StepFailed
from headgate.flow.calls import called, error_text, guarded, retry_after_ms
from headgate.flow.output import encode_output
from headgate.flow.workflow import Context, SyncContext, Workflow, current_step
from headgate.model.event import Event
from headgate.model.retry import RetryPolicy, backoff_ms, is_exhausted
from headgate.model.run import ClaimedRun, FinishedRun, Step
from headgate.model.step import Closing, StepKind, StepWrite, SuspendedRun
from headgate.model.units import duration_ms
from headgate.telemetry.logs import logger

MAX_STEP_NAME = 200
# When every step of a run waits, its function gets this long to begin another before the run is put to rest.
QUIET_SECONDS = 0.01

_log = logger("run")


class Written(NamedTuple):
    """Whether a write counted (the claim still held), whether the run is to be cancelled, and when the step goes on."""

    is_kept: bool
    is_cancel_requested: bool = False
    next_attempt_at: datetime | None = None


Submit = Callable[[StepWrite], Awaitable[Written]]


class _Stop(BaseException):
    """Unwinds a workflow's function; not an Exception, so that its own handlers let it pass."""


class _Suspend(_Stop):
    """A step waits, in a function that runs in a thread."""


class _Cancelled(_Stop):
    """Someone asked for the run to be cancelled."""


class LeaseLost(_Stop):
    """The run belongs to another worker now; whatever is done here does not count."""


class Execution:
    """One attempt at one run."""

    def __init__(
        self,
        run: ClaimedRun,
        workflow: Workflow,
        event: Event | None,
        steps: list[Step],
        *,
        submit: Submit,
        policy: RetryPolicy,
        workflow_threads: Executor,
        step_threads: Executor,
    ) -> None:
        self.run = run
        self.event = event
        self._workflow = workflow
        self._submit = submit
        self._policy = policy
        self._workflow_threads = workflow_threads
        self._step_threads = step_threads
        self._steps = {step.name: step for step in steps}
        self._began_at = monotonic()
        self._used: set[str] = set()
        self._sleeps = 0
        self._parked: dict[str, datetime] = {}
        self._warnings: dict[str, str] = {}
        self._active = 0
        self._writes: set[asyncio.Task[Written]] = set()
        self._quiet = asyncio.Event()
        self._is_cancelled = run.cancel_requested
        self._is_lost = False
        self._is_resting = False

    def now(self) -> datetime:
        """The database's time, as far as this process can tell."""
        return self.run.now + timedelta(seconds=monotonic() - self._began_at)

    def cancel(self) -> None:
        """Stop at the next step."""
        self._is_cancelled = True

    def cancelled(self) -> FinishedRun:
        """The run ends here, as was asked for."""
        return self._finished("cancelled", error="cancelled while it was running")

    async def go(self) -> FinishedRun | SuspendedRun:
        """Call the function; how the run ended, or until when it waits. LeaseLost when it belongs to someone else."""
        timed_out = self._finished("failed", error=f"timed out after {self._workflow.timeout_ms} ms")
        left = self._seconds_left()
        if left is not None and left <= 0:
            return timed_out
        main = asyncio.create_task(self._call())
        quiet = asyncio.create_task(self._quiet.wait())
        try:
            await asyncio.wait({main, quiet}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if main.done():
                return self._ended(main)
            if quiet.done():
                return self._suspended()
            return timed_out
        finally:
            self._is_resting = True
            for task in (main, quiet):
                task.cancel()
            await asyncio.gather(main, quiet, return_exceptions=True)

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
        known = self._begin(name)
        if known is not None and known.status == "succeeded":
            return known.result
        if known is not None and known.status == "failed":
            raise StepFailed(name, known.error or "")
        await self._barrier()
        if known is not None and known.next_attempt_at is not None and known.next_attempt_at > self.now():
            await self._park(known.name, known.next_attempt_at, known.error)
        attempt = (known.retry_attempts if known else 0) + 1
        failure: Exception | None = None
        result = None
        self._active += 1
        try:
            value = await self._try(name, function, args, kwargs, timeout)
            result = encode_output(value, f"what step {name!r} returned")
        except Exception as exc:
            failure = exc
        finally:
            self._active -= 1
            self._check_quiet()
        if failure is not None:
            return await self._failed(name, known, attempt, failure, retry or self._policy)
        failpoints.hit("step.before_commit")
        self._write(name, known, status="succeeded", result=result, retry_attempts=attempt - 1)
        return None if result is None else msgspec.json.decode(result)

    async def sleep(self, duration: str | int | float) -> None:
        """Go on after a while, counted from the first time this line was reached; nobody waits meanwhile."""
        self._sleeps += 1
        name = f"sleep-{self._sleeps}"
        known = self._begin(name)
        if known is not None and known.status == "succeeded":
            return
        await self._barrier()
        until = known.next_attempt_at if known is not None else None
        if until is None:
            write = self._write(
                name, None, kind="sleep", status="pending", retry_state="scheduled", delay_ms=duration_ms(duration),
                retry_metadata={"reason": "sleep"},
            )  # fmt: skip
            until = await self._kept(write)
        if until is not None and until > self.now():
            await self._park(name, until, None)
        self._write(name, self._steps.get(name), kind="sleep", status="succeeded", retry_state="completed")

    def _begin(self, name: str) -> Step | None:
        if not isinstance(name, str) or not 0 < len(name) <= MAX_STEP_NAME:
            raise NonRetryable(f"a step's name must be text of 1 to {MAX_STEP_NAME} characters, not {name!r}")
        if self._is_resting:  # a `finally` that is passed on the way to rest; it has its turn when the run goes on
            raise _Suspend
        if name in self._used:
            raise NonRetryable(
                f"step {name!r} is called twice in one run; give each its own name, as in 'charge-{{i}}'"
            )
        self._used.add(name)
        return self._steps.get(name)

    async def _try(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout: Any
    ) -> Any:
        """Call a step's function, in a thread unless it is async."""
        seconds = None if timeout is None else duration_ms(timeout) / 1000
        context = contextvars.copy_context()
        context.run(current_step.set, name)
        call = partial(function, *args, **kwargs)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                if inspect.iscoroutinefunction(function):
                    return await loop.create_task(guarded(call()), context=context)
                value = await loop.run_in_executor(self._step_threads, partial(context.run, called, call))
                return await loop.create_task(guarded(value), context=context) if inspect.isawaitable(value) else value
        except TimeoutError as exc:
            if seconds is None or not isinstance(exc.__cause__, asyncio.CancelledError):
                raise
            raise TimeoutError(f"step {name!r} took longer than {timeout}") from exc

    async def _failed(self, name: str, known: Step | None, attempt: int, exc: Exception, policy: RetryPolicy) -> Any:
        """Write that an attempt failed; wait for the next, or StepFailed when there is none."""
        error = error_text(exc)
        is_final = isinstance(exc, NonRetryable) or is_exhausted(policy, attempt)
        _log.warning(
            "step.exhausted" if is_final else "step.failed",
            run_id=str(self.run.id), workflow=self.run.workflow, step=name, attempt=attempt,
            correlation_id=self.run.correlation_id, reason=error.splitlines()[-1],
        )  # fmt: skip
        if is_final:
            self._write(
                name, known, status="failed", error=error, retry_state="exhausted", retry_attempts=attempt,
                retry_metadata={"reason": "failed"},
            )  # fmt: skip
            raise StepFailed(name, error) from exc
        delay_ms = backoff_ms(policy, attempt)
        if isinstance(exc, RetryAfter):
            delay_ms = retry_after_ms(exc)
        write = self._write(
            name, known, status="pending", error=error, retry_state="scheduled", delay_ms=delay_ms,
            retry_attempts=attempt, retry_metadata={"reason": "failed", "of": policy.max_attempts},
            closes=self._closing(exc, delay_ms),
        )  # fmt: skip
        at = await self._kept(write)
        assert at is not None, "a step that is to be tried again has a time"
        await self._park(name, at, error)

    def _closing(self, exc: Exception, delay_ms: int) -> Closing | None:
        """What is closed for everyone; a key only where the trigger limits by key."""
        if not isinstance(exc, RetryAfter) or exc.everyone is None or self.run.trigger_id is None:
            return None
        key = self.run.concurrency_key if exc.everyone == "key" else None
        return Closing(trigger_id=self.run.trigger_id, concurrency_key=key, delay_ms=delay_ms, reason=str(exc))

    def _write(self, name: str, known: Step | None, *, kind: StepKind = "step", **fields: Any) -> asyncio.Task[Written]:
        """Hand a step's outcome to the group commit, and remember it."""
        write = StepWrite(
            id=known.id if known else uuid7(),
            workflow_run_id=self.run.id,
            claim_generation=self.run.claim_generation,
            name=name,
            kind=kind,
            **fields,
        )
        task = asyncio.ensure_future(self._submit(write))
        self._writes.add(task)
        self._steps[name] = Step(
            id=write.id, workflow_run_id=self.run.id, name=name, kind=kind, status=write.status, error=write.error,
            retry_state=write.retry_state, retry_attempts=write.retry_attempts,
        )  # fmt: skip
        return task

    async def _kept(self, write: asyncio.Task[Written]) -> datetime | None:
        """Wait for a write; when its step goes on."""
        written = await asyncio.shield(write)
        self._is_lost |= not written.is_kept
        self._is_cancelled |= written.is_cancel_requested
        self._writes.discard(write)
        self._check()
        return written.next_attempt_at

    async def _barrier(self) -> None:
        """What this run has written so far is committed; nothing more is begun when it is cancelled or not ours."""
        while self._writes:
            await self._kept(next(iter(self._writes)))
        self._check()

    def _check(self) -> None:
        if self._is_lost:
            raise LeaseLost
        if self._is_cancelled:
            raise _Cancelled

    async def _park(self, name: str, until: datetime, error: str | None) -> None:
        """Wait for a time without holding the worker: this call does not return before the run goes on."""
        self._parked[name] = until
        if error:
            attempts = self._steps[name].retry_attempts
            self._warnings[name] = (
                f"step {name!r} failed {attempts} times, next at {until:%Y-%m-%d %H:%M:%S} UTC: "
                + (error.splitlines()[-1])
            )
        if not self._workflow.is_async:
            self._is_resting = True
            raise _Suspend
        self._check_quiet()
        await asyncio.Event().wait()

    def _check_quiet(self) -> None:
        if self._parked and not self._active:
            asyncio.get_running_loop().call_later(QUIET_SECONDS, self._rest_if_quiet)

    def _rest_if_quiet(self) -> None:
        if self._parked and not self._active:
            self._quiet.set()

    async def _call(self) -> Any:
        self._check()
        arguments = self._workflow.bind(self.run.parameters)
        if self._workflow.is_async:
            return await self._workflow.function(Context(self), **arguments)
        loop = asyncio.get_running_loop()
        call = partial(self._workflow.function, SyncContext(self, loop), **arguments)
        context = contextvars.copy_context()
        return await loop.run_in_executor(self._workflow_threads, partial(context.run, called, call))

    def _ended(self, main: asyncio.Task[Any]) -> FinishedRun | SuspendedRun:
        try:
            return self._finished("succeeded", output=encode_output(main.result(), "what the workflow returned"))
        except _Suspend:
            return self._suspended()
        except _Cancelled:
            return self.cancelled()
        except StepFailed as exc:
            step = self._steps.get(exc.name)
            return self._finished("failed", error=f"{exc}\n{exc.error}", dead_step_id=step.id if step else None)
        except NonRetryable as exc:
            return self._finished("failed", error=str(exc))
        except RetryAfter as exc:
            if is_exhausted(self._policy, self.run.attempts):
                return self._finished("failed", error=error_text(exc))
            self._warnings[""] = str(exc)
            return self._suspended(delay_ms=retry_after_ms(exc))
        except Exception as exc:
            return self._finished("failed", error=error_text(exc))

    def _suspended(self, delay_ms: int | None = None) -> SuspendedRun:
        """Rest until the first of its steps goes on, or its time is over."""
        until = min(self._parked.values(), default=None)
        deadline = self._deadline()
        if until is not None and deadline is not None:
            until = min(until, deadline)
        return SuspendedRun(
            id=self.run.id,
            claim_generation=self.run.claim_generation,
            next_attempt_at=until,
            delay_ms=delay_ms,
            warning="; ".join(self._warnings.values())[:1000] or None,
        )

    def _finished(self, status: Any, **fields: Any) -> FinishedRun:
        return FinishedRun(
            id=self.run.id,
            claim_generation=self.run.claim_generation,
            status=status,
            trigger_id=self.run.trigger_id,
            concurrency_key=self.run.concurrency_key,
            is_probe=self.run.is_probe,
            has_waiting_steps=any(step.retry_state == "scheduled" for step in self._steps.values()),
            **fields,
        )

    def _deadline(self) -> datetime | None:
        timeout_ms = self._workflow.timeout_ms
        return None if timeout_ms is None else self.run.started_at + timedelta(milliseconds=timeout_ms)

    def _seconds_left(self) -> float | None:
        deadline = self._deadline()
        return None if deadline is None else (deadline - self.now()).total_seconds()
