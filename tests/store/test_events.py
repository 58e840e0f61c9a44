"""`workflow_events` and the inbox: stored once, taken by one, and back again when a batch fails."""

import asyncio
import uuid
from datetime import timedelta
from typing import Any

import asyncpg
import msgspec
import pytest

from tidegate.clock import uuid7
from tidegate.model.event import NewEvent
from tidegate.model.ids import EventId
from tidegate.store import circumstances, events, retention
from tidegate.store.db import Connection, Database

from .builders import HOUR, NOW, SECOND, insert_row, make_events, new_event, set_clock


def again(event: NewEvent, **changes: Any) -> NewEvent:
    """The same event, sent once more."""
    return msgspec.structs.replace(event, **{"id": uuid7()} | changes)


async def stored_count(connection: Connection) -> tuple[int, int]:
    """How many events there are, and how many of them wait in the inbox."""
    row = await connection.fetchrow(
        "select (select count(*) from tidegate.workflow_events), (select count(*) from tidegate.event_inbox)"
    )
    assert row is not None
    return row[0], row[1]


async def test_stored_as_given(connection: Connection) -> None:
    await set_clock(connection)
    given = new_event(
        external_id="o-7",
        occurred_at=NOW - HOUR,
        payload='{"id":7,"amount":1.5,"tags":["a",null]}',
        correlation_id="c-1",
        ttl_ms=1000,
        metadata='{"k":"v"}',
        traceparent="00-a-b-01",
    )
    assert await events.insert(connection, [given]) == {given.id}
    [event] = await events.find(connection, "o-7")
    assert (event.id, event.external_id, event.type, event.source) == (given.id, "o-7", "order.created", "shop.api")
    assert (event.occurred_at, event.received_at) == (NOW - HOUR, NOW)
    assert (event.payload, event.metadata) == ({"id": 7, "amount": 1.5, "tags": ["a", None]}, {"k": "v"})
    assert (event.correlation_id, event.ttl_ms, event.traceparent) == ("c-1", 1000, "00-a-b-01")


async def test_what_is_left_out_is_filled_in(connection: Connection) -> None:
    await set_clock(connection)
    [event_id] = await make_events(connection)
    event = (await events.get_many(connection, [event_id]))[event_id]
    assert (event.occurred_at, event.received_at) == (NOW, NOW)
    assert (event.correlation_id, event.external_id) == (str(event_id), None)


async def test_sequence_follows_the_order_given(connection: Connection) -> None:
    given = [new_event(external_id=name) for name in ("z", "a", "m", None, "b")]
    await events.insert(connection, given)
    batch = (await events.claim_inbox(connection, 10)).events
    assert [e.id for e in batch] == [e.id for e in given]


async def test_same_id_again_is_not_new(connection: Connection) -> None:
    given = new_event()
    assert await events.insert(connection, [given]) == {given.id}
    assert await events.insert(connection, [given]) == set()
    assert await stored_count(connection) == (1, 1)
    assert await events.resolve(connection, [given]) == {given.id: events.Resolved(given.id, True)}


async def test_producers_id_is_unique_for_its_source(connection: Connection) -> None:
    first = new_event(external_id="o-7")
    repeated, elsewhere = again(first), again(first, source="crm")
    assert await events.insert(connection, [first]) == {first.id}
    assert await events.insert(connection, [repeated, elsewhere]) == {elsewhere.id}
    assert await events.resolve(connection, [repeated]) == {repeated.id: events.Resolved(first.id, True)}
    assert await stored_count(connection) == (2, 2)


async def test_repeats_within_one_batch_are_stored_once(connection: Connection) -> None:
    first = new_event(external_id="o-7")
    new = await events.insert(connection, [first, again(first), again(first)])
    assert new == {first.id}
    assert await stored_count(connection) == (1, 1)


async def test_events_without_a_producers_id_are_all_new(connection: Connection) -> None:
    given = [new_event() for _ in range(3)]
    assert await events.insert(connection, given) == {e.id for e in given}


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({}, True),
        ({"occurred_at": None}, True),
        ({"correlation_id": None}, True),
        ({"correlation_id": "another request"}, True),
        ({"payload": '{ "b": 2.0, "a": 1 }'}, True),
        ({"traceparent": "other"}, True),
        ({"payload": '{"a":1,"b":3}'}, False),
        ({"payload": '{"a":1}'}, False),
        ({"type": "order.deleted"}, False),
        ({"metadata": '{"k":1}'}, False),
        ({"ttl_ms": None}, False),
        ({"ttl_ms": 2000}, False),
        ({"occurred_at": NOW + SECOND}, False),
    ],
)
async def test_repeat_has_the_same_body_or_another(connection: Connection, change: dict[str, Any], same: bool) -> None:
    first = new_event(external_id="o-7", payload='{"a":1,"b":2}', occurred_at=NOW, correlation_id="c-1", ttl_ms=1000)
    await events.insert(connection, [first])
    repeated = again(first, **change)
    assert await events.insert(connection, [repeated]) == set()
    assert await events.resolve(connection, [repeated]) == {repeated.id: events.Resolved(first.id, same)}


async def test_resolve_knows_nothing_of_new_events(connection: Connection) -> None:
    assert await events.resolve(connection, [new_event(external_id="o-7"), new_event()]) == {}


async def test_same_event_from_many_connections_is_stored_once(database: Database) -> None:
    first = new_event(external_id="o-7")

    async def publish() -> set[uuid.UUID]:
        return await database.run(lambda connection: events.insert(connection, [again(first)]))

    new = await asyncio.gather(*(publish() for _ in range(10)))
    assert sum(map(len, new)) == 1
    async with database.connection() as connection:
        assert await stored_count(connection) == (1, 1)


async def test_same_ids_in_other_orders_do_not_deadlock(database: Database) -> None:
    given = [new_event(external_id=f"o-{n:04}") for n in range(1000)]  # enough for two statements to overlap

    async def publish(order: list[NewEvent]) -> int:
        async with database.transaction() as connection:
            return len(await events.insert(connection, [again(event) for event in order]))

    new = await asyncio.gather(*(publish(order) for order in (given, given[::-1]) * 4))
    assert sum(new) == 1000


# The inbox ----------------------------------------------------------------------------------------------------------


async def test_inbox_oldest_first_and_never_more_than_the_limit(connection: Connection) -> None:
    ids = await make_events(connection, 5)
    batches = [(await events.claim_inbox(connection, 2)).events for _ in range(4)]
    assert [[e.id for e in batch] for batch in batches] == [ids[:2], ids[2:4], ids[4:], []]
    assert await stored_count(connection) == (5, 0)


async def test_two_open_transactions_take_disjoint_events(database: Database) -> None:
    async with database.transaction() as connection:
        ids = await make_events(connection, 10)
    async with database.transaction() as one, database.transaction() as two:
        (first, _), (second, _) = await asyncio.gather(events.claim_inbox(one, 6), events.claim_inbox(two, 6))
        assert sorted(e.id for e in (*first, *second)) == sorted(ids)
        async with database.transaction() as three:
            assert (await events.claim_inbox(three, 10)).events == []
            # What others hold is not lost sight of.
            assert len(await events.list_inbox(three, 100)) == 10


async def test_rolled_back_batch_is_in_the_inbox_again(database: Database) -> None:
    async with database.transaction() as connection:
        ids = await make_events(connection, 3)

    async def crash() -> None:
        async with database.transaction() as connection:
            assert len((await events.claim_inbox(connection, 10)).events) == 3
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await crash()
    async with database.transaction() as connection:
        assert [e.id for e in (await events.claim_inbox(connection, 10)).events] == ids


async def test_one_event_is_taken_by_one(database: Database) -> None:
    async with database.transaction() as connection:
        [event_id, _other] = await make_events(connection, 2)
        [sequence, _] = await events.list_inbox(connection, 10)
    async with database.transaction() as one, database.transaction() as two:
        taken = await asyncio.gather(*(events.claim_inbox_one(c, sequence) for c in (one, two)))
    assert sorted([e.id for e in batch] for batch in taken) == [[], [event_id]]
    async with database.transaction() as connection:
        assert await events.claim_inbox_one(connection, sequence) == []
        assert len(await events.list_inbox(connection, 10)) == 1


async def told(connection: Connection, event_id: EventId) -> tuple[bool, str | None]:
    """Whether an event is undecided, and why it was dead-lettered, as `explain` reads it."""
    around = await circumstances.of_event(connection, event_id)
    reasons = [letter.reason for letter in await circumstances.letters(connection, event_id)]
    return around.is_undecided, reasons[-1] if reasons else None


async def test_a_dead_lettered_event_leaves_the_inbox_with_its_reason(connection: Connection) -> None:
    [event_id, other] = await make_events(connection, 2)
    [sequence, _] = await events.list_inbox(connection, 10)
    assert await told(connection, event_id) == (True, None)
    assert await events.dead_letter(connection, sequence, "ValueError: x") is not None
    assert await told(connection, event_id) == (False, "ValueError: x")
    assert await events.dead_letter(connection, sequence, "again") is None
    assert await told(connection, event_id) == (False, "ValueError: x")
    assert [e.id for e in (await events.claim_inbox(connection, 10)).events] == [other]
    assert await told(connection, other) == (False, None)
    assert await told(connection, EventId(uuid7())) == (False, None)


# Reading ------------------------------------------------------------------------------------------------------------


async def test_find_by_our_id_or_the_producers(connection: Connection) -> None:
    first = new_event(external_id="o-7")
    elsewhere = again(first, source="crm")
    named_like_the_first = new_event(external_id=str(first.id))
    await events.insert(connection, [first, elsewhere, named_like_the_first])
    assert {e.id for e in await events.find(connection, "o-7")} == {first.id, elsewhere.id}
    assert [e.id for e in await events.find(connection, str(first.id))] == [first.id]
    assert [e.id for e in await events.find(connection, str(first.id).upper())] == [first.id]
    assert await events.find(connection, "nosuch") == []
    assert await events.find(connection, str(uuid7())) == []


async def test_find_of_a_producers_id_that_looks_like_ours(connection: Connection) -> None:
    given = new_event(external_id=str(uuid7()))
    await events.insert(connection, [given])
    assert given.external_id is not None
    assert [e.id for e in await events.find(connection, given.external_id)] == [given.id]


async def test_get_many(connection: Connection) -> None:
    ids = await make_events(connection, 3)
    found = await events.get_many(connection, [*ids[:2], uuid7()])
    assert found.keys() == set(ids[:2])
    assert await events.get_many(connection, []) == {}


async def test_pages_newest_first_neither_skip_nor_repeat(connection: Connection) -> None:
    ids = await make_events(connection, 5)
    seen: list[Any] = []
    place = None
    while page := await events.list_page(connection, before=place, limit=2):
        seen += page
        place = events.ReceiptPlace(page[-1].received_at, page[-1].ingress_sequence)
        await make_events(connection)  # what arrives meanwhile is newer
    assert [e.id for e in seen] == ids[::-1]


async def test_list_filters(connection: Connection) -> None:
    await set_clock(connection, NOW)
    [plain] = await make_events(connection)
    [typed] = await make_events(connection, type="order.deleted", correlation_id="c-1")
    await set_clock(connection, NOW + HOUR)
    [late] = await make_events(connection, source="crm", correlation_id="c-1")

    async def listed(**filters: Any) -> list[uuid.UUID]:
        return [e.id for e in await events.list_page(connection, **filters)]

    assert await listed() == [late, typed, plain]
    assert await listed(event_type="order.deleted") == [typed]
    assert await listed(source="crm") == [late]
    assert await listed(correlation_id="c-1") == [late, typed]
    assert await listed(received_from=NOW + HOUR) == [late]
    assert await listed(received_to=NOW + HOUR) == [typed, plain]
    assert await listed(event_type="order.created", source="shop.api") == [plain]
    assert await listed(source="nosuch") == []
    assert await listed(limit=1) == [late]


# What the database itself refuses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "constraint"),
    [
        ("type = ''", "type_check"),
        ("type = 'a b'", "type_check"),
        ("type = E'a\\n'", "type_check"),
        ("type = repeat('x', 201)", "type_check"),
        ("source = 'a*'", "source_check"),
        ("source = 'é'", "source_check"),
        ("external_id = ''", "external_id_check"),
        ("external_id = repeat('x', 201)", "external_id_check"),
        ("correlation_id = ''", "correlation_id_check"),
        ("payload = '[]'", "payload_check"),
        ("payload = '1'", "payload_check"),
        ("metadata = 'null'", "metadata_check"),
        ("ttl_ms = 0", "ttl_check"),
        ("occurred_at = 'infinity'", "occurred_at_check"),
        ("occurred_at = '-infinity'", "occurred_at_check"),
        ("occurred_at = '20000-01-01'", "occurred_at_check"),
        ("occurred_at = '0001-01-01 BC'", "occurred_at_check"),
    ],
)
async def test_illegal_event_is_refused(connection: Connection, assignment: str, constraint: str) -> None:
    await make_events(connection)
    with pytest.raises(asyncpg.CheckViolationError) as caught:
        await connection.execute(f"update tidegate.workflow_events set {assignment}")
    assert caught.value.constraint_name == f"workflow_events_{constraint}"


async def test_event_that_waits_is_not_taken_to_be_deleted(connection: Connection) -> None:
    """No foreign key keeps it: nothing but retention deletes events, and retention asks."""
    await set_clock(connection)
    [event_id] = await make_events(connection)
    await set_clock(connection, NOW + HOUR)

    async def taken() -> list[uuid.UUID]:
        return await retention.lock_finished_events(connection, [event_id], older_seconds=60)

    assert await taken() == []  # undecided
    await events.claim_inbox(connection, 1)
    assert await taken() == [event_id]
    await insert_row(
        connection, "event_ingress_retries", event_id=event_id, source="shop", next_attempt_at=NOW, updated_at=NOW
    )
    assert await taken() == []  # held
    await connection.execute("update tidegate.event_ingress_retries set retry_state = 'completed'")
    assert await taken() == [event_id]


async def test_received_at_is_the_databases_time(connection: Connection) -> None:
    before = await connection.fetchval("select clock_timestamp()")
    [event_id] = await make_events(connection)
    after = await connection.fetchval("select clock_timestamp()")
    event = (await events.get_many(connection, [event_id]))[event_id]
    assert before <= event.received_at <= after
    assert event.received_at.utcoffset() == timedelta(0)
