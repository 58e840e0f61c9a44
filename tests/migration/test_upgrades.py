"""Expand and contract: which programs can use which schema, and what waits for whom."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from chaos import releases

from tests.conftest import Clock
from tidegate import Tidegate, failpoints
from tidegate.errors import SchemaError
from tidegate.flow.presence import Presence
from tidegate.store import migrate, processes
from tidegate.store.db import Connection, Database
from tidegate.store.migration import Migration

NOW = migrate.migrations()
LATEST = NOW[-1].version
NEXT = tuple(releases.samples(LATEST))

Knows = Callable[..., None]


@pytest.fixture
def knows(monkeypatch: pytest.MonkeyPatch) -> Knows:
    """Be the program that knows these migrations beside today's."""

    def know(*more: Migration) -> None:
        monkeypatch.setattr(migrate, "migrations", lambda: (*NOW, *more))

    return know


def migration(n: int, sql: str, *declarations: str) -> Migration:
    """The n-th one after today's."""
    head = "".join(f"-- {declaration}\n" for declaration in declarations)
    return Migration(LATEST + n, f"{LATEST + n:04}_sample", head + sql)


def contraction(n: int, sql: str = "select 1", needs: int = 1) -> Migration:
    return migration(n, sql, "kind: contract", f"needs: {LATEST + needs}")


EXPANSION = migration(1, "create table tidegate.sample (id bigint)", "kind: expand")


async def join(database: Database, kind: processes.ProcessKind = "worker") -> Presence:
    presence = Presence(kind)
    await presence.join(database)
    return presence


async def versions(database: Database) -> list[int]:
    return [version - LATEST for version in (await migrate.status(database)).applied if version > LATEST]


# What a file declares -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "kind", "compatible_from", "is_online"),
    [
        ("-- kind: expand\nselect 1", "expand", 1, False),
        ("-- kind: contract\n-- needs: 3\n-- why\nselect 1", "contract", 3, False),
        ("-- kind: expand\n-- transaction: no\n", "expand", 1, True),
        ("-- A word about it: kind\n-- kind: contract\nselect 1", "expand", 1, False),
    ],
)
def test_the_first_lines_declare_what_it_is(sql: str, kind: str, compatible_from: int, is_online: bool) -> None:
    found = Migration(9, "0009_sample", sql)
    assert (found.kind, found.compatible_from, found.is_online) == (kind, compatible_from, is_online)


@pytest.mark.parametrize(
    "sql",
    [
        "-- kind: expanding\n",
        "-- kind: expand\n-- kind: expand\n",
        "-- kind: contract\n",
        "-- kind: expand\n-- needs: 3\n",
        "-- kind: contract\n-- needs: 9\n",
        "-- kind: contract\n-- needs: 0\n",
        "-- kind: contract\n-- needs: 3\n-- transaction: no\n",
        "-- kind: expand\n-- transaction: yes\n",
        "-- sort: expand\n",
    ],
)
def test_a_wrong_declaration_is_refused(sql: str) -> None:
    with pytest.raises(ValueError, match="0009_sample"):
        _ = Migration(9, "0009_sample", sql).declared


# Which program can use which schema -----------------------------------------------------------------------------------


async def test_an_older_program_uses_a_schema_that_was_expanded(database: Database, knows: Knows) -> None:
    knows(EXPANSION)
    assert await migrate.migrate(database) == [EXPANSION]
    knows()
    found = await migrate.status(database)
    assert (found.version, found.is_newer, found.compatible_from) == (LATEST + 1, True, 1)
    await migrate.require_current(database)
    await join(database)
    assert await migrate.migrate(database) == []  # its own is there, and the rest is not its business


async def test_an_older_program_is_refused_by_a_schema_that_was_contracted(database: Database, knows: Knows) -> None:
    knows(EXPANSION, contraction(2))
    assert len(await migrate.migrate(database)) == 2
    knows(EXPANSION)  # the version between: the contraction removes nothing of it
    await migrate.require_current(database)
    await (await join(database)).leave(database)
    knows()
    for use in (migrate.status, migrate.migrate, migrate.require_current, join):
        with pytest.raises(
            SchemaError, match=f"at version {LATEST + 2}, .* know version {LATEST + 1} or newer.*upgrade this process"
        ):
            await use(database)
    async with database.connection() as connection:  # nobody waits for a process that was refused
        assert await connection.fetchval("select count(*) from tidegate.processes") == 0


async def test_a_newer_program_needs_its_expansions_and_not_its_contractions(database: Database, knows: Knows) -> None:
    knows(EXPANSION, contraction(2))
    with pytest.raises(SchemaError, match="run `tidegate migrate` first"):
        await join(database)
    await migrate.migrate(database, expand_only=True)
    assert await versions(database) == [1]
    await migrate.require_current(database)
    await join(database)


async def test_a_changed_migration_is_noticed_on_a_newer_schema_too(database: Database, knows: Knows) -> None:
    knows(EXPANSION)
    await migrate.migrate(database)
    knows()
    async with database.connection() as connection:
        await connection.execute("update tidegate.schema_migrations set checksum = 'other' where version = 1")
    with pytest.raises(SchemaError, match="applied with other content"):
        await migrate.require_current(database)


# What a contraction waits for -----------------------------------------------------------------------------------------


async def test_a_contraction_waits_for_older_processes_and_names_them(database: Database, knows: Knows) -> None:
    workers, api = await join(database), await join(database, "api")
    knows(EXPANSION, contraction(2), contraction(3, needs=1), migration(4, "select 1"))
    newer = await join_after(database, knows)
    assert await versions(database) == [1, 4]  # expansions do not wait

    first, second = await migrate.waiting(database)
    assert [one.kind for one in first.older] == ["api", "worker"]
    assert f"(version {processes.__version__}, schema {LATEST}, last seen 20" in str(first)
    assert "Upgrade or stop them, then run `tidegate migrate` again" in str(first)
    assert [one.migration.version for one in (first, second)] == [LATEST + 2, LATEST + 3]

    await workers.leave(database)
    assert await migrate.migrate(database) == []
    await api.leave(database)
    assert "run `tidegate migrate` to apply it" in str((await migrate.waiting(database))[0])
    assert [one.version - LATEST for one in await migrate.migrate(database)] == [2, 3]
    assert await migrate.waiting(database) == []
    await newer.leave(database)


async def join_after(database: Database, knows: Knows) -> Presence:
    """A process of the newer program, which knows as much as it needs."""
    await migrate.migrate(database)
    return await join(database)


async def test_a_contraction_waits_behind_an_earlier_one(database: Database, knows: Knows) -> None:
    knows(EXPANSION, migration(2, "select 1"))
    await migrate.migrate(database)
    await join(database)
    knows(EXPANSION, migration(2, "select 1"), migration(3, "select 1"), contraction(4, needs=3), contraction(5))
    assert [one.version - LATEST for one in await migrate.migrate(database)] == [3]
    first, second = map(str, await migrate.waiting(database))
    assert first.startswith(f"waits for processes that know no schema from version {LATEST + 3} on: worker ")
    assert second == f"waits for {LATEST + 4:04}_sample, which comes before it"


async def test_a_process_that_is_gone_is_not_waited_for(database: Database, clock: Clock, knows: Knows) -> None:
    await join(database)  # killed: it does not leave
    knows(EXPANSION, contraction(2))
    await migrate.migrate(database)
    await clock.advance(processes.ALIVE_MS - 1)
    assert await migrate.migrate(database) == []
    await clock.advance(2)
    assert await migrate.migrate(database) == [contraction(2)]


async def test_who_was_not_seen_for_long_is_forgotten(database: Database, clock: Clock) -> None:
    await join(database, "api")
    await clock.advance(processes.FORGET_MS + 1)
    await join(database)
    async with database.connection() as connection:
        rows = await connection.fetch("select kind from tidegate.processes")
    assert [row["kind"] for row in rows] == ["worker"]


async def test_a_program_that_publishes_is_a_process_too(database: Database, knows: Knows) -> None:
    async with Tidegate(database_url=database.url) as app:
        await app.publish("order.created", source="shop", payload={})
        knows(EXPANSION, contraction(2))
        assert await migrate.migrate(database) == [EXPANSION]
        assert [one.kind for one in (await migrate.waiting(database))[0].older] == ["publisher"]
    assert await migrate.migrate(database) == [contraction(2)]
    knows()
    async with Tidegate(database_url=database.url) as app:
        with pytest.raises(SchemaError, match="upgrade this process"):
            await app.publish("order.created", source="shop", payload={})


async def test_a_process_that_starts_while_a_contraction_is_applied_is_refused(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has checked the schema, and the contraction has not seen it: it must see the contraction."""
    old, known = Presence("worker"), [(*NOW, EXPANSION, contraction(2))]
    monkeypatch.setattr(migrate, "migrations", lambda: known[0])
    await migrate.migrate(database, expand_only=True)
    holding = await asyncpg.connect(database.url)
    try:
        transaction = holding.transaction()
        await transaction.start()
        await migrate._contract(holding, contraction(2))  # not committed yet
        known[0] = NOW
        joining = asyncio.create_task(database.run(old._beat))
        await until_waiting(database, joining)
        await transaction.commit()
        with pytest.raises(SchemaError, match="upgrade this process"):
            await joining
    finally:
        await holding.close()


async def test_a_contraction_waits_for_a_process_that_is_just_starting(database: Database, knows: Knows) -> None:
    """The other way round: what the process has written is not committed yet."""
    old = Presence("worker")
    knows(EXPANSION, contraction(2))
    await migrate.migrate(database, expand_only=True)
    async with database.transaction() as connection:
        await old._beat(connection)
        contracting = asyncio.create_task(migrate.migrate(database))
        await until_waiting(database, contracting)
    assert await contracting == []
    assert [one.kind for one in (await migrate.waiting(database))[0].older] == ["worker"]


async def until_waiting(
    database: Database, task: asyncio.Task[Any], lock: str = "relation = 'tidegate.processes'::regclass"
) -> None:
    """A task waits for a lock: by default, for the one on the table of processes."""
    async with database.connection() as connection:
        while not await connection.fetchval(f"select count(*) from pg_locks where not granted and {lock}"):
            assert not task.done(), task
            await asyncio.sleep(0.01)


async def test_a_contraction_that_fails_records_nothing(database: Database, knows: Knows) -> None:
    knows(EXPANSION, contraction(2, "drop table tidegate.sample"))
    failpoints.arm("migrate.mid_migration=raise@2")
    with pytest.raises(failpoints.FailpointHit):
        await migrate.migrate(database)
    assert (await migrate.status(database)).compatible_from == 1
    async with database.connection() as connection:
        assert await connection.fetchval("select to_regclass('tidegate.sample') is not null")
    assert len(await migrate.migrate(database)) == 1


# The order ------------------------------------------------------------------------------------------------------------


async def test_expansions_do_not_depend_on_contractions(
    empty_database_url: str, database_url: str, knows: Knows
) -> None:
    """A database whose contractions waited, and one whose did not, have the same schema."""
    knows(*NEXT)
    descriptions = []
    for url in (empty_database_url, database_url):
        database = Database(url, "test", size=1)
        try:
            if url == empty_database_url:
                await migrate.migrate(database, expand_only=True)
            await migrate.migrate(database)
            async with database.connection() as connection:
                descriptions.append(await described(connection))
        finally:
            await database.close()
    assert descriptions[0] == descriptions[1] and len(descriptions[0]) > 200


async def described(connection: Connection) -> set[tuple[object, ...]]:
    """Columns, indexes and constraints; not their order."""
    rows = await connection.fetch(
        "select table_name || '.' || column_name as name, data_type::text || coalesce(column_default, '') as detail "
        "from information_schema.columns where table_schema = 'tidegate' "
        "union all select indexname, indexdef from pg_indexes where schemaname = 'tidegate' "
        "union all select conname, pg_get_constraintdef(oid) from pg_constraint "
        "where connamespace = 'tidegate'::regnamespace"
    )
    return {tuple(row) for row in rows}


# Statements outside a transaction -------------------------------------------------------------------------------------

ONLINE = ("kind: expand", "transaction: no")
INDEX = "create index concurrently sample_idx on tidegate.{} (id) where id is not null;"


async def valid(connection: Connection, name: str = "sample_idx") -> bool | None:
    found: bool | None = await connection.fetchval(
        "select indisvalid from pg_index where indexrelid = to_regclass('tidegate.' || $1)", name
    )
    return found


async def test_the_samples_leave_what_they_say(database: Database, knows: Knows) -> None:
    knows(*NEXT)
    assert await migrate.migrate(database) == list(NEXT)
    async with database.connection() as connection:
        assert await valid(connection, "workflow_events_next_note_idx")
        assert await connection.fetchval("select convalidated from pg_constraint where conname = 'next_note_is_short'")
    assert (await migrate.status(database)).compatible_from == LATEST + 4


async def test_an_index_that_a_crash_left_invalid_is_built_again(database: Database, knows: Knows) -> None:
    unique = INDEX.replace("index", "unique index").format("sample")
    with_duplicates = migration(1, f"{EXPANSION.sql}; insert into tidegate.sample values (1), (1)")
    knows(with_duplicates, migration(2, unique, *ONLINE))
    async with database.connection() as connection:
        for _ in range(2):
            with pytest.raises(asyncpg.UniqueViolationError):
                await migrate.migrate(database)
            assert await valid(connection) is False and await versions(database) == [1]
        await connection.execute("delete from tidegate.sample")
        await migrate.migrate(database)
        assert await valid(connection) is True and await versions(database) == [1, 2]


async def test_what_was_done_before_a_crash_is_not_done_again(database: Database, knows: Knows) -> None:
    built = migration(1, INDEX.format("workflow_runs") + "drop index concurrently if exists tidegate.nothing;", *ONLINE)
    knows(built)
    failpoints.arm("migrate.mid_migration=raise")
    with pytest.raises(failpoints.FailpointHit):
        await migrate.migrate(database)
    async with database.connection() as connection:
        oid = await connection.fetchval("select 'tidegate.sample_idx'::regclass::oid")
        assert await versions(database) == [] and await valid(connection)
        assert await migrate.migrate(database) == [built]
        assert await connection.fetchval("select 'tidegate.sample_idx'::regclass::oid") == oid


async def test_an_index_of_a_partitioned_table(database: Database, knows: Knows) -> None:
    parts = """
    create table tidegate.sample (id bigint, at bigint) partition by range (at);
    create table tidegate.sample_p1 partition of tidegate.sample for values from (1) to (2);
    create table tidegate.sample_p2 partition of tidegate.sample for values from (2) to (3) partition by range (at);
    create table tidegate.sample_p2_a partition of tidegate.sample_p2 for values from (2) to (3);
    insert into tidegate.sample select n, 1 + n % 2 from generate_series(1, 100) n;
    """
    knows(migration(1, parts, "kind: expand"), migration(2, INDEX.format("sample"), *ONLINE))
    failpoints.arm("migrate.mid_migration=raise@2")
    with pytest.raises(failpoints.FailpointHit):
        await migrate.migrate(database)
    async with database.connection() as connection:
        await connection.execute(  # made before the next try; it has its part of the index already
            "create table tidegate.sample_p3 partition of tidegate.sample for values from (3) to (4)"
        )
        await migrate.migrate(database)
        assert await valid(connection)
        parts_of = "select count(*) from pg_partition_tree('tidegate.sample_idx')"
        assert await connection.fetchval(parts_of) == 1 + 4


async def test_every_partition_of_a_table_of_days_has_its_part_of_an_index(database: Database, knows: Knows) -> None:
    """Also where the names are so long that they would be the same once cut off."""
    name = "workflow_trigger_deliveries_sample_idx"
    index = f"create index concurrently {name} on tidegate.workflow_trigger_deliveries (dedupe_key);"
    knows(migration(1, index, *ONLINE))
    await migrate.migrate(database)
    async with database.connection() as connection:
        leaves = "select count(*) from pg_partition_tree($1::text::regclass) where isleaf"
        tables = await connection.fetchval(leaves, "tidegate.workflow_trigger_deliveries")
        assert tables >= 4, "what waits, two days and the rest"
        assert await connection.fetchval(leaves, f"tidegate.{name}") == tables
        assert await valid(connection, name)


async def test_a_partition_whose_index_a_crash_left_invalid(database: Database, knows: Knows) -> None:
    parts = """
    create table tidegate.sample (id bigint, at bigint) partition by range (at);
    create table tidegate.sample_p1 partition of tidegate.sample for values from (1) to (2);
    insert into tidegate.sample values (1, 1), (1, 1);
    """
    unique = "create unique index concurrently sample_idx on tidegate.sample (id, at);"
    knows(migration(1, parts, "kind: expand"), migration(2, unique, *ONLINE))
    async with database.connection() as connection:
        with pytest.raises(asyncpg.UniqueViolationError):
            await migrate.migrate(database)
        assert (await valid(connection), await valid(connection, "sample_idx_p1")) == (False, False)
        await connection.execute("delete from tidegate.sample")
        await migrate.migrate(database)
        assert (await valid(connection), await valid(connection, "sample_idx_p1")) == (True, True)


async def test_migrators_that_wait_do_not_hold_up_a_concurrent_index(database: Database, knows: Knows) -> None:
    """A statement that waited for the turn to migrate would be one that the index waits for."""
    knows(migration(1, INDEX.format("workflow_runs"), *ONLINE))
    found = await asyncio.gather(*(migrate.migrate(database) for _ in range(5)))
    assert sorted(map(len, found)) == [0, 0, 0, 0, 1]


async def test_a_concurrent_index_waits_for_a_report_and_nobody_waits_for_it(database: Database, knows: Knows) -> None:
    knows(migration(1, INDEX.format("workflow_runs"), *ONLINE))
    report = await asyncpg.connect(database.url)
    try:
        transaction = report.transaction(isolation="repeatable_read")
        await transaction.start()
        await report.fetchval("select count(*) from tidegate.workflow_runs")
        migrating = asyncio.create_task(migrate.migrate(database))
        await until_waiting(database, migrating, "locktype = 'virtualxid'")
        async with database.connection() as connection:
            await connection.execute("set lock_timeout = '1ms'")
            await connection.execute("update tidegate.workflow_runs set attempts = attempts")
            await connection.execute("set lock_timeout = '2s'")
        assert not migrating.done()
        await transaction.rollback()
        assert len(await migrating) == 1
    finally:
        await report.close()


@pytest.mark.parametrize(
    "sql",
    [
        "create index concurrently if not exists sample_idx on tidegate.workflow_runs (id);",
        "create index sample_idx on tidegate.workflow_runs (id);",
        "drop index concurrently tidegate.sample_idx;",
        "alter table tidegate.workflow_runs add constraint sample check (true) not valid;",
        "update tidegate.workflow_runs set attempts = 0;",
    ],
)
async def test_what_cannot_be_repeated_is_refused_outside_a_transaction(
    database: Database, knows: Knows, sql: str
) -> None:
    knows(migration(1, sql, *ONLINE))
    with pytest.raises(ValueError, match="is not one transaction"):
        await migrate.migrate(database)
    assert await versions(database) == []


def test_the_samples_are_one_after_the_other() -> None:
    assert [b.version - a.version for a, b in itertools.pairwise(NEXT)] == [1] * (len(NEXT) - 1)
    assert [one.kind for one in NEXT] == ["expand"] * 4 + ["contract"]
