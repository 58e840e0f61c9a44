"""Waking a suspended run from another transaction: no wake-up is lost, and none comes before its time."""

from __future__ import annotations

import asyncio
import uuid
from datetime import datetime
from typing import Any

from tests.flow.conftest import eventually
from tidegate.clock import uuid7
from tidegate.model.run import ClaimedRun, FinishedRun
from tidegate.model.step import SuspendedRun
from tidegate.store import runs, trigger_gates
from tidegate.store.db import Connection, Database
from tidegate.store.runs import KeptSuspension

from .builders import HOUR, MINUTE, NOW, SECOND, make_definition, make_runs, make_triggers, set_clock


async def claim(connection: Connection) -> list[ClaimedRun]:
    definition = await make_definition(connection)
    return await runs.claim_due(connection, definitions=[definition], limit=9, worker="w", lease_ms=60_000)


async def wake(connection: Connection, *run_ids: Any) -> set[Any]:
    await runs.lock(connection, run_ids)
    return {one.id for one in await runs.wake(connection, run_ids)}


def suspended(run: ClaimedRun, until: datetime = NOW + HOUR, **changes: Any) -> SuspendedRun:
    fields = {"id": run.id, "claim_generation": run.claim_generation, "next_attempt_at": until, "wakes": run.wakes}
    return SuspendedRun(**fields | changes)


async def due_at(connection: Connection, run_id: uuid.UUID) -> datetime:
    found: datetime = await connection.fetchval(
        "select next_attempt_at from tidegate.workflow_runs where id = $1 and status = 'pending'", run_id
    )
    return found


async def test_a_suspended_run_that_is_woken_is_due_at_once(connection: Connection) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW])
    [held] = await claim(connection)
    assert await runs.suspend(connection, [suspended(held)]) == {run_id: KeptSuspension(False, None, None)}
    await set_clock(connection, NOW + MINUTE)
    assert await wake(connection, run_id) == {run_id}
    assert await due_at(connection, run_id) == NOW + MINUTE
    [again] = await claim(connection)
    assert (again.id, again.wakes) == (run_id, 1)


async def test_a_run_woken_while_it_executes_is_due_at_once_when_it_is_suspended(connection: Connection) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW])
    [held] = await claim(connection)
    assert await wake(connection, run_id) == {run_id}
    assert await claim(connection) == []  # its worker still has it
    assert await runs.suspend(connection, [suspended(held)]) == {run_id: KeptSuspension(True, None, None)}
    assert await due_at(connection, run_id) == NOW
    [again] = await claim(connection)
    assert again.wakes == 1
    assert await runs.suspend(connection, [suspended(again)]) == {
        run_id: KeptSuspension(False, None, None)
    }  # that wake-up is spent
    assert await due_at(connection, run_id) == NOW + HOUR


async def test_waking_twice_is_as_waking_once(connection: Connection) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW])
    [held] = await claim(connection)
    await runs.suspend(connection, [suspended(held)])
    for seconds in (1, 2):
        await set_clock(connection, NOW + seconds * SECOND)
        assert await wake(connection, run_id) == {run_id}
    assert await due_at(connection, run_id) == NOW + SECOND
    [again] = await claim(connection)
    assert again.wakes == 2
    assert await runs.suspend(connection, [suspended(again)]) == {run_id: KeptSuspension(False, None, None)}


async def test_no_wake_up_is_lost_whoever_is_first(database: Database) -> None:
    """The run's worker suspends it while another transaction wakes it: both orders, with the row lock contended."""
    async with database.transaction() as connection:
        await set_clock(connection)
        await make_runs(connection, [NOW, NOW])
        first, second = await claim(connection)
    async with database.transaction() as waker, database.transaction() as worker:
        await wake(waker, first.id)
        waiting = asyncio.create_task(runs.suspend(worker, [suspended(first)]))
        await eventually(database, "select exists (select from pg_locks where not granted)")
        await waker.execute("commit")
        await waker.execute("begin")
        assert await waiting == {first.id: KeptSuspension(True, None, None)}
    async with database.transaction() as waker, database.transaction() as worker:
        await runs.suspend(worker, [suspended(second)])
        waking = asyncio.create_task(wake(waker, second.id))
        await eventually(database, "select exists (select from pg_locks where not granted)")
        await worker.execute("commit")
        await worker.execute("begin")
        assert await waking == {second.id}
    async with database.connection() as connection:
        assert [await due_at(connection, one.id) for one in (first, second)] == [NOW, NOW]


async def test_waking_says_how_often_and_whether_a_worker_holds_the_run(connection: Connection) -> None:
    await set_clock(connection)
    await make_runs(connection, [NOW, NOW])
    held, free = await claim(connection)
    await runs.suspend(connection, [suspended(free)])
    await wake(connection, free.id)
    both = sorted((held.id, free.id))
    await runs.lock(connection, both)
    found = {one.id: one for one in await runs.wake(connection, both)}
    assert found == {
        held.id: runs.WokenRun(held.id, 1, True, held.claim_generation),
        free.id: runs.WokenRun(free.id, 2, False, free.claim_generation + 1),
    }


async def test_a_run_that_has_ended_is_not_woken(connection: Connection) -> None:
    await set_clock(connection)
    [run_id] = await make_runs(connection, [NOW])
    [held] = await claim(connection)
    await runs.finish(connection, [FinishedRun(id=run_id, claim_generation=held.claim_generation, status="succeeded")])
    assert await wake(connection, run_id, uuid7()) == set()
    assert await wake(connection) == set()


async def test_a_wake_up_comes_after_retry_after_and_after_a_stopping_worker(connection: Connection) -> None:
    await set_clock(connection)
    await make_runs(connection, [NOW, NOW, NOW])
    retried, woken_before, released = await claim(connection)
    later = NOW + MINUTE
    await wake(connection, woken_before.id)
    again = [suspended(one, None, delay_ms=60_000, is_retry=True) for one in (retried, woken_before)]
    await runs.suspend(connection, again)
    await runs.release(connection, [released], delay_ms=60_000)
    await wake(connection, *sorted((retried.id, woken_before.id, released.id)))
    assert [await due_at(connection, one.id) for one in (retried, woken_before, released)] == [later] * 3


async def test_a_wake_up_waits_until_the_trigger_is_open(connection: Connection) -> None:
    await set_clock(connection)
    [trigger_id] = await make_triggers(connection)
    await make_runs(connection, [NOW, NOW])
    await connection.execute("update tidegate.workflow_runs set trigger_id = $1", trigger_id)
    held, executing = await claim(connection)
    await runs.suspend(connection, [suspended(held)])
    await trigger_gates.lock(connection, always=[trigger_id])
    await trigger_gates.close(connection, trigger_id, key=None, delay_ms=60_000, reason="asked to wait")
    await wake(connection, *sorted((held.id, executing.id)))
    await runs.suspend(connection, [suspended(executing)])
    assert [await due_at(connection, one.id) for one in (held, executing)] == [NOW + MINUTE] * 2
