"""Workflow definitions; those of kind `http` are created and updated here. (Their triggers are in `triggers`.)"""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Route, Services, json_response
from tidegate.errors import NotFound
from tidegate.flow import control
from tidegate.flow.control import WorkflowChanged
from tidegate.model.addresses import parse_allowed
from tidegate.model.http_workflow import HttpWorkflowBody, HttpWorkflowPatch, SecretRotation
from tidegate.model.trigger import WorkflowDefinition
from tidegate.store import triggers

MAX_BYTES = 256 * 1024
LIST_QUERY = page_query()


class WorkflowPage(msgspec.Struct, frozen=True):
    """Workflows, by slug; `next_cursor` is null on the last page."""

    workflows: list[WorkflowDefinition]
    next_cursor: str | None


class WorkflowWritten(WorkflowDefinition, frozen=True, kw_only=True):
    """The current workflow. `secret` is set only in the answer to the request that generated it; `changed` says whether
    the request changed anything."""

    secret: str | None
    changed: bool


async def list_workflows(request: Request, services: Services) -> WorkflowPage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        found = await triggers.list_definitions(connection, after=page.cursor, limit=page.fetch_limit)
    rows, next_cursor = page.cut(found, lambda workflow: workflow.slug)
    return WorkflowPage([control.shown_workflow(workflow) for workflow in rows], next_cursor)


async def show_workflow(request: Request, services: Services) -> WorkflowDefinition:
    slug = request.path_params["slug"]
    async with services.database.connection() as connection:
        found = await triggers.get_definition(connection, slug)
    if found is None:
        raise NotFound(f"no workflow {slug!r}; tidegate workflows list shows the existing ones")
    return control.shown_workflow(found)


async def create_workflow(request: Request, services: Services) -> Response:
    given = await bodies.read_json(request, MAX_BYTES)
    done = await control.create_workflow(
        services.database, given, allowed=parse_allowed(services.settings.http_allow), actor=bodies.actor(request)
    )
    return json_response(_written(done), 201 if done.is_written else 200)


async def update_workflow(request: Request, services: Services) -> WorkflowWritten:
    given = await bodies.read_json(request, MAX_BYTES)
    slug, actor = request.path_params["slug"], bodies.actor(request)
    return _written(
        await control.update_workflow(
            services.database, slug, given, allowed=parse_allowed(services.settings.http_allow), actor=actor
        )
    )


async def rotate_secret(request: Request, services: Services) -> WorkflowWritten:
    given = await bodies.read_json(request, MAX_BYTES)
    slug, actor = request.path_params["slug"], bodies.actor(request)
    return _written(await control.rotate_secret(services.database, slug, given, actor=actor))


async def delete_workflow(request: Request, services: Services) -> WorkflowDefinition:
    await bodies.read(request, bodies.Nothing)
    slug, actor = request.path_params["slug"], bodies.actor(request)
    return control.shown_workflow(await control.delete_workflow(services.database, slug, actor=actor))


def _written(done: WorkflowChanged) -> WorkflowWritten:
    shown = msgspec.structs.asdict(control.shown_workflow(done.definition))
    return WorkflowWritten(**shown, secret=done.secret, changed=done.is_written)


_ALL, _ONE = "/v1/workflows", "/v1/workflows/{slug}"
_REFUSALS = (400, 408, 409, 413, 415, 422)

ROUTES = (
    Route("GET", _ALL, list_workflows, "List workflows by slug", (WorkflowPage,), scope="read", query=LIST_QUERY,
          errors=(422,)),
    Route("POST", _ALL, create_workflow, "Create a workflow that posts its runs to a URL", (WorkflowWritten,),
          scope="admin", status=201, also=(200,), body=bodies.schema(HttpWorkflowBody), errors=_REFUSALS),
    Route("GET", _ONE, show_workflow, "Show one workflow", (WorkflowDefinition,), scope="read", errors=(404,)),
    Route("PATCH", _ONE, update_workflow, "Update the given fields; a `secret` of null generates a new one",
          (WorkflowWritten,), scope="admin", body=bodies.schema(HttpWorkflowPatch), errors=(*_REFUSALS, 404)),
    Route("POST", f"{_ONE}/rotate", rotate_secret,
          "Rotate the signing secret; requests are signed with the old one too for a while", (WorkflowWritten,),
          scope="admin", body=bodies.schema(SecretRotation), errors=(*_REFUSALS, 404)),
    Route("DELETE", _ONE, delete_workflow, "Delete a workflow that has no triggers and no unfinished runs",
          (WorkflowDefinition,), scope="admin", errors=(*_REFUSALS, 404)),
)  # fmt: skip
