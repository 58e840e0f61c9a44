"""Predicates: a JSONPath into the event, an operator, an operand. Evaluation is total: it never raises.

A path that finds nothing, or a value of another type than the operator asks for, makes the predicate false.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from operator import ge, gt, le, lt
from typing import Any, Literal, get_args

import jsonpath
import msgspec
import re2
from jsonpath.filter import FilterQuery, FunctionExtension, RootFilterQuery, StringLiteral
from jsonpath.function_extensions import ExpressionType, FilterFunction
from jsonpath.segments import JSONPathRecursiveDescentSegment
from jsonpath.selectors import Filter, IndexSelector, NameSelector, SliceSelector

from tidegate.errors import FieldError
from tidegate.model.event import Event

Operator = Literal["exists", "equals", "not_equals", "in", "not_in", "gt", "gte", "lt", "lte", "contains", "regex"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
MAX_PATH_LENGTH = 500
MAX_PATTERN_LENGTH = 512
MAX_VALUES = 1000
# How many values the arrays and objects among a predicate's operands may hold in all.
MAX_MEMBERS = 100
MAX_NODES = 1000
# How many values of the event a path may pass; a long path, or one with filters, does more with each and passes fewer.
MAX_VISITS = 50_000
MAX_WORK = 1_000_000
# In a filter, longer texts are not compared: the same one could be, for each member of a long array.
MAX_FILTER_TEXT = 1024

# The event's own fields; what lies below `payload` and `metadata` is the producer's.
FIELDS = tuple(name for name in Event.__struct_fields__ if name not in ("traceparent", "replayed_at"))

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
        except _TooMuch as exc:
            return f"{p.path} {exc}"
        if not found:
            return f"{p.path} is not in the event"
        if self._all and len(found) > MAX_NODES:
            return f"{p.path} finds more than {MAX_NODES} values"
        if (all if self._all else any)(map(self._test, found)):
            return None
        operand = p.values if p.operator in ("in", "not_in") else p.value
        return f"{p.path} {p.operator} {_short(operand)} does not hold for {_short(found[0])}"


def compile_predicate(predicate: Predicate, field: str, errors: list[FieldError]) -> CompiledPredicate | None:
    """The predicate ready to run, or None with what is wrong added to `errors`."""
    find = test = None
    try:
        find = _compile_path(predicate.path)
    except _Wrong as exc:
        errors.append(FieldError(f"{field}.path", str(exc)))
    try:
        test = _compile_test(predicate)
    except _Wrong as exc:
        errors.append(FieldError(f"{field}.{exc.part}", str(exc)))
    return CompiledPredicate(predicate, find, test) if find and test else None


class _Wrong(Exception):
    """A part of a predicate is wrong; the text says how."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


def unknown_field(name: object) -> str:
    """The message about a first-level name that no event has."""
    return f"names `{name}`, which no event has; the fields of an event are {', '.join(FIELDS)}"


def _compile_path(path: str) -> Find:
    if not 0 < len(path) <= MAX_PATH_LENGTH:
        raise _Wrong("path", f"must be a JSONPath of 1 to {MAX_PATH_LENGTH} characters")
    if not path.startswith("$"):
        raise _Wrong("path", "must begin with $, which is the event, for example $.payload.amount")
    try:
        compiled = _environment.compile(path)
    except (jsonpath.JSONPathError, RecursionError, ValueError) as exc:
        token = getattr(exc, "token", None)
        place = "" if token is None else f" at column {(token.index if token.index >= 0 else len(path)) + 1}"
        raise _Wrong("path", f"is not a JSONPath (RFC 9535): {exc.args[0] if exc.args else path}{place}") from exc
    if not isinstance(compiled, jsonpath.JSONPath):
        raise _Wrong("path", "must be one JSONPath")
    if mistake := _mistake(compiled):
        raise _Wrong("path", mistake)
    named = sum(isinstance(e, FilterQuery) for e in _expressions(compiled))
    visits = min(MAX_VISITS, MAX_WORK // len(path)) // (1 + 10 * named)
    return _walker(compiled) if compiled.singular_query() else _finder(compiled, visits)


def _mistake(compiled: jsonpath.JSONPath) -> str | None:
    """What is wrong with a path that is JSONPath, if anything."""
    expressions = list(_expressions(compiled))
    queries = [e for e in expressions if isinstance(e, FilterQuery)]
    if any(not query.path.singular_query() for query in queries):
        return "has a filter that looks at several values; there, name a single one"
    for path in (compiled, *(query.path for query in queries if isinstance(query, RootFilterQuery))):
        if not path.segments or isinstance(path.segments[0], JSONPathRecursiveDescentSegment):
            continue
        for selector in path.segments[0].selectors:
            if isinstance(selector, IndexSelector | SliceSelector):
                return f"takes an index of $, which is an object, at column {selector.token.index + 1}"
            if isinstance(selector, NameSelector) and selector.name not in FIELDS:
                return f"{unknown_field(selector.name)} (column {selector.token.index + 1})"
    for call in (e for e in expressions if isinstance(e, FunctionExtension) and e.name in ("match", "search")):
        value, pattern = call.args
        if isinstance(value, RootFilterQuery):
            return f"asks {call.name}() of $; ask it of @, the value that is looked at"
        try:
            if not isinstance(pattern, StringLiteral):
                raise ValueError(f"{pattern} is not text in quotes")
            compile_re2(pattern.value)
        except ValueError as exc:
            return f"has a {call.name}() without an RE2 pattern: {exc}"
    return None


def _finder(compiled: jsonpath.JSONPath, visits: int) -> Find:
    """A path that may find several values, with an allowance of values to pass."""

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
    """A path asks for more work than a predicate may; the text says which."""


class _Visit(jsonpath.JSONPathMatch):
    """A value that a path passes. It pays for its size out of the allowance that all of them share."""

    __slots__ = ()

    def __init__(self, *, filter_context: Any, obj: object, **rest: Any) -> None:
        super().__init__(filter_context=filter_context, obj=obj, **rest)
        size = len(obj) if isinstance(obj, dict | list) else len(obj) // 64 if isinstance(obj, str) else 0
        filter_context["left"] -= 1 + size
        if filter_context["left"] < 0:
            raise _TooMuch("passes more values of the event than a predicate may")

    @classmethod
    def of(cls, root: dict[str, Any], visits: int) -> _Visit:
        return cls(filter_context={"left": visits}, obj=root, parent=None, path="$", parts=(), root=root)


class _RegexFunction(FilterFunction):
    """`match` and `search` in a filter, by RE2: a pattern takes time in proportion to the text, whatever it is."""

    arg_types = [ExpressionType.VALUE, ExpressionType.VALUE]  # noqa: RUF012 - as the library declares it
    return_type = ExpressionType.LOGICAL

    def __init__(self, how: Literal["fullmatch", "search"]) -> None:
        self._how = how

    def __call__(self, value: object, pattern: str) -> bool:
        # The pattern is text that was compiled on save.
        return isinstance(value, str) and getattr(compile_re2(pattern), self._how)(value) is not None


@lru_cache(maxsize=256)
def compile_re2(pattern: str, *, case_sensitive: bool = True) -> Any:
    """The pattern ready to run. Raises ValueError, which names the wrong piece."""
    options = re2.Options()
    options.case_sensitive, options.log_errors, options.max_mem = case_sensitive, False, 1 << 20
    try:
        if len(pattern) > MAX_PATTERN_LENGTH + len("(?ms)"):
            raise ValueError(f"it is longer than {MAX_PATTERN_LENGTH} characters")
        return re2.compile(pattern, options)
    except re2.error as exc:
        raise ValueError(exc.args[0].decode() if isinstance(exc.args[0], bytes) else str(exc)) from exc


class _Environment(jsonpath.JSONPathEnvironment):
    def setup_function_extensions(self) -> None:
        super().setup_function_extensions()
        self.function_extensions["match"] = _RegexFunction("fullmatch")
        self.function_extensions["search"] = _RegexFunction("search")

    def compare(self, left: object, operator: str, right: object) -> bool:
        if type(left) in (dict, list) and type(right) in (dict, list):
            raise _TooMuch("compares arrays or objects in a filter, which only the operators do")
        if isinstance(left, str) and isinstance(right, str) and min(len(left), len(right)) > MAX_FILTER_TEXT:
            raise _TooMuch(f"compares texts of more than {MAX_FILTER_TEXT} characters in a filter")
        return super().compare(left, operator, right)


_environment = _Environment(strict=True)


def _expressions(compiled: jsonpath.JSONPath) -> Iterator[Any]:
    """Everything inside a path's filters."""
    waiting: list[Any] = [s.expression for g in compiled.segments for s in g.selectors if isinstance(s, Filter)]
    while waiting:
        expression = waiting.pop()
        yield expression
        waiting += expression.children()


def _walker(compiled: jsonpath.JSONPath) -> Find:
    """A path of plain names and indexes, the usual kind, as a walk over dictionaries and lists."""
    selectors: list[Any] = [segment.selectors[0] for segment in compiled.segments]
    keys = [s.name if isinstance(s, NameSelector) else s.index for s in selectors]

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


def _compile_test(p: Predicate) -> Test:
    if p.flags and p.operator != "regex":
        raise _Wrong("flags", f"{p.operator} takes no flags, only regex does")
    if p.operator == "exists":
        if p.values is not None or (p.value is not None and p.value is not True):
            raise _Wrong("value", "exists takes no value; for the opposite write where: !has(...)")
        return lambda _: True
    many, fold, negated = p.operator in ("in", "not_in"), not p.case_sensitive, p.operator in ("not_in", "not_equals")
    if many and p.value is not None:
        raise _Wrong("value", f"{p.operator} takes `values`, a list, not `value`")
    if many and not (p.values and len(p.values) <= MAX_VALUES):
        raise _Wrong("values", f"{p.operator} takes a list of 1 to {MAX_VALUES} values")
    if not many and p.values is not None:
        raise _Wrong("values", f"{p.operator} takes `value`, not `values`")
    operands = [p.value] if p.values is None else p.values
    if _members(operands) > MAX_MEMBERS:
        raise _Wrong("values" if many else "value", f"has arrays or objects of more than {MAX_MEMBERS} values in all")
    if p.operator == "regex":
        return _regex(p)
    if p.operator in _COMPARE:
        return _comparison(p)
    return _contains(p.value, fold) if p.operator == "contains" else _one_of(operands, fold, negated)


def _one_of(wanted: list[Any], fold: bool, negated: bool) -> Test:
    # Looked up, so that a thousand cost no more than one.
    plain = {_plain(w, fold) for w in wanted if not isinstance(w, list | dict)}
    nested = [w for w in wanted if isinstance(w, list | dict)]

    def test(value: Any) -> bool:
        if isinstance(value, list | dict):
            return any(_same(value, w, fold) for w in nested) is not negated
        return (_plain(value, fold) in plain) is not negated

    return test


def _members(values: list[Any]) -> int:
    """How many values the arrays and objects among `values` hold."""
    waiting, count = list(values), -len(values)
    while waiting and count <= MAX_MEMBERS:
        value = waiting.pop()
        count += 1
        waiting += value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return count


def _plain(value: Any, fold: bool) -> tuple[str, Any]:
    """A key under which equal values meet: 7 and 7.0, but not 1 and true."""
    if isinstance(value, str):
        return "text", value.casefold() if fold else value
    return "bool" if isinstance(value, bool) else "other", value


def _regex(p: Predicate) -> Test:
    if not isinstance(p.value, str) or not 0 < len(p.value) <= MAX_PATTERN_LENGTH:
        raise _Wrong("value", f"regex takes a pattern of 1 to {MAX_PATTERN_LENGTH} characters")
    if set(p.flags) - set("ims"):
        raise _Wrong("flags", "may hold i, m and s")
    inline = "".join(flag for flag in "ms" if flag in p.flags)
    try:
        text = f"(?{inline}){p.value}" if inline else p.value
        pattern = compile_re2(text, case_sensitive=p.case_sensitive and "i" not in p.flags)
    except ValueError as exc:
        raise _Wrong("value", f"is not an RE2 pattern: {exc}") from exc
    return lambda v: isinstance(v, str) and pattern.search(v) is not None


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"gt": gt, "gte": ge, "lt": lt, "lte": le}


def _comparison(p: Predicate) -> Test:
    number = _number(p.value)
    if number is None and not isinstance(p.value, str):
        raise _Wrong("value", f"{p.operator} takes a number or text")
    holds, text, fold = _COMPARE[p.operator], p.value, not p.case_sensitive

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
    if isinstance(value, str) and 0 < len(value) <= 64 and value.isascii():
        try:
            parsed = float(value) if any(c in value for c in ".eE") else int(value)
        except ValueError:
            return None
        return parsed if value.strip() == value and "_" not in value and not math.isnan(parsed) else None
    return None


def _same(a: Any, b: Any, fold: bool) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, fold) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k], fold) for k in a)
    return not isinstance(a, list | dict) and not isinstance(b, list | dict) and _plain(a, fold) == _plain(b, fold)


def _contains(wanted: Any, fold: bool) -> Test:
    text = wanted.casefold() if fold and isinstance(wanted, str) else wanted
    same = _one_of([wanted], fold, negated=False)

    def test(value: Any) -> bool:
        if isinstance(value, list):
            return any(map(same, value))
        if isinstance(value, str) and isinstance(wanted, str):
            return text in (value.casefold() if fold else value)
        return isinstance(value, dict) and isinstance(wanted, str) and wanted in value

    return test


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 80 else f"{text[:77]}..."
