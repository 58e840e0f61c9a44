"""Priorities are shares: of an event within its source, of a trigger's workflow among the runs that wait for slots."""

from __future__ import annotations

from collections import Counter
from typing import Any

import asyncpg
import pytest

from tests.flow.test_fair_runs import Claimer, add
from tests.flow.trigger_worker import TriggerWorker, make_trigger
from tidegate import Context, Tidegate
from tidegate.errors import AppError, InvalidInput
from tidegate.flow import control
from tidegate.flow.look.explain import explain_any
from tidegate.model.source import RateLimit
from tidegate.store import events
from tidegate.store.db import Connection, Database
from tidegate.testing import Harness

DECIDED = """
select coalesce(e.priority, 1), e.ingress_sequence from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_events e on e.id = d.event_id order by d.created_at, e.ingress_sequence
"""


async def publish(connection: Connection, source: str, count: int, priority: int | None = None) -> None:
    publish_it = "select tidegate.publish('tick', $1, priority => $3) from generate_series(1, $2)"
    await connection.execute(publish_it, source, count, priority)


async def test_events_share_their_sources_part_by_priority(database: Database, connection: Connection) -> None:
    await make_trigger(database)
    worker = TriggerWorker(database, batch_size=20)
    await publish(connection, "a", 100)
    await worker.dispatch.run_once()
    await publish(connection, "a", 100, priority=3)
    await publish(connection, "b", 100)
    for _ in range(4):
        await worker.dispatch.run_once()
    found = Counter(tuple(row) for row in await connection.fetch(
        "select e.source, coalesce(e.priority, 1) from tidegate.workflow_trigger_deliveries d "
        "join tidegate.workflow_events e on e.id = d.event_id"))  # fmt: skip
    assert found[("b", 1)] == 40  # it takes nothing from other sources
    assert found[("a", 3)] == 30 and found[("a", 1)] == 30  # 20 of which came in the first batch


async def test_nobody_is_shut_out(database: Database, connection: Connection) -> None:
    await make_trigger(database)
    worker = TriggerWorker(database, batch_size=2)
    await publish(connection, "a", 5)
    await publish(connection, "a", 60, priority=10)
    await worker.dispatch.run_once()
    while (await worker.dispatch.run_once()).events:
        pass
    places = [place for place, row in enumerate(await connection.fetch(DECIDED)) if row[0] == 1]
    assert len(places) == 5 and 2 < places[2] < 40  # before the last of the others


async def test_held_events_pass_in_the_order_of_arrival_whatever_their_priority(
    database: Database, connection: Connection, clock: Any
) -> None:
    await make_trigger(database)
    await control.set_limit(database, "a", RateLimit(limit=1, interval_ms=1000), "test")
    worker = TriggerWorker(database, batch_size=10)
    await publish(connection, "a", 20)
    await publish(connection, "a", 10, priority=10)
    while (await worker.dispatch.run_once()).events:
        pass
    held = await connection.fetch(
        "select ingress_sequence from tidegate.event_ingress_retries order by next_attempt_at, ingress_sequence"
    )
    assert [row[0] for row in held] == sorted(row[0] for row in held) and len(held) == 29


async def test_explain_says_what_a_priority_changes(database: Database, connection: Connection) -> None:
    await make_trigger(database)
    await publish(connection, "a", 3)
    await publish(connection, "a", 1, priority=4)
    found = await connection.fetchval("select id from tidegate.workflow_events where priority = 4")
    told = await explain_any(connection, str(found))
    assert "priority 4: of its source's share of each batch, such events get 4 for 1 of priority 1" in told.summary
    await TriggerWorker(database).dispatch.run_once()
    told = await explain_any(connection, str(found))
    assert "with priority 4" in (told.decisions[0].reason or "")


async def test_a_repeated_id_keeps_the_first_priority(connection: Connection) -> None:
    publish_it = "select tidegate.publish('tick', 'a', id => 'x', priority => $1)"
    first = await connection.fetchval(publish_it, 3)
    assert await connection.fetchval(publish_it, 7) == first
    [event] = await events.find(connection, "x")
    assert event.priority == 3
    assert await connection.fetchval("select priority from tidegate.event_inbox") == 3


@pytest.mark.parametrize("priority", [0, 11, -1, 2**40])
async def test_sql_refuses_other_priorities(connection: Connection, priority: int) -> None:
    with pytest.raises(asyncpg.PostgresError, match="priority: must be a whole number from 1 to 10"):
        await connection.execute("select tidegate.publish('tick', 'a', priority => $1)", priority)


async def test_workflows_share_slots_by_the_priority_of_their_triggers(
    database: Database, connection: Connection
) -> None:
    await make_trigger(database, "eager", priority=4)
    await make_trigger(database, "plain")
    rows = await connection.fetch("select slug, id from tidegate.workflow_definitions")
    ids = {row[0]: row[1] for row in rows}
    await add(connection, ids["plain"], 200)
    claimer = Claimer(connection, list(ids.values()))
    await claimer.claim(10)
    await add(connection, ids["eager"], 200, later_ms=10_000)
    for _ in range(30):
        claimer.end()
        await claimer.claim(1)
    assert Counter(run.workflow for run in claimer.held) == {"eager": 8, "plain": 2}
    waiting = await connection.fetchval(
        "select id from tidegate.workflow_runs where status = 'pending' and workflow_definition_id = $1 limit 1",
        ids["eager"],
    )
    await connection.execute("insert into tidegate.workers (name, definitions, slots, version, heartbeat_ms) "
                             "values ('w', $1, 10, '0.2.0', 10000)", list(ids.values()))  # fmt: skip
    told = await explain_any(connection, str(waiting))
    assert "priority 4: its workflow gets 4 worker slots for 1 of a workflow with priority 1" in told.summary


async def test_priorities_in_code() -> None:
    app = Tidegate()

    @app.workflow(on="tick", priority=5)
    async def work(ctx: Context) -> None:
        await ctx.publish("tock", {}, priority=2)

    with pytest.raises(AppError, match="priority"):
        app.workflow(on="tick", priority=11, name="other")(work)
    async with Harness(app) as harness:
        await harness.publish("tick", source="a", priority=3)
        with pytest.raises(InvalidInput) as caught:
            await harness.publish("tick", source="a", priority=11)
        await harness.run_until_idle()
        async with harness.connection() as connection:
            rows = await connection.fetch("select type, priority from tidegate.workflow_events order by 1 desc")
            stored = await connection.fetchval("select priority from tidegate.workflow_event_triggers")
    assert "must be a whole number from 1 to 10, not 11" in str(caught.value.errors)
    assert [tuple(row) for row in rows] == [("tock", 2), ("tick", 3)]
    assert stored == 5
