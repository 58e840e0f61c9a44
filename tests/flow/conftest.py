from __future__ import annotations

import asyncio
import random
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


# How much later one side of a race begins than the other. Most rounds lie within the first span, in which either side
# may win on a machine that is not busy; some lie within the second, so that each side wins some on any machine.
CLOSE_SECONDS, APART_SECONDS = 0.006, 0.04


async def race(one: Callable[[], Awaitable[str]], *others: Callable[[], Awaitable[Any]]) -> str:
    """Let one thing happen while others do, either side a little earlier; what the one returns."""
    late_by = random.uniform(-1, 1) * random.choice((CLOSE_SECONDS, CLOSE_SECONDS, APART_SECONDS))

    async def after(delay: float, begin: Callable[[], Awaitable[Any]]) -> Any:
        await asyncio.sleep(delay)
        return await begin()

    answers = await asyncio.gather(after(max(late_by, 0), one), *(after(max(-late_by, 0), each) for each in others))
    return str(answers[0])


@pytest.fixture
async def world(database: Database, clock: Clock) -> AsyncIterator[World]:
    made = World(database)
    yield made
    for runner in made.runners:
        await runner.stop(0)
