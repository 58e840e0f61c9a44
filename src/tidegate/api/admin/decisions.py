"""What was decided of late, about all events."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from tidegate.api.routes import Query, Route, Services, parameters
from tidegate.errors import FieldError, InvalidInput
from tidegate.store import decisions
from tidegate.store.decisions import RecentDecision

LIST_QUERY = (
    Query("limit", "integer", "at most so many; 50 unless told"),
    Query("cursor", "string", "`next_cursor` of the page before"),
)
_MAX_ID = 2**63 - 1


class DecisionPage(msgspec.Struct, frozen=True):
    """Decisions, newest first; `next_cursor` is null on the last page. An event that passes its gate and triggers at
    once leaves none: it has its deliveries and runs."""

    decisions: list[RecentDecision]
    next_cursor: str | None


async def list_decisions(request: Request, services: Services) -> DecisionPage:
    given = parameters(request, LIST_QUERY)
    limit = given.get("limit", 50)
    async with services.database.connection() as connection:
        found = await decisions.list_recent(connection, before_id=_place(given.get("cursor")), limit=limit + 1)
    more = len(found) > limit
    return DecisionPage(found[:limit], str(found[limit - 1].id) if more else None)


def _place(cursor: str | None) -> int | None:
    if cursor is None:
        return None
    if not (len(cursor) <= 20 and cursor.isascii() and cursor.isdigit() and int(cursor) <= _MAX_ID):
        raise InvalidInput("a query parameter is not valid", [FieldError("cursor", "is not one of ours")])
    return int(cursor)


ROUTES = (
    Route("GET", "/admin/decisions", list_decisions, "What was decided of late, newest first", (DecisionPage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
)  # fmt: skip
