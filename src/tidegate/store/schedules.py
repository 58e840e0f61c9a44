"""Schedules and their next ticks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.ids import DefinitionId
from tidegate.model.schedule import Schedule, ScheduleSpec
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("schedules")


class DueSchedule(NamedTuple):
    """A locked schedule whose tick has come, and the database's time."""

    definition_id: DefinitionId
    schedule: Schedule
    now: datetime


class Advanced(NamedTuple):
    """Where a schedule stands after a tick."""

    definition_id: DefinitionId
    last_at: datetime | None
    next_at: datetime


async def upsert(connection: Connection, definition_id: DefinitionId, spec: ScheduleSpec, next_at: datetime) -> bool:
    """Make the workflow's schedule as code says; False when it was so already, and keeps its next tick."""
    columns = (definition_id, spec.every_ms, spec.cron, spec.timezone, next_at)
    return await connection.fetchval(_sql["upsert"], *columns) is not None


async def delete(connection: Connection, definition_id: DefinitionId) -> bool:
    """Take the workflow's schedule away; False when it has none."""
    return await connection.fetchval(_sql["delete"], definition_id) is not None


async def lock_due(connection: Connection, definitions: Iterable[DefinitionId], limit: int) -> list[DueSchedule]:
    """The due schedules of these workflows, locked, except those that another transaction has locked."""
    found = []
    for row in await connection.fetch(_sql["lock_due"], list(definitions), limit):
        fields = dict(row)
        definition_id, now = fields.pop("workflow_definition_id"), fields.pop("now")
        found.append(DueSchedule(definition_id, Schedule(**fields), now))
    return found


async def advance(connection: Connection, moved: Sequence[Advanced]) -> None:
    """Move locked schedules on to their next ticks."""
    columns = [m.definition_id for m in moved], [m.last_at for m in moved], [m.next_at for m in moved]
    await connection.execute(_sql["advance"], *columns)


async def next_due_seconds(connection: Connection, definitions: Iterable[DefinitionId]) -> float | None:
    """Seconds until the next tick of these workflows (not above 0: now); None when they have no schedule."""
    seconds: float | None = await connection.fetchval(_sql["next_due_seconds"], list(definitions))
    return seconds


async def list_page(connection: Connection, *, after: str | None = None, limit: int) -> list[Schedule]:
    """Schedules, by workflow."""
    return [msgspec.convert(dict(row), Schedule) for row in await connection.fetch(_sql["list"], after, limit)]
