"""The retry columns of held events, held deliveries and steps: what the database refuses, and lists in due order."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import asyncpg
import pytest

from tidegate.model.retry import RETRY_STATES
from tidegate.store import deliveries, ingress_retries, steps
from tidegate.store.db import Connection

from .builders import HOUR, NOW, SECOND, waiting_deliveries, waiting_events, waiting_steps


class Table(NamedTuple):
    """A table with retry columns: its store module, its key, its column of attempts, rows that wait, and whether these
    are in a partition of their own: a state that there is not is refused since no partition takes it."""

    name: str
    store: Any
    key: str
    attempts: str
    schedule: Callable[[Connection, Sequence[datetime]], Awaitable[list[uuid.UUID]]]
    is_divided: bool = True


TABLES = (
    Table("event_ingress_retries", ingress_retries, "event_id", "attempts", waiting_events),
    Table("workflow_trigger_deliveries", deliveries, "id", "retry_attempts", waiting_deliveries),
    Table("workflow_run_steps", steps, "id", "retry_attempts", waiting_steps, is_divided=False),
)
EACH = pytest.mark.parametrize("table", TABLES, ids=[table.name for table in TABLES])


@EACH
async def test_pages_neither_skip_nor_repeat(connection: Connection, table: Table) -> None:
    due = [NOW + n * SECOND for n in (0, 0, 0, 1, 1, 2, 3)]
    ids = await table.schedule(connection, list(reversed(due)))
    seen: list[Any] = []
    after = None
    while page := await table.store.list_scheduled(connection, after=after, limit=2):
        assert len(page) <= 2
        seen += page
        after = (page[-1].next_attempt_at, getattr(page[-1], table.key))
    assert sorted(getattr(row, table.key) for row in seen) == sorted(ids)
    assert [row.next_attempt_at for row in seen] == due


@EACH
async def test_list_shows_only_what_waits(connection: Connection, table: Table) -> None:
    ended, waiting = await table.schedule(connection, [NOW, NOW + HOUR])
    await connection.execute(
        f"update tidegate.{table.name} set retry_state = 'completed' where {table.key} = $1", ended
    )
    assert [getattr(row, table.key) for row in await table.store.list_scheduled(connection)] == [waiting]


@EACH
@pytest.mark.parametrize(
    ("assignment", "constraint"),
    [
        ("retry_state = 'bogus'", "state_check"),
        ("retry_state = ''", "state_check"),
        ("retry_state = 'Scheduled'", "state_check"),
        ("{attempts} = -1", "attempts_check"),
        ("next_attempt_at = null", "waiting_check"),
        ("next_attempt_at = 'infinity'", "waiting_check"),
        ("next_attempt_at = '-infinity'", "waiting_check"),
        ("retry_state = 'running'", "claim_check"),
        ("claim_expires_at = now()", "claim_check"),
        ("retry_state = 'completed', claim_expires_at = now()", "claim_check"),
    ],
)
async def test_illegal_state_is_refused(connection: Connection, table: Table, assignment: str, constraint: str) -> None:
    await table.schedule(connection, [NOW])
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await connection.execute(f"update tidegate.{table.name} set {assignment.format(attempts=table.attempts)}")
    if table.is_divided and constraint == "state_check":
        assert f'no partition of relation "{table.name}" found for row' in str(caught.value)
    else:
        assert caught.value.constraint_name == f"{table.name}_{constraint}"


@EACH
async def test_no_state_is_refused(connection: Connection, table: Table) -> None:
    await table.schedule(connection, [NOW])
    with pytest.raises(asyncpg.CheckViolationError if table.is_divided else asyncpg.NotNullViolationError):
        await connection.execute(f"update tidegate.{table.name} set retry_state = null")


@EACH
async def test_every_state_of_the_model_is_legal(connection: Connection, table: Table) -> None:
    await table.schedule(connection, [NOW])
    for state in RETRY_STATES:
        done = await connection.execute(
            f"update tidegate.{table.name} set retry_state = $1::text, "
            "claim_expires_at = case when $1 = 'running' then now() end",
            state,
        )
        assert done == "UPDATE 1"


@EACH
async def test_counters_hold_more_than_32_bits(connection: Connection, table: Table) -> None:
    [row_id] = await table.schedule(connection, [NOW])
    await connection.execute(f"update tidegate.{table.name} set {table.attempts} = $1", 2**40)
    [row] = await table.store.list_scheduled(connection)
    assert (getattr(row, table.key), getattr(row, table.attempts)) == (row_id, 2**40)
