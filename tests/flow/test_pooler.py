"""Behind a pooler, on a server that does not wait for the disk by itself: what is accepted survives a crash."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest
from chaos import pooler
from chaos.proxy import Proxy

from tidegate.store import durability
from tidegate.store.db import Database


@pytest.mark.parametrize("kind", pooler.KINDS)
async def test_what_is_accepted_behind_a_pooler_survives_a_crash(kind: str) -> None:
    if not pooler.is_installed(kind):
        pytest.skip(f"{kind} is not installed")
    with tempfile.TemporaryDirectory(prefix="tidegate-pooler-", ignore_cleanup_errors=True) as folder:
        assert await asyncio.to_thread(pooler.lost, kind, Path(folder)) == (50, [])


async def test_a_session_has_what_was_asked_for_where_startup_parameters_are_dropped(database_url: str) -> None:
    with Proxy(database_url, strips=True) as proxy:
        database = Database(proxy.url, "test", size=1, lock_timeout_ms=123)
        try:
            async with database.connection() as connection:
                assert await connection.fetchval("select current_setting('lock_timeout')") == "123ms"
                assert await connection.fetchval("select current_setting('statement_timeout')") == "10s"
                assert durability.unsafe(await durability.settings(connection)) is None
                await connection.execute("set synchronous_commit = off")
                assert "synchronous_commit=off" in str(durability.unsafe(await durability.settings(connection)))
        finally:
            await database.close()
