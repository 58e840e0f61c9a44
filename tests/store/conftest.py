"""Tests with one connection share a database and undo what they did; those that race have a database of their own."""

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.store.db import Connection, Database


@pytest.fixture(scope="session")
def shared_database_url(postgres: EmbeddedPostgres, template: str) -> str:
    async def make() -> None:
        admin = await asyncpg.connect(postgres.admin_url())
        await admin.execute(f"create database store_tests template {template} owner {ROLE}")
        await admin.close()

    asyncio.run(make())
    return postgres.url("store_tests")


@pytest.fixture
async def connection(shared_database_url: str) -> AsyncIterator[Connection]:
    """A transaction that is rolled back when the test ends, a moved clock included."""
    opened = await Database(shared_database_url, "test", size=1).dedicated()
    transaction = opened.transaction()
    await transaction.start()
    yield opened
    await transaction.rollback()
    await opened.close()
