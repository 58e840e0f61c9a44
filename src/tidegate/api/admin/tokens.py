"""API tokens: create, list, revoke. The secret is only in the answer that creates a token."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Route, Services, json_response
from tidegate.flow import control
from tidegate.flow.control import NewToken
from tidegate.model.token import Token, TokenBody
from tidegate.store import tokens

LIST_QUERY = page_query("uuid")


class TokenPage(msgspec.Struct, frozen=True):
    """Tokens, newest first, including revoked ones, without secrets. `next_cursor` is null on the last page."""

    tokens: list[Token]
    next_cursor: str | None


async def list_tokens(request: Request, services: Services) -> TokenPage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        found = await tokens.list_page(connection, before_id=page.cursor, limit=page.fetch_limit)
    return TokenPage(*page.cut(found, lambda token: token.id))


async def create_token(request: Request, services: Services) -> Response:
    given = await bodies.read_json(request)
    created = await control.create_token(services.database, given, actor=bodies.actor(request))
    services.access.forget()
    return json_response(created, 201)


async def revoke_token(request: Request, services: Services) -> Token:
    await bodies.read(request, bodies.Nothing)
    name_or_id: str = request.path_params["token"]
    revoked = await control.revoke_token(services.database, name_or_id, actor=bodies.actor(request))
    services.access.forget()
    return revoked


_REFUSALS = (400, 408, 413, 415, 422)

ROUTES = (
    Route("GET", "/admin/tokens", list_tokens, "List tokens, newest first, without secrets", (TokenPage,),
          scope="admin", query=LIST_QUERY, errors=(422,)),
    Route("POST", "/admin/tokens", create_token, "Create a token; its secret is shown only once", (NewToken,),
          scope="admin", status=201, body=bodies.schema(TokenBody), errors=(*_REFUSALS, 409)),
    Route("DELETE", "/admin/tokens/{token}", revoke_token, "Revoke a token, by its name or id", (Token,),
          scope="admin", errors=(*_REFUSALS, 404)),
)  # fmt: skip
