"""The pool: what a dying server leaves behind does not stay in it."""

from __future__ import annotations

import asyncpg
import pytest

from tidegate.errors import Unavailable
from tidegate.store.db import Database


@pytest.mark.parametrize("way", ["connection", "transaction"])
async def test_a_broken_connection_does_not_go_back_to_the_pool(database_url: str, way: str) -> None:
    database = Database(database_url, "test", size=1)
    try:
        pids = []
        for is_broken in (True, False):
            try:
                async with getattr(database, way)() as connection:
                    pids.append(await connection.fetchval("select pg_backend_pid()"))
                    if is_broken:
                        raise asyncpg.InternalClientError("cannot switch to state 15; another operation is in progress")
            except Unavailable:
                assert is_broken
        assert pids[0] != pids[1]
    finally:
        await database.close()
