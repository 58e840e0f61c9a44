"""A look at a running Tidegate from outside: its tables, the log of its database, and its processes."""

from __future__ import annotations

import os
from pathlib import Path

import asyncpg
import msgspec

# The tables by what they hold: what waits or runs, the days of history, what has no day, producers' ids, the rest. A
# partition that is dropped meanwhile has no size.
_SIZES = """
select case when c.relname ~ '_live$' then 'live' when c.relname ~ '_[0-9]{8}$' then 'days'
            when c.relname ~ '_default$' then 'default' when c.relname = 'event_external_ids' then 'external_ids'
            else 'other' end as part,
       coalesce(sum(pg_table_size(c.oid)), 0)::bigint, coalesce(sum(pg_indexes_size(c.oid)), 0)::bigint, count(*)
  from pg_class c
 where c.relnamespace = 'tidegate'::regnamespace and c.relkind = 'r'
 group by 1
"""
# Rows that were ever written to a table, as the server counts them; a second late at most.
_WRITTEN = """
select coalesce(sum(n_tup_ins), 0)::bigint from pg_stat_user_tables where schemaname = 'tidegate' and relname = $1
"""


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """Of some tables, in bytes; and how many they are, partitions counted one by one."""

    tables: int
    table_bytes: int
    index_bytes: int


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """What a process, or all of Postgres, has: memory in MB of 1,000,000 bytes (of Postgres without what its processes
    share), open files, and the CPU it has taken; None where /proc does not tell."""

    memory_mb: float | None
    open_files: int | None
    cpu_seconds: float | None
    processes: int = 1


async def sizes(connection: asyncpg.Connection) -> dict[str, Size]:
    """Of all tables of Tidegate, by part."""
    rows = await connection.fetch(_SIZES)
    return {row[0]: Size(table_bytes=row[1], index_bytes=row[2], tables=row[3]) for row in rows}


async def days(connection: asyncpg.Connection) -> int:
    """How many days have partitions."""
    found: int = await connection.fetchval("select count(*) from tidegate.days()")
    return found


async def wal_bytes(connection: asyncpg.Connection) -> int:
    """How much the server has ever written to its log."""
    return int(await connection.fetchval("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))


async def written(connection: asyncpg.Connection, table: str) -> int:
    """How many rows were ever written to one table, or partition."""
    await connection.execute("select pg_stat_clear_snapshot()")
    found: int = await connection.fetchval(_WRITTEN, table)
    return found


def process(pid: int) -> Process:
    return Process(memory_mb=_mb(pid, "VmRSS"), open_files=_open_files(pid), cpu_seconds=_cpu_seconds(pid))


def postgres(postmaster: int) -> Process:
    """The server with all its processes."""
    pids = [postmaster, *_children(postmaster)]
    memory = [mb for pid in pids if (mb := _mb(pid, "RssAnon")) is not None]
    files = [count for pid in pids if (count := _open_files(pid)) is not None]
    return Process(
        memory_mb=round(sum(memory), 1) if memory else None,
        open_files=sum(files) if files else None,
        cpu_seconds=_cpu_seconds(*pids),
        processes=len(pids),
    )


def parent(pid: int) -> int:
    """The process that started another; 0 where /proc does not tell."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _stat(pid: int) -> list[str]:
    """The fields of /proc/…/stat after the name; none when it ended while we looked, or there is no /proc."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _cpu_seconds(*pids: int) -> float | None:
    """Of these processes, and of children that have ended and were waited for."""
    found = [sum(map(int, fields[11:15])) for pid in pids if (fields := _stat(pid))]
    return sum(found) / os.sysconf("SC_CLK_TCK") if found else None


def _children(pid: int) -> list[int]:
    return [found for path in Path("/proc").glob("[0-9]*") if parent(found := int(path.name)) == pid]


def _mb(pid: int, name: str) -> float | None:
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:  # it ended while we looked, or there is no /proc
        return None
    found = [line.split()[1] for line in text.splitlines() if line.startswith(f"{name}:")]
    return round(int(found[0]) * 1024 / 1_000_000, 1) if found else None


def _open_files(pid: int) -> int | None:
    try:
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return None
