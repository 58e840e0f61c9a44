"""Calls of users' functions: what counts as their failure, and how it is told."""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from headgate.errors import NonRetryable, RetryAfter
from headgate.model.units import MAX_DURATION_MS

MAX_ERROR_CHARACTERS = 8000


def retry_after_ms(exc: RetryAfter) -> int:
    return max(1, round(min(max(exc.seconds, 0) * 1000, MAX_DURATION_MS)))


def called(call: Callable[[], Any]) -> Any:
    """Call a plain function in a thread. What a future or the interpreter would take for itself is its failure."""
    try:
        return call()
    except (StopIteration, SystemExit, KeyboardInterrupt) as exc:
        raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc


async def guarded(work: Awaitable[Any]) -> Any:
    """The same for a coroutine."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as exc:
        raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc


def error_text(exc: BaseException) -> str:
    """The traceback, cut to a size; of a refusal that names its reason, the reason alone."""
    if isinstance(exc, NonRetryable | RetryAfter):
        return str(exc).replace("\x00", "\N{REPLACEMENT CHARACTER}")
    text = "".join(traceback.format_exception(exc)).replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return text if len(text) <= MAX_ERROR_CHARACTERS else f"…{text[-MAX_ERROR_CHARACTERS:]}"
