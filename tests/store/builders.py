"""Rows for store tests, and a database clock that stands where the test puts it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from tidegate.clock import uuid7
from tidegate.model.event import NewEvent
from tidegate.model.ids import delivery_id, step_id
from tidegate.model.trigger import TriggerSpec
from tidegate.store import events, triggers
from tidegate.store.db import Connection

NOW = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
SECOND, MINUTE, HOUR = timedelta(seconds=1), timedelta(minutes=1), timedelta(hours=1)


async def set_clock(connection: Connection, at: datetime = NOW) -> None:
    """Make the database's clock stand still at `at`."""
    await connection.execute(
        "create or replace function tidegate.now() returns timestamptz language sql stable parallel safe "
        f"as $$ select timestamptz '{at.isoformat()}' $$"
    )


def day_of(table: str, row_id: uuid.UUID) -> str:
    """The name of the partition that a table has for the day of this id."""
    return f"{table}_{datetime.fromtimestamp((row_id.int >> 80) / 1000, UTC):%Y%m%d}"


async def partitions_of(connection: Connection, table: str, row_id: uuid.UUID, key: str = "id") -> list[str]:
    """The partitions that have a row with this id; more than one only if it is stored twice."""
    rows = await connection.fetch(
        f"select c.relname from tidegate.{table} t join pg_class c on c.oid = t.tableoid where t.{key} = $1 order by 1",
        row_id,
    )
    return [row[0] for row in rows]


def new_event(**changes: Any) -> NewEvent:
    fields: dict[str, Any] = {
        "id": uuid7(),
        "external_id": None,
        "type": "order.created",
        "source": "shop.api",
        "occurred_at": None,
        "payload": "{}",
        "correlation_id": None,
        "ttl_ms": None,
        "metadata": "{}",
    }
    return NewEvent(**fields | changes)


async def make_events(connection: Connection, count: int = 1, **changes: Any) -> list[uuid.UUID]:
    made = [new_event(**changes) for _ in range(count)]
    await events.insert(connection, made)
    return [event.id for event in made]


async def make_definition(connection: Connection, slug: str = "fulfil") -> uuid.UUID:
    return await triggers.upsert_definition(
        connection, slug=slug, kind="python", parameters=["*"], config={}, actor="test"
    )


async def make_triggers(connection: Connection, count: int = 1, slug: str = "fulfil") -> list[uuid.UUID]:
    definition = await make_definition(connection, slug)
    for number in range(count):
        spec = TriggerSpec(name=f"t{number}", event_type="order.created")
        await triggers.upsert_trigger(connection, definition, spec, "test")
    return [trigger.id for trigger in await triggers.list_of_workflow(connection, slug)]


async def make_runs(
    connection: Connection, due: Iterable[datetime], slug: str = "fulfil", of: uuid.UUID | None = None
) -> list[uuid.UUID]:
    """Pending runs, due at the given times; of no event, or all of one."""
    definition = await make_definition(connection, slug)
    made = []
    for at in due:
        made.append(delivery_id(of, uuid7()) if of else uuid7())  # as if each came of a trigger of its own
        await insert_row(
            connection, "workflow_runs",
            id=made[-1], workflow_definition_id=definition, event_id=of, next_attempt_at=at,
        )  # fmt: skip
    return made


async def insert_row(connection: Connection, table: str, **values: Any) -> None:
    """One row of a table, with the columns given."""
    places = ", ".join(f"${number}" for number in range(1, len(values) + 1))
    await connection.execute(f"insert into tidegate.{table} ({', '.join(values)}) values ({places})", *values.values())


async def waiting_events(connection: Connection, due: Sequence[datetime]) -> list[uuid.UUID]:
    """Held events, due at the given times."""
    ids = await make_events(connection, len(due))
    for event_id, at in zip(ids, due, strict=True):
        await insert_row(
            connection, "event_ingress_retries",
            event_id=event_id, source="shop.api", retry_state="scheduled", next_attempt_at=at,
        )  # fmt: skip
    return ids


async def waiting_deliveries(connection: Connection, due: Sequence[datetime]) -> list[uuid.UUID]:
    """Held deliveries of one trigger, due at the given times."""
    [trigger_id] = await make_triggers(connection)
    ids = []
    for event_id, at in zip(await make_events(connection, len(due)), due, strict=True):
        ids.append(delivery_id(event_id, trigger_id))
        await insert_row(
            connection, "workflow_trigger_deliveries",
            id=ids[-1], trigger_id=trigger_id, event_id=event_id, status="throttled", retry_state="scheduled",
            next_attempt_at=at,
        )  # fmt: skip
    return ids


async def waiting_steps(connection: Connection, due: Sequence[datetime]) -> list[uuid.UUID]:
    """Steps of one run that wait for a retry, due at the given times."""
    [run_id] = await make_runs(connection, [NOW])
    ids = [step_id(run_id, f"s{number}") for number in range(len(due))]
    for number, (row_id, at) in enumerate(zip(ids, due, strict=True)):
        await insert_row(
            connection, "workflow_run_steps",
            id=row_id, workflow_run_id=run_id, name=f"s{number}", retry_state="scheduled", next_attempt_at=at,
        )  # fmt: skip
    return ids
