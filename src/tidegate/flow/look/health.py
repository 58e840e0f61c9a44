"""Health: does all work make progress? One snapshot for people, and the shared gauges for Prometheus.

Both are read from Postgres, so every process gives the same answer; the verdict is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Literal

import msgspec

from tidegate.errors import Unavailable
from tidegate.flow.keep import secrets
from tidegate.flow.look import backlog
from tidegate.flow.look.history import HistoryHealth, history_health, history_notices, overdue_seconds
from tidegate.flow.look.verdict import RUNBOOK, Cause, HealthFacts, verdict
from tidegate.flow.shared_read import SharedRead
from tidegate.model.backlog import NEARLY_FULL
from tidegate.model.health import HEALTH, HealthPolicy, Notice
from tidegate.model.retention import KEEP_ALL, Retention
from tidegate.store import (
    backlogs,
    health,
    locks,
    processes,
    retention,
    runs,
    schedules,
    slot_lines,
    source_backlogs,
    troubled_budgets,
    workers,
)
from tidegate.store.db import Connection, Database
from tidegate.store.health import (
    DeadLetterCount,
    Group,
    LimitHealth,
    PausedSource,
    PausedTrigger,
    QueueDepth,
    RetrySummary,
    SourceBreaker,
    Totals,
    TriggerBreaker,
    TriggerMetrics,
)
from tidegate.store.sources import SourceMetrics
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger
from tidegate.telemetry.metrics import SharedState

GAUGES_SECONDS = 1.0
# A workflow is reported as unserved when a run has been due for this long and no live worker has its code.
UNSERVED_MS = 5000
# A tick is reported as overdue after this long, unless `due_age_degraded_ms` says otherwise.
OVERDUE_TICK_MS = 30_000
# A budget for which a delivery has waited this long has a backlog that an operator should know of.
OLD_BACKLOG = timedelta(hours=1)
# So is a budget that a run has closed for everyone, if that lasts for longer than this.
CLOSED_LONG = timedelta(minutes=10)
# The maximum length of each list in a snapshot: every open console reads one every two seconds.
SHOWN = 100

_log = logger("health")


class SourceHealth(msgspec.Struct, frozen=True, kw_only=True):
    """The running totals of a source; lag is the time from an event's receipt until the gate admits it."""

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


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the whole cluster at one moment of the database's clock.

    Each list has at most 100 entries; `…_total` is the full count. `sources`, `triggers` and `rate_limits` begin with
    the last changed, pauses and breakers with the oldest.
    """

    status: Literal["ok", "degraded", "critical"]
    causes: list[Cause]
    generated_at: datetime
    last_processed_event_at: datetime | None
    queues: dict[str, QueueDepth]
    totals: Totals
    sources: list[SourceHealth]
    sources_total: int
    triggers: list[TriggerMetrics]
    triggers_total: int
    rate_limits: list[LimitHealth]
    rate_limits_total: int
    paused_sources: list[PausedSource]
    paused_sources_total: int
    paused_triggers: list[PausedTrigger]
    paused_triggers_total: int
    source_breakers: list[SourceBreaker]
    source_breakers_total: int
    trigger_breakers: list[TriggerBreaker]
    trigger_breakers_total: int
    retries: dict[str, RetrySummary]
    dead_letters: DeadLetterCount
    history: HistoryHealth | None = None
    warnings: list[Notice] = []


async def snapshot(connection: Connection, policy: HealthPolicy = HEALTH, runbook: str = RUNBOOK) -> Snapshot:
    """The state of the cluster, and the verdict."""
    limits = await health.limits(connection, SHOWN)
    found = await facts(connection, policy, of_sources=[limit.source for limit in limits])
    causes = verdict(found, policy, runbook)
    letters = found.dead_letters.values()
    counts = found.counts
    return Snapshot(
        status=status_of(causes),
        causes=causes,
        generated_at=found.now,
        last_processed_event_at=found.last_processed,
        queues=found.queues,
        totals=await health.totals(connection, found.depths),
        sources=[_source(totals) for totals in await health.source_metrics(connection, SHOWN)],
        sources_total=counts.sources,
        triggers=await health.trigger_metrics(connection, SHOWN),
        triggers_total=counts.triggers,
        rate_limits=[_limit(limit, found.waiting.get(limit.source)) for limit in limits],
        rate_limits_total=counts.rate_limits,
        paused_sources=[_paused(source, found.waiting.get(source.source)) for source in found.paused_sources],
        paused_sources_total=counts.paused_sources,
        paused_triggers=found.paused_triggers,
        paused_triggers_total=counts.paused_triggers,
        source_breakers=found.source_breakers,
        source_breakers_total=counts.source_breakers,
        trigger_breakers=found.trigger_breakers,
        trigger_breakers_total=counts.trigger_breakers,
        retries=found.retries,
        dead_letters=DeadLetterCount(
            total=sum(letter.total for letter in letters), last_24h=sum(letter.last_24h for letter in letters)
        ),
    )


async def facts(connection: Connection, policy: HealthPolicy, of_sources: Sequence[str] = ()) -> HealthFacts:
    """The input of the verdict and the gauges. Every statement reads only waiting or claimed rows, nothing finished,
    and its result does not grow with the number of sources; `of_sources` are sources whose waiting events are counted
    too."""
    now = await locks.now(connection)
    late = now - timedelta(milliseconds=policy.overdue_ms)
    paused_sources = await health.paused_sources(connection, now, SHOWN)
    names = {*of_sources, *(paused.source for paused in paused_sources)}
    groups, waiting = await health.waiting(connection, now, late, names)
    depths = await health.depths(connection, now, policy.worker_degraded_ms)
    recent = now - timedelta(milliseconds=policy.dead_letters_window_ms)
    return HealthFacts(
        now=now,
        last_processed=await health.last_processed(connection),
        counts=await health.counts(connection, now),
        paused_sources=paused_sources,
        paused_triggers=await health.paused_triggers(connection, SHOWN),
        source_breakers=await health.source_breakers(connection, SHOWN),
        trigger_breakers=await health.trigger_breakers(connection, SHOWN),
        waiting=waiting,
        depths=depths,
        queues=backlog.queues(groups, depths, now),
        retries=backlog.retries(groups),
        dead_letters=await health.dead_letters(connection, now, recent),
        workers=await health.workers(connection, policy.worker_degraded_ms),
        expired_claims=await health.expired_claims(connection),
        unserved=await workers.unserved(connection, policy.worker_degraded_ms, UNSERVED_MS),
        overdue_schedules=await schedules.list_overdue(
            connection, policy.due_age_degraded_ms or OVERDUE_TICK_MS, limit=SHOWN, alive_ms=policy.worker_degraded_ms
        ),
        version_held=await runs.list_version_held(connection),
        budgets=await troubled_budgets.troubled(connection, now - OLD_BACKLOG, SHOWN),
        closed_budgets=await troubled_budgets.closed_long(connection, now + CLOSED_LONG, SHOWN),
        filling_sources=await source_backlogs.filling(connection, NEARLY_FULL, SHOWN),
        filling_triggers=await backlogs.filling(connection, NEARLY_FULL, SHOWN),
        slot_backlog=await slot_lines.backlog(connection, now - OLD_BACKLOG, SHOWN),
    )


class Snapshots:
    """The snapshot for any number of callers: one read at a time, and callers during a read share the next one.

    So no caller gets a state from before its call, and any number of callers costs at most two reads.
    """

    def __init__(
        self,
        database: Database,
        policy: HealthPolicy = HEALTH,
        runbook: str = RUNBOOK,
        warnings: Sequence[Notice] = (),
        kept: Retention = KEEP_ALL,
    ) -> None:
        self._database = database
        self._retention = kept
        self._policy = policy
        self._runbook = runbook
        self._warnings = list(warnings)
        self._shared = SharedRead(self._read)

    async def read(self) -> Snapshot:
        """The state after this call."""
        return await self._shared.get(max_age_seconds=0)

    async def _read(self, _: Snapshot | None) -> Snapshot:
        async with self._database.transaction() as connection:
            found = await snapshot(connection, self._policy, self._runbook)
            stored = await secrets.notices(connection, self._database.keys)
            days = await retention.span(connection)
            keeping = await processes.retentions(connection)
        history = history_health(self._retention, keeping, days)
        warnings = [*self._warnings, *stored, *history_notices(keeping, history, found.generated_at)]
        return msgspec.structs.replace(found, history=history, warnings=warnings)


class Exposition:
    """The metrics of this process as text. The shared gauges are read at most once every GAUGES_SECONDS."""

    def __init__(self, database: Database, policy: HealthPolicy = HEALTH) -> None:
        self._database = database
        self._policy = policy
        self._shared = SharedRead(self._read, joins_slow_reads=True)

    async def text(self) -> bytes:
        """The exposition text; without the shared gauges while the database is down."""
        await self._shared.get(GAUGES_SECONDS)
        return metrics.text()

    async def _read(self, _: None) -> None:
        try:
            async with self._database.connection(wait_seconds=2) as connection:
                metrics.show(await shared_state(connection, self._policy))
        except Unavailable as exc:
            _log.warning("health.gauges_unavailable", error=exc)
            metrics.show(None)


async def shared_state(connection: Connection, policy: HealthPolicy = HEALTH) -> SharedState:
    """The values of the shared gauges."""
    found = await facts(connection, policy)
    overdue = overdue_seconds(await processes.retentions(connection), await retention.span(connection), found.now)
    deferred = {("events", reason): 0 for reason in ("rate_limit", "paused", "breaker_open")}
    deferred |= {
        ("deliveries", r): 0 for r in ("throttle", "concurrency", "paused", "breaker_open", "source_paused", "budget")
    }
    deferred["steps", "budget"] = 0
    deferred |= {("runs", reason): count for reason, count in (await slot_lines.count(connection)).items()}
    for kind, summary in found.retries.items():
        deferred |= {(kind, reason): count for reason, count in summary.by_reason.items()}
    letters = dict.fromkeys(("event", "delivery", "step", "run"), 0)
    letters |= {kind: count.total for kind, count in found.dead_letters.items()}
    expired = {"runs": 0} | {claims.kind: claims.total for claims in found.expired_claims}
    return SharedState(
        paused_sources=found.counts.paused_sources,
        paused_triggers=found.counts.paused_triggers,
        paused_budgets=sum(one.is_paused(found.now) for one in found.budgets),
        open_breakers={"source": found.counts.source_breakers, "trigger": found.counts.trigger_breakers},
        workers_alive=found.workers.alive,
        unserved_workflows=len(found.unserved),
        overdue_schedules=len(found.overdue_schedules),
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
        history_overdue_seconds=overdue,
        last_processed=found.last_processed.timestamp() if found.last_processed else None,
        filling_backlogs={"source": len(found.filling_sources), "trigger": len(found.filling_triggers)},
    )


def status_of(causes: Sequence[Cause]) -> Literal["ok", "degraded", "critical"]:
    """The highest severity of the causes; ok without causes."""
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


def _limit(limit: LimitHealth, waiting: Group | None) -> LimitHealth:
    if waiting is None:
        return limit
    return msgspec.structs.replace(limit, waiting=waiting.total, next_attempt_at=waiting.next_attempt_at)


def _paused(source: PausedSource, waiting: Group | None) -> PausedSource:
    return source if waiting is None else msgspec.structs.replace(source, waiting=waiting.total)
