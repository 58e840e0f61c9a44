"""JSONPath (RFC 9535) into an event: validated on save, compiled once, and charged for each value that it visits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jsonpath
from jsonpath.filter import FilterQuery, FunctionExtension, RootFilterQuery, StringLiteral
from jsonpath.function_extensions import ExpressionType, FilterFunction
from jsonpath.segments import JSONPathRecursiveDescentSegment
from jsonpath.selectors import Filter, IndexSelector, NameSelector, SliceSelector

from tidegate.model.pattern import Pattern, compile_pattern
from tidegate.model.trigger_terms import FIELDS, MAX_NODES, Find, Unanswerable, WrongPath, unknown_field
from tidegate.model.work_limit import MAX_STEPS, WorkLeft

MAX_PATH_LENGTH = 500
# Maximum number of values that a path may visit; fewer for long paths and filters, which do more work per value.
MAX_VISITS = 50_000
MAX_WORK = 1_000_000
# A path that may visit fewer values could not even reach the payload of an event.
MIN_VISITS = 50
# Filters do not compare longer texts: a filter could compare the same text with each item of a long array.
MAX_FILTER_TEXT = 1024

# The work left and the patterns for match() and search() in filters: the library passes only the values to them.
_asked: ContextVar[tuple[WorkLeft, Mapping[str, Pattern]]] = ContextVar("asked")


def compile_path(path: str) -> Find:
    if not 0 < len(path) <= MAX_PATH_LENGTH:
        raise WrongPath(f"must be a JSONPath of 1 to {MAX_PATH_LENGTH} characters")
    if not path.startswith("$"):
        raise WrongPath("must begin with $ (the event), for example $.payload.amount")
    try:
        compiled = _environment.compile(path)
    except (jsonpath.JSONPathError, RecursionError, ValueError) as exc:
        token = getattr(exc, "token", None)
        place = "" if token is None else f" at column {(token.index if token.index >= 0 else len(path)) + 1}"
        raise WrongPath(f"is not a JSONPath (RFC 9535): {exc.args[0] if exc.args else path}{place}") from exc
    if not isinstance(compiled, jsonpath.JSONPath):
        raise WrongPath("must be a single JSONPath")
    if mistake := _mistake(compiled):
        raise WrongPath(mistake)
    named = sum(isinstance(e, FilterQuery) for e in _expressions(compiled))
    visits = min(MAX_VISITS, MAX_WORK // len(path)) // (1 + 10 * named)
    if compiled.singular_query():
        return _walker(compiled)
    if visits < MIN_VISITS:
        raise WrongPath("has filters that exceed the work limit of an event; simplify them")
    return _finder(compiled, MAX_STEPS // visits)


def _mistake(compiled: jsonpath.JSONPath) -> str | None:
    """Why a syntactically correct path is not valid; None if it is."""
    expressions = list(_expressions(compiled))
    queries = [e for e in expressions if isinstance(e, FilterQuery)]
    if any(not query.path.singular_query() for query in queries):
        return "has a filter with a query for several values; query a single value there"
    for path in (compiled, *(query.path for query in queries if isinstance(query, RootFilterQuery))):
        if not path.segments or isinstance(path.segments[0], JSONPathRecursiveDescentSegment):
            continue
        for selector in path.segments[0].selectors:
            if isinstance(selector, IndexSelector | SliceSelector):
                return f"applies an index to $, which is an object, at column {selector.token.index + 1}"
            if isinstance(selector, NameSelector) and selector.name not in FIELDS:
                return f"{unknown_field(selector.name)} (column {selector.token.index + 1})"
    for call in (e for e in expressions if isinstance(e, FunctionExtension) and e.name in ("match", "search")):
        value, pattern = call.args
        if isinstance(value, RootFilterQuery):
            return f"calls {call.name}() on $; call it on @, the value being filtered"
        try:
            if not isinstance(pattern, StringLiteral):
                raise ValueError(f"{pattern} is not text in quotes")
            compile_pattern(pattern.value)
        except ValueError as exc:
            return f"calls {call.name}() with an invalid RE2 pattern: {exc}"
    return None


def _finder(compiled: jsonpath.JSONPath, price: int) -> Find:
    """A path that may find several values; each visited value is charged."""
    patterns = {text: compile_pattern(text) for text in _patterns(compiled)}

    def find(envelope: dict[str, Any], work_left: WorkLeft) -> list[Any]:
        matches: Iterable[jsonpath.JSONPathMatch] = [_Visit.of(envelope, work_left, price)]
        for segment in compiled.segments:
            matches = segment.resolve(matches)
        nodes: list[Any] = []
        asked = _asked.set((work_left, patterns))
        try:
            for match in matches:
                nodes.append(match.obj)
                if len(nodes) > MAX_NODES:
                    break
        except (jsonpath.JSONPathError, RecursionError):
            return []
        finally:
            _asked.reset(asked)
        return nodes

    return find


class _Visit(jsonpath.JSONPathMatch):
    """A value that a path visits, charged by its size."""

    __slots__ = ()

    def __init__(self, *, filter_context: Any, obj: object, **rest: Any) -> None:
        super().__init__(filter_context=filter_context, obj=obj, **rest)
        size = len(obj) if isinstance(obj, dict | list) else len(obj) // 64 if isinstance(obj, str) else 0
        filter_context["work_left"].pay((1 + size) * filter_context["price"])

    @classmethod
    def of(cls, root: dict[str, Any], work_left: WorkLeft, price: int) -> _Visit:
        paying = {"work_left": work_left, "price": price}
        return cls(filter_context=paying, obj=root, parent=None, path="$", parts=(), root=root)


class _RegexFunction(FilterFunction):
    """`match` and `search` in a filter."""

    arg_types = [ExpressionType.VALUE, ExpressionType.VALUE]  # noqa: RUF012 - as the library declares it
    return_type = ExpressionType.LOGICAL

    def __init__(self, how: Callable[[Pattern, str, WorkLeft], bool]) -> None:
        self._how = how

    def __call__(self, value: object, pattern: str) -> bool:
        work_left, patterns = _asked.get()
        return isinstance(value, str) and self._how(patterns[pattern], value, work_left)


class _Environment(jsonpath.JSONPathEnvironment):
    def setup_function_extensions(self) -> None:
        super().setup_function_extensions()
        self.function_extensions["match"] = _RegexFunction(Pattern.is_whole)
        self.function_extensions["search"] = _RegexFunction(Pattern.is_in)

    def compare(self, left: object, operator: str, right: object) -> bool:
        if type(left) in (dict, list) and type(right) in (dict, list):
            raise Unanswerable("compares arrays or objects in a filter, which only operators support")
        if isinstance(left, str) and isinstance(right, str) and min(len(left), len(right)) > MAX_FILTER_TEXT:
            raise Unanswerable(f"compares texts of more than {MAX_FILTER_TEXT} characters in a filter")
        return super().compare(left, operator, right)


_environment = _Environment(strict=True)


def _expressions(compiled: jsonpath.JSONPath) -> Iterator[Any]:
    """All expressions inside a path's filters."""
    waiting: list[Any] = [s.expression for g in compiled.segments for s in g.selectors if isinstance(s, Filter)]
    while waiting:
        expression = waiting.pop()
        yield expression
        waiting += expression.children()


def _patterns(compiled: jsonpath.JSONPath) -> Iterator[str]:
    for call in _expressions(compiled):
        if isinstance(call, FunctionExtension) and call.name in ("match", "search"):
            pattern = call.args[1]
            assert isinstance(pattern, StringLiteral), "checked before"
            yield pattern.value


def _walker(compiled: jsonpath.JSONPath) -> Find:
    """The common case, a path of names and indexes only, as lookups in dictionaries and lists."""
    selectors: list[Any] = [segment.selectors[0] for segment in compiled.segments]
    keys = [s.name if isinstance(s, NameSelector) else s.index for s in selectors]

    def find(envelope: dict[str, Any], _: WorkLeft) -> list[Any]:
        node: Any = envelope
        for key in keys:
            if isinstance(key, str):
                if not isinstance(node, dict) or key not in node:
                    return []
            elif not isinstance(node, list) or not -len(node) <= key < len(node):
                return []
            node = node[key]
        return [node]

    return find
