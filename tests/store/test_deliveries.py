"""`workflow_trigger_deliveries`: the shared suite, and one launch for each trigger and event."""

import asyncio
import uuid
from typing import Any

import asyncpg
import pytest

from tidegate.clock import uuid7
from tidegate.model.delivery import DELIVERY_STATUSES, Delivery
from tidegate.model.ids import delivery_id
from tidegate.store import deliveries, runs
from tidegate.store.db import Connection, Database
from tidegate.store.deliveries import Decided

from .builders import (
    NOW,
    SECOND,
    day_of,
    insert_row,
    make_definition,
    make_events,
    make_triggers,
    partitions_of,
    set_clock,
    waiting_deliveries,
)


def delivery(trigger_id: uuid.UUID, event_id: uuid.UUID, **changes: Any) -> Delivery:
    own_id = delivery_id(event_id, trigger_id)
    return Delivery(**{"id": own_id, "trigger_id": trigger_id, "event_id": event_id, "status": "matched"} | changes)


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
            id=(one := delivery_id(event_id, trigger_id)),
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
    assert await deliveries.launch(connection, [first, second], NOW) == {second.run_id: None}
    assert await counts(connection) == (2, 2)


async def test_same_decision_twice_in_one_batch_is_refused(connection: Connection) -> None:
    """Both are the same delivery and the same run: the batch is refused as a whole, and nothing of it is launched."""
    [one] = await decided(connection)
    await connection.execute("savepoint before")
    with pytest.raises(asyncpg.UniqueViolationError, match="workflow_runs_live_pkey"):
        await deliveries.launch(connection, [one, one], NOW)
    await connection.execute("rollback to savepoint before")
    assert await counts(connection) == (0, 0)
    assert await deliveries.launch(connection, [one], NOW) == {one.run_id: None}


def held(one: Decided) -> Decided:
    """The same delivery, decided to wait."""
    waits = {"status": "throttled", "run_id": None, "retry_state": "scheduled", "next_attempt_at": NOW}
    return one._replace(**waits, reason="throttle", source="shop.api")


async def test_what_waits_is_not_launched_again_and_what_was_launched_waits_no_more(connection: Connection) -> None:
    """What waits and what is decided are in different partitions, each with a unique key of its own."""
    first, second = await decided(connection, 2)
    await deliveries.hold(connection, [held(first)], NOW)
    assert await deliveries.launch(connection, [first, second], NOW) == {second.run_id: None}
    await deliveries.hold(connection, [held(first), held(second)], NOW)
    assert await counts(connection) == (2, 1)
    states = dict(await connection.fetch("select id, status from tidegate.workflow_trigger_deliveries"))
    assert states == {first.id: "throttled", second.id: "launched"}


async def test_a_delivery_moves_when_it_is_settled_and_launches_once(connection: Connection) -> None:
    [one] = await decided(connection)
    await deliveries.hold(connection, [held(one)], NOW)
    table = "workflow_trigger_deliveries"
    assert await partitions_of(connection, table, one.id) == [f"{table}_live"]
    settled = one._replace(retry_state="completed")
    assert await deliveries.settle(connection, [settled], NOW) == {one.run_id: None}
    assert await partitions_of(connection, table, one.id) == [day_of(table, one.id)]
    assert await deliveries.settle(connection, [settled], NOW) == {}
    assert await deliveries.launch(connection, [one], NOW) == {}
    assert await counts(connection) == (1, 1)


async def test_workers_that_launch_the_same_events_launch_each_once(database: Database) -> None:
    async with database.transaction() as connection:
        all_decided = await decided(connection, 20)

    async def launch() -> deliveries.Created:
        return await database.run(lambda connection: deliveries.launch(connection, all_decided, NOW))

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


@pytest.mark.parametrize("is_waiting", [False, True], ids=["decided", "waiting"])
async def test_database_refuses_a_second_delivery_of_an_event_to_a_trigger(
    connection: Connection, is_waiting: bool
) -> None:
    [one] = await decided(connection)
    if is_waiting:
        await deliveries.hold(connection, [held(one)], NOW)
        again, key = {"status": "throttled", "retry_state": "scheduled", "next_attempt_at": NOW}, "deliveries_live_pkey"
    else:
        await deliveries.launch(connection, [one], NOW)
        again, key = {"status": "matched"}, f"{day_of('deliveries', one.id)}_pkey"
    with pytest.raises(asyncpg.UniqueViolationError, match=key):
        await insert_row(
            connection, "workflow_trigger_deliveries",
            id=delivery_id(one.event_id, one.trigger_id), trigger_id=one.trigger_id, event_id=one.event_id, **again,
        )  # fmt: skip


@pytest.mark.parametrize("has_ended", [False, True], ids=["unfinished", "finished"])
async def test_database_refuses_a_second_run_of_a_delivery(connection: Connection, has_ended: bool) -> None:
    [one] = await decided(connection)
    await deliveries.launch(connection, [one], NOW)
    again, key = {"next_attempt_at": NOW}, "workflow_runs_live_pkey"
    if has_ended:
        ended = {"status": "succeeded", "finished_at": NOW}
        await connection.execute("update tidegate.workflow_runs set status = 'succeeded', finished_at = $1", NOW)
        again, key = ended, f"{day_of('workflow_runs', one.id)}_pkey"
    with pytest.raises(asyncpg.UniqueViolationError, match=key):
        await insert_row(
            connection, "workflow_runs",
            id=one.id, workflow_definition_id=one.workflow_definition_id, delivery_id=one.id, **again,
        )  # fmt: skip


async def test_deliveries_of_an_event_are_shown_in_order(connection: Connection) -> None:
    """By the time of the decision; those of one batch, which share it, by trigger."""
    [event_id, other] = await make_events(connection, 2)
    ids = sorted(await make_triggers(connection, 5))
    rows = [delivery(trigger_id, event_id) for trigger_id in ids] + [delivery(ids[0], other)]
    for number, row in enumerate(rows):
        await insert_row(
            connection, "workflow_trigger_deliveries",
            id=row.id, trigger_id=row.trigger_id, event_id=row.event_id, status=row.status,
            created_at=NOW if number >= 3 else NOW + SECOND,
        )  # fmt: skip
    shown = [d.delivery.trigger_id for d in await deliveries.list_of_event(connection, event_id)]
    assert shown == ids[3:] + ids[:3]
    assert await deliveries.list_of_event(connection, uuid7()) == []
