"""`installation`: the id of this installation, for what it shares outside the database with others."""

from __future__ import annotations

from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("installation")


async def identity(connection: Connection) -> str:
    """A short name that no other installation has."""
    found: str = await connection.fetchval(_sql["identity"])
    return found[:16]
