"""Runs and their steps."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Query, Route, Services, json_response, path_run_id
from tidegate.errors import NotFound
from tidegate.flow import control
from tidegate.model.ids import RunId
from tidegate.model.run import RUN_STATUSES, Run, Step
from tidegate.store import runs, steps

LIST_QUERY = (
    Query("workflow", "string", "Only runs of this workflow."),
    Query("status", "string", "Only runs in this status.", RUN_STATUSES),
    Query("event_id", "uuid", "Only runs that this event launched."),
    *page_query("uuid"),
)


class RunPage(msgspec.Struct, frozen=True):
    """Runs, newest first; `next_cursor` is null on the last page."""

    runs: list[Run]
    next_cursor: str | None


class RunDetail(msgspec.Struct, frozen=True):
    """A run with its steps."""

    run: Run
    steps: list[Step]


async def list_runs(request: Request, services: Services) -> RunPage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        found = await runs.list_page(
            connection,
            workflow=page.get("workflow"),
            status=page.get("status"),
            event_id=page.get("event_id"),
            before_id=page.cursor,
            limit=page.fetch_limit,
        )
    return RunPage(*page.cut(found, lambda run: run.id))


async def show_run(request: Request, services: Services) -> RunDetail:
    run_id = path_run_id(request)
    async with services.database.connection() as connection:
        run = await runs.get(connection, run_id)
        if run is None:
            raise NotFound(f"no run {run_id}")
        return RunDetail(run, await steps.list_of_run(connection, run_id))


class RunCancelled(msgspec.Struct, frozen=True):
    """`cancelled`: the run was waiting and has ended. `cancelling`: it is running, and stops at its next step."""

    id: RunId
    status: Literal["cancelled", "cancelling"]


async def cancel_run(request: Request, services: Services) -> Response:
    run_id = path_run_id(request)
    await bodies.read(request, bodies.Nothing)
    done = await control.cancel_run(services.database, run_id, bodies.actor(request), services.settings.trigger_error)
    services.queue.hint("deliveries")  # a slot may have become free
    return json_response(RunCancelled(run_id, done), 200 if done == "cancelled" else 202)


ROUTES = (
    Route(
        "GET",
        "/v1/runs",
        list_runs,
        "List runs, newest first",
        (RunPage,),
        scope="read",
        query=LIST_QUERY,
        errors=(422,),
    ),
    Route(
        "GET", "/v1/runs/{run_id}", show_run, "Show one run with its steps", (RunDetail,), scope="read", errors=(404,)
    ),
    Route(
        "POST",
        "/v1/runs/{run_id}/cancel",
        cancel_run,
        "Cancel a run: a waiting one at once, a running one (202) at its next step",
        (RunCancelled,),
        scope="operate",
        also=(202,),
        errors=(404, 409),
    ),
)
