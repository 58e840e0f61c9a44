from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import World
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "app.py"
PATIENCE_SECONDS = 60


@pytest.fixture
async def effects(connection: Connection) -> Callable[[], Awaitable[list[tuple[Any, str]]]]:
    """What the workflows of `app.py` did: (run id, what), in order."""
    await connection.execute("create table effects (n bigserial primary key, run_id uuid, what text)")

    async def read() -> list[tuple[Any, str]]:
        return [(row[0], row[1]) for row in await connection.fetch("select run_id, what from effects order by n")]

    return read


async def eventually(database: Database, question: str, *arguments: Any) -> Any:
    """Ask the database until its answer is true; the question names what is waited for when it never is."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            async with database.connection() as connection:
                answer = await connection.fetchval(question, *arguments)
            if answer:
                return answer
            await asyncio.sleep(0.02)


@pytest.fixture
async def world(database: Database, clock: Clock) -> AsyncIterator[World]:
    made = World(database)
    yield made
    for runner in made.runners:
        await runner.stop(0)
