"""Calls of users' functions: what counts as a failure, how it is described, and what of their results can be stored."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import math
import re
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import msgspec

from tidegate import errors
from tidegate.errors import NonRetryable, RetryAfter, SecretsUnreadable, first_line
from tidegate.model import typed
from tidegate.model.not_finite import not_finite
from tidegate.model.typed import TypeRule
from tidegate.model.units import MAX_DURATION_MS, duration_ms

MAX_ERROR_CHARACTERS, MAX_HEADLINE = 8000, 1000
MAX_STEP_NAME = 200
MAX_OUTPUT_BYTES = 1024 * 1024


def retry_after_ms(exc: RetryAfter | SecretsUnreadable) -> int:
    """The delay in milliseconds; one second when it is neither a number nor a duration such as "5s"."""
    given = exc.seconds if isinstance(exc, RetryAfter) else exc.retry_after_seconds
    try:
        seconds = float(given)
    except (TypeError, ValueError, OverflowError):
        try:
            seconds = duration_ms(str(given)) / 1000
        except ValueError:
            seconds = 1.0
    return max(1, round(min(max(1.0 if math.isnan(seconds) else seconds, 0) * 1000, MAX_DURATION_MS)))


class Failure:
    """What a step's function raised."""

    __slots__ = ("exc",)

    def __init__(self, exc: BaseException) -> None:
        self.exc = exc


def called(call: Callable[[], Any]) -> Any:
    """Call a synchronous function in a thread. Exceptions that a future or the interpreter would act on are its
    failure."""
    try:
        return call()
    except (StopIteration, SystemExit, KeyboardInterrupt) as exc:
        raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc


class Threads:
    """The calls of one execution that run in threads. A caller may stop waiting; the thread cannot be stopped."""

    __slots__ = ("_busy",)

    def __init__(self) -> None:
        self._busy: set[Future[Any]] = set()

    def __len__(self) -> int:
        return len(self._busy)

    async def call(self, executor: Executor, call: Callable[[], Any]) -> Any:
        """Call a synchronous function, in a copy of this context."""
        future = executor.submit(contextvars.copy_context().run, called, call)
        self._busy.add(future)
        future.add_done_callback(self._busy.discard)
        return await asyncio.wrap_future(future)

    async def gone(self) -> None:
        """Wait until all of them are over."""
        loop = asyncio.get_running_loop()
        for future in tuple(self._busy):
            over = asyncio.Event()
            future.add_done_callback(partial(_set, loop, over))
            await over.wait()


def _set(loop: asyncio.AbstractEventLoop, over: asyncio.Event, _: Future[Any]) -> None:
    with suppress(RuntimeError):  # the loop is closed, so nothing waits
        loop.call_soon_threadsafe(over.set)


async def called_in(executor: Executor, threads: Threads, call: Callable[[], Any], function: Callable[..., Any]) -> Any:
    """Call a function, by `call`, in a thread, unless it is async."""
    if is_async_function(function):
        try:  # as `guarded` does, which would be one more for every step
            return await call()
        except (SystemExit, KeyboardInterrupt) as exc:
            raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc
    value = await threads.call(executor, call)
    return await guarded(value) if inspect.isawaitable(value) else value


async def called_within(
    duration: str | int | float,
    name: str,
    executor: Executor,
    threads: Threads,
    call: Callable[[], Any],
    function: Callable[..., Any],
) -> Any:
    """The same with a timeout; the TimeoutError names the step."""
    try:
        async with asyncio.timeout(duration_ms(duration) / 1000) as limit:
            return await called_in(executor, threads, call, function)
    except TimeoutError as exc:
        if not limit.expired():  # raised by the function itself; its cause does not say so in Python 3.11.2
            raise
        raise TimeoutError(f"step {name!r} took longer than {duration}") from exc


def is_async_function(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine."""
    code = getattr(function, "__code__", None)  # as `inspect` does, after slower checks
    if code is None:
        return inspect.iscoroutinefunction(function)
    return bool(code.co_flags & inspect.CO_COROUTINE)


def is_step_name(name: str) -> bool:
    """Whether it may be the name of a step."""
    return 0 < len(name) <= MAX_STEP_NAME and _is_storable(name)


@lru_cache(1000)
def _is_storable(name: str) -> bool:
    return cleaned(name) == name


async def guarded(work: Awaitable[Any]) -> Any:
    """The same for a coroutine."""
    try:
        return await work
    except (SystemExit, KeyboardInterrupt) as exc:
        raise RuntimeError(f"{type(exc).__name__}: {exc}") from exc


def cleaned(text: str) -> str:
    """Text that the database can store: without U+0000, and with lone surrogates escaped."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="backslashreplace").decode()


def reason_of(exc: BaseException) -> str:
    """The exception's type and the first line of its message: `httpx.ConnectError: no such host`; for a group, also the
    reason of its first exception."""
    says = first_line(_said(exc))[:MAX_HEADLINE]
    told = f"{_type_name(exc)}: {says}" if says else _type_name(exc)
    if isinstance(exc, BaseExceptionGroup) and len(told) < MAX_HEADLINE:
        return f"{told}: {reason_of(exc.exceptions[0])}"
    return told


def error_text(exc: BaseException) -> str:
    """The reason in the first line, then the traceback, cut to MAX_ERROR_CHARACTERS; for NonRetryable and RetryAfter
    the whole message and no traceback."""
    if isinstance(exc, NonRetryable | RetryAfter):
        said = _said(exc)
        return f"{_type_name(exc)}: {said}" if said else _type_name(exc)
    text = cleaned("".join(traceback.format_exception(exc)))
    cut = text if len(text) <= MAX_ERROR_CHARACTERS else f"…{text[-MAX_ERROR_CHARACTERS:]}"
    return f"{reason_of(exc)}\n\n{cut}"


def _type_name(exc: BaseException) -> str:
    """The type as user code would write it."""
    kind = type(exc)
    is_bare = kind.__module__ in ("builtins", "__main__", errors.__name__)
    return cleaned(kind.__qualname__ if is_bare else f"{kind.__module__}.{kind.__qualname__}")


def _said(exc: BaseException) -> str:
    try:
        text = str(exc)
    except Exception:  # noqa: BLE001 - its __str__ fails
        text = ""
    return cleaned(text[:MAX_ERROR_CHARACTERS]).strip()


# The escape for U+0000, not the text backslash-u-0000: an odd number of backslashes before the u.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def encode_output(result: Any, what: str, step: str | None = None) -> str | None:
    """JSON text, None for None. NonRetryable, which names `what` (and the step), when it cannot be stored."""
    if result is None:
        return None
    try:
        output = typed.encode(result)
    except (TypeError, ValueError, RecursionError) as exc:
        raise _refused(what, step, f"cannot be stored as JSON: {exc}") from exc
    if len(output) > MAX_OUTPUT_BYTES:
        raise _refused(what, step, f"is {len(output)} bytes; at most {MAX_OUTPUT_BYTES} are kept")
    if b"null" in output and not_finite(result) is not None:
        raise _refused(what, step, "cannot be stored as JSON: it holds a number that is not finite")
    if b"u0000" in output and _NUL.search(output):
        raise _refused(what, step, "holds the character U+0000, which cannot be stored")
    return output.decode()


def kept_result(value: object, result: str | None, rule: TypeRule | None, step: str) -> object:
    """What the workflow gets, now and whenever it resumes: the stored JSON as the type that the step's function
    declares. NonRetryable names the step and the type if that is not what the function returned."""
    stored = None if result is None else msgspec.json.decode(result)
    if rule is None or type(stored) is rule.exact:
        return stored
    try:
        found = rule.convert(stored)
    except ValueError as exc:
        why = first_line(str(exc))
        raise NonRetryable(
            f"the result of step {step!r} is not the {rule.name} that it is declared to be: {why}"
        ) from exc
    if type(found) is not type(value) and typed.has_fields(type(value)):
        mine, declared = _names(type(value), type(found), rule.name)
        raise NonRetryable(
            f"the result of step {step!r} is {mine}, which would come back as the {declared} that it is declared to "
            "be; declare the type that is returned"
        )
    return found


def _names(mine: type, other: type, declared: str) -> tuple[str, str]:
    """A type and the one that was declared, with their modules if they read the same otherwise."""
    name = typed.type_name(mine)
    if name != declared:
        return name, declared
    return f"{mine.__module__}.{name}", f"{other.__module__}.{declared}"


def _refused(what: str, step: str | None, why: str) -> NonRetryable:
    return NonRetryable(f"{what} {why}" if step is None else f"{what} of step {step!r} {why}")
