"""How many connections a process has, under load: no more than it was told, and than the documentation says."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.flow.conftest import APP, eventually
from tests.processes import api, run, worker
from tidegate.store.db import Connection, Database

EVENTS = 150
SERVES = ("tidegate-api", "tidegate-ingest")
DOCUMENT = Path(__file__).parents[2] / "docs" / "operations" / "database.md"
# The server lists a connection for a moment after it was closed: those count that are there for so many looks.
LOOKS = 3
_LISTED = """
select pid, application_name from pg_stat_activity
 where datname = current_database() and application_name like 'tidegate-%' and application_name <> 'tidegate-test'
"""


def documented(process: str) -> int:
    """How many connections a process has at most, by default, says the table."""
    row = re.search(rf"^\| {re.escape(process)} \| [^|]*?(\d+)\)? \|", DOCUMENT.read_text(), re.MULTILINE)
    assert row is not None, process
    return int(row[1])


@contextlib.asynccontextmanager
async def watched(database: Database) -> AsyncIterator[Counter[str]]:
    """The most connections that an API, and that all other processes together, had at one time."""
    most: Counter[str] = Counter()
    looks: deque[set[tuple[int, str]]] = deque(maxlen=LOOKS)

    async def watch() -> None:
        while True:
            async with database.connection() as connection:
                looks.append({(row[0], row[1]) for row in await connection.fetch(_LISTED)})
            names = [name for _, name in set.intersection(*looks)]
            serving = sum(name in SERVES for name in names)
            most["serve"] = max(most["serve"], serving)
            most["others"] = max(most["others"], len(names) - serving)
            await asyncio.sleep(0.01)

    watching = asyncio.create_task(watch())
    try:
        yield most
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.parametrize("told", [(4, 6), None], ids=["told", "by default"])
async def test_a_process_has_no_more_connections_than_it_was_told(
    database: Database,
    database_url: str,
    effects: Callable[[], Awaitable[list[tuple[Any, str]]]],
    told: tuple[int, int] | None,
) -> None:
    settings = {}
    if told is not None:
        settings = {"TIDEGATE_SERVE_CONNECTIONS": str(told[0]), "TIDEGATE_WORKER_CONNECTIONS": str(told[1])}
    bounds = told or (documented("`tidegate serve`"), documented("`tidegate worker`"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    async with watched(database) as most:
        with (
            api(database_url, **settings) as (_, address),
            worker(database_url, APP, TIDEGATE_METRICS_PORT=str(port), **settings),
        ):
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:

                async def one(n: int) -> None:
                    event = {"type": "work.quick", "source": "test", "payload": {"n": n}}
                    assert (await client.post("/v1/events", json=event)).status_code == 202
                    assert (await client.get("/v1/events?limit=100")).status_code == 200
                    for path in ("readyz", "metrics") if n % 10 == 0 else ():
                        assert (await client.get(f"http://127.0.0.1:{port}/{path}")).status_code == 200

                await asyncio.gather(*(one(n) for n in range(EVENTS)))
            done = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"
            await eventually(database, done, EVENTS)
    assert len(await effects()) == EVENTS
    assert 2 <= most["serve"] <= bounds[0] and 4 <= most["others"] <= bounds[1], most


async def test_a_command_has_one(database: Database, database_url: str, connection: Connection) -> None:
    """At a time; `migrate` has one after the other. The server counts sessions, however short they are."""
    most_of_all = documented("`tidegate migrate`, and a command that uses the database directly")
    sessions = "select sessions from pg_stat_database where datname = current_database()"
    async with watched(database) as most:
        before = await connection.fetchval(sessions)
        for command in (("migrate",), ("token", "create", "ann", "--scope", "admin"), ("doctor",)):
            done = await asyncio.to_thread(run, *command, env={"TIDEGATE_DATABASE_URL": database_url})
            assert done.returncode == 0, done.stderr
        await eventually(database, f"select ({sessions}) >= $1", before + 3)
    assert most["others"] <= most_of_all == 1 and most["serve"] == 0, most
