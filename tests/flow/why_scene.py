"""A scene for questions "why did it not run?": an application, the stages of a worker turned by hand, and a clock."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from tests.conftest import Clock
from tests.flow.step_world import World
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker
from tidegate import Context
from tidegate.flow.keep.replay import Replay
from tidegate.flow.look.explain import Explanation, explain_any
from tidegate.flow.run.runner import Runner
from tidegate.model.ids import DefinitionId
from tidegate.model.run import ClaimedRun
from tidegate.store import runs, triggers, workers
from tidegate.store.db import Connection, Database

HOST = "host:1"


class Scene:
    """Builds a situation with the product's own verbs; `explain` is the one call that answers."""

    def __init__(self, database: Database, connection: Connection, clock: Clock, world: World) -> None:
        self.database, self.connection, self.clock, self.world = database, connection, clock, world
        self.app = world.app
        self.stages = TriggerWorker(database)
        self._runner: Runner | None = None

    def workflow(self, on: str = "order.created", **options: Any) -> Callable[[Any], Any]:
        return self.app.workflow(on=on, **options)

    def idle(self, name: str = "fulfil", on: str = "order.created", **options: Any) -> None:
        """A workflow that does nothing."""

        async def nothing(ctx: Context) -> str:
            return "done"

        self.app.workflow(on=on, name=name, **options)(nothing)

    async def register(self) -> None:
        await self.database.run(self.app.register)
        self._runner = None  # the next one has the code that was added

    async def publish(self, event_type: str = "order.created", source: str = "shop", **payload: Any) -> str:
        return await publish(self.connection, event_type, source, **payload)

    async def decide(self) -> None:
        """One look at everything that decides; no run is executed."""
        await self.stages.turn()

    async def execute(self) -> None:
        """Execute what is due, until nothing moves."""
        if self._runner is None:
            self._runner = await self.world.runner()
        await self.decide()
        await self.world.turn(self._runner)

    async def replay_due(self) -> None:
        await Replay(self.database, batch_size=10).run_once()

    async def alive(
        self,
        name: str = HOST,
        slots: int = 2,
        workflows: Sequence[str] | None = None,
        every_ms: int = 3_600_000,
        **share: Any,
    ) -> None:
        """A worker's heartbeat."""
        known = {one.slug: one.id for one in await triggers.list_definitions(self.connection)}
        wanted = known.values() if workflows is None else [known[slug] for slug in workflows]
        await workers.heartbeat(self.connection, name, list(wanted), slots, every_ms, **share)

    async def claim(self, worker: str = HOST, limit: int = 1, lease_ms: int = 60_000) -> list[ClaimedRun]:
        """A worker claims due runs, and executes them for as long as the scene lasts."""
        known: list[DefinitionId] = [one.id for one in await triggers.list_definitions(self.connection)]
        async with self.database.transaction() as connection:
            return await runs.claim_due(connection, definitions=known, limit=limit, worker=worker, lease_ms=lease_ms)

    async def ask(self, question: str, *arguments: Any) -> Any:
        return await self.connection.fetchval(question, *arguments)

    async def run_id(self) -> uuid.UUID:
        found: uuid.UUID = await self.ask("select id from tidegate.workflow_runs order by created_at, id limit 1")
        return found

    async def trigger_id(self) -> Any:
        return await self.ask("select id from tidegate.workflow_event_triggers order by created_at limit 1")

    async def delivery_id(self, event_id: str) -> Any:
        return await self.ask(
            "select id from tidegate.workflow_trigger_deliveries where event_id = $1::text::uuid", event_id
        )

    async def explain(self, given: object) -> Explanation:
        return await explain_any(self.connection, str(given))


Build = Callable[[Scene], Awaitable[object]]


class Case(NamedTuple):
    """A situation: how it is built (it returns the id to ask for), and the whole answer. `seconds` is `until` as
    seconds after the scene's start; None: it must be null."""

    build: Build
    state: str
    says: tuple[str, ...]
    waits_for: str | None
    seconds: float | None


CASES: list[Case] = []


def case(
    state: str, *says: str, waits_for: str | None = None, seconds: float | None = None
) -> Callable[[Build], Build]:
    """Add a situation to the table. `state` is empty for an event without an outcome."""

    def add(build: Build) -> Build:
        CASES.append(Case(build, state, says, waits_for, seconds))
        return build

    return add
