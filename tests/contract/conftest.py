from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.conftest import cloned
from tidegate.embedded import EmbeddedPostgres
from tidegate.store.db import Database


@pytest.fixture(scope="session")
def quiet_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A migrated database that tests only read, for all of them."""
    with cloned(postgres, template, "quiet") as url:
        yield url


@pytest.fixture
async def quiet(quiet_url: str) -> AsyncIterator[Database]:
    """The database behind the queues under test; a queue asks it only who it is."""
    opened = Database(quiet_url, "test", size=4)
    yield opened
    await opened.close()
