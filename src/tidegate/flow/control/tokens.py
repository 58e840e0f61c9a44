"""The operator's verbs for API tokens. A secret is in no row or log line, and only in the answer that created it."""

from __future__ import annotations

import secrets
import uuid
from typing import Any

import msgspec

from tidegate.errors import Conflict, FieldError, InvalidInput, NotFound
from tidegate.model.conversion import convert
from tidegate.model.ids import TokenId
from tidegate.model.token import (
    ALPHABET,
    SECRET_CHARACTERS,
    Token,
    TokenBody,
    secret_hash,
    secret_of,
    token_errors,
)
from tidegate.store import audit, locks, tokens
from tidegate.store.db import Connection, Database
from tidegate.telemetry.logs import logger

MAX_EXPIRES_MS = 10 * 366 * 86_400_000

_log = logger("control")


class NewToken(msgspec.Struct, frozen=True, kw_only=True):
    """A token that has just been created; its secret is shown only here."""

    token: Token
    secret: str


async def create_token(database: Database, given: Any, *, actor: str) -> NewToken:
    """Create a token from decoded JSON. Conflict when a token with the name exists that is not revoked."""
    body = convert(given, TokenBody, "the token is not valid")
    errors = token_errors(body)
    if body.expires_in_ms is not None and not 0 < body.expires_in_ms <= MAX_EXPIRES_MS:
        errors.append(FieldError("expires_in_ms", f"must lie between 1 and {MAX_EXPIRES_MS} (ten years)"))
    if errors:
        raise InvalidInput("the token is not valid", errors)
    secret = secret_of("".join(secrets.choice(ALPHABET) for _ in range(SECRET_CHARACTERS)))
    hashed = secret_hash(secret)
    assert hashed is not None, "our secrets have the form of secrets"

    async def change(connection: Connection) -> Token:
        await tokens.lock(connection)
        if body.expires_at is not None and body.expires_at <= await locks.now(connection):
            raise InvalidInput("the token is not valid", [FieldError("expires_at", "must be in the future")])
        if await tokens.find_unrevoked(connection, body.name) is not None:
            problem = FieldError("name", "is taken; revoke that token first, or use another name")
            raise Conflict(f"a token {body.name!r} already exists", [problem])
        created = await _required(connection, await tokens.insert(connection, body, hashed, actor))
        await audit.insert(
            connection, actor=actor, action="token.create", subject=str(created.id), after=_described(created)
        )
        return created

    created = await database.run(change)
    _log.warning("token.created", token_id=str(created.id), name=created.name, scopes=created.scopes, actor=actor)
    return NewToken(token=created, secret=secret)


async def revoke_token(database: Database, name_or_id: str, *, actor: str) -> Token:
    """Revoke a token, by its name or id; revoking it again changes nothing."""

    async def change(connection: Connection) -> tuple[Token, bool]:
        await tokens.lock(connection)
        before = await _found(connection, name_or_id)
        if before.revoked_at is not None:
            return before, False
        await tokens.revoke(connection, before.id)
        after = await _required(connection, before.id)
        await audit.insert(
            connection, actor=actor, action="token.revoke", subject=str(before.id), before=_described(before),
            after=_described(after),
        )  # fmt: skip
        return after, True

    revoked, is_changed = await database.run(change)
    if is_changed:
        _log.warning("token.revoked", token_id=str(revoked.id), name=revoked.name, actor=actor)
    return revoked


async def _found(connection: Connection, name_or_id: str) -> Token:
    found = await tokens.find_unrevoked(connection, name_or_id)
    if found is None:
        try:
            found = await tokens.get(connection, TokenId(uuid.UUID(name_or_id)))
        except ValueError:
            found = None
    if found is None:  # the message omits the argument: it may be a secret
        raise NotFound("no token has this name or id; `tidegate token list` shows the tokens")
    return found


async def _required(connection: Connection, token_id: TokenId) -> Token:
    found = await tokens.get(connection, token_id)
    assert found is not None, f"{token_id} was just written"
    return found


def _described(token: Token) -> dict[str, Any]:
    return {
        name: getattr(token, name)
        for name in ("name", "scopes", "sources", "rate", "networks", "expires_at", "revoked_at")
    }
