"""Approvals that runs wait for: list them, approve, reject."""

from __future__ import annotations

import uuid

import msgspec
from starlette.requests import Request

from tidegate.api import approval_page, bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Route, Services, path_approval_id
from tidegate.errors import Conflict, InvalidInput
from tidegate.flow.decide import approvals
from tidegate.model.approval import MAX_COMMENT, ApprovalDecision, ApprovalVerdict, OpenApproval, text_errors
from tidegate.model.ids import RunId, StepId
from tidegate.store import approvals as store

LIST_QUERY = page_query("uuid")


class ApprovalPage(msgspec.Struct, frozen=True):
    """Approvals that can be decided, oldest run first. `next_cursor` is null on the last page."""

    approvals: list[OpenApproval]
    next_cursor: str | None


class DecisionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator says about a decision."""

    comment: str | None = None


class ApprovalDecided(msgspec.Struct, frozen=True):
    """The approval that was decided, and how."""

    id: StepId
    run_id: RunId
    name: str
    decision: ApprovalDecision


async def list_approvals(request: Request, services: Services) -> ApprovalPage:
    page = pages.read(request, LIST_QUERY)
    after: uuid.UUID | None = page.cursor
    async with services.database.connection() as connection:
        found = await store.list_page(connection, after=StepId(after) if after else None, limit=page.fetch_limit)
    rows, next_cursor = page.cut(found, lambda one: one.id)
    return ApprovalPage(rows, next_cursor)


async def approve(request: Request, services: Services) -> ApprovalDecided:
    return await _decide(request, services, approved=True)


async def reject(request: Request, services: Services) -> ApprovalDecided:
    return await _decide(request, services, approved=False)


async def _decide(request: Request, services: Services, *, approved: bool) -> ApprovalDecided:
    body = await bodies.read(request, DecisionBody)
    if errors := text_errors("comment", body.comment, MAX_COMMENT):
        raise InvalidInput("the decision is not valid", errors)
    verdict = ApprovalVerdict(approved=approved, comment=body.comment, by=bodies.actor(request))
    done = await approvals.decide(services.database, path_approval_id(request), verdict)
    found = done.approval
    if not done.is_new or found.decision is None:
        by = f" (by {found.decision.by})" if found.decision else ""
        raise Conflict(f"approval {found.name!r} cannot be decided. {approval_page.told(found)[:-1]}{by}")
    services.queue.hint("runs")
    services.queue.hint("inbox")
    return ApprovalDecided(found.id, found.run_id, found.name, found.decision)


_BODY = bodies.schema(DecisionBody)

ROUTES = (
    Route("GET", "/admin/approvals", list_approvals, "List the approvals that runs wait for", (ApprovalPage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
    Route("POST", "/admin/approvals/{approval_id}/approve", approve, "Approve; the run that waits resumes",
          (ApprovalDecided,), scope="operate", body=_BODY, errors=(404, 409)),
    Route("POST", "/admin/approvals/{approval_id}/reject", reject, "Reject; the run that waits resumes",
          (ApprovalDecided,), scope="operate", body=_BODY, errors=(404, 409)),
)  # fmt: skip
