"""Webhooks of sources, for whoever receives them: their configuration, what becomes of an event, what is told.

What the database says about a source is kept for a second, that it has no webhook too: a change holds everywhere after
that, and a flood costs one look a second for each source. While the database is away nobody is judged: events could not
be stored anyway, and senders come again.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple

from tidegate.clock import utc_now
from tidegate.errors import Conflict, Overloaded, SecretsUnreadable, TidegateError, Unavailable
from tidegate.flow.accept.ingest import Accepted, Ingest
from tidegate.flow.accept.lookups import Strangers
from tidegate.model.event import NewEvent, is_name
from tidegate.model.secrets import require_readable
from tidegate.model.webhook import Webhook, holding
from tidegate.store import events
from tidegate.store import webhooks as store
from tidegate.store.db import Database
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

KEEP_SECONDS = 1.0
MAX_KEPT = 1000
# Strangers may knock as often as they like; the log has one line in so many seconds for each source and reason.
QUIET_SECONDS = 1.0

_log = logger("webhook")


class _KeptWebhook(NamedTuple):
    until: float
    reading: asyncio.Task[Webhook | None]


class Webhooks:
    """The webhooks that one process knows."""

    def __init__(self, database: Database, ingest: Ingest) -> None:
        self._database = database
        self._ingest = ingest
        self._kept: dict[str, _KeptWebhook] = {}
        self._strangers = Strangers()
        self._quiet: dict[tuple[str | None, str], tuple[float, int]] = {}

    async def find(self, source: str) -> Webhook | None:
        """The webhook of a source, at most a second old."""
        if not is_name(source):
            return None
        now = asyncio.get_running_loop().time()
        kept = self._kept.get(source)
        if kept is None or kept.until < now:
            if len(self._kept) >= MAX_KEPT:
                self._make_room()
            is_known = kept is not None and _found(kept.reading)
            kept = _KeptWebhook(now + KEEP_SECONDS, asyncio.create_task(self._read(source, is_known)))
            kept.reading.add_done_callback(_seen)
            self._kept[source] = kept
        try:
            return await asyncio.shield(kept.reading)  # others may wait for the same answer
        except SecretsUnreadable as exc:
            # Kept like any other answer: whoever knocks costs one look, and one line in the log, a second.
            text = "webhooks of this source cannot be checked right now; the log of the server says why"
            raise Unavailable(text, exc.retry_after_seconds) from exc
        except TidegateError as exc:
            self._kept.pop(source, None)
            if isinstance(exc, Overloaded):
                raise
            # Whoever has shown no signature learns nothing about the database, such as its address.
            raise Unavailable("webhooks cannot be checked right now: the database cannot be asked") from exc

    def _make_room(self) -> None:
        """Sources without a webhook go first: whoever invents names does not make us forget the others."""
        known = {source: kept for source, kept in self._kept.items() if _found(kept.reading)}
        self._kept = known if len(known) < MAX_KEPT else {}

    def forget(self) -> None:
        """Look again at the next request: webhooks have changed."""
        self._kept.clear()

    async def accept(self, event: NewEvent) -> Accepted:
        """Store the event of a signed request. The sender's id is what counts: the same id with another body is a
        duplicate, not a conflict, since senders write their bodies anew for each attempt and would try for days."""
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
        """Count and tell why a request was refused. Sources without a webhook are told and counted as one."""
        known = source if webhook is not None else None
        metrics.webhook(known, outcome)
        now = asyncio.get_running_loop().time()
        since, untold = self._quiet.get((known, reason), (0.0, 0))
        if since and now < since + QUIET_SECONDS:
            self._quiet[known, reason] = (since, untold + 1)
            return
        if len(self._quiet) >= MAX_KEPT:
            self._quiet.clear()
        self._quiet[known, reason] = (now, 0)
        shown = source if is_name(source) else "?"
        scheme = webhook.config.scheme if webhook is not None else None
        _log.warning("webhook.refused", source=shown, scheme=scheme, reason=reason, untold=untold)

    async def _read(self, source: str, is_known: bool) -> Webhook | None:
        turn = contextlib.nullcontext() if is_known else self._strangers.turn()
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


def _found(reading: asyncio.Task[Webhook | None]) -> bool:
    """Whether there was a webhook."""
    return reading.done() and not reading.cancelled() and not reading.exception() and reading.result() is not None


def _seen(done: asyncio.Task[Webhook | None]) -> None:
    """Its error is for those who wait; nobody may be left."""
    if not done.cancelled():
        done.exception()
