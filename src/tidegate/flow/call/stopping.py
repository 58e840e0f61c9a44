"""Stopping: a call of a user's function that can be told to stop, and the executions that still have to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from tidegate.flow.decide.reporting import run_fields
from tidegate.model.ids import RunId
from tidegate.telemetry.logs import logger

if TYPE_CHECKING:
    from tidegate.flow.call.execution import Execution

# A function that is to stop is cancelled, again after STOP_SECONDS, and STOP_TIMES times in all.
STOP_SECONDS, STOP_TIMES = 5.0, 3
# How often a run that waits for its earlier execution logs so, and checks whether it was cancelled.
WAITING_SECONDS = 5.0

_log = logger("run")


class StoppableCall:
    """One call of a user's function."""

    __slots__ = ("_again", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None  # while the function is being called
        self._again: asyncio.TimerHandle | None = None

    async def run(
        self, call: Awaitable[Any], timeout_seconds: float | None, on_timeout: Callable[[], None]
    ) -> tuple[Any, BaseException | None]:
        """Call the function in this task; what it returned, or raised."""
        self.task = task = asyncio.current_task()
        loop = asyncio.get_running_loop()
        timer = None if timeout_seconds is None else loop.call_later(timeout_seconds, on_timeout)
        result, error = None, None
        try:
            result = await call
        except BaseException as exc:  # noqa: BLE001 - user code may raise anything; returned to the caller
            error = exc
        finally:
            self.task = None
            for handle in (timer, self._again):
                if handle is not None:
                    handle.cancel()
        if task is not None and task.cancelling():
            error = await _uncancelled(task, error)
        return result, error

    def stop(self, on_failure: Callable[[], None]) -> bool:
        """Have the function stop; False when it is not being called. A function that catches the cancellation is
        cancelled again; if it is still there after STOP_TIMES, `on_failure` is called: its task is lost."""
        if self.task is not None and self._again is None:
            self._cancel(STOP_TIMES, on_failure)
        return self.task is not None

    def _cancel(self, times: int, on_failure: Callable[[], None]) -> None:
        if self.task is None:
            return
        if times:
            self.task.cancel()
            self._again = asyncio.get_running_loop().call_later(STOP_SECONDS, self._cancel, times - 1, on_failure)
        else:
            on_failure()


async def _uncancelled(task: asyncio.Task[Any], error: BaseException | None) -> BaseException | None:
    """The cancellation was meant for the function, not for what comes after it; what the function raised."""
    try:
        await asyncio.sleep(0)  # a cancellation that has not reached it yet; from Python 3.13 on uncancel() drops that
    except asyncio.CancelledError as exc:
        error = error or exc
    while task.cancelling():
        task.uncancel()
    return error


class EarlierExecutions:
    """The executions of one worker that were told to stop and whose functions may still be running, by run: a run is
    never executed twice at a time in one process."""

    def __init__(self) -> None:
        self._stopping: dict[RunId, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._stopping)

    def add(self, execution: Execution) -> None:
        """It was told to stop. A later execution of its run waits until nothing is left of it."""
        run_id = execution.run.id
        self._stopping[run_id] = asyncio.create_task(self._watch(execution, self._stopping.get(run_id)))

    async def stopped(self, execution: Execution) -> None:
        """Wait until the run's earlier executions have stopped, or this one need not call its function any more."""
        earlier = self._stopping.get(execution.run.id)
        while earlier is not None and not earlier.done() and execution.is_to_be_called:
            _log.warning("run.waits_behind", **run_fields(execution.run, execution.event),
                         reason="an earlier execution, whose lease ended, is still running its function")  # fmt: skip
            await asyncio.wait([earlier], timeout=WAITING_SECONDS)

    async def _watch(self, execution: Execution, earlier: asyncio.Task[None] | None) -> None:
        if earlier is not None:
            await earlier
        await execution.stopped()
        if self._stopping.get(execution.run.id) is asyncio.current_task():
            del self._stopping[execution.run.id]
