"""Group commit: concurrent callers share one transaction. Many items, one commit; one item costs the same path."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from headgate.errors import Overloaded

Item = TypeVar("Item")
Result = TypeVar("Result")


class GroupCommit(Generic[Item, Result]):
    """Collects items while a write is under way and writes them together.

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
        self._waiting: deque[tuple[Item, asyncio.Future[Result], int]] = deque()
        self._waiting_weight = 0
        self._task: asyncio.Task[None] | None = None

    async def submit(self, item: Item) -> Result:
        """The item's result, once the transaction that holds it is over."""
        return await self.put(item)

    def put(self, item: Item) -> asyncio.Future[Result]:
        """Hand in an item; its result comes with the future."""
        weight = self._weight(item)
        if self._waiting_weight + weight > self._max_waiting:
            raise Overloaded("too much is waiting to be written; try again in a second")
        future: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future, weight))
        self._waiting_weight += weight
        if self._task is None:
            self._task = asyncio.create_task(self._drain())
        return future

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
                except Exception as exc:
                    results = [exc] * len(items)
                for (_, future, _), result in zip(group, results, strict=True):
                    if future.done():  # its caller has gone
                        continue
                    if isinstance(result, Exception):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
        finally:
            self._task = None
            for _, future, _ in self._waiting:  # only when the loop itself ends under us
                future.cancel()

    def _take(self) -> list[tuple[Item, asyncio.Future[Result], int]]:
        group = [self._waiting.popleft()]
        weight = group[0][2]
        while self._waiting and weight + self._waiting[0][2] <= self._max_weight:
            group.append(self._waiting.popleft())
            weight += group[-1][2]
        self._waiting_weight -= weight
        return group
