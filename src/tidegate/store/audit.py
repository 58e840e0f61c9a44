"""`audit_log`: who changed what, from what to what. Rows are only added; the database refuses anything else."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Any

import msgspec

from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("audit")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change: `before` and `after` are what it was about, without secrets; null where there was nothing."""

    id: uuid.UUID
    at: datetime
    actor: str
    action: str
    subject: str
    before: Any
    after: Any


async def insert(
    connection: Connection, *, actor: str, action: str, subject: str, before: Any = None, after: Any = None
) -> None:
    """Record a change, in its transaction."""
    texts = (None if value is None else msgspec.json.encode(value).decode() for value in (before, after))
    await connection.execute(_sql["insert"], actor, action, subject, *texts)


async def list_page(
    connection: Connection,
    *,
    actor: str | None = None,
    action: str | None = None,
    subject: str | None = None,
    before_id: uuid.UUID | None = None,
    limit: int = 50,
) -> list[AuditEntry]:
    """Changes, newest first."""
    rows = await connection.fetch(_sql["list"], actor, action, subject, before_id, limit)
    return [AuditEntry(**dict(row)) for row in rows]
