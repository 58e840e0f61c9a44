"""Transaction: a step whose function writes to Tidegate's own database; its writes and its result are one commit.

The function has a transaction of its own. When it returns, the step is written in that transaction, if the worker still
holds the run, and all of it is committed. A commit whose answer was lost is settled by the step's row: the function is
not called again after a commit. Only the commit itself cannot be interrupted; before it, whatever stops the function
(timeout, cancellation, a lost lease) rolls back.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import uuid
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tidegate import failpoints
from tidegate.errors import NonRetryable, TidegateError, Unavailable
from tidegate.flow.call.states import EXECUTING
from tidegate.flow.code.user_calls import encode_output, guarded, is_async_function, kept_result
from tidegate.flow.decide.reporting import run_fields
from tidegate.model.step import StepWrite
from tidegate.model.typed import TypeRule
from tidegate.model.units import named_duration_ms
from tidegate.store import sync_transactions
from tidegate.store.transactions import (
    DEFAULT_SECONDS,
    MAX_SECONDS,
    Bounds,
    CommitVerdict,
    FunctionTransaction,
    Transactions,
)
from tidegate.telemetry.logs import logger

if TYPE_CHECKING:
    from tidegate.flow.call.steps import RunSteps

# How often a database that cannot be reached is tried again.
RETRY_SECONDS = 0.5

_log = logger("run")


class _Outcome(NamedTuple):
    """What became of a transaction: `error` is what the commit raised, so that it is not known whether it happened."""

    verdict: CommitVerdict
    step: StepWrite
    kept: object  # the result, as the workflow gets it
    error: BaseException | None = None


class _Door:
    """Between the thread of a function and the execution that waits for it: either the thread goes on to its commit,
    or the execution stops waiting, and nothing is committed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self.has_begun = False

    def take(self) -> bool:
        """Whether the caller is the first; the other one must give in."""
        with self._lock:
            is_first, self._is_taken = not self._is_taken, True
        return is_first


def step_name(function: Callable[..., object], name: str | None) -> str:
    """The name of the step: the function's, if none is given. NonRetryable when it has none."""
    found = name or getattr(function, "__name__", None)
    if not isinstance(found, str) or found == "<lambda>":
        raise NonRetryable("name: a function without a name of its own needs one: ctx.transaction(…, name='…')")
    return found


class StepTransaction:
    """One call of `ctx.transaction`. NonRetryable when its arguments are wrong."""

    def __init__(
        self,
        transactions: Transactions,
        function: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        timeout: str | int | float | None,
        engine: object,
    ) -> None:
        self._transactions = transactions
        self._call = partial(_called, function, args, kwargs)
        self._is_async = is_async_function(function)
        self._engine = engine
        self._seconds = _seconds(timeout)
        if engine is not None:
            if self._is_async:
                raise NonRetryable(
                    "engine: an async function gets a connection of asyncpg; engine is for `def` functions"
                )
            sync_transactions.check_engine(engine)

    async def run(self, steps: RunSteps, step: StepWrite, rule: TypeRule | None) -> object:
        """Call the function and commit; its result, of the type that it declares. LeaseLost or Cancelled when nothing
        was written for that reason; what the function raised."""
        bounds = Bounds(self._seconds, f"{step.id}:{step.claim_generation}:{uuid.uuid4().hex}")
        in_it = self._in_task if self._is_async else self._in_thread
        outcome = await in_it(steps, step, bounds, rule)
        verdict = outcome.verdict
        if verdict.is_written and outcome.error is None:
            return outcome.kept
        if not verdict.is_held:
            steps.journal.lose()
        if verdict.is_cancel_requested:
            steps.journal.is_cancelled = True
        steps.journal.check()
        if not verdict.is_whole:
            raise NonRetryable(
                f"the function of step {step.name!r} has ended its transaction itself (COMMIT, ROLLBACK or a closed "
                "connection): what it wrote and the step's result are not one commit. Leave the transaction open"
            )
        return await self._settled(steps, outcome, rule)

    async def _settled(self, steps: RunSteps, outcome: _Outcome, rule: TypeRule | None) -> object:
        """The result, if it is committed: by this transaction, whose answer was lost, or before."""
        while True:
            try:
                stored = await self._transactions.settled(outcome.step)
                break
            except Unavailable as exc:
                await _wait(steps, outcome.step, exc)
        if stored is not None and stored.status == "succeeded":
            return stored.result if rule is None else rule.restored(stored.result)
        if outcome.error is not None:
            raise outcome.error
        steps.journal.lose()  # the step has ended otherwise, which this claim does not know of
        steps.journal.check()
        raise AssertionError("unreachable")

    async def _in_task(self, steps: RunSteps, step: StepWrite, bounds: Bounds, rule: TypeRule | None) -> _Outcome:
        async with self._transactions.slot(), AsyncExitStack() as stack:
            begun = await self._begun(stack, steps, step, bounds)
            try:
                async with asyncio.timeout(bounds.seconds) as limit:
                    done, kept = _with_result(step, await guarded(self._call(begun.connection)), rule)
                    failpoints.hit("transaction.before_write")
                    verdict = await begun.write(done)
            except TimeoutError as exc:
                raise _too_long(bounds) if limit.expired() else exc from exc
            if not verdict.is_written:
                return _Outcome(verdict, done, kept)
            failpoints.hit("transaction.before_commit")
            return _Outcome(verdict, done, kept, await _committed(steps, begun.commit()))

    async def _begun(
        self, stack: AsyncExitStack, steps: RunSteps, step: StepWrite, bounds: Bounds
    ) -> FunctionTransaction:
        """A transaction. While there is no connection, the step waits: that is no failure of its own."""
        while True:
            try:
                return await stack.enter_async_context(self._transactions.begin(bounds))
            except Unavailable as exc:
                await _wait(steps, step, exc)

    async def _in_thread(self, steps: RunSteps, step: StepWrite, bounds: Bounds, rule: TypeRule | None) -> _Outcome:
        if self._engine is not None and not sync_transactions.is_proven(self._engine):
            async with self._transactions.slot(), self._transactions.probe() as number:
                prove = partial(sync_transactions.prove, self._transactions, self._engine, number, bounds)
                await steps.in_thread(prove)
        while True:
            door = _Door()
            try:
                return await self._from_thread(steps, partial(self._blocking, door, step, bounds, rule), bounds, door)
            except Unavailable as exc:
                if door.has_begun:
                    raise
                await _wait(steps, step, exc)

    async def _from_thread(
        self, steps: RunSteps, call: Callable[[], _Outcome], bounds: Bounds, door: _Door
    ) -> _Outcome:
        """What the function in its thread came to. If it takes too long, or the execution is to stop, it is left to
        itself, unless it is on the way to its commit."""
        await self._transactions.take_slot()
        thread = asyncio.create_task(steps.in_thread(call))
        thread.add_done_callback(self._thread_ended)
        is_stopped = False
        try:
            await asyncio.wait([thread], timeout=bounds.seconds)
        except asyncio.CancelledError:
            is_stopped = True
            if door.take():
                raise
        if not thread.done() and not is_stopped and door.take():
            raise _too_long(bounds)
        is_stopped |= await _to_the_end(thread)
        if is_stopped and steps.state is not EXECUTING:
            raise asyncio.CancelledError
        return thread.result()

    def _thread_ended(self, thread: asyncio.Task[_Outcome]) -> None:
        self._transactions.free_slot()
        if not thread.cancelled():
            thread.exception()  # if nobody waits for it any more

    def _blocking(self, door: _Door, step: StepWrite, bounds: Bounds, rule: TypeRule | None) -> _Outcome:
        with sync_transactions.begin(self._transactions, self._engine, bounds) as begun:
            door.has_begun = True
            value = self._call(begun.connection)
            if inspect.isawaitable(value):
                raise NonRetryable(f"the function of step {step.name!r} returned an awaitable; make it async def")
            done, kept = _with_result(step, value, rule)
            if not door.take():
                raise _too_long(bounds)
            failpoints.hit("transaction.before_write")
            verdict = begun.write(done)
            if not verdict.is_written:
                return _Outcome(verdict, done, kept)
            failpoints.hit("transaction.before_commit")
            try:
                begun.commit()
            except Exception as exc:  # noqa: BLE001 - settled by the step's row, and raised if it was not committed
                return _Outcome(verdict, done, kept, exc)
        return _Outcome(verdict, done, kept)


def _called(
    function: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object], connection: object
) -> Any:
    return function(connection, *args, **kwargs)


def _with_result(step: StepWrite, value: object, rule: TypeRule | None) -> tuple[StepWrite, object]:
    """The step with its result, and that result as the workflow gets it. NonRetryable when it cannot be kept."""
    result = encode_output(value, "the result", step.name)
    return msgspec.structs.replace(step, result=result), kept_result(value, result, rule, step.name)


def _seconds(timeout: str | int | float | None) -> float:
    if timeout is None:
        return DEFAULT_SECONDS
    try:
        seconds = named_duration_ms("timeout", timeout) / 1000
    except (TidegateError, ValueError) as exc:
        raise NonRetryable(str(exc)) from exc
    if not 0 < seconds <= MAX_SECONDS:
        raise NonRetryable(f"timeout: a transaction may take up to {MAX_SECONDS:g} s, not {timeout!r}")
    return seconds


def _too_long(bounds: Bounds) -> TimeoutError:
    return TimeoutError(f"the transaction took longer than {bounds.seconds:g} s; it is rolled back")


async def _committed(steps: RunSteps, commit: Coroutine[None, None, None]) -> BaseException | None:
    """Commit, whatever happens meanwhile; what that raised. CancelledError when the execution is to stop."""
    task = asyncio.create_task(commit)
    if await _to_the_end(task) and steps.state is not EXECUTING:
        raise asyncio.CancelledError
    return task.exception()


async def _to_the_end(task: asyncio.Task[object]) -> bool:
    """Wait until a task has ended, however often this is cancelled; whether it was. Who had given up waiting (a timeout
    of the workflow's own) finds the step done."""
    is_cancelled = False
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            is_cancelled = True
    return is_cancelled


async def _wait(steps: RunSteps, step: StepWrite, exc: Unavailable) -> None:
    _log.warning("transaction.waits", **run_fields(steps.run, steps.event), step=step.name, error=exc)
    await asyncio.sleep(RETRY_SECONDS)
