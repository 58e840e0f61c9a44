"""The most recent decisions, about all events."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from tidegate.api import pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Route, Services
from tidegate.store import decisions
from tidegate.store.decisions import RecentDecision

LIST_QUERY = page_query()


class DecisionPage(msgspec.Struct, frozen=True):
    """Decisions, newest first; `next_cursor` is null on the last page. An event that passes the gate and its triggers
    at once has none: only its deliveries and runs are recorded."""

    decisions: list[RecentDecision]
    next_cursor: str | None


async def list_decisions(request: Request, services: Services) -> DecisionPage:
    page = pages.read(request, LIST_QUERY)
    before_id = page.number_cursor()
    async with services.database.connection() as connection:
        found = await decisions.list_recent(connection, before_id=before_id, limit=page.fetch_limit)
    return DecisionPage(*page.cut(found, lambda decision: decision.id))


ROUTES = (
    Route("GET", "/admin/decisions", list_decisions, "List recent decisions, newest first", (DecisionPage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
)  # fmt: skip
