"""What functions declare: the types of their arguments and of what they return, found once for each function."""

from __future__ import annotations

import collections.abc
import functools
import typing
from collections.abc import Callable
from typing import Any, get_args, get_origin

from tidegate.errors import NonRetryable
from tidegate.model.typed import TypeRule, Unsupported, rule_of, type_name

# Functions defined inside others are made anew for each run, but share their code.
MAX_KNOWN = 10_000

_AWAITABLE = (
    collections.abc.Awaitable, collections.abc.Coroutine, typing.Awaitable, typing.Coroutine,
)  # fmt: skip
# Classes of Python itself whose values are not what JSON has.
_NOT_JSON = (set, frozenset, tuple, bytes, bytearray)
# By the identity of the code, which is kept with the rule so that no other code gets it: code that was loaded again
# equals the code of before, but its annotations mean the classes of now.
_known: dict[tuple[int, object], tuple[object, TypeRule | None]] = {}


def result_rule(function: Callable[..., object]) -> TypeRule | None:
    """How the result of a function is restored from JSON, by what it declares to return; None: as JSON has it.
    Unsupported if that cannot be done."""
    code = getattr(function, "__code__", None)
    if code is None:
        return _rule_of_callable(function)
    try:
        annotation = function.__annotations__.get("return", Any)
    except Exception:  # noqa: BLE001 - Python evaluates it now; a name exists for type checkers only
        return None
    if annotation is Any:
        return None
    try:
        return _known[id(code), annotation][1]
    except KeyError:
        pass
    except TypeError:  # not hashable
        return _rule_of_annotation(function, annotation)[0]
    rule, is_local = _rule_of_annotation(function, annotation)
    if not is_local:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[id(code), annotation] = code, rule
    return rule


def checked_result_rule(name: str, function: Callable[..., object]) -> TypeRule | None:
    """The same for the function of a step; NonRetryable, before it is called, if its results cannot be restored."""
    try:
        return result_rule(function)
    except Unsupported as exc:
        raise NonRetryable(f"step {name!r}: {refusal(function, exc)}") from exc


def refusal(function: Callable[..., object], exc: Unsupported) -> str:
    """What a function declares that cannot be kept, and why."""
    called = getattr(function, "__qualname__", None) or repr(function)
    annotation = getattr(function, "__annotations__", {}).get("return", function)
    shown = annotation if isinstance(annotation, str) else type_name(annotation)
    return f"{called} is declared to return {shown}, which cannot be kept: {exc}"


def hint_of(function: Callable[..., object], name: str) -> object:
    """The type that an argument, or `return`, is annotated with; Any if it has none, or one that exists for type
    checkers only."""
    try:
        annotation = function.__annotations__.get(name, Any)
    except Exception:  # noqa: BLE001 - Python evaluates it now; a name exists for type checkers only
        return Any
    return _resolved(function, annotation)[0]


def _rule_of_callable(function: Callable[..., object]) -> TypeRule | None:
    """Of what is no function itself: a method, a partial, a class, an object that can be called, a builtin."""
    if isinstance(function, functools.partial):
        return result_rule(function.func)
    if isinstance(function, type):
        if function.__module__ == "builtins" and function not in _NOT_JSON:
            return None
        if (id(function), None) not in _known:
            _known[id(function), None] = function, rule_of(function)
        return _known[id(function), None][1]
    inner = getattr(function, "__func__", None) or type(function).__call__
    return result_rule(inner) if hasattr(inner, "__code__") else None


def _rule_of_annotation(function: Callable[..., object], annotation: object) -> tuple[TypeRule | None, bool]:
    kind, is_local = _resolved(function, annotation)
    while get_origin(kind) in _AWAITABLE and get_args(kind):
        kind = get_args(kind)[-1]
    try:
        return rule_of(kind), is_local
    except NameError:  # a part of it exists for type checkers only
        return None, True


def _resolved(function: Callable[..., object], annotation: object) -> tuple[object, bool]:
    """The type that an annotation means, and whether that may differ between functions of the same code: names are
    looked up in the function's module, and among the variables it takes from the function around it."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    spaces = getattr(function, "__globals__", {})
    holder = _Holder(annotation)
    for names in ({}, _closure(function)):
        try:
            return typing.get_type_hints(holder, spaces, names, include_extras=True)["return"], bool(names)
        except Exception:  # noqa: S112, BLE001 - a name that is not there, or exists for type checkers only
            continue
    return Any, True


def _closure(function: Callable[..., object]) -> dict[str, object]:
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    found = {}
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return found


class _Holder:
    """Something with one annotation, for `get_type_hints`."""

    def __init__(self, annotation: object) -> None:
        self.__annotations__ = {"return": annotation}
