"""Connections that fall silent, neither answering nor closing; judged by what producers and effects show."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from functools import partial
from typing import Any

import httpx
import pytest
from chaos.proxy import Proxy

from tests.flow.conftest import APP, PATIENCE_SECONDS, eventually
from tests.flow.test_ingest import event
from tests.processes import api, worker
from tidegate.errors import Unavailable
from tidegate.flow.accept.ingest import Ingest
from tidegate.queue import postgres
from tidegate.queue.port import TOPICS
from tidegate.queue.postgres import PostgresQueue
from tidegate.store import db
from tidegate.store.db import Connection, Database

BACK_SECONDS = 10  # the promise: from when new connections work until the first event is accepted


async def until(question: Callable[[], Awaitable[bool]]) -> None:
    """Ask until it is so."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            if await question():
                return
            await asyncio.sleep(0.05)


async def is_accepted(client: httpx.AsyncClient, key: str) -> bool:
    event = {"type": "work.quick", "source": "test", "id": key, "payload": {}}
    try:
        return (await client.post("/v1/events", json=event)).status_code in (200, 202)
    except httpx.HTTPError:
        return False


async def is_ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/readyz")).status_code == 200


@contextlib.asynccontextmanager
async def published(client: httpx.AsyncClient) -> AsyncIterator[list[tuple[str, float]]]:
    """Publishes all the time, each event until it is accepted; (key, when it was)."""
    accepted: list[tuple[str, float]] = []
    stopping = asyncio.Event()

    async def one(producer: int) -> None:
        number = 0
        while not stopping.is_set():
            key = f"{producer}-{number}"
            await until(partial(is_accepted, client, key))
            accepted.append((key, time.monotonic()))
            number += 1
            await asyncio.sleep(0.1)

    producers = [asyncio.create_task(one(n)) for n in range(4)]
    try:
        yield accepted
    finally:
        stopping.set()
        await asyncio.gather(*producers)


@pytest.mark.parametrize("is_blocked", [False, True], ids=["new connections work", "and new ones too, for a while"])
async def test_publishing_and_runs_go_on_after_connections_fell_silent(
    database: Database,
    database_url: str,
    effects: Callable[[], Awaitable[list[tuple[Any, str]]]],
    is_blocked: bool,
) -> None:
    with (
        Proxy(database_url) as proxy,
        api(proxy.url, TIDEGATE_AUTH="off") as (_, address),
        worker(proxy.url, APP, EFFECTS_URL=database_url) as process,
    ):
        async with httpx.AsyncClient(base_url=address, timeout=60) as client, published(client) as accepted:
            await eventually(database, "select count(*) > 20 from effects")
            if is_blocked:
                proxy.block()
            assert proxy.freeze() >= 3
            if is_blocked:
                await until(lambda: is_not(is_ready(client)))  # it says so while nothing can be stored
                proxy.unblock()
            back_at = time.monotonic()
            seen = len(accepted)
            await until(lambda: some(at > back_at for _, at in accepted[seen:]))
            assert next(at for _, at in accepted[seen:] if at > back_at) - back_at < BACK_SECONDS
            await until(lambda: is_ready(client))
            done = await database_value(database, "select count(*) from effects")
            await eventually(database, "select count(*) > $1 from effects", done + 20)
        keys = [key for key, _ in accepted]
        # Nothing that was accepted is lost: each has its run, and each run its effects.
        await eventually(
            database, "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'", len(keys)
        )
        assert process.output.count("Traceback") == 0
    async with database.connection() as connection:
        stored = await connection.fetch("select external_id from tidegate.workflow_events")
        runs = {row["id"] for row in await connection.fetch("select id from tidegate.workflow_runs")}
    assert sorted(row[0] for row in stored) == sorted(keys)
    assert {run for run, _ in await effects()} == runs


async def is_not(question: Awaitable[bool]) -> bool:
    return not await question


async def some(found: Iterable[bool]) -> bool:
    return any(found)


async def database_value(database: Database, question: str) -> Any:
    async with database.connection() as connection:
        return await connection.fetchval(question)


@pytest.mark.parametrize("way", ["connection", "transaction"])
async def test_a_statement_that_is_not_answered_ends_and_its_pool_is_replaced(database_url: str, way: str) -> None:
    with Proxy(database_url) as proxy:
        database = Database(proxy.url, "test", size=3, statement_seconds=0.2)
        try:
            async with database.connection() as one, database.connection() as other:
                pids = {await one.fetchval("select pg_backend_pid()"), await other.fetchval("select pg_backend_pid()")}
            proxy.freeze()
            with pytest.raises(Unavailable, match="no answer within"):
                async with getattr(database, way)() as connection:
                    await connection.fetchval("select 1")
            async with getattr(database, way)() as connection:  # at once: none of the others is tried first
                assert await connection.fetchval("select pg_backend_pid()") not in pids
        finally:
            await database.close()


@pytest.mark.parametrize("where", ["between statements", "within a statement"])
async def test_the_server_lets_go_of_the_locks_of_a_transaction_that_fell_silent(
    database: Database, database_url: str, connection: Connection, where: str
) -> None:
    await connection.execute("create table locked (id int primary key); insert into locked values (1)")
    with Proxy(database_url) as proxy:
        through = Database(proxy.url, "test", size=1, statement_seconds=0.2)
        try:
            with pytest.raises(Unavailable, match="no answer within"):
                async with through.transaction() as silent:
                    used: Any = silent
                    await used.fetchval("select id from locked for update")
                    if where == "within a statement":  # of which the server has got the first part
                        await used.prepare("select 2")
                    proxy.freeze()
                    await silent.fetchval("select 1")
            await eventually(database, "select count(*) = 1 from (select from locked for update skip locked) as free")
        finally:
            await through.close()


async def test_a_caller_that_gives_up_does_not_wait_for_a_silent_connection(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(db, "RELEASE_SECONDS", 0.1)
    with Proxy(database_url) as proxy:
        database = Database(proxy.url, "test", size=1)
        try:
            async with database.connection() as connection:
                await connection.fetchval("select 1")
            proxy.freeze()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1), database.transaction() as connection:
                    await connection.fetchval("select 1")
            async with database.connection() as connection:
                assert await connection.fetchval("select 1") == 1
        finally:
            await database.close()


async def test_events_whose_commit_was_not_answered_are_accepted_and_stored_once(
    database_url: str, connection: Connection
) -> None:
    with Proxy(database_url) as proxy:
        through = Database(proxy.url, "test", size=1, statement_seconds=0.3)
        ingest = Ingest(through, max_waiting=100, after_commit=lambda: None)
        try:
            await ingest.accept([event()])
            proxy.freeze(answers_only=True)  # it is stored, but nobody says so
            answers = await asyncio.gather(*(ingest.accept([event(), event()]) for _ in range(3)))
        finally:
            await ingest.close()
            await through.close()
    assert {one.status for answer in answers for one in answer} == {"accepted"}
    ids = {row["id"] for row in await connection.fetch("select id from tidegate.workflow_events")}
    assert len(ids) == 7 and {one.id for answer in answers for one in answer} < ids
    assert await connection.fetchval("select count(*) from tidegate.event_inbox") == 7


@pytest.mark.parametrize("is_suspended", [False, True], ids=["cut off", "and suspended"])
async def test_a_worker_that_is_cut_off_leaves_its_functions_by_its_own_clock(
    database_url: str,
    database: Database,
    connection: Connection,
    effects: Callable[[], Awaitable[list[tuple[Any, str]]]],
    is_suspended: bool,
) -> None:
    settings = {"TIDEGATE_LEASE_MS": "6000", "EFFECTS_URL": database_url}
    await connection.execute("select tidegate.publish('work.endless', 'test')")
    with Proxy(database_url) as proxy, worker(proxy.url, APP, WORKER_NAME="first", **settings) as first:
        await eventually(database, "select count(*) > 1 from effects")
        with worker(database_url, APP, WORKER_NAME="second", **settings):
            proxy.block()
            assert proxy.freeze() >= 2
            if is_suspended:
                first.signal(signal.SIGSTOP)
            await eventually(database, "select count(*) > 3 from effects where what = 'second works'")
            if is_suspended:
                first.signal(signal.SIGCONT)
            await eventually(database, "select count(*) = 1 from effects where what = 'first leaves'")
            first.wait_for_line("run.lease_lost")
    seen = [what for _, what in await effects()]
    assert "first works" not in seen[seen.index("first leaves") :]
    if not is_suspended:  # at no time were there two
        assert seen.index("first leaves") < seen.index("second works")


async def test_a_listener_that_fell_silent_is_replaced(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_ALIVE_SECONDS", 0.1)
    with Proxy(database_url) as proxy:
        listening = Database(proxy.url, "test", size=1, statement_seconds=0.2)
        database = Database(database_url, "test", size=1)
        queue, sender = PostgresQueue(listening), PostgresQueue(database)
        # The question that shows it to be alive: so it listens to all topics.
        asks = f"query = 'listen tidegate_{TOPICS[0]}' and datname = current_database() and pid <> all ($1::int[])"
        listens = f"select count(*) = 1 from pg_stat_activity where {asks}"
        try:
            queue.start_listening()
            await eventually(database, listens, [])
            async with database.connection() as connection:
                silent = [row[0] for row in await connection.fetch("select pid from pg_stat_activity")]
            assert proxy.freeze() == 1
            await eventually(database, listens, silent)
            queue.wake("runs").clear()
            sender.hint("runs")
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert await queue.wake("runs").wait()
        finally:
            await queue.close()
            await sender.close()
            await listening.close()
            await database.close()


async def test_sockets_are_watched_by_the_kernel(database_url: str) -> None:
    with Proxy(database_url) as proxy:
        database = Database(proxy.url, "test", size=1)
        try:
            async with database.connection() as connection:
                used: Any = connection
                found = used._transport.get_extra_info("socket")
                assert found.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 10_000
                assert found.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 5
        finally:
            await database.close()
