"""The stages that decide and run, turned by hand on a real database: what the trigger tests share."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from tidegate.flow.decide.batch import Batch
from tidegate.flow.decide.dispatch import Dispatch, DispatchCounts
from tidegate.flow.decide.match import Matcher
from tidegate.flow.hold.delivery_plan import DeliveryPlans, DeliveryReplan
from tidegate.flow.hold.delivery_retry import DeliveryRetry
from tidegate.flow.hold.event_plan import EventPlans, EventReplan
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.flow.run import finish
from tidegate.model.retry import RetryPolicy
from tidegate.model.run import FinishedRun, RunStatus
from tidegate.model.source import BreakerPolicy
from tidegate.model.trigger import TriggerSpec
from tidegate.store import locks, runs, triggers
from tidegate.store.db import Connection, Database
from tidegate.store.locks import Unlocked

POLICY = RetryPolicy(base_ms=1000, factor=2, max_ms=8000, jitter_ratio=0, max_attempts=5, max_age_ms=3_600_000)
BREAKER = BreakerPolicy(threshold=3, window_ms=60_000, pause_ms=10_000)


class TriggerWorker:
    """One worker's stages; `turn` is one look at everything."""

    def __init__(self, database: Database, policy: RetryPolicy = POLICY, batch_size: int = 500) -> None:
        self.database = database
        matcher = Matcher()
        batch = Batch(BREAKER, matcher=matcher, trigger_breaker=BREAKER, trigger_retry=policy)
        self.dispatch = Dispatch(database, batch_size=batch_size, after_launch=lambda: None, batch=batch)
        self.retry = EventRetry(database, batch_size=batch_size, after_launch=lambda: None, batch=batch)
        self.replan = EventReplan(database, EventPlans(policy))
        self.delivery_retry = DeliveryRetry(
            database, batch_size=batch_size, after_launch=lambda: None, matcher=matcher, breaker=BREAKER, policy=policy
        )
        self.delivery_replan = DeliveryReplan(database, DeliveryPlans(policy))

    async def turn(self) -> DispatchCounts:
        outcome = await self.dispatch.run_once()
        await self.replan.run_once()
        await self.retry.run_once()
        await self.delivery_replan.run_once()
        await self.delivery_retry.run_once()
        return outcome

    async def end_runs(
        self, count: int = 1, status: RunStatus = "succeeded", *, ids: Sequence[uuid.UUID] | None = None, **fields: Any
    ) -> finish.Freed:
        """Claim the oldest pending runs (or those given) and end them."""

        async def work(connection: Connection) -> finish.Freed:
            definitions = [d.id for d in await triggers.list_definitions(connection)]
            limit = count if ids is None else 1000
            claimed = await runs.claim_due(
                connection, definitions=definitions, limit=limit, worker="test", lease_ms=60_000
            )
            mine = [run for run in claimed if ids is None or run.id in ids]
            await runs.release(connection, [run for run in claimed if run not in mine])
            finished = [
                FinishedRun(
                    id=run.id,
                    claim_generation=run.claim_generation,
                    status=status,
                    trigger_id=run.trigger_id,
                    concurrency_key=run.concurrency_key,
                    is_probe=run.is_probe,
                    **fields,
                )
                for run in mine
            ]
            return await finish.end_held(connection, finished, breaker=BREAKER, also=also)

        also: frozenset[uuid.UUID] = frozenset()
        while True:
            try:
                return await self.database.run(work)
            except Unlocked as exc:
                also |= exc.trigger_ids


async def make_trigger(database: Database, slug: str = "tick", **fields: Any) -> uuid.UUID:
    """A workflow with one trigger for events of type `tick`; its id."""

    async def work(connection: Connection) -> uuid.UUID:
        await locks.exclude_triggers(connection)
        definition = await triggers.upsert_definition(
            connection, slug=slug, kind="python", parameters=["*"], config={}, actor="test"
        )
        spec = TriggerSpec(**{"name": "main", "event_type": "tick"} | fields)
        await triggers.upsert_trigger(connection, definition, spec, "test")
        return (await triggers.list_of_workflow(connection, slug))[0].id

    return await database.run(work)


async def statuses(connection: Connection) -> dict[str, int]:
    """How many deliveries there are in each status."""
    rows = await connection.fetch("select status, count(*) from tidegate.workflow_trigger_deliveries group by 1")
    return {row[0]: row[1] for row in rows}


async def held(connection: Connection) -> list[Any]:
    """Waiting deliveries in the order of arrival."""
    return list(
        await connection.fetch(
            "select * from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled' "
            "order by ingress_sequence, trigger_id"
        )
    )


async def launches(connection: Connection, trigger_id: uuid.UUID | None = None) -> list[datetime]:
    """When deliveries were launched, in order."""
    rows = await connection.fetch(
        "select launched_at from tidegate.workflow_trigger_deliveries where status = 'launched' "
        "and ($1::uuid is null or trigger_id = $1) order by 1",
        trigger_id,
    )
    return [row[0] for row in rows]
