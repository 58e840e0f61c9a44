"""Operator requests for triggers: pause and resume, and every trigger with its state."""

from __future__ import annotations

from starlette.requests import Request

from tidegate.api import bodies, pages
from tidegate.api.admin.sources import PauseBody
from tidegate.api.routes import Route, Services, path_trigger_id
from tidegate.api.v1.triggers import LIST_QUERY, TriggerAnswer, TriggerPage, answers, changed
from tidegate.flow import control
from tidegate.flow.control.triggers import find_trigger
from tidegate.store import triggers


async def list_all_triggers(request: Request, services: Services) -> TriggerPage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        found = await triggers.list_page(connection, after=page.cursor, limit=page.fetch_limit)
        rows, next_cursor = page.cut(found, lambda trigger: trigger.id)
        return TriggerPage(await answers(connection, rows), next_cursor)


async def show_any_trigger(request: Request, services: Services) -> TriggerAnswer:
    async with services.database.connection() as connection:
        found = await find_trigger(connection, path_trigger_id(request))
        return (await answers(connection, [found]))[0]


async def pause_trigger(request: Request, services: Services) -> TriggerAnswer:
    given = await bodies.read(request, PauseBody)
    bodies.check_reason(given.reason)
    await control.pause_trigger(
        services.database,
        path_trigger_id(request),
        until=given.until,
        duration_ms=given.duration_ms,
        reason=given.reason,
        actor=bodies.actor(request),
    )
    return await _done(request, services)


async def resume_trigger(request: Request, services: Services) -> TriggerAnswer:
    await bodies.read(request, bodies.Nothing)
    await control.resume_trigger(services.database, path_trigger_id(request), bodies.actor(request))
    return await _done(request, services)


async def _done(request: Request, services: Services) -> TriggerAnswer:
    async with services.database.connection() as connection:
        found = await find_trigger(connection, path_trigger_id(request))
    return await changed(services, found)


_REFUSALS = (400, 404, 408, 413, 415, 422)

ROUTES = (
    Route("GET", "/admin/triggers", list_all_triggers, "List all triggers, with pause, breaker and waiting deliveries",
          (TriggerPage,), scope="read", query=LIST_QUERY, errors=(422,)),
    Route("GET", "/admin/triggers/{trigger_id}", show_any_trigger, "Show one trigger of any workflow",
          (TriggerAnswer,), scope="read", errors=(404,)),
    Route("POST", "/admin/triggers/{trigger_id}/pause", pause_trigger, "Pause a trigger", (TriggerAnswer,),
          scope="operate", body=bodies.schema(PauseBody), errors=_REFUSALS),
    Route("POST", "/admin/triggers/{trigger_id}/resume", resume_trigger,
          "Resume a trigger: end its pause and close its breaker", (TriggerAnswer,), scope="operate", errors=_REFUSALS),
)  # fmt: skip
