"""Schedules."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from tidegate.api.routes import Route, Services
from tidegate.model.schedule import Schedule
from tidegate.store import schedules


class ScheduleList(msgspec.Struct, frozen=True):
    """Every schedule, by workflow."""

    schedules: list[Schedule]


async def list_schedules(_: Request, services: Services) -> ScheduleList:
    async with services.database.connection() as connection:
        return ScheduleList(await schedules.list_all(connection))


ROUTES = (
    Route(
        "GET", "/v1/schedules", list_schedules, "List schedules with their next ticks", (ScheduleList,), scope="read"
    ),
)
