"""How many connections a process has, under load: no more than it was told."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from tests.flow.conftest import APP, eventually
from tests.processes import api, worker
from tidegate.store.db import Database

EVENTS = 150
SERVES = ("tidegate-api", "tidegate-ingest")
SETTINGS = {"TIDEGATE_SERVE_CONNECTIONS": "4", "TIDEGATE_WORKER_CONNECTIONS": "6", "TIDEGATE_AUTH": "off"}
_COUNT = """
select application_name from pg_stat_activity
 where datname = current_database() and application_name like 'tidegate-%' and application_name <> 'tidegate-test'
"""


async def test_a_process_has_no_more_connections_than_it_was_told(
    database: Database, database_url: str, effects: Callable[[], Awaitable[list[tuple[Any, str]]]]
) -> None:
    most: Counter[str] = Counter()

    async def watch() -> None:
        while True:
            async with database.connection() as connection:
                names = [row[0] for row in await connection.fetch(_COUNT)]
            serving = sum(name in SERVES for name in names)
            most["serve"] = max(most["serve"], serving)
            most["worker"] = max(most["worker"], len(names) - serving)
            await asyncio.sleep(0.01)

    with api(database_url, **SETTINGS) as (_, address), worker(database_url, APP, **SETTINGS):
        watching = asyncio.create_task(watch())
        async with httpx.AsyncClient(base_url=address, timeout=60) as client:

            async def one(n: int) -> None:
                event = {"type": "work.quick", "source": "test", "payload": {"n": n}}
                assert (await client.post("/v1/events", json=event)).status_code == 202
                assert (await client.get("/v1/events?limit=100")).status_code == 200

            await asyncio.gather(*(one(n) for n in range(EVENTS)))
        done = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"
        await eventually(database, done, EVENTS)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert len(await effects()) == EVENTS
    assert 2 <= most["serve"] <= 4 and 3 <= most["worker"] <= 6, most
