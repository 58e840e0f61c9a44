"""Dispatch: the batch. In one transaction: take events from the inbox, gate, match, deliver, create runs.

A crash anywhere before the commit leaves everything as it was; after it, everything is done. Nothing in between exists.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headgate import failpoints
from headgate.errors import Unavailable
from headgate.flow import deliver, gate
from headgate.flow.match import Matcher
from headgate.store import deliveries, events
from headgate.store.db import Connection, Database
from headgate.store.events import InboxBatch
from headgate.telemetry.logs import logger

_log = logger("dispatch")


class Outcome(NamedTuple):
    """What one batch did."""

    events: int = 0
    launched: int = 0
    failed: int = 0
    quarantined: int = 0


class Dispatch:
    """Decides what is in the inbox. `after_launch` is called after each commit that created runs."""

    def __init__(self, database: Database, *, batch_size: int, after_launch: Callable[[], None]) -> None:
        self._database = database
        self._batch_size = batch_size
        self._after_launch = after_launch
        self._matcher = Matcher()

    async def run_once(self) -> Outcome:
        """Decide one batch; an outcome of 0 events means that nothing was waiting."""
        try:
            outcome = await self._database.run(self._batch)
        except Unavailable:
            raise
        except Exception as exc:
            _log.warning("dispatch.batch_failed", error=exc, reason="taking it apart to find the event at fault")
            outcome = await self._one_by_one()
        failpoints.hit("dispatch.after_commit")
        if outcome.launched:
            self._after_launch()
        return outcome

    async def _batch(self, connection: Connection) -> Outcome:
        return await self._decide(connection, await events.claim_inbox(connection, self._batch_size))

    async def _decide(self, connection: Connection, batch: InboxBatch) -> Outcome:
        if not batch.events:
            return Outcome()
        failpoints.hit("dispatch.after_claim")
        allowed = gate.decide(batch.events)
        failpoints.hit("dispatch.after_gate")
        await self._matcher.refresh(connection, batch.registry_version)
        matches = self._matcher.match(allowed)
        failpoints.hit("dispatch.after_match")
        decided = deliver.decide(matches)
        launched = await deliveries.launch(connection, decided) if decided else []
        failpoints.hit("dispatch.before_commit")
        failed = [d for d in decided if d.status == "failed"]
        for delivery in failed:
            _log.warning(
                "delivery.failed",
                event_id=str(delivery.event_id),
                correlation_id=delivery.correlation_id,
                trigger_id=str(delivery.trigger_id),
                reason=delivery.last_error,
            )
        return Outcome(events=len(batch.events), launched=len(launched), failed=len(failed))

    async def _one_by_one(self) -> Outcome:
        """The oldest events, each in a transaction of its own; one that still fails goes to the dead letters."""
        async with self._database.connection() as connection:
            sequences = await events.list_inbox(connection, self._batch_size)
        total = Outcome()
        for sequence in sequences:
            try:
                one = await self._database.run(partial(self._single, sequence=sequence))
            except Unavailable:
                raise
            except Exception as exc:
                one = await self._quarantine(sequence, exc)
            total = Outcome(*(a + b for a, b in zip(total, one, strict=True)))
        return total

    async def _single(self, connection: Connection, sequence: int) -> Outcome:
        return await self._decide(connection, await events.claim_inbox_one(connection, sequence))

    async def _quarantine(self, sequence: int, exc: Exception) -> Outcome:
        reason = f"{type(exc).__name__}: {exc}"[:1000]
        async with self._database.transaction() as connection:
            moved = await events.quarantine(connection, sequence, reason)
        _log.error("event.quarantined", ingress_sequence=sequence, reason=reason, moved=moved)
        return Outcome(events=1, quarantined=int(moved))
