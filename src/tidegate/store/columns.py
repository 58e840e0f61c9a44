"""Rows as columns: statements take an array for each column of a batch."""

from __future__ import annotations

from collections.abc import Sequence


def column(values: Sequence[object], default: object = None) -> Sequence[object]:
    """The values; an empty array when each is the default, which `unnest` then leaves null and the statement fills in.
    Encoding an array costs time for every element, and most columns of most batches have one value in all rows."""
    return () if values.count(default) == len(values) else values


def same(values: Sequence[object]) -> Sequence[object]:
    """Only the first when all are equal; the statement uses it for every row. Not for columns that may be null."""
    return values[:1] if values and values.count(values[0]) == len(values) else values
