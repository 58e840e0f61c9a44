"""Scratch: a temporary Postgres of this process, whose databases are cloned from a migrated template with a clock that
can be set. Needs `tidegate[embedded]`."""

from __future__ import annotations

import asyncio
import atexit
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.store import migrate
from tidegate.store.db import Database

_TEMPLATE = "harness_template"
_CLOCK = """
create table public.harness_clock (now timestamptz not null);
insert into public.harness_clock values (clock_timestamp());
create or replace function tidegate.now() returns timestamptz language sql stable parallel safe
  as $$ select now from public.harness_clock $$;
"""
# The data is temporary, so nothing has to be flushed to disk.
_SCRATCH_OPTIONS = {"fsync": "off", "full_page_writes": "off", "max_connections": "300"}


async def create(name: str) -> str:
    """Create a database; its address. The first one starts the server."""
    server = await asyncio.to_thread(_server)
    await _admin(server, f"create database {name} template {_TEMPLATE} owner {ROLE}")
    return server.url(name)


async def drop(name: str) -> None:
    """Drop a database, whoever is connected to it."""
    await _admin(_server(), f"drop database {name} with (force)")


async def set_clock(database: Database, now: datetime) -> None:
    """Set the clock of a database."""
    async with database.connection() as connection:
        await connection.execute("update public.harness_clock set now = $1", now)


_starting = threading.Lock()
_started: EmbeddedPostgres | None = None


def _server() -> EmbeddedPostgres:
    global _started
    with _starting:
        if _started is None:
            folder = Path(tempfile.mkdtemp(prefix="tidegate-harness-"))
            server = EmbeddedPostgres(folder, _SCRATCH_OPTIONS)
            atexit.register(_stop, server, os.getpid())
            _in_lasting_thread(lambda: _prepare(server))
            _started = server
        return _started


def _prepare(server: EmbeddedPostgres) -> None:
    server.start()
    asyncio.run(_make_template(server))


async def _make_template(server: EmbeddedPostgres) -> None:
    await _admin(server, f"create database {_TEMPLATE} owner {ROLE}")
    database = Database(server.url(_TEMPLATE), "harness", size=1)
    try:
        await migrate.migrate(database)
        async with database.connection() as connection:
            await connection.execute(_CLOCK)
    finally:
        await database.close()


async def _admin(server: EmbeddedPostgres, statement: str) -> None:
    database = Database(server.admin_url(), "harness", size=1)
    try:
        async with database.connection() as connection:
            await connection.execute(statement)
    finally:
        await database.close()


def _in_lasting_thread(work: Callable[[], None]) -> None:
    """Call it in a thread that lives as long as the process: the server ends with the thread that started it."""
    done = threading.Event()
    failures: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as exc:  # noqa: BLE001 - re-raised in the calling thread
            failures.append(exc)
        done.set()
        if not failures:
            threading.Event().wait()

    threading.Thread(target=body, name="tidegate-harness", daemon=True).start()
    done.wait()
    if failures:
        raise failures[0]


def _stop(server: EmbeddedPostgres, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        server.stop(immediate=True)
        shutil.rmtree(server.data, ignore_errors=True)
