"""A primary that fails and a standby that takes its place; clients that know both."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

import pytest
from chaos import failover
from chaos.proxy import Proxy

from tests.flow.conftest import PATIENCE_SECONDS
from tidegate.errors import Unavailable
from tidegate.store.db import Database, why_down


async def test_a_failover_to_a_synchronous_standby_loses_nothing() -> None:
    """The standby receives nothing for a while, so commits wait for it; sessions that wait are ended, so their commits
    are visible on the primary alone, and producers publish again."""
    with tempfile.TemporaryDirectory(prefix="tidegate-failover-", ignore_cleanup_errors=True) as folder:
        found = await asyncio.to_thread(partial(failover.failed_over, Path(folder), 1, is_synchronous=True))
    assert found.broken == []
    assert found.accepted >= failover.BEFORE


async def _answers(database: Database) -> bool:
    try:
        async with database.connection(wait_seconds=1) as connection:
            return bool(await connection.fetchval("select true"))
    except Unavailable:
        return False


async def test_a_host_that_is_silent_does_not_keep_clients_from_the_next(database_url: str) -> None:
    with Proxy(database_url) as silent, Proxy(database_url) as answering:
        silent.block()
        url = answering.url.replace(
            f"127.0.0.1:{answering.port}", f"127.0.0.1:{silent.port},127.0.0.1:{answering.port}"
        )
        database = Database(url, "test", size=1)
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await _answers(database):
                    pass
            silent.unblock()
            answering.block()
            answering.freeze()
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not await _answers(database):
                    pass
            assert await _answers(database)
        finally:
            await database.close()


async def test_a_host_that_accepts_no_writes_is_not_used(database_url: str, database: Database) -> None:
    async with database.connection() as connection:
        name = await connection.fetchval("select current_database()")
        await connection.execute(f"alter database {name} set default_transaction_read_only = on")
    with Proxy(database_url) as first, Proxy(database_url) as second:
        url = first.url.replace(f"127.0.0.1:{first.port}", f"127.0.0.1:{first.port},127.0.0.1:{second.port}")
        other = Database(url, "test", size=1)
        try:
            with pytest.raises(Unavailable) as refused:
                async with other.connection():
                    pass
            assert why_down(refused.value) == "none of its hosts accepts writes: events cannot be stored"
        finally:
            await other.close()
