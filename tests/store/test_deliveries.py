"""`workflow_trigger_deliveries`: the shared suite, and one launch for each trigger and event."""

import asyncio
import uuid
from typing import Any

import asyncpg
import pytest

from tidegate.clock import uuid7
from tidegate.model.delivery import DELIVERY_STATUSES, Delivery
from tidegate.store import deliveries, runs
from tidegate.store.db import Connection, Database
from tidegate.store.deliveries import Decided

from .builders import NOW, insert_row, make_definition, make_events, make_triggers, set_clock, waiting_deliveries


def delivery(trigger_id: uuid.UUID, event_id: uuid.UUID, **changes: Any) -> Delivery:
    return Delivery(**{"id": uuid7(), "trigger_id": trigger_id, "event_id": event_id, "status": "matched"} | changes)


@pytest.mark.parametrize("status", ["bogus", "", "Launched", "pending"])
async def test_illegal_status_is_refused(connection: Connection, status: str) -> None:
    await waiting_deliveries(connection, [NOW])
    with pytest.raises(asyncpg.CheckViolationError, match="status_check"):
        await connection.execute("update tidegate.workflow_trigger_deliveries set status = $1", status)


async def test_every_status_of_the_model_is_legal(connection: Connection) -> None:
    await waiting_deliveries(connection, [NOW])
    for status in DELIVERY_STATUSES:
        await connection.execute(
            "update tidegate.workflow_trigger_deliveries "
            "set status = $1, workflow_run_id = $2, launched_at = $3, retry_state = 'none'",
            status,
            uuid7(),
            NOW,
        )
    assert await connection.fetchval("select status from tidegate.workflow_trigger_deliveries") == status


@pytest.mark.parametrize(
    "rest",
    ["workflow_run_id = null, launched_at = now()", "workflow_run_id = gen_random_uuid(), launched_at = null"],
)
async def test_launched_without_its_run_is_refused(connection: Connection, rest: str) -> None:
    await waiting_deliveries(connection, [NOW])
    with pytest.raises(asyncpg.CheckViolationError, match="launched_check"):
        await connection.execute(
            f"update tidegate.workflow_trigger_deliveries set status = 'launched', retry_state = 'completed', {rest}"
        )


@pytest.mark.parametrize("status", ["skipped", "failed", "exhausted", "cancelled"])
async def test_what_is_decided_waits_no_more(connection: Connection, status: str) -> None:
    await waiting_deliveries(connection, [NOW])
    with pytest.raises(asyncpg.CheckViolationError, match="final_check"):
        await connection.execute("update tidegate.workflow_trigger_deliveries set status = $1", status)


async def decided(connection: Connection, count: int = 1, **changes: Any) -> list[Decided]:
    """Decisions to launch, each for an event of its own; a run has the id of its delivery."""
    [trigger_id] = await make_triggers(connection)
    definition = await make_definition(connection)
    return [
        Decided(
            id=(one := uuid7()),
            trigger_id=trigger_id,
            event_id=event_id,
            trigger_version=1,
            status="launched",
            last_error=None,
            run_id=one,
            workflow_definition_id=definition,
            correlation_id="c-1",
            parameters='{"order_id":7}',
        )._replace(**changes)
        for event_id in await make_events(connection, count)
    ]


async def counts(connection: Connection) -> tuple[int, int]:
    """How many deliveries and runs there are."""
    row = await connection.fetchrow(
        "select (select count(*) from tidegate.workflow_trigger_deliveries), "
        "(select count(*) from tidegate.workflow_runs)"
    )
    assert row is not None
    return row[0], row[1]


async def test_launch_records_the_delivery_and_creates_a_run_that_is_due(connection: Connection) -> None:
    await set_clock(connection)
    [one] = await decided(connection)
    assert await deliveries.launch(connection, [one], NOW) == {one.run_id: None}

    [shown] = await deliveries.list_of_event(connection, one.event_id)
    assert (shown.trigger_name, shown.workflow) == ("t0", "fulfil")
    assert shown.delivery == delivery(
        one.trigger_id,
        one.event_id,
        id=one.id,
        status="launched",
        attempts=1,
        workflow_run_id=one.run_id,
        launched_at=NOW,
        created_at=NOW,
        updated_at=NOW,
    )

    assert one.run_id is not None
    run = await runs.get(connection, one.run_id)
    assert run is not None
    assert (run.delivery_id, run.event_id, run.correlation_id) == (one.id, one.event_id, "c-1")
    assert (run.status, run.parameters, run.attempts) == ("pending", {"order_id": 7}, 0)
    claimed = await runs.claim_due(
        connection, definitions=[one.workflow_definition_id], limit=9, worker="w", lease_ms=1000
    )
    assert [r.id for r in claimed] == [one.run_id]


async def test_failed_decision_creates_no_run(connection: Connection) -> None:
    [one] = await decided(connection, status="failed", last_error="no such field", run_id=None)
    assert await deliveries.launch(connection, [one], NOW) == {}
    [shown] = await deliveries.list_of_event(connection, one.event_id)
    assert (shown.delivery.status, shown.delivery.last_error) == ("failed", "no such field")
    assert (shown.delivery.workflow_run_id, shown.delivery.launched_at) == (None, None)
    assert await counts(connection) == (1, 0)


async def test_launch_again_launches_nothing(connection: Connection) -> None:
    first, second = await decided(connection, 2)
    await deliveries.launch(connection, [first], NOW)
    again = first._replace(id=uuid7(), run_id=uuid7())
    assert await deliveries.launch(connection, [again, second], NOW) == {second.run_id: None}
    assert await counts(connection) == (2, 2)


async def test_same_decision_twice_in_one_batch_launches_once(connection: Connection) -> None:
    [one] = await decided(connection)
    twin = one._replace(id=uuid7(), run_id=uuid7())
    assert len(await deliveries.launch(connection, [one, twin], NOW)) == 1
    assert await counts(connection) == (1, 1)


async def test_workers_that_launch_the_same_events_launch_each_once(database: Database) -> None:
    async with database.transaction() as connection:
        all_decided = await decided(connection, 20)

    async def launch() -> deliveries.Created:
        mine = [one._replace(id=uuid7(), run_id=uuid7()) for one in all_decided]
        return await database.run(lambda connection: deliveries.launch(connection, mine, NOW))

    created = await asyncio.gather(*(launch() for _ in range(6)))
    assert sum(map(len, created)) == 20
    async with database.connection() as connection:
        assert await counts(connection) == (20, 20)
        assert await connection.fetchval("select count(distinct event_id) from tidegate.workflow_runs") == 20


async def test_rolled_back_launch_leaves_nothing(database: Database) -> None:
    async with database.transaction() as connection:
        [one] = await decided(connection)

    async def crash() -> None:
        async with database.transaction() as connection:
            assert await deliveries.launch(connection, [one], NOW) == {one.run_id: None}
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await crash()
    async with database.connection() as connection:
        assert await counts(connection) == (0, 0)
        assert await deliveries.launch(connection, [one], NOW) == {one.run_id: None}


async def test_database_refuses_a_second_delivery_of_an_event_to_a_trigger(connection: Connection) -> None:
    [one] = await decided(connection)
    await deliveries.launch(connection, [one], NOW)
    with pytest.raises(asyncpg.UniqueViolationError, match="once_key"):
        await connection.execute(
            "insert into tidegate.workflow_trigger_deliveries (id, trigger_id, event_id, status) "
            "values ($1, $2, $3, 'matched')",
            uuid7(),
            one.trigger_id,
            one.event_id,
        )


async def test_database_refuses_a_second_run_of_a_delivery(connection: Connection) -> None:
    [one] = await decided(connection)
    await deliveries.launch(connection, [one], NOW)
    with pytest.raises(asyncpg.UniqueViolationError, match="workflow_runs_pkey"):
        await connection.execute(
            "insert into tidegate.workflow_runs (id, workflow_definition_id, delivery_id, next_attempt_at) "
            "values ($1, $2, $1, now())",
            one.id,
            one.workflow_definition_id,
        )


async def test_deliveries_of_an_event_are_shown_in_order(connection: Connection) -> None:
    [event_id] = await make_events(connection)
    ids = await make_triggers(connection, 5)
    rows = [delivery(trigger_id, event_id) for trigger_id in ids]
    for row in rows:
        await insert_row(
            connection, "workflow_trigger_deliveries",
            id=row.id, trigger_id=row.trigger_id, event_id=event_id, status=row.status,
        )  # fmt: skip
    assert [d.delivery.id for d in await deliveries.list_of_event(connection, event_id)] == sorted(r.id for r in rows)
    assert await deliveries.list_of_event(connection, uuid7()) == []
