"""Health: is everything that should move moving? One snapshot for people, and the gauges for a scrape.

Both are read from Postgres, so every process gives the same answer; the verdict is pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Literal

import msgspec

from headgate.clock import monotonic
from headgate.errors import Unavailable
from headgate.flow.verdict import Cause, Facts, is_paused, verdict
from headgate.model.health import HEALTH, HealthPolicy
from headgate.store import health, sources, workers
from headgate.store.db import Connection, Database
from headgate.store.health import DeadLetterCount, PausedTrigger, QueueDepth, RetrySummary, Totals, TriggerMetrics
from headgate.store.sources import SourceMetrics, SourceRecord
from headgate.telemetry import metrics
from headgate.telemetry.logs import logger
from headgate.telemetry.metrics import SharedState

GAUGES_SECONDS = 1.0
# A run that has been due for so long with nobody to run it is worth a word.
UNSERVED_MS = 5000

_log = logger("health")


class SourceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The running totals of a source; lags are from the receipt to the gate letting it through."""

    source: str
    total: int
    throttled: int
    dropped: int
    failures: int
    average_lag_ms: float
    last_lag_ms: int
    max_lag_ms: int
    last_event_at: datetime | None
    updated_at: datetime | None


class LimitHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A source's limit, and how many wait for it."""

    source: str
    limit: int
    interval_ms: int
    pause_ms: int
    set_by: str | None
    throttled_until: datetime | None
    waiting: int
    next_attempt_at: datetime | None


class PausedSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source that is paused; `until` null means until it is resumed."""

    source: str
    until: datetime | None
    reason: str | None
    paused_by: str | None
    since: datetime
    waiting: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the whole cluster at one moment of the database's clock."""

    status: Literal["ok", "degraded", "critical"]
    causes: list[Cause]
    generated_at: datetime
    last_processed_event_at: datetime | None
    queues: dict[str, QueueDepth]
    totals: Totals
    sources: list[SourceHealth]
    triggers: list[TriggerMetrics]
    rate_limits: list[LimitHealth]
    paused_sources: list[PausedSource]
    paused_triggers: list[PausedTrigger]
    retries: dict[str, RetrySummary]
    dead_letters: DeadLetterCount


async def snapshot(connection: Connection, policy: HealthPolicy = HEALTH) -> Snapshot:
    """The state of everything, and the verdict."""
    found = await facts(connection, policy)
    causes = verdict(found, policy)
    letters = found.dead_letters.values()
    return Snapshot(
        status=_status(causes),
        causes=causes,
        generated_at=found.now,
        last_processed_event_at=(await health.overview(connection)).last_processed_event_at,
        queues=found.queues,
        totals=await health.totals(connection),
        sources=[_source(totals) for totals in await sources.list_metrics(connection)],
        triggers=await health.trigger_metrics(connection),
        rate_limits=[limit for record in found.sources if (limit := _limit(record))],
        paused_sources=[_paused(record) for record in found.sources if is_paused(record, found.now)],
        paused_triggers=found.paused_triggers,
        retries=found.retries,
        dead_letters=DeadLetterCount(
            total=sum(letter.total for letter in letters), last_24h=sum(letter.last_24h for letter in letters)
        ),
    )


async def facts(connection: Connection, policy: HealthPolicy) -> Facts:
    """What the verdict is made of."""
    return Facts(
        now=await sources.now(connection),
        sources=await sources.list_all(connection),
        source_breakers=await health.source_breakers(connection),
        paused_triggers=await health.paused_triggers(connection),
        trigger_breakers=await health.open_breakers(connection),
        queues=await health.queues(connection),
        retries=await health.retries(connection, policy.overdue_ms),
        dead_letters=await health.dead_letters(connection, policy.dead_letters_window_ms),
        workers=await health.workers(connection, policy.worker_degraded_ms),
        expired_claims=await health.expired_claims(connection),
        unserved=await workers.unserved(connection, policy.worker_degraded_ms, UNSERVED_MS),
    )


class Exposition:
    """The metrics of this process as text. The shared gauges are read at most once a second, whoever asks."""

    def __init__(self, database: Database, policy: HealthPolicy = HEALTH) -> None:
        self._database = database
        self._policy = policy
        self._fresh_until = 0.0
        self._reading = asyncio.Lock()

    async def text(self) -> bytes:
        """The exposition text; without the shared gauges while the database is away."""
        async with self._reading:
            if monotonic() >= self._fresh_until:
                await self._read()
                self._fresh_until = monotonic() + GAUGES_SECONDS
        return metrics.text()

    async def _read(self) -> None:
        try:
            async with self._database.connection(wait_seconds=2) as connection:
                metrics.show(await shared_state(connection, self._policy))
        except Unavailable as exc:
            _log.warning("health.gauges_unavailable", error=exc)
            metrics.show(None)


async def shared_state(connection: Connection, policy: HealthPolicy = HEALTH) -> SharedState:
    """What the gauges show."""
    overview = await health.overview(connection)
    queues = await health.queues(connection)
    deferred = {("events", reason): 0 for reason in ("rate_limit", "paused", "breaker_open")}
    deferred |= {("deliveries", r): 0 for r in ("throttle", "concurrency", "paused", "breaker_open", "source_paused")}
    retries = await health.retries(connection, policy.overdue_ms)
    for kind, summary in retries.items():
        deferred |= {(kind, reason): count for reason, count in summary.by_reason.items()}
    letters = dict.fromkeys(("event", "delivery", "step", "run"), 0)
    found = await health.dead_letters(connection, policy.dead_letters_window_ms)
    letters |= {kind: count.total for kind, count in found.items()}
    expired = dict.fromkeys(("events", "deliveries", "steps", "runs"), 0)
    expired |= {claims.kind: claims.total for claims in await health.expired_claims(connection)}
    processed = overview.last_processed_event_at
    return SharedState(
        paused_sources=overview.paused_sources,
        paused_triggers=overview.paused_triggers,
        open_breakers={
            "source": len(await health.source_breakers(connection)),
            "trigger": len(await health.open_breakers(connection)),
        },
        workers_alive=(await health.workers(connection, policy.worker_degraded_ms)).alive,
        unserved_workflows=len(await workers.unserved(connection, policy.worker_degraded_ms, UNSERVED_MS)),
        overdue_retries={kind: summary.overdue for kind, summary in retries.items()},
        expired_claims=expired,
        deferred=deferred,
        queue_depth={
            (name, state): getattr(depth, state)
            for name, depth in queues.items()
            for state in ("ready", "delayed", "active")
        },
        oldest_due_age_seconds={name: depth.oldest_due_age_seconds for name, depth in queues.items()},
        dead_letters=letters,
        last_processed=processed.timestamp() if processed else None,
    )


def _status(causes: Sequence[Cause]) -> Literal["ok", "degraded", "critical"]:
    if any(cause.severity == "critical" for cause in causes):
        return "critical"
    return "degraded" if causes else "ok"


def _source(totals: SourceMetrics) -> SourceHealth:
    return SourceHealth(
        source=totals.source,
        total=totals.total,
        throttled=totals.throttled,
        dropped=totals.dropped,
        failures=totals.failures,
        average_lag_ms=round(totals.total_lag_ms / totals.passed, 3) if totals.passed else 0,
        last_lag_ms=totals.last_lag_ms,
        max_lag_ms=totals.max_lag_ms,
        last_event_at=totals.last_event_at,
        updated_at=totals.updated_at,
    )


def _limit(record: SourceRecord) -> LimitHealth | None:
    if record.rate_limit is None or record.interval_ms is None:
        return None
    return LimitHealth(
        source=record.source,
        limit=record.rate_limit,
        interval_ms=record.interval_ms,
        pause_ms=record.pause_ms or 0,
        set_by=record.limit_set_by,
        throttled_until=record.throttled_until,
        waiting=record.waiting,
        next_attempt_at=record.next_attempt_at,
    )


def _paused(record: SourceRecord) -> PausedSource:
    assert record.paused_at is not None
    return PausedSource(
        source=record.source,
        until=record.paused_until,
        reason=record.pause_reason,
        paused_by=record.paused_by,
        since=record.paused_at,
        waiting=record.waiting,
    )
