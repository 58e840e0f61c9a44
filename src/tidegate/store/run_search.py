"""Runs that filters describe: for lists, and for verbs about many."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.ids import EventId, RunId
from tidegate.model.run import Run, RunStatus
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("run_search")


class RunFilters(NamedTuple):
    """Which runs; None does not filter. `error` is a part of the text, whatever its case; `parameters` and `tags` are
    JSON objects that those of the run contain. A further filter is one more field here, a condition in
    `run_search.sql`, and a parameter in `api/v1/runs.py`."""

    workflow: str | None = None
    statuses: Sequence[RunStatus] | None = None
    event_id: EventId | None = None
    correlation_id: str | None = None
    created_from: datetime | None = None
    created_to: datetime | None = None
    error: str | None = None
    parameters: str | None = None
    tags: str | None = None

    @property
    def is_given(self) -> bool:
        """Whether anything is asked for."""
        return any(one is not None for one in self)


async def list_page(
    connection: Connection, filters: RunFilters, *, before_id: uuid.UUID | None = None, limit: int
) -> list[Run]:
    """The runs, newest first."""
    rows = await connection.fetch(_sql["list"], *_arguments(filters), before_id, limit)
    return [msgspec.convert(dict(row), Run) for row in rows]


async def list_ids(
    connection: Connection, filters: RunFilters, *, after_id: uuid.UUID | None, limit: int
) -> list[RunId]:
    """Their ids, oldest first."""
    return [row[0] for row in await connection.fetch(_sql["ids"], *_arguments(filters), after_id, limit)]


async def count(
    connection: Connection, filters: RunFilters, *, after_id: uuid.UUID | None = None, most: int
) -> tuple[int, datetime]:
    """How many they are, counted up to `most`, and the time of the count."""
    row = await connection.fetchrow(_sql["count"], *_arguments(filters), after_id, most)
    assert row is not None, "a count has a row"
    return row["total"], row["now"]


def _arguments(filters: RunFilters) -> tuple[object, ...]:
    statuses = None if filters.statuses is None else list(filters.statuses)
    own = None
    if filters.correlation_id is not None:
        with contextlib.suppress(ValueError):
            own = uuid.UUID(filters.correlation_id)
    return (*filters._replace(statuses=statuses), own)
