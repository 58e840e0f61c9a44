"""The audit log: who changed what, and when."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from tidegate.api import pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Query, Route, Services
from tidegate.store import audit
from tidegate.store.audit import AuditEntry

LIST_QUERY = (
    Query("actor", "string", "Only changes by this actor: a token's name."),
    Query("action", "string", "Only this action, e.g. `source.pause`."),
    Query("subject", "string", "Only changes of this subject: a source, a workflow, or the id of any other resource."),
    *page_query("uuid"),
)


class AuditPage(msgspec.Struct, frozen=True):
    """Changes, newest first; `next_cursor` is null on the last page."""

    entries: list[AuditEntry]
    next_cursor: str | None


async def list_audit(request: Request, services: Services) -> AuditPage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        found = await audit.list_page(
            connection,
            actor=page.get("actor"),
            action=page.get("action"),
            subject=page.get("subject"),
            before_id=page.cursor,
            limit=page.fetch_limit,
        )
    return AuditPage(*page.cut(found, lambda entry: entry.id))


ROUTES = (
    Route("GET", "/admin/audit", list_audit, "List the audit log: who changed what, newest first", (AuditPage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
)  # fmt: skip
