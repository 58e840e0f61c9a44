from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import asyncpg
import pytest

from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.store.db import Database


@pytest.fixture(scope="session")
def quiet_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A migrated database that tests only read, for all of them."""

    async def admin(statement: str) -> None:
        connection = await asyncpg.connect(postgres.admin_url())
        try:
            await connection.execute(statement)
        finally:
            await connection.close()

    asyncio.run(admin(f"create database quiet template {template} owner {ROLE}"))
    yield postgres.url("quiet")
    asyncio.run(admin("drop database quiet with (force)"))


@pytest.fixture
async def quiet(quiet_url: str) -> AsyncIterator[Database]:
    """The database behind the queues under test; a queue asks it only who it is."""
    opened = Database(quiet_url, "test", size=4)
    yield opened
    await opened.close()
