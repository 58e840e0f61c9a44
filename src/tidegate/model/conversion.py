"""Strict conversion of decoded JSON to a struct; errors name the field and what was expected there."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from tidegate.clock import has_utc
from tidegate.errors import FieldError, InvalidInput
from tidegate.model.times import TIME_RULE

T = TypeVar("T", bound=msgspec.Struct)

MAX_SHOWN = 60

_AT = re.compile(r"(?P<text>.*) - at `(?:key in )?\$(?P<path>[^`]*)`", re.DOTALL)
_FIELD_NAMED = re.compile(r"Object (?P<how>missing required|contains unknown) field `(?P<field>.*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<expected>[^`]+)`(?:, got `(?P<got>[^`]+)`| (?P<more>.+))", re.DOTALL)
_FIELD_FIRST = re.compile(r"(?P<field>[a-z_]+)(?P<text> .*)", re.DOTALL)
_PART = re.compile(r"\.?([^.\[\]]+)|\[(?:\d+|\.\.\.)\]")
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "an object",
    "array": "a list",
    "null": "null",
}


def convert(plain: Any, kind: type[T], message: str) -> T:
    """`plain` as `kind`, without coercion between types. InvalidInput names the field."""
    try:
        found = msgspec.convert(plain, kind)
    except msgspec.ValidationError as exc:
        raise InvalidInput(message, [field_error(str(exc), kind)]) from exc
    names = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    times = [(shown, at) for name, shown in names if isinstance(at := getattr(found, name), datetime)]
    wrong = [FieldError(shown, "must lie in the years 1 to 9999") for shown, at in times if not has_utc(at)]
    if wrong:
        raise InvalidInput(message, wrong)
    return found


def field_error(message: str, kind: type[msgspec.Struct]) -> FieldError:
    """The decoder's error in plain words, with the path of the field."""
    at = _AT.fullmatch(message)
    place, text = (at["path"].lstrip("."), at["text"]) if at else ("", message)
    named = _FIELD_NAMED.fullmatch(text)
    if named and named["how"] == "missing required":
        return FieldError(_inside(place, named["field"]), "is required")
    if named:
        known = ", ".join(_fields_at(place, kind)) or "none"
        return FieldError(_inside(place, named["field"][:MAX_SHOWN]), f"unknown field; known fields: {known}")
    expected = _EXPECTED.fullmatch(text)
    if text.startswith("Invalid RFC3339") or (expected and "datetime" in expected["expected"]):
        return FieldError(place or "body", TIME_RULE)
    if text.startswith("Invalid enum value") and (choices := _choices_at(place, kind)):
        return FieldError(place or "body", f"must be one of {', '.join(choices)}, not{text.partition('value')[2]}")
    if expected:
        what = " or ".join(_WORDS.get(word, word) for word in expected["expected"].split(" | "))
        got = f", not {_WORDS.get(expected['got'], expected['got'])}" if expected["got"] else f" {expected['more']}"
        return FieldError(place or "body", f"must be {what}{got}")
    rule = _FIELD_FIRST.fullmatch(text)
    if rule and rule["field"] in _fields_at(place, kind):  # raised by the struct itself: `max_ms must lie between …`
        return FieldError(_inside(place, rule["field"]), rule["text"].strip())
    return FieldError(place or "body", text[:1].lower() + text[1:])


def _inside(place: str, field: str) -> str:
    return f"{place}.{field}" if place else field


def _fields_at(place: str, kind: type[msgspec.Struct]) -> list[str]:
    """The field names of the object at `place`."""
    return [field.encode_name for field in getattr(_struct_in(_type_at(place, kind)), "fields", ())]


def _choices_at(place: str, kind: type[msgspec.Struct]) -> list[str]:
    """The words that are valid at `place`."""
    found = _type_at(place, kind)
    types = found.types if isinstance(found, inspect.UnionType) else (found,)
    return [str(value) for one in types if isinstance(one, inspect.LiteralType) for value in one.values]


def _type_at(place: str, kind: type[msgspec.Struct]) -> inspect.Type | None:
    found: inspect.Type | None = inspect.type_info(kind)
    for part in _PART.finditer(place):
        found = _struct_in(found)
        if part[1] is not None:
            found = next((f.type for f in getattr(found, "fields", ()) if f.encode_name == part[1]), None)
    return found


def _struct_in(found: Any) -> Any:
    """The struct type in an optional or list type."""
    if isinstance(found, inspect.UnionType):
        found = next((t for t in found.types if isinstance(t, inspect.StructType | inspect.ListType)), None)
    return _struct_in(found.item_type) if isinstance(found, inspect.ListType) else found
