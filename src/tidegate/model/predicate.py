"""Predicates: a JSONPath into the event, an operator, an operand. Within the work limit, each is either
true or false for every event.

If the path finds nothing, or a value of a type that the operator does not accept, the predicate is false.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import ge, gt, le, lt
from typing import Any, Literal, get_args

import msgspec

from tidegate.errors import FieldError
from tidegate.model.pattern import MAX_PATTERN_LENGTH, compile_pattern
from tidegate.model.trigger_terms import MAX_NODES, Find, Unanswerable, WrongPath
from tidegate.model.work_limit import TooMuchWork, WorkLeft

Operator = Literal["exists", "equals", "not_equals", "in", "not_in", "gt", "gte", "lt", "lte", "contains", "regex"]
OPERATORS: tuple[Operator, ...] = get_args(Operator)
MAX_VALUES = 1000
# Maximum number of values in the arrays and objects among a predicate's operands, in total.
MAX_MEMBERS = 100
# Comparing a text of up to this many characters is not charged to the work limit.
_SHORT_TEXT = 1024

Test = Callable[[object, WorkLeft], bool]


class Predicate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A predicate as users write it and as it is stored."""

    path: str
    operator: Operator
    value: Any = None
    values: list[Any] | None = None
    case_sensitive: bool = False
    flags: str = ""


class CompiledPredicate:
    """A compiled predicate: `reason` returns None if it holds, else why it does not; or raises TooMuchWork."""

    __slots__ = ("_all", "_find", "_test", "field", "predicate")

    def __init__(self, predicate: Predicate, field: str, find: Find, test: Test) -> None:
        self.predicate = predicate
        self.field = field
        self._find = find
        self._test = test
        # A negation over several values holds only if it holds for each of them.
        self._all = predicate.operator in ("not_equals", "not_in")

    def reason(self, envelope: dict[str, Any], work_left: WorkLeft | None = None) -> str | None:
        p = self.predicate
        work_left = work_left or WorkLeft()
        try:
            found = self._find(envelope, work_left)
        except Unanswerable as exc:
            return f"{p.path} {exc}"
        if len(found) == 1:
            holds = self._test(found[0], work_left)
        elif not found:
            return f"{p.path} is not in the event"
        elif self._all:
            holds = len(found) <= MAX_NODES and all(self._test(value, work_left) for value in found)
        else:
            holds = any(self._test(value, work_left) for value in found)
        if holds:
            return None
        if len(found) > MAX_NODES:
            raise TooMuchWork(self.field)  # the result depends on values that were not read
        operand = p.values if p.operator in ("in", "not_in") else p.value
        return f"{p.path} {p.operator} {_short(operand)} does not hold for {_short(found[0])}"


def compile_predicate(predicate: Predicate, field: str, errors: list[FieldError]) -> CompiledPredicate | None:
    """The compiled predicate, or None; then `errors` says what is invalid."""
    from tidegate.model.path import compile_path  # loads JSONPath

    find = test = None
    try:
        find = compile_path(predicate.path)
    except WrongPath as exc:
        errors.append(FieldError(f"{field}.path", str(exc)))
    try:
        test = _compile_test(predicate)
    except _Wrong as exc:
        errors.append(FieldError(f"{field}.{exc.part}", str(exc)))
    return CompiledPredicate(predicate, field, find, test) if find and test else None


class _Wrong(Exception):
    """A part of a predicate is invalid; the text says why."""

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


def _compile_test(p: Predicate) -> Test:
    if p.flags and p.operator != "regex":
        raise _Wrong("flags", f"{p.operator} does not support flags; only regex does")
    if p.operator == "exists":
        if p.values is not None or (p.value is not None and p.value is not True):
            raise _Wrong("value", "exists takes no value; for the opposite use `where` with !has(...)")
        return lambda _, __: True
    many, fold, negated = p.operator in ("in", "not_in"), not p.case_sensitive, p.operator in ("not_in", "not_equals")
    if many and p.value is not None:
        raise _Wrong("value", f"{p.operator} takes `values`, a list, not `value`")
    if many and not (p.values and len(p.values) <= MAX_VALUES):
        raise _Wrong("values", f"{p.operator} takes a list of 1 to {MAX_VALUES} values")
    if not many and p.values is not None:
        raise _Wrong("values", f"{p.operator} takes `value`, not `values`")
    operands = [p.value] if p.values is None else p.values
    if _members(operands) > MAX_MEMBERS:
        raise _Wrong(
            "values" if many else "value", f"has arrays or objects with more than {MAX_MEMBERS} values in total"
        )
    if p.operator == "regex":
        return _regex(p)
    if p.operator in _COMPARE:
        return _comparison(p)
    return _contains(p.value, fold) if p.operator == "contains" else _one_of(operands, fold, negated)


def _one_of(wanted: list[object], fold: bool, negated: bool) -> Test:
    # A set, so that a thousand values cost no more than one.
    plain = {_plain(w, fold) for w in wanted if not isinstance(w, list | dict)}
    nested = [w for w in wanted if isinstance(w, list | dict)]

    def test(value: object, work_left: WorkLeft) -> bool:
        if isinstance(value, list | dict):
            return any(_same(value, w, fold) for w in nested) is not negated
        if isinstance(value, str) and len(value) > _SHORT_TEXT:
            _pay_for(value, work_left)
        return (_plain(value, fold) in plain) is not negated

    return test


def _members(values: list[object]) -> int:
    """The number of values in the arrays and objects among `values`."""
    waiting, count = list(values), -len(values)
    while waiting and count <= MAX_MEMBERS:
        value = waiting.pop()
        count += 1
        waiting += value if isinstance(value, list) else value.values() if isinstance(value, dict) else ()
    return count


def _plain(value: object, fold: bool) -> tuple[str, object]:
    """A key that is equal for equal values: the same for 7 and 7.0, but not for 1 and true."""
    if isinstance(value, str):
        return "text", value.casefold() if fold else value
    return "bool" if isinstance(value, bool) else "other", value


def _regex(p: Predicate) -> Test:
    if not isinstance(p.value, str) or not 0 < len(p.value) <= MAX_PATTERN_LENGTH:
        raise _Wrong("value", f"regex takes a pattern of 1 to {MAX_PATTERN_LENGTH} characters")
    if set(p.flags) - set("ims"):
        raise _Wrong("flags", "may contain only i, m and s")
    inline = "".join(flag for flag in "ms" if flag in p.flags)
    try:
        text = f"(?{inline}){p.value}" if inline else p.value
        pattern = compile_pattern(text, case_sensitive=p.case_sensitive and "i" not in p.flags)
    except ValueError as exc:
        raise _Wrong("value", f"is not an RE2 pattern: {exc}") from exc
    return lambda value, work_left: isinstance(value, str) and pattern.is_in(value, work_left)


_COMPARE: dict[str, Callable[[Any, Any], bool]] = {"gt": gt, "gte": ge, "lt": lt, "lte": le}


def _comparison(p: Predicate) -> Test:
    number = _number(p.value)
    if number is None and not isinstance(p.value, str):
        raise _Wrong("value", f"{p.operator} takes a number or text")
    holds, text, fold = _COMPARE[p.operator], p.value, not p.case_sensitive

    def test(value: object, work_left: WorkLeft) -> bool:
        mine = _number(value)
        if number is not None:
            return mine is not None and holds(mine, number)
        # Compare texts that are not numbers (RFC 3339 times in UTC sort correctly as text).
        if mine is not None or not isinstance(value, str):
            return False
        _pay_for(value, work_left)
        return holds(value.casefold(), text.casefold()) if fold else holds(value, text)

    return test


def _number(value: object) -> int | float | None:
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


def _same(a: object, b: object, fold: bool) -> bool:
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_same(x, y, fold) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k], fold) for k in a)
    return not isinstance(a, list | dict) and not isinstance(b, list | dict) and _plain(a, fold) == _plain(b, fold)


def _contains(wanted: object, fold: bool) -> Test:
    text = "" if not isinstance(wanted, str) else wanted.casefold() if fold else wanted
    same = _one_of([wanted], fold, negated=False)

    def test(value: object, work_left: WorkLeft) -> bool:
        if isinstance(value, list):
            work_left.pay(len(value))
            return any(same(member, work_left) for member in value)
        if isinstance(value, str) and isinstance(wanted, str):
            _pay_for(value, work_left)
            return text in (value.casefold() if fold else value)
        return isinstance(value, dict) and isinstance(wanted, str) and wanted in value

    return test


def _pay_for(text: str, work_left: WorkLeft) -> None:
    """Charge for reading each character of a text, or for copying it with its case folded."""
    work_left.pay(len(text) // 16)


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= 80 else f"{text[:77]}..."
