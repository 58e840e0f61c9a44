"""`audit_log`: who changed what, from what to what. Rows are only added; the database refuses anything else."""

from __future__ import annotations

import uuid
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tidegate.model.ids import TokenId
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("audit")


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One change: `before` and `after` are what it was about, without secrets; null where there was nothing.

    `token_id` and `address` name the API client; null for a change from elsewhere or without a token.
    """

    id: uuid.UUID
    at: datetime
    actor: str
    token_id: TokenId | None
    address: str | None
    action: str
    subject: str
    before: Any
    after: Any


class Caller(NamedTuple):
    """Who asked for what is being done, beside the actor's name: a token, from an address."""

    token_id: TokenId | None = None
    address: str | None = None


# Of the request in progress, for every change that it makes.
caller: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  # it cannot be changed


async def insert(
    connection: Connection, *, actor: str, action: str, subject: str, before: Any = None, after: Any = None
) -> None:
    """Record a change, in its transaction."""
    texts = (None if value is None else msgspec.json.encode(value).decode() for value in (before, after))
    await connection.execute(_sql["insert"], actor, action, subject, *texts, *caller.get())


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
