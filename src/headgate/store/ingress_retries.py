"""`event_ingress_retries`: events that the source gate holds back. Batch-first, compare-and-set, fenced."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime

import msgspec

from headgate.model.ingress_retry import IngressRetry
from headgate.model.retry import RetryChange
from headgate.store.db import Connection, Row
from headgate.store.retry_rows import change_columns, json_texts
from headgate.store.sql import load

_sql = load("ingress_retries")


async def upsert(connection: Connection, retries: Sequence[IngressRetry]) -> set[uuid.UUID]:
    """Schedule retries; running and final rows stay as they are. The ids written."""
    rows = await connection.fetch(
        _sql["upsert"],
        [r.event_id for r in retries],
        [r.source for r in retries],
        [r.attempts for r in retries],
        [r.next_attempt_at for r in retries],
        [r.last_error for r in retries],
        json_texts(r.metadata for r in retries),
    )
    return {row[0] for row in rows}


async def update(connection: Connection, changes: Sequence[RetryChange]) -> set[uuid.UUID]:
    """Change rows that are still as the caller knew them. The ids changed; the others were lost to someone else."""
    return {row[0] for row in await connection.fetch(_sql["update"], *change_columns(changes))}


async def delete(connection: Connection, known: Sequence[IngressRetry]) -> set[uuid.UUID]:
    """Remove rows that are still as the caller knew them. The ids removed; the others were lost to someone else."""
    rows = await connection.fetch(
        _sql["delete"],
        [r.event_id for r in known],
        [r.retry_state for r in known],
        [r.claim_generation for r in known],
    )
    return {row[0] for row in rows}


async def claim_due(connection: Connection, *, limit: int, worker: str, lease_ms: int) -> list[IngressRetry]:
    """Claim rows that are due by the database's clock, until the lease ends."""
    rows = await connection.fetch(_sql["claim_due"], limit, worker, lease_ms)
    return sorted((_retry(row) for row in rows), key=lambda r: (r.next_attempt_at, r.event_id))


async def release_expired(connection: Connection, limit: int) -> list[uuid.UUID]:
    """Make rows whose lease has run out due again."""
    return [row[0] for row in await connection.fetch(_sql["release_expired"], limit)]


async def list_scheduled(
    connection: Connection,
    *,
    source: str | None = None,
    after: tuple[datetime, uuid.UUID] | None = None,
    limit: int = 500,
) -> list[IngressRetry]:
    """Waiting rows in due order, after `(next_attempt_at, event_id)`."""
    at, event_id = after or (None, None)
    return [_retry(row) for row in await connection.fetch(_sql["list_scheduled"], source, at, event_id, limit)]


def _retry(row: Row) -> IngressRetry:
    return msgspec.convert(dict(row), IngressRetry)
