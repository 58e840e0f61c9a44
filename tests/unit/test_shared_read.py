"""One read serves many callers."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.flow.shared_read import SharedRead


class Source:
    """Reads that take as long as `may_end` says, each with its number as the value."""

    def __init__(self) -> None:
        self.befores: list[int | None] = []
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def read(self, before: int | None) -> int:
        self.befores.append(before)
        number = len(self.befores)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return number


async def test_callers_share_a_read_in_progress_however_long_it_takes() -> None:
    source = Source()
    shared = SharedRead(source.read, joins_slow_reads=True)
    first = asyncio.create_task(shared.get(0.02))
    await asyncio.sleep(0.05)  # longer than a value may be old
    second = asyncio.create_task(shared.get(0.02))
    await asyncio.sleep(0)
    source.may_end.set()
    assert await asyncio.gather(first, second) == [1, 1]
    assert await shared.get(10) == 1, "its age counts from its end"


async def test_callers_who_need_a_later_read_wait_for_the_next() -> None:
    source = Source()
    shared = SharedRead(source.read)
    first = asyncio.create_task(shared.get(0))
    await asyncio.sleep(0)
    others = [asyncio.create_task(shared.get(0)) for _ in range(3)]
    await asyncio.sleep(0)
    source.may_end.set()
    assert await asyncio.gather(first, *others) == [1, 2, 2, 2]


async def test_the_last_good_value_is_known_to_the_next_read() -> None:
    source = Source()
    source.may_end.set()
    shared = SharedRead(source.read)
    assert await shared.get(0) == 1
    source.error = ConnectionError("the database is away")
    with pytest.raises(ConnectionError):
        await shared.get(0)
    source.error = None
    assert await shared.get(0) == 3
    assert source.befores == [None, 1, 1]
    assert shared.value == 3
