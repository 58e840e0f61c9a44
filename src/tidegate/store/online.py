"""Statements of migrations that take long and hold up nobody: indexes built concurrently, constraints validated.

None of them can run in a transaction. After a crash the file runs again from its start, so each is written to be
repeated: an index that is there is kept, and one that a crash left invalid is dropped and built again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Awaitable, Callable, Iterator

from tidegate.store.db import Connection
from tidegate.store.migration import Migration

# How long such a statement may wait for other transactions, which go on meanwhile.
PATIENCE = "10min"
# The longest name of Postgres, which cuts off the rest.
_MOST_CHARACTERS = 63

_CREATE = re.compile(
    r"create (?P<unique>unique )?index concurrently (?P<name>\w+) on tidegate\.(?P<table>\w+) (?P<rest>.+)"
)
_DROP = re.compile(r"drop index concurrently if exists tidegate\.\w+")
_VALIDATE = re.compile(r"alter table tidegate\.\w+ validate constraint \w+")
_INDEX = """
select i.indisvalid from pg_index i join pg_class c on c.oid = i.indexrelid
 where c.relnamespace = 'tidegate'::regnamespace and c.relname = $1
"""
# Partitions of a table whose part of an index is not attached yet.
_PARTITIONS = """
select c.relname from pg_inherits p join pg_class c on c.oid = p.inhrelid
 where p.inhparent = ('tidegate.' || quote_ident($1))::regclass
   and not exists (select from pg_index i join pg_inherits a on a.inhrelid = i.indexrelid
                    where i.indrelid = c.oid and a.inhparent = ('tidegate.' || quote_ident($2))::regclass)
 order by c.relname
"""

Brief = Callable[[str], Awaitable[None]]


def statements(migration: Migration) -> Iterator[str]:
    """Its statements, without comments and line breaks. ValueError if one cannot be repeated after a crash."""
    text = re.sub(r"(?m)--.*$", "", migration.sql)
    for statement in filter(None, (" ".join(one.split()) for one in text.split(";"))):
        if not any(known.fullmatch(statement) for known in (_CREATE, _DROP, _VALIDATE)):
            raise ValueError(
                f"migration {migration.name} is not one transaction: `{statement}` must be `create [unique] index "
                "concurrently NAME on tidegate.TABLE …`, `drop index concurrently if exists tidegate.NAME` or `alter "
                "table tidegate.TABLE validate constraint NAME`"
            )
        yield statement


async def run(connection: Connection, statement: str, brief: Brief) -> None:
    """Run one of them, or what it lacks. `brief` runs a statement that needs a short, exclusive lock."""
    create = _CREATE.fullmatch(statement)
    if create is None:
        await _patiently(connection, statement)
    else:
        await _create(connection, create, create["name"], create["table"], brief)


async def _create(connection: Connection, create: re.Match[str], name: str, table: str, brief: Brief) -> None:
    kind = "select relkind::text from pg_class where oid = ('tidegate.' || quote_ident($1))::regclass"
    if await connection.fetchval(kind, table) == "p":
        await _create_in_partitions(connection, create, name, table, brief)
        return
    is_valid = await connection.fetchval(_INDEX, name)
    if is_valid is False:
        await _patiently(connection, f"drop index concurrently tidegate.{name}")
    if not is_valid:
        unique = create["unique"] or ""
        await _patiently(connection, f"create {unique}index concurrently {name} on tidegate.{table} {create['rest']}")


async def _create_in_partitions(
    connection: Connection, create: re.Match[str], name: str, table: str, brief: Brief
) -> None:
    """Postgres cannot build an index of a partitioned table concurrently, but that of each partition. From its first
    statement on, new partitions are created with theirs; it is valid once every partition's is attached."""
    if await connection.fetchval(_INDEX, name) is None:
        await brief(f"create {create['unique'] or ''}index {name} on only tidegate.{table} {create['rest']}")
    for row in await connection.fetch(_PARTITIONS, table, name):
        part = _name_of_part(name, row["relname"], table)
        await _create(connection, create, part, row["relname"], brief)
        await brief(f"alter index tidegate.{name} attach partition tidegate.{part}")


def _name_of_part(name: str, partition: str, table: str) -> str:
    """The name of a partition's index: different for each partition, however long the names are."""
    part = f"{name}_{partition.removeprefix(table).strip('_')}"
    if len(part) <= _MOST_CHARACTERS:
        return part
    return f"{name[: _MOST_CHARACTERS - 9]}_{hashlib.sha256(partition.encode()).hexdigest()[:8]}"


async def _patiently(connection: Connection, statement: str) -> None:
    """It waits for other transactions, and none waits for it."""
    before = await connection.fetchval("select current_setting('lock_timeout')")
    await connection.execute(f"set lock_timeout = '{PATIENCE}'")
    try:
        await connection.execute(statement)
    finally:
        await connection.execute(f"set lock_timeout = '{before}'")
