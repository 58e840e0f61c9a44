"""Prometheus metrics: every name declared once."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

REGISTRY = CollectorRegistry()

EVENTS_RECEIVED = Counter("headgate_events_received", "Events accepted", ["source"], registry=REGISTRY)
SOURCE_DECISIONS = Counter(
    "headgate_source_decisions", "What the gate said: allowed, throttled, paused", ["source", "decision"],
    registry=REGISTRY,
)  # fmt: skip
EVENT_RETRIES = Counter(
    "headgate_event_retries", "Held events: scheduled, due, completed, rescheduled, cancelled, exhausted", ["outcome"],
    registry=REGISTRY,
)  # fmt: skip
RECONCILE_REQUEUED = Counter(
    "headgate_reconcile_requeued", "Wake-ups and claims recreated, by kind", ["kind"], registry=REGISTRY
)

for _outcome in ("scheduled", "due", "completed", "rescheduled", "cancelled", "exhausted"):
    EVENT_RETRIES.labels(_outcome)
for _kind in ("events", "deliveries", "steps", "runs"):
    RECONCILE_REQUEUED.labels(_kind)


def text() -> bytes:
    """The exposition text of this process."""
    return generate_latest(REGISTRY)
