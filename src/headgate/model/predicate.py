"""Predicates: a JSONPath into the event, an operator, an operand. Evaluation is total: it never raises.

A path that finds nothing, or a value of another type than the operator asks for, makes the predicate false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Literal, get_args

import jsonpath
import msgspec
import re2
from jsonpath.filter import FilterQuery
from jsonpath.function_extensions import ExpressionType, FilterFunction
from jsonpath.selectors import Filter, IndexSelector, NameSelector

from headgate.errors import FieldError

Operator = Literal["exists", "equals", "not_equals", "in", "not_in", "gt", "gte", "lt", "lte", "contains", "regex"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
MAX_PATH_LENGTH = 500
MAX_PATTERN_LENGTH = 512
MAX_VALUES = 1000
MAX_NODES = 1000
# How many values of the event a path may pass; a long path, which does more with each, fewer.
MAX_VISITS = 50_000
MAX_WORK = 4_000_000

Find = Callable[[dict[str, Any]], list[Any]]
Test = Callable[[Any], bool]


class Predicate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """As it is written and stored."""

    path: str
    operator: Operator
    value: Any = None
    values: list[Any] | None = None
    case_sensitive: bool = False
    flags: str = ""


class CompiledPredicate:
    """A predicate ready to run: `reason(envelope)` is None when it holds, else why it does not."""

    __slots__ = ("_all", "_find", "_test", "predicate")

    def __init__(self, predicate: Predicate, find: Find, test: Test) -> None:
        self.predicate = predicate
        self._find = find
        self._test = test
        # A negation over several values holds only when it holds for each of them.
        self._all = predicate.operator in ("not_equals", "not_in")

    def reason(self, envelope: dict[str, Any]) -> str | None:
        p = self.predicate
        try:
            found = self._find(envelope)
        except _TooMuch:
            return f"{p.path} passes more values of the event than a predicate may"
        if not found:
            return f"{p.path} is not in the event"
        if self._all and len(found) > MAX_NODES:
            return f"{p.path} finds more than {MAX_NODES} values"
        holds = all(map(self._test, found)) if self._all else any(map(self._test, found))
        if holds:
            return None
        operand = p.values if p.operator in ("in", "not_in") else p.value
        return f"{p.path} {p.operator} {_short(operand)} does not hold for {_short(found[0])}"


def compile_predicate(predicate: Predicate, field: str, errors: list[FieldError]) -> CompiledPredicate | None:
    """The predicate ready to run, or None with what is wrong added to `errors`."""
    found = len(errors)
    find = _compile_path(predicate.path, f"{field}.path", errors)
    test = _compile_test(predicate, field, errors)
    if len(errors) > found or find is None or test is None:
        return None
    return CompiledPredicate(predicate, find, test)


def _compile_path(path: str, field: str, errors: list[FieldError]) -> Find | None:
    if not 0 < len(path) <= MAX_PATH_LENGTH:
        errors.append(FieldError(field, f"must be a JSONPath of 1 to {MAX_PATH_LENGTH} characters"))
        return None
    try:
        compiled = _environment.compile(path)
    except (jsonpath.JSONPathError, RecursionError, ValueError) as exc:
        errors.append(FieldError(field, f"is not a JSONPath (RFC 9535): {exc.args[0] if exc.args else path}"))
        return None
    if not isinstance(compiled, jsonpath.JSONPath):
        errors.append(FieldError(field, "must be one JSONPath"))
        return None
    if compiled.singular_query():
        return _walker(compiled)
    if any(not query.path.singular_query() for query in _queries(compiled)):
        errors.append(FieldError(field, "has a filter that looks at several values; there, name a single one"))
        return None
    visits = min(MAX_VISITS, MAX_WORK // len(path))

    def find(envelope: dict[str, Any]) -> list[Any]:
        matches: Iterable[jsonpath.JSONPathMatch] = [_Visit.of(envelope, visits)]
        for segment in compiled.segments:
            matches = segment.resolve(matches)
        nodes: list[Any] = []
        try:
            for match in matches:
                nodes.append(match.obj)
                if len(nodes) > MAX_NODES:
                    break
        except (jsonpath.JSONPathError, RecursionError):
            return []
        return nodes

    return find


class _TooMuch(Exception):
    """A path passes more values than it may."""


class _Visit(jsonpath.JSONPathMatch):
    """A value that a path passes. It pays for itself and its members out of the allowance that all of them share."""

    __slots__ = ()

    def __init__(self, *, filter_context: Any, obj: object, **rest: Any) -> None:
        super().__init__(filter_context=filter_context, obj=obj, **rest)
        filter_context["left"] -= 1 + (len(obj) if isinstance(obj, dict | list) else 0)
        if filter_context["left"] < 0:
            raise _TooMuch

    @classmethod
    def of(cls, root: dict[str, Any], visits: int) -> _Visit:
        return cls(filter_context={"left": visits}, obj=root, parent=None, path="$", parts=(), root=root)


class _RegexFunction(FilterFunction):
    """`match` and `search` in a filter, by RE2: a pattern takes time in proportion to the text, whatever it is."""

    arg_types = [ExpressionType.VALUE, ExpressionType.VALUE]  # noqa: RUF012 - as the library declares it
    return_type = ExpressionType.LOGICAL

    def __init__(self, how: Literal["fullmatch", "search"]) -> None:
        self._how = how

    def __call__(self, value: object, pattern: object) -> bool:
        if not isinstance(value, str) or not isinstance(pattern, str) or len(pattern) > MAX_PATTERN_LENGTH:
            return False
        compiled = _filter_pattern(pattern)
        return compiled is not None and getattr(compiled, self._how)(value) is not None


@lru_cache(maxsize=256)
def _filter_pattern(pattern: str) -> Any:
    try:
        return re2.compile(pattern, _options(case_sensitive=True))
    except re2.error:  # RFC 9535: what is no pattern matches nothing
        return None


class _Environment(jsonpath.JSONPathEnvironment):
    def setup_function_extensions(self) -> None:
        super().setup_function_extensions()
        self.function_extensions["match"] = _RegexFunction("fullmatch")
        self.function_extensions["search"] = _RegexFunction("search")


_environment = _Environment(strict=True)


def _queries(compiled: jsonpath.JSONPath) -> Iterator[FilterQuery]:
    """The paths inside a path's filters."""
    waiting: list[Any] = [s.expression for g in compiled.segments for s in g.selectors if isinstance(s, Filter)]
    while waiting:
        expression = waiting.pop()
        if isinstance(expression, FilterQuery):
            yield expression
        waiting += expression.children()


def _walker(compiled: jsonpath.JSONPath) -> Find:
    """A path of plain names and indexes, the usual kind, as a walk over dictionaries and lists."""
    keys: list[str | int] = []
    for segment in compiled.segments:
        selector = segment.selectors[0]
        if isinstance(selector, NameSelector):
            keys.append(selector.name)
        elif isinstance(selector, IndexSelector):
            keys.append(selector.index)

    def find(envelope: dict[str, Any]) -> list[Any]:
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


def _compile_test(p: Predicate, field: str, errors: list[FieldError]) -> Test | None:
    fold = not p.case_sensitive
    if p.operator == "exists":
        return _exists(p, field, errors)
    if p.operator in ("in", "not_in"):
        if p.values is None or not 0 < len(p.values) <= MAX_VALUES:
            errors.append(FieldError(f"{field}.values", f"{p.operator} takes a list of 1 to {MAX_VALUES} values"))
            return None
        wanted = p.values
        if p.operator == "in":
            return lambda v: any(_same(v, w, fold) for w in wanted)
        return lambda v: not any(_same(v, w, fold) for w in wanted)
    if p.values is not None:
        errors.append(FieldError(f"{field}.values", f"{p.operator} takes `value`, not `values`"))
        return None
    if p.operator == "equals":
        return lambda v: _same(v, p.value, fold)
    if p.operator == "not_equals":
        return lambda v: not _same(v, p.value, fold)
    if p.operator == "contains":
        return lambda v: _contains(v, p.value, fold)
    if p.operator == "regex":
        return _regex(p, field, errors)
    return _comparison(p, field, errors)


def _exists(p: Predicate, field: str, errors: list[FieldError]) -> Test | None:
    if p.values is not None or p.value not in (None, True):
        errors.append(FieldError(f"{field}.value", "exists takes no value"))
        return None
    return lambda _: True


def _regex(p: Predicate, field: str, errors: list[FieldError]) -> Test | None:
    if not isinstance(p.value, str) or not 0 < len(p.value) <= MAX_PATTERN_LENGTH:
        errors.append(FieldError(f"{field}.value", f"regex takes a pattern of 1 to {MAX_PATTERN_LENGTH} characters"))
        return None
    if set(p.flags) - set("ims"):
        errors.append(FieldError(f"{field}.flags", "may hold i, m and s"))
        return None
    options = _options(case_sensitive=p.case_sensitive and "i" not in p.flags)
    inline = "".join(flag for flag in "ms" if flag in p.flags)
    try:
        pattern = re2.compile(f"(?{inline}){p.value}" if inline else p.value, options)
    except re2.error as exc:
        text = exc.args[0].decode() if isinstance(exc.args[0], bytes) else exc.args[0]
        errors.append(FieldError(f"{field}.value", f"is not an RE2 pattern: {text}"))
        return None
    return lambda v: isinstance(v, str) and pattern.search(v) is not None


def _options(*, case_sensitive: bool) -> Any:
    options = re2.Options()
    options.case_sensitive = case_sensitive
    options.log_errors = False
    options.max_mem = 1 << 20
    return options


def _comparison(p: Predicate, field: str, errors: list[FieldError]) -> Test | None:
    number = _number(p.value)
    if number is None and not isinstance(p.value, str):
        errors.append(FieldError(f"{field}.value", f"{p.operator} takes a number or text"))
        return None
    compare: dict[str, Callable[[Any, Any], bool]] = {
        "gt": lambda a, b: a > b,
        "gte": lambda a, b: a >= b,
        "lt": lambda a, b: a < b,
        "lte": lambda a, b: a <= b,
    }
    holds, text, fold = compare[p.operator], p.value, not p.case_sensitive

    def test(value: Any) -> bool:
        mine = _number(value)
        if number is not None:
            return mine is not None and holds(mine, number)
        # Both are text that is no number (RFC 3339 times in UTC order as text does).
        if mine is not None or not isinstance(value, str):
            return False
        return holds(value.casefold(), text.casefold()) if fold else holds(value, text)

    return test


def _number(value: Any) -> int | float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, str) and 0 < len(value) <= 64:
        try:
            parsed = float(value) if any(c in value for c in ".eE") else int(value)
        except ValueError:
            return None
        return parsed if value.strip() == value and "_" not in value and not math.isnan(parsed) else None
    return None


def _same(a: Any, b: Any, fold: bool) -> bool:
    if isinstance(a, str) and isinstance(b, str):
        return a.casefold() == b.casefold() if fold else a == b
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, fold) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k], fold) for k in a)
    return bool(a == b)


def _contains(value: Any, wanted: Any, fold: bool) -> bool:
    if isinstance(value, str):
        if not isinstance(wanted, str):
            return False
        return wanted.casefold() in value.casefold() if fold else wanted in value
    if isinstance(value, list):
        return any(_same(item, wanted, fold) for item in value)
    if isinstance(value, dict):
        return isinstance(wanted, str) and wanted in value
    return False


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 80 else f"{text[:77]}..."
