"""Rows as columns: statements take an array for each column of a batch."""

from __future__ import annotations

from collections.abc import Sequence


def column(values: Sequence[object], default: object = None) -> Sequence[object]:
    """The values; nothing at all when each is the default, which `unnest` then leaves null and the statement fills in.
    To encode an array takes its time for every element, and most columns of most batches say the same in each row."""
    return () if values.count(default) == len(values) else values


def same(values: Sequence[object]) -> Sequence[object]:
    """The first alone when all are equal; the statement takes it for every row. Not for columns that may be null."""
    return values[:1] if values and values.count(values[0]) == len(values) else values
