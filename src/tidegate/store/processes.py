"""`processes`: which processes are alive, and the newest schema version that the code of each knows."""

from __future__ import annotations

import os
import socket
from datetime import datetime
from typing import Literal, NamedTuple
from uuid import UUID

import msgspec

from tidegate import __version__
from tidegate.clock import uuid7
from tidegate.model.retention import Retention
from tidegate.store.db import Connection
from tidegate.store.sql import load

ProcessKind = Literal["api", "worker", "publisher"]

# How often a process says that it is alive; one that has not done so for ALIVE_MS counts as ended.
BEAT_SECONDS, ALIVE_MS = 5.0, 60_000
# Processes that were not seen for this long are removed.
FORGET_MS = 3_600_000

_sql = load("processes")


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process since its start; one that is started again is another."""

    id: UUID
    name: str
    kind: ProcessKind
    version: str
    schema_version: int
    retention: Retention | None = None


class SeenProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process as others see it."""

    name: str
    kind: str
    version: str
    schema_version: int
    seen_at: datetime


class KeepingProcess(NamedTuple):
    """A living process, and how long it keeps finished rows."""

    kind: str
    name: str
    retention: Retention


def this_process(kind: ProcessKind, schema_version: int, retention: Retention | None = None) -> Process:
    """The process that runs this, whose code knows that schema version."""
    name = f"{socket.gethostname()}:{os.getpid()}"
    return Process(
        id=uuid7(), name=name, kind=kind, version=__version__, schema_version=schema_version, retention=retention
    )


async def beat(connection: Connection, process: Process) -> None:
    """The process is alive."""
    about = process.id, process.name, process.kind, process.version, process.schema_version
    await connection.execute(_sql["beat"], *about, *(process.retention or (None, None, None)))


async def leave(connection: Connection, process: Process) -> None:
    """The process has stopped."""
    await connection.execute(_sql["leave"], process.id)


async def forget(connection: Connection) -> None:
    """Delete processes that were not seen for FORGET_MS."""
    await connection.execute(_sql["forget"], FORGET_MS)


async def hold(connection: Connection) -> None:
    """Until this transaction ends, no process can say that it is alive."""
    await connection.execute(_sql["hold"])


async def retentions(connection: Connection) -> list[KeepingProcess]:
    """How long each living process that removes history, or tells of it, keeps finished rows."""
    rows = await connection.fetch(_sql["retentions"], ALIVE_MS)
    return [KeepingProcess(kind, name, Retention(*kept)) for kind, name, *kept in rows]


async def alive(connection: Connection) -> list[SeenProcess]:
    """The living processes."""
    return [SeenProcess(**dict(row)) for row in await connection.fetch(_sql["alive"], ALIVE_MS)]


async def older(connection: Connection, schema_version: int) -> list[SeenProcess]:
    """Living processes whose code does not know that schema version."""
    return [SeenProcess(**dict(row)) for row in await connection.fetch(_sql["older"], schema_version, ALIVE_MS)]
