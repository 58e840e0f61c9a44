"""Days of history: what is stored where, and what is left of a day that is dropped."""

from __future__ import annotations

import asyncio
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, time, timedelta
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from tidegate.clock import uuid7
from tidegate.embedded import EmbeddedPostgres
from tidegate.model.ids import delivery_id, step_id
from tidegate.store import deliveries, events, retention, runs, steps
from tidegate.store.db import Connection, Database, TransientConflict
from tidegate.store.grants import PUBLISH, WORK, grant

from .builders import (
    day_of,
    insert_row,
    make_definition,
    make_events,
    make_triggers,
    new_event,
    partitions_of,
    set_clock,
)

ONE_DAY = timedelta(days=1)
# A day that has no partition in a fresh database, and a time long after it.
DAY = datetime.now(UTC).date() - timedelta(days=40)
BEGIN = datetime.combine(DAY, time(), UTC)
SINCE = BEGIN + timedelta(days=10)
# The tables that have days, with the column that tells the day; and the producers' ids, which have none.
KEYS = {
    "workflow_runs": "id", "workflow_run_steps": "id", "run_children": "step_id", "workflow_trigger_deliveries": "id",
    "event_ingress_retries": "event_id", "event_decisions": "event_id", "workflow_events": "id",
}  # fmt: skip
ALL_KEYS = KEYS | {"event_external_ids": "event_id"}


def id_at(at: datetime, n: int = 0) -> uuid.UUID:
    """An id as we make them, at this time: the nth of its millisecond."""
    ms = round(at.timestamp() * 1000)
    return uuid.UUID(int=ms << 80 | 0x7 << 76 | n << 64 | 0x2 << 62 | uuid.uuid4().int >> 66)


async def make_story(connection: Connection, event_id: uuid.UUID) -> uuid.UUID:
    """An event that is finished, with rows in every table: it was held, one trigger launched a run of two steps,
    another was skipped. All of it happened when the event came. Returns the run."""
    at = datetime.fromtimestamp((event_id.int >> 80) / 1000, UTC)
    definition = await make_definition(connection)
    launching, skipping = await make_triggers(connection, 2)
    run_id, times = delivery_id(event_id, launching), {"created_at": at, "updated_at": at}
    await insert_row(
        connection, "workflow_events", id=event_id, external_id=str(event_id), type="order.created", source="shop.api",
        occurred_at=at, received_at=at, payload={"n": 1}, correlation_id=str(event_id),
    )  # fmt: skip
    await insert_row(connection, "event_external_ids", external_id=str(event_id), source="shop.api", event_id=event_id)
    await insert_row(
        connection, "event_ingress_retries", event_id=event_id, source="shop.api", retry_state="completed", **times
    )
    for decision in ("throttled", "released"):
        await insert_row(connection, "event_decisions", event_id=event_id, at=at, stage="gate", decision=decision)
    await insert_row(
        connection, "workflow_trigger_deliveries", id=run_id, trigger_id=launching, event_id=event_id,
        status="launched", workflow_run_id=run_id, launched_at=at, **times,
    )  # fmt: skip
    await insert_row(
        connection, "workflow_trigger_deliveries", id=delivery_id(event_id, skipping), trigger_id=skipping,
        event_id=event_id, status="skipped", **times,
    )  # fmt: skip
    await insert_row(
        connection, "workflow_runs", id=run_id, workflow_definition_id=definition, delivery_id=run_id,
        event_id=event_id, trigger_id=launching, status="succeeded", finished_at=at, **times,
    )  # fmt: skip
    for number, name in enumerate(("one", "two")):
        await insert_row(
            connection, "workflow_run_steps", id=step_id(run_id, name), workflow_run_id=run_id, name=name,
            status="succeeded", result=1, created_at=at + timedelta(microseconds=number), updated_at=at,
        )  # fmt: skip
        await insert_row(
            connection, "run_children", step_id=step_id(run_id, name), run_id=run_id, workflow="child", parameters={},
            status="succeeded", event_id=uuid7(), child_run_id=uuid7(), created_at=at, updated_at=at,
        )  # fmt: skip
    return run_id


async def stories(connection: Connection) -> dict[str, list[tuple[str, str]]]:
    """Every row of every table, by story."""
    found = defaultdict(list)
    for table, key in ALL_KEYS.items():
        for row in await connection.fetch(f"select {key}, to_jsonb(t)::text from tidegate.{table} t order by 2"):
            found[str(row[0])[:18]].append((table, row[1]))
    return dict(found)


async def places(connection: Connection, event_id: uuid.UUID) -> set[str]:
    """The partitions that have the rows of a story."""
    first, last = str(event_id)[:18] + "-0000-000000000000", str(event_id)[:18] + "-ffff-ffffffffffff"
    found = set()
    for table, key in KEYS.items():
        rows = await connection.fetch(
            f"select c.relname from tidegate.{table} t join pg_class c on c.oid = t.tableoid "
            f"where t.{key} between $1 and $2", uuid.UUID(first), uuid.UUID(last),
        )  # fmt: skip
        assert rows, f"nothing in {table}"
        found |= {row[0] for row in rows}
    return found


async def days(connection: Connection) -> list[date]:
    return [row[0] for row in await connection.fetch("select day from tidegate.days() as d (day) order by 1")]


async def add_day(connection: Connection, day: date) -> bool:
    added: bool = await connection.fetchval("select tidegate.add_day($1)", day)
    return added


async def drop_day(connection: Connection, day: date = DAY, since: datetime = SINCE) -> dict[str, int | None]:
    """Drop the day of every table, in the order that is meant for it; how many rows of each have moved."""
    return {
        table: await connection.fetchval("select tidegate.drop_day($1, $2, $3)", table, day, since)
        for table in await retention.day_tables(connection)
    }


# Ids ----------------------------------------------------------------------------------------------------------------


async def test_all_that_comes_of_an_event_lies_between_the_first_and_the_last_id_of_its_story(
    connection: Connection,
) -> None:
    for event_id in (uuid7(), uuid7(), uuid.UUID(await connection.fetchval("select tidegate.uuid7()::text"))):
        run_id = delivery_id(event_id, uuid7())
        first, last = await connection.fetchrow("select tidegate.first_of($1), tidegate.last_of($1)", run_id) or ()
        assert (first.bytes, last.bytes) == (event_id.bytes[:8] + bytes(8), event_id.bytes[:8] + b"\xff" * 8)
        assert all(first < one < last for one in (event_id, run_id, step_id(run_id, "one"), step_id(run_id, "two")))


# Adding -------------------------------------------------------------------------------------------------------------


async def test_a_fresh_database_has_today_and_the_next_day(connection: Connection) -> None:
    found = await days(connection)
    assert len(found) > 1 and found == [found[0] + n * ONE_DAY for n in range(len(found))]
    assert datetime.now(UTC).date() - found[0] in (timedelta(), ONE_DAY)  # the tests may have begun before midnight


async def test_a_day_is_added_once_and_to_every_table(connection: Connection) -> None:
    before = await days(connection)
    assert await add_day(connection, DAY) is True
    assert await add_day(connection, DAY) is False
    assert await days(connection) == [DAY, *before]
    run_id = await make_story(connection, event_id := id_at(BEGIN))
    assert await places(connection, event_id) == {day_of(table, run_id) for table in KEYS}


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Los_Angeles"])
async def test_a_day_begins_and_ends_at_midnight_utc(connection: Connection, zone: str) -> None:
    await connection.execute(f"set local timezone = '{zone}'")
    await add_day(connection, DAY)
    millisecond = timedelta(milliseconds=1)
    for at, is_inside in (
        (BEGIN - millisecond, False), (BEGIN, True), (BEGIN + ONE_DAY - millisecond, True), (BEGIN + ONE_DAY, False),
    ):  # fmt: skip
        for n in (0, 4095):
            await make_story(connection, event_id := id_at(at, n))
            names = {day_of(table, event_id) if is_inside else f"{table}_default" for table in KEYS}
            assert await places(connection, event_id) == names


async def test_what_has_no_day_is_in_the_default_partition_and_is_found(connection: Connection) -> None:
    run_id = await make_story(connection, event_id := id_at(BEGIN))
    assert await places(connection, event_id) == {f"{table}_default" for table in KEYS}
    assert (await events.get_many(connection, [event_id])).keys() == {event_id}
    assert [event.id for event in await events.find(connection, str(event_id))] == [event_id]
    assert len(await deliveries.list_of_event(connection, event_id)) == 2
    assert [run.id for run in await runs.list_page(connection, event_id=event_id)] == [run_id]
    assert [step.name for step in await steps.list_of_run(connection, run_id)] == ["one", "two"]
    # And it may come alive and end again.
    for status, place in (("pending", "workflow_runs_live"), ("failed", "workflow_runs_default")):
        await connection.execute(
            "update tidegate.workflow_runs set status = $1::text, next_attempt_at = now(), "
            "finished_at = case when $1 = 'failed' then now() end", status,
        )  # fmt: skip
        assert await partitions_of(connection, "workflow_runs", run_id) == [place]


async def test_publishing_needs_no_day(connection: Connection) -> None:
    """Even if no worker has added one for a long time."""
    for day in await days(connection):
        await drop_day(connection, day, SINCE)
    assert await days(connection) == []
    ids = await make_events(connection, 3, external_id=None)
    named = uuid.UUID(await connection.fetchval("select tidegate.publish('order.created', 'shop.api', id => 'o-7')"))
    assert [event.id for event in (await events.claim_inbox(connection, 10)).events] == [*ids, named]
    for event_id in (*ids, named):
        assert await partitions_of(connection, "workflow_events", event_id) == ["workflow_events_default"]


@pytest.mark.parametrize("table", KEYS)
async def test_a_day_of_which_the_default_partition_has_rows_is_not_added(connection: Connection, table: str) -> None:
    """Of one table are enough; they stay where they are."""
    await make_story(connection, id_at(BEGIN + ONE_DAY / 2))
    for other in KEYS:
        if other != table:
            await connection.execute(f"delete from tidegate.{other}")
    before = await stories(connection)
    assert len(before) == 1
    assert await add_day(connection, DAY) is False
    assert DAY not in await days(connection)
    assert await stories(connection) == before
    assert await add_day(connection, DAY - ONE_DAY) and await add_day(connection, DAY + ONE_DAY)
    await connection.execute(f"delete from tidegate.{table}")
    assert await add_day(connection, DAY) is True


async def test_the_next_days_are_added_ahead_of_time(connection: Connection) -> None:
    await set_clock(connection, BEGIN + ONE_DAY - timedelta(seconds=1))
    assert await retention.add_days(connection, ahead=2) == [DAY + n * ONE_DAY for n in range(3)]
    assert await retention.add_days(connection, ahead=2) == []
    await set_clock(connection, BEGIN + ONE_DAY)
    assert await retention.add_days(connection, ahead=2) == [DAY + 3 * ONE_DAY]


async def test_workers_that_add_the_same_days_add_each_once(database: Database) -> None:
    async def add() -> list[date]:
        while True:
            try:
                return await database.run(lambda connection: retention.add_days(connection, ahead=5))
            except TransientConflict:  # another is at it, and takes its time
                continue

    async with database.connection() as connection:
        before = await days(connection)
    added = await asyncio.gather(*(add() for _ in range(4)))
    async with database.connection() as connection:
        assert sorted([*before, *(day for some in added for day in some)]) == await days(connection)
    assert sum(map(len, added)) >= 6 - len(before)  # more if midnight was a moment ago


async def test_who_adds_or_drops_a_day_gives_up_soon_if_the_tables_are_in_use(database: Database) -> None:
    """Everyone who comes later waits behind it."""
    async with database.connection() as connection:
        before = await days(connection)
    async with database.transaction() as report:
        for table in KEYS:
            await report.fetchval(f"select count(*) from tidegate.{table}")
        with pytest.raises(TransientConflict):
            async with database.transaction() as connection:
                await retention.add_days(connection, ahead=20)
        for table in KEYS:
            with pytest.raises(TransientConflict):
                async with database.transaction() as connection:
                    await retention.drop_day(connection, table, before[0], older_seconds=0)
    async with database.transaction() as connection:
        assert await days(connection) == before
        assert len(await retention.add_days(connection, ahead=20)) >= 21 - len(before)


# Dropping -----------------------------------------------------------------------------------------------------------

_LETTER = "insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason, replayed_at, replayed_by) "
# What keeps a story; each has the event's id as its parameter.
ALIVE = {
    "it is undecided": "insert into tidegate.event_inbox (ingress_sequence, event_id, source) "
    "select ingress_sequence, id, source from tidegate.workflow_events where id = $1",
    "it is held": "update tidegate.event_ingress_retries set retry_state = 'scheduled', next_attempt_at = now() "
    "where event_id = $1",
    "its retry is claimed": "update tidegate.event_ingress_retries set retry_state = 'running', "
    "claim_expires_at = now() where event_id = $1",
    "a delivery is held": "update tidegate.workflow_trigger_deliveries set status = 'throttled', "
    "retry_state = 'scheduled', next_attempt_at = now() where event_id = $1 and status = 'skipped'",
    "a delivery is claimed": "update tidegate.workflow_trigger_deliveries set status = 'matched', "
    "retry_state = 'running', claim_expires_at = now() where event_id = $1 and status = 'skipped'",
    "its run is to go on": "update tidegate.workflow_runs set status = 'pending', finished_at = null, "
    "next_attempt_at = now() where event_id = $1",
    "its run is claimed": "update tidegate.workflow_runs set status = 'running', finished_at = null, "
    "claim_expires_at = now() where event_id = $1",
    "its run ended lately": f"update tidegate.workflow_runs set finished_at = '{SINCE}' where event_id = $1",
    "its run failed lately": f"update tidegate.workflow_runs set status = 'failed', finished_at = '{SINCE + ONE_DAY}' "
    "where event_id = $1",
    "there is a letter of it": f"{_LETTER} values (tidegate.uuid7(), 'event', $1, $1, 'x', null, null)",
    "there is a letter that names it": f"{_LETTER} "
    "values (tidegate.uuid7(), 'run', gen_random_uuid(), $1, 'x', null, null)",
    "there is a letter of a delivery": f"{_LETTER} select tidegate.uuid7(), 'delivery', id, event_id, 'x', null, null "
    "from tidegate.workflow_trigger_deliveries where event_id = $1 and status = 'skipped'",
    "there is a letter of its run that was replayed": f"{_LETTER} select tidegate.uuid7(), 'run', id, null, 'x', "
    "now(), 'ann' from tidegate.workflow_runs where event_id = $1",
    "there is a letter of a step": f"{_LETTER} select tidegate.uuid7(), 'step', s.id, null, 'x', null, null "
    "from tidegate.workflow_run_steps s join tidegate.workflow_runs r on r.id = s.workflow_run_id "
    "where r.event_id = $1 and s.name = 'two'",
}
# What does not.
DEAD = {
    "it is finished": "select $1::uuid",
    "its run ended long ago": f"update tidegate.workflow_runs set finished_at = '{SINCE - timedelta(microseconds=1)}' "
    "where event_id = $1",
    "its run was cancelled": "update tidegate.workflow_runs set status = 'cancelled' where event_id = $1",
    "it has no rows but its own": "with r as (delete from tidegate.workflow_runs where event_id = $1 returning id), "
    "s as (delete from tidegate.workflow_run_steps where workflow_run_id in "
    "(select id from tidegate.workflow_runs where event_id = $1)), "
    "d as (delete from tidegate.workflow_trigger_deliveries where event_id = $1) "
    "delete from tidegate.event_decisions where event_id = $1",
}


@pytest.fixture
async def full_day(connection: Connection) -> AsyncIterator[dict[str, uuid.UUID]]:
    """A day with a story of each kind, side by side: what is kept lies between what is not. The stories at the ends of
    the days beside it are finished, too."""
    for day in (DAY - ONE_DAY, DAY, DAY + ONE_DAY):
        assert await add_day(connection, day)
    made: dict[str, uuid.UUID] = {}
    noon, dead = BEGIN + ONE_DAY / 2, list(DEAD)
    for number, name in enumerate(ALIVE):
        made[name] = id_at(noon, 2 * number)
        made[f"{dead[number % len(dead)]} {number}"] = id_at(noon, 2 * number + 1)
    made |= {"the first of the day": id_at(BEGIN), "the last of the day": id_at(BEGIN + ONE_DAY - ONE_DAY / 86_400_000)}
    made |= {"the day before": id_at(BEGIN - ONE_DAY / 86_400_000, 4095), "the day after": id_at(BEGIN + ONE_DAY)}
    for name, event_id in made.items():
        await make_story(connection, event_id)
        if name in ALIVE:
            await connection.execute(ALIVE[name], event_id)
        elif name.rpartition(" ")[0] in DEAD:
            await connection.execute(DEAD[name.rpartition(" ")[0]], event_id)
    yield made


def kept_of(made: dict[str, uuid.UUID]) -> set[str]:
    return {str(event_id)[:18] for name, event_id in made.items() if name in ALIVE}


def beside(made: dict[str, uuid.UUID]) -> set[str]:
    return {str(made[name])[:18] for name in ("the day before", "the day after")}


async def test_a_day_that_is_dropped_leaves_exactly_the_stories_that_are_needed(
    connection: Connection, full_day: dict[str, uuid.UUID]
) -> None:
    """With all of their rows as they were, in all tables; of the others nothing is left. Other days are as before."""
    before, kept = await stories(connection), kept_of(full_day)
    assert all({table for table, _ in before[story]} == {*ALL_KEYS} for story in kept)
    moved = await drop_day(connection)
    left = {story: rows for story, rows in before.items() if story in kept | beside(full_day)}
    assert await stories(connection) == left
    assert DAY not in await days(connection)

    # What is alive was not in the day: the rest has moved.
    count = len(ALIVE)
    assert moved == {
        "workflow_runs": count - 2, "workflow_run_steps": 2 * count, "run_children": 2 * count,
        "workflow_trigger_deliveries": 2 * count - 2,
        "event_ingress_retries": count - 2, "event_decisions": 2 * count, "workflow_events": count,
    }  # fmt: skip
    for name, event_id in full_day.items():
        if name in ALIVE:
            found = await places(connection, event_id)
            assert {one for one in found if not one.endswith("_live")} <= {f"{table}_default" for table in KEYS}
        elif str(event_id)[:18] in beside(full_day):
            assert await places(connection, event_id) == {day_of(table, event_id) for table in KEYS}


async def test_a_day_is_dropped_once(connection: Connection, full_day: dict[str, uuid.UUID]) -> None:
    await drop_day(connection)
    before = await stories(connection)
    assert await drop_day(connection) == dict.fromkeys(KEYS)
    assert await drop_day(connection, since=SINCE + 30 * ONE_DAY) == dict.fromkeys(KEYS)
    assert await stories(connection) == before
    assert await add_day(connection, DAY) is False  # what was kept of it is in the default partition


@pytest.mark.parametrize("done", range(1, len(KEYS)))
async def test_a_day_that_was_dropped_in_part_is_dropped_by_the_next(
    connection: Connection, full_day: dict[str, uuid.UUID], done: int
) -> None:
    """Each table is dropped in a transaction of its own, and whoever does it may die in between."""
    before = await stories(connection)
    tables = await retention.day_tables(connection)
    for table in tables[:done]:
        assert await connection.fetchval("select tidegate.drop_day($1, $2, $3)", table, DAY, SINCE) is not None
    assert DAY in await days(connection)
    assert await add_day(connection, DAY) is False
    moved = await drop_day(connection)
    assert [table for table in tables if moved[table] is None] == tables[:done]
    needed = kept_of(full_day) | beside(full_day)
    assert await stories(connection) == {story: rows for story, rows in before.items() if story in needed}


async def test_what_was_kept_of_a_day_can_end_and_be_replayed(
    connection: Connection, full_day: dict[str, uuid.UUID]
) -> None:
    await drop_day(connection)
    event_id = full_day["its run is to go on"]
    [run] = await runs.list_page(connection, event_id=event_id)
    definition = await make_definition(connection)
    held = await runs.claim_due(connection, definitions=[definition], limit=10, worker="w", lease_ms=1000)
    assert run.id in {one.id for one in held}
    for status, place in (("succeeded", "workflow_runs_default"), ("pending", "workflow_runs_live")):
        await connection.execute(
            "update tidegate.workflow_runs set status = $2::text, claim_expires_at = null, next_attempt_at = now(), "
            "finished_at = case when $2 = 'succeeded' then now() end where id = $1", run.id, status,
        )  # fmt: skip
        assert await partitions_of(connection, "workflow_runs", run.id) == [place]
    assert [step.name for step in await steps.list_of_run(connection, run.id)] == ["one", "two"]


async def test_only_tables_that_have_days_are_dropped(connection: Connection) -> None:
    for name in ("workflow_definitions", "workflow_events; drop table tidegate.audit_log", ""):
        await connection.execute("savepoint before")
        with pytest.raises(asyncpg.NoDataFoundError):
            await connection.fetchval("select tidegate.drop_day($1, $2, $3)", name, DAY, SINCE)
        await connection.execute("rollback to savepoint before")


# Retention ----------------------------------------------------------------------------------------------------------


async def test_days_that_are_old_enough_are_listed_with_how_much_is_needed(
    connection: Connection, full_day: dict[str, uuid.UUID]
) -> None:
    week = 7 * 86_400

    async def listed(at: datetime, most: int = 1000) -> dict[date, int]:
        await set_clock(connection, at)
        found = await retention.list_days(connection, older_seconds=week, most_needed=most)
        assert [one.day for one in found] == sorted(one.day for one in found)
        return {one.day: one.needed for one in found}

    over = BEGIN + ONE_DAY + timedelta(seconds=week)  # from when on all of the day is older than a week
    assert await listed(over - timedelta(microseconds=1)) == {DAY - ONE_DAY: 0}
    found = await listed(over)
    assert found.keys() == {DAY - ONE_DAY, DAY} and found[DAY] >= len(ALIVE)
    at = SINCE + timedelta(seconds=week)
    assert await listed(at) == {DAY - ONE_DAY: 0, DAY: len(ALIVE), DAY + ONE_DAY: 0}
    assert (await listed(at, most=5))[DAY] == 6


async def test_producers_ids_of_a_day_are_deleted_in_parts_except_those_that_are_needed(
    connection: Connection, full_day: dict[str, uuid.UUID]
) -> None:
    await set_clock(connection, SINCE + ONE_DAY)
    names = "select external_id from tidegate.event_external_ids"
    before = {row[0] for row in await connection.fetch(names)}
    needed = {str(full_day[name]) for name in (*ALIVE, "the day before", "the day after")}
    counts = []
    while counts[-1:] != [0]:
        counts.append(await retention.delete_external_ids(connection, DAY, older_seconds=86_400, limit=6))
    assert counts[:2] == [6, 6] and sum(counts) == len(before - needed)
    assert {row[0] for row in await connection.fetch(names)} == needed
    # What is kept is known when it is published again, the other is new.
    gone, known = (new_event(external_id=str(full_day[name])) for name in ("the first of the day", "it is held"))
    assert await events.insert(connection, [gone, known]) == {gone.id}


# Rights -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def admin(postgres: EmbeddedPostgres, database_url: str) -> AsyncIterator[Any]:
    """The superuser, in a transaction that is undone: the roles that it makes are gone again."""
    opened = await Database(postgres.admin_url(urlsplit(database_url).path[1:]), "test", size=1).dedicated()
    undone = opened.transaction()
    await undone.start()
    yield opened
    await undone.rollback()
    await opened.close()


async def become(admin: Any, rights: tuple[str, ...]) -> None:
    """From now on the connection has the rights of a new role that was granted these."""
    await admin.execute("create role tidegate_test_days")
    await grant(admin, rights, "tidegate_test_days")
    await admin.execute("set local role tidegate_test_days")


async def refused(connection: Any, query: str, *arguments: Any) -> None:
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        async with connection.transaction():
            await connection.execute(query, *arguments)


async def test_a_worker_adds_uses_and_drops_days_without_any_right_to_change_the_schema(admin: Any) -> None:
    await become(admin, WORK)
    for statement in (
        "create table tidegate.more (id bigint)",
        "drop table tidegate.workflow_events_default",
        "alter table tidegate.workflow_events detach partition tidegate.workflow_events_default",
        "create table tidegate.workflow_events_x partition of tidegate.workflow_events for values from "
        "('00000000-0000-0000-0000-000000000000') to ('00000000-0000-0000-0000-000000000001')",
        "truncate tidegate.workflow_events",
    ):
        await refused(admin, statement)
    await set_clock_as_owner(admin, BEGIN)
    assert await retention.add_days(admin, ahead=1) == [DAY, DAY + ONE_DAY]
    kept = id_at(BEGIN + ONE_DAY / 2)
    run_id = await make_story(admin, kept)
    await make_story(admin, id_at(BEGIN + ONE_DAY / 2, 1))
    assert await places(admin, kept) == {day_of(table, run_id) for table in KEYS}
    await admin.execute(ALIVE["its run is to go on"], kept)
    await admin.execute(ALIVE["there is a letter of it"], kept)

    await set_clock_as_owner(admin, BEGIN + 10 * ONE_DAY)
    assert (await retention.list_days(admin, older_seconds=86_400, most_needed=9))[0] == (DAY, 1)
    assert await retention.delete_external_ids(admin, DAY, older_seconds=86_400, limit=100) == 1
    for table in await retention.day_tables(admin):
        assert await retention.count_rows(admin, table, DAY) >= 0
        assert await retention.drop_day(admin, table, DAY, older_seconds=86_400) is not None
    assert (await stories(admin)).keys() == {str(kept)[:18]}
    assert DAY not in await days(admin)
    page = await retention.page(admin, after=events.ReceiptPlace(), limit=9, older_seconds=60, is_default_only=True)
    assert page.ids == [kept]


async def set_clock_as_owner(admin: Any, at: datetime) -> None:
    await admin.execute("reset role")
    await set_clock(admin, at)
    await admin.execute("set local role tidegate_test_days")


async def test_who_may_only_publish_neither_adds_nor_drops_a_day(admin: Any) -> None:
    before = await days(admin)
    await become(admin, PUBLISH)
    assert await admin.fetchval("select tidegate.publish('order.created', 'shop.api')")
    await refused(admin, "select tidegate.add_day($1)", DAY)
    for table in KEYS:
        await refused(admin, "select tidegate.drop_day($1, $2, $3)", table, before[0], SINCE)
    await refused(admin, "select tidegate.needed_stories($1, $2)", before[0], SINCE)
    await admin.execute("reset role")
    assert await days(admin) == before
    assert await admin.fetchval("select count(*) from tidegate.workflow_events") == 1
