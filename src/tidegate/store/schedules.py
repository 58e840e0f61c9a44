"""Schedules and their next ticks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.ids import DefinitionId
from tidegate.model.schedule import SOURCE, TRIGGER, Schedule, ScheduleSpec
from tidegate.store.db import Connection, Row
from tidegate.store.sql import load

_sql = load("schedules")


class DueSchedule(NamedTuple):
    """A locked schedule, whose tick has come, and the database's time."""

    definition_id: DefinitionId
    schedule: Schedule
    now: datetime
    paused_at: datetime | None = None
    paused_until: datetime | None = None

    @property
    def is_paused(self) -> bool:
        return self.paused_at is not None and (self.paused_until is None or self.paused_until > self.now)


class Advanced(NamedTuple):
    """Where a schedule stands after a tick, and the ticks that were not published: see `DueTicks`."""

    definition_id: DefinitionId
    last_at: datetime | None
    next_at: datetime
    missed: int = 0
    missed_from: datetime | None = None
    missed_to: datetime | None = None
    in_pause: int = 0


class OperatedSchedule(Schedule, frozen=True, kw_only=True):
    """A schedule as operators see it. Ticks without an event: `missed_total` because no worker ran, the last of them
    from `missed_from` to `missed_to`; `paused_total` in a pause. `skipped_total` ticks launched nothing because of
    `overlap`. `workers` is how many living workers have its code."""

    paused_at: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None
    missed_total: int
    missed_from: datetime | None
    missed_to: datetime | None
    paused_total: int
    skipped_total: int
    workers: int
    is_paused: bool
    overdue_seconds: float


class OverdueSchedule(NamedTuple):
    """A schedule whose tick is due for a while, and how many living workers have its code."""

    workflow: str
    next_at: datetime
    workers: int


async def upsert(connection: Connection, definition_id: DefinitionId, spec: ScheduleSpec, next_at: datetime) -> bool:
    """Make the workflow's schedule as code says; False when it was so already, and keeps its next tick."""
    columns = (definition_id, spec.every_ms, spec.cron, spec.timezone, next_at, spec.overlap)
    return await connection.fetchval(_sql["upsert"], *columns) is not None


async def delete(connection: Connection, definition_id: DefinitionId) -> bool:
    """Take the workflow's schedule away; False when it has none."""
    return await connection.fetchval(_sql["delete"], definition_id) is not None


async def lock_due(connection: Connection, definitions: Iterable[DefinitionId], limit: int) -> list[DueSchedule]:
    """The due schedules of these workflows, locked, except those that another transaction has locked."""
    return [_due(row) for row in await connection.fetch(_sql["lock_due"], list(definitions), limit)]


def _due(row: Row) -> DueSchedule:
    fields = dict(row)
    definition_id, now = fields.pop("workflow_definition_id"), fields.pop("now")
    paused_at, paused_until = fields.pop("paused_at"), fields.pop("paused_until")
    return DueSchedule(definition_id, Schedule(**fields), now, paused_at, paused_until)


async def advance(connection: Connection, moved: Sequence[Advanced]) -> None:
    """Move locked schedules on to their next ticks."""
    await connection.execute(_sql["advance"], *map(list, zip(*moved, strict=True)))


async def next_due_seconds(connection: Connection, definitions: Iterable[DefinitionId]) -> float | None:
    """Seconds until the next tick of these workflows (not above 0: now); None when they have no schedule."""
    seconds: float | None = await connection.fetchval(_sql["next_due_seconds"], list(definitions))
    return seconds


async def list_page(connection: Connection, *, after: str | None = None, limit: int) -> list[Schedule]:
    """Schedules, by workflow."""
    return [msgspec.convert(dict(row), Schedule) for row in await connection.fetch(_sql["list"], after, limit)]


async def list_operated(
    connection: Connection, *, after: str | None = None, workflow: str | None = None, limit: int, alive_ms: int
) -> list[OperatedSchedule]:
    """Schedules with what an operator set and what was missed, by workflow; or that of one workflow. A worker is alive
    that was seen within `alive_ms`."""
    rows = await connection.fetch(_sql["list_operated"], after, workflow, alive_ms, limit, TRIGGER)
    return [_operated(row) for row in rows]


def _operated(row: Row) -> OperatedSchedule:
    fields = dict(row)
    now = fields.pop("now")
    is_paused = row["paused_at"] is not None and (row["paused_until"] is None or row["paused_until"] > now)
    late = 0.0 if is_paused else max(0.0, (now - row["next_at"]).total_seconds())
    return OperatedSchedule(**fields, is_paused=is_paused, overdue_seconds=late)


async def lock(connection: Connection, workflow: str) -> DueSchedule | None:
    """Lock the schedule of a workflow; None when it has none."""
    row = await connection.fetchrow(_sql["lock"], workflow)
    return _due(row) if row else None


async def pause(
    connection: Connection,
    definition_id: DefinitionId,
    *,
    until: datetime | None,
    duration_ms: int | None,
    reason: str | None,
    actor: str,
) -> datetime | None:
    """Pause a locked schedule; the end of the pause, if it has one."""
    end: datetime | None = await connection.fetchval(_sql["pause"], definition_id, until, duration_ms, reason, actor)
    return end


async def resume(connection: Connection, definition_id: DefinitionId, next_at: datetime, in_pause: int) -> None:
    """End the pause of a locked schedule, whose next tick is `next_at`; `in_pause` ticks were due in the pause."""
    await connection.execute(_sql["resume"], definition_id, next_at, in_pause)


async def known_ticks(connection: Connection, external_ids: Sequence[str]) -> set[str]:
    """Those of the ids of ticks that have an event."""
    return {row[0] for row in await connection.fetch(_sql["known_ticks"], external_ids, SOURCE)}


async def list_overdue(connection: Connection, overdue_ms: int, *, limit: int, alive_ms: int) -> list[OverdueSchedule]:
    """Schedules that are not paused and whose tick has been due for so long, the longest overdue first."""
    rows = await connection.fetch(_sql["list_overdue"], overdue_ms, limit, alive_ms)
    return [OverdueSchedule(*row) for row in rows]
