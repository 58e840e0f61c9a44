"""Field errors with the names that the author of the input used, where they differ from ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tidegate.errors import FieldError


def as_written(error: FieldError, names: Mapping[str, str]) -> FieldError:
    """The error with the field's name as the user wrote it, according to `names` (`retry.max_ms`: `retry.cap`). If the
    user may have written another unit than milliseconds, the error names the unit of its numbers."""
    ours = next(
        (name for name in names if error.field == name or error.field.startswith((f"{name}.", f"{name}["))), None
    )
    if ours is None:
        return error
    written, message = names[ours], error.message
    parent, _, leaf = ours.rpartition(".")
    if parent:  # the message may name other fields of the same object
        siblings = {name[len(parent) + 1 :]: name for name in names if name.rpartition(".")[0] == parent}
        found = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in siblings))
        message = found.sub(lambda at: names[siblings[at[0]]].rpartition(".")[2], message)
    if leaf.endswith("_ms") and not written.endswith("_ms") and re.search(r"\d", message):
        message += " (in milliseconds)"
    return FieldError(written + error.field[len(ours) :], message, error.too_large)
