"""Values that JSON does not have, and that encoders write nevertheless: NaN, infinities, halves of surrogate pairs."""

from __future__ import annotations

import json
import math
import re

from tidegate.errors import FieldError

# The values of a larger body are not looked for.
MAX_BYTES = 65_536
MAX_NAMED = 20

_HINT = re.compile(rb"NaN|Infinity|[0-9][eE]|[0-9]{300}|\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")
NOT_FINITE = "must be a finite number: JSON has no NaN, Infinity or number as large as this; use null or text"
NO_TEXT = "contains an unpaired surrogate (such as \\ud800), which is not valid text"


def wrong_values(raw: bytes) -> list[FieldError]:
    """Where a body that could not be decoded has them; the first MAX_NAMED fields, by name."""
    if len(raw) > MAX_BYTES or not _HINT.search(raw):
        return []
    try:
        found: object = json.loads(raw)
    except (ValueError, RecursionError):
        return []
    waiting: list[tuple[str, object]] = [("", found)]
    wrong = set()
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            if any(_SURROGATE.search(name) for name in value):
                wrong.add((path or "body", f"has a key that {NO_TEXT}"))
            waiting += [(f"{path}.{name}" if path else name, inner) for name, inner in _named(value)]
        elif isinstance(value, list):
            waiting += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
        elif isinstance(value, float) and not math.isfinite(value):
            wrong.add((path or "body", NOT_FINITE))
        elif isinstance(value, str) and _SURROGATE.search(value):
            wrong.add((path or "body", NO_TEXT))
    return [FieldError(*one) for one in sorted(wrong)[:MAX_NAMED]]


def _named(value: dict[str, object]) -> list[tuple[str, object]]:
    return [(_SURROGATE.sub("\ufffd", name)[:60], inner) for name, inner in value.items()]
