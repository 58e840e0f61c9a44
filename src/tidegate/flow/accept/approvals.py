"""Approval links: made by workers, and checked by the API for callers who have no token.

The key is made with the first approval of an installation, and stored like the other secrets: encrypted, if there is
TIDEGATE_SECRETS_KEY. An operator can replace it after a leak. Nothing is read for a token that this key has not signed,
but for the key itself once in KEY_SECONDS; for one that it has, reads and decisions take turns, a few at a time.
"""

from __future__ import annotations

import secrets
from contextlib import AbstractAsyncContextManager

from tidegate.clock import monotonic
from tidegate.errors import SecretsUnreadable, TidegateError, Unavailable
from tidegate.flow.accept.lookups import RecentLookups, UnknownLookups
from tidegate.model.approval import KEY_BYTES, KEY_SECONDS, is_token, link_of, signed_id
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
        self._kept: tuple[bytes, float] | None = None  # the key, and when it was read
        self._recent: RecentLookups[str, bytes | None] = RecentLookups(self._read)
        self._callers = UnknownLookups()

    async def link(self, approval_id: StepId) -> str:
        """The link of an approval. Makes the installation's key if there is none."""
        if (key := self._recent_key()) is None:
            read_at, new = monotonic(), self._database.keys.seal(secrets.token_hex(KEY_BYTES))
            async with self._database.connection() as connection:
                stored = await approvals.key(connection) or await approvals.make_key(connection, new)
            key = self._opened(stored)
            self._kept = key, read_at
        return link_of(self._base, key, approval_id)

    async def check(self, token: str) -> StepId | None:
        """The approval of a token; None: it is not one. Unavailable, without a reason, when it cannot be checked."""
        if not is_token(token):
            return None
        if (key := self._recent_key()) is None:
            read_at = monotonic()
            try:
                key = await self._recent.get("key")
            except TidegateError as exc:
                if not isinstance(exc, SecretsUnreadable):
                    self._recent.drop("key")
                raise Unavailable("approval links cannot be checked right now; try again later") from exc
            self._kept = None if key is None else (key, read_at)
        return None if key is None else signed_id(key, token)

    def _recent_key(self) -> bytes | None:
        """The key, if it was read within KEY_SECONDS."""
        if self._kept is None or monotonic() - self._kept[1] >= KEY_SECONDS:
            return None
        return self._kept[0]

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
