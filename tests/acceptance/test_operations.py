"""What operators see, on real processes: the exposition text, requests that are counted, and the probe."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import api, worker

# Every name of the contract, with its kind and labels.
CONTRACT: dict[str, tuple[str, set[str]]] = {
    "tidegate_events_received": ("counter", {"source"}),
    "tidegate_event_ingress_lag_seconds": ("histogram", {"source"}),
    "tidegate_source_decisions": ("counter", {"source", "decision"}),
    "tidegate_event_retries": ("counter", {"outcome"}),
    "tidegate_delivery_retries": ("counter", {"outcome"}),
    "tidegate_step_retries": ("counter", {"outcome"}),
    "tidegate_trigger_evaluations": ("counter", {"trigger", "status"}),
    "tidegate_dead_letters": ("gauge", {"kind"}),
    "tidegate_paused_sources": ("gauge", set()),
    "tidegate_paused_triggers": ("gauge", set()),
    "tidegate_queue_depth": ("gauge", {"queue", "state"}),
    "tidegate_oldest_due_age_seconds": ("gauge", {"queue"}),
    "tidegate_deferred": ("gauge", {"kind", "reason"}),
    "tidegate_reconcile_requeued": ("counter", {"kind"}),
    "tidegate_last_processed_event_timestamp_seconds": ("gauge", set()),
    "tidegate_runs": ("counter", {"workflow", "status"}),
    "tidegate_run_duration_seconds": ("histogram", {"workflow"}),
    "tidegate_http_requests": ("counter", {"route", "code"}),
}

APP = """
from tidegate import Tidegate, NonRetryable, Retry

app = Tidegate()
tries = []


@app.workflow(on="fine")
async def fine(ctx): ...


@app.workflow(on="broken")
async def broken(ctx):
    raise NonRetryable("never")


@app.workflow(on="slow", throttle="1/h")
async def slow(ctx): ...


@app.workflow(on="again")
async def again(ctx):
    async def flaky():
        tries.append(1)
        if len(tries) < 3:
            raise OSError("not yet")

    await ctx.step("flaky", flaky, retry=Retry(max_attempts=5, base="10ms"))
"""


@pytest.fixture(scope="module")
def metrics_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(
    shared_url: str, address: str, metrics_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str]]:
    """The addresses of an API and of its worker's metrics."""
    app = tmp_path_factory.mktemp("operations") / "app.py"
    app.write_text(APP)
    with worker(shared_url, app, TIDEGATE_METRICS_PORT=str(metrics_port)):
        yield address, f"http://127.0.0.1:{metrics_port}"


def eventually(question: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not question():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.05)


def sample(address: str, name: str, **labels: str) -> float:
    text = httpx.get(f"{address}/metrics").text
    found = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return next((s.value for s in found if s.name == name and s.labels == labels), 0.0)


def publish(address: str, kind: str, source: str = "ops") -> None:
    sent = httpx.post(f"{address}/v1/events", json={"type": kind, "source": source, "payload": {}})
    assert sent.status_code == 202, sent.text


def check_text(text: str) -> dict[str, set[str]]:
    """The text is what Prometheus expects; the labels of each family that has samples."""
    described = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# HELP ")]
    typed = [line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE ")]
    assert described == typed and len(set(typed)) == len(typed)
    assert text.endswith("\n")
    labels: dict[str, set[str]] = {}
    series: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for family in text_string_to_metric_families(text):
        assert family.name.startswith("tidegate_") and family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family
        for one in family.samples:
            key = (one.name, frozenset(one.labels.items()))
            assert key not in series, f"{key} is there twice"
            series.add(key)
            if family.type == "counter":
                assert one.name == f"{family.name}_total" and one.value >= 0
            elif family.type == "histogram":
                assert one.name.removeprefix(family.name) in ("_bucket", "_count", "_sum")
            else:
                assert one.name == family.name
            labels.setdefault(family.name, set()).update(one.labels.keys() - {"le"})
    return labels


def test_every_metric_of_the_contract_moves_with_its_cause(server: tuple[str, str]) -> None:
    api_address, own = server
    for kind in ("fine", "broken", "slow", "slow", "again"):
        publish(api_address, kind)
    paused = httpx.post(f"{api_address}/admin/sources/held/pause", json={})
    assert paused.status_code == 200
    publish(api_address, "fine", "held")

    def moved(name: str, at_least: float = 1, **labels: str) -> None:
        eventually(lambda: sample(own, name, **labels) >= at_least, f"{name} {labels}")

    moved("tidegate_runs_total", workflow="fine", status="succeeded")
    moved("tidegate_runs_total", workflow="broken", status="failed")
    moved("tidegate_runs_total", workflow="again", status="succeeded")
    moved("tidegate_run_duration_seconds_count", workflow="fine")
    moved("tidegate_dead_letters", kind="run")
    for outcome in ("scheduled", "rescheduled", "completed"):
        moved("tidegate_step_retries_total", outcome=outcome)
    moved("tidegate_step_retries_total", 2, outcome="due")
    moved("tidegate_delivery_retries_total", outcome="scheduled")
    moved("tidegate_event_retries_total", outcome="scheduled")
    moved("tidegate_deferred", kind="deliveries", reason="throttle")
    moved("tidegate_deferred", kind="events", reason="paused")
    moved("tidegate_queue_depth", queue="triggers", state="delayed")
    moved("tidegate_paused_sources")
    moved("tidegate_source_decisions_total", source="held", decision="paused")
    moved("tidegate_source_decisions_total", 5, source="ops", decision="allowed")
    moved("tidegate_event_ingress_lag_seconds_count", 5, source="ops")
    moved("tidegate_trigger_evaluations_total", trigger="slow/code", status="throttled")
    moved("tidegate_last_processed_event_timestamp_seconds")
    moved("tidegate_workers_alive")
    assert sample(api_address, "tidegate_events_received_total", source="ops") == 5
    assert sample(own, "tidegate_oldest_due_age_seconds", queue="triggers") == 0  # it is held on purpose
    assert httpx.post(f"{api_address}/admin/sources/held/resume").status_code == 200
    moved("tidegate_event_retries_total", outcome="completed")
    eventually(lambda: sample(own, "tidegate_paused_sources") == 0, "the pause is over")


def test_requests_are_counted_by_route(server: tuple[str, str]) -> None:
    address, _ = server

    def count(route: str, code: int) -> float:
        return sample(address, "tidegate_http_requests_total", route=route, code=str(code))

    before = count("/v1/events", 202), count("/v1/events", 422), count("/v1/runs/{run_id}", 404), count("other", 404)
    publish(address, "nothing", "requests")
    httpx.post(f"{address}/v1/events", json={"type": "x"})
    for n in range(3):
        httpx.get(f"{address}/v1/runs/00000000-0000-0000-0000-00000000000{n}")
        httpx.get(f"{address}/nowhere/{n}")
    after = count("/v1/events", 202), count("/v1/events", 422), count("/v1/runs/{run_id}", 404), count("other", 404)
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 1, 3, 3]
    assert "nowhere" not in httpx.get(f"{address}/metrics").text


def test_the_text_is_valid_on_the_api_and_the_worker(server: tuple[str, str]) -> None:
    for address in server:
        response = httpx.get(f"{address}/metrics")
        assert response.headers["content-type"].startswith("text/plain; version=")
        labels = check_text(response.text)
        kinds = {f.name: f.type for f in text_string_to_metric_families(response.text)}
        for name, (kind, expected) in CONTRACT.items():
            assert kinds.get(name) == kind, name
            assert labels.get(name, expected) == expected, name


def test_the_probe_answers_503_when_critical(database_url: str) -> None:
    thresholds = {"TIDEGATE_HEALTH_PAUSED_DEGRADED_MS": "1", "TIDEGATE_HEALTH_PAUSED_CRITICAL_MS": "1"}
    with api(database_url, **thresholds) as (_, address):
        assert httpx.get(f"{address}/admin/event-health?probe=1").status_code == 200  # no worker: degraded
        assert httpx.post(f"{address}/admin/sources/x/pause", json={}).status_code == 200
        seen = httpx.get(f"{address}/admin/event-health?probe=1")
        assert (seen.status_code, seen.json()["status"]) == (503, "critical")
        assert httpx.get(f"{address}/admin/event-health").status_code == 200
        assert httpx.get(f"{address}/admin/event-health?probe=0").status_code == 200
        assert httpx.get(f"{address}/admin/event-health?probe=2").status_code == 422
        assert httpx.post(f"{address}/admin/sources/x/resume").status_code == 200
        assert httpx.get(f"{address}/admin/event-health?probe=1").status_code == 200
