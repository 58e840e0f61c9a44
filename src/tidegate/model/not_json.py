"""Python values that are not JSON in what a program publishes. Sets and bytes are refused although msgspec would
convert them: a set has no order, bytes have no one text, and the workflow would not get what was published."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import msgspec

from tidegate.errors import FieldError

_SETS = (set, frozenset)
_BYTES = (bytes, bytearray, memoryview)
_REFUSED = (*_SETS, *_BYTES)
# Most values of a payload; they contain nothing.
_PLAIN = frozenset((str, int, float, bool, type(None)))


def set_or_bytes(root: object) -> FieldError | None:
    """Where a value that msgspec has encoded holds a set or bytes (`payload.items`, `[2].payload.items`), or None."""
    stack = [root]
    while stack:
        value = stack.pop()
        if isinstance(value, _REFUSED):
            return _first(root)
        stack += [inner for _, inner in _parts(value) if type(inner) not in _PLAIN]
    return None


def not_encodable(root: object, error: Exception) -> FieldError:
    """Where a value that msgspec cannot encode, for this error, holds what it cannot."""
    try:
        found = _first(root)
    except RecursionError:
        found = None
    return found or FieldError("payload", f"is not JSON: {error}")


def _first(root: object) -> FieldError | None:
    for path, value in _places("", root):
        if reason := _refusal(value):
            return FieldError(path or "payload", reason)
    return None


def _refusal(value: object) -> str | None:
    if isinstance(value, _SETS):
        return "a set is not JSON; use a list"
    if isinstance(value, _BYTES):
        return "bytes are not JSON; use text, such as base64"
    if type(value) in _PLAIN or isinstance(value, dict | list | tuple):
        return None
    try:
        msgspec.json.encode(value)
    except TypeError:
        return None if any(_parts(value)) else f"is of type {type(value).__name__}, which is not JSON"
    return None


def _places(path: str, value: object) -> Iterator[tuple[str, object]]:
    yield path, value
    for key, inner in _parts(value):
        place = f"[{key}]" if isinstance(value, list | tuple) else f".{key}" if path else f"{key}"
        yield from _places(path + place, inner)


def _parts(value: object) -> Iterable[tuple[object, object]]:
    """What a value contains, by key, index or field name; a key of bytes counts as contained."""
    if isinstance(value, dict):
        keys = [(key, key) for key in value if isinstance(key, _BYTES)]
        return [*value.items(), *keys]
    if isinstance(value, list | tuple):
        return enumerate(value)
    if isinstance(value, msgspec.Struct):
        return [(name, getattr(value, name)) for name in value.__struct_fields__]
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return ()
