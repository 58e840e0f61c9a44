"""Runs that hold their slots while they execute, let go one by one: what the tests of their lines share."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker
from tidegate import Context
from tidegate.flow.look.explain import Explanation, explain_any
from tidegate.flow.run.runner import Runner
from tidegate.model.trigger import Trigger
from tidegate.store import triggers
from tidegate.store.db import Connection, Database

PATIENCE_SECONDS = 30


class SlotScene:
    """Workflows whose functions begin, and go on when the test lets them: then they sleep a minute, and end when they
    are let go again. `order` has each beginning and resumption, by number."""

    def __init__(self, database: Database, connection: Connection, clock: Clock, world: World) -> None:
        self.database = database
        self.connection = connection
        self.clock = clock
        self.world = world
        self.worker = TriggerWorker(database)
        self.runners: list[Runner] = []
        self.order: list[int] = []
        self.executing: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._gates: defaultdict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(0))

    def workflow(self, name: str = "work", sleep: str = "1m", **options: Any) -> None:
        @self.world.app.workflow(on=name, name=name, **{"holds": "executing"} | options)
        async def work(ctx: Context, n: int, key: str = "") -> int:
            self.executing[key] += 1
            self.most[key] = max(self.most[key], self.executing[key])
            try:
                self.order.append(n)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    await self._gates[n].acquire()
                await ctx.sleep(sleep)
            finally:
                self.executing[key] -= 1
            return n

    async def start(self, workers: int = 1, **options: Any) -> None:
        for _ in range(workers):
            self.runners.append(await self.world.runner(**{"lease_ms": 3_600_000} | options))

    async def publish(self, *numbers: int, name: str = "work", **payload: Any) -> list[str]:
        return [await publish(self.connection, name, "shop", n=n, **payload) for n in numbers]

    async def turn(self, times: int = 3) -> None:
        """One look at everything, some times, with time for what executes to go on."""
        for _ in range(times):
            await self.worker.turn()
            for runner in self.runners:
                await runner.announce()
                await runner.run_once()
            await asyncio.sleep(0.01)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Turn until something holds."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not holds():
                await self.turn(1)

    async def begin(self, *numbers: int, **payload: Any) -> None:
        """Publish events whose runs begin, in order."""
        before = len(self.order)
        await self.publish(*numbers, **payload)
        await self.until(lambda: self.order[before:] == [*numbers])

    async def let_go(self, *numbers: int) -> None:
        """Let executing functions go on, to their sleep or their end, and wait until that is written."""
        claims = {n: (await self.run_of(n))["claim_generation"] for n in numbers}
        for n in numbers:
            self._gates[n].release()
        for n, generation in claims.items():
            async with asyncio.timeout(PATIENCE_SECONDS):
                while await self._is_held(n, generation):  # noqa: ASYNC110 - asks the database
                    await asyncio.sleep(0.005)

    async def _is_held(self, n: int, generation: int) -> bool:
        run = await self.run_of(n)
        return bool(run["status"] == "running" and run["claim_generation"] == generation)

    async def ask(self, question: str, *arguments: Any) -> Any:
        return await self.connection.fetchval(question, *arguments)

    async def run_of(self, n: int) -> Any:
        return await self.connection.fetchrow(
            "select * from tidegate.workflow_runs where parameters @> jsonb_build_object('n', $1::bigint) "
            " order by created_at desc limit 1", n,
        )  # fmt: skip

    async def explain(self, n: int) -> Explanation:
        return await explain_any(self.connection, str((await self.run_of(n))["id"]))

    async def trigger(self, workflow: str = "work") -> Trigger:
        return (await triggers.list_of_workflow(self.connection, workflow))[0]
