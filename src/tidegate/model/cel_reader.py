"""The analysis of a CEL expression: what it names and calls, what it reads of the event, and the steps it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tidegate.model.cel_library import cel
from tidegate.model.pattern import Pattern, compile_pattern
from tidegate.model.trigger_terms import FIELDS, unknown_field

MAX_NESTED_LOOPS = 2
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
WORDS = frozenset({"true", "false", "null", "in", "int", "uint", "double", "string", "bytes"})
# What an expression may read of the run that waits for an event.
RUN = "run"
RUN_FIELDS = ("id", "parameters")


def _timestamp(value: object) -> object:
    """A time in UTC, as the getters expect it: from a text with any offset, or from seconds since 1970."""
    try:
        if isinstance(value, str) and not value.endswith(("Z", "z")) and _TIME.fullmatch(value):
            return datetime.fromisoformat(value).astimezone(UTC).isoformat()
        if isinstance(value, int) and not isinstance(value, bool):
            return datetime.fromtimestamp(value, UTC).isoformat()
        return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else value
    except (ValueError, OverflowError, OSError):
        return value


def _seconds(value: object) -> object:
    """The whole seconds since 1970 of a time; other values are left to the library."""
    return int(value.timestamp() // 1) if isinstance(value, datetime) else value


def _text(value: object) -> object:
    """A bool, time or duration as CEL writes it; other values are left to the library."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        text = value.astimezone(UTC).isoformat().removesuffix("+00:00")
        return (text.rstrip("0") if "." in text else text) + "Z"
    if isinstance(value, timedelta):
        return f"{value.total_seconds():.6f}".rstrip("0").rstrip(".") + "s"
    return value


# Applied to a value before the library's conversion of that name. They never raise: the library would log it.
CONVERSIONS: dict[str, Callable[[object], object]] = {
    "timestamp": _timestamp,
    "duration": lambda value: value,
    "int": _seconds,
    "string": _text,
}
_TIME = re.compile(r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?[+-]\d\d:\d\d")


class CelToken(NamedTuple):
    kind: str
    text: str
    start: int
    end: int


class Read(NamedTuple):
    """A path into the event that the expression reads; with `key`, only whether that key exists (`has`)."""

    path: tuple[str, ...]
    key: str | None


class List(NamedTuple):
    """What a loop iterates over: a read, a value inside a read or inside another loop's item, or a literal."""

    kind: str
    number: int


class Comprehension(NamedTuple):
    parent: int
    over: List
    copies: bool  # the library copies the result so far for each item


class _Frame:
    """An open bracket: what it belongs to, and the position of the reader in it."""

    def __init__(self, name: CelToken | None, opened: int, inside: int) -> None:
        self.name, self.opened, self.inside = name, opened, inside  # the last is the enclosing loop
        self.commas = 0
        self.loop = -1
        self.variable = ""
        self.plain = True  # contains literals only


class Mistake(Exception):
    """The expression is invalid; the text says why, the index where."""

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class Reader:
    """One pass over the tokens of an expression whose grammar the library has already checked. `roots` are the names
    that it may read: `event`, and `run` where a run waits for the event; a path into the run begins with `run`."""

    def __init__(self, source: str, roots: tuple[str, ...] = ("event",)) -> None:
        self._roots = roots
        found = (CelToken(m.lastgroup or "", m[0], *m.span()) for m in _TOKEN.finditer(source))
        self.tokens = [token for token in found if token.kind != "space"]
        self.reads: list[Read] = []
        self.loops: list[Comprehension] = []
        # By loop (-1: none): steps that are the same for every event, reads, and loop variables.
        self.steps: dict[int, int] = {-1: 0}
        self.read_in: list[tuple[int, int]] = []
        self.named_in: list[tuple[int, int]] = []
        self.names: set[str] = set()
        self.patterns: dict[str, Pattern] = {}
        self.conversions: set[str] = set()
        self.rewritten: list[tuple[int, int, str]] = []
        self.prefix = "_"
        while any(t.text.startswith(self.prefix) for t in self.tokens):
            self.prefix += "_"
        self._frames: list[_Frame] = []
        self._lists: dict[int, List] = {}  # by the token that ends it
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
        elif token.text == "+":
            self._check_sum(i)
        elif token.text in ("'", '"', "`"):
            raise Mistake("has a quote that does not end", token.start)
        return i + 1

    def _take_name(self, i: int) -> int:
        token, before, after = self.tokens[i], self._text(i - 1), self._text(i + 1)
        if after == "(":
            return i + 1  # checked with its bracket
        if before == ".":
            if i - 2 in self._lists:
                self._lists[i] = within = self._within(i - 2)  # which the library copies once more
                (self.named_in if within.kind == "member" else self.read_in).append((self._inside, within.number))
            return i + 1
        if after == "{" and token.text not in WORDS:
            raise Mistake(f"creates a `{token.text}`; message types are not supported", token.start)
        frame = self._frames[-1] if self._frames else None
        if frame is not None and frame.loop >= 0 and not frame.commas:
            if token.text in (*WORDS, *self._roots) or any(f.variable == token.text for f in self._frames):
                raise Mistake(f"names a variable `{token.text}`, which is a reserved name", token.start)
            frame.variable = token.text
            self.names.add(token.text)
            return i + 1
        if token.text in WORDS:
            return i + 1
        self.names.add(token.text)
        for outer in self._frames:
            outer.plain = False
        if token.text in self._roots:
            return self._take_root(i, [RUN] if token.text == RUN else [])
        for outer in self._frames:
            if outer.variable == token.text and outer.commas:
                self.named_in.append((self._inside, outer.loop))
                self._lists[i] = List("member", outer.loop)
                return i + 1
        known = "`event` is" if self._roots == ("event",) else "`event` and `run` are"
        raise Mistake(f"uses `{token.text}`; only {known} available", token.start)

    def _take_root(self, i: int, path: list[str]) -> int:
        """The longest path of simple names from `event` or `run` becomes a variable."""
        of_run, ends = len(path), [i]
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
            if of_run and path[1] not in RUN_FIELDS:
                message = f"uses `run.{path[1]}`; a run has run.{', run.'.join(RUN_FIELDS)}"
                raise Mistake(message, self.tokens[j + 1].start)
            if not of_run and path[0] not in FIELDS:
                raise Mistake(unknown_field(path[0]), self.tokens[j + 1].start)
        frame = self._frames[-1] if self._frames else None
        asked = frame is not None and frame.name is not None and frame.name.text == "has" and self._text(j) == ")"
        read = Read(tuple(path[:-1]), path[-1]) if asked and len(ends) > 1 else Read(tuple(path), None)
        if read not in self.reads:
            self.reads.append(read)
        number = self.reads.index(read)
        self.read_in.append((self._inside, number))
        last = self.tokens[ends[-2] if read.key is not None else ends[-1]]
        self.rewritten.append((self.tokens[i].start, last.end, f"{self.prefix}{number}"))
        self._lists[ends[-1]] = List("read", number)
        return j

    def _within(self, i: int) -> List:
        over = self._lists[i]
        return List("inside", over.number) if over.kind == "read" else over

    def _open(self, i: int) -> None:
        name = self.tokens[i - 1] if i and self._text(i) == "(" and self.tokens[i - 1].kind == "name" else None
        if name is not None and name.text in WORDS - _FUNCTIONS.keys():
            name = None  # `in (...)`
        frame = _Frame(name, i, self._inside)
        if name is not None:
            method = self._text(i - 2) == "."
            known = _METHODS if method else _FUNCTIONS
            if name.text not in known:
                message = f"calls {'.' * method}{name.text}(), which is not available"
                raise Mistake(f"{message}; available: {', '.join(sorted(known))}", name.start)
            self.steps[self._inside] += _MATCH_STEPS if name.text == "matches" else _CALL_STEPS
            if name.text in _LOOPS and method:
                self._open_loop(frame, name, i)
        self._frames.append(frame)

    def _open_loop(self, frame: _Frame, name: CelToken, i: int) -> None:
        over = self._lists.get(i - 3)
        if over is None:
            raise Mistake(f"calls {name.text}() on something that is neither a path nor a list of literals", name.start)
        depth, outer = 1, frame.inside
        while outer >= 0:
            depth, outer = depth + 1, self.loops[outer].parent
        if depth > MAX_NESTED_LOOPS:
            raise Mistake(f"nests more than {MAX_NESTED_LOOPS} of {', '.join(_LOOPS)}", name.start)
        frame.loop = len(self.loops)
        self.steps[frame.loop] = 0
        self.loops.append(Comprehension(frame.inside, over, name.text in ("filter", "map")))
        self.named_in.append((frame.loop, frame.loop))  # each item is copied

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
            self._lists[i] = List("literal", i - frame.opened)

    def _check_call(self, frame: _Frame, name: CelToken, method: bool, i: int) -> None:
        given = frame.commas + (i - frame.opened > 1)
        wanted = (_METHODS if method else _FUNCTIONS)[name.text]
        if given not in wanted:
            message = f"calls {name.text}() with {given} arguments; it takes {' or '.join(map(str, wanted))}"
            raise Mistake(message, name.start)
        if name.text == "matches":
            argument = self.tokens[frame.opened + 1]
            value = cel.evaluate(argument.text) if i - frame.opened == 2 and argument.kind == "text" else None
            if not isinstance(value, str):
                raise Mistake("calls matches() with something other than a pattern in quotes", argument.start)
            try:
                self.patterns[value] = compile_pattern(value)
            except ValueError as exc:
                raise Mistake(f"calls matches() with an invalid RE2 pattern: {exc}", argument.start) from exc
            self.rewritten.append((name.start, name.end, f"{self.prefix}matches"))
        elif name.text in CONVERSIONS and not method:
            self._check_literal(frame, name, i)
            self.conversions.add(name.text)
            # Our conversion runs first: the library's supports fewer kinds of values.
            self.rewritten.append((name.start, name.end, f"{name.text}({self.prefix}{name.text}"))
            self.rewritten.append((self.tokens[i].end, self.tokens[i].end, ")"))

    def _check_literal(self, frame: _Frame, name: CelToken, i: int) -> None:
        """Check a literal time or duration: with an invalid one the expression could never be true."""
        argument = self.tokens[frame.opened + 1]
        if (
            name.text not in ("timestamp", "duration")
            or i - frame.opened != 2
            or argument.kind not in ("text", "number")
        ):
            return
        value = CONVERSIONS[name.text](cel.evaluate(argument.text))
        try:
            cel.evaluate(f"{name.text}(given)", {"given": value})
        except Exception as exc:
            wanted = "2026-01-31T09:30:00Z" if name.text == "timestamp" else "1h30m"
            raise Mistake(
                f"has {name.text}({argument.text}), which is not valid; write it like '{wanted}'", name.start
            ) from exc

    def _check_sum(self, i: int) -> None:
        """Reject `... + timestamp(...)`: the left side must be a duration, a sum that the library does not support."""
        first = i + 1
        while self._text(first) == "(":
            first += 1
        if self._text(first) != "timestamp" or self._text(first + 1) != "(":
            return
        depth, last = 1, first + 1
        while depth and last + 1 < len(self.tokens):
            last += 1
            depth += (self._text(last) == "(") - (self._text(last) == ")")
        around = first - i - 1
        if self._text(last + 1) != "." and all(self._text(last + 1 + n) == ")" for n in range(around)):
            message = "adds a timestamp on the right; write the timestamp first: timestamp(...) + duration(...)"
            raise Mistake(message, self.tokens[i].start)
