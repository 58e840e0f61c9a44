"""Batch: what new events and retried ones share once the gate has let them pass: match, deliver, create runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

from headgate import failpoints
from headgate.flow import deliver, gate
from headgate.flow.gate import OpenGates
from headgate.flow.match import Matcher
from headgate.model.event import Event
from headgate.model.source import BreakerPolicy
from headgate.store import deliveries
from headgate.store import sources as source_store
from headgate.store.db import Connection
from headgate.store.deliveries import Decided
from headgate.store.sources import SourceMetrics
from headgate.telemetry.logs import logger

_log = logger("dispatch")
_MS = timedelta(milliseconds=1)


class Delivered(NamedTuple):
    """What became of the events that passed; `failures` by source."""

    launched: int = 0
    failed: int = 0
    failures: Mapping[str, int] = {}


class Batch:
    """Delivers admitted events inside the caller's transaction."""

    def __init__(self, breaker: BreakerPolicy) -> None:
        self._matcher = Matcher()
        self._breaker = breaker

    async def deliver(
        self, connection: Connection, gates: OpenGates, events: Sequence[Event], registry_version: int
    ) -> Delivered:
        """Match, decide and launch; the sources' breakers hear how it went."""
        if not events:
            return Delivered()
        await self._matcher.refresh(connection, registry_version)
        matches = self._matcher.match(events)
        failpoints.hit("dispatch.after_match")
        decided = deliver.decide(matches)
        launched = await deliveries.launch(connection, decided, gates.now) if decided else []
        failed = [d for d in decided if d.status == "failed"]
        failures = await self._tell_breakers(connection, gates, events, failed)
        return Delivered(len(launched), len(failed), failures)

    async def _tell_breakers(
        self, connection: Connection, gates: OpenGates, events: Sequence[Event], failed: Sequence[Decided]
    ) -> Counter[str]:
        source_of = {event.id: event.source for event in events}
        failures = Counter(source_of[delivery.event_id] for delivery in failed)
        admitted = Counter(event.source for event in events)
        for delivery in failed:
            _log.warning(
                "delivery.failed",
                event_id=str(delivery.event_id),
                correlation_id=delivery.correlation_id,
                source=source_of[delivery.event_id],
                trigger_id=str(delivery.trigger_id),
                reason=delivery.last_error,
            )
        first = {source_of[d.event_id]: d.correlation_id for d in reversed(failed)}
        await self._record(connection, gates, admitted, failures, first)
        return failures

    async def record_failure(self, connection: Connection, gates: OpenGates, source: str) -> None:
        """An event of the source could not be processed at all."""
        await self._record(connection, gates, Counter([source]), Counter([source]), {})
        await count(connection, [SourceMetrics(source=source, total=1, dropped=1, failures=1, last_event_at=gates.now)])

    async def _record(
        self,
        connection: Connection,
        gates: OpenGates,
        admitted: Counter[str],
        failures: Counter[str],
        correlation_ids: Mapping[str, str],
    ) -> None:
        moves = await gate.record(connection, gates, admitted=admitted, failures=failures, policy=self._breaker)
        for move in moves:
            log = _log.info if move.move == "closed" else _log.error
            log(
                f"source.breaker_{move.move}",
                source=move.source,
                reason=move.reason,
                correlation_id=correlation_ids.get(move.source),
            )


def measure(
    gates: OpenGates,
    *,
    newcomers: Sequence[Event],
    passed: Sequence[Event],
    throttled: Counter[str],
    dropped: Counter[str],
    failures: Mapping[str, int] | None = None,
) -> list[SourceMetrics]:
    """What a batch saw of each source, for the totals."""
    total = Counter(event.source for event in newcomers)
    lags: dict[str, list[int]] = {}
    for event in passed:
        lags.setdefault(event.source, []).append(max(0, round((gates.now - event.received_at) / _MS)))
    return [
        SourceMetrics(
            source=source,
            total=total[source],
            passed=len(lags.get(source, [])),
            throttled=throttled[source],
            dropped=dropped[source],
            failures=(failures or {}).get(source, 0),
            total_lag_ms=sum(lags.get(source, [])),
            last_lag_ms=lags[source][-1] if source in lags else 0,
            max_lag_ms=max(lags.get(source, [0])),
            last_event_at=gates.now,
        )
        for source in sorted({*total, *lags, *throttled, *dropped})
    ]


def lags(gates: OpenGates, passed: Sequence[Event]) -> list[tuple[str, float]]:
    """The source of each event that passed, and the seconds since its receipt."""
    return [(event.source, max(0.0, (gates.now - event.received_at).total_seconds())) for event in passed]


async def count(connection: Connection, metrics: Sequence[SourceMetrics]) -> None:
    """Add to the sources' totals; last in a transaction, since the rows are shared."""
    await source_store.count(connection, metrics)
