"""Ingest: accepted means committed; repeating is harmless; one request's trouble is nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import api
from tidegate.app import checked
from tidegate.client import AsyncClient, Client
from tidegate.embedded import EmbeddedPostgres
from tidegate.errors import Conflict, Overloaded, RequestRefused, Unavailable
from tidegate.flow.accept.ingest import Ingest
from tidegate.model.event import NewEvent
from tidegate.settings import Settings
from tidegate.store import migrate, retention
from tidegate.store.db import Connection, Database

from .conftest import eventually


def event(external_id: str | None = None, source: str = "test", **fields: Any) -> NewEvent:
    given = {"type": "work.quick", "source": source, "id": external_id, "payload": fields.pop("payload", {"n": 1})}
    return checked(given | fields, Settings())


class Commits:
    """Counts what ingest announces."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@contextlib.asynccontextmanager
async def ingesting(database: Database, max_waiting: int = 20_000) -> AsyncIterator[tuple[Ingest, Commits]]:
    commits = Commits()
    ingest = Ingest(database, max_waiting=max_waiting, after_commit=commits)
    yield ingest, commits
    await ingest.close()


async def counts(connection: Connection) -> tuple[int, int]:
    row = await connection.fetchrow(
        "select (select count(*) from tidegate.workflow_events), (select count(*) from tidegate.event_inbox)"
    )
    assert row is not None
    return row[0], row[1]


async def test_accepted_is_stored_with_an_inbox_row(database: Database, connection: Connection) -> None:
    async with ingesting(database) as (ingest, _):
        one = event("o-1", correlation_id="c-1", ttl_ms=5, metadata={"m": 1})
        [answer] = await ingest.accept([one])
    assert (answer.id, answer.external_id, answer.status) == (one.id, "o-1", "accepted")
    row = await connection.fetchrow("select * from tidegate.workflow_events")
    assert row is not None
    assert (row["payload"], row["correlation_id"], row["ttl_ms"], row["metadata"]) == ({"n": 1}, "c-1", 5, {"m": 1})
    assert await counts(connection) == (1, 1)


@pytest.mark.parametrize("way", ["one", "batch", "sql", "sql later"])
async def test_an_event_that_arrives_while_its_day_is_added_is_accepted(
    database: Database, connection: Connection, way: str
) -> None:
    """It has found no partition of that day, and waits for a lock on the default partition when the day appears."""
    for name in await retention.day_tables(connection):
        await connection.fetch(
            "select tidegate.drop_day($1, d.day, now() - interval '1 day') from tidegate.days() d (day)", name
        )

    async def publish(ingest: Ingest) -> None:
        if way.startswith("sql"):
            delay = 60_000 if way == "sql later" else None
            await connection.fetchval("select tidegate.publish('work.quick', 'test', delay_ms => $1)", delay)
        else:
            await ingest.accept([event() for _ in range(1 if way == "one" else 3)])

    async with ingesting(database) as (ingest, _):
        async with database.transaction() as adding:
            assert await retention.add_days(adding, ahead=1)
            publishing = asyncio.create_task(publish(ingest))
            await eventually(database, "select exists (select from pg_locks where not granted)")
        await publishing
        assert await connection.fetchval("select count(*) from tidegate.workflow_events_default") == 0
        assert (await counts(connection))[0] == (3 if way == "batch" else 1)


async def test_correlation_id_is_made_from_the_event_id(database: Database, connection: Connection) -> None:
    async with ingesting(database) as (ingest, _):
        [answer] = await ingest.accept([event()])
    assert await connection.fetchval("select correlation_id from tidegate.workflow_events") == str(answer.id)


async def test_concurrent_requests_share_commits(database: Database, connection: Connection) -> None:
    async with ingesting(database) as (ingest, commits):
        await asyncio.gather(*(ingest.accept([event()]) for _ in range(300)))
    assert await counts(connection) == (300, 300)
    assert commits.count < 30


async def test_arrival_order_is_kept_within_a_group(database: Database, connection: Connection) -> None:
    names = [f"{n * 7919 % 100:03}" for n in range(100)]
    async with ingesting(database) as (ingest, _):
        await asyncio.gather(*(ingest.accept([event(name)]) for name in names))
    rows = await connection.fetch("select external_id from tidegate.workflow_events order by ingress_sequence")
    assert [row[0] for row in rows] == names


@pytest.mark.parametrize("is_batch", [True, False])
async def test_new_events_are_stored_although_known_ones_came_with_them(
    database: Database, connection: Connection, is_batch: bool
) -> None:
    async with ingesting(database) as (ingest, _):
        known = event("o-0")
        await ingest.accept([known])
        given = [event(f"o-{n}", source="test" if n else known.source, payload={"n": 1}) for n in range(150)]
        if is_batch:
            answers = await ingest.accept(given)
        else:
            answers = [one for [one] in await asyncio.gather(*(ingest.accept([one]) for one in given))]
        later = await ingest.accept([event("o-150"), event("o-151", ttl_ms=7)])
    assert [answer.status for answer in (*answers, *later)] == ["duplicate"] + ["accepted"] * 151
    assert answers[0].id == known.id
    assert await counts(connection) == (152, 152)


async def test_columns_that_only_some_events_fill_stay_with_their_event(
    database: Database, connection: Connection
) -> None:
    given = [
        event("a", ttl_ms=5), event(None, source="other"), event("c", correlation_id="mine", metadata={"m": 1}),
        event("d", occurred_at="2026-11-01T00:00:00Z", type="work.slow"),
    ]  # fmt: skip
    async with ingesting(database) as (ingest, _):
        await ingest.accept(given)
    rows = await connection.fetch(
        "select external_id, type, source, ttl_ms, correlation_id = id::text as is_own, metadata, "
        "       occurred_at = received_at as is_now from tidegate.workflow_events order by ingress_sequence"
    )
    assert [tuple(row) for row in rows] == [
        ("a", "work.quick", "test", 5, True, {}, True),
        (None, "work.quick", "other", None, True, {}, True),
        ("c", "work.quick", "test", None, False, {"m": 1}, True),
        ("d", "work.slow", "test", None, True, {}, False),
    ]


async def test_the_same_id_again_is_a_duplicate_of_the_first(database: Database, connection: Connection) -> None:
    async with ingesting(database) as (ingest, commits):
        [first] = await ingest.accept([event("o-1")])
        [second] = await ingest.accept([event("o-1", correlation_id="another request")])
        [other] = await ingest.accept([event("o-1", source="another.source")])
    assert (second.id, second.status) == (first.id, "duplicate")
    assert other.status == "accepted"
    assert await counts(connection) == (2, 2)
    assert commits.count == 2


@pytest.mark.parametrize(
    ("first", "again", "same"),
    [
        ({"n": 1e2}, {"n": 100}, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, True),
        ({"n": True}, {"n": 1}, False),
        ({"n": 1}, {"n": "1"}, False),
        ({"n": None}, {}, False),
    ],
)
async def test_bodies_are_compared_by_value(database: Database, first: Any, again: Any, same: bool) -> None:
    async with ingesting(database) as (ingest, _):
        await ingest.accept([event("o-1", payload=first)])
        if same:
            assert (await ingest.accept([event("o-1", payload=again)]))[0].status == "duplicate"
        else:
            with pytest.raises(Conflict) as refused:
                await ingest.accept([event("o-1", payload=again)])
            assert refused.value.errors[0].field == "id"


async def test_a_batch_with_a_conflict_stores_nothing_of_it(database: Database, connection: Connection) -> None:
    async with ingesting(database) as (ingest, _):
        await ingest.accept([event("taken")])
        with pytest.raises(Conflict) as refused:
            await ingest.accept([event("new-1"), event("taken", payload={"n": 2}), event("new-2")])
    assert [e.field for e in refused.value.errors] == ["[1].id"]
    assert await counts(connection) == (1, 1)


async def test_a_conflict_leaves_the_other_requests_of_its_group_alone(
    database: Database, connection: Connection
) -> None:
    async with ingesting(database) as (ingest, _):
        await ingest.accept([event("taken")])
        requests = [[event(f"new-{n}")] for n in range(10)]
        requests[4] = [event("taken", payload={"n": 2})]
        answers = await asyncio.gather(*(ingest.accept(request) for request in requests), return_exceptions=True)
    assert [n for n, answer in enumerate(answers) if isinstance(answer, Conflict)] == [4]
    assert sum(isinstance(answer, list) for answer in answers) == 9
    assert await counts(connection) == (10, 10)


async def test_a_conflict_with_a_refused_request_of_the_same_group_is_none(
    database: Database, connection: Connection
) -> None:
    async with ingesting(database) as (ingest, _):
        await ingest.accept([event("taken")])
        refused = [event("o-1"), event("taken", payload={"n": 2})]
        answers = await asyncio.gather(
            ingest.accept([event("first")]),  # the others arrive while it is written, and share the next commit
            ingest.accept(refused),
            ingest.accept([event("o-1", payload={"n": 3}), event("o-2")]),
            return_exceptions=True,
        )
    assert [type(answer) for answer in answers] == [list, Conflict, list]
    assert await counts(connection) == (4, 4)


async def test_one_batch_with_the_same_id_twice(database: Database, connection: Connection) -> None:
    async with ingesting(database) as (ingest, _):
        one, two = await ingest.accept([event("o-1"), event("o-1")])
        with pytest.raises(Conflict) as refused:
            await ingest.accept([event("o-3"), event("o-2"), event("o-2", payload={"n": 2})])
    [error] = refused.value.errors
    assert (error.field, error.message) == (
        "[2].id", "'o-2' is also the id of [1] in this batch, with another body; give each its own id",
    )  # fmt: skip
    assert {one.status, two.status} == {"accepted", "duplicate"}
    assert one.id == two.id
    assert await counts(connection) == (1, 1)


async def test_many_publishers_of_the_same_ids_make_one_row_each(database: Database, connection: Connection) -> None:
    """Opposite orders in every transaction: they wait for each other, never deadlock."""
    names = [f"o-{n}" for n in range(50)]
    async with contextlib.AsyncExitStack() as stack:
        ingests = [(await stack.enter_async_context(ingesting(database)))[0] for _ in range(6)]
        orders = [names, names[::-1]] * 3
        answers = await asyncio.gather(
            *(ingest.accept([event(n) for n in order]) for ingest, order in zip(ingests, orders, strict=True))
        )
    assert await counts(connection) == (50, 50)
    accepted = [a for answer in answers for a in answer if a.status == "accepted"]
    assert len(accepted) == 50


async def test_two_processes_at_once_make_one_row(database_url: str, connection: Connection) -> None:
    with api(database_url) as (_, one), api(database_url) as (_, two):
        clients = [AsyncClient(one), AsyncClient(two)]
        receipts = await asyncio.gather(
            *(clients[n % 2].publish("work.quick", source="test", id="same", payload={"n": 1}) for n in range(100))
        )
        for client in clients:
            await client.close()
    assert len({r.id for r in receipts}) == 1
    assert [r.status for r in receipts].count("accepted") == 1
    assert await counts(connection) == (1, 1)


class LostAnswers(Database):
    """Commits, and then reports that the connection was lost: the caller cannot know what happened."""

    def __init__(self, url: str) -> None:
        super().__init__(url, "test", size=2)
        self.losses = 1

    @contextlib.asynccontextmanager
    async def transaction(self, wait_seconds: float = 5) -> AsyncIterator[Connection]:
        async with super().transaction(wait_seconds) as connection:
            yield connection
        if self.losses:
            self.losses -= 1
            raise Unavailable("the connection was lost in the middle of COMMIT")


async def test_a_lost_answer_to_commit_makes_no_second_event(database_url: str, connection: Connection) -> None:
    database = LostAnswers(database_url)
    async with ingesting(database) as (ingest, _):
        answers = await ingest.accept([event(), event("o-1")])
    await database.close()
    assert [a.status for a in answers] == ["accepted", "accepted"]
    assert await counts(connection) == (2, 2)


async def test_an_open_transaction_with_the_same_id_delays_only_that_id(
    database: Database, connection: Connection
) -> None:
    async with database.transaction() as other:
        await other.execute("select tidegate.publish('work.quick', 'test', '{\"n\": 1}', id => 'held')")
        async with ingesting(database) as (ingest, _):
            answers = await asyncio.gather(
                *(ingest.accept([event(name)]) for name in ("free-1", "held", "free-2")), return_exceptions=True
            )
    assert [isinstance(answer, list) for answer in answers] == [True, False, True]
    assert isinstance(answers[1], Unavailable)
    assert await counts(connection) == (3, 3)


async def test_over_the_bound_is_refused_at_once(database: Database, connection: Connection) -> None:
    async with ingesting(database, max_waiting=10) as (ingest, _):
        answers = await asyncio.gather(*(ingest.accept([event()] * 1) for _ in range(25)), return_exceptions=True)
    refused = [a for a in answers if isinstance(a, Overloaded)]
    stored, _ = await counts(connection)
    assert len(refused) > 0
    assert stored == 25 - len(refused)


async def test_database_down_is_503_and_never_202(tmp_path: Path) -> None:
    server = EmbeddedPostgres(tmp_path)
    url = server.start()
    try:
        database = Database(url, "test", size=1)
        await migrate.migrate(database)
        await database.close()
        with api(url) as (_, address), Client(address) as client:
            assert client.publish("work.quick", source="test", payload={}).status == "accepted"
            server.stop(immediate=True)
            for _ in range(3):
                with pytest.raises(Unavailable) as refused:
                    client.publish("work.quick", source="test", payload={})
                assert refused.value.retry_after_seconds >= 1
            with pytest.raises(Unavailable):
                client.request("GET", "/v1/events")
            with pytest.raises(Unavailable):
                client.request("GET", "/readyz")
            assert client.request("GET", "/livez") == {"status": "ok"}
            server.start()
            assert client.publish("work.quick", source="test", payload={}).status == "accepted"
            assert len(client.request("GET", "/v1/events")["events"]) == 2
    finally:
        server.stop()


async def test_a_conflict_over_http_names_the_field(database_url: str) -> None:
    with api(database_url) as (_, url), Client(url) as client:
        client.publish("work.quick", source="test", id="o-1", payload={"n": 1})
        with pytest.raises(RequestRefused) as refused:
            client.publish("work.quick", source="test", id="o-1", payload={"n": 2})
    assert refused.value.status == 409
    assert refused.value.problem["errors"][0]["field"] == "id"
