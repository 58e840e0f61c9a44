"""What every kind of step is made of.

A step begins (`begin`), waits for what was written before it and for its time (`ready`), is written (`write`), and
leaves (`leave`). A run with a step in progress is not suspended; when all its steps wait, it is.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any, TypeVar

import msgspec

from tidegate.clock import monotonic
from tidegate.errors import NonRetryable
from tidegate.flow.call import fit as fit_module
from tidegate.flow.call.endings import Endings
from tidegate.flow.call.fit import PATCH_PREFIX, Fit
from tidegate.flow.call.journal import Journal, Stop, Written
from tidegate.flow.call.spans import RunSpans
from tidegate.flow.call.spending import AskSpend
from tidegate.flow.call.states import EXECUTING, READY
from tidegate.flow.call.waits import Ask
from tidegate.flow.code import user_calls
from tidegate.flow.code.context import current_step
from tidegate.flow.code.user_calls import Threads
from tidegate.model.event import Event
from tidegate.model.ids import step_id
from tidegate.model.retry import RetryPolicy
from tidegate.model.run import ClaimedRun, Step
from tidegate.model.step import StepKind, StepWrite
from tidegate.telemetry import traces
from tidegate.telemetry.logs import logger

# When every step of a run waits, its function gets this long to begin another before the run is suspended.
QUIET_SECONDS = 0.01
# Key in the `retry_metadata` of a step that was cut off: it was the call that begins it, before anything waited for it.
OPENING = "opening"

T = TypeVar("T")

_log = logger("run")


class Suspend(Stop):
    """The run is suspended."""


class StepParts(ABC):
    """The part of an execution that its steps are made of; `known` are those that are stored, or were written by it
    and did not succeed."""

    def __init__(
        self,
        run: ClaimedRun,
        event: Event | None,
        known: dict[str, Step],
        *,
        journal: Journal,
        endings: Endings,
        policy: RetryPolicy,
        step_threads: Executor,
        ask: Ask,
        ask_spend: AskSpend,
        before_step: Callable[[str], None] | None,
    ) -> None:
        self.run, self.event = run, event
        self.claimed_at = monotonic()
        self.state = READY
        self.journal = journal
        self.endings = endings
        self.spans = RunSpans(run, event) if traces.is_on else None
        self._known = known
        self._again: set[str] = set()  # steps that a retry of the run has reset
        self._policy = policy
        self._step_threads = step_threads
        self._before_step = before_step
        self._threads = Threads()
        self._used: set[str] = set()
        self._active = 0
        self._numbers: Counter[str] = Counter()  # of steps that are named by their kind and order
        self._ask = ask
        self._ask_spend = ask_spend
        self.waits_begun: Counter[str] = Counter()
        self._wakers: dict[str, list[asyncio.Event]] = {}  # by step that waits, one of each call that waits for it
        self._quiet: asyncio.TimerHandle | None = None
        self.patches: dict[str, bool] = {}
        self.fit: Fit | None = None  # while recorded steps of another version of the code are left

    @property
    @abstractmethod
    def is_async(self) -> bool:
        """Whether the workflow's function is a coroutine."""

    @property
    @abstractmethod
    def function_task(self) -> asyncio.Task[object] | None:
        """The task in which the workflow's function is being called."""

    @property
    @abstractmethod
    def is_other_code(self) -> bool:
        """Whether the recorded steps belong to another version of the code."""

    @abstractmethod
    def begin_no_more_steps(self) -> None:
        """The function is stopping."""

    @abstractmethod
    def suspend(self) -> None:
        """Have the function stop: all its steps wait."""

    def now(self) -> datetime:
        """The database's time, as far as this process can tell."""
        return self.run.now + timedelta(seconds=monotonic() - self.claimed_at)

    def named(self, name: str | None, kind: str, example: str, *, is_alone: bool) -> str:
        """The name of a step that needs none when it is alone: then it is its kind and number."""
        if name is not None:
            return name
        if not is_alone or (self.is_async and asyncio.current_task() is not self.function_task):
            raise NonRetryable(f"a {kind} beside other steps needs a name, since their order may change: {example}")
        self._numbers[kind] += 1
        return f"{kind}-{self._numbers[kind]}"

    def waited(self, name: str) -> None:
        """A wait is over, and its result is stored."""
        self._known.pop(name, None)
        self.endings.waits_for.pop(name, None)

    def cut_off(self, name: str, kind: StepKind, *, is_opening: bool = False) -> None:
        """The function no longer waits for a step (`wait_for`, a sibling's failure), nor will it the next time. Other
        calls that wait for it find it cut off now, as they will the next time."""
        task, known = asyncio.current_task(), self._known.get(name)
        if self.state is not EXECUTING or task is None or not task.cancelling():
            return
        if known is None or known.status != "cancelled":
            self.write(name, kind=kind, status="cancelled", error="cut off by the workflow", retry_state="cancelled",
                       retry_metadata={OPENING: True} if is_opening else {})  # fmt: skip
        self._wake_all(name)

    @contextmanager
    def in_progress(
        self, name: str | None = None, kind: StepKind = "step", *, is_opening: bool = False
    ) -> Iterator[None]:
        """Something of a step is in progress, so that the run is not suspended because its other steps wait. With a
        name, the step is cut off when the function no longer waits for it."""
        self._active += 1
        try:
            yield
        except asyncio.CancelledError:
            if name is not None:
                self.cut_off(name, kind, is_opening=is_opening)
            raise
        finally:
            self.leave()

    async def refused(self, refusal: BaseException) -> BaseException:
        await asyncio.sleep(0)  # a loop that catches everything and tries again must not block the event loop
        return refusal

    def begin(self, name: str) -> Step | None:
        """The function has come to a step: what is known of it. TimeoutError when it was cut off."""
        self._reached(name)
        return self.awaited(name)

    def open(self, name: str) -> Step | None:
        """`begin` for a step that the function waits for later. If that wait was cut off, this call was not."""
        self._reached(name)
        known = self._known.get(name)
        return self.awaited(name) if known is not None and known.retry_metadata.get(OPENING) else known

    def _reached(self, name: str) -> None:
        self._used.add(name)
        if self.fit is not None:
            self._reach(self.fit, name)

    def awaited(self, name: str) -> Step | None:
        """What is known of a step that the function waits for. TimeoutError when it was cut off."""
        known = self._known.get(name)
        if known is not None and known.status == "cancelled":
            raise TimeoutError(f"step {name!r} was cut off before")
        return known

    def _reach(self, fit: Fit, name: str) -> None:
        """A step is reached on code of another version than the recorded steps belong to."""
        if (why := fit.ask(name, in_order=self._is_only_task(fit))) is not None:
            raise self.misfit(why)
        if fit.is_whole:
            self.fits()

    def _is_only_task(self, fit: Fit) -> bool:
        """Whether nothing else of the function runs beside this task."""
        return self.is_async and not fit.has_tasks and asyncio.current_task() is self.function_task

    async def _wait_for_fit(self) -> None:
        """What is not finished waits while recorded steps are left."""
        if self.fit is not None:
            patience = fit_module.PATIENCE_SECONDS if self.is_async else fit_module.THREAD_PATIENCE_SECONDS
            patience = 0.0 if self._is_only_task(self.fit) else patience
            if (why := await self.fit.wait(patience)) is not None:
                raise self.misfit(why)

    def misfit(self, why: str) -> BaseException:
        """The code does not fit the recorded steps: the run waits for other code. What to raise."""
        self.endings.misfit = self.endings.misfit or why
        self.journal.notes = None
        if self.is_async:
            self.suspend()
        else:
            self.begin_no_more_steps()
        return Suspend()

    @abstractmethod
    def fits(self) -> None:
        """All recorded steps were reached: the run goes on with this version of the code."""

    @property
    def is_replaying(self) -> bool:
        """Whether steps are recorded that the function has not reached yet."""
        return any(name not in self._used and not name.startswith(PATCH_PREFIX) for name in self._known)

    def refusal(self, name: str) -> BaseException | None:
        if not isinstance(name, str) or not user_calls.is_step_name(name):
            return NonRetryable(
                f"a step's name must be text of 1 to {user_calls.MAX_STEP_NAME} characters, not {name!r}"
            )
        if (refusal := self.wait_refusal(name)) is not None:
            return refusal
        if name in self._used:
            return NonRetryable(
                f"step {name!r} is called twice in one run; give each its own name, as in 'charge-{{i}}'"
            )
        return None

    def wait_refusal(self, name: str) -> BaseException | None:
        """Why a step cannot be waited for here."""
        if self.state is not EXECUTING:  # a `finally` on the way out; it runs when the run resumes
            return Suspend()
        outer = current_step.get()
        if outer is not None:  # it could not wait: the outer step would hold the worker meanwhile
            return NonRetryable(f"step {name!r} is called inside step {outer!r}; call it from the workflow itself")
        return None

    async def barrier(self, name: str) -> None:
        """What was written so far is committed, and the step may begin. One that a retry has reset was reached before:
        it does not wait until recorded steps, which may follow it, were asked for."""
        await self.journal.barrier(begins_again=name in self._again)

    async def ready(self, name: str) -> None:
        """What was written so far is committed, and the step's time has come."""
        await self.journal.barrier()
        while (known := self._known.get(name)) is not None and known.next_attempt_at is not None:
            if known.next_attempt_at <= self.now():
                break
            await self._park(known, known.next_attempt_at)
        if self.state is not EXECUTING:
            raise Suspend

    async def waits(self, name: str, **fields: Any) -> None:
        """Write that a step waits; when that is committed, its time is known."""
        at = await self.journal.kept(self.write(name, status="pending", retry_state="scheduled", **fields))
        self._known[name] = msgspec.structs.replace(self._known[name], next_attempt_at=at)

    def write(self, name: str, *, kind: StepKind = "step", **fields: Any) -> asyncio.Future[Written]:
        """Give a step's outcome to the journal, and remember it if it failed or waits."""
        write = self.write_of(name, kind=kind, **fields)
        known = self._known.pop(name, None)
        if write.status != "succeeded":  # of which nobody asks again
            self.remember(write, known)
        written = self.journal.write(write)
        if self.spans is not None:
            self.spans.wrote_step(write, written)
        return written

    def remember(self, write: StepWrite, known: Step | None = None) -> None:
        """Remember a step as it was written; `known` is what was known of it before."""
        self._known[write.name] = Step(
            id=write.id, workflow_run_id=self.run.id, name=write.name, kind=write.kind, status=write.status,
            error=write.error, retry_state=write.retry_state, retry_attempts=write.retry_attempts,
            created_at=known.created_at if known else None,
        )  # fmt: skip

    def write_of(self, name: str, **fields: Any) -> StepWrite:
        known = self._known.get(name)
        slots = self.endings.slots
        return StepWrite(
            id=known.id if known else step_id(self.run.id, name), workflow_run_id=self.run.id, name=name,
            claim_generation=self.run.claim_generation, is_new=known is None,
            budgets=slots.pop(name, ()) if slots else (), **fields,
        )  # fmt: skip

    def keep_known(self, step: Step) -> None:
        """Remember a step that another transaction has written."""
        self._known[step.name] = step

    async def wait_for_turn(self, step: Step, until: datetime, look_at: datetime, warning: str) -> None:
        """Wait until a step is to be tried again: when its run resumes, woken or at a time; or, while other steps of it
        are in progress, after a moment."""
        if self.state is not EXECUTING:
            raise Suspend
        self.endings.warnings[step.name] = warning
        await self._park(step, until, look_at)

    async def _park(self, step: Step, until: datetime, look_at: datetime | None = None) -> None:
        """Wait for a time (`look_at`, if this execution lasts so long), or to be woken. If all others wait too, the run
        is suspended, and this call does not return."""
        self.endings.park(step, until)
        if not self.is_async:
            self.begin_no_more_steps()
            raise Suspend
        self.leave()
        waker = asyncio.Event()
        self._wakers.setdefault(step.name, []).append(waker)
        seconds = ((look_at or until) - self.now()).total_seconds()
        timer = asyncio.get_running_loop().call_later(seconds, self._wake, step.name, waker)
        try:
            await waker.wait()
        finally:
            timer.cancel()
            self._wake(step.name, waker)

    def _wake(self, name: str, waker: asyncio.Event) -> None:
        """A call waits no longer for its step. It is in progress from now on, although its task has not gone on yet:
        otherwise the run could be suspended before that. The step waits while another call waits for it."""
        if waker.is_set():
            return
        waker.set()
        self._active += 1
        waiting = self._wakers[name]
        waiting.remove(waker)
        if not waiting:
            del self._wakers[name]
            if self.state is EXECUTING:
                self.endings.unpark(name)

    def _wake_all(self, name: str) -> None:
        for waker in [*self._wakers.get(name, ())]:
            self._wake(name, waker)

    def known(self, name: str) -> Step | None:
        """A step as it is stored, or was written by this execution and did not succeed."""
        return self._known.get(name)

    async def wait_for_wake(self, step: Step, until: datetime, warning: str) -> None:
        """Wait for another transaction to write the step and wake the run, which then resumes; until a time at most."""
        if self.state is not EXECUTING:
            raise Suspend
        self.endings.warnings[step.name] = warning
        await self._park(step, until)

    @property
    def is_parked(self) -> bool:
        """Whether the function is being called, and a step of it waits."""
        return self.state is EXECUTING and bool(self.endings.parked)

    def woken(self, stored: Sequence[Step], wakes: int) -> None:
        """Children of this run have ended, by a transaction that left its steps as `stored`: those that wait for them
        go on here. Otherwise the run resumes after its suspension, which is due at once then (`wakes`)."""
        if self.state is not EXECUTING:
            return
        known = self._known
        ended = [s for s in stored if s.status != "pending" and s.name in known and known[s.name].status == "pending"]
        woken = [s for s in ended if s.kind in ("child", "map") and s.name in self._wakers]
        for step in woken:
            known[step.name] = step
            self._wake_all(step.name)
        if len(woken) == len(ended) > 0:
            self.endings.wakes = wakes

    def leave(self) -> None:
        """A run with a step in progress is not suspended because its other steps wait."""
        self._active -= 1
        if self.endings.parked and not self._active:
            if self._quiet is not None:
                self._quiet.cancel()
            self._quiet = asyncio.get_running_loop().call_later(QUIET_SECONDS, self._suspend_if_quiet)

    def _suspend_if_quiet(self) -> None:
        if self.endings.parked and not self._active:
            self.suspend()
