"""`event_ingress_retries`: events that the source gate holds back. Batch-first, compare-and-set, fenced."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tidegate.model.ids import EventId
from tidegate.model.ingress_retry import IngressRetry
from tidegate.model.retry import RetryState
from tidegate.store.db import Connection, Row
from tidegate.store.retry_rows import json_texts
from tidegate.store.sql import load

_sql = load("ingress_retries")

# The line is not reordered for an event with more than this many behind it: it came very late and stays at the end.
MAX_REORDERED = 2_000


async def list_scheduled(
    connection: Connection,
    *,
    after: tuple[datetime, uuid.UUID] | None = None,
    limit: int = 500,
) -> list[IngressRetry]:
    """Waiting rows in due order, after `(next_attempt_at, event_id)`."""
    at, event_id = after or (None, None)
    return [_retry(row) for row in await connection.fetch(_sql["list_scheduled"], at, event_id, limit)]


def _retry(row: Row) -> IngressRetry:
    return msgspec.convert(dict(row), IngressRetry)


class DueEvent(NamedTuple):
    """A waiting event that this transaction has locked."""

    event_id: EventId
    attempts: int
    reason: str | None
    claim_generation: int
    next_attempt_at: datetime


class StaleEvent(NamedTuple):
    """A waiting event, locked, whose slot belongs to an older plan."""

    event_id: EventId
    attempts: int
    next_attempt_at: datetime
    ingress_sequence: int
    received_at: datetime
    correlation_id: str


class Settled(NamedTuple):
    """What became of a locked row."""

    event_id: EventId
    retry_state: RetryState
    attempts: int
    next_attempt_at: datetime | None
    reason: str | None
    last_error: str | None
    metadata: dict[str, Any]
    plan_version: int


async def hold(connection: Connection, retries: Sequence[IngressRetry]) -> None:
    """Keep events that the gate refused, in the transaction that decided so."""
    if retries:
        await connection.execute(
            _sql["hold"],
            [r.event_id for r in retries],
            [r.source for r in retries],
            [r.ingress_sequence for r in retries],
            [r.retry_state for r in retries],
            [r.attempts for r in retries],
            [r.next_attempt_at for r in retries],
            [r.reason for r in retries],
            [r.last_error for r in retries],
            json_texts(r.metadata for r in retries),
            [r.plan_version for r in retries],
        )


async def due_sources(connection: Connection, limit: int) -> list[str]:
    """Sources with due events, the longest due first."""
    return [row[0] for row in await connection.fetch(_sql["due_sources"], limit)]


async def take_due(
    connection: Connection, source: str, *, now: datetime, limit: int, only: EventId | None = None
) -> list[DueEvent]:
    """Lock due events of a source, in the order of their slots, or `only` that one of them."""
    return [DueEvent(*row) for row in await connection.fetch(_sql["take_due"], source, now, limit, only)]


async def first_due(connection: Connection, source: str) -> EventId | None:
    """The event of a source whose slot has come first."""
    found: EventId | None = await connection.fetchval(_sql["first_due"], source)
    return found


async def take_stale(
    connection: Connection, source: str, *, plan_version: int, after: int, limit: int
) -> list[StaleEvent]:
    """Lock waiting events whose slot belongs to an older plan, in the order of arrival."""
    rows = await connection.fetch(_sql["take_stale"], source, plan_version, after, limit)
    return [StaleEvent(*row) for row in rows]


async def keep_order(connection: Connection, source: str, since_sequence: int) -> None:
    """Give the events of a source from `since_sequence` on their slots in the order of arrival."""
    await connection.execute(_sql["keep_order"], source, since_sequence, MAX_REORDERED)


class ArrivedEvent(NamedTuple):
    """An event that was published for a later time which has come, locked; `arrival` is its number in the order of
    arrival from now on."""

    event_id: EventId
    attempts: int
    reason: str | None
    claim_generation: int
    next_attempt_at: datetime
    arrival: int


async def list_arrived(connection: Connection, limit: int) -> list[tuple[EventId, str]]:
    """Events that were published for a later time which has come, with their sources, in the order of their times."""
    return [(row[0], row[1]) for row in await connection.fetch(_sql["list_arrived"], limit)]


async def take_arrived(connection: Connection, event_ids: Sequence[EventId], now: datetime) -> list[ArrivedEvent]:
    """Lock those of the events that still wait for their time, which has come, in the order of their times."""
    return [ArrivedEvent(*row) for row in await connection.fetch(_sql["take_arrived"], event_ids, now)]


async def join_line(connection: Connection, retries: Sequence[IngressRetry]) -> None:
    """Let events that were refused at their time stand in their source's line; this transaction has locked them."""
    if retries:
        await connection.execute(
            _sql["join_line"],
            [r.event_id for r in retries],
            [r.ingress_sequence for r in retries],
            [r.attempts for r in retries],
            [r.next_attempt_at for r in retries],
            [r.reason for r in retries],
            [r.last_error for r in retries],
            json_texts(r.metadata for r in retries),
            [r.plan_version for r in retries],
        )


async def settle(connection: Connection, settled: Sequence[Settled]) -> None:
    """Write what became of rows that this transaction has locked."""
    if settled:
        columns = [list(column) for column in zip(*settled, strict=True)]
        columns[6] = json_texts(columns[6])
        await connection.execute(_sql["settle"], *columns)


async def next_due_seconds(connection: Connection) -> float | None:
    """Seconds until the next waiting event that is not due yet."""
    found: float | None = await connection.fetchval(_sql["next_due"])
    return found


class ChangedEvent(NamedTuple):
    """An event that waited until now."""

    event_id: EventId
    source: str
    attempts: int


async def cancel(
    connection: Connection, event_ids: Sequence[EventId], text: str, *, reason: str | None = None
) -> list[ChangedEvent]:
    """Cancel those of the events that wait, for `reason` if one is given; those cancelled."""
    return [ChangedEvent(*row) for row in await connection.fetch(_sql["cancel"], event_ids, text, reason)]


async def force(
    connection: Connection, event_ids: Sequence[EventId], *, reason: str | None = None
) -> list[ChangedEvent]:
    """Make those of the events that wait, for `reason` if one is given, due now; those forced."""
    return [ChangedEvent(*row) for row in await connection.fetch(_sql["force"], event_ids, reason)]


async def get(connection: Connection, event_id: EventId) -> IngressRetry | None:
    """The retry row of an event."""
    row = await connection.fetchrow(_sql["get"], event_id)
    return _retry(row) if row else None


class HeldEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A held event as operators see it. `eta_seconds` is null when it is no longer waiting, or
    waits for an operator to resume its source."""

    event_id: EventId
    external_id: str | None
    type: str
    source: str
    correlation_id: str
    retry_state: RetryState
    reason: str | None
    attempts: int
    next_attempt_at: datetime | None
    eta_seconds: float | None
    last_error: str | None
    metadata: dict[str, Any]
    created_at: datetime
    updated_at: datetime


async def list_waiting(
    connection: Connection,
    *,
    source: str | None = None,
    reason: str | None = None,
    after: tuple[datetime, uuid.UUID] | None = None,
    limit: int,
) -> list[HeldEvent]:
    """Waiting events in due order, after `(next_attempt_at, event_id)`."""
    rows = await connection.fetch(_sql["list_waiting"], source, reason, *(after or (None, None)), limit)
    return [HeldEvent(**dict(row)) for row in rows]


async def list_settled(
    connection: Connection,
    state: RetryState,
    *,
    source: str | None = None,
    reason: str | None = None,
    before_id: uuid.UUID | None = None,
    limit: int,
) -> list[HeldEvent]:
    """Events that are no longer waiting, newest first."""
    rows = await connection.fetch(_sql["list_settled"], state, source, reason, before_id, limit)
    return [HeldEvent(**dict(row)) for row in rows]


async def dead_letter(connection: Connection, letters: Sequence[tuple[EventId, str, dict[str, Any]]]) -> None:
    """Dead letters for exhausted events."""
    if letters:
        ids, reasons, details = zip(*letters, strict=True)
        await connection.execute(_sql["dead_letter"], list(ids), list(reasons), json_texts(details))
