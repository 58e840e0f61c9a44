"""`workflow_run_steps`: what a step may be, and the order of a run's steps."""

import asyncio
import uuid
from functools import partial
from typing import Any

import asyncpg
import pytest

from tests.flow.conftest import eventually
from tidegate.model.ids import step_id
from tidegate.model.run import STEP_STATUSES, FinishedRun
from tidegate.model.step import StepWrite
from tidegate.store import runs, steps
from tidegate.store.db import Connection, Database

from .builders import NOW, day_of, insert_row, make_definition, make_runs, set_clock, waiting_steps


def write(run_id: uuid.UUID, name: str, **changes: Any) -> StepWrite:
    """The outcome of a step: it succeeded, if nothing else is said."""
    own_id = step_id(run_id, name)
    given = {"id": own_id, "workflow_run_id": run_id, "claim_generation": 1, "name": name, "status": "succeeded"}
    return StepWrite(**given | changes)


async def test_name_is_unique_in_its_run_only(connection: Connection) -> None:
    one, two = await make_runs(connection, [NOW, NOW])
    for run_id, name in ((one, "charge"), (one, "ship"), (two, "charge")):
        await insert_row(connection, "workflow_run_steps", id=step_id(run_id, name), workflow_run_id=run_id, name=name)
    assert [s.name for s in await steps.list_of_run(connection, one)] == ["charge", "ship"]
    with pytest.raises(asyncpg.UniqueViolationError, match=f"{day_of('workflow_run_steps', one)}_pkey"):
        await insert_row(
            connection, "workflow_run_steps", id=step_id(one, "charge"), workflow_run_id=one, name="charge"
        )


async def test_a_step_that_is_written_again_is_the_same_row(connection: Connection) -> None:
    [run_id] = await make_runs(connection, [NOW])
    waiting = write(run_id, "charge", status="pending", retry_state="scheduled", delay_ms=1000)
    assert len(await steps.write(connection, [waiting], ended={run_id})) == 1
    done = write(run_id, "charge", result="7")
    assert len(await steps.write(connection, [done], ended={run_id})) == 1
    [step] = await steps.list_of_run(connection, run_id)
    assert (step.id, step.status, step.result) == (step_id(run_id, "charge"), "succeeded", 7)


async def test_steps_of_a_run_are_listed_in_order(connection: Connection) -> None:
    """In the order in which they were given, although they were written at the same time."""
    await set_clock(connection)
    run_id, other = await make_runs(connection, [NOW, NOW])
    names = ["c", "a", "b", *(str(n) for n in range(20))]
    both = [write(owner, name) for name in names for owner in (run_id, other)]
    assert len(await steps.write(connection, both, ended={run_id, other})) == len(both)
    for owner in (run_id, other):
        assert [s.name for s in await steps.list_of_run(connection, owner)] == names


async def test_steps_that_end_with_their_run_are_listed_in_order(connection: Connection) -> None:
    await set_clock(connection)
    await make_runs(connection, [NOW])
    definition = await make_definition(connection)
    [held] = await runs.claim_due(connection, definitions=[definition], limit=1, worker="w", lease_ms=1000)
    names = [str(n) for n in range(20)]
    ended = FinishedRun(id=held.id, claim_generation=held.claim_generation, status="succeeded")
    assert await runs.succeed(connection, [ended], [write(held.id, name, is_new=True) for name in names])
    assert [s.name for s in await steps.list_of_run(connection, held.id)] == names


@pytest.mark.parametrize("status", ["bogus", "", "completed"])
async def test_illegal_status_is_refused(connection: Connection, status: str) -> None:
    await waiting_steps(connection, [NOW])
    with pytest.raises(asyncpg.CheckViolationError, match="status_check"):
        await connection.execute("update tidegate.workflow_run_steps set status = $1", status)


async def test_every_status_of_the_model_is_legal(connection: Connection) -> None:
    await waiting_steps(connection, [NOW])
    for status in STEP_STATUSES:
        await connection.execute("update tidegate.workflow_run_steps set status = $1", status)
    assert await connection.fetchval("select status from tidegate.workflow_run_steps") == status


@pytest.mark.parametrize("name", ["", "x" * 201])
async def test_bad_name_is_refused(connection: Connection, name: str) -> None:
    [run_id] = await make_runs(connection, [NOW])
    with pytest.raises(asyncpg.CheckViolationError, match="name_check"):
        await insert_row(connection, "workflow_run_steps", id=step_id(run_id, name), workflow_run_id=run_id, name=name)


@pytest.mark.parametrize("kind", ["child", "map", "wait"])
@pytest.mark.parametrize("status", ["pending", "cancelled"])
async def test_a_step_that_another_transaction_ends_meanwhile_is_not_lost(
    database: Database, kind: Any, status: Any
) -> None:
    """Its run is held: a write that waited for the run's lock must not say otherwise."""
    async with database.transaction() as connection:
        await set_clock(connection)
        [run_id] = await make_runs(connection, [NOW])
        definition = await make_definition(connection)
        [held] = await runs.claim_due(connection, definitions=[definition], limit=1, worker="w", lease_ms=1000)
        claim = {"claim_generation": held.claim_generation, "kind": kind}
        assert await steps.write(connection, [write(run_id, "charge", status="pending", **claim)])
    async with database.transaction() as ending:
        await runs.lock(ending, [run_id])
        await ending.execute("update tidegate.workflow_run_steps set status = 'succeeded', result = '7'")
        again = write(run_id, "charge", status=status, **claim)
        writing = asyncio.create_task(database.run(partial(steps.write, writes=[again])))
        await eventually(database, "select exists (select from pg_locks where not granted)")
    assert list(await writing) == [(run_id, "charge")]
    async with database.connection() as connection:
        [step] = await steps.list_of_run(connection, run_id)
    assert step.status == ("cancelled" if status == "cancelled" else "succeeded")
