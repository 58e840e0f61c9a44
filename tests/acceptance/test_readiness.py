"""`/readyz` of real processes: each thing that the work needs is named, fails and comes back. No secret is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from tests.processes import api, run, worker
from tests.redis_server import RedisServer, RunningRedis
from tests.redis_server import client_fixture as client_fixture  # noqa: PLC0414 - a fixture
from tests.redis_server import server_fixture as server_fixture  # noqa: PLC0414 - a fixture
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.store import migrate
from tidegate.store.db import Database

APP = "from tidegate import Tidegate\n\napp = Tidegate()\n"
PATIENCE_SECONDS = 60
FINE = {"database": "ok", "schema": "ok", "durability": "ok"}


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """A server that these tests may stop and misconfigure."""
    with tempfile.TemporaryDirectory(prefix="tidegate-ready-", ignore_cleanup_errors=True) as folder:
        server = EmbeddedPostgres(Path(folder))
        server.start()

        async def make() -> None:
            database = Database(server.url(), "test", size=1)
            await migrate.migrate(database)
            await database.close()

        asyncio.run(make())
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture
def app(tmp_path: Path) -> Path:
    path = tmp_path / "app.py"
    path.write_text(APP)
    return path


def with_password(server: EmbeddedPostgres) -> str:
    return server.url().replace(f"{ROLE}@", f"{ROLE}:hunter2@", 1)


@contextlib.contextmanager
def both(url: str, app: Path, **settings: str) -> Iterator[list[str]]:
    """The addresses of an API and of a worker's port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with api(url, **settings) as (_, address), worker(url, app, TIDEGATE_METRICS_PORT=str(port), **settings):
        yield [address, f"http://127.0.0.1:{port}"]


def execute(server: EmbeddedPostgres, *statements: str) -> None:
    async def go() -> None:
        connection = await asyncpg.connect(server.admin_url(ROLE))
        for statement in statements:
            await connection.execute(statement)
        await connection.close()

    asyncio.run(go())


def until(addresses: list[str], is_so: Callable[[int, Any], bool]) -> Any:
    """The last answer, once every process says so."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    found: Any = None
    for address in addresses:
        while True:
            response = httpx.get(f"{address}/readyz", timeout=30)
            found = response.json()
            assert response.headers["content-type"].startswith("application/json")
            assert "hunter2" not in response.text and "://" not in response.text
            if is_so(response.status_code, found):
                break
            assert time.monotonic() < deadline, f"{address} still says {response.status_code} {found}"
            time.sleep(0.1)
        assert httpx.get(f"{address}/livez").json() == {"status": "ok"}  # whatever readiness says
    return found


def is_ready(code: int, found: Any) -> bool:
    return code == 200 and found["status"] == "ok" and found["checks"] == FINE


def test_a_database_that_is_stopped_and_started(own_postgres: EmbeddedPostgres, app: Path) -> None:
    with both(with_password(own_postgres), app) as addresses:
        until(addresses, is_ready)
        own_postgres.stop()
        try:
            found = until(addresses, lambda code, found: code == 503 and found["status"] == "unavailable")
            assert found["checks"]["database"] not in ("ok", "") and found["checks"]["schema"].startswith("unknown")
            assert str(own_postgres.data) not in str(found)
        finally:
            own_postgres.start()
        until(addresses, is_ready)


def test_settings_that_may_lose_events(own_postgres: EmbeddedPostgres, app: Path) -> None:
    with both(own_postgres.url(), app) as addresses:
        until(addresses, is_ready)
        execute(own_postgres, "alter system set fsync = off", "select pg_reload_conf()")
        try:
            found = until(addresses, lambda code, found: code == 503 and found["checks"]["durability"] != "ok")
            assert "fsync=off" in found["checks"]["durability"] and found["checks"]["schema"] == "ok"
            refused = run("serve", "--port", "0", env={"TIDEGATE_DATABASE_URL": own_postgres.url()})
            assert refused.returncode != 0 and "fsync=off" in refused.stderr
            with both(own_postgres.url(), app, TIDEGATE_ALLOW_UNSAFE_DURABILITY="true") as allowed:
                found = until(allowed, lambda code, found: code == 200 and found["status"] == "degraded")
                assert "TIDEGATE_ALLOW_UNSAFE_DURABILITY" in found["checks"]["durability"]
        finally:
            execute(own_postgres, "alter system reset fsync", "select pg_reload_conf()")
        until(addresses, is_ready)


def test_a_schema_that_does_not_fit(own_postgres: EmbeddedPostgres, app: Path) -> None:
    with both(own_postgres.url(), app) as addresses:
        until(addresses, is_ready)
        execute(
            own_postgres,
            "create table public.kept as select * from tidegate.schema_migrations order by version desc limit 1",
            "delete from tidegate.schema_migrations where version = (select version from public.kept)",
        )
        try:
            found = until(addresses, lambda code, found: code == 503 and found["checks"]["schema"] != "ok")
            assert "tidegate migrate" in found["checks"]["schema"] and found["checks"]["database"] == "ok"
        finally:
            execute(
                own_postgres,
                "insert into tidegate.schema_migrations select * from public.kept",
                "drop table public.kept",
            )
        until(addresses, is_ready)


def test_a_database_that_cannot_be_written(own_postgres: EmbeddedPostgres, app: Path) -> None:
    with both(own_postgres.url(), app) as addresses:
        execute(own_postgres, "alter system set default_transaction_read_only = on", "select pg_reload_conf()")
        try:
            found = until(addresses, lambda code, found: code == 503)
            assert "read-only" in found["checks"]["database"]
        finally:
            execute(
                own_postgres,
                "set default_transaction_read_only = off",
                "alter system reset default_transaction_read_only",
                "select pg_reload_conf()",
            )
        until(addresses, is_ready)


async def test_redis_that_is_stopped_or_may_evict(
    database_url: str, app: Path, server: RedisServer | RunningRedis, client: Any
) -> None:
    def says(status: str, redis: str) -> Callable[[int, Any], bool]:
        return lambda code, found: code == 200 and found["status"] == status and redis in found["checks"]["redis"]

    queue = {"TIDEGATE_QUEUE": "bullmq", "TIDEGATE_REDIS_URL": server.url}
    with both(database_url, app, **queue) as addresses:
        until(addresses, says("ok", "ok"))
        await client.config_set("maxmemory-policy", "allkeys-lru")
        until(addresses, says("degraded", "allkeys-lru"))
        await client.config_set("maxmemory-policy", "noeviction")
        until(addresses, says("ok", "ok"))
        await client.config_set("maxmemory", "1")
        until(addresses, says("degraded", "full"))
        await client.config_set("maxmemory", "0")
        until(addresses, says("ok", "ok"))
        await asyncio.to_thread(server.stop)
        until(addresses, says("degraded", "does not answer"))
        await asyncio.to_thread(server.start)
        until(addresses, says("ok", "ok"))


def test_only_three_paths_are_served_by_a_worker(own_postgres: EmbeddedPostgres, app: Path) -> None:
    with both(own_postgres.url(), app) as (_, own):
        assert httpx.get(f"{own}/").status_code == 404
        assert httpx.post(f"{own}/readyz").status_code == 405
        assert httpx.get(f"{own}/metrics").status_code == 200


@pytest.mark.parametrize(
    ("breaks", "mends", "cause"),
    [
        (
            "revoke insert on tidegate.event_inbox from tidegate",
            "grant insert on tidegate.event_inbox to tidegate",
            "this role may not",
        ),
        (
            # As a full disk answers; the short way to one is a trigger.
            "create function public.full() returns trigger language plpgsql as $$ begin raise exception 'no space' "
            "using errcode = 'disk_full'; end $$; create trigger full_disk before insert on tidegate.workflow_events "
            "for each row execute function public.full()",
            "drop trigger full_disk on tidegate.workflow_events; drop function public.full()",
            "its disk is full",
        ),
    ],
    ids=["rights", "disk"],
)
def test_it_is_not_ready_while_every_publish_is_refused(
    own_postgres: EmbeddedPostgres, app: Path, breaks: str, mends: str, cause: str
) -> None:
    """The database answers, and yet stores nothing."""
    with both(own_postgres.url(), app) as addresses:
        until(addresses, is_ready)
        execute(own_postgres, breaks)
        try:
            found = until(addresses, lambda code, found: code == 503)
            assert cause in found["checks"]["database"] and found["checks"]["schema"] == "ok"
        finally:
            execute(own_postgres, mends)
        until(addresses, is_ready)
        assert stored(own_postgres) == 0  # asking leaves nothing behind


def stored(server: EmbeddedPostgres) -> int:
    async def count() -> int:
        connection = await asyncpg.connect(server.url())
        found: int = await connection.fetchval("select count(*) from tidegate.workflow_events")
        await connection.close()
        return found

    return asyncio.run(count())


def test_no_connection_left(app: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="tidegate-ready-", ignore_cleanup_errors=True) as folder:
        server = EmbeddedPostgres(Path(folder), {"max_connections": "12", "superuser_reserved_connections": "3"})
        url = server.start()
        try:
            assert run("migrate", env={"TIDEGATE_DATABASE_URL": url}).returncode == 0
            with api(url) as (_, address):
                with_all_taken(url, address)
                until([address], is_ready)
        finally:
            server.stop()


def with_all_taken(url: str, address: str) -> None:
    """Take every connection, and those that the API gives up, until it says so."""

    async def take() -> None:
        taken = []
        try:
            while httpx.get(f"{address}/readyz", timeout=30).status_code == 200:
                with contextlib.suppress(asyncpg.TooManyConnectionsError):
                    taken.append(await asyncpg.connect(url))
                admin = await asyncpg.connect(url.replace(f"{ROLE}@", "postgres@", 1))
                await admin.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity where application_name like 'tidegate-%'"
                )
                await admin.close()
            assert "no connection left" in httpx.get(f"{address}/readyz", timeout=30).json()["checks"]["database"]
        finally:
            for connection in taken:
                await connection.close()

    asyncio.run(take())
