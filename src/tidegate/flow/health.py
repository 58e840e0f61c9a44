"""Health: is everything that should move moving? One snapshot for people, and the gauges for a scrape.

Both are read from Postgres, so every process gives the same answer; the verdict is pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

from tidegate.clock import monotonic
from tidegate.errors import Unavailable
from tidegate.flow import backlog
from tidegate.flow.backlog import Held, judge
from tidegate.flow.notices import Notice
from tidegate.flow.verdict import RUNBOOK, Cause, Facts, is_paused, verdict
from tidegate.model.health import HEALTH, HealthPolicy
from tidegate.store import health, sources, workers
from tidegate.store.db import Connection, Database
from tidegate.store.health import (
    DeadLetterCount,
    HeldEvents,
    PausedTrigger,
    QueueDepth,
    RetrySummary,
    SourceState,
    Totals,
    TriggerMetrics,
)
from tidegate.store.sources import SourceMetrics
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger
from tidegate.telemetry.metrics import SharedState

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
    warnings: list[Notice] = []


async def snapshot(connection: Connection, policy: HealthPolicy = HEALTH, runbook: str = RUNBOOK) -> Snapshot:
    """The state of everything, and the verdict."""
    found = await facts(connection, policy)
    causes = verdict(found, policy, runbook)
    letters = found.dead_letters.values()
    waiting = _waiting(found.held_events)
    return Snapshot(
        status=_status(causes),
        causes=causes,
        generated_at=found.now,
        last_processed_event_at=found.last_processed,
        queues=found.queues,
        totals=await health.totals(connection, found.depths),
        sources=[_source(totals) for totals in await sources.list_metrics(connection)],
        triggers=await health.trigger_metrics(connection),
        rate_limits=[limit for state in found.sources if (limit := _limit(state, waiting))],
        paused_sources=[_paused(state, waiting) for state in found.sources if is_paused(state, found.now)],
        paused_triggers=found.paused_triggers,
        retries=found.retries,
        dead_letters=DeadLetterCount(
            total=sum(letter.total for letter in letters), last_24h=sum(letter.last_24h for letter in letters)
        ),
    )


async def facts(connection: Connection, policy: HealthPolicy) -> Facts:
    """What the verdict and the gauges are made of. Every statement reads what waits or is claimed, nothing finished."""
    now = await sources.now(connection)
    late = now - timedelta(milliseconds=policy.overdue_ms)
    held = Held(await health.held_sources(connection, now), await health.held_triggers(connection, now))
    held_events = await health.held_events(connection, now, late)
    held_deliveries = await health.held_deliveries(connection, now, late)
    groups = judge(held_events, held_deliveries, await health.waiting_steps(connection, now, late), held)
    depths = await health.depths(connection, now)
    recent = now - timedelta(milliseconds=policy.dead_letters_window_ms)
    return Facts(
        now=now,
        last_processed=await health.last_processed(connection),
        sources=await health.sources(connection),
        held_events=held_events,
        paused_triggers=await health.paused_triggers(connection),
        trigger_breakers=await health.open_breakers(connection),
        depths=depths,
        queues=backlog.queues(groups, depths, now),
        retries=backlog.retries(groups),
        dead_letters=await health.dead_letters(connection, now, recent),
        workers=await health.workers(connection, policy.worker_degraded_ms),
        expired_claims=await health.expired_claims(connection),
        unserved=await workers.unserved(connection, policy.worker_degraded_ms, UNSERVED_MS),
    )


class Snapshots:
    """The snapshot for any number of callers: one read at a time, and who asks during one shares the next.

    So nobody gets a state from before its question, and a crowd costs the database no more than two.
    """

    def __init__(
        self,
        database: Database,
        policy: HealthPolicy = HEALTH,
        runbook: str = RUNBOOK,
        warnings: Sequence[Notice] = (),
    ) -> None:
        self._database = database
        self._policy = policy
        self._runbook = runbook
        self._warnings = list(warnings)
        self._one_at_a_time = asyncio.Lock()
        self._next: asyncio.Task[Snapshot] | None = None

    async def read(self) -> Snapshot:
        """The state after this call."""
        if self._next is None:
            self._next = asyncio.create_task(self._read(), name="health snapshot")
        return await asyncio.shield(self._next)

    async def _read(self) -> Snapshot:
        async with self._one_at_a_time:
            self._next = None
            async with self._database.transaction() as connection:
                found = await snapshot(connection, self._policy, self._runbook)
            return msgspec.structs.replace(found, warnings=self._warnings)


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
    found = await facts(connection, policy)
    deferred = {("events", reason): 0 for reason in ("rate_limit", "paused", "breaker_open")}
    deferred |= {("deliveries", r): 0 for r in ("throttle", "concurrency", "paused", "breaker_open", "source_paused")}
    for kind, summary in found.retries.items():
        deferred |= {(kind, reason): count for reason, count in summary.by_reason.items()}
    letters = dict.fromkeys(("event", "delivery", "step", "run"), 0)
    letters |= {kind: count.total for kind, count in found.dead_letters.items()}
    expired = dict.fromkeys(("events", "deliveries", "steps", "runs"), 0)
    expired |= {claims.kind: claims.total for claims in found.expired_claims}
    return SharedState(
        paused_sources=sum(is_paused(state, found.now) for state in found.sources),
        paused_triggers=len(found.paused_triggers),
        open_breakers={
            "source": sum(state.breaker_state != "closed" for state in found.sources),
            "trigger": len(found.trigger_breakers),
        },
        workers_alive=found.workers.alive,
        unserved_workflows=len(found.unserved),
        overdue_retries={kind: summary.overdue for kind, summary in found.retries.items()},
        expired_claims=expired,
        deferred=deferred,
        queue_depth={
            (name, state): getattr(depth, state)
            for name, depth in found.queues.items()
            for state in ("ready", "delayed", "active")
        },
        oldest_due_age_seconds={name: depth.oldest_due_age_seconds for name, depth in found.queues.items()},
        dead_letters=letters,
        last_processed=found.last_processed.timestamp() if found.last_processed else None,
    )


class _Waiting(NamedTuple):
    events: int = 0
    next_attempt_at: datetime | None = None


def _waiting(groups: Sequence[HeldEvents]) -> dict[str, _Waiting]:
    """How many events of each source wait, and the next of them."""
    found: dict[str, _Waiting] = {}
    for group in groups:
        before = found.get(group.source, _Waiting())
        earliest = min(before.next_attempt_at or group.next_attempt_at, group.next_attempt_at)
        found[group.source] = _Waiting(before.events + group.total, earliest)
    return found


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


def _limit(record: SourceState, waiting: Mapping[str, _Waiting]) -> LimitHealth | None:
    if record.rate_limit is None or record.interval_ms is None:
        return None
    held = waiting.get(record.source, _Waiting())
    return LimitHealth(
        source=record.source,
        limit=record.rate_limit,
        interval_ms=record.interval_ms,
        pause_ms=record.pause_ms or 0,
        set_by=record.limit_set_by,
        throttled_until=record.throttled_until,
        waiting=held.events,
        next_attempt_at=held.next_attempt_at,
    )


def _paused(record: SourceState, waiting: Mapping[str, _Waiting]) -> PausedSource:
    assert record.paused_at is not None
    return PausedSource(
        source=record.source,
        until=record.paused_until,
        reason=record.pause_reason,
        paused_by=record.paused_by,
        since=record.paused_at,
        waiting=waiting.get(record.source, _Waiting()).events,
    )
