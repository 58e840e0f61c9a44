"""A primary that fails and a standby that takes its place; clients that know both."""

from __future__ import annotations

import asyncio
import json
import tempfile
import uuid
from functools import partial
from pathlib import Path

import httpx
import pytest
from chaos import failover
from chaos.members import is_ready, run, served
from chaos.proxy import Proxy
from chaos.replica import Pair, until

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


def _trouble(address: str) -> str:
    """What is wrong with the database, by a process that cannot store events; nothing if it says that it can."""
    found = httpx.get(f"{address}/readyz", timeout=30)
    return str(found.json()["checks"]["database"]) if found.status_code == 503 else ""


def _durability(url: str) -> str:
    """The check that fails in doctor."""
    checks = json.loads(run(url, "doctor", "--json").stdout)["checks"]
    return " ".join(check["detail"] for check in checks if check["name"] == "durability" and not check["is_ok"])


def _publish(address: str) -> httpx.Response:
    body = {"type": "a.b", "source": "test", "id": str(uuid.uuid4()), "payload": {}}
    return httpx.post(f"{address}/v1/events", json=body, timeout=PATIENCE_SECONDS)


def test_a_synchronous_standby_that_is_missing_or_silent_is_told(tmp_path: Path) -> None:
    """Every commit waits then: a publisher is answered nevertheless, readiness and doctor say why."""
    with tempfile.TemporaryDirectory(prefix="tidegate-standby-", ignore_cleanup_errors=True) as folder:
        pair = Pair(Path(folder), is_synchronous=True)
        try:
            with served(pair.url, tmp_path) as address:
                pair.standby.server.stop(immediate=True)
                until(lambda: "(0 of 1 connected)" in _trouble(address))
                assert "synchronous_standby_names" in _trouble(address)
                assert "commits wait for a synchronous standby (0 of 1 connected)" in _durability(pair.url)
                refused = _publish(address)
                assert refused.status_code == 503
                assert "Retry-After" in refused.headers

                pair.standby.server.start()
                until(lambda: is_ready(address))
                assert _durability(pair.url) == ""
                until(lambda: _publish(address).status_code == 202)

                pair.hold_back()
                assert _publish(address).status_code == 503
                until(lambda: "have waited for more than 3 s" in _trouble(address))
                assert "have waited for more than 3 s" in _durability(pair.url)
        finally:
            pair.stop()


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
