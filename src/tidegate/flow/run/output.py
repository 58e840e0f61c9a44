"""What workflows and steps return, as JSON that the database can keep."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec

from tidegate.errors import NonRetryable

MAX_OUTPUT_BYTES = 1024 * 1024

# The escape for U+0000, not the text backslash-u-0000: an odd number of backslashes before the u.
_NUL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")


def encode_output(result: Any, what: str, step: str | None = None) -> str | None:
    """JSON text, None for None. NonRetryable, which names `what` (of a step), when it cannot be kept."""
    if result is None:
        return None
    try:
        output = msgspec.json.encode(result)
    except (TypeError, ValueError, RecursionError) as exc:
        raise _refused(what, step, f"cannot be stored as JSON: {exc}") from exc
    if len(output) > MAX_OUTPUT_BYTES:
        raise _refused(what, step, f"is {len(output)} bytes; at most {MAX_OUTPUT_BYTES} are kept")
    if b"null" in output and _is_beyond_json(result):
        raise _refused(what, step, "cannot be stored as JSON: it holds a number that is not finite")
    if b"u0000" in output and _NUL.search(output):
        raise _refused(what, step, "holds the character U+0000, which cannot be stored")
    return output.decode()


def _refused(what: str, step: str | None, why: str) -> NonRetryable:
    return NonRetryable(f"{what} {why}" if step is None else f"{what} of step {step!r} {why}")


def _is_beyond_json(value: Any) -> bool:
    """Whether it holds NaN or an infinity; msgspec writes them as null without a word."""
    waiting = [msgspec.to_builtins(value)]
    while waiting:
        one = waiting.pop()
        if isinstance(one, float) and not math.isfinite(one):
            return True
        if isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += one
    return False
