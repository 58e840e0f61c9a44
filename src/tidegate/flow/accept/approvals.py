"""Approval links: made by workers, and checked by the API for callers who have no token.

The key is made with the first approval of an installation, and stored like the other secrets: encrypted, if there is
TIDEGATE_SECRETS_KEY. Nothing is read for a token that this key has not signed; for one that it has, reads and decisions
take turns, a few at a time.
"""

from __future__ import annotations

import secrets
from contextlib import AbstractAsyncContextManager

from tidegate.errors import SecretsUnreadable, TidegateError, Unavailable
from tidegate.flow.accept.lookups import RecentLookups, UnknownLookups
from tidegate.model.approval import KEY_BYTES, is_token, link_of, signed_id
from tidegate.model.ids import StepId
from tidegate.model.secrets import require_readable
from tidegate.store import approvals
from tidegate.store.db import Database
from tidegate.telemetry.logs import logger

_log = logger("approval")


class ApprovalLinks:
    """The links of approvals. `base` is the public address of the API; a process that only checks links needs none."""

    def __init__(self, database: Database, base: str = "") -> None:
        self._database = database
        self._base = base
        self._key: bytes | None = None  # it never changes
        self._recent: RecentLookups[str, bytes | None] = RecentLookups(self._read)
        self._callers = UnknownLookups()

    async def link(self, approval_id: StepId) -> str:
        """The link of an approval. Makes the installation's key if there is none."""
        if self._key is None:
            new = self._database.keys.seal(secrets.token_hex(KEY_BYTES))
            async with self._database.connection() as connection:
                stored = await approvals.key(connection) or await approvals.make_key(connection, new)
            self._key = self._opened(stored)
        return link_of(self._base, self._key, approval_id)

    async def check(self, token: str) -> StepId | None:
        """The approval of a token; None: it is not one. Unavailable, without a reason, when it cannot be checked."""
        if not is_token(token):
            return None
        if self._key is None:
            try:
                self._key = await self._recent.get("key")
            except TidegateError as exc:
                if not isinstance(exc, SecretsUnreadable):
                    self._recent.drop("key")
                raise Unavailable("approval links cannot be checked right now; try again later") from exc
        return None if self._key is None else signed_id(self._key, token)

    def turn(self) -> AbstractAsyncContextManager[None]:
        """Wait until a bearer of a link may use the database. Overloaded when too many others wait."""
        return self._callers.turn()

    async def _read(self, _: str, __: bytes | None) -> bytes | None:
        async with self._callers.turn(), self._database.connection() as connection:
            stored = await approvals.key(connection)
        try:
            return None if stored is None else self._opened(stored)
        except SecretsUnreadable as exc:
            _log.error("approval.unreadable", reason=str(exc))
            raise

    def _opened(self, stored: str) -> bytes:
        opened = self._database.keys.open(stored)
        require_readable([opened], "approval links")
        return bytes.fromhex(opened)
