"""`event_ingress_retries`: events that the gate holds."""

import asyncpg
import pytest

from tidegate.model.ingress_retry import IngressRetry
from tidegate.store import ingress_retries
from tidegate.store.db import Connection
from tidegate.store.ingress_retries import Settled

from .builders import NOW, day_of, insert_row, make_events, partitions_of, set_clock, waiting_events


async def test_hold_writes_what_is_given(connection: Connection) -> None:
    await set_clock(connection)
    [event_id] = await make_events(connection)
    given = IngressRetry(
        event_id=event_id, source="shop.api", next_attempt_at=NOW, attempts=3, reason="rate_limit", last_error="full",
        metadata={"n": 1}, ingress_sequence=7, plan_version=2, created_at=NOW, updated_at=NOW,
    )  # fmt: skip
    await ingress_retries.hold(connection, [given])
    assert await ingress_retries.list_scheduled(connection) == [given]
    assert await ingress_retries.get(connection, event_id) == given


async def test_hold_without_a_time_is_refused(connection: Connection) -> None:
    [event_id] = await make_events(connection)
    with pytest.raises(asyncpg.CheckViolationError, match="waiting_check"):
        await ingress_retries.hold(connection, [IngressRetry(event_id=event_id, source="s")])


async def test_one_row_for_each_event(connection: Connection) -> None:
    """In each partition by its key; no event is in both, since a row moves when its state changes."""
    table = "event_ingress_retries"
    [event_id] = await waiting_events(connection, [NOW])
    for state, partition in (("scheduled", f"{table}_live"), ("completed", day_of(table, event_id))):
        await connection.execute(f"update tidegate.{table} set retry_state = $1", state)
        assert await partitions_of(connection, table, event_id, key="event_id") == [partition]
        await connection.execute("savepoint before")
        with pytest.raises(asyncpg.UniqueViolationError, match=f"{partition}_pkey"):
            await insert_row(
                connection, table, event_id=event_id, source="s", next_attempt_at=NOW, retry_state=state
            )  # fmt: skip
        await connection.execute("rollback to savepoint before")


async def test_what_became_of_an_event_is_settled_once(connection: Connection) -> None:
    [event_id] = await waiting_events(connection, [NOW])
    done = Settled(event_id, "completed", 1, None, None, None, {}, 0)
    await ingress_retries.settle(connection, [done])
    await ingress_retries.settle(connection, [done._replace(retry_state="exhausted")])
    found = await ingress_retries.get(connection, event_id)
    assert found is not None and found.retry_state == "completed"
