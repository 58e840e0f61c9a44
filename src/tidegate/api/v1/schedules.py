"""Schedules."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from tidegate.api import pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Route, Services
from tidegate.model.schedule import Schedule
from tidegate.store import schedules

LIST_QUERY = page_query()


class SchedulePage(msgspec.Struct, frozen=True):
    """Schedules, by workflow; `next_cursor` is null on the last page."""

    schedules: list[Schedule]
    next_cursor: str | None


async def list_schedules(request: Request, services: Services) -> SchedulePage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        found = await schedules.list_page(connection, after=page.cursor, limit=page.fetch_limit)
    return SchedulePage(*page.cut(found, lambda schedule: schedule.workflow))


ROUTES = (
    Route("GET", "/v1/schedules", list_schedules, "List schedules with their last and next ticks", (SchedulePage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
)  # fmt: skip
