"""Access: who may do what, checked before every route.

Tokens are cached for a second: a revoked or expired token is refused everywhere after that, and a busy publisher costs
one read a second. While the database is unreachable, the last answer for a token stays valid; a token without one is
refused. Unknown tokens are looked up a few at a time, whatever their number.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from urllib.parse import urlsplit

from tidegate.errors import Forbidden, Overloaded, TidegateError, Unauthorized, Unavailable
from tidegate.flow.accept.lookups import RecentLookups, UnknownLookups
from tidegate.flow.accept.token_use import Rates, Refusals
from tidegate.model import units
from tidegate.model.client_address import client_address, is_in, parse_network, parse_networks
from tidegate.model.local_request import Headers, why_foreign
from tidegate.model.token import Scope, Token, allows, secret_hash
from tidegate.model.trigger import compile_pattern
from tidegate.settings import Settings
from tidegate.store import tokens
from tidegate.store.db import Database

_HOW = "send `Authorization: Bearer TOKEN` (commands: TIDEGATE_TOKEN); `tidegate token create` creates one"


class Principal:
    """A client with a valid token, and what it may do."""

    def __init__(self, token: Token) -> None:
        self.id = token.id
        self.name = token.name
        self.scopes = token.scopes
        self.rate = units.rate(token.rate) if token.rate else None
        self.networks = [parse_network(text) for text in token.networks or ()]
        # Patterns of the sources that the token is restricted to; None: not restricted.
        self.sources = None if "admin" in token.scopes else token.sources
        self._patterns = [compile_pattern(pattern, "sources", []) for pattern in self.sources or ()]

    def may_use(self, source: str) -> bool:
        """Whether it may publish to, see and operate this source."""
        return self.sources is None or any(p is None or p.fullmatch(source) for p in self._patterns)


class Access:
    """The check, for one process. `check` returns None where no token is needed."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._database = database
        self._is_open = settings.auth == "off"
        self._hosts = _hosts(settings)
        self._proxies = parse_networks(settings.trusted_proxies)
        self._tokens = RecentLookups(self._look_up)
        self._unknown = UnknownLookups()
        self._rates = Rates()
        self._refusals = Refusals()

    async def check(
        self, authorization: str | None, needed: Scope, headers: Headers = (), peer: str | None = None
    ) -> Principal | None:
        """Raises Unauthorized without a valid token, Forbidden when it lacks the scope, TooManyRequests over its rate.

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
                raise Unauthorized("the token is not valid from this address", is_given=True, token=principal.name)
        except Unauthorized as exc:
            if exc.is_given:
                self._refusals.log(exc, self.address(headers, peer))
            raise
        if principal.rate is not None:
            self._rates.take(principal.id, principal.name, *principal.rate)
        if not allows(principal.scopes, needed):
            has = ", ".join(principal.scopes)
            raise Forbidden(f"this needs the scope {needed}; the token {principal.name} has {has}", needed)
        return principal

    def address(self, headers: Headers, peer: str | None) -> str | None:
        """The client address of a request; None when it cannot be determined."""
        return client_address(peer, headers, self._proxies)

    def forget(self) -> None:
        """Read the tokens again at the next request: they have changed."""
        self._tokens.clear()

    async def _principal(self, authorization: str | None, foreign: str | None) -> Principal:
        if not authorization:
            why = f", since {foreign}" if foreign else ""
            raise Unauthorized(f"a token is needed{why}; {_HOW}")
        scheme, _, secret = authorization.partition(" ")
        hashed = secret_hash(secret.strip()) if scheme.lower() == "bearer" else None
        if hashed is None:
            raise Unauthorized(f"this is not a Tidegate token; {_HOW}", is_given=True)
        try:
            return await self._tokens.get(hashed)
        except Unauthorized:
            raise
        except TidegateError as exc:
            self._tokens.drop(hashed)
            raise exc if isinstance(exc, Overloaded) else _unavailable() from exc

    async def _look_up(self, hashed: bytes, last: Principal | None) -> Principal:
        if last is None:
            async with self._unknown.turn():
                return await self._read(hashed)
        try:
            return await self._read(hashed)
        except Unavailable:
            return last  # meanwhile only what this process knows by itself can be read, such as its metrics

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
            # For information only (which tokens are in use), so errors are ignored. The connection's context manager
            # translates driver errors to TidegateError.
            with contextlib.suppress(TidegateError):
                async with self._database.connection() as connection:
                    await tokens.note_use(connection, found.token.id)
        return Principal(found.token)


def _hosts(settings: Settings) -> Collection[str]:
    """The host names of this API in the settings, besides the names that every machine has."""
    with contextlib.suppress(ValueError):
        return {settings.host.lower(), (urlsplit(settings.url).hostname or "").lower()} - {""}
    return {settings.host.lower()}


def _unavailable() -> Unavailable:
    """An unauthenticated client learns nothing about the database, such as its address."""
    return Unavailable("tokens cannot be checked right now: the database is not available")
