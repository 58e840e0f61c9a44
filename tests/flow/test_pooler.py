"""Behind a pooler, on a server that does not wait for the disk by itself: what is accepted survives a crash."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path

import asyncpg
import pytest
from chaos import pooler
from chaos.proxy import Proxy

from tidegate.store import durability, migrate
from tidegate.store.connect import Connector, NoSession, session_settings
from tidegate.store.db import Database


@pytest.mark.parametrize("kind", pooler.KINDS)
async def test_what_is_accepted_behind_a_pooler_survives_a_crash(kind: str) -> None:
    if not pooler.is_installed(kind):
        pytest.skip(f"{kind} is not installed")
    with tempfile.TemporaryDirectory(prefix="tidegate-pooler-", ignore_cleanup_errors=True) as folder:
        assert await asyncio.to_thread(pooler.lost, kind, Path(folder)) == (50, [])


@pytest.mark.parametrize("is_direct", [True, False], ids=["with a direct address", "without"])
async def test_everything_works_behind_a_pooler_that_keeps_no_sessions(is_direct: bool) -> None:
    if not pooler.is_installed(pooler.TRANSACTIONS):
        pytest.skip("pgbouncer is not installed")
    with tempfile.TemporaryDirectory(prefix="tidegate-pooler-", ignore_cleanup_errors=True) as folder:
        found = await asyncio.to_thread(partial(pooler.worked, Path(folder), is_direct=is_direct))
        logs = "".join(path.read_text() for path in Path(folder).glob("worker-*.log"))
    assert (found.accepted, found.missing, found.repeated) == (300, [], [])
    assert "succeeded" in found.explained
    fine = {"database": "ok", "schema": "ok", "durability": "ok"}
    if is_direct:
        assert (found.readiness, found.doctor) == (fine, {})
        assert "queue.listener" not in logs
    else:
        assert "TIDEGATE_DATABASE_DIRECT_URL" in found.readiness.pop("hints") and found.readiness == fine
        assert set(found.doctor) == {"sessions"} and "TIDEGATE_DATABASE_DIRECT_URL" in found.doctor["sessions"]
        assert logs.count("queue.listener_deaf") == 2, "each worker says once that it does not hear hints"


async def test_migrations_are_refused_behind_a_pooler_that_keeps_no_sessions(database_url: str, tmp_path: Path) -> None:
    if not pooler.is_installed(pooler.TRANSACTIONS):
        pytest.skip("pgbouncer is not installed")
    with pooler.pooled(pooler.TRANSACTIONS, database_url, tmp_path) as through:
        database = Database(through, "test", size=1)
        try:
            with pytest.raises(NoSession, match="TIDEGATE_DATABASE_DIRECT_URL"):
                await migrate.migrate(database)
        finally:
            await database.close()


async def test_behind_a_pooler_a_transaction_has_its_settings_and_leaves_none(
    database_url: str, tmp_path: Path
) -> None:
    if not pooler.is_installed(pooler.TRANSACTIONS):
        pytest.skip("pgbouncer is not installed")
    asked = "select current_setting('lock_timeout') || current_setting('statement_timeout')"
    with pooler.pooled(pooler.TRANSACTIONS, database_url, tmp_path) as through:
        database, other = Database(through, "test", size=2, lock_timeout_ms=123), await asyncpg.connect(through)
        try:
            assert await other.execute("set lock_timeout = '7s'; set synchronous_commit = off") == "SET"
            for one in (database.connection, database.transaction):
                async with one() as connection:
                    assert await connection.fetchval(asked) == "123ms10s"
                    assert durability.unsafe(await durability.settings(connection)) is None
            left = await other.fetchval("select current_setting('lock_timeout')")
            assert left == "7s", "what was set for one transaction is not found by other clients"
        finally:
            await other.close()
            await database.close()


async def test_connections_that_are_opened_at_once_prepare_no_statements_behind_such_a_pooler(
    database_url: str, tmp_path: Path
) -> None:
    """The first of them find out that there is a pooler, while the others are half open."""
    if not pooler.is_installed(pooler.TRANSACTIONS):
        pytest.skip("pgbouncer is not installed")
    with pooler.pooled(pooler.TRANSACTIONS, database_url, tmp_path) as through:
        connector = Connector(through, session_settings("test", 1000, 10.0), 10.0)
        opened = await asyncio.gather(*(connector.connect() for _ in range(20)))
        try:
            for n in range(5):
                found = await asyncio.gather(*(one.fetchval(f"select $1 + {n}", at) for at, one in enumerate(opened)))
                assert found == [at + n for at in range(20)]
        finally:
            for one in opened:
                one.terminate()


async def test_a_direct_address_of_another_database_is_noticed(database_url: str, empty_database_url: str) -> None:
    database = Database(database_url, "test", size=1, direct_url=empty_database_url)
    try:
        assert "same database" in str((await database.pooling()).lacking)
    finally:
        await database.close()


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


async def test_a_pooler_that_keeps_sessions_needs_no_direct_address(database_url: str, tmp_path: Path) -> None:
    if not pooler.is_installed("pgbouncer"):
        pytest.skip("pgbouncer is not installed")
    with pooler.pooled("pgbouncer", database_url, tmp_path) as through:
        database = Database(through, "test", size=2)
        try:
            found = await database.pooling()
            assert (found.is_pooled, found.is_tracked, found.lacking) == (True, False, None)
            listening = await database.dedicated()
            assert await listening.fetchval("select current_setting('statement_timeout')") == "10s"
            await listening.close()
        finally:
            await database.close()
