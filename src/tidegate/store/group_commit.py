"""Group commit: concurrent callers share one transaction. Many items, one commit; one item costs the same path."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from tidegate.errors import Overloaded
from tidegate.telemetry.logs import logger

Item = TypeVar("Item")
Result = TypeVar("Result")

_log = logger("store")


class GroupCommit(Generic[Item, Result]):
    """Collects items while a write is in progress and writes them together.

    `write` gets the items of several callers and returns one result or exception for each, in order. What waits is
    bounded: a caller over the bound is refused at once.
    """

    def __init__(
        self,
        write: Callable[[list[Item]], Awaitable[Sequence[Result | Exception]]],
        *,
        weight: Callable[[Item], int],
        max_weight: int,
        max_waiting: int,
    ) -> None:
        self._write = write
        self._weight = weight
        self._max_weight = max_weight
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[Item, Callable[[Result | BaseException], None], int]] = deque()
        self._waiting_weight = 0
        self._task: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Result:
        """The item's result, once the transaction that holds it is over."""
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self.put(item, partial(_answer, future))
        return await future

    def put(self, item: Item, then: Callable[[Result | BaseException], None]) -> None:
        """Add an item; `then` is called with its result."""
        weight = self._weight(item)
        if self._waiting_weight + weight > self._max_waiting:
            raise Overloaded("too much is waiting to be written; try again in a second")
        self._waiting.append((item, then, weight))
        self._waiting_weight += weight
        if self._task is None:
            self._task = asyncio.create_task(self._drain())

    @property
    def is_busy(self) -> bool:
        """Whether something is being written."""
        return self._task is not None

    async def close(self) -> None:
        """Wait until everything submitted so far is written."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def _drain(self) -> None:
        try:
            while self._waiting:
                group = self._take()
                items = [item for item, _, _ in group]
                try:
                    results = await self._write(items)
                except Exception as exc:  # noqa: BLE001 - reported to everyone in the group
                    results = [exc] * len(items)
                for (_, then, _), result in zip(group, results, strict=True):
                    _tell(then, result)
        finally:
            self._task = None
            for _, then, _ in self._waiting:  # only when the loop itself ends under us
                _tell(then, asyncio.CancelledError())

    def _take(self) -> list[tuple[Item, Callable[[Result | BaseException], None], int]]:
        group = [self._waiting.popleft()]
        weight = group[0][2]
        while self._waiting and weight + self._waiting[0][2] <= self._max_weight:
            group.append(self._waiting.popleft())
            weight += group[-1][2]
        self._waiting_weight -= weight
        return group


def _tell(then: Callable[[Any], None], result: Any) -> None:
    try:
        then(result)
    except Exception as exc:  # noqa: BLE001 - the other callbacks must still be called
        _log.error("commit.unheard", error=exc, exc_info=exc)


def _answer(future: asyncio.Future[Any], result: Any) -> None:
    if future.done():  # its caller has gone
        return
    if isinstance(result, asyncio.CancelledError):
        future.cancel()
    elif isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
