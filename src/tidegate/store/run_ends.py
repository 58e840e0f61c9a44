"""The ends of runs as events, for the triggers that ask for them."""

from __future__ import annotations

from collections.abc import Collection

from tidegate.model.ids import RunId
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("run_ends")


async def publish(connection: Connection, run_ids: Collection[RunId]) -> list[str]:
    """Publish the ends of runs that this transaction has ended; the sources of the events."""
    if not run_ids:
        return []
    rows = await connection.fetch(_sql["publish"], list(run_ids), min(run_ids), max(run_ids))
    return [row[0] for row in rows]
