"""One by one: when a batch fails, process its items separately, so that only the item at fault is dead-lettered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from tidegate.errors import Unavailable

MAX_ERROR_CHARACTERS = 1000

Item = TypeVar("Item")
Result = TypeVar("Result")


async def one_by_one(
    items: Iterable[Item],
    process: Callable[[Item], Awaitable[Result]],
    fail: Callable[[Item, Exception], Awaitable[Result]],
) -> list[Result]:
    """The result of each item, in order. An item that `process` fails on goes to `fail` with the error, and the others
    continue. Unavailable is raised: that the database is down is no item's fault."""
    results: list[Result] = []
    for item in items:
        try:
            result = await process(item)
        except Unavailable:
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, this item is dead-lettered and the others continue
            result = await fail(item, exc)
        results.append(result)
    return results


def error_text(exc: BaseException) -> str:
    """The error as it is stored with a row."""
    return f"{type(exc).__name__}: {exc}"[:MAX_ERROR_CHARACTERS]
