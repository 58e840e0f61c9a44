"""Dispatch: new events. In one transaction: take them from the inbox, gate, match, deliver, create runs.

A crash anywhere before the commit leaves everything as it was; after it, everything is done. Nothing in between exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from headgate import failpoints
from headgate.errors import Unavailable
from headgate.flow import batch, gate
from headgate.flow.batch import Batch, Delivered
from headgate.model.event import Event
from headgate.model.ingress_retry import IngressRetry
from headgate.model.source import SOURCE_BREAKER, BreakerPolicy
from headgate.store import decisions, events, ingress_retries
from headgate.store.db import Connection, Database
from headgate.store.decisions import Recorded
from headgate.telemetry import metrics
from headgate.telemetry.logs import logger

# A transaction decides about so many deliveries; when each event fires many triggers, it takes fewer events.
MAX_DELIVERIES = 2000

_log = logger("dispatch")


class Outcome(NamedTuple):
    """What one batch did, in numbers."""

    events: int = 0
    launched: int = 0
    failed: int = 0
    held: int = 0
    expired: int = 0
    quarantined: int = 0


class Decided(NamedTuple):
    """What one batch decided: the numbers, who waits, and how late those came that passed."""

    outcome: Outcome = Outcome()
    held: Sequence[IngressRetry] = ()
    lags: Sequence[tuple[str, float]] = ()
    delivered: Delivered = Delivered()


class Dispatch:
    """Decides what is in the inbox. The callbacks hear, after the commit, of new runs and of events that wait."""

    def __init__(
        self,
        database: Database,
        *,
        batch_size: int,
        after_launch: Callable[[], None],
        after_hold: Callable[[Sequence[IngressRetry]], None] = lambda _: None,
        breaker: BreakerPolicy = SOURCE_BREAKER,
        batch: Batch | None = None,
    ) -> None:
        self._database = database
        self._batch_size = batch_size
        self._after_launch = after_launch
        self._after_hold = after_hold
        self._batch = batch or Batch(breaker)
        self._fan_out = 1.0

    async def run_once(self) -> Outcome:
        """Decide one batch; an outcome of 0 events means that nothing was waiting."""
        try:
            decided = await self._database.run(self._oldest)
        except Unavailable:
            raise
        except Exception as exc:
            _log.warning("dispatch.batch_failed", error=exc, reason="taking it apart to find the event at fault")
            return await self._one_by_one()
        self._committed(decided)
        return decided.outcome

    def _committed(self, decided: Decided) -> None:
        failpoints.hit("dispatch.after_commit")
        if decided.outcome.events:
            self._fan_out = max(1.0, len(decided.delivered.decided) / decided.outcome.events)
        if decided.outcome.launched:
            self._after_launch()
        self._batch.committed(decided.delivered)
        metrics.allowed(decided.lags)
        metrics.refused((retry.source, retry.reason) for retry in decided.held)
        for retry in decided.held:
            metrics.EVENT_RETRIES.labels("scheduled").inc()
            _log.info(
                "event.held",
                event_id=str(retry.event_id),
                source=retry.source,
                attempt=retry.attempts,
                next_attempt_at=retry.next_attempt_at,
                reason=retry.reason,
            )
        if decided.held:
            self._after_hold(decided.held)

    async def _oldest(self, connection: Connection) -> Decided:
        limit = max(1, min(self._batch_size, int(MAX_DELIVERIES / self._fan_out)))
        return await self._decide(connection, await events.claim_inbox(connection, limit))

    async def _decide(self, connection: Connection, newcomers: Sequence[Event]) -> Decided:
        if not newcomers:
            return Decided()
        failpoints.hit("dispatch.after_claim")
        gates = await gate.open_gates(connection, (event.source for event in newcomers))
        verdict = gate.decide(gates, newcomers)
        failpoints.hit("dispatch.after_gate")
        delivered = await self._batch.deliver(connection, gates, verdict.admitted)
        waiting = [*verdict.held, *verdict.expired]
        await ingress_retries.hold(connection, waiting)
        await decisions.insert(connection, [_recorded(retry) for retry in waiting])
        await gate.close_gates(connection, gates)
        seen = batch.measure(
            gates,
            newcomers=newcomers,
            passed=verdict.admitted,
            throttled=Counter(retry.source for retry in verdict.held),
            dropped=Counter(retry.source for retry in verdict.expired),
            failures=delivered.failures,
        )
        await batch.count(connection, seen, delivered)
        failpoints.hit("dispatch.before_commit")
        outcome = Outcome(
            events=len(newcomers),
            launched=delivered.launched,
            failed=delivered.failed,
            held=len(verdict.held),
            expired=len(verdict.expired),
        )
        return Decided(outcome, verdict.held, batch.lags(gates, verdict.admitted), delivered)

    async def _one_by_one(self) -> Outcome:
        """The oldest events, each in a transaction of its own; one that still fails goes to the dead letters."""
        async with self._database.connection() as connection:
            sequences = await events.list_inbox(connection, self._batch_size)
        total = Outcome()
        for sequence in sequences:
            try:
                decided = await self._database.run(partial(self._single, sequence=sequence))
                self._committed(decided)
                one = decided.outcome
            except Unavailable:
                raise
            except Exception as exc:
                one = await self._quarantine(sequence, exc)
            total = Outcome(*(a + b for a, b in zip(total, one, strict=True)))
        return total

    async def _single(self, connection: Connection, sequence: int) -> Decided:
        return await self._decide(connection, await events.claim_inbox_one(connection, sequence))

    async def _quarantine(self, sequence: int, exc: Exception) -> Outcome:
        reason = f"{type(exc).__name__}: {exc}"[:1000]
        source = await self._database.run(partial(self._bury, sequence=sequence, reason=reason))
        _log.error("event.quarantined", ingress_sequence=sequence, source=source, reason=reason)
        return Outcome(events=1, quarantined=int(source is not None))

    async def _bury(self, connection: Connection, sequence: int, reason: str) -> str | None:
        source = await events.quarantine(connection, sequence, reason)
        if source is not None:  # a failure of its source
            gates = await gate.open_gates(connection, [source])
            await self._batch.record_failure(connection, gates, source)
            await gate.close_gates(connection, gates)
        return source


def _recorded(retry: IngressRetry) -> Recorded:
    decision = "held" if retry.retry_state == "scheduled" else "expired"
    return Recorded(
        retry.event_id, None, "gate", decision, retry.last_error, retry.next_attempt_at, retry.attempts or None
    )
