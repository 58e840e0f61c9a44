"""Migrations: forward, once, all or nothing, by however many processes at once; and the schema they make."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

import asyncpg
import pytest

from tests.flow.test_ingest import event
from tidegate import failpoints
from tidegate.errors import SchemaError, Unavailable
from tidegate.flow.accept.ingest import LOCK_TIMEOUT_MS, Ingest
from tidegate.store import migrate
from tidegate.store.db import Connection, Database

Start = Callable[..., Awaitable[asyncio.subprocess.Process]]
VERSIONS = [m.version for m in migrate.migrations()]

# Those that later versions will bring, in the place of which these stand.
LATER = {VERSIONS[-1] + n: f"create table tidegate.later_{n} (id bigint)" for n in (1, 2)}

# Says when it is ready, waits until its input ends, migrates (also by later migrations, if it is given some), and says
# how many migrations it applied.
MIGRATOR = """
import asyncio, json, sys
from tidegate import failpoints
from tidegate.store import migrate
from tidegate.store.db import Database

url, armed, later = sys.argv[1:]
known = (*migrate.migrations(), *(migrate.Migration(*one) for one in json.loads(later)))
migrate.migrations = lambda: known
failpoints.arm(armed)
print("ready", flush=True)
sys.stdin.read()
print(len(asyncio.run(migrate.migrate(Database(url, "test", size=1)))))
"""

# The contract's tables, and the columns that others rely on.
CONTRACT = {
    "workflow_events": "id external_id type source occurred_at received_at ingress_sequence payload correlation_id "
    "ttl_ms metadata",
    "event_ingress_retries": "event_id source retry_state attempts next_attempt_at last_error metadata created_at "
    "updated_at",
    "workflow_definitions": "id slug",
    "workflow_event_triggers": "id name event_type event_source predicates where parameter_template idempotency_key "
    "idempotency_window_ms concurrency_key throttle_count throttle_window_ms max_concurrency retry status version "
    "created_by updated_by",
    "workflow_trigger_deliveries": "id trigger_id event_id workflow_run_id status attempts dedupe_key launched_at "
    "last_error throttled_until retry_state next_attempt_at retry_attempts retry_metadata",
    "workflow_runs": "id workflow_definition_id status parameters output error created_at started_at finished_at",
    "workflow_run_steps": "id workflow_run_id name status result retry_state next_attempt_at retry_attempts "
    "retry_metadata",
    "event_scheduler_sources": "source",
    "event_scheduler_triggers": "trigger_id",
    "event_scheduler_source_metrics": "source total throttled dropped failures last_lag_ms max_lag_ms last_event_at "
    "updated_at",
    "event_scheduler_trigger_metrics": "trigger_id filtered matched launched throttled skipped failed paused "
    "last_status last_error updated_at",
    "dead_letters": "id",
    "audit_log": "id",
    "api_tokens": "id",
}


@pytest.fixture
async def empty(empty_database_url: str) -> AsyncIterator[Database]:
    """A database that nothing was done to yet."""
    opened = Database(empty_database_url, "test", size=2)
    yield opened
    await opened.close()


@pytest.fixture
async def start_migrator(empty: Database) -> AsyncIterator[Start]:
    """Starts a process that is ready to migrate the empty database; whatever is left at the end is ended."""
    started = []

    async def start(armed: str = "") -> asyncio.subprocess.Process:
        later = [(m.version, m.name, m.sql) for m in migrate.migrations() if m.version in LATER]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", MIGRATOR, empty.url, armed, json.dumps(later)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
def later_versions(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A version that has more migrations; the numbers of all."""
    known = (*migrate.migrations(), *(migrate.Migration(n, f"{n:04}_later", sql) for n, sql in LATER.items()))
    monkeypatch.setattr(migrate, "migrations", lambda: known)
    return [m.version for m in known]


async def applied(database: Database) -> list[int]:
    async with database.connection() as connection:
        rows = await connection.fetch("select version from tidegate.schema_migrations order by version")
    return [row[0] for row in rows]


async def tables(connection: Connection) -> set[str]:
    rows = await connection.fetch("select tablename from pg_tables where schemaname = 'tidegate'")
    return {row[0] for row in rows}


async def columns(connection: Connection, condition: str) -> set[str]:
    """Columns of tables; partitions have those of their table."""
    rows = await connection.fetch(
        "select table_name || '.' || column_name as name from information_schema.columns "
        f"where table_schema = 'tidegate' and ({condition}) and not exists (select from pg_class c "
        "where c.relispartition and c.relname = table_name and c.relnamespace = 'tidegate'::regnamespace)"
    )
    return {row["name"] for row in rows}


def test_migrations_are_numbered_in_order() -> None:
    assert sorted(set(VERSIONS)) == VERSIONS and VERSIONS[0] == 1
    assert migrate.latest() == VERSIONS[-1]


async def test_fresh_database_is_current(database: Database) -> None:
    status = await migrate.status(database)
    assert (status.version, status.applied, status.pending) == (migrate.latest(), VERSIONS, [])
    await migrate.require_current(database)
    assert await migrate.migrate(database) == []
    assert await applied(database) == VERSIONS


async def test_an_ordinary_role_that_owns_its_database_installs_everything(empty: Database) -> None:
    """As on a managed Postgres; every test logs in as this role."""
    async with empty.connection() as connection:
        role = await connection.fetchrow("select * from pg_roles where rolname = current_user")
        owner = "select datdba::regrole::text from pg_database where datname = current_database()"
        assert role is not None and role["rolname"] == await connection.fetchval(owner)
        more = "rolsuper rolcreaterole rolcreatedb rolreplication rolbypassrls"
        assert [right for right in more.split() if role[right]] == []
        memberships = "select count(*) from pg_auth_members where member = current_user::regrole"
        assert await connection.fetchval(memberships) == 0
    assert await migrate.migrate(empty) == list(migrate.migrations())


async def test_empty_database_has_everything_before_it(empty: Database) -> None:
    status = await migrate.status(empty)
    assert (status.version, status.applied, status.pending) == (0, [], list(migrate.migrations()))
    with pytest.raises(SchemaError, match=f"at version 0, this Tidegate needs {migrate.latest()}: run `tidegate migr"):
        await migrate.require_current(empty)
    async with empty.connection() as connection:  # looking changes nothing
        assert not await connection.fetchval("select exists (select from pg_namespace where nspname = 'tidegate')")
    assert await migrate.migrate(empty) == list(migrate.migrations())
    await migrate.require_current(empty)


async def test_many_processes_at_once_migrate_once(empty: Database, start_migrator: Start) -> None:
    processes = await asyncio.gather(*(start_migrator() for _ in range(20)))
    results = await asyncio.gather(*(process.communicate(b"") for process in processes))
    assert [error.decode() for _, error in results if error] == []
    assert [process.returncode for process in processes] == [0] * 20
    assert sorted(int(out) for out, _ in results) == [0] * 19 + [len(VERSIONS)]
    assert await applied(empty) == VERSIONS


@pytest.mark.parametrize("nth", range(1, len(VERSIONS) + len(LATER) + 1))
async def test_killed_mid_migration_leaves_nothing_half_done(
    empty: Database, start_migrator: Start, nth: int, later_versions: list[int]
) -> None:
    process = await start_migrator(f"migrate.mid_migration=kill@{nth}")
    _, error = await process.communicate(b"")
    assert (process.returncode, error) == (137, b"")
    assert await applied(empty) == later_versions[: nth - 1]
    async with empty.connection() as connection:
        found = await tables(connection)
    assert nth > 1 or found == {"schema_migrations"}
    assert {name for name in found if name.startswith("later_")} == {
        f"later_{n}" for n in range(1, nth - len(VERSIONS))
    }
    status = await migrate.status(empty)
    assert [m.version for m in status.pending] == later_versions[nth - 1 :]
    with pytest.raises(SchemaError, match=f"at version {([0, *later_versions])[nth - 1]}"):
        await migrate.require_current(empty)

    again = await start_migrator()
    out, error = await again.communicate(b"")
    assert (again.returncode, int(out), error) == (0, len(later_versions) - nth + 1, b"")
    await migrate.require_current(empty)


async def test_failed_migration_is_undone_and_lets_go_of_the_lock(empty: Database) -> None:
    failpoints.arm("migrate.mid_migration=raise")
    with pytest.raises(failpoints.FailpointHit):
        await migrate.migrate(empty)
    async with empty.connection() as connection:
        assert await tables(connection) == {"schema_migrations"}
    assert await migrate.migrate(empty) == list(migrate.migrations())


async def test_a_connection_lost_midway_is_said_and_nothing_is_half_done(
    empty: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = migrate._RECORD
    monkeypatch.setattr(migrate, "_RECORD", f"{record} returning pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(Unavailable, match="the database cannot be reached"):
        await migrate.migrate(empty)
    monkeypatch.setattr(migrate, "_RECORD", record)
    assert await migrate.migrate(empty) == list(migrate.migrations())


async def test_waiting_for_a_lock_holds_up_nobody_and_says_who_has_it(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A report that reads events for hours, while a migration wants to change their table."""
    changes = "alter table tidegate.workflow_events add column extra text"
    more = migrate.Migration(migrate.latest() + 1, f"{migrate.latest() + 1:04}_more", changes)
    known = (*migrate.migrations(), more)
    monkeypatch.setattr(migrate, "migrations", lambda: known)
    monkeypatch.setattr(migrate, "LOCK_PATIENCE_SECONDS", 2)
    ingest = Ingest(
        Database(database.url, "ingest", size=2, lock_timeout_ms=LOCK_TIMEOUT_MS), max_waiting=100, after_commit=int
    )
    try:
        async with database.transaction() as report:
            await report.fetchval("select count(*) from tidegate.workflow_events")
            migrating = asyncio.create_task(migrate.migrate(database))
            accepted = 0
            while not migrating.done():
                await ingest.accept([event()])  # fails when it is held up
                accepted += 1
            with pytest.raises(
                SchemaError, match=r"did not get the locks .* AccessShareLock on tidegate.workflow_even"
            ):
                await migrating
            assert accepted > 2
        assert [m.version for m in await migrate.migrate(database)] == [more.version]
    finally:
        await ingest.close()
        await ingest._database.close()


async def test_changed_migration_is_refused(database: Database) -> None:
    first = migrate.migrations()[0]
    async with database.connection() as connection:
        await connection.execute("update tidegate.schema_migrations set checksum = 'other' where version = 1")
    for use in (migrate.status, migrate.migrate, migrate.require_current):
        with pytest.raises(SchemaError, match=f"{first.name} was applied with other content .*other.*{first.checksum}"):
            await use(database)


async def test_ledger_records_name_and_checksum(database: Database) -> None:
    async with database.connection() as connection:
        rows = await connection.fetch(
            "select version, name, checksum, compatible_from from tidegate.schema_migrations order by 1"
        )
    assert [tuple(row)[:3] for row in rows] == [(m.version, m.name, m.checksum) for m in migrate.migrations()]
    needed = [m.compatible_from for m in migrate.migrations()]
    assert [row["compatible_from"] for row in rows] == [max(needed[: n + 1]) for n in range(len(needed))]


# The schema ---------------------------------------------------------------------------------------------------------


async def test_schema_has_the_contracts_tables_and_columns(connection: Connection) -> None:
    found = await columns(connection, "true")
    promised = {f"{table}.{column}" for table, names in CONTRACT.items() for column in names.split()}
    assert promised - found == set()


async def test_all_counter_columns_are_bigint(connection: Connection) -> None:
    assert await columns(connection, "udt_name in ('int2', 'int4', '_int2', '_int4', 'oid')") == set()
    rows = await connection.fetch("select data_type::text from pg_sequences where schemaname = 'tidegate'")
    assert {row[0] for row in rows} == {"bigint"}
    counters = await columns(connection, "udt_name = 'int8'")
    assert {
        "workflow_events.ingress_sequence",
        "event_ingress_retries.attempts",
        "workflow_trigger_deliveries.retry_attempts",
        "workflow_run_steps.retry_attempts",
        "workflow_runs.attempts",
    } <= counters


async def test_all_times_have_a_zone_and_all_documents_are_jsonb(connection: Connection) -> None:
    assert await columns(connection, "udt_name in ('timestamp', '_timestamp', 'date', 'time')") == set()
    # Read back by the function that wrote it, in the same order.
    assert await columns(connection, "udt_name = 'json'") == {
        "workflow_run_steps.result",
        "run_children.result",
        "event_waits.met_event",
    }
    assert await columns(connection, "column_name like '%\\_at' and udt_name not in ('timestamptz', 'int8')") == set()


async def test_registry_version_is_one_row(connection: Connection) -> None:
    with pytest.raises(asyncpg.CheckViolationError):
        await connection.execute("insert into tidegate.registry_version values (false)")
    with pytest.raises(asyncpg.UniqueViolationError):
        await connection.execute("insert into tidegate.registry_version values (true)")


async def test_no_delete_cascades(connection: Connection) -> None:
    rows = await connection.fetch(
        "select conname, confdeltype::text as on_delete from pg_constraint "
        "where contype = 'f' and connamespace = 'tidegate'::regnamespace"
    )
    assert {row["on_delete"] for row in rows} == {"a"}  # no action: a row that is referred to cannot be deleted
