"""Who may do what: the check that stands before every route.

Answers of the database are kept for a second: a revoked or expired token is refused everywhere after that, and a busy
publisher costs one look a second. While the database cannot be reached, its last answer stands; without one, nobody
passes.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

from headgate.errors import Forbidden, HeadgateError, Unauthorized, Unavailable
from headgate.model.token import Scope, Token, allows, secret_hash
from headgate.model.trigger import compile_pattern
from headgate.settings import Settings
from headgate.store import tokens
from headgate.store.db import Database

KEEP_SECONDS = 1.0
MAX_KEPT = 1000

_HOW = "send `Authorization: Bearer TOKEN` (commands: HEADGATE_TOKEN); `headgate token create` makes one"


class Principal:
    """Whoever asks, with a token that holds; what it may do is decided here."""

    def __init__(self, token: Token) -> None:
        self.name = token.name
        self.scopes = token.scopes
        self._sources: list[Any] | None = None
        if token.sources is not None and "admin" not in token.scopes:
            self._sources = [compile_pattern(pattern, "sources", []) for pattern in token.sources]

    def may_publish(self, source: str) -> bool:
        """Whether events of this source may be published."""
        return self._sources is None or any(p is None or p.fullmatch(source) for p in self._sources)


class _Kept(NamedTuple):
    until: float
    looking: asyncio.Task[Principal]


class Access:
    """The check, for one process. `check` returns None where no token is needed."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._is_off = settings.auth == "off"
        # On loopback, whoever reaches the API is on this machine: it is open until the first token is made.
        self._may_be_open = settings.auth == "auto" and settings.is_loopback
        self._open_until = 0.0
        self._kept: dict[bytes, _Kept] = {}

    async def check(self, authorization: str | None, needed: Scope) -> Principal | None:
        """Unauthorized without a token that holds, Forbidden when it lacks the scope."""
        if self._is_off or (self._may_be_open and await self._is_open()):
            return None
        principal = await self._principal(authorization)
        if not allows(principal.scopes, needed):
            has = ", ".join(principal.scopes)
            raise Forbidden(f"this needs the scope {needed}; the token {principal.name} has {has}", needed)
        return principal

    def forget(self) -> None:
        """Look again at the next request: tokens have changed."""
        self._kept.clear()
        self._open_until = 0.0

    async def _is_open(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._open_until:
            return True
        try:
            async with self._database.connection() as connection:
                has_tokens = await tokens.is_any(connection)
        except Unavailable:
            if not self._open_until:
                raise
            return True  # as it was when the database could last be asked
        if has_tokens:
            self._may_be_open = False  # for good: a token that was made is never deleted
            return False
        self._open_until = now + KEEP_SECONDS
        return True

    async def _principal(self, authorization: str | None) -> Principal:
        if not authorization:
            raise Unauthorized(f"a token is needed; {_HOW}")
        scheme, _, secret = authorization.partition(" ")
        hashed = secret_hash(secret.strip()) if scheme.lower() == "bearer" else None
        if hashed is None:
            raise Unauthorized(f"this is not a token of Headgate; {_HOW}", is_given=True)
        now = asyncio.get_running_loop().time()
        kept = self._kept.get(hashed)
        if kept is None or kept.until < now:
            if len(self._kept) >= MAX_KEPT:
                self._kept.clear()
            kept = _Kept(now + KEEP_SECONDS, asyncio.create_task(self._look(hashed, _last(kept))))
            kept.looking.add_done_callback(_seen)
            self._kept[hashed] = kept
        try:
            return await asyncio.shield(kept.looking)  # others may wait for the same answer
        except HeadgateError as exc:
            if not isinstance(exc, Unauthorized):  # the database could not be asked
                self._kept.pop(hashed, None)
            raise

    async def _look(self, hashed: bytes, last: Principal | None) -> Principal:
        try:
            return await self._read(hashed)
        except Unavailable:
            if last is None:
                raise
            return last  # nothing can be changed or read meanwhile but what this process itself knows, such as metrics

    async def _read(self, hashed: bytes) -> Principal:
        async with self._database.connection() as connection:
            found = await tokens.by_hash(connection, hashed)
            if found is None:
                raise Unauthorized(f"the token is not known; {_HOW}", is_given=True)
            if found.token.revoked_at is not None:
                raise Unauthorized("the token has been revoked", is_given=True)
            if found.is_expired:
                raise Unauthorized("the token has expired", is_given=True)
        if found.is_use_unnoted:
            # A note, for whoever wonders which tokens are in use. Errors get our names where a connection is left.
            with contextlib.suppress(HeadgateError):
                async with self._database.connection() as connection:
                    await tokens.note_use(connection, found.token.id)
        return Principal(found.token)


def _last(kept: _Kept | None) -> Principal | None:
    """What was found the last time."""
    if kept is None or not kept.looking.done() or kept.looking.cancelled() or kept.looking.exception():
        return None
    return kept.looking.result()


def _seen(done: asyncio.Task[Principal]) -> None:
    """Its error is for those who wait; nobody may be left."""
    if not done.cancelled():
        done.exception()
