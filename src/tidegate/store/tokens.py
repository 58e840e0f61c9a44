"""`api_tokens`: rows are revoked, never deleted, so that the audit log's actors stay known."""

from __future__ import annotations

import uuid
from typing import NamedTuple

from tidegate.model.ids import TokenId
from tidegate.model.token import Token, TokenBody
from tidegate.store.db import Connection, Row
from tidegate.store.sql import load

_sql = load("tokens")


class Presented(NamedTuple):
    """The token whose secret was presented, as the database's clock sees it."""

    token: Token
    is_expired: bool
    is_use_unnoted: bool


async def lock(connection: Connection) -> None:
    """Only one transaction changes tokens at a time."""
    await connection.execute(_sql["lock"])


async def insert(connection: Connection, body: TokenBody, secret_hash: bytes, actor: str) -> TokenId:
    """Store a new token; its id."""
    columns = (
        body.name, secret_hash, body.scopes, body.sources, body.rate, body.networks, actor, body.expires_at,
        body.expires_in_ms,
    )  # fmt: skip
    token_id: TokenId = await connection.fetchval(_sql["insert"], *columns)
    return token_id


async def get(connection: Connection, token_id: TokenId) -> Token | None:
    """One token."""
    row = await connection.fetchrow(_sql["get"], token_id)
    return _token(row) if row else None


async def find_unrevoked(connection: Connection, name: str) -> Token | None:
    """The token of that name that has not been revoked."""
    row = await connection.fetchrow(_sql["find_unrevoked"], name)
    return _token(row) if row else None


async def by_hash(connection: Connection, secret_hash: bytes) -> Presented | None:
    """The token whose secret has this hash."""
    row = await connection.fetchrow(_sql["by_hash"], secret_hash)
    return Presented(_token(row), row["is_expired"], row["is_use_unnoted"]) if row else None


async def note_use(connection: Connection, token_id: TokenId) -> None:
    """Note that a token is in use."""
    await connection.execute(_sql["note_use"], token_id)


async def revoke(connection: Connection, token_id: TokenId) -> None:
    """End a token for good."""
    await connection.execute(_sql["revoke"], token_id)


async def list_page(
    connection: Connection, *, before_id: uuid.UUID | None = None, limit: int | None = None
) -> list[Token]:
    """Tokens, newest first."""
    return [_token(row) for row in await connection.fetch(_sql["list"], before_id, limit)]


def _token(row: Row) -> Token:
    return Token(**{name: row[name] for name in Token.__struct_fields__})
