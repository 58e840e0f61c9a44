"""Errors in the words of whoever wrote the input: its fields may have other names than ours."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tidegate.errors import FieldError


def as_written(error: FieldError, names: Mapping[str, str]) -> FieldError:
    """The error with the field's name as it was written, where `names` says so (`retry.max_ms`: `retry.cap`). What our
    field counts in milliseconds may be written in another unit: then the error tells the unit of its numbers."""
    ours = next(
        (name for name in names if error.field == name or error.field.startswith((f"{name}.", f"{name}["))), None
    )
    if ours is None:
        return error
    written, message = names[ours], error.message
    parent, _, leaf = ours.rpartition(".")
    if parent:  # a rule of the object in it, which may name others of its fields
        siblings = {name[len(parent) + 1 :]: name for name in names if name.rpartition(".")[0] == parent}
        found = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in siblings))
        message = found.sub(lambda at: names[siblings[at[0]]].rpartition(".")[2], message)
    if leaf.endswith("_ms") and not written.endswith("_ms") and re.search(r"\d", message):
        message += " (in milliseconds)"
    return FieldError(written + error.field[len(ours) :], message, error.too_large)
