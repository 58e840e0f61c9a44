"""Metrics: labels are bounded, reasons become decisions, shared gauges come and go with the database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tidegate.telemetry import metrics
from tidegate.telemetry.metrics import SharedState


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    def clear() -> None:
        metrics._sources.clear()
        for collector in (metrics.EVENTS_RECEIVED, metrics.SOURCE_DECISIONS, metrics.INGRESS_LAG):
            collector.clear()

    clear()
    yield
    clear()


def sample(name: str, **labels: str) -> float | None:
    return metrics.REGISTRY.get_sample_value(name, labels)


def test_source_labels_are_capped_in_one_place() -> None:
    metrics.received({f"s{n}": 1 for n in range(metrics.MAX_SOURCES + 50)})
    assert sample("tidegate_events_received_total", source="s0") == 1
    assert sample("tidegate_events_received_total", source=f"s{metrics.MAX_SOURCES}") is None
    assert sample("tidegate_events_received_total", source="other") == 50
    metrics.allowed({"s0": [0.2], "late": [0.2]})
    assert sample("tidegate_source_decisions_total", source="s0", decision="allowed") == 1
    assert sample("tidegate_source_decisions_total", source="other", decision="allowed") == 1
    assert sample("tidegate_event_ingress_lag_seconds_sum", source="other") == 0.2


@pytest.mark.parametrize(
    ("reason", "decision"),
    [("rate_limit", "throttled"), ("paused", "paused"), ("breaker_open", "paused"), (None, "throttled")],
)
def test_reasons_become_decisions(reason: str | None, decision: str) -> None:
    metrics.refused([("a", reason)])
    assert sample("tidegate_source_decisions_total", source="a", decision=decision) == 1


def test_shared_gauges() -> None:
    state = SharedState(
        paused_sources=2,
        paused_triggers=1,
        paused_budgets=2,
        open_breakers={"source": 1, "trigger": 0},
        workers_alive=2,
        unserved_workflows=0,
        overdue_retries={"events": 5},
        expired_claims={"runs": 6},
        history_overdue_seconds=2,
        overdue_schedules=1,
        deferred={("events", "paused"): 7},
        queue_depth={("runs", "ready"): 3},
        oldest_due_age_seconds={"runs": 1.5},
        dead_letters={"event": 4},
        last_processed=12.0,
        filling_backlogs={"source": 1, "trigger": 0},
    )
    metrics.show(state)
    assert sample("tidegate_filling_backlogs", kind="source") == 1
    assert sample("tidegate_paused_sources") == 2 and sample("tidegate_database_up") == 1
    assert sample("tidegate_deferred", kind="events", reason="paused") == 7
    metrics.show(state._replace(deferred={}))
    assert sample("tidegate_deferred", kind="events", reason="paused") is None  # nothing stale stays behind
    metrics.show(None)
    assert sample("tidegate_database_up") == 0
    assert sample("tidegate_queue_depth", queue="runs", state="ready") is None
    families = {family.name for family in text_string_to_metric_families(metrics.text().decode())}
    assert {"tidegate_events_received", "tidegate_paused_sources", "tidegate_deferred"} <= families


def test_workflow_labels_are_capped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_workflows", {f"w{n}" for n in range(metrics.MAX_WORKFLOWS)})
    metrics.ran("one-too-many", "succeeded", 0.1)
    assert sample("tidegate_runs_total", workflow="one-too-many", status="succeeded") is None
    assert (sample("tidegate_runs_total", workflow="other", status="succeeded") or 0) >= 1
