"""The inbox is shared fairly by source: a flood delays itself, nothing is lost, and order holds within a source."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.checker import inversions
from tests.flow.conftest import eventually
from tests.flow.test_trigger_workers import SUCCEEDED, fleet
from tests.flow.trigger_worker import TriggerWorker, make_trigger
from tidegate.errors import InvalidInput
from tidegate.flow import control
from tidegate.flow.decide.batch import Batch
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.model.shares import Lane
from tidegate.model.source import RateLimit
from tidegate.store import events, inbox_lanes, sources
from tidegate.store.db import Connection, Database

DECIDED = """
select e.source, e.ingress_sequence from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_events e on e.id = d.event_id order by d.created_at, e.ingress_sequence
"""


async def publish(connection: Connection, source: str, count: int) -> None:
    await connection.execute(
        "select tidegate.publish('tick', $1, '{}'::jsonb) from generate_series(1, $2)", source, count
    )


async def decided(connection: Connection) -> Counter[str]:
    return Counter(row[0] for row in await connection.fetch(DECIDED))


async def test_a_flood_delays_others_by_one_batch(database: Database, connection: Connection) -> None:
    await make_trigger(database)
    worker = TriggerWorker(database, batch_size=20)
    await publish(connection, "flood", 200)
    await worker.dispatch.run_once()
    await publish(connection, "small", 2)
    await worker.dispatch.run_once()
    assert await decided(connection) == {"flood": 38, "small": 2}  # and no place stays free


def beside(worker: TriggerWorker, database: Database) -> Dispatch:
    """Decides what others publish beside the worker's backlog."""
    return Dispatch(database, batch_size=20, after_launch=lambda: None, beside=worker.dispatch)


async def test_others_do_not_wait_for_a_batch_of_the_backlog(database: Database, connection: Connection) -> None:
    await make_trigger(database)
    worker = TriggerWorker(database, batch_size=20)
    others = beside(worker, database)
    await publish(connection, "flood", 200)
    assert (await others.run_once()).events == 0  # no backlog is known
    await worker.dispatch.run_once()
    assert worker.dispatch.has_backlog
    for name in ("a", "z"):  # before and after it in the index
        async with database.connection() as other:
            batch = other.transaction()  # of the backlog; it is in progress
            await batch.start()
            assert len((await inbox_lanes.claim_alone(other, Lane("flood"), 20)).events) == 20
            await publish(connection, name, 30)
            assert (await others.run_once()).events == 20
            assert (await others.run_once()).events == 10
            assert (await others.run_once()).events == 0
            await batch.rollback()
    assert await decided(connection) == {"flood": 20, "a": 30, "z": 30}
    while (await worker.dispatch.run_once()).events:
        pass
    assert not worker.dispatch.has_backlog
    rows = await connection.fetch(DECIDED)
    for source, count in (("flood", 200), ("a", 30), ("z", 30)):
        own = [row[1] for row in rows if row[0] == source]
        assert len(own) == count and inversions(own) == []


async def test_what_must_wait_for_its_turn_is_left_to_the_dispatcher_of_the_backlog(
    database: Database, connection: Connection
) -> None:
    """An earlier event of the same source is being decided, and the trigger has a limit: the order matters."""
    await make_trigger(database)
    await make_trigger(database, "limited", event_type="small", throttle_count=1, throttle_window_ms=60_000)
    worker = TriggerWorker(database, batch_size=20)
    others = beside(worker, database)
    await publish(connection, "flood", 200)
    await worker.dispatch.run_once()
    await connection.execute("select tidegate.publish('small', 'a', '{}') from generate_series(1, 2)")
    first = await connection.fetchval("select min(ingress_sequence) from tidegate.event_inbox where source = 'a'")
    async with database.connection() as other:
        claimed = other.transaction()
        await claimed.start()
        assert len(await events.claim_inbox_one(other, first)) == 1
        assert (await others.run_once()).events == 0
        await claimed.rollback()
    await worker.dispatch.run_once()
    rows = await connection.fetch(
        """select d.status, e.ingress_sequence = $1 as is_first from tidegate.workflow_trigger_deliveries d
             join tidegate.workflow_events e on e.id = d.event_id where e.source = 'a' order by 2 desc""",
        first,
    )
    assert [tuple(row) for row in rows] == [("launched", True), ("throttled", False)]


async def test_sources_share_by_weight(database: Database, connection: Connection) -> None:
    await make_trigger(database)
    await control.set_weight(database, "heavy", 3, "ann")
    worker = TriggerWorker(database, batch_size=20)
    await publish(connection, "light", 100)
    await worker.dispatch.run_once()
    await publish(connection, "heavy", 100)
    await worker.dispatch.run_once()
    assert await decided(connection) == {"light": 25, "heavy": 15}


async def test_more_sources_than_places_share_over_batches(database: Database, connection: Connection) -> None:
    await make_trigger(database)
    names = [f"s{n:02}" for n in range(30)]
    await control.set_weight(database, "s07", 4, "ann")
    worker = TriggerWorker(database, batch_size=11)
    for name in names:
        await publish(connection, name, 40)
    await worker.dispatch.run_once()  # of the first name alone
    first = await decided(connection)
    for _ in range(33 * 4 // 11):
        await worker.dispatch.run_once()
    found = await decided(connection) - first
    assert found["s07"] == 16
    assert {found[name] for name in names if name != "s07"} == {4}


async def test_order_holds_within_a_source(database: Database, connection: Connection) -> None:
    await make_trigger(database)
    worker = TriggerWorker(database, batch_size=10)
    for _ in range(10):
        await publish(connection, "a", 7)
        await publish(connection, "b", 2)
    while (await worker.dispatch.run_once()).events:
        pass
    rows = await connection.fetch(DECIDED)
    for source, count in (("a", 70), ("b", 20)):
        own = [row[1] for row in rows if row[0] == source]
        assert len(own) == count and inversions(own) == []


async def test_a_limited_flood_delays_others_by_one_batch(
    database: Database, connection: Connection, clock: Clock
) -> None:
    """Its events are held, in order; and those of others pass meanwhile."""
    await make_trigger(database)
    await control.set_limit(database, "flood", RateLimit(limit=5, interval_ms=1000), "test")
    worker = TriggerWorker(database, batch_size=20)
    await publish(connection, "flood", 200)
    await worker.dispatch.run_once()
    await publish(connection, "small", 2)
    await worker.dispatch.run_once()
    assert await decided(connection) == {"flood": 5, "small": 2}
    while (await worker.dispatch.run_once()).events:
        pass
    held = await connection.fetch(
        "select ingress_sequence from tidegate.event_ingress_retries order by next_attempt_at, ingress_sequence"
    )
    assert len(held) == 195 and inversions([row[0] for row in held]) == []


async def test_two_workers_hold_a_limited_flood_in_order_beside_others(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await make_trigger(database)
    await control.set_limit(database, "flood", RateLimit(limit=1, interval_ms=1000), "test")
    workers = [TriggerWorker(database, batch_size=10) for _ in range(3)]
    for _ in range(8):
        await publish(connection, "flood", 20)
        await publish(connection, "small", 3)

    async def drain(worker: TriggerWorker) -> None:
        while (await worker.dispatch.run_once()).events or await connection_count(database):
            pass

    await asyncio.gather(*map(drain, workers))
    held = await connection.fetch(
        "select ingress_sequence from tidegate.event_ingress_retries order by next_attempt_at, ingress_sequence"
    )
    assert len(held) == 159 and inversions([row[0] for row in held]) == []
    assert (await decided(connection))["small"] == 24


async def connection_count(database: Database) -> int:
    async with database.connection() as own:
        found: int = await own.fetchval("select count(*) from tidegate.event_inbox")
        return found


async def test_an_event_that_fails_its_batch_is_found_behind_a_flood(
    database: Database, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch of several sources is processed one by one, not the oldest events of all."""
    await make_trigger(database)
    worker = TriggerWorker(database, batch_size=10)
    await publish(connection, "flood", 300)
    await worker.dispatch.run_once()
    await publish(connection, "bad", 1)
    await publish(connection, "small", 1)
    match_at = Batch.match_at

    async def fail(self: Batch, connection: Any, gates: Any, given: Any, matched: Any = None) -> Any:
        if any(event.source == "bad" for event in given):
            raise RuntimeError("cannot be decided")
        return await match_at(self, connection, gates, given, matched)

    monkeypatch.setattr(Batch, "match_at", fail)
    monkeypatch.setattr(Batch, "match", lambda self, given: asyncio.sleep(0))
    counts = await worker.dispatch.run_once()
    assert counts.dead_lettered == 1
    assert (await decided(connection))["small"] == 1
    assert await connection.fetchval("select count(*) from tidegate.dead_letters where kind = 'event'") == 1


@pytest.mark.parametrize("weight", [0, 101, -1])
async def test_a_weight_is_bounded(connection: Connection, weight: int) -> None:
    with pytest.raises(Exception, match="event_scheduler_sources_weight_check"):
        await sources.set_weight(connection, "a", weight, "ann")


async def test_the_default_has_no_weight(database: Database) -> None:
    with pytest.raises(InvalidInput, match="source"):
        await control.set_weight(database, "*", 5, "ann")


async def test_lanes_are_found_in_a_ring(connection: Connection) -> None:
    for source in ("a", "b", "c"):
        await publish(connection, source, 3)
    for after, most, wanted in (("", 9, "abc"), ("a", 9, "bca"), ("b", 2, "ca"), ("c", 9, "abc"), ("bb", 9, "cab")):
        found = await inbox_lanes.waiting(connection, after, most)
        assert "".join(one.lane.source for one in found) == wanted
    assert {one.waiting for one in found} == {3}


async def test_a_claim_takes_its_shares_and_the_oldest(connection: Connection) -> None:
    for source in ("a", "b", "c"):
        await publish(connection, source, 5)
    lanes = {one.lane: 1 for one in await inbox_lanes.waiting(connection, "", 9) if one.lane.source != "a"}
    async with connection.transaction():
        claimed = await inbox_lanes.claim(connection, lanes, 4)
        assert Counter(event.source for event in claimed.events) == {"a": 2, "b": 1, "c": 1}
    assert len(await events.list_inbox(connection, 99)) == 11


APP = """
from tidegate import Tidegate

app = Tidegate()

@app.workflow(on="tick")
async def tick(ctx) -> None:
    pass
"""


async def test_workers_that_are_killed_share_a_flood_with_others(
    database: Database, database_url: str, connection: Connection, tmp_path: Path
) -> None:
    """Three real workers, one of them killed midway: every event launches once, and small sources are early."""
    file = tmp_path / "ticking.py"
    file.write_text(APP)
    with fleet(database_url, file, 3, TIDEGATE_LEASE_MS="1000") as workers:
        async with connection.transaction():  # they arrive at once, the flood first
            await publish(connection, "flood", 4000)
            for n in range(20):
                await publish(connection, f"small{n}", 2)
        await eventually(database, "select count(*) > 500 from tidegate.workflow_runs")
        workers[1].signal(signal.SIGKILL)
        await eventually(database, SUCCEEDED, 4040)
    rows = await connection.fetch(DECIDED)
    assert len(rows) == 4040
    last_small = max(place for place, row in enumerate(rows) if row[0] != "flood")
    assert last_small < 2000, "by the order of arrival all of them would be the last"
