from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import asyncpg
import pytest

from tests.processes import Process, api, worker
from tidegate.api.server import Api, Server, bind
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.settings import Settings

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "examples" / "demo.py"
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def shared_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A migrated database for a whole module."""
    name = f"shared_{next(_numbers)}"

    async def admin(statement: str) -> None:
        connection = await asyncpg.connect(postgres.admin_url())
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(admin(f"create database {name} template {template} owner {ROLE}"))
    yield postgres.url(name)
    asyncio.run(admin(f"drop database {name} with (force)"))


@pytest.fixture(scope="module")
def address(shared_url: str) -> Iterator[str]:
    """An API process for a whole module."""
    with api(shared_url) as (_, url):
        yield url


@pytest.fixture
async def served(database_url: str) -> AsyncIterator[tuple[Api, Server]]:
    """An API in this process, on its socket."""
    settings = Settings(database_url=database_url, port=0, auth="off")
    api = Api(settings)
    await api.open()
    server = Server(api.app, bind(settings), api.publish)
    await server.start()
    try:
        yield api, server
    finally:
        await server.stop()
        await api.close()


@pytest.fixture(scope="module")
def guarded(shared_url: str) -> Iterator[tuple[Process, str]]:
    """An API that always asks for a token."""
    with api(shared_url, TIDEGATE_AUTH="on") as running:
        yield running


@pytest.fixture(scope="module")
def url(guarded: tuple[Process, str]) -> str:
    """The address of that API."""
    return guarded[1]


@pytest.fixture(scope="module")
def demo(shared_url: str, address: str) -> Iterator[str]:
    """An API and a worker with the demo application; the API's address."""
    with worker(shared_url, DEMO):
        yield address


@pytest.fixture(scope="session", autouse=True)
def _close_http_clients() -> Iterator[None]:
    yield
    from tests.acceptance import test_hostile_input, test_publishing, test_sources

    for module in (test_hostile_input, test_publishing, test_sources):
        module._http.close()
