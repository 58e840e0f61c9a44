"""Webhooks: look up a source's webhook, store the event of a signed request, count and log refused requests.

The webhook of a source, or that it has none, is cached for a second: a change is effective everywhere after that, and a
flood costs one read a second per source. While the database is unavailable requests get 503 unchecked: events could not
be stored anyway, and senders retry.
"""

from __future__ import annotations

import asyncio
import contextlib

from tidegate.clock import utc_now
from tidegate.errors import Conflict, Overloaded, SecretsUnreadable, TidegateError, Unavailable
from tidegate.flow.accept.ingest import Ingest
from tidegate.flow.accept.lookups import MAX_KEPT, RecentLookups, UnknownLookups
from tidegate.model.event import Accepted, NewEvent, is_name
from tidegate.model.secrets import require_readable
from tidegate.model.webhook import Webhook, holding
from tidegate.store import events
from tidegate.store import webhooks as store
from tidegate.store.db import Database
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

# Unauthenticated clients may send any number of requests; the log gets one line per source and reason in QUIET_SECONDS.
QUIET_SECONDS = 1.0

_log = logger("webhook")


class Webhooks:
    """The webhooks of sources, as one process has cached them."""

    def __init__(self, database: Database, ingest: Ingest) -> None:
        self._database = database
        self._ingest = ingest
        self._recent = RecentLookups(self._read)
        self._unknown = UnknownLookups()
        self._quiet: dict[tuple[str | None, str], tuple[float, int]] = {}

    async def find(self, source: str) -> Webhook | None:
        """The webhook of a source, at most a second old."""
        if not is_name(source):
            return None
        try:
            return await self._recent.get(source)
        except SecretsUnreadable as exc:
            # Cached like any other answer: requests cost one read, and one line in the log, a second.
            text = "webhooks of this source cannot be checked right now; the server's log has the reason"
            raise Unavailable(text, exc.retry_after_seconds) from exc
        except TidegateError as exc:
            self._recent.drop(source)
            if isinstance(exc, Overloaded):
                raise
            # A client without a signature learns nothing about the database, such as its address.
            raise Unavailable("webhooks cannot be checked right now: the database is not available") from exc

    def forget(self) -> None:
        """Read the webhooks again at the next request: they have changed."""
        self._recent.clear()

    async def accept(self, event: NewEvent) -> Accepted:
        """Store the event of a signed request. Only the sender's id identifies it: the same id with another body is a
        duplicate, not a conflict, since senders render the body again for each attempt and would retry for days."""
        try:
            [accepted] = await self._ingest.accept([event])
        except Conflict:
            async with self._database.connection() as connection:
                first = (await events.resolve(connection, [event])).get(event.id)
            if first is None:  # it was deleted just now; the next attempt is a new event
                raise Unavailable("an event with the same id is changing right now") from None
            _log.info("webhook.body_differs", source=event.source, event_id=str(first.id))
            accepted = Accepted(first.id, event.external_id, "duplicate")
        metrics.webhook(event.source, accepted.status)
        return accepted

    def refused(self, source: str, webhook: Webhook | None, outcome: str, reason: str) -> None:
        """Count and log why a request was refused. Sources without a webhook are logged and counted as one."""
        known = source if webhook is not None else None
        metrics.webhook(known, outcome)
        now = asyncio.get_running_loop().time()
        since, suppressed = self._quiet.get((known, reason), (0.0, 0))
        if since and now < since + QUIET_SECONDS:
            self._quiet[known, reason] = (since, suppressed + 1)
            return
        if len(self._quiet) >= MAX_KEPT:
            self._quiet.clear()
        self._quiet[known, reason] = (now, 0)
        shown = source if is_name(source) else "?"
        scheme = webhook.config.scheme if webhook is not None else None
        _log.warning("webhook.refused", source=shown, scheme=scheme, reason=reason, suppressed=suppressed)

    async def _read(self, source: str, last: Webhook | None) -> Webhook | None:
        turn = contextlib.nullcontext() if last is not None else self._unknown.turn()
        async with turn, self._database.connection() as connection:
            found = await store.get(connection, source, self._database.keys)
        if found is not None:
            try:
                held = holding(found.config.secrets, utc_now())
                require_readable((secret.secret for secret in held), f"the webhook of {source}")
            except SecretsUnreadable as exc:
                _log.error("webhook.unreadable", source=source, reason=str(exc))
                raise
        return found
