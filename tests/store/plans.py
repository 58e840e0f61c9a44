"""What the server did for a statement: its plan as it was executed, and what that has read."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from typing import Any

import asyncpg
import msgspec
import pytest
from bench import history

from tidegate.embedded import ROLE, EmbeddedPostgres

MODES = pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
STATISTICS = pytest.mark.parametrize("has_statistics", [False, True], ids=["without statistics", "with statistics"])

_PARTITION = re.compile(r"_(live|default|\d{8})$")
_APPEND, _SORT = {"Append", "Merge Append"}, {"Sort", "Incremental Sort"}


class Undone(Exception):
    """Ends a transaction without a trace: neither rows nor statistics."""


class Recorder:
    """A connection that keeps what it is asked, and answers nothing."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[Any, ...]]] = []

    async def fetch(self, query: str, *args: Any) -> list[Any]:
        self.asked.append((query, args))
        return []

    async def execute(self, query: str, *args: Any) -> str:
        self.asked.append((query, args))
        return "DONE 0"

    async def fetchrow(self, query: str, *args: Any) -> None:
        self.asked.append((query, args))

    async def fetchval(self, query: str, *args: Any) -> Any:
        self.asked.append((query, args))


async def explain(connection: Any, text: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """The plan of a statement that was executed, and undone.

    As a prepared statement: explained with its arguments, a statement is planned for them, whatever `plan_cache_mode`.
    """
    types = [parameter.name for parameter in (await connection.prepare(text)).get_parameters()]
    quoted = ", ".join(f"quote_nullable((${n}::{type})::text)" for n, type in enumerate(types, 1))
    values = await connection.fetchrow(f"select {quoted}", *arguments) if types else []
    given = ", ".join(f"{value}::{type}" for value, type in zip(values, types, strict=True))
    attempt = connection.transaction()
    await attempt.start()
    await connection.execute(f"prepare explained as {text}")
    try:
        execute = f"execute explained ({given})" if given else "execute explained"
        found = await connection.fetchval(f"explain (analyze, buffers, format json) {execute}")
    finally:
        await attempt.rollback()
        await connection.execute("deallocate explained")
    plan: dict[str, Any] = (msgspec.json.decode(found) if isinstance(found, str) else found)[0]["Plan"]
    return plan


def table_of(node: dict[str, Any]) -> str | None:
    """The table that a node reads or writes, by whatever partition."""
    name: str | None = node.get("Relation Name")
    return name and _PARTITION.sub("", name)


def rows_read(
    node: dict[str, Any], tables: set[str], counted: frozenset[int] = frozenset()
) -> Iterator[tuple[str, float]]:
    """For each scan of one of the tables, the rows that it read, kept or not; of all partitions together."""
    if table_of(node) in tables and id(node) not in counted:
        yield f"{node['Node Type']} on {node['Relation Name']}", _rows(node)
    children = node.get("Plans", [])
    parts = [_scan(child) for child in children] if node["Node Type"] in _APPEND else []
    for table in sorted(tables.intersection(map(table_of, parts))):
        of_table = [part for part in parts if table_of(part) == table]
        yield f"{of_table[0]['Node Type']} on partitions of {table}", sum(map(_rows, of_table))
    for child in children:
        yield from rows_read(child, tables, counted.union(map(id, parts)))


def days_read(node: dict[str, Any]) -> set[str]:
    """The partitions of history that were looked into, if only to find nothing."""
    name = node.get("Relation Name", "")
    found = {name} if re.search(r"_(default|\d{8})$", name) and node["Actual Loops"] else set()
    return found.union(*map(days_read, node.get("Plans", [])))


def _scan(node: dict[str, Any]) -> dict[str, Any]:
    """The scan of a part of an append, which may be sorted."""
    while node["Node Type"] in _SORT:
        [node] = node["Plans"]
    return node


def _rows(scan: dict[str, Any]) -> float:
    removed = scan.get("Rows Removed by Filter", 0) + scan.get("Rows Removed by Index Recheck", 0)
    rows: float = (scan["Actual Rows"] + removed) * scan["Actual Loops"]
    return rows


def filled(
    name: str, postgres: EmbeddedPostgres, template: str, tables: Sequence[str], fill: list[tuple[str, Any]]
) -> Iterator[str]:
    """The address of a database filled by these statements, of which nothing is vacuumed or counted by itself."""

    async def admin(statement: str) -> None:
        connection = await asyncpg.connect(postgres.admin_url())
        await connection.execute(statement)
        await connection.close()

    async def make() -> None:
        await admin(f"create database {name} template {template} owner {ROLE}")
        connection = await asyncpg.connect(postgres.admin_url(name))  # who may turn checks off
        await history.set_autovacuum(connection, is_on=False, tables=tables)
        for statement, arguments in fill:
            await connection.execute(statement, *arguments)
        await connection.close()

    asyncio.run(make())
    yield postgres.url(name)
    asyncio.run(admin(f"drop database {name} with (force)"))
