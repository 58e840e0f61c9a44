"""Retention against operators: what is resumed, repeated or replayed while its history is being removed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import World, eventually
from tests.flow.step_world import the_run
from tests.flow.test_dispatch import publish
from tests.flow.test_prune import DAY_MS, WEEK, by_rows
from tidegate import Context
from tidegate.errors import Conflict, NotFound
from tidegate.flow import control
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.flow.keep.prune import Prune
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import retention
from tidegate.store.db import Connection, Database

__all__ = ["by_rows"]


async def finished_run(connection: Connection, clock: Clock, world: World, status: str) -> Any:
    """A run that ended eight days ago."""

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        world.done.append("begun")
        if status == "cancelled" and len(world.done) == 1:
            await ctx.sleep("1h")

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    if status == "cancelled":
        await control.cancel_run(world.database, run["id"], "ops", TRIGGER_BREAKER)
    await clock.advance(8 * DAY_MS)
    return runner


@pytest.mark.parametrize("verb", ["rerun", "retry"])
@pytest.mark.usefixtures("by_rows")
async def test_a_run_that_is_resumed_while_it_is_pruned_is_executed_or_refused(
    database: Database, connection: Connection, clock: Clock, world: World, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    runner = await finished_run(connection, clock, world, "cancelled" if verb == "retry" else "succeeded")
    run = await the_run(connection)
    calls: list[asyncio.Task[Any]] = []
    delete_really = retention.delete_events

    async def delete_events(pruning: Connection, ids: Sequence[Any]) -> dict[str, int]:
        call = control.rerun_run if verb == "rerun" else control.retry_run
        calls.append(asyncio.create_task(call(database, run["id"], "ops")))
        waits = eventually(database, "select exists (select from pg_locks where not granted)")
        waiting = asyncio.create_task(waits)
        await asyncio.wait([calls[0], waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        return await delete_really(pruning, ids)

    monkeypatch.setattr(retention, "delete_events", delete_events)
    await Prune(database, WEEK).run()
    [outcome] = await asyncio.gather(*calls, return_exceptions=True)
    await world.turn(runner)
    if isinstance(outcome, BaseException):
        assert isinstance(outcome, (Conflict, NotFound)), outcome
        assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 0
        assert world.done == ["begun"]
    else:
        assert world.done == ["begun", "begun"]


@pytest.mark.parametrize("dropped", ["workflow_runs", "workflow_trigger_deliveries"])
async def test_an_event_is_not_replayed_while_its_day_is_being_dropped(
    database: Database, connection: Connection, clock: Clock, world: World, dropped: str
) -> None:
    """A worker that died between two tables of the day: what the event has launched is not known any more."""
    await clock.advance((datetime.now(UTC) - clock.now).total_seconds() * 1000)
    runner = await finished_run(connection, clock, world, "succeeded")
    event_id = (await the_run(connection))["event_id"]
    day = await connection.fetchval("select (tidegate.now() at time zone 'UTC')::date - 8")
    for table in await retention.day_tables(connection):
        assert await retention.drop_day(connection, table, day, older_seconds=3 * 86_400) is not None
        if table == dropped:
            break
    with pytest.raises(Conflict, match="is being removed"):
        await control.replay_event(database, event_id, "ops")
    await EventRetry(database, batch_size=10, after_launch=lambda: None).run_once()
    await world.turn(runner)
    assert world.done == ["begun"]
