"""Operator requests for schedules: list, pause, resume, run now, backfill."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import islice
from typing import Annotated

import msgspec
from starlette.requests import Request

from tidegate.api import bodies, pages
from tidegate.api.admin.sources import PauseBody
from tidegate.api.pages import page_query
from tidegate.api.routes import Route, Services
from tidegate.errors import NotFound
from tidegate.flow import control
from tidegate.flow.control.schedules import DEFAULT_RATE, Backfilled
from tidegate.model.ids import EventId
from tidegate.model.schedule import next_after, ticks
from tidegate.store import schedules
from tidegate.store.schedules import OperatedSchedule

LIST_QUERY = page_query()
SHOWN_TICKS = 5
_FAR = datetime.fromisoformat("8999-01-01T00:00:00+00:00")


class OperatedSchedulePage(msgspec.Struct, frozen=True):
    """Schedules with their state, by workflow; `next_cursor` is null on the last page."""

    schedules: list[OperatedSchedule]
    next_cursor: str | None


class ScheduleDetail(msgspec.Struct, frozen=True):
    """One schedule, and the ticks that come next: those after its pause, none if it is paused until it is resumed."""

    schedule: OperatedSchedule
    upcoming: list[datetime]


class BackfillBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ticks from `from` on and before `to`, one after the other at a rate; `dry_run` only counts them."""

    since: Annotated[datetime, msgspec.Meta(tz=True)] = msgspec.field(name="from")
    before: Annotated[datetime, msgspec.Meta(tz=True)] = msgspec.field(name="to")
    rate: str = DEFAULT_RATE
    dry_run: bool = False


class TickPublished(msgspec.Struct, frozen=True):
    """The event of a tick that an operator asked for."""

    workflow: str
    event_id: EventId


async def list_operated_schedules(request: Request, services: Services) -> OperatedSchedulePage:
    page = pages.read(request, LIST_QUERY)
    alive_ms = services.settings.health.worker_degraded_ms
    async with services.database.connection() as connection:
        found = await schedules.list_operated(connection, after=page.cursor, limit=page.fetch_limit, alive_ms=alive_ms)
    return OperatedSchedulePage(*page.cut(found, lambda schedule: schedule.workflow))


async def show_schedule(request: Request, services: Services) -> ScheduleDetail:
    workflow, alive_ms = request.path_params["workflow"], services.settings.health.worker_degraded_ms
    async with services.database.connection() as connection:
        found = await schedules.list_operated(connection, workflow=workflow, limit=1, alive_ms=alive_ms)
    if not found:
        raise NotFound(f"no schedule of a workflow {workflow!r}")
    try:
        upcoming = list(islice(_unpaused(found[0]), SHOWN_TICKS))
    except ValueError:  # a time zone that this machine lacks
        upcoming = []
    return ScheduleDetail(found[0], upcoming)


def _unpaused(schedule: OperatedSchedule) -> Iterator[datetime]:
    """The ticks that will be published. ValueError for a time zone that this machine lacks."""
    first = schedule.next_at
    if schedule.is_paused and schedule.paused_until is None:
        return iter(())
    if schedule.is_paused and schedule.paused_until is not None and schedule.paused_until > first:
        first = next_after(schedule, schedule.paused_until - timedelta(microseconds=1))
    return ticks(schedule, first, _FAR)


async def pause_schedule(request: Request, services: Services) -> ScheduleDetail:
    given = await bodies.read(request, PauseBody)
    bodies.check_reason(given.reason)
    await control.pause_schedule(
        services.database,
        request.path_params["workflow"],
        until=given.until,
        duration_ms=given.duration_ms,
        reason=given.reason,
        actor=bodies.actor(request),
    )
    return await show_schedule(request, services)


async def resume_schedule(request: Request, services: Services) -> ScheduleDetail:
    await bodies.read(request, bodies.Nothing)
    await control.resume_schedule(services.database, request.path_params["workflow"], bodies.actor(request))
    return await show_schedule(request, services)


async def run_schedule_now(request: Request, services: Services) -> TickPublished:
    body = await bodies.read(request, bodies.CallBody)
    workflow = request.path_params["workflow"]
    event_id = await control.run_schedule_now(services.database, workflow, bodies.actor(request), body.id)
    services.queue.hint("inbox")
    return TickPublished(workflow, event_id)


async def backfill_schedule(request: Request, services: Services) -> Backfilled:
    given = await bodies.read(request, BackfillBody)
    done = await control.backfill_schedule(
        services.database,
        request.path_params["workflow"],
        since=given.since,
        before=given.before,
        rate=given.rate,
        dry_run=given.dry_run,
        actor=bodies.actor(request),
    )
    services.queue.hint("inbox")
    services.queue.hint("retries")
    return done


_REFUSALS = (400, 404, 408, 413, 415, 422)

ROUTES = (
    Route("GET", "/admin/schedules", list_operated_schedules, "List schedules with pauses and missed ticks",
          (OperatedSchedulePage,), scope="read", query=LIST_QUERY, errors=(422,)),
    Route("GET", "/admin/schedules/{workflow}", show_schedule, "Show one schedule and its next ticks",
          (ScheduleDetail,), scope="read", errors=(404,)),
    Route("POST", "/admin/schedules/{workflow}/pause", pause_schedule,
          "Pause a schedule: its ticks are counted and not published", (ScheduleDetail,), scope="operate",
          body=bodies.schema(PauseBody), errors=_REFUSALS),
    Route("POST", "/admin/schedules/{workflow}/resume", resume_schedule, "Resume a schedule, from its next tick on",
          (ScheduleDetail,), scope="operate", errors=_REFUSALS),
    Route("POST", "/admin/schedules/{workflow}/run-now", run_schedule_now,
          "Publish an event of a schedule now; its next tick stays", (TickPublished,), scope="operate", status=202,
          body=bodies.schema(bodies.CallBody), errors=_REFUSALS),
    Route("POST", "/admin/schedules/{workflow}/backfill", backfill_schedule,
          "Publish the past ticks of a range that have no event, at a rate; or only count them", (Backfilled,),
          scope="operate", body=bodies.schema(BackfillBody), errors=_REFUSALS),
)  # fmt: skip
