"""Group commit by itself: who hears what."""

from __future__ import annotations

import asyncio

import pytest

from tidegate.errors import Overloaded
from tidegate.store.group_commit import GroupCommit


async def _doubled(items: list[int]) -> list[int | Exception]:
    await asyncio.sleep(0)
    return [ValueError("odd") if item % 2 else item * 2 for item in items]


def _group(max_waiting: int = 100) -> GroupCommit[int, int]:
    return GroupCommit(_doubled, weight=lambda _: 1, max_weight=10, max_waiting=max_waiting)


async def test_each_hears_of_its_own() -> None:
    group, heard = _group(), []
    for item in range(4):
        group.put(item, heard.append)
    assert await group.submit(6) == 12
    with pytest.raises(ValueError, match="odd"):
        await group.submit(7)
    assert [one if isinstance(one, int) else str(one) for one in heard] == [0, "odd", 4, "odd"]


async def test_one_that_fails_to_listen_keeps_nobody_from_hearing(capsys: pytest.CaptureFixture[str]) -> None:
    def deaf(_: int | BaseException) -> None:
        raise RuntimeError("not now")

    group, heard = _group(), []
    group.put(2, deaf)
    group.put(4, heard.append)
    await group.close()
    assert heard == [8]
    assert "commit.unheard" in "".join(capsys.readouterr())
    assert await group.submit(6) == 12


async def test_a_caller_that_has_gone_is_nobodys_trouble() -> None:
    group = _group()
    gone = asyncio.create_task(group.submit(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await group.submit(4) == 8
    assert gone.cancelled()


async def test_what_waits_is_bounded() -> None:
    group = _group(max_waiting=2)
    group.put(2, lambda _: None)
    group.put(4, lambda _: None)
    with pytest.raises(Overloaded):
        group.put(6, lambda _: None)
    await group.close()
