"""`event_ingress_retries`: events that the gate holds."""

import asyncpg
import pytest

from tidegate.clock import uuid7
from tidegate.model.ingress_retry import IngressRetry
from tidegate.store import ingress_retries
from tidegate.store.db import Connection

from .builders import NOW, insert_row, make_events, set_clock, waiting_events


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


async def test_hold_of_an_unknown_event_is_refused(connection: Connection) -> None:
    with pytest.raises(asyncpg.ForeignKeyViolationError):
        await ingress_retries.hold(connection, [IngressRetry(event_id=uuid7(), source="s", next_attempt_at=NOW)])


async def test_hold_without_a_time_is_refused(connection: Connection) -> None:
    [event_id] = await make_events(connection)
    with pytest.raises(asyncpg.CheckViolationError, match="waiting_check"):
        await ingress_retries.hold(connection, [IngressRetry(event_id=event_id, source="s")])


async def test_one_row_for_each_event(connection: Connection) -> None:
    [event_id] = await waiting_events(connection, [NOW])
    with pytest.raises(asyncpg.UniqueViolationError):
        await insert_row(connection, "event_ingress_retries", event_id=event_id, source="s", next_attempt_at=NOW)
