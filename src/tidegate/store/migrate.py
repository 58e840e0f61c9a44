"""Numbered forward SQL files. Each runs in a transaction of its own; several starters may run them at once."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.errors import SchemaError
from tidegate.store.db import Connection, Database, TransientConflict, translated, without_end

# A migration that waits for a lock on a table blocks every transaction that comes after it. So it waits for less time
# than publishing does, lets them pass, and tries again, until this much time has passed in all.
LOCK_TIMEOUT_MS = 200
LOCK_PATIENCE_SECONDS = 60.0
_REST_SECONDS = 0.5
# Waiting for another process's migrations is not a fault, and large tables take their time; silence has an end.
_ANSWER_SECONDS = 4 * 3600.0

# The first key is ours alone, so that no other program's advisory lock can be in the way.
_LOCK = "select pg_advisory_lock(hashtext('tidegate.migrations'), 8700)"
_UNLOCK = "select pg_advisory_unlock(hashtext('tidegate.migrations'), 8700)"
_LEDGER = """
create schema if not exists tidegate;
create table if not exists tidegate.schema_migrations (
  version    bigint primary key,
  name       text        not null,
  checksum   text        not null,
  applied_at timestamptz not null default clock_timestamp()
);
"""
_HOLDER = """
select 'tidegate.' || c.relname as relation, l.mode, l.pid, a.usename as role, a.application_name as application,
       a.xact_start at time zone 'UTC' as since
  from pg_locks l
  join pg_class c on c.oid = l.relation and c.relnamespace = 'tidegate'::regnamespace and c.relkind in ('r', 'p')
  join pg_stat_activity a on a.pid = l.pid
 where l.granted and l.pid <> pg_backend_pid()
   and l.database = (select oid from pg_database where datname = current_database())
 order by a.xact_start nulls first, l.mode = 'AccessShareLock' limit 1
"""


@dataclass(frozen=True, slots=True)
class Migration:
    version: int
    name: str
    sql: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.sql.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Status:
    """Where the database is: the versions applied, and the migrations still to come."""

    applied: list[int]
    pending: list[Migration]

    @property
    def version(self) -> int:
        return max(self.applied, default=0)


@cache
def migrations() -> tuple[Migration, ...]:
    """Every migration of this version, in order."""
    folder = resources.files("tidegate.store") / "migrations"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return tuple(Migration(int(f.name[:4]), f.name.removesuffix(".sql"), f.read_text(encoding="utf-8")) for f in files)


def latest() -> int:
    """The schema version that this version of Tidegate writes and reads."""
    return migrations()[-1].version


async def status(database: Database) -> Status:
    """What is applied and what is pending. Refuses a schema that this version does not know."""
    async with database.connection() as connection:
        return await status_on(connection)


async def status_on(connection: Connection) -> Status:
    """The same, on a connection that is there."""
    if not await connection.fetchval("select to_regclass('tidegate.schema_migrations') is not null"):
        return Status([], list(migrations()))
    return _status(await connection.fetch("select version, checksum from tidegate.schema_migrations"))


async def migrate(database: Database) -> list[Migration]:
    """Bring the schema up to date; what was applied. Waits while another process does the same."""
    connection: Any = await database.dedicated(_ANSWER_SECONDS)
    try:
        await connection.execute(f"set lock_timeout = 0; set statement_timeout = 0; {without_end(is_local=False)}")
        await connection.execute(_LOCK)
        try:
            await connection.execute(f"set lock_timeout = '{LOCK_TIMEOUT_MS}ms'")
            found = await status_on(connection)
            if not found.applied:
                await connection.execute(_LEDGER)
            for migration in found.pending:
                await _apply_between_others(connection, migration)
            return found.pending
        finally:
            await connection.execute(_UNLOCK)
    finally:
        await connection.close(timeout=5)


async def _apply_between_others(connection: Any, migration: Migration) -> None:
    """The migration, retried while another transaction holds a lock that it needs."""
    deadline = monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            async with translated(), connection.transaction():
                await _apply(connection, migration)
            return
        except TransientConflict as exc:
            if monotonic() >= deadline:
                raise SchemaError(
                    f"migration {migration.name} did not get the locks it needs within {LOCK_PATIENCE_SECONDS:g} s: "
                    f"{await _holder(connection)}. Nothing of it was applied; end that transaction, or run "
                    "`tidegate migrate` again when it is over"
                ) from exc
            await asyncio.sleep(_REST_SECONDS)


async def _apply(connection: Any, migration: Migration) -> None:
    await connection.execute(migration.sql)
    failpoints.hit("migrate.mid_migration")
    await connection.execute(
        "insert into tidegate.schema_migrations (version, name, checksum) values ($1, $2, $3)",
        migration.version,
        migration.name,
        migration.checksum,
    )


async def _holder(connection: Any) -> str:
    """The transaction that has held a lock on one of our tables for longest."""
    row = await connection.fetchrow(_HOLDER)
    if row is None:
        return "the locks have just been released"
    since = f", in a transaction since {row['since']:%Y-%m-%d %H:%M:%S} UTC" if row["since"] else ""
    return (
        f"process {row['pid']} of the database server (role {row['role']}, application {row['application']!r}) holds "
        f"{row['mode']} on {row['relation']}{since}"
    )


async def require_current(database: Database) -> None:
    """Refuse to work on a schema that is older or newer than this version."""
    refuse_pending(await status(database))


def refuse_pending(found: Status) -> None:
    """Refuse a schema that is older than this version."""
    if found.pending:
        raise SchemaError(
            f"the database's schema is at version {found.version}, this Tidegate needs {latest()}: "
            "run `tidegate migrate` first"
        )


def _status(rows: Any) -> Status:
    applied = {row["version"]: row["checksum"] for row in rows}
    newest = max(applied, default=0)
    if newest > latest():
        raise SchemaError(
            f"the database's schema is at version {newest}, but this Tidegate knows only up to {latest()}: "
            "it was migrated by a newer Tidegate; upgrade this one"
        )
    for migration in migrations():
        checksum = applied.get(migration.version, migration.checksum)
        if checksum != migration.checksum:
            raise SchemaError(
                f"migration {migration.name} was applied with other content (checksum {checksum}, "
                f"this Tidegate has {migration.checksum}); the schema is not what this version expects"
            )
    return Status(sorted(applied), [m for m in migrations() if m.version not in applied])
