"""What waits, by filter: how many, and which. Ids are walked in order, so that each is met once, whatever its time."""

from __future__ import annotations

import uuid
from typing import Any, Literal, NamedTuple

from tidegate.model.ids import RunId, TriggerId
from tidegate.store.db import Connection
from tidegate.store.retry_rows import RetryFilters
from tidegate.store.sql import load

_sql = load("bulk_retries")

RetryKind = Literal["events", "deliveries", "steps"]

# The filters that a kind has, as its statements take them.
FILTERS_OF: dict[RetryKind, tuple[str, ...]] = {
    "events": ("source", "reason"),
    "deliveries": ("source", "reason", "trigger_id", "workflow"),
    "steps": ("source", "reason", "trigger_id", "workflow", "workflow_run_id"),
}


class IdRange(NamedTuple):
    """Ids after one, up to another; None: from the first, to the last."""

    after: uuid.UUID | None = None
    through: uuid.UUID | None = None


class WaitingMatch(NamedTuple):
    """A row that waits, with what is to be locked for it."""

    id: uuid.UUID
    trigger_id: TriggerId | None
    workflow_run_id: RunId | None


async def count(
    connection: Connection, kind: RetryKind, filters: RetryFilters, span: IdRange
) -> tuple[int, uuid.UUID | None]:
    """How many wait that the filters describe, and the last of them."""
    row = await connection.fetchrow(_sql[f"count_{kind}"], *_given(kind, filters), *span)
    assert row is not None, "an aggregate has one row"
    return row["total"], row["last_id"]


async def match(
    connection: Connection, kind: RetryKind, filters: RetryFilters, span: IdRange, limit: int
) -> list[WaitingMatch]:
    """The first of them, in the order of their ids."""
    rows = await connection.fetch(_sql[f"match_{kind}"], *_given(kind, filters), *span, limit)
    return [WaitingMatch(*row) for row in rows]


def _given(kind: RetryKind, filters: RetryFilters) -> list[Any]:
    return [getattr(filters, name) for name in FILTERS_OF[kind]]
