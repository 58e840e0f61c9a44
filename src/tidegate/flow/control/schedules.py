"""Pause, resume, run now and backfill schedules. What is set here stays when the code registers its schedules again.

A backfill publishes one event for each tick of a range. Its id is that of the tick, so a tick that has an event gets no
second one, however often a backfill is repeated; each gets a time, so that any worker goes on with a slow one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import islice
from typing import Literal

import msgspec

from tidegate import failpoints
from tidegate.clock import uuid7
from tidegate.errors import FieldError, InvalidInput, NotFound
from tidegate.flow.accept import backlog
from tidegate.model.event import MAX_DELAY_MS
from tidegate.model.ids import EventId
from tidegate.model.pauses import check_length, check_until
from tidegate.model.schedule import SOURCE, count_ticks, manual_event, next_after, tick_event, tick_text, ticks
from tidegate.model.units import rate as parse_rate
from tidegate.store import audit, durability, events
from tidegate.store import schedules as store
from tidegate.store.db import Connection, Database
from tidegate.store.schedules import DueSchedule
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

MAX_TICKS = 10_000
BATCH = 500
DEFAULT_RATE = "1/s"

_log = logger("control")


class Backfilled(msgspec.Struct, frozen=True, kw_only=True):
    """What a backfill did, or (`preview`) would do: of the `ticks` in the range, `known` have an event already, and
    `new` get one. The first of these is decided at once, the others one after the other until `ends_at`."""

    workflow: str
    status: Literal["preview", "published"]
    ticks: int
    known: int
    new: int
    first_at: datetime | None
    last_at: datetime | None
    ends_at: datetime | None


async def pause_schedule(
    database: Database,
    workflow: str,
    *,
    until: datetime | None,
    duration_ms: int | None,
    reason: str | None,
    actor: str,
) -> None:
    """Publish no ticks of the workflow until a time, for a duration, or until resumed. When this returns, none is being
    published. Ticks in the pause are counted and not made up for. NotFound, InvalidInput."""
    check_length(until, duration_ms)

    async def change(connection: Connection) -> datetime | None:
        known = await _lock(connection, workflow)
        if until is not None:
            check_until(until, known.now)
        end = await store.pause(
            connection, known.definition_id, until=until, duration_ms=duration_ms, reason=reason, actor=actor
        )
        await audit.insert(
            connection, actor=actor, action="schedule.pause", subject=workflow, before=_audited(known),
            after={"paused_until": end, "reason": reason},
        )  # fmt: skip
        return end

    end = await database.run(change)
    _log.info("schedule.paused", workflow=workflow, until=end, reason=reason, actor=actor)


async def resume_schedule(database: Database, workflow: str, actor: str) -> None:
    """End the pause of a schedule; the next tick is the first from now on. Nothing changes when it is not paused."""

    async def change(connection: Connection) -> None:
        known = await _lock(connection, workflow)
        in_pause, next_at = 0, known.schedule.next_at
        if known.is_paused and next_at <= known.now:
            in_pause, next_at = count_ticks(known.schedule, next_at, known.now), next_after(known.schedule, known.now)
        await store.resume(connection, known.definition_id, next_at, in_pause)
        await audit.insert(
            connection, actor=actor, action="schedule.resume", subject=workflow, before=_audited(known),
            after={"next_at": next_at},
        )  # fmt: skip

    await database.run(change)
    _log.info("schedule.resumed", workflow=workflow, actor=actor)


async def run_schedule_now(database: Database, workflow: str, actor: str, call_id: str | None = None) -> EventId:
    """Publish an event of the schedule now, also while it is paused; its next tick stays. The event's metadata has
    `manual`. Returns the event's id; once for a `call_id`."""

    async def change(connection: Connection) -> tuple[EventId, bool]:
        known = await _lock(connection, workflow)
        event = manual_event(workflow, known.now, uuid7(), actor, call_id)
        new, _ = await backlog.insert(connection, [SOURCE], [event])
        if not new:  # committed before, and the answer was lost
            await durability.confirm(connection)
            return (await events.resolve(connection, [event]))[event.id].id, False
        await audit.insert(
            connection, actor=actor, action="schedule.run_now", subject=workflow, before=None,
            after={"event_id": event.id},
        )  # fmt: skip
        return event.id, True

    event_id, is_new = await database.run(change)
    if is_new:
        metrics.received({SOURCE: 1})
        _log.info("schedule.run_now", workflow=workflow, event_id=event_id, actor=actor)
    return event_id


async def backfill_schedule(
    database: Database,
    workflow: str,
    *,
    since: datetime,
    before: datetime,
    rate: str = DEFAULT_RATE,
    dry_run: bool = False,
    actor: str,
) -> Backfilled:
    """Publish the ticks from `since` on and before `before` that have no event, one after the other at a rate; or only
    say which. InvalidInput names the field; NotFound when the workflow has no schedule."""
    step = _step(rate)
    known = await database.run(partial(_lock, workflow=workflow))
    _check_range(since, before, known.now)
    try:
        found = await asyncio.to_thread(lambda: list(islice(ticks(known.schedule, since, before), MAX_TICKS + 1)))
    except ValueError as exc:
        raise _invalid("from", str(exc)) from exc
    if len(found) > MAX_TICKS:
        raise _invalid("to", f"there are more than {MAX_TICKS} ticks in this range; make it shorter")
    async with database.connection() as connection:
        have = await store.known_ticks(connection, [_tick_id(workflow, at) for at in found])
    missing = [at for at in found if _tick_id(workflow, at) not in have]
    if len(missing) * step > timedelta(milliseconds=MAX_DELAY_MS):
        raise _invalid("rate", f"at this rate {len(missing)} ticks would take longer than 366 days")
    new = 0 if not dry_run else len(missing)
    for place in range(0, 0 if dry_run else len(missing), BATCH):
        batch = [(at, known.now + (place + n) * step) for n, at in enumerate(missing[place : place + BATCH])]
        new += await database.run(partial(_publish, workflow=workflow, batch=batch, actor=actor))
        failpoints.hit("backfill.after_commit")
    if new and not dry_run:
        metrics.received({SOURCE: new})
        _log.info("schedule.backfilled", workflow=workflow, count=new, actor=actor)
    return Backfilled(
        workflow=workflow,
        status="preview" if dry_run else "published",
        ticks=len(found),
        known=len(found) - new,
        new=new,
        first_at=missing[0] if missing else None,
        last_at=missing[-1] if missing else None,
        ends_at=known.now + (len(missing) - 1) * step if missing else None,
    )


async def _publish(
    connection: Connection, workflow: str, batch: Sequence[tuple[datetime, datetime]], actor: str
) -> int:
    made = [
        msgspec.structs.replace(
            tick_event(workflow, at, uuid7()),
            metadata=msgspec.json.encode({"backfill": True, "by": actor}).decode(),
            deliver_at=deliver_at,
        )
        for at, deliver_at in batch
    ]
    new = await events.insert(connection, made)
    if new:
        await audit.insert(
            connection, actor=actor, action="schedule.backfill", subject=workflow, before=None,
            after={"count": len(new), "from": batch[0][0], "to": batch[-1][0]},
        )  # fmt: skip
    return len(new)


async def _lock(connection: Connection, workflow: str) -> DueSchedule:
    known = await store.lock(connection, workflow)
    if known is None:
        raise NotFound(f"no schedule of a workflow {workflow!r}")
    return known


def _audited(known: DueSchedule) -> dict[str, object]:
    return {
        "paused_at": known.paused_at, "paused_until": known.paused_until, "next_at": known.schedule.next_at,
    }  # fmt: skip


def _tick_id(workflow: str, at: datetime) -> str:
    return f"{workflow}:{tick_text(at)}"


def _step(rate: str) -> timedelta:
    try:
        count, window_ms = parse_rate(rate)
    except ValueError as exc:
        raise _invalid("rate", str(exc)) from exc
    return timedelta(milliseconds=window_ms) / count


def _check_range(since: datetime, before: datetime, now: datetime) -> None:
    if before > now:
        raise _invalid("to", f"is in the future: it is {tick_text(now)} now; later ticks are published by the schedule")
    if since >= before:
        raise _invalid("from", "must be before `to`")


def _invalid(field: str, message: str) -> InvalidInput:
    return InvalidInput("the backfill is not valid", [FieldError(field, message)])
