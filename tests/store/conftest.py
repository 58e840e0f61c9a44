"""Tests with one connection share a database and undo what they did; those that race have a database of their own."""

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conftest import cloned
from tidegate.embedded import EmbeddedPostgres
from tidegate.store.db import Connection, Database


@pytest.fixture(scope="session")
def shared_database_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    with cloned(postgres, template, "store_tests") as url:
        yield url


@pytest.fixture
async def connection(shared_database_url: str) -> AsyncIterator[Connection]:
    """A transaction that is rolled back when the test ends, a moved clock included."""
    opened = await Database(shared_database_url, "test", size=1).dedicated()
    transaction = opened.transaction()
    await transaction.start()
    yield opened
    await transaction.rollback()
    await opened.close()
