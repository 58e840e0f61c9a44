"""Schedules."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from tidegate.api.routes import DEFAULT_PAGE, Route, Services, cut, page_query, parameters
from tidegate.model.schedule import Schedule
from tidegate.store import schedules

LIST_QUERY = page_query()


class SchedulePage(msgspec.Struct, frozen=True):
    """Schedules, by workflow; `next_cursor` is null on the last page."""

    schedules: list[Schedule]
    next_cursor: str | None


async def list_schedules(request: Request, services: Services) -> SchedulePage:
    given = parameters(request, LIST_QUERY)
    limit = given.get("limit", DEFAULT_PAGE)
    async with services.database.connection() as connection:
        found = await schedules.list_page(connection, after=given.get("cursor"), limit=limit + 1)
    return SchedulePage(*cut(found, limit, lambda schedule: schedule.workflow))


ROUTES = (
    Route("GET", "/v1/schedules", list_schedules, "List schedules with their next ticks", (SchedulePage,), scope="read",
          query=LIST_QUERY, errors=(422,)),
)  # fmt: skip
