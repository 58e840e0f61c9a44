"""`workers`: which workers are alive, and whose code each has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from types import MappingProxyType

import msgspec

from tidegate import __version__
from tidegate.model.ids import DefinitionId, RunId
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("workers")

# At most this many of the runs that workers hold are read.
MAX_EXECUTING = 1000


class ExecutingRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a worker holds, since when, and until when without a renewal; and the source of its event."""

    run_id: RunId
    workflow: str
    since: datetime
    lease_until: datetime
    source: str | None = None


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as others see it: its release, how many runs it executes at a time, the workflows whose code it has,
    with the version of each that has one (`code_versions`), and the runs that it holds. Not alive: it sent no heartbeat
    for a while; late: it has missed one. `left_out` are workflows whose code it has and whose runs it does not take,
    `reserved` the slots that it keeps for some."""

    name: str
    version: str
    slots: int
    started_at: datetime
    seen_at: datetime
    is_alive: bool
    workflows: list[str]
    executing: list[ExecutingRun]
    code_versions: dict[str, str] = {}
    is_late: bool = False
    left_out: list[str] = []
    reserved: dict[str, int] = {}


class Unserved(msgspec.Struct, frozen=True, kw_only=True):
    """A workflow with due runs that no living worker takes: none has its code, but for those that leave it out."""

    workflow: str
    waiting: int
    since: datetime
    left_out_by: list[str] = []


async def heartbeat(
    connection: Connection,
    name: str,
    definitions: Sequence[DefinitionId],
    slots: int,
    every_ms: int,
    versions: Sequence[str | None] = (),
    left_out: Sequence[str] = (),
    reserved: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """A worker is alive, has the code of these definitions, in these versions (None: it has none), and executes so many
    runs at a time. It says so every so many milliseconds."""
    text = msgspec.json.encode(dict(reserved)).decode()
    given = name, definitions, slots, __version__, versions, every_ms, list(left_out), text
    await connection.execute(_sql["heartbeat"], *given)


async def list_all(connection: Connection, alive_ms: int) -> list[WorkerRecord]:
    """The workers on record, the longest running first, with what each executes."""
    held: dict[str, list[ExecutingRun]] = {}
    for row in await connection.fetch(_sql["executing"], MAX_EXECUTING):
        fields = dict(row)
        held.setdefault(fields.pop("worker") or "", []).append(ExecutingRun(**fields))
    rows = await connection.fetch(_sql["list"], alive_ms)
    return [WorkerRecord(**dict(row), executing=held.get(row["name"], [])) for row in rows]


async def reconciled(connection: Connection, name: str) -> None:
    """Record that a worker has reconciled."""
    await connection.execute(_sql["reconciled"], name)


async def leave(connection: Connection, name: str) -> None:
    """A worker has stopped."""
    await connection.execute(_sql["leave"], name)


async def forget(connection: Connection, after_ms: int) -> None:
    """Delete workers that were not seen within that time."""
    await connection.execute(_sql["forget"], after_ms)


async def unserved(connection: Connection, alive_ms: int, overdue_ms: int) -> list[Unserved]:
    """Workflows with runs that have been due for a while and that no living worker takes."""
    return [Unserved(**dict(row)) for row in await connection.fetch(_sql["unserved"], alive_ms, overdue_ms)]
