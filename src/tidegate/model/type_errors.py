"""Type errors of a CEL expression on an event: which field has which type, and what the expression compares it with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from tidegate.model.cel_reader import CelToken, Reader

_TYPES = {"text": "text", "number": "a number", "true": "true or false", "false": "true or false", "null": "null"}
# Of each operator, the marks that it is written with.
_OPERATORS = ("<=", ">=", "==", "!=", "&&", "||", "<", ">", "+", "-", "*", "/", "%", "!", "?")
_OF_BOTH = frozenset({"&&", "||", "!", "?"})
_MAX_SHOWN = 40


class _Operand(NamedTuple):
    called: str
    type: str
    value: object | None = None

    def __str__(self) -> str:
        return f"{self.called} is {self.type}{'' if self.value is None else f' ({_short(self.value)})'}"


def type_of(value: object) -> str:
    """The type of a value of an event, in words."""
    match value:
        case None:
            return "null"
        case bool():
            return "true or false"
        case int() | float():
            return "a number"
        case str():
            return "text"
        case list():
            return "a list"
        case _:
            return "an object"


def mismatch(reader: Reader, source: str, found: Mapping[int, object]) -> str | None:
    """The first operator of the expression whose operands have different types, with both; None if none is found."""
    places = sorted(reader.rewritten)
    tokens = _merged(reader.tokens, source)
    for start, end, name in places:
        number = _number(name, reader)
        if number is None or number not in found:
            continue
        mine = _Operand(source[start:end], type_of(found[number]), found[number])
        after = _after(tokens, end)
        if after is not None and after.text in (".", "["):  # a method or item of it is the operand
            continue
        for operator, beside in ((after, 1), (_before(tokens, start), -1)):
            if operator is None or operator.text not in (*_OPERATORS, "in"):
                continue
            told = _told(mine, operator, beside, tokens, places, reader, source, found)
            if told is not None:
                return told
    return None


def _told(
    mine: _Operand,
    operator: CelToken,
    beside: int,
    tokens: list[CelToken],
    places: list[tuple[int, int, str]],
    reader: Reader,
    source: str,
    found: Mapping[int, object],
) -> str | None:
    sign = operator.text
    if sign in _OF_BOTH:
        return None if mine.type == "true or false" else f"{mine}, and {sign} needs true or false"
    place = tokens.index(operator) + beside
    if not 0 <= place < len(tokens):
        return None
    other = _operand(tokens[place], places, reader, source, found)
    if sign == "in":
        listed = other if beside > 0 else mine
        ok = listed is None or listed.type in ("a list", "an object")
        return None if ok or listed is None else f"{listed}, and in needs a list or an object"
    if other is None or other.type == mine.type:
        return None
    left, right = (mine, other) if beside > 0 else (other, mine)
    return f"{left} and {right}: {sign} takes two of one type"


def _operand(
    token: CelToken, places: list[tuple[int, int, str]], reader: Reader, source: str, found: Mapping[int, object]
) -> _Operand | None:
    for start, end, name in places:
        if start <= token.start < end:
            number = _number(name, reader)
            value = found.get(number) if number is not None else None
            return None if number not in found else _Operand(source[start:end], type_of(value), value)
    kind = _TYPES.get(token.kind) or _TYPES.get(token.text)
    return None if kind is None else _Operand(token.text[:_MAX_SHOWN], kind)


def _number(name: str, reader: Reader) -> int | None:
    rest = name.removeprefix(reader.prefix)
    return int(rest) if rest != name and rest.isdigit() and int(rest) < len(reader.reads) else None


def _merged(tokens: list[CelToken], source: str) -> list[CelToken]:
    """The tokens with operators of two marks as one."""
    merged: list[CelToken] = []
    for token in tokens:
        last = merged[-1] if merged else None
        if last is not None and last.kind == token.kind == "mark" and last.end == token.start:
            both = source[last.start : token.end]
            if both in _OPERATORS:
                merged[-1] = CelToken("mark", both, last.start, token.end)
                continue
        merged.append(token)
    return merged


def _after(tokens: list[CelToken], place: int) -> CelToken | None:
    return next((token for token in tokens if token.start >= place), None)


def _before(tokens: list[CelToken], place: int) -> CelToken | None:
    found = [token for token in tokens if token.end <= place]
    return found[-1] if found else None


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode(errors="replace")
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 1]}…"
