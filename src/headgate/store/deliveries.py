"""`workflow_trigger_deliveries`: one row for each trigger and event. Batch-first, compare-and-set, fenced."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from headgate.model.delivery import Delivery, DeliveryStatus
from headgate.model.retry import RetryChange
from headgate.store.db import Connection, Row
from headgate.store.retry_rows import change_columns, json_texts
from headgate.store.sql import load

_sql = load("deliveries")


class Decided(NamedTuple):
    """A delivery that was decided in the batch: launched, with its run, or failed, with the error."""

    id: uuid.UUID
    trigger_id: uuid.UUID
    event_id: uuid.UUID
    trigger_version: int
    status: DeliveryStatus
    last_error: str | None
    run_id: uuid.UUID | None
    workflow_definition_id: uuid.UUID
    correlation_id: str
    parameters: str


class EventDelivery(NamedTuple):
    """A delivery as `explain` shows it."""

    delivery: Delivery
    trigger_name: str
    workflow: str


async def launch(connection: Connection, decided: Sequence[Decided], now: datetime) -> list[uuid.UUID]:
    """Record the deliveries and create the runs of those that launch, stamped with `now`. The runs created."""
    columns = [list(column) for column in zip(*decided, strict=True)]
    return [row[0] for row in await connection.fetch(_sql["launch"], *columns, now)]


async def insert(connection: Connection, deliveries: Sequence[Delivery]) -> set[uuid.UUID]:
    """Record deliveries with their retry state. The ids that are new for their trigger and event."""
    rows = await connection.fetch(
        _sql["insert"],
        [d.id for d in deliveries],
        [d.trigger_id for d in deliveries],
        [d.event_id for d in deliveries],
        [d.trigger_version for d in deliveries],
        [d.workflow_run_id for d in deliveries],
        [d.status for d in deliveries],
        [d.attempts for d in deliveries],
        [d.dedupe_key for d in deliveries],
        [d.launched_at for d in deliveries],
        [d.last_error for d in deliveries],
        [d.throttled_until for d in deliveries],
        [d.retry_state for d in deliveries],
        [d.next_attempt_at for d in deliveries],
        [d.retry_attempts for d in deliveries],
        json_texts(d.retry_metadata for d in deliveries),
    )
    return {row[0] for row in rows}


async def update(
    connection: Connection, changes: Sequence[RetryChange], statuses: Sequence[DeliveryStatus | None] | None = None
) -> set[uuid.UUID]:
    """Change rows that are still as the caller knew them; a status of None stays. The ids changed."""
    new = list(statuses) if statuses is not None else [None] * len(changes)
    return {row[0] for row in await connection.fetch(_sql["update"], *change_columns(changes), new)}


async def claim_due(connection: Connection, *, limit: int, worker: str, lease_ms: int) -> list[Delivery]:
    """Claim rows that are due by the database's clock, until the lease ends."""
    rows = await connection.fetch(_sql["claim_due"], limit, worker, lease_ms)
    return sorted((_delivery(row) for row in rows), key=lambda d: (d.next_attempt_at, d.id))


async def release_expired(connection: Connection, limit: int) -> list[uuid.UUID]:
    """Make rows whose lease has run out due again."""
    return [row[0] for row in await connection.fetch(_sql["release_expired"], limit)]


async def list_scheduled(
    connection: Connection,
    *,
    trigger_id: uuid.UUID | None = None,
    after: tuple[datetime, uuid.UUID] | None = None,
    limit: int = 500,
) -> list[Delivery]:
    """Waiting rows in due order, after `(next_attempt_at, id)`."""
    at, last = after or (None, None)
    return [_delivery(row) for row in await connection.fetch(_sql["list_scheduled"], trigger_id, at, last, limit)]


async def list_of_event(connection: Connection, event_id: uuid.UUID) -> list[EventDelivery]:
    """The deliveries of one event, in order."""
    rows = await connection.fetch(_sql["list_of_event"], event_id)
    return [EventDelivery(_delivery(row), row["trigger_name"], row["workflow"]) for row in rows]


def _delivery(row: Row) -> Delivery:
    return msgspec.convert(dict(row), Delivery)
