"""`workflow_run_steps`: what a step may be, and the order of a run's steps."""

import asyncpg
import pytest

from tidegate.clock import uuid7
from tidegate.model.run import STEP_STATUSES
from tidegate.store import steps
from tidegate.store.db import Connection

from .builders import NOW, insert_row, make_runs, set_clock, waiting_steps


async def test_name_is_unique_in_its_run_only(connection: Connection) -> None:
    one, two = await make_runs(connection, [NOW, NOW])
    for run_id, name in ((one, "charge"), (one, "ship"), (two, "charge")):
        await insert_row(connection, "workflow_run_steps", id=uuid7(), workflow_run_id=run_id, name=name)
    assert [s.name for s in await steps.list_of_run(connection, one)] == ["charge", "ship"]
    with pytest.raises(asyncpg.UniqueViolationError, match="name_key"):
        await connection.execute("update tidegate.workflow_run_steps set name = 'charge'")


async def test_steps_of_a_run_are_listed_in_order(connection: Connection) -> None:
    await set_clock(connection)
    run_id, other = await make_runs(connection, [NOW, NOW])
    for owner, name in ((run_id, "c"), (run_id, "a"), (run_id, "b"), (other, "x")):
        await insert_row(connection, "workflow_run_steps", id=uuid7(), workflow_run_id=owner, name=name)
    assert [s.name for s in await steps.list_of_run(connection, run_id)] == ["c", "a", "b"]


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
        await insert_row(connection, "workflow_run_steps", id=uuid7(), workflow_run_id=run_id, name=name)
