"""Who waits for a trigger goes on in the order of arrival: whatever is edited midway, and whoever decides at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.checker import inversions
from tests.flow.conftest import eventually
from tests.flow.test_trigger_workers import APP, SUCCEEDED, Effects, all_runs, fleet
from tests.flow.trigger_worker import TriggerWorker, held, make_trigger, statuses
from tidegate.flow import control
from tidegate.flow.hold import replan
from tidegate.model.source import RateLimit
from tidegate.store.db import Connection, Database

LAUNCHED = """
select e.ingress_sequence from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_events e on e.id = d.event_id
 where d.status = 'launched' order by d.launched_at, e.ingress_sequence
"""
HELD_EVENTS = "select ingress_sequence from tidegate.event_ingress_retries"
WAITING = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"


async def publish(connection: Connection, count: int, source: str = "shop", **payload: Any) -> None:
    await connection.execute("select tidegate.publish('tick', $1, $2) from generate_series(1, $3)",
                             source, payload, count)  # fmt: skip


async def launched(connection: Connection) -> list[int]:
    return [row[0] for row in await connection.fetch(LAUNCHED)]


async def drained(worker: TriggerWorker, connection: Connection, clock: Clock, count: int, step_ms: float) -> list[int]:
    """Turn by turn until so many are launched; their places of arrival, in the order of launch."""
    for _ in range(1000):
        await worker.turn()
        if len(found := await launched(connection)) == count:
            return found
        await clock.advance(step_ms)
    raise AssertionError(await statuses(connection))


class Interrupted:
    """A database that does something after each of a stage's transactions."""

    def __init__(self, database: Database, after: Callable[[], Awaitable[None]]) -> None:
        self._database = database
        self._after = after

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with self._database.connection() as opened:
            yield opened

    async def run(self, work: Callable[[Connection], Awaitable[Any]]) -> Any:
        done = await self._database.run(work)
        await self._after()
        return done


@pytest.mark.parametrize("edited_after", [(1,), (1, 2), (2, 3), (1, 3, 6)])
@pytest.mark.parametrize("side", ["trigger", "source"])
async def test_a_plan_that_changes_midway_begins_again_at_the_front(
    database: Database,
    connection: Connection,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    side: str,
    edited_after: tuple[int, ...],
) -> None:
    monkeypatch.setattr(replan, "BATCH", 10)
    worker = TriggerWorker(database)
    trigger_id = await make_trigger(database)
    batches = 0

    async def limit(count: int) -> None:
        if side == "source":
            await control.set_limit(database, "shop", RateLimit(limit=count, interval_ms=1000), "test")
        else:
            await control.update_trigger(
                database, trigger_id, {"throttle_count": count, "throttle_window_ms": 1000}, "test"
            )

    async def edit() -> None:
        nonlocal batches
        batches += 1
        if batches in edited_after:
            await limit(10 + batches)
            await publish(connection, 3)  # whoever comes meanwhile stands behind
            await worker.dispatch.run_once()

    await limit(5)
    await publish(connection, 60)
    await worker.turn()
    await limit(6)
    stage = worker.replan if side == "source" else worker.delivery_replan
    stage._database = Interrupted(database, edit)  # type: ignore[assignment]
    await stage.run_once()
    stage._database = database
    assert batches > max(edited_after)
    found = await drained(worker, connection, clock, 60 + 3 * len(edited_after), 50)
    assert inversions(found) == []


async def test_a_later_batch_waits_for_the_earlier_one(
    database: Database, connection: Connection, clock: Clock
) -> None:
    """Two workers have a batch each; what holds up the first must not let the second one launch before it."""
    await make_trigger(database, throttle_count=5, throttle_window_ms=1000)
    await control.pause(database, "first", actor="test")
    await control.resume(database, "first", "test")  # it has a row, for somebody to hold
    first, second = TriggerWorker(database, batch_size=10), TriggerWorker(database, batch_size=10)
    await publish(connection, 10, "first")
    await publish(connection, 10, "second")
    async with database.transaction() as holding:
        await holding.execute("select from tidegate.event_scheduler_sources where source = 'first' for update")
        earlier = asyncio.create_task(first.dispatch.run_once())
        await eventually(database, f"select ({WAITING}) = 1")
        later = asyncio.create_task(second.dispatch.run_once())
        done, _ = await asyncio.wait([later, asyncio.create_task(eventually(database, f"select ({WAITING}) = 2"))],
                                     return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
    await asyncio.gather(earlier, later)
    assert later not in done
    found = await drained(first, connection, clock, 20, 50)
    assert inversions(found) == []


async def test_batches_of_unlimited_triggers_wait_for_nobody(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await make_trigger(database)
    await control.pause(database, "first", actor="test")
    await control.resume(database, "first", "test")
    first, second = TriggerWorker(database, batch_size=10), TriggerWorker(database, batch_size=10)
    await publish(connection, 10, "first")
    await publish(connection, 10, "second")
    async with database.transaction() as holding:
        await holding.execute("select from tidegate.event_scheduler_sources where source = 'first' for update")
        earlier = asyncio.create_task(first.dispatch.run_once())
        await eventually(database, f"select ({WAITING}) = 1")
        assert (await second.dispatch.run_once()).launched == 10
    assert (await earlier).launched == 10


async def test_taken_apart_a_batch_still_waits_for_the_earlier_one(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await make_trigger(database, throttle_count=1, throttle_window_ms=1000)
    await publish(connection, 3)
    worker = TriggerWorker(database)
    await connection.execute("alter table tidegate.workflow_events drop constraint workflow_events_occurred_at_check")
    unreadable = "update tidegate.workflow_events set occurred_at = '20000-01-01' where ingress_sequence = $1"
    first, second, third = [
        row[0] for row in await connection.fetch("select ingress_sequence from tidegate.event_inbox order by 1")
    ]
    await connection.execute(unreadable, second)
    async with database.transaction() as other:  # another worker decides the first
        await other.fetch("select from tidegate.event_inbox where ingress_sequence = $1 for update", first)
        deciding = asyncio.create_task(worker.dispatch.run_once())
        await eventually(database, f"select ({WAITING}) = 1")
        assert await launched(connection) == []
    assert (await deciding).dead_lettered == 1
    assert await drained(worker, connection, clock, 2, 500) == [first, third]


async def test_an_event_that_its_source_held_takes_its_place_among_those_that_wait(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await make_trigger(database, throttle_count=2, throttle_window_ms=1000)
    worker = TriggerWorker(database)
    await publish(connection, 2, "shop")
    await worker.turn()
    await control.pause(database, "held", actor="test")
    await publish(connection, 5, "held")
    await publish(connection, 10, "shop")
    await worker.turn()
    await control.resume(database, "held", "test")
    found = await drained(worker, connection, clock, 17, 100)
    assert inversions(found) == []


async def test_who_waited_for_a_slot_takes_its_place_in_the_throttles_line(
    database: Database, connection: Connection, clock: Clock
) -> None:
    limits = {"max_concurrency": 1, "concurrency_key": "{{ event.payload.k }}"}
    await make_trigger(database, throttle_count=3, throttle_window_ms=60_000, **limits)
    worker = TriggerWorker(database)
    await publish(connection, 2, k="a")  # the second waits for the first to end
    await publish(connection, 1, k="b")
    for n in range(6):
        await publish(connection, 1, k=f"c{n}")
    await worker.turn()
    assert [row["reason"] for row in await held(connection)] == ["concurrency", *["throttle"] * 5]
    await worker.end_runs(3)
    await worker.turn()  # its slot is free, the throttle is not
    assert [row["reason"] for row in await held(connection)] == ["throttle"] * 6
    for _ in range(40):
        await clock.advance(5_000)
        await worker.turn()
        await worker.end_runs(10)
    found = await launched(connection)
    assert len(found) == 9 and sorted(found)[1] == found[3]  # the first of those that went on later
    assert inversions(found[3:]) == []


async def test_an_earlier_arrival_that_comes_between_the_look_and_the_lock_goes_first(
    database: Database, connection: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make_trigger(database, throttle_count=2, throttle_window_ms=1000)
    worker = TriggerWorker(database)
    await publish(connection, 2, "shop")
    await worker.turn()
    await control.pause(database, "held", actor="test")
    await publish(connection, 2, "held")
    await publish(connection, 4, "shop")
    await worker.turn()
    await clock.advance(2500)
    look = worker.delivery_retry._due

    async def meanwhile() -> Any:
        due = await look()
        await control.resume(database, "held", "test")
        await worker.replan.run_once()
        await worker.retry.run_once()
        return due

    monkeypatch.setattr(worker.delivery_retry, "_due", meanwhile)
    await worker.delivery_retry.run_once()
    monkeypatch.undo()
    found = await drained(worker, connection, clock, 8, 100)
    assert inversions(found) == []


BURST, BURSTS = 120, 4


@pytest.mark.parametrize("side", ["trigger", "source"])
async def test_workers_that_decide_one_burst_launch_it_in_order(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path, side: str
) -> None:
    """Four processes are woken by one commit, batch after batch: what waits goes in order."""
    file = tmp_path / "ticking.py"
    file.write_text(APP.replace("LIMITS", "throttle='30/200ms'" if side == "trigger" else ""))
    if side == "source":
        await control.set_limit(database, "shop", RateLimit(limit=30, interval_ms=200), "test")
    with fleet(database_url, file, 4, TIDEGATE_BATCH_SIZE="10"):
        for number in range(1, BURSTS + 1):
            await publish(connection, BURST, seconds=0)
            await eventually(database, SUCCEEDED, number * BURST)
    found = await launched(connection)
    assert len(found) == BURST * BURSTS
    if side == "source":  # those that it let pass at once were decided side by side
        held_once = {row[0] for row in await connection.fetch(HELD_EVENTS)}
        found = [sequence for sequence in found if sequence in held_once]
        assert len(found) > BURST
    assert inversions(found) == []
    assert sorted(run for run, _ in await effects()) == sorted(row["id"] for row in await all_runs(connection))


async def test_effects_of_one_key_happen_in_the_order_of_arrival(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    """One at a time, decided and run by four processes: what user code does is in order, too."""
    file = tmp_path / "ticking.py"
    file.write_text(APP.replace("LIMITS", "max_concurrency=1"))
    with fleet(database_url, file, 4, TIDEGATE_BATCH_SIZE="10"):
        await publish(connection, BURST, seconds=0)
        await eventually(database, SUCCEEDED, BURST)
    rows = await connection.fetch(
        "select r.id, e.ingress_sequence from tidegate.workflow_runs r "
        "  join tidegate.workflow_events e on e.id = r.event_id"
    )
    arrived = {row[0]: row[1] for row in rows}
    done = [arrived[run] for run, _ in await effects()]
    assert len(done) == BURST
    assert inversions(done) == []
