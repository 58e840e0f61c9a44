"""Days: the partitions of history are added ahead of time.

An event whose day has no partition is not refused: it goes to the default partition, which is pruned row by row. So a
worker that is late here costs speed, and nothing else.
"""

from __future__ import annotations

import asyncio
from datetime import date

from tidegate.store import retention
from tidegate.store.db import Database, TransientConflict
from tidegate.telemetry.logs import logger

_log = logger("days")

# Partitions exist for today and this many days after it.
AHEAD = 3
_RESTS_SECONDS = (0.1, 0.2, 0.4, 0.8)


class Days:
    """Adds the partitions of the next days. Any number of workers may do so at once."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def run_once(self) -> list[date]:
        """The days that were added."""
        for rest_seconds in _RESTS_SECONDS:
            try:
                added = await self._add()
            except TransientConflict:  # other transactions use the tables
                await asyncio.sleep(rest_seconds)
            else:
                break
        else:
            added = await self._add()
        if added:
            _log.info("days.added", first=added[0], last=added[-1], days=len(added))
        return added

    async def _add(self) -> list[date]:
        async with self._database.connection() as connection:
            return await retention.add_days(connection, AHEAD)
