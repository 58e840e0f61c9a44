"""NaN and infinities, which JSON does not have: msgspec writes them as null."""

from __future__ import annotations

import math

import msgspec

from tidegate.model import typed


def not_finite(root: object) -> str | None:
    """Where a value holds one (`payload.amount`, `[2].price`), or None."""
    stack: list[tuple[str, object]] = [("", msgspec.to_builtins(root, enc_hook=typed.plain))]
    while stack:
        path, value = stack.pop()
        if isinstance(value, float) and not math.isfinite(value):
            return path
        if isinstance(value, dict):
            stack += [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
        elif isinstance(value, list | tuple | set | frozenset):
            stack += [(f"{path}[{i}]", inner) for i, inner in enumerate(value)]
    return None
