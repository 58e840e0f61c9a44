"""Events and waits that may be near misses of each other. Read only, by indexes, and never all of them."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from datetime import datetime

import msgspec

from tidegate.model.event import Event
from tidegate.model.ids import RunId
from tidegate.model.wait import WaitMode, WaitPattern
from tidegate.store.db import Connection, Row
from tidegate.store.sql import load

_sql = load("near_waits")

# At most this many types of events are compared, and this many waits read for each value.
MAX_TYPES = 500
MAX_WAITS = 20
# Of each type, the newest events are read; those that may be near are handed over, at most MAX_EVENTS.
MAX_READ = 500
MAX_EVENTS = 50


class RunningWait(msgspec.Struct, frozen=True, kw_only=True):
    """An open wait with its run; `source` is that of the run's event."""

    run_id: RunId
    workflow: str
    source: str | None
    step: str
    mode: WaitMode
    pattern: WaitPattern
    after_sequence: int
    since: datetime | None
    until: datetime | None
    parameters: dict[str, object]


async def awaited_types(connection: Connection) -> list[str]:
    """The types of events that runs wait for."""
    return [row[0] for row in await connection.fetch(_sql["awaited_types"], MAX_TYPES)]


async def by_key(connection: Connection, keys: Collection[tuple[str, str, str]]) -> list[RunningWait]:
    """Open waits by the types, fields and values of events."""
    columns = [list(column) for column in zip(*keys, strict=True)]
    return _waits(await connection.fetch(_sql["by_key"], *columns, MAX_WAITS)) if keys else []


async def by_fields(connection: Connection, fields: Collection[tuple[str, str]]) -> list[RunningWait]:
    """Some open waits by the types and fields of events, with whatever values."""
    columns = [list(column) for column in zip(*fields, strict=True)]
    return _waits(await connection.fetch(_sql["by_fields"], *columns, MAX_WAITS)) if fields else []


async def of_run(connection: Connection, run_id: RunId) -> list[RunningWait]:
    """The open waits of a run."""
    return _waits(await connection.fetch(_sql["of_run"], run_id))


async def event_types(connection: Connection, first_id: uuid.UUID) -> list[str]:
    """The types of events from the day on that begins with an id."""
    return [row[0] for row in await connection.fetch(_sql["event_types"], first_id, MAX_TYPES)]


async def recent_events(
    connection: Connection, types: Sequence[str], values: Sequence[str], fields: Sequence[str], first_id: uuid.UUID
) -> list[tuple[Event, bool]]:
    """The newest events of these types that contain one of the values (JSON), or lack one of the fields; with whether
    each has passed its gate."""
    rows = await connection.fetch(
        _sql["recent_events"], list(types), list(values), first_id, MAX_READ, list(fields), MAX_EVENTS
    )
    return [(Event(*row[:-1]), row[-1]) for row in rows]


def _waits(rows: Sequence[Row]) -> list[RunningWait]:
    return [msgspec.convert(dict(row), RunningWait) for row in rows if row["pattern"] is not None]
