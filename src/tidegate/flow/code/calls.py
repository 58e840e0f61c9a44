"""Calls of `ctx` that were not awaited: Python only warns of them, and the run would succeed without their steps."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Protocol, TypeVar

Call = Coroutine[object, object, object]
F = TypeVar("F", bound=Callable[..., Call])

# After so many calls those that were awaited are forgotten.
_MANY = 256


class Calls:
    """What one execution of a function has called."""

    __slots__ = ("_made", "_many")

    def __init__(self) -> None:
        self._made: list[tuple[Call, str, object]] = []
        self._many = _MANY

    def add(self, call: Call, method: str, subject: object) -> None:
        """A call of a method; `subject` is what it is about, such as the name of the step."""
        self._made.append((call, method, subject))
        if len(self._made) >= self._many:
            self._made = self._unawaited()
            self._many = max(_MANY, 2 * len(self._made))

    def forgotten(self) -> list[str]:
        """The calls that were never awaited, as they are written. They are closed: they cannot be awaited any more."""
        found = self._unawaited()
        for call, _, _ in found:
            call.close()
        return [f"{method}({_written(subject)})" for _, method, subject in found]

    def _unawaited(self) -> list[tuple[Call, str, object]]:
        return [one for one in self._made if inspect.getcoroutinestate(one[0]) == inspect.CORO_CREATED]


class Called(Protocol):
    """An execution that notes the calls of its function."""

    calls: Calls


class _Noting(Protocol):
    _execution: Called


def noted(prefix: str) -> Callable[[F], F]:
    """Have a method of an object with `_execution` note each call; `prefix` is how the object is called."""

    def noting(method: F) -> F:
        name = f"{prefix}.{method.__name__}"

        @wraps(method)
        def call(self: _Noting, *args: object, **kwargs: object) -> Call:
            made = method(self, *args, **kwargs)
            self._execution.calls.add(made, name, args[0] if args else getattr(self, "name", None))
            return made

        if sys.version_info >= (3, 12):  # it is to be taken for `async def`, as by `AsyncMock(spec=Context)`
            inspect.markcoroutinefunction(call)
        else:
            call._is_coroutine = asyncio.coroutines._is_coroutine  # type: ignore[attr-defined]
        return call  # type: ignore[return-value]

    return noting


def _written(subject: object) -> str:
    if subject is None:
        return ""
    if isinstance(subject, str | int | float):
        return f"{subject!r}, …"
    return f"{getattr(subject, '__name__', None) or getattr(subject, 'type', None) or type(subject).__name__}, …"
