"""`tidegate.publish(…)`: publishing from SQL, inside the caller's own transaction."""

import asyncio
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import msgspec
import pytest

from tidegate.embedded import EmbeddedPostgres
from tidegate.store import events
from tidegate.store.db import Connection, Database

from .builders import NOW, SECOND, set_clock


async def publish(connection: Connection, **arguments: Any) -> uuid.UUID:
    """Call the function by argument name, as its users do."""
    given = {"type": "order.created", "source": "shop.sql"} | arguments
    names = ", ".join(f"{name} => ${n}" for n, name in enumerate(given, 1))
    found = await connection.fetchval(f"select tidegate.publish({names})", *given.values())
    assert isinstance(found, str)
    return uuid.UUID(found)


async def count(connection: Connection) -> int:
    found: int = await connection.fetchval(
        "select (select count(*) from tidegate.workflow_events) + (select count(*) from tidegate.event_inbox)"
    )
    return found


def deep(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": value}
    return value


async def test_published_event_waits_in_the_inbox(connection: Connection) -> None:
    await set_clock(connection)
    event_id = await publish(
        connection,
        payload={"id": 7, "n": None},
        id="o-7",
        occurred_at=NOW - SECOND,
        correlation_id="c-1",
        ttl_ms=1000,
        metadata={"k": "v"},
    )
    assert event_id.version == 7
    [event] = (await events.claim_inbox(connection, 10)).events
    assert (event.id, event.external_id, event.type, event.source) == (event_id, "o-7", "order.created", "shop.sql")
    assert (event.occurred_at, event.received_at) == (NOW - SECOND, NOW)
    assert (event.payload, event.metadata) == ({"id": 7, "n": None}, {"k": "v"})
    assert (event.correlation_id, event.ttl_ms) == ("c-1", 1000)


async def test_what_is_left_out_is_filled_in(connection: Connection) -> None:
    await set_clock(connection)
    event_id = uuid.UUID(await connection.fetchval("select tidegate.publish('order.created', 'shop.sql')"))
    [event] = await events.find(connection, str(event_id))
    assert (event.payload, event.metadata, event.external_id, event.ttl_ms) == ({}, {}, None, None)
    assert (event.occurred_at, event.correlation_id) == (NOW, str(event_id))


async def test_ids_carry_the_time(connection: Connection) -> None:
    before = await connection.fetchval("select clock_timestamp()")
    ids = [await publish(connection) for _ in range(3)]
    after = await connection.fetchval("select clock_timestamp()")
    millisecond = timedelta(milliseconds=1)
    assert len(set(ids)) == 3
    assert {i.variant for i in ids} == {uuid.RFC_4122}
    for event_id in ids:
        made_at = before.fromtimestamp((event_id.int >> 80) / 1000, before.tzinfo)
        assert before - millisecond <= made_at <= after + millisecond


async def test_rolled_back_means_not_published(database: Database) -> None:
    async def crash() -> None:
        async with database.transaction() as connection:
            await publish(connection, id="o-7")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await crash()
    async with database.connection() as connection:
        assert await count(connection) == 0
        await publish(connection, id="o-7", payload={"another": "body"})
        assert await count(connection) == 2


async def test_not_seen_before_the_commit(database: Database) -> None:
    async with database.transaction() as writer, database.connection() as reader:
        await publish(writer)
        assert await count(reader) == 0


@pytest.mark.parametrize(
    "repeat",
    [{}, {"correlation_id": "another request"}, {"occurred_at": NOW}, {"payload": {"b": 2, "a": 1}}, {"metadata": {}}],
)
async def test_repeat_returns_the_first_id(connection: Connection, repeat: dict[str, Any]) -> None:
    await set_clock(connection)
    body = {"id": "o-7", "payload": {"a": 1, "b": 2}}
    first = await publish(connection, **body, correlation_id="c-1", occurred_at=NOW)
    assert await publish(connection, **body | repeat) == first
    assert await count(connection) == 2


async def test_same_id_of_another_source_is_another_event(connection: Connection) -> None:
    assert await publish(connection, id="o-7") != await publish(connection, id="o-7", source="crm")
    assert await count(connection) == 4


@pytest.mark.parametrize(
    "other",
    [
        {"payload": {"a": 2}},
        {"type": "order.deleted"},
        {"metadata": {"k": 1}},
        {"ttl_ms": 5},
        {"occurred_at": NOW - SECOND},
    ],
)
async def test_other_body_is_refused(connection: Connection, other: dict[str, Any]) -> None:
    await set_clock(connection)
    body = {"id": "o-7", "payload": {"a": 1}}
    first = await publish(connection, **body)
    with pytest.raises(asyncpg.UniqueViolationError, match=rf"^id: o-7 .* shop\.sql .* {first}"):
        await publish(connection, **body | other)


async def test_many_callers_at_once_publish_one_event(database: Database) -> None:
    async def one() -> uuid.UUID:
        async with database.transaction() as connection:
            return await publish(connection, id="o-7", payload={"a": 1})

    assert len(set(await asyncio.gather(*(one() for _ in range(10))))) == 1
    async with database.connection() as connection:
        assert await count(connection) == 2


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("type", None),
        ("type", ""),
        ("type", "a b"),
        ("type", "order.*"),
        ("type", "a\n"),
        ("type", "é"),
        ("type", "x" * 201),
        ("source", None),
        ("source", ""),
        ("source", "a\tb"),
        ("source", "x" * 5000),
        ("payload", None),
        ("payload", []),
        ("payload", "text"),
        ("payload", {"n": 2**63}),
        ("payload", {"a": [{"n": -(2**63) - 1}]}),
        ("payload", deep(65)),
        ("payload", deep(500)),
        ("payload", {str(n): n for n in range(10_001)}),
        ("payload", {"a": [{"b": 1}] * 10_000}),
        ("metadata", None),
        ("metadata", 1),
        ("metadata", {"a": "x" * 16_384}),
        ("metadata", {"n": 10**30}),
        ("metadata", deep(65)),
        ("id", ""),
        ("id", " "),
        ("id", "a\nb"),
        ("id", "a\x7f"),
        ("id", "a\x85"),
        ("id", "x" * 201),
        ("correlation_id", ""),
        ("correlation_id", "\t"),
        ("correlation_id", "x" * 201),
        ("ttl_ms", 0),
        ("ttl_ms", -1),
        ("ttl_ms", 315_360_000_001),
        ("occurred_at", NOW - timedelta(days=3651)),
        ("occurred_at", NOW + timedelta(days=1, seconds=1)),
    ],
)
async def test_bad_argument_is_refused_by_name(connection: Connection, argument: str, value: Any) -> None:
    await set_clock(connection)
    savepoint = connection.transaction()  # type: ignore[attr-defined]
    await savepoint.start()
    with pytest.raises(asyncpg.InvalidParameterValueError, match=f"^{argument}: "):
        await publish(connection, **{argument: value})
    await savepoint.rollback()
    assert await count(connection) == 0


@pytest.mark.parametrize("text", ["infinity", "-infinity", "20000-01-01", "0044-03-15 BC"])
async def test_time_that_python_cannot_hold_is_refused(connection: Connection, text: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match=r"^occurred_at: "):
        await connection.execute(f"select tidegate.publish('t', 's', occurred_at => '{text}')")


@pytest.mark.parametrize("number", ["1e400", "-1e5000", "1" + "0" * 5000])
async def test_number_that_python_cannot_hold_is_refused(connection: Connection, number: str) -> None:
    with pytest.raises(asyncpg.InvalidParameterValueError, match=r"^payload: "):
        await connection.execute(f"select tidegate.publish('t', 's', '{{\"n\": {number}}}')")


async def test_oversize_payload_is_refused(connection: Connection) -> None:
    with pytest.raises(asyncpg.ProgramLimitExceededError, match=r"^payload: is 262153 bytes"):
        await publish(connection, payload={"a": "x" * 262_144})


@pytest.mark.parametrize(
    "accepted",
    [
        {"type": "x" * 200},
        {"source": "https://shop.example/api?a=1&b=2#f"},
        {"id": "x" * 200},
        {"id": "Ünïcödé ❤"},
        {"ttl_ms": 315_360_000_000},
        {"payload": deep(64)},
        {"payload": {"n": 2**63 - 1, "m": -(2**63), "tiny": 1e-300}},
        {"payload": {str(n): n for n in range(10_000)}},
        {"payload": {"text": "9" * 400}},
        {"payload": {"a": "x" * 262_100}},
        {"occurred_at": NOW - timedelta(days=3650)},
        {"occurred_at": NOW + timedelta(days=1)},
    ],
)
async def test_accepted_at_its_bounds_and_readable(connection: Connection, accepted: dict[str, Any]) -> None:
    await set_clock(connection)
    event_id = await publish(connection, **accepted)
    [event] = (await events.claim_inbox(connection, 10)).events
    assert event.id == event_id
    for name, value in accepted.items():
        assert getattr(event, "external_id" if name == "id" else name) == value
    msgspec.json.encode(event)


async def test_producer_needs_only_the_right_to_call(postgres: EmbeddedPostgres, database_url: str) -> None:
    database = Database(postgres.admin_url(urlsplit(database_url).path[1:]), "test", size=1)
    async with database.transaction() as connection:
        await connection.execute(
            "create role tidegate_test_producer; grant usage on schema tidegate to tidegate_test_producer"
        )
        try:
            await connection.execute("set local role tidegate_test_producer")
            await publish(connection, id="o-7")
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                async with connection.transaction():  # type: ignore[attr-defined]
                    await connection.fetch("select * from tidegate.workflow_events")
        finally:
            await connection.execute("reset role")
        assert await count(connection) == 2
        await connection.execute("drop owned by tidegate_test_producer; drop role tidegate_test_producer")
    await database.close()


async def test_ids_made_by_sql_are_uuid7_in_the_order_of_their_making(connection: Connection) -> None:
    before = await connection.fetchval("select clock_timestamp()")
    made = [await connection.fetchval("select tidegate.uuid7()") for _ in range(500)]
    after = await connection.fetchval("select clock_timestamp()")
    assert {(one.version, one.variant) for one in made} == {(7, uuid.RFC_4122)}
    assert sorted(made) == made, "many of one millisecond, each behind the one before"
    times = [datetime.fromtimestamp((one.int >> 80) / 1000, UTC) for one in made]
    assert before - timedelta(milliseconds=1) <= times[0] <= times[-1] <= after
    assert len({one.int & (2**62 - 1) for one in made}) == len(made), "the rest is random"
