"""Who may do what: the check that stands before every route.

Answers of the database are kept for a second: a revoked or expired token is refused everywhere after that, and a busy
publisher costs one look a second. While the database cannot be reached, its last answer stands; without one, nobody
passes. Tokens that nobody knows are looked up a few at a time, whatever their number.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import urlsplit

from tidegate.errors import Forbidden, Overloaded, TidegateError, Unauthorized, Unavailable
from tidegate.flow.accept.lookups import Strangers
from tidegate.flow.accept.token_use import Rates, Refusals
from tidegate.model import units
from tidegate.model.client_address import client_address, is_in, parse_network, parse_networks
from tidegate.model.local_request import Headers, why_foreign
from tidegate.model.token import Scope, Token, allows, secret_hash
from tidegate.model.trigger import compile_pattern
from tidegate.settings import Settings
from tidegate.store import tokens
from tidegate.store.db import Database

KEEP_SECONDS = 1.0
MAX_KEPT = 1000

_HOW = "send `Authorization: Bearer TOKEN` (commands: TIDEGATE_TOKEN); `tidegate token create` makes one"


class Principal:
    """Whoever asks, with a token that holds; what it may do is decided here."""

    def __init__(self, token: Token) -> None:
        self.id = token.id
        self.name = token.name
        self.scopes = token.scopes
        self.rate = units.rate(token.rate) if token.rate else None
        self.networks = [parse_network(text) for text in token.networks or ()]
        # Patterns of the sources that all it may do is bound to; None: it is not bound.
        self.sources = None if "admin" in token.scopes else token.sources
        self._patterns = [compile_pattern(pattern, "sources", []) for pattern in self.sources or ()]

    def may_use(self, source: str) -> bool:
        """Whether it may publish, see and operate this source."""
        return self.sources is None or any(p is None or p.fullmatch(source) for p in self._patterns)


class _KeptToken(NamedTuple):
    until: float
    looking: asyncio.Task[Principal]


class Access:
    """The check, for one process. `check` returns None where no token is needed."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._is_open = settings.auth == "off"
        self._hosts = _hosts(settings)
        self._proxies = parse_networks(settings.trusted_proxies)
        self._kept: dict[bytes, _KeptToken] = {}
        self._strangers = Strangers()
        self._rates = Rates()
        self._refusals = Refusals()

    async def check(
        self, authorization: str | None, needed: Scope, headers: Headers = (), peer: str | None = None
    ) -> Principal | None:
        """Unauthorized without a token that holds, Forbidden when it lacks the scope, TooManyRequests.

        Where no token is needed, `headers` must show that the request was made on this machine.
        """
        foreign = None
        if self._is_open:
            foreign = why_foreign(headers, self._hosts)
            if foreign is None:
                return None
        try:
            principal = await self._principal(authorization, foreign)
            if principal.networks and not is_in(self.address(headers, peer), principal.networks):
                raise Unauthorized("the token does not hold from this address", is_given=True, token=principal.name)
        except Unauthorized as exc:
            if exc.is_given:
                self._refusals.tell(exc, self.address(headers, peer))
            raise
        if principal.rate is not None:
            self._rates.take(principal.id, principal.name, *principal.rate)
        if not allows(principal.scopes, needed):
            has = ", ".join(principal.scopes)
            raise Forbidden(f"this needs the scope {needed}; the token {principal.name} has {has}", needed)
        return principal

    def address(self, headers: Headers, peer: str | None) -> str | None:
        """Where a request comes from; None when nobody can tell."""
        return client_address(peer, headers, self._proxies)

    def forget(self) -> None:
        """Look again at the next request: tokens have changed."""
        self._kept.clear()

    async def _principal(self, authorization: str | None, foreign: str | None) -> Principal:
        if not authorization:
            why = f", since {foreign}" if foreign else ""
            raise Unauthorized(f"a token is needed{why}; {_HOW}")
        scheme, _, secret = authorization.partition(" ")
        hashed = secret_hash(secret.strip()) if scheme.lower() == "bearer" else None
        if hashed is None:
            raise Unauthorized(f"this is not a token of Tidegate; {_HOW}", is_given=True)
        now = asyncio.get_running_loop().time()
        kept = self._kept.get(hashed)
        if kept is None or kept.until < now:
            if len(self._kept) >= MAX_KEPT:
                self._make_room()
            kept = _KeptToken(now + KEEP_SECONDS, asyncio.create_task(self._look(hashed, _last(kept))))
            kept.looking.add_done_callback(_seen)
            self._kept[hashed] = kept
        try:
            return await asyncio.shield(kept.looking)  # others may wait for the same answer
        except Unauthorized:
            raise
        except TidegateError as exc:
            self._kept.pop(hashed, None)
            raise exc if isinstance(exc, Overloaded) else _cannot_be_asked() from exc

    def _make_room(self) -> None:
        """Those that did not hold go first: whoever invents tokens does not make us forget the others."""
        holding = {hashed: kept for hashed, kept in self._kept.items() if _last(kept) is not None}
        self._kept = holding if len(holding) < MAX_KEPT else {}

    async def _look(self, hashed: bytes, last: Principal | None) -> Principal:
        if last is None:
            async with self._strangers.turn():
                return await self._read(hashed)
        try:
            return await self._read(hashed)
        except Unavailable:
            return last  # nothing can be changed or read meanwhile but what this process itself knows, such as metrics

    async def _read(self, hashed: bytes) -> Principal:
        async with self._database.connection() as connection:
            found = await tokens.by_hash(connection, hashed)
            if found is None:
                raise Unauthorized(f"the token is not known; {_HOW}", is_given=True)
            if found.token.revoked_at is not None:
                raise Unauthorized("the token has been revoked", is_given=True, token=found.token.name)
            if found.is_expired:
                raise Unauthorized("the token has expired", is_given=True, token=found.token.name)
        if found.is_use_unnoted:
            # A note, for whoever wonders which tokens are in use. Errors get our names where a connection is left.
            with contextlib.suppress(TidegateError):
                async with self._database.connection() as connection:
                    await tokens.note_use(connection, found.token.id)
        return Principal(found.token)


def _hosts(settings: Settings) -> Collection[str]:
    """What the operator calls this API, beside the names that every machine has."""
    with contextlib.suppress(ValueError):
        return {settings.host.lower(), (urlsplit(settings.url).hostname or "").lower()} - {""}
    return {settings.host.lower()}


def _cannot_be_asked() -> Unavailable:
    """Whoever has not shown a token learns nothing about the database, such as its address."""
    return Unavailable("tokens cannot be checked right now: the database cannot be asked")


def _last(kept: _KeptToken | None) -> Principal | None:
    """What was found the last time."""
    if kept is None or not kept.looking.done() or kept.looking.cancelled() or kept.looking.exception():
        return None
    return kept.looking.result()


def _seen(done: asyncio.Task[Principal]) -> None:
    """Its error is for those who wait; nobody may be left."""
    if not done.cancelled():
        done.exception()
