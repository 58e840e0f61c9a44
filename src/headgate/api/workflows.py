"""Workflow definitions. (Their triggers are in `triggers`.)"""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from headgate.api.routes import Route, Services
from headgate.errors import NotFound
from headgate.model.trigger import WorkflowDefinition
from headgate.store import triggers


class WorkflowList(msgspec.Struct, frozen=True):
    """Every workflow, by slug."""

    workflows: list[WorkflowDefinition]


async def list_workflows(_: Request, services: Services) -> WorkflowList:
    async with services.database.connection() as connection:
        return WorkflowList(await triggers.list_definitions(connection))


async def show_workflow(request: Request, services: Services) -> WorkflowDefinition:
    slug = request.path_params["slug"]
    async with services.database.connection() as connection:
        found = await triggers.get_definition(connection, slug)
    if found is None:
        raise NotFound(f"no workflow {slug!r}")
    return found


ROUTES = (
    Route("GET", "/v1/workflows", list_workflows, "List workflows", (WorkflowList,)),
    Route("GET", "/v1/workflows/{slug}", show_workflow, "One workflow", (WorkflowDefinition,), errors=(404,)),
)
