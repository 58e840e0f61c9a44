"""Prometheus metrics: each name is declared once.

Counters and histograms describe this process. Gauges describe the state that all processes share: they are read from
Postgres before a scrape (`flow.look.health`), so every process reports the same values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    generate_latest,
)

from tidegate.telemetry.distribution import Distribution

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_SOURCES = 200
MAX_TRIGGERS = 200
MAX_WORKFLOWS = 200
MAX_BUDGETS = 200
OTHER = "other"
REGISTRY = CollectorRegistry()

EVENTS_RECEIVED = Counter("tidegate_events_received", "Events accepted", ["source"], registry=REGISTRY)
SOURCE_DECISIONS = Counter(
    "tidegate_source_decisions", "Decisions of the gate: allowed, throttled, paused", ["source", "decision"],
    registry=REGISTRY,
)  # fmt: skip
INGRESS_LAG = Distribution(
    "tidegate_event_ingress_lag_seconds", "Seconds from the receipt of an event until the gate admits it", "source",
    registry=REGISTRY,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300, 900, 3600, 21_600, 86_400),
)  # fmt: skip
EVENT_RETRIES = Counter(
    "tidegate_event_retries", "Retries of held events: scheduled, due, completed, rescheduled, cancelled, exhausted",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
DELIVERY_RETRIES = Counter(
    "tidegate_delivery_retries",
    "Retries of deliveries: scheduled, due, completed (launched), skipped, failed, rescheduled, cancelled, exhausted",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
TRIGGER_EVALUATIONS = Counter(
    "tidegate_trigger_evaluations",
    "Decisions of triggers: filtered, matched, launched, throttled, skipped, failed, paused", ["trigger", "status"],
    registry=REGISTRY,
)  # fmt: skip
STEP_RETRIES = Counter(
    "tidegate_step_retries", "Retries of steps: scheduled, due, completed, rescheduled, cancelled, exhausted",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
RUNS = Counter("tidegate_runs", "Ended runs: succeeded, failed, cancelled", ["workflow", "status"],
               registry=REGISTRY)  # fmt: skip
EXECUTIONS_REFUSED = Counter(
    "tidegate_executions_refused", "Claims refused because this worker had already started them: a bug in Tidegate",
    registry=REGISTRY,
)  # fmt: skip
RUN_DURATION = Distribution(
    "tidegate_run_duration_seconds", "Seconds from the first start of a run to its end", "workflow", registry=REGISTRY,
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 15, 60, 300, 900, 3600, 21_600, 86_400),
)  # fmt: skip
RECONCILE_REQUEUED = Counter(
    "tidegate_reconcile_requeued",
    "Wake-ups recreated and claims released by reconcile, by kind",
    ["kind"],
    registry=REGISTRY,
)
WEBHOOKS = Counter(
    "tidegate_webhooks", "Webhook requests: accepted, duplicate, unsigned, invalid, unavailable",
    ["source", "outcome"], registry=REGISTRY,
)  # fmt: skip
HTTP_REQUESTS = Counter(
    "tidegate_http_requests", "API requests, by route and status code", ["route", "code"],
    registry=REGISTRY,
)  # fmt: skip
LOOP_FAILURES = Counter(
    "tidegate_loop_failures", "Failed iterations of a worker's loop, such as reconcile", ["loop"], registry=REGISTRY
)
PAUSED_SOURCES = Gauge("tidegate_paused_sources", "Sources paused by an operator", registry=REGISTRY)
PAUSED_TRIGGERS = Gauge("tidegate_paused_triggers", "Paused triggers", registry=REGISTRY)
PAUSED_BUDGETS = Gauge("tidegate_paused_budgets", "Paused budgets", registry=REGISTRY)
BUDGET_HELD = Counter(
    "tidegate_budget_held",
    "Deliveries and steps that a budget held, by what it lacked: rate, concurrency, line, closed, paused",
    ["budget", "why"], registry=REGISTRY,
)  # fmt: skip
LEFT_BACKLOG = Counter(
    "tidegate_backlog_left",
    "Events and deliveries that a backlog policy kept out or took out, by kind (source, trigger), name and outcome",
    ["kind", "name", "outcome"], registry=REGISTRY,
)  # fmt: skip
FILLING_BACKLOGS = Gauge(
    "tidegate_filling_backlogs",
    "Backlogs that are filled to 80 % of what may wait, or more",
    ["kind"],
    registry=REGISTRY,
)
DEFERRED = Gauge("tidegate_deferred", "Waiting items, by kind and reason", ["kind", "reason"], registry=REGISTRY)
QUEUE_DEPTH = Gauge(
    "tidegate_queue_depth", "Work by queue and state: ready, delayed, active", ["queue", "state"], registry=REGISTRY
)
OLDEST_DUE_AGE = Gauge(
    "tidegate_oldest_due_age_seconds",
    "Age of the oldest due work that may run now",
    ["queue"],
    registry=REGISTRY,
)
DEAD_LETTERS = Gauge("tidegate_dead_letters", "Dead letters that have not been replayed, by kind", ["kind"],
                     registry=REGISTRY)  # fmt: skip
OPEN_BREAKERS = Gauge(
    "tidegate_open_breakers", "Breakers that are not closed, by kind: source, trigger", ["kind"], registry=REGISTRY
)
WORKERS_ALIVE = Gauge("tidegate_workers_alive", "Workers with a recent heartbeat", registry=REGISTRY)
SCHEDULE_TICKS = Counter(
    "tidegate_schedule_ticks_total",
    "Ticks of schedules: published, repeated (had an event already), missed (no worker ran), paused",
    ["outcome"], registry=REGISTRY,
)  # fmt: skip
OVERDUE_SCHEDULES = Gauge(
    "tidegate_overdue_schedules", "Schedules that are not paused and whose tick is overdue", registry=REGISTRY
)
UNSERVED_WORKFLOWS = Gauge(
    "tidegate_unserved_workflows", "Workflows with due runs that no live worker can execute", registry=REGISTRY
)
OVERDUE_RETRIES = Gauge(
    "tidegate_overdue_retries", "Waiting items that are not held and are past their due time", ["kind"],
    registry=REGISTRY,
)  # fmt: skip
EXPIRED_CLAIMS = Gauge(
    "tidegate_expired_claims", "Claims with an expired lease that have not been released", ["kind"], registry=REGISTRY
)
HISTORY_OVERDUE = Gauge(
    "tidegate_history_overdue_seconds",
    "Seconds since the oldest day of history should have been removed by the retention; 0: nothing is overdue",
    registry=REGISTRY,
)
LAST_PROCESSED = Gauge(
    "tidegate_last_processed_event_timestamp_seconds",
    "Time of the gate's last decision about an event",
    registry=REGISTRY,
)
DATABASE_UP = Gauge("tidegate_database_up", "1 if the shared state could be read for this scrape", registry=REGISTRY)

for _outcome in ("scheduled", "due", "completed", "rescheduled", "cancelled", "exhausted"):
    EVENT_RETRIES.labels(_outcome)
    DELIVERY_RETRIES.labels(_outcome)
    STEP_RETRIES.labels(_outcome)
for _outcome in ("skipped", "failed"):
    DELIVERY_RETRIES.labels(_outcome)
for _kind in ("events", "deliveries", "steps", "runs"):
    RECONCILE_REQUEUED.labels(_kind)
for _loop in ("reconcile", "requeue"):
    LOOP_FAILURES.labels(_loop)

_DECISIONS = {"rate_limit": "throttled", "paused": "paused", "breaker_open": "paused"}
_sources: set[str] = set()
_triggers: set[str] = set()
_workflows: set[str] = set()
_budgets: set[str] = set()


class SharedState(NamedTuple):
    """The values of the gauges."""

    paused_sources: int
    paused_triggers: int
    paused_budgets: int
    open_breakers: Mapping[str, int]
    workers_alive: int
    unserved_workflows: int
    overdue_schedules: int
    overdue_retries: Mapping[str, int]
    expired_claims: Mapping[str, int]
    deferred: Mapping[tuple[str, str], int]
    queue_depth: Mapping[tuple[str, str], int]
    oldest_due_age_seconds: Mapping[str, float]
    dead_letters: Mapping[str, int]
    history_overdue_seconds: int
    last_processed: float | None
    filling_backlogs: Mapping[str, int]


def source_label(source: str) -> str:
    """The label of a source; after the first `MAX_SOURCES` it is `other`, so that producers cannot grow the metrics."""
    return _capped(source, _sources, MAX_SOURCES)


def trigger_label(trigger: str) -> str:
    """The label of a trigger; after the first `MAX_TRIGGERS` it is `other`."""
    return _capped(trigger, _triggers, MAX_TRIGGERS)


def workflow_label(workflow: str) -> str:
    """The label of a workflow; after the first `MAX_WORKFLOWS` it is `other`."""
    return _capped(workflow, _workflows, MAX_WORKFLOWS)


def _capped(name: str, known: set[str], limit: int) -> str:
    if name in known:
        return name
    if len(known) < limit:
        known.add(name)
        return name
    return OTHER


def received(counts: Mapping[str, int]) -> None:
    """Count accepted events, by source."""
    for source, count in counts.items():
        EVENTS_RECEIVED.labels(source_label(source)).inc(count)


def ticked(outcome: str, count: int) -> None:
    """Count ticks of schedules."""
    SCHEDULE_TICKS.labels(outcome).inc(count)


def allowed(lags: Mapping[str, Sequence[float]]) -> None:
    """Count events that the gate admitted: by source, the seconds since their receipt."""
    for source, found in lags.items():
        label = source_label(source)
        SOURCE_DECISIONS.labels(label, "allowed").inc(len(found))
        INGRESS_LAG.observe(label, found)


def refused(holds: Iterable[tuple[str, str | None]]) -> None:
    """Count events that the gate holds, by source and reason. An open breaker counts as paused."""
    for source, reason in holds:
        SOURCE_DECISIONS.labels(source_label(source), _DECISIONS.get(reason or "", "throttled")).inc()


_runs = cache(RUNS.labels)


def ran(workflow: str, status: str, seconds: float | None = None) -> None:
    """Count an ended run and its duration since its first start; None: it never started."""
    label = workflow_label(workflow)
    _runs(label, status).inc()
    if seconds is not None:
        RUN_DURATION.observe(label, (max(0.0, seconds),))


def evaluated(trigger: str, status: str, count: int = 1) -> None:
    """Count a trigger's decisions about events."""
    TRIGGER_EVALUATIONS.labels(trigger_label(trigger), status).inc(count)


def held_by_budget(budget: str, why: str) -> None:
    """Count a delivery or step that a budget holds; after the first `MAX_BUDGETS` the label is `other`."""
    BUDGET_HELD.labels(_capped(budget, _budgets, MAX_BUDGETS), why).inc()


def left_backlog(kind: str, name: str, outcome: str, count: int = 1) -> None:
    """Count what a backlog policy did: refused, dropped, dead_lettered, skipped, superseded, too_old."""
    LEFT_BACKLOG.labels(kind, source_label(name) if kind == "source" else trigger_label(name), outcome).inc(count)


_http_requests = cache(HTTP_REQUESTS.labels)


def answered(route: str, code: int) -> None:
    """Count an answered request. The route is the pattern, never the path, which clients choose."""
    _http_requests(route, str(code)).inc()


def webhook(source: str | None, outcome: str) -> None:
    """Count a webhook request and its outcome. Source None: it has no webhook, so clients choose the name."""
    WEBHOOKS.labels(OTHER if source is None else source_label(source), outcome).inc()


def show(state: SharedState | None) -> None:
    """Set the gauges; None (the database is unavailable) removes them instead of keeping old values."""
    by_label = (DEFERRED, QUEUE_DEPTH, OLDEST_DUE_AGE, DEAD_LETTERS, OPEN_BREAKERS, OVERDUE_RETRIES, EXPIRED_CLAIMS)
    for gauge in (*by_label, FILLING_BACKLOGS):
        gauge.clear()
    DATABASE_UP.set(state is not None)
    unknown = float("nan")
    PAUSED_SOURCES.set(state.paused_sources if state else unknown)
    PAUSED_TRIGGERS.set(state.paused_triggers if state else unknown)
    PAUSED_BUDGETS.set(state.paused_budgets if state else unknown)
    WORKERS_ALIVE.set(state.workers_alive if state else unknown)
    UNSERVED_WORKFLOWS.set(state.unserved_workflows if state else unknown)
    HISTORY_OVERDUE.set(state.history_overdue_seconds if state else unknown)
    OVERDUE_SCHEDULES.set(state.overdue_schedules if state else unknown)
    LAST_PROCESSED.set(state.last_processed if state and state.last_processed is not None else unknown)
    if state is None:
        return
    for (kind, reason), count in state.deferred.items():
        DEFERRED.labels(kind, reason).set(count)
    for (queue, depth), count in state.queue_depth.items():
        QUEUE_DEPTH.labels(queue, depth).set(count)
    for queue, seconds in state.oldest_due_age_seconds.items():
        OLDEST_DUE_AGE.labels(queue).set(seconds)
    for gauge, counts in (
        (DEAD_LETTERS, state.dead_letters),
        (OPEN_BREAKERS, state.open_breakers),
        (OVERDUE_RETRIES, state.overdue_retries),
        (EXPIRED_CLAIMS, state.expired_claims),
        (FILLING_BACKLOGS, state.filling_backlogs),
    ):
        for kind, count in counts.items():
            gauge.labels(kind).set(count)


def text() -> bytes:
    """The exposition text of this process."""
    return generate_latest(REGISTRY)
