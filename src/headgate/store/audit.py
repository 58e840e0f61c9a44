"""`audit_log`: who changed what, from what to what."""

from __future__ import annotations

from typing import Any

import msgspec

from headgate.store.db import Connection
from headgate.store.sql import load

_sql = load("audit")


async def insert(
    connection: Connection, *, actor: str, action: str, subject: str, before: Any = None, after: Any = None
) -> None:
    """Record a change, in its transaction."""
    texts = (None if value is None else msgspec.json.encode(value).decode() for value in (before, after))
    await connection.execute(_sql["insert"], actor, action, subject, *texts)
