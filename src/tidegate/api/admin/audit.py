"""The audit log: who changed what, and when."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from tidegate.api.routes import Query, Route, Services, parameters
from tidegate.store import audit
from tidegate.store.audit import AuditEntry

LIST_QUERY = (
    Query("actor", "string", "only by this actor: a token's name"),
    Query("action", "string", "only of this kind, as in source.pause"),
    Query("subject", "string", "only about this: a source, a workflow, or the id of anything else"),
    Query("limit", "integer", "at most so many; 50 unless told"),
    Query("cursor", "uuid", "`next_cursor` of the page before"),
)


class AuditPage(msgspec.Struct, frozen=True):
    """Changes, newest first; `next_cursor` is null on the last page."""

    entries: list[AuditEntry]
    next_cursor: str | None


async def list_audit(request: Request, services: Services) -> AuditPage:
    given = parameters(request, LIST_QUERY)
    limit = given.get("limit", 50)
    async with services.database.connection() as connection:
        found = await audit.list_page(
            connection,
            actor=given.get("actor"),
            action=given.get("action"),
            subject=given.get("subject"),
            before_id=given.get("cursor"),
            limit=limit + 1,
        )
    more = len(found) > limit
    return AuditPage(found[:limit], str(found[limit - 1].id) if more else None)


ROUTES = (
    Route("GET", "/admin/audit", list_audit, "Who changed what, newest first", (AuditPage,), scope="read",
          query=LIST_QUERY, errors=(422,)),
)  # fmt: skip
