"""Leaving: a function of a user's is called in a task of ours, and must leave it when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

# A function that is to leave gets this long before it is told again, and is told so often.
LEAVE_SECONDS, LEAVE_TIMES = 5.0, 3


class Leaving:
    """One call."""

    __slots__ = ("_again", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[Any] | None = None  # while the function is in it
        self._again: asyncio.TimerHandle | None = None

    async def through(
        self, call: Awaitable[Any], seconds: float | None, time_out: Callable[[], None]
    ) -> tuple[Any, BaseException | None]:
        """Call the function in this task; what it returned, or raised. After so many seconds `time_out` is called."""
        self.task = task = asyncio.current_task()
        timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, time_out)
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

    def tell(self, give_up: Callable[[], None]) -> bool:
        """Have the function leave; False when it is not there. One that catches everything is told again; when it was
        told often enough and is still there, `give_up` hears of it: its task is lost."""
        if self.task is not None and self._again is None:
            self._insist(LEAVE_TIMES, give_up)
        return self.task is not None

    def _insist(self, times: int, give_up: Callable[[], None]) -> None:
        if self.task is None:
            return
        if times:
            self.task.cancel()
            self._again = asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._insist, times - 1, give_up)
        else:
            give_up()


async def _uncancelled(task: asyncio.Task[Any], error: BaseException | None) -> BaseException | None:
    """Whoever cancelled the task meant the function, not what comes after it; what the function came to."""
    try:
        await asyncio.sleep(0)  # a cancellation that has not reached it yet; from Python 3.13 on uncancel() drops that
    except asyncio.CancelledError as exc:
        error = error or exc
    while task.cancelling():
        task.uncancel()
    return error
