"""The floor of handing a concurrency slot on: as many loops as there are slots. Each sleeps as long as a run takes, and
then ends its run and begins the next one by plain SQL, in one transaction of two statements."""

from __future__ import annotations

import asyncio
import time
import uuid
from datetime import UTC, datetime, timedelta

import asyncpg

from bench import floor
from bench.app import MAX_CONCURRENCY, RUN_SECONDS
from bench.stage import Stage
from tidegate.clock import uuid7


async def measure(stage: Stage, runs: int) -> float:
    """The time of the runs against runs / slots x length. Nothing decides which run is next, and nothing is claimed: no
    hand-over that survives a crash can do less."""
    async with stage.database() as url:
        connections = [
            await asyncpg.connect(url, server_settings={"jit": "off", "synchronous_commit": "on"})
            for _ in range(MAX_CONCURRENCY)
        ]
        try:
            trigger, definition = await connections[0].fetchrow(floor.TRIGGER)
            firsts = [await _begin(connection, trigger, definition) for connection in connections]
            each = runs // MAX_CONCURRENCY
            started_at = time.monotonic()
            await asyncio.gather(
                *(
                    _slot(connection, first, each, trigger, definition)
                    for connection, first in zip(connections, firsts, strict=True)
                )
            )
            return round((time.monotonic() - started_at) / (each * RUN_SECONDS), 3)
        finally:
            for connection in connections:
                await connection.close()


async def _slot(
    connection: asyncpg.Connection, run_id: uuid.UUID, runs: int, trigger: uuid.UUID, definition: uuid.UUID
) -> None:
    for _ in range(runs):
        await asyncio.sleep(RUN_SECONDS)
        async with connection.transaction():
            await connection.execute(floor.FINISH, [run_id], ["null"], datetime.now(UTC))
            run_id = await _begin(connection, trigger, definition)


async def _begin(connection: asyncpg.Connection, trigger: uuid.UUID, definition: uuid.UUID) -> uuid.UUID:
    run_id, now = uuid7(), datetime.now(UTC)
    lease_ends_at = now + timedelta(seconds=15)
    await connection.execute(
        floor.RUNNING, [run_id], definition, now, [run_id], [uuid7()], ["{}"], trigger, lease_ends_at
    )
    return run_id
