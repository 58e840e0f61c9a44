"""`workers`: which workers are alive, and whose code each has."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec

from tidegate.model.ids import DefinitionId
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("workers")


class Unserved(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow with due runs whose code no living worker has."""

    workflow: str
    waiting: int
    since: datetime


async def heartbeat(connection: Connection, name: str, definitions: Sequence[DefinitionId]) -> None:
    """A worker is alive and has the code of these definitions."""
    await connection.execute(_sql["heartbeat"], name, definitions)


async def reconciled(connection: Connection, name: str) -> None:
    """Record that a worker has reconciled."""
    await connection.execute(_sql["reconciled"], name)


async def leave(connection: Connection, name: str) -> None:
    """A worker has stopped."""
    await connection.execute(_sql["leave"], name)


async def forget(connection: Connection, after_ms: int) -> None:
    """Delete workers that were not seen within that time."""
    await connection.execute(_sql["forget"], after_ms)


async def unserved(connection: Connection, alive_ms: int, overdue_ms: int) -> list[Unserved]:
    """Workflows with runs that have been due for a while and whose code no living worker has."""
    return [Unserved(**dict(row)) for row in await connection.fetch(_sql["unserved"], alive_ms, overdue_ms)]
