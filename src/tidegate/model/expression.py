"""`where`: a CEL expression over `event`. It must be true or false; on an event it cannot answer for, it is false.

The library neither checks names nor bounds the work, and copies a variable whole each time it is read. So the text is
read here too: what it names is checked, each path into the event becomes a variable of its own that holds only what
the path finds, and the work on an event is added up before it is done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from tidegate.errors import FieldError
from tidegate.model.cel_library import cel
from tidegate.model.predicate import FIELDS, compile_re2, unknown_field

MAX_LENGTH = 2000
MAX_NESTED_LOOPS = 2
# A step takes a tenth of a microsecond or so.
MAX_STEPS = 300_000
_CONVERSION_STEPS = 15  # for each value that is handed to the library
_CALL_STEPS = 10
_MATCH_STEPS = 80

_TOKEN = re.compile(
    r"""(?P<space>\s+|//[^\n]*)
    |(?P<text>[bB]?[rR][bB]?(?:\"{3}[\s\S]*?\"{3}|'{3}[\s\S]*?'{3}|"[^"\n]*"|'[^'\n]*')
      |[bB]?(?:\"{3}(?:\\[\s\S]|[^\\])*?\"{3}|'{3}(?:\\[\s\S]|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'))
    |(?P<number>0[xX][0-9a-fA-F]+[uU]?|\d+(?:\.\d+)?(?:[eE][+-]?\d+)?[uU]?)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark>[\s\S])""",
    re.ASCII | re.VERBOSE,
)
_LOOPS = {"all": (2,), "exists": (2,), "exists_one": (2,), "existsOne": (2,), "filter": (2,), "map": (2, 3)}
_FUNCTIONS = dict.fromkeys(
    ("size", "int", "uint", "double", "string", "bytes", "type", "dyn", "duration", "timestamp", "has"), (1,)
)
_PARTS = ("FullYear", "Month", "Date", "DayOfMonth", "DayOfWeek", "DayOfYear", "Hours", "Minutes", "Seconds")
_METHODS: dict[str, tuple[int, ...]] = {f"get{part}": (0,) for part in (*_PARTS, "Milliseconds")}
_METHODS |= {"size": (0,), "contains": (1,), "startsWith": (1,), "endsWith": (1,), "matches": (1,), **_LOOPS}
_WORDS = frozenset({"true", "false", "null", "in", "int", "uint", "double", "string", "bytes"})


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class _Read(NamedTuple):
    """A path into the event that the expression reads; with `key`, only whether that key is there (`has`)."""

    path: tuple[str, ...]
    key: str | None


class _List(NamedTuple):
    """What a loop runs over: a read, something inside a read or inside another loop's member, or a literal."""

    kind: str
    number: int


class _Loop(NamedTuple):
    parent: int
    over: _List
    copies: bool  # the library copies the result so far for each member


class _Frame:
    """An open bracket: what it belongs to, and how far in it the reader is."""

    def __init__(self, name: _Token | None, opened: int, inside: int) -> None:
        self.name, self.opened, self.inside = name, opened, inside  # the last is the loop around it
        self.commas = 0
        self.loop = -1
        self.variable = ""
        self.plain = True  # holds literals only


class _Mistake(Exception):
    """The expression is wrong; the text says how, the index where."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class _Reader:
    """One pass over the tokens of an expression that the library has parsed, so that its grammar is right."""

    def __init__(self, source: str) -> None:
        found = (_Token(m.lastgroup or "", m[0], *m.span()) for m in _TOKEN.finditer(source))
        self.tokens = [token for token in found if token.kind != "space"]
        self.reads: list[_Read] = []
        self.loops: list[_Loop] = []
        # By loop, -1 for none: steps that cost the same for any event, reads, and variables of loops.
        self.steps: dict[int, int] = {-1: 0}
        self.read_in: list[tuple[int, int]] = []
        self.named_in: list[tuple[int, int]] = []
        self.names: set[str] = set()
        self.rewritten: list[tuple[int, int, str]] = []
        self.prefix = "_"
        while any(t.text.startswith(self.prefix) for t in self.tokens):
            self.prefix += "_"
        self._frames: list[_Frame] = []
        self._lists: dict[int, _List] = {}  # by the token that ends it
        i = 0
        while i < len(self.tokens):
            i = self._take(i)

    def _text(self, i: int) -> str:
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    @property
    def _inside(self) -> int:
        """The innermost loop whose body is being read."""
        if not self._frames:
            return -1
        frame = self._frames[-1]
        return frame.loop if frame.loop >= 0 and frame.commas else frame.inside

    def _take(self, i: int) -> int:
        token = self.tokens[i]
        self.steps[self._inside] += 1
        if token.kind == "name":
            return self._take_name(i)
        if token.text in ("(", "[", "{"):
            self._open(i)
        elif token.text in (")", "]", "}"):
            self._close(i)
        elif token.text == "," and self._frames:
            self._frames[-1].commas += 1
        elif token.text in ("'", '"', "`"):
            raise _Mistake("has a quote that does not end", token.start)
        return i + 1

    def _take_name(self, i: int) -> int:
        token, before, after = self.tokens[i], self._text(i - 1), self._text(i + 1)
        if after == "(":
            return i + 1  # judged with its bracket
        if before == ".":
            if i - 2 in self._lists:
                self._lists[i] = within = self._within(i - 2)  # which the library copies once more
                (self.named_in if within.kind == "member" else self.read_in).append((self._inside, within.number))
            return i + 1
        if after == "{":
            raise _Mistake(f"makes a `{token.text}`; there are no such types here", token.start)
        frame = self._frames[-1] if self._frames else None
        if frame is not None and frame.loop >= 0 and not frame.commas:
            if token.text in (*_WORDS, "event") or any(f.variable == token.text for f in self._frames):
                raise _Mistake(f"calls a variable `{token.text}`, which has a meaning already", token.start)
            frame.variable = token.text
            self.names.add(token.text)
            return i + 1
        if token.text in _WORDS:
            return i + 1
        self.names.add(token.text)
        for outer in self._frames:
            outer.plain = False
        if token.text == "event":
            return self._take_event(i)
        for outer in self._frames:
            if outer.variable == token.text and outer.commas:
                self.named_in.append((self._inside, outer.loop))
                self._lists[i] = _List("member", outer.loop)
                return i + 1
        raise _Mistake(f"names `{token.text}`; only `event` is known here", token.start)

    def _take_event(self, i: int) -> int:
        """A path of plain names from `event`, as far as it goes, becomes a variable."""
        path: list[str] = []
        ends = [i]
        while True:
            j = ends[-1] + 1
            if self._text(j) == "." and self._text(j + 2) != "(":
                path.append(self._text(j + 1))
                ends.append(j + 1)
            elif self._text(j) == "[" and self._text(j + 2) == "]" and self.tokens[j + 1].kind == "text":
                value = cel.evaluate(self._text(j + 1))
                if not isinstance(value, str):
                    break
                path.append(value)
                ends.append(j + 2)
            else:
                break
            if path[0] not in FIELDS:
                raise _Mistake(unknown_field(path[0]), self.tokens[j + 1].start)
        frame = self._frames[-1] if self._frames else None
        asked = frame is not None and frame.name is not None and frame.name.text == "has" and self._text(j) == ")"
        read = _Read(tuple(path[:-1]), path[-1]) if asked and path else _Read(tuple(path), None)
        if read not in self.reads:
            self.reads.append(read)
        number = self.reads.index(read)
        self.read_in.append((self._inside, number))
        last = self.tokens[ends[-2] if read.key is not None else ends[-1]]
        self.rewritten.append((self.tokens[i].start, last.end, f"{self.prefix}{number}"))
        self._lists[ends[-1]] = _List("read", number)
        return j

    def _within(self, i: int) -> _List:
        over = self._lists[i]
        return _List("inside", over.number) if over.kind == "read" else over

    def _open(self, i: int) -> None:
        name = self.tokens[i - 1] if i and self._text(i) == "(" and self.tokens[i - 1].kind == "name" else None
        if name is not None and name.text in _WORDS - _FUNCTIONS.keys():
            name = None  # `in (...)`
        frame = _Frame(name, i, self._inside)
        if name is not None:
            method = self._text(i - 2) == "."
            known = _METHODS if method else _FUNCTIONS
            if name.text not in known:
                told = f"calls {'.' * method}{name.text}(), which is not known here"
                raise _Mistake(f"{told}; known are {', '.join(sorted(known))}", name.start)
            self.steps[self._inside] += _MATCH_STEPS if name.text == "matches" else _CALL_STEPS
            if name.text in _LOOPS and method:
                self._open_loop(frame, name, i)
        self._frames.append(frame)

    def _open_loop(self, frame: _Frame, name: _Token, i: int) -> None:
        over = self._lists.get(i - 3)
        if over is None:
            raise _Mistake(f"runs {name.text}() over something that is neither a path nor a plain list", name.start)
        depth, outer = 1, frame.inside
        while outer >= 0:
            depth, outer = depth + 1, self.loops[outer].parent
        if depth > MAX_NESTED_LOOPS:
            raise _Mistake(f"nests more than {MAX_NESTED_LOOPS} of {', '.join(_LOOPS)}", name.start)
        frame.loop = len(self.loops)
        self.steps[frame.loop] = 0
        self.loops.append(_Loop(frame.inside, over, name.text in ("filter", "map")))
        self.named_in.append((frame.loop, frame.loop))  # each member is copied

    def _close(self, i: int) -> None:
        frame = self._frames.pop()
        before = frame.opened - 1
        if frame.name is not None:
            method = self._text(before - 1) == "."
            self._check_call(frame, frame.name, method, i)
            if method and frame.name.text == "filter":
                self._lists[i] = self.loops[frame.loop].over
        elif self._text(i) == "]" and before in self._lists:
            self._lists[i] = self._within(before)
        elif self._text(i) == "]" and frame.plain and self._text(before) not in (")", "]", "}"):
            self._lists[i] = _List("literal", i - frame.opened)

    def _check_call(self, frame: _Frame, name: _Token, method: bool, i: int) -> None:
        given = frame.commas + (i - frame.opened > 1)
        wanted = (_METHODS if method else _FUNCTIONS)[name.text]
        if given not in wanted:
            told = f"gives {name.text}() {given} arguments; it takes {' or '.join(map(str, wanted))}"
            raise _Mistake(told, name.start)
        if name.text == "matches":
            argument = self.tokens[frame.opened + 1]
            value = cel.evaluate(argument.text) if i - frame.opened == 2 and argument.kind == "text" else None
            if not isinstance(value, str):
                raise _Mistake("has matches() with something else than a pattern in quotes", argument.start)
            try:
                compile_re2(value)
            except ValueError as exc:
                raise _Mistake(f"has matches() without an RE2 pattern: {exc}", argument.start) from exc
            self.rewritten.append((name.start, name.end, f"{self.prefix}matches"))


class CompiledExpression:
    """`reason(envelope)` is None when the expression is true, else why it is not."""

    __slots__ = ("_names", "_program", "_reader", "source")

    def __init__(self, source: str, reader: _Reader) -> None:
        self.source = source
        self._reader = reader
        self._names = [f"{reader.prefix}{i}" for i in range(len(reader.reads))]
        text = source
        for start, end, name in sorted(reader.rewritten, reverse=True):
            text = text[:start] + name + text[end:]
        self._program = cel.compile(text)

    def reason(self, envelope: dict[str, Any]) -> str | None:
        found = dict(_find(self._reader.reads, envelope))
        if _work(self._reader, found) > MAX_STEPS:
            return f"where: it would take more than {MAX_STEPS} steps on this event"
        variables = {self._names[number]: value for number, value in found.items()}
        try:
            context = cel.Context(variables=variables, functions={f"{self._reader.prefix}matches": _matches})
            result = self._program.execute(context)
        except KeyError as exc:
            return f"where: {exc.args[0]} is not in the event"
        except Exception as exc:  # a division by zero, an index out of range: whatever the event makes of it
            return f"where: {self._told(exc)}"
        if result is True:
            return None
        shown = self.source if len(self.source) <= 200 else f"{self.source[:199]}…"
        return f"where is false: {shown}" if result is False else f"where gives neither true nor false: {shown}"

    def _told(self, exc: Exception) -> str:
        text = (str(exc).splitlines() or [type(exc).__name__])[0]
        unknown = re.match(r"Undefined variable or function: '(\w+)'", text)
        if unknown is None:
            return text.split(". ")[0][:200]
        if unknown[1] not in self._names:
            return f"{unknown[1]}() does not take such a value"
        path = self._reader.reads[self._names.index(unknown[1])].path
        return f"{'.'.join(('event', *path))[:200]} is not in the event"


def compile_expression(source: str, field: str, errors: list[FieldError]) -> CompiledExpression | None:
    """The expression ready to run, or None with what is wrong added to `errors`."""
    if not 0 < len(source) <= MAX_LENGTH:
        errors.append(FieldError(field, f"must be a CEL expression of 1 to {MAX_LENGTH} characters"))
        return None
    try:
        program = cel.compile(source)
    except ValueError as exc:
        place = re.search(r"<input>:(\d+):(\d+): (.*)", str(exc))
        told = f"{place[3][:200]} at line {place[1]}, column {place[2]}" if place else str(exc).splitlines()[0][-200:]
        errors.append(FieldError(field, f"is not a CEL expression: {told}"))
        return None
    try:
        reader = _Reader(source)
        if "event" not in reader.names:
            raise _Mistake("does not look at `event`; write for example event.payload.amount > 100", 0)
        if not set(program.variables()) <= reader.names | _WORDS:
            raise _Mistake("cannot be understood", 0)
        return CompiledExpression(source, reader)
    except _Mistake as exc:
        line, column = source.count("\n", 0, exc.index) + 1, exc.index - source.rfind("\n", 0, exc.index)
        errors.append(FieldError(field, f"{exc} (line {line}, column {column})"))
        return None


def _find(reads: list[_Read], envelope: dict[str, Any]) -> Iterator[tuple[int, Any]]:
    """The values of the paths that lead somewhere, by number."""
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


def _work(reader: _Reader, found: dict[int, Any]) -> int:
    """An upper bound of the steps that the expression takes on what was found."""
    weights = {number: _measure(value)[0] for number, value in found.items()}
    total = sum(weights.values()) * _CONVERSION_STEPS
    if total > MAX_STEPS:
        return total
    repeated, lists = {-1: 1}, dict[int, tuple[int, int, int]]()
    for number, (parent, over, copies) in enumerate(reader.loops):
        lists[number] = length, _, _ = _list(over, found, lists)
        repeated[number] = repeated[parent] * length * (length if copies else 1)
    total += sum(steps * repeated[loop] for loop, steps in reader.steps.items())
    # A sum copies both sides, so one of many copies the first side many times.
    sums = 1 + sum(token.text == "+" for token in reader.tokens)
    total += sum(weights.get(number, 0) * repeated[loop] * sums for loop, number in reader.read_in)
    return total + sum(lists[named][1] * repeated[loop] * sums for loop, named in reader.named_in)


def _list(over: _List, found: dict[int, Any], lists: dict[int, tuple[int, int, int]]) -> tuple[int, int, int]:
    """How many members it may have, how much the largest weighs, and how long the longest list in one is."""
    kind, number = over
    if kind == "literal":
        return number, number, number
    value = found.get(number)
    if kind != "read" or not isinstance(value, dict | list):
        weight, longest = lists[number][1:] if kind == "member" else _measure(value)
        return longest, weight, longest
    measures = [_measure(member) for member in value] or [(0, 0)]  # of an object, its keys
    return len(value), max(weight for weight, _ in measures), max(longest for _, longest in measures)


def _measure(value: Any) -> tuple[int, int]:
    """How many values it holds, a long text counting as several, and the length of the longest list or object."""
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


def _matches(text: object, pattern: str) -> bool | None:
    # An exception would be logged by the library; null makes the expression as wrong.
    return compile_re2(pattern).search(text) is not None if isinstance(text, str) else None
