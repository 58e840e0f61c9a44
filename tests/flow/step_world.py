"""A world for tests of steps: an application, its worker turned by hand, and what its workflows did."""

from __future__ import annotations

import asyncio
from typing import Any

from tidegate import Tidegate
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.flow.run.runner import Runner
from tidegate.model.retry import RetryPolicy
from tidegate.store.db import Connection, Database

POLICY = RetryPolicy(base_ms=1000, factor=2, max_ms=8000, jitter_ratio=0, max_attempts=3)


class World:
    """An application, its worker turned by hand, and what its workflows did."""

    def __init__(self, database: Database) -> None:
        self.app = Tidegate()
        self.database = database
        self.done: list[str] = []
        self.dispatch = Dispatch(database, batch_size=500, after_launch=lambda: None)
        self.runners: list[Runner] = []

    async def runner(self, lease_ms: int = 60_000, concurrency: int = 10, policy: RetryPolicy = POLICY) -> Runner:
        definitions = await self.database.run(self.app.register)
        made = Runner(
            self.database, self.app.workflows, worker="test", concurrency=concurrency, lease_ms=lease_ms, policy=policy
        )
        made.serve(definitions)
        self.runners.append(made)
        return made

    async def turn(self, runner: Runner) -> None:
        """Decide what is new, run what is due, wait until nothing moves."""
        await self.dispatch.run_once()
        while await runner.run_once():
            await asyncio.wait_for(runner.idle(), 30)


async def the_run(connection: Connection) -> Any:
    return await connection.fetchrow("select * from tidegate.workflow_runs order by id limit 1")


async def the_steps(connection: Connection) -> dict[str, Any]:
    rows = await connection.fetch("select * from tidegate.workflow_run_steps order by created_at, id")
    return {row["name"]: row for row in rows}
