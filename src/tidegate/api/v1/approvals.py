"""`/approvals/{token}`: the link of an approval. Whoever has it decides, once; no other token is needed.

GET decides nothing, since mail programs follow links. An invented token is refused without a read of the database
(`flow/accept/approvals.py`), and in the same way whatever is wrong with it. The token appears in no log, metric or
trace.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import admission, approval_page, bodies, problems
from tidegate.api.problems import Problem
from tidegate.api.routes import Route, Services, json_response
from tidegate.api.v1 import publish
from tidegate.errors import FieldError, InvalidInput, NotFound, TidegateError
from tidegate.flow.decide import approvals
from tidegate.model.approval import MAX_COMMENT, Approval, ApprovalState, ApprovalVerdict, text_errors
from tidegate.model.conversion import convert
from tidegate.model.ids import StepId

FORM = "application/x-www-form-urlencoded"
MAX_BYTES = 16 * 1024
_GONE = "the approval of this link no longer exists"


class LinkDecision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the bearer of a link decides."""

    approved: bool
    comment: str | None = None


class LinkedApproval(msgspec.Struct, frozen=True):
    """An approval, as the bearer of its link sees it. `state` `open`: it can be decided until `until`; `expired`: its
    time is over; `ended`: it is no longer needed."""

    name: str
    note: str | None
    state: ApprovalState
    until: datetime | None
    approved: bool | None
    decided_at: datetime | None


class _Form(msgspec.Struct, frozen=True):
    """The form of the page."""

    decision: Literal["approve", "reject"]
    comment: str = ""


async def show_approval(request: Request, services: Services) -> Response:
    is_page = "text/html" in request.headers.get("accept", "")
    try:
        approval_id = await _checked(request, services)
        async with services.links.turn(), services.database.connection() as connection:
            found = await approvals.find(connection, approval_id)
    except TidegateError as exc:
        return _refused(exc, is_page=is_page)
    return approval_page.page(found) if is_page else json_response(_shown(found))


async def decide_approval(request: Request, services: Services) -> Response:
    is_page = _media(request) == FORM
    headers, peer = request.headers.raw, request.client.host if request.client else None
    bodies.set_principal(request, None, services.access.address(headers, peer))
    try:
        approval_id = await _checked(request, services)
        verdict = await _verdict(request, services)
        errors = text_errors("comment", verdict.comment, MAX_COMMENT)
        if errors and not is_page:
            raise InvalidInput("the decision is not valid", errors)
        async with services.links.turn():
            if errors:
                return await _asked_again(services, approval_id, verdict.comment or "", errors[0])
            done = await approvals.decide(services.database, approval_id, verdict)
    except TidegateError as exc:
        return _refused(exc, is_page=is_page)
    if done.is_new:
        services.queue.hint("runs")
        services.queue.hint("inbox")
    status = 200 if done.is_new else _closed_status(done.approval)
    if is_page:
        said = approval_page.thanks if done.is_new else approval_page.not_counted
        return approval_page.page(done.approval, status, said=said(done.approval))
    if not done.is_new:
        return problems.response(Problem(status, approval_page.not_counted(done.approval)))
    return json_response(_shown(done.approval))


async def _asked_again(services: Services, approval_id: StepId, comment: str, error: FieldError) -> Response:
    """The page once more: what was written into the form is not lost."""
    async with services.database.connection() as connection:
        found = await approvals.find(connection, approval_id)
    if found.state != "open":
        return approval_page.page(found, _closed_status(found), said=approval_page.not_counted(found))
    return approval_page.page(found, 422, comment=comment, wrong=f"The {error.field} {error.message}.")


def _closed_status(approval: Approval) -> int:
    return 409 if approval.state == "decided" else 410


async def _checked(request: Request, services: Services) -> StepId:
    """The approval of the link. NotFound when the token is none."""
    if services.admission.is_full_for_unauthenticated:
        raise admission.overloaded()
    found = await services.links.check(request.path_params["token"])
    if found is None:
        raise Problem(404, "this link is not valid; check that it was copied completely")
    return found


async def _verdict(request: Request, services: Services) -> ApprovalVerdict:
    """What the request says. The comment is not checked yet."""
    with services.admission.request(is_authenticated=False) as admitted:
        raw = await publish.read_body(request.receive, dict(request.headers), MAX_BYTES, admitted)
        await admitted.parse_turn()
        if _media(request) == FORM:
            form = convert(dict(_fields(raw)), _Form, "the form is not valid")
            comment = form.comment.replace("\r\n", "\n").strip()  # as the text area counts a line break
            given = LinkDecision(form.decision == "approve", comment or None)
        else:
            bodies.keep(request, raw)
            given = await bodies.read(request, LinkDecision)
    return ApprovalVerdict(approved=given.approved, comment=given.comment)


def _fields(raw: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(raw.decode("ascii"), keep_blank_values=True, max_num_fields=10, errors="strict")
    except ValueError as exc:
        raise Problem(400, "the body is not a form", [FieldError("body", "is not a form")]) from exc


def _media(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _refused(exc: TidegateError, *, is_page: bool) -> Response:
    answer = problems.response(Problem(410, _GONE) if isinstance(exc, NotFound) else exc)
    if not is_page:
        return answer
    text = _GONE if isinstance(exc, NotFound) else str(exc)
    return approval_page.error_page(f"{text[:1].upper()}{text[1:]}.", answer.status_code)


def _shown(found: Approval) -> LinkedApproval:
    decision = found.decision
    return LinkedApproval(
        found.name, found.note, found.state, found.until, decision.approved if decision else None,
        decision.at if decision else None,
    )  # fmt: skip


ROUTES = (
    Route("GET", "/approvals/{token}", show_approval,
          "Show the approval of a link, as a page or as JSON; decides nothing", (LinkedApproval,), scope="public",
          errors=(404, 410)),
    Route("POST", "/approvals/{token}", decide_approval,
          "Approve or reject, once; whoever has the link needs no token. 409: decided before; 410: no longer possible",
          (LinkedApproval,), scope="public", body=bodies.schema(LinkDecision),
          errors=(400, 404, 408, 409, 410, 413, 415, 422)),
)  # fmt: skip
