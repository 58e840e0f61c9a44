"""Events and their inbox."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import NamedTuple

import asyncpg

from tidegate.model.event import Event, NewEvent
from tidegate.model.ids import EventId
from tidegate.store.columns import column, same
from tidegate.store.db import Connection, Database, Row
from tidegate.store.sql import load

_sql = load("events")
# No event was received before or after.
_FIRST, _LAST = datetime(1900, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)


class Resolved(NamedTuple):
    """The stored event that a published event repeats."""

    id: EventId
    same_body: bool


class DeadLettered(NamedTuple):
    """An event that was moved to the dead letters."""

    event_id: EventId
    source: str
    correlation_id: str


class Claimed(NamedTuple):
    """Events that a transaction has taken from the inbox, and the time when it held the locks of their sources."""

    events: list[Event]
    now: datetime | None


async def insert(connection: Connection, events: Sequence[NewEvent]) -> set[EventId]:
    """Store events with their inbox rows; the ids of those that are new."""
    later = [e for e in events if e.is_later]
    columns = _insert_columns(events)
    if later:
        columns += ([e.id for e in later], [e.deliver_at for e in later], [e.delay_ms for e in later])
    rows = await connection.fetch(_sql["insert_later" if later else "insert"], *columns)
    return {row[0] for row in rows}


async def insert_new(connection: Connection, events: Sequence[NewEvent]) -> bool:
    """Store events that are all new and none of which is for a later time, faster than `insert`, as a transaction of
    its own; False, and nothing is stored, when one of them is stored already."""
    try:
        await connection.execute(_sql["insert_new"], *_insert_columns(events))
    except asyncpg.UniqueViolationError:
        return False
    return True


async def probe(database: Database) -> None:
    """Store an event and roll back: raises what publishing would raise."""
    with suppress(_Undone):
        async with database.transaction(wait_seconds=2) as connection:
            await connection.execute(_sql["probe"])
            raise _Undone


class _Undone(Exception):
    """Rolls back a transaction that was only a check."""


async def resolve(connection: Connection, events: Sequence[NewEvent]) -> dict[EventId, Resolved]:
    """By the given id: the stored event with the same id, or the same producer's id and source."""
    later = [e.deliver_at for e in events], [e.delay_ms for e in events]
    rows = await connection.fetch(_sql["resolve"], *_columns(events), *later)
    return {row["given_id"]: Resolved(row["id"], row["same_body"]) for row in rows}


async def claim_inbox(connection: Connection, limit: int) -> Claimed:
    """Take the oldest undecided events, for this transaction alone, and say that it may launch for their sources (as
    `locks.share` does)."""
    rows = await connection.fetch(_sql["claim_inbox"], limit)
    return claimed(rows)


def claimed(rows: Sequence[Row]) -> Claimed:
    """What a claim from the inbox returned."""
    # Metadata is null where there is none, as mostly; the last column is the time.
    found = [Event(*[*row[:10], row[10] or {}, row[11], None, None, row[12], row[13]]) for row in rows]
    return Claimed(found, rows[0]["now"] if rows else None)


async def claim_inbox_one(connection: Connection, ingress_sequence: int) -> list[Event]:
    """Take one undecided event; empty when another worker has it or it is decided."""
    return [Event(*row) for row in await connection.fetch(_sql["claim_inbox_one"], ingress_sequence)]


async def first_in_lane(connection: Connection, ingress_sequence: int) -> int | None:
    """The first undecided event of the lane of the given one, locked; None when that is decided."""
    found: int | None = await connection.fetchval(_sql["first_in_lane"], ingress_sequence)
    return found


async def renumber(connection: Connection, arrived: Sequence[Event]) -> None:
    """Store the numbers that delayed events have got at their time."""
    ids = [event.id for event in arrived]
    await connection.execute(_sql["renumber"], ids, [e.ingress_sequence for e in arrived], min(ids), max(ids))


async def list_inbox(connection: Connection, limit: int) -> list[int]:
    """The sequence numbers of the oldest undecided events."""
    return [row[0] for row in await connection.fetch(_sql["list_inbox"], limit)]


async def dead_letter(connection: Connection, ingress_sequence: int, reason: str) -> DeadLettered | None:
    """Move an event that cannot be processed from the inbox to the dead letters; which it was, if it was there."""
    row = await connection.fetchrow(_sql["dead_letter"], ingress_sequence, reason)
    return DeadLettered(*row) if row else None


async def find(connection: Connection, event_id: str) -> list[Event]:
    """The events that `event_id` may mean: ours by UUID, or a producer's id (several sources may share it)."""
    ours = _as_uuid(event_id)
    found = [Event(*row) for row in await connection.fetch(_sql["find"], ours, event_id)]
    exact = [event for event in found if event.id == ours]
    return exact or found


async def get_many(connection: Connection, ids: Iterable[EventId]) -> dict[EventId, Event]:
    """Events by our ids."""
    wanted = list(ids)
    if not wanted:
        return {}
    rows = await connection.fetch(_sql["get_many"], wanted, min(wanted), max(wanted))
    return {row["id"]: Event(*row) for row in rows}


async def correlation_id(connection: Connection, event_id: EventId) -> str | None:
    """The correlation id of one event, even when its other columns cannot be read."""
    found: str | None = await connection.fetchval(_sql["correlation_id"], event_id)
    return found


async def set_traceparents(connection: Connection, traceparents: Mapping[EventId, str]) -> None:
    """Name the traces of events that came without one."""
    if traceparents:
        await connection.execute(
            _sql["set_traceparents"],
            list(traceparents),
            list(traceparents.values()),
            min(traceparents),
            max(traceparents),
        )


class ReceiptPlace(NamedTuple):
    """A place in the order in which events were received; the default is before the first."""

    received_at: datetime = datetime.min.replace(tzinfo=UTC)
    ingress_sequence: int = 0


async def list_page(
    connection: Connection,
    *,
    event_type: str | None = None,
    source: str | None = None,
    correlation_id: str | None = None,
    received_from: datetime | None = None,
    received_to: datetime | None = None,
    before: ReceiptPlace | None = None,
    limit: int = 50,
) -> list[Event]:
    """Events, newest first: in the order of their receipt; of one type, source or correlation, unless a span of time is
    given, in that of their sequence."""
    received_at, sequence = before or (None, None)
    given = (event_type, source, correlation_id, sequence, limit, _as_uuid(correlation_id))
    is_of_any_time = received_from is None and received_to is None
    if is_of_any_time and (event_type or source or correlation_id):
        rows = await connection.fetch(_sql["list"], *given)
    else:
        between = (received_from or _FIRST, received_to or _LAST, received_at)
        rows = await connection.fetch(_sql["list_between"], *given, *between)
    return [Event(*row) for row in rows]


def _as_uuid(text: str | None) -> uuid.UUID | None:
    try:
        return None if text is None else uuid.UUID(text)
    except ValueError:
        return None


def _insert_columns(events: Sequence[NewEvent]) -> tuple[Sequence[object], ...]:
    ids, external_ids, types, sources, occurred_at, payloads, ttl_ms, metadata = _columns(events)
    return (
        ids,
        column(external_ids),
        same(types),
        same(sources),
        column(occurred_at),
        payloads,
        column(ttl_ms),
        column(metadata, "{}"),
        column([e.correlation_id for e in events]),
        column([e.traceparent for e in events]),
        column([e.origin for e in events]),
        column([e.priority for e in events]),
    )


def _columns(events: Sequence[NewEvent]) -> tuple[list[object], ...]:
    return (
        [e.id for e in events],
        [e.external_id for e in events],
        [e.type for e in events],
        [e.source for e in events],
        [e.occurred_at for e in events],
        [e.payload for e in events],
        [e.ttl_ms for e in events],
        [e.metadata for e in events],
    )
