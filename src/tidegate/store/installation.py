"""`installation`: who we are, where something outside the database is shared with others."""

from __future__ import annotations

from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("installation")


async def identity(connection: Connection) -> str:
    """A short name that no other installation has."""
    found: str = await connection.fetchval(_sql["identity"])
    return found[:16]
