"""Numbered forward SQL files; several starters may run them at once. Each runs in a transaction of its own, except
those that hold up nobody and can be repeated (`store/online.py`).

A release is upgraded while it works. Expansions are applied at once: older processes can use the schema that they make.
A contraction waits until no living process needs what it removes. The ledger has, for each migration, the oldest schema
version whose code can use the schema from then on, so that a program can judge migrations that it does not know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Protocol

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.errors import SchemaError
from tidegate.store import online, processes
from tidegate.store.db import Connection, Database, Row, TransientConflict, translated, without_end
from tidegate.store.migration import Migration
from tidegate.store.processes import SeenProcess

# A migration that waits for a lock on a table blocks every transaction that comes after it, and then holds it until its
# commit. So it waits for much less time than publishing does, lets the others pass, and tries again, until this much
# time has passed in all.
LOCK_TIMEOUT_MS = 100
LOCK_PATIENCE_SECONDS = 60.0
_REST_SECONDS = 0.5
# How often it is checked whether another process has finished migrating.
_TURN_SECONDS = 0.1
# Waiting for another process's migrations is not a fault, and large tables take their time; silence has an end.
_ANSWER_SECONDS = 4 * 3600.0

# The first key is ours alone, so that no other program's advisory lock can be in the way. Asked for again and again: a
# statement that waits for it would be one that building an index concurrently waits for.
_LOCK = "select pg_try_advisory_lock(hashtext('tidegate.migrations'), 8700)"
_LEDGER = """
create schema if not exists tidegate;
create table if not exists tidegate.schema_migrations (
  version         bigint primary key,
  name            text        not null,
  checksum        text        not null,
  applied_at      timestamptz not null default clock_timestamp(),
  compatible_from bigint      not null default 1
);
"""
_HAS_LEDGER = "select to_regclass('tidegate.schema_migrations') is not null"
_APPLIED = "select version, name, checksum, compatible_from from tidegate.schema_migrations"
_RECORD = """
insert into tidegate.schema_migrations (version, name, checksum, compatible_from)
select $1, $2, $3, greatest($4, max(compatible_from)) from tidegate.schema_migrations
"""
# A session's state is hidden from other roles; one that is shown without a transaction has just ended it.
_HOLDER = """
select 'tidegate.' || c.relname as relation, l.mode, l.pid, a.usename as role, a.application_name as application,
       a.xact_start at time zone 'UTC' as since
  from pg_locks l
  join pg_class c on c.oid = l.relation and c.relnamespace = 'tidegate'::regnamespace and c.relkind in ('r', 'p')
  join pg_stat_activity a on a.pid = l.pid
 where l.granted and l.pid <> pg_backend_pid()
   and l.database = (select oid from pg_database where datname = current_database())
   and (a.xact_start is not null or a.state is null)
 order by a.xact_start nulls first, l.mode = 'AccessShareLock' limit 1
"""


class _Session(Connection, Protocol):
    """The connection that migrates."""

    def transaction(self) -> AbstractAsyncContextManager[object]: ...
    async def close(self, *, timeout: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Status:
    """Where the database is: the versions applied, and the migrations of this program still to come."""

    applied: list[int]
    pending: list[Migration]
    compatible_from: int = 1

    @property
    def version(self) -> int:
        return max(self.applied, default=0)

    @property
    def missing(self) -> list[Migration]:
        """Pending expansions: this program needs what they add."""
        return [migration for migration in self.pending if migration.kind == "expand"]

    @property
    def is_newer(self) -> bool:
        """Whether a newer program has migrated the database."""
        return self.version > latest()


@dataclass(frozen=True, slots=True)
class WaitingContraction:
    """A contraction that is pending, and the living processes that need what it removes."""

    migration: Migration
    older: list[SeenProcess]
    behind: Migration | None = None

    def __str__(self) -> str:
        if not self.older and self.behind is not None:
            return f"waits for {self.behind.name}, which comes before it"
        if not self.older:
            return "no process needs what it removes: run `tidegate migrate` to apply it"
        alive = "; ".join(
            f"{one.kind} {one.name} (version {one.version}, schema {one.schema_version}, last seen "
            f"{one.seen_at:%Y-%m-%d %H:%M:%S} UTC)"
            for one in self.older
        )
        return (
            f"waits for processes that know no schema from version {self.migration.compatible_from} on: {alive}. "
            f"Upgrade or stop them, then run `tidegate migrate` again; one that was killed counts for "
            f"{processes.ALIVE_MS // 1000} s. Everything works meanwhile"
        )


@cache
def migrations() -> tuple[Migration, ...]:
    """Every migration of this version, in order."""
    folder = resources.files("tidegate.store") / "migrations"
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return tuple(Migration(int(f.name[:4]), f.name.removesuffix(".sql"), f.read_text(encoding="utf-8")) for f in files)


def latest() -> int:
    """The newest schema version that this version of Tidegate knows."""
    return migrations()[-1].version


async def status(database: Database) -> Status:
    """What is applied and what is pending. Refuses a schema that this version cannot use."""
    async with database.connection() as connection:
        return await status_on(connection)


async def status_on(connection: Connection) -> Status:
    """The same, on a connection that is there."""
    if not await connection.fetchval(_HAS_LEDGER):
        return Status([], list(migrations()))
    return _status(await connection.fetch(_APPLIED))


async def waiting(database: Database) -> list[WaitingContraction]:
    """Contractions that are pending although their turn has come, and what each waits for."""
    async with database.connection() as connection:
        found = await status_on(connection)
        if found.missing:
            return []
        contractions: list[WaitingContraction] = []
        for migration in found.pending:
            older = await processes.older(connection, migration.compatible_from)
            behind = next((one.migration for one in contractions if one.older), None)
            contractions.append(WaitingContraction(migration, older, behind))
        return contractions


async def migrate(database: Database, *, expand_only: bool = False) -> list[Migration]:
    """Bring the schema up to date; what was applied. Waits while another process does the same.

    A contraction that living processes stand against stays pending, and those after it too (`waiting`); `expand_only`
    applies none. A newer schema is left as it is.
    """
    connection: _Session = await database.dedicated(_ANSWER_SECONDS)
    async with translated():
        try:
            return await _migrate(connection, may_contract=not expand_only)
        finally:
            await connection.close(timeout=5)


async def _migrate(connection: _Session, *, may_contract: bool) -> list[Migration]:
    """One process at a time: the lock is held until the connection is closed, or lost."""
    await connection.execute(f"set lock_timeout = 0; set statement_timeout = 0; {without_end(is_local=False)}")
    while not await connection.fetchval(_LOCK):  # noqa: ASYNC110 - another program ends it
        await asyncio.sleep(_TURN_SECONDS)
    await connection.execute(f"set lock_timeout = '{LOCK_TIMEOUT_MS}ms'")
    found = await status_on(connection)
    if found.is_newer or not found.pending:
        return []
    if not await connection.fetchval(_HAS_LEDGER):
        await connection.execute(_LEDGER)
    return await _apply_pending(connection, found.pending, may_contract=may_contract)


async def _apply_pending(connection: _Session, pending: list[Migration], *, may_contract: bool) -> list[Migration]:
    """In order; expansions also before a contraction that waits. Returns those that were applied."""
    applied = []
    for migration in pending:
        if migration.kind == "contract":
            may_contract = may_contract and await _between_others(connection, migration, partial(_contract, connection))
            if not may_contract:
                continue
        elif migration.is_online:
            await _apply_online(connection, migration)
        else:
            await _between_others(connection, migration, partial(_apply, connection))
        applied.append(migration)
    return applied


async def _between_others(
    connection: _Session, migration: Migration, step: Callable[[Migration], Awaitable[bool]]
) -> bool:
    """A step in a transaction, retried while another transaction holds a lock that it needs; what it returns."""
    deadline = monotonic() + LOCK_PATIENCE_SECONDS
    while True:
        try:
            async with translated(), connection.transaction():
                return await step(migration)
        except TransientConflict as exc:
            if monotonic() >= deadline:
                raise await _locked_out(connection, migration, f"{LOCK_PATIENCE_SECONDS:g} s") from exc
            await asyncio.sleep(_REST_SECONDS)


async def _locked_out(connection: _Session, migration: Migration, waited: str) -> SchemaError:
    undone = "It is not applied" if migration.is_online else "Nothing of it was applied"
    return SchemaError(
        f"migration {migration.name} did not get the locks it needs within {waited}: {await _holder(connection)}. "
        f"{undone}; end that transaction, or run `tidegate migrate` again when it is over"
    )


async def _apply(connection: _Session, migration: Migration) -> bool:
    await connection.execute(migration.sql)
    return await _record(connection, migration)


async def _contract(connection: _Session, migration: Migration) -> bool:
    """Apply it unless a living process needs what it removes. One that starts meanwhile waits for the end of this
    transaction, and then finds that the schema is not for it."""
    await processes.hold(connection)
    if await processes.older(connection, migration.compatible_from):
        return False
    return await _apply(connection, migration)


async def _apply_online(connection: _Session, migration: Migration) -> None:
    async def brief(statement: str) -> None:
        async def execute(_: Migration) -> bool:
            await connection.execute(statement)
            return True

        await _between_others(connection, migration, execute)

    for statement in online.statements(migration):
        deadline = monotonic() + LOCK_PATIENCE_SECONDS
        while True:
            try:
                async with translated():
                    await online.run(connection, statement, brief)
                break
            except TransientConflict as exc:  # a deadlock is noticed at once, a lock that is not to be had much later
                if monotonic() >= deadline:
                    raise await _locked_out(connection, migration, online.PATIENCE) from exc
                await asyncio.sleep(_REST_SECONDS)
    await _record(connection, migration)


async def _record(connection: _Session, migration: Migration) -> bool:
    failpoints.hit("migrate.mid_migration")
    await connection.execute(_RECORD, migration.version, migration.name, migration.checksum, migration.compatible_from)
    return True


async def _holder(connection: _Session) -> str:
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
    """Refuse to work on a schema that this version cannot use."""
    refuse_pending(await status(database))


def refuse_pending(found: Status) -> None:
    """Refuse a schema without what this version needs."""
    if found.missing:
        raise SchemaError(
            f"the database's schema is at version {found.version}, this Tidegate needs {latest()}: "
            "run `tidegate migrate` first"
        )


def _status(rows: Sequence[Row]) -> Status:
    applied = {row["version"]: row["checksum"] for row in rows}
    newest, compatible_from = max(applied, default=0), max((row["compatible_from"] for row in rows), default=1)
    if compatible_from > latest():
        raise SchemaError(
            f"the database's schema is at version {newest}, which only programs can use that know version "
            f"{compatible_from} or newer; this Tidegate knows only up to {latest()}: upgrade this process"
        )
    for migration in migrations():
        checksum = applied.get(migration.version, migration.checksum)
        if checksum != migration.checksum:
            raise SchemaError(
                f"migration {migration.name} was applied with other content (checksum {checksum}, "
                f"this Tidegate has {migration.checksum}); the schema is not what this version expects"
            )
    return Status(sorted(applied), [m for m in migrations() if m.version not in applied], compatible_from)
