"""`where`: a CEL expression over `event`. It must be true or false; if it fails on an event, it is false.

The library neither checks names nor bounds the work, and copies a variable each time it is read. So the expression is
analyzed here too: names are checked, each path into the event becomes a variable that contains only the value at that
path, and the work on an event is computed before it is done.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tidegate.errors import FieldError
from tidegate.model.cel_library import cel
from tidegate.model.cel_reader import CONVERSIONS, RUN, WORDS, List, Mistake, Read, Reader
from tidegate.model.pattern import Pattern
from tidegate.model.type_errors import mismatch, type_of
from tidegate.model.work_limit import MAX_STEPS, TooMuchWork, WorkLeft

MAX_LENGTH = 2000
_CONVERSION_STEPS = 15  # for each value that is passed to the library


class CompiledExpression:
    """`reason` returns None if the expression is true, else why it is not; or raises TooMuchWork."""

    __slots__ = ("_conversions", "_names", "_program", "_reader", "field", "source")

    def __init__(self, source: str, field: str, reader: Reader) -> None:
        self.source = source
        self.field = field
        self._reader = reader
        self._conversions = {
            f"{reader.prefix}{name}": convert for name, convert in CONVERSIONS.items() if name in reader.conversions
        }
        self._names = [f"{reader.prefix}{i}" for i in range(len(reader.reads))]
        text = source
        for start, end, name in sorted(reader.rewritten, reverse=True):
            text = text[:start] + name + text[end:]
        self._program = cel.compile(text)

    def reason(self, envelope: dict[str, Any], work_left: WorkLeft | None = None) -> str | None:
        result, error = self.value(envelope, work_left)
        if error is not None:
            return f"where: {error}"
        if result is True:
            return None
        shown = self.source if len(self.source) <= 200 else f"{self.source[:199]}…"
        return f"where is false: {shown}" if result is False else f"where is neither true nor false: {shown}"

    def value(self, envelope: dict[str, object], work_left: WorkLeft | None = None) -> tuple[object, str | None]:
        """The value of the expression for an event, or why it has none; or raises TooMuchWork."""
        work_left = work_left or WorkLeft()
        found = dict(_find(self._reader.reads, envelope))
        work_left.pay(_work(self._reader, found))
        variables = {self._names[number]: value for number, value in found.items()}
        functions: dict[str, Callable[..., Any]] = self._conversions  # passing each of them takes time
        if self._reader.patterns:
            functions = functions | {f"{self._reader.prefix}matches": _Matches(self._reader.patterns, work_left)}
        try:
            context = cel.Context(variables=variables, functions=functions)
            result = self._program.execute(context)
        except KeyError as exc:
            return None, f"{exc.args[0]} is not in the event"
        except Exception as exc:  # a division by zero, an index out of range, … on this event
            if work_left.left < 0:
                raise TooMuchWork(self.field) from exc
            return None, self._told(exc, found)
        if work_left.left < 0:
            raise TooMuchWork(self.field)
        return result, None

    def _told(self, exc: Exception, found: Mapping[int, object]) -> str:
        text = (str(exc).splitlines() or [type(exc).__name__])[0]
        unknown = re.match(r"Undefined variable or function: '(\w+)'", text)
        if unknown is None:
            is_of_types = text.startswith(("No such overload", "Unsupported operation"))
            wrong = mismatch(self._reader, self.source, found) if is_of_types else None
            return wrong or f"{text.split('. ')[0][:200]}{self._types(found) if is_of_types else ''}"
        if unknown[1] not in self._names:
            return f"{unknown[1]}() does not accept such a value{self._types(found)}"
        path = self._reader.reads[self._names.index(unknown[1])].path
        if path[:1] == (RUN,):
            return f"{'.'.join(path)[:200]} is not in the run"
        return f"{'.'.join(('event', *path))[:200]} is not in the event"

    def _types(self, found: Mapping[int, object]) -> str:
        """The fields that were read, and the type of each."""
        told = [f"{'.'.join(('event', *self._reader.reads[n].path))} is {type_of(v)}" for n, v in found.items()]
        return f" ({', '.join(told)[:200]})" if told else ""


def _syntax_error(text: str) -> str:
    """The parser's message without the list of all tokens that it would have accepted."""
    text = text.partition(" expecting ")[0][:200]
    return "the expression ends too early" if "'<EOF>'" in text else text


def compile_expression(
    source: str, field: str, errors: list[FieldError], roots: tuple[str, ...] = ("event",)
) -> CompiledExpression | None:
    """The compiled expression, or None; then `errors` says what is invalid. `roots` are what it may read; a `run` is
    given with the event, in `envelope["run"]`."""
    if not 0 < len(source) <= MAX_LENGTH:
        errors.append(FieldError(field, f"must be a CEL expression of 1 to {MAX_LENGTH} characters"))
        return None
    try:
        program = cel.compile(source)
    except ValueError as exc:
        place = re.search(r"<input>:(\d+):(\d+): (.*)", str(exc))
        message = (
            f"{_syntax_error(place[3])} at line {place[1]}, column {place[2]}"
            if place
            else str(exc).splitlines()[0][-200:]
        )
        errors.append(FieldError(field, f"is not a CEL expression: {message}"))
        return None
    try:
        reader = Reader(source, roots)
        if "event" not in reader.names:
            raise Mistake("does not use `event`; write for example event.payload.amount > 100", 0)
        if not set(program.variables()) <= reader.names | WORDS:
            raise Mistake("cannot be understood", 0)
        if _work(reader, {}) > MAX_STEPS:
            raise Mistake("takes more steps than the work limit of an event allows, for every event", 0)
        return CompiledExpression(source, field, reader)
    except Mistake as exc:
        line, column = source.count("\n", 0, exc.index) + 1, exc.index - source.rfind("\n", 0, exc.index)
        errors.append(FieldError(field, f"{exc} (line {line}, column {column})"))
        return None


def _find(reads: list[Read], envelope: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """The values of the paths that exist in the event, by number."""
    for number, (path, key) in enumerate(reads):
        node: Any = envelope
        for name in path:
            if not isinstance(node, dict) or name not in node:
                break
            node = node[name]
        else:
            if key is None:
                yield number, node
            elif isinstance(node, dict):
                yield number, {key: True} if key in node else {}


def _work(reader: Reader, found: dict[int, Any]) -> int:
    """An upper bound of the steps that the expression takes on these values."""
    weights = {number: _measure(value)[0] for number, value in found.items()}
    total = sum(weights.values()) * _CONVERSION_STEPS
    if total > MAX_STEPS:
        return total
    repeated, lists = {-1: 1}, dict[int, tuple[int, int, int]]()
    for number, (parent, over, copies) in enumerate(reader.loops):
        lists[number] = length, _, _ = _list(over, found, lists)
        repeated[number] = repeated[parent] * length * (length if copies else 1)
    total += sum(steps * repeated[loop] for loop, steps in reader.steps.items())
    # `+` copies both sides, so a chain of them copies the first operand many times.
    sums = 1 + sum(token.text == "+" for token in reader.tokens)
    total += sum(weights.get(number, 0) * repeated[loop] * sums for loop, number in reader.read_in)
    return total + sum(lists[named][1] * repeated[loop] * sums for loop, named in reader.named_in)


def _list(over: List, found: dict[int, Any], lists: dict[int, tuple[int, int, int]]) -> tuple[int, int, int]:
    """The maximum number of items, the size of the largest one, and the length of the longest list in an item."""
    kind, number = over
    if kind == "literal":
        return number, number, number
    value = found.get(number)
    if kind != "read" or not isinstance(value, dict | list):
        weight, longest = lists[number][1:] if kind == "member" else _measure(value)
        return longest, weight, longest
    measures = [_measure(member) for member in value] or [(0, 0)]  # an object is iterated by its keys
    return len(value), max(weight for weight, _ in measures), max(longest for _, longest in measures)


def _measure(value: object) -> tuple[int, int]:
    """The number of values in it (a long text counts as several), and the length of the longest list or object."""
    weight, longest, waiting = 0, 0, [value]
    while waiting and weight * _CONVERSION_STEPS <= MAX_STEPS:
        node = waiting.pop()
        weight += 1
        if isinstance(node, str):
            weight += len(node) // 64
        elif isinstance(node, dict | list):
            longest = max(longest, len(node))
            waiting += node.values() if isinstance(node, dict) else node
    return weight, longest


class _Matches:
    """`matches()` for one evaluation. A search that would exceed the work limit is not done."""

    __slots__ = ("_patterns", "_work_left")

    def __init__(self, patterns: dict[str, Pattern], work_left: WorkLeft) -> None:
        self._patterns = patterns
        self._work_left = work_left

    def __call__(self, text: object, pattern: str) -> bool | None:
        # The library would log an exception; null makes the expression fail too.
        if not isinstance(text, str) or self._work_left.left < 0:
            return None
        try:
            return self._patterns[pattern].is_in(text, self._work_left)
        except TooMuchWork:
            return None
