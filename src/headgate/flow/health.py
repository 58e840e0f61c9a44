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
from headgate.store import health, sources, workers
from headgate.store.db import Connection, Database
from headgate.store.health import DeadLetterCount, OpenBreaker, PausedTrigger, QueueDepth, RetrySummary, TriggerMetrics
from headgate.store.sources import SourceMetrics, SourceRecord
from headgate.store.workers import Unserved
from headgate.telemetry import metrics
from headgate.telemetry.logs import logger
from headgate.telemetry.metrics import SharedState

# A slot is kept within a second by a worker that is alive; later than this, something is wrong.
OVERDUE_MS = 5000
# New events are decided within milliseconds; one that waits this long has no worker.
STALLED_SECONDS = 30.0
GAUGES_SECONDS = 1.0

RUNBOOK = "docs/sources.md"
TRIGGERS = "docs/triggers.md"
OPERATE = "docs/triggers-operate.md"
WORKFLOWS = "docs/workflows.md"
# A worker says every third of a lease that it is alive.
ALIVE_MS = 60_000
# A run that has been due for so long with nobody to run it is worth a word.
UNSERVED_MS = 5000

_log = logger("health")


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """One reason why the status is not ok: what, about whom, since when, and where to read on."""

    code: str
    severity: Literal["degraded", "critical"]
    subject: str
    message: str
    since: datetime | None
    runbook: str


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
    sources: list[SourceHealth]
    triggers: list[TriggerMetrics]
    rate_limits: list[LimitHealth]
    paused_sources: list[PausedSource]
    paused_triggers: list[PausedTrigger]
    retries: dict[str, RetrySummary]
    dead_letters: DeadLetterCount


async def snapshot(connection: Connection) -> Snapshot:
    """The state of everything, and the verdict."""
    now = await sources.now(connection)
    records = await sources.list_all(connection)
    queues = await health.queues(connection)
    retries = await health.retries(connection, OVERDUE_MS)
    letters = (await health.dead_letters(connection)).values()
    triggers = await health.paused_triggers(connection)
    breakers = await health.open_breakers(connection)
    causes = verdict(now, records, triggers, queues, retries, breakers)
    causes += [_unserved(one) for one in await workers.unserved(connection, ALIVE_MS, UNSERVED_MS)]
    return Snapshot(
        status=_status(causes),
        causes=causes,
        generated_at=now,
        last_processed_event_at=(await health.overview(connection)).last_processed_event_at,
        queues=queues,
        sources=[_source(totals) for totals in await sources.list_metrics(connection)],
        triggers=await health.trigger_metrics(connection),
        rate_limits=[limit for record in records if (limit := _limit(record))],
        paused_sources=[_paused(record) for record in records if is_paused(record, now)],
        paused_triggers=triggers,
        retries=retries,
        dead_letters=DeadLetterCount(
            total=sum(letter.total for letter in letters), last_24h=sum(letter.last_24h for letter in letters)
        ),
    )


def is_paused(record: SourceRecord, now: datetime) -> bool:
    """Whether a person's pause is in force."""
    return record.paused_at is not None and (record.paused_until is None or record.paused_until > now)


def verdict(
    now: datetime,
    records: Sequence[SourceRecord],
    triggers: Sequence[PausedTrigger],
    queues: dict[str, QueueDepth],
    retries: dict[str, RetrySummary],
    breakers: Sequence[OpenBreaker] = (),
) -> list[Cause]:
    """Everything that is not as it should be."""
    causes = []
    for record in records:
        if is_paused(record, now):
            text = f"paused{_by(record.paused_by)}{_until(record.paused_until)}: {_reason(record.pause_reason)}"
            causes.append(_cause("source_paused", record.source, text, record.paused_at, "pauses"))
        if record.breaker_state != "closed":
            over = record.breaker_until is not None and record.breaker_until <= now
            text = f"the breaker is open after {record.breaker_reason}"
            text += "; the next event is the probe" if over else _until(record.breaker_until)
            causes.append(_cause("source_breaker_open", record.source, text, None, "the-breaker"))
    for trigger in triggers:
        text = f"paused{_by(trigger.paused_by)}{_until(trigger.until)}: {_reason(trigger.reason)}"
        causes.append(
            _cause("trigger_paused", str(trigger.trigger_id), text, trigger.since, "pause-and-resume", OPERATE)
        )
    for breaker in breakers:
        over = breaker.until is not None and breaker.until <= now
        text = f"{breaker.workflow}/{breaker.name}: the breaker is {_state(breaker)} after {breaker.reason}"
        text += "" if breaker.probe_run_id else "; the next delivery is the trial" if over else _until(breaker.until)
        causes.append(_cause("trigger_breaker_open", str(breaker.trigger_id), text, None, "the-breaker", TRIGGERS))
    for kind, summary in retries.items():
        if summary.overdue:
            text = f"{summary.overdue} of {summary.total} waiting {kind} should have gone on more than 5 s ago"
            causes.append(_cause("retries_overdue", kind, text, summary.next_attempt_at, "overdue"))
    oldest = queues["ingress"].oldest_due_age_seconds if "ingress" in queues else 0
    if oldest > STALLED_SECONDS:
        text = f"the oldest event has been due for {oldest:.0f} s; is a worker running?"
        causes.append(_cause("ingress_stalled", "ingress", text, None, "overdue"))
    return causes


class Exposition:
    """The metrics of this process as text. The shared gauges are read at most once a second, whoever asks."""

    def __init__(self, database: Database) -> None:
        self._database = database
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
                metrics.show(await shared_state(connection))
        except Unavailable as exc:
            _log.warning("health.gauges_unavailable", error=exc)
            metrics.show(None)


async def shared_state(connection: Connection) -> SharedState:
    """What the gauges show."""
    overview = await health.overview(connection)
    queues = await health.queues(connection)
    deferred = {("events", reason): 0 for reason in ("rate_limit", "paused", "breaker_open")}
    deferred |= {("deliveries", r): 0 for r in ("throttle", "concurrency", "paused", "breaker_open", "source_paused")}
    for kind, summary in (await health.retries(connection, OVERDUE_MS)).items():
        deferred |= {(kind, reason): count for reason, count in summary.by_reason.items()}
    letters = dict.fromkeys(("event", "delivery", "step", "run"), 0)
    letters |= {kind: count.total for kind, count in (await health.dead_letters(connection)).items()}
    processed = overview.last_processed_event_at
    return SharedState(
        paused_sources=overview.paused_sources,
        paused_triggers=overview.paused_triggers,
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


def _cause(code: str, subject: str, message: str, since: datetime | None, section: str, page: str = RUNBOOK) -> Cause:
    return Cause(
        code=code, severity="degraded", subject=subject, message=message, since=since, runbook=f"{page}#{section}"
    )


def _unserved(one: Unserved) -> Cause:
    text = f"{one.waiting} runs of {one.workflow} are due and no worker that is alive has its code"
    return _cause("workflow_unserved", one.workflow, text, one.since, "workers", WORKFLOWS)


def _state(breaker: OpenBreaker) -> str:
    return f"half open (run {breaker.probe_run_id} is the trial)" if breaker.probe_run_id else "open"


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


def _by(actor: str | None) -> str:
    return f" by {actor}" if actor else ""


def _until(until: datetime | None) -> str:
    return f" until {until:%Y-%m-%d %H:%M:%S} UTC" if until else " until it is resumed"


def _reason(reason: str | None) -> str:
    return reason or "no reason given"
