"""Traces of real processes, sent by OTLP to a collector on loopback; and what is so without any."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.acceptance.conftest import DEMO
from tests.flow.http_receiver import Receiver
from tests.processes import PATIENCE_SECONDS, Process, api, worker

PRODUCER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-1bf7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


@pytest.fixture
def collector() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def received(collector: Receiver) -> list[tuple[str, Any]]:
    """The spans that the collector got, each with its service."""
    found = []
    for _, body in collector.seen:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            names = {a.key: a.value.string_value for a in resource.resource.attributes}
            found += [(names["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
    return found


def publish(address: str, order: int, **headers: str) -> None:
    """An event that launches the demo's workflows, and its runs to their ends."""
    body = {"type": "order.created", "source": "shop.api", "payload": {"id": order, "amount": 120}}
    with httpx.Client(trust_env=False, base_url=address) as client:
        answer = client.post("/v1/events", json=body, headers=headers)
        assert answer.status_code == 202, answer.text
        event_id = answer.json()["id"]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline:
            runs = client.get("/v1/runs", params={"event_id": event_id}).json()["runs"]
            if runs and all(run["finished_at"] for run in runs):
                assert {run["status"] for run in runs} == {"succeeded"}
                return
            time.sleep(0.02)
    raise AssertionError(f"no finished runs for {event_id}")


def stopped(process: Process) -> None:
    process.signal(signal.SIGTERM)
    assert process.wait() == 0, process.output


APP = """
from opentelemetry import trace
from tidegate import Tidegate

app = Tidegate()

@app.workflow(on="order.created")
async def fulfil(ctx, id: int, amount: float):
    await ctx.step("charge", charge)

def charge():
    with trace.get_tracer("shop").start_as_current_span("card"):
        return 1
"""


def test_the_collector_gets_one_tree_of_api_worker_and_users_code_below_the_producer(
    database_url: str, collector: Receiver, tmp_path: Path
) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP)
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}"}
    with (
        api(database_url, OTEL_SERVICE_NAME="gate-api", **env) as (serving, address),
        worker(database_url, app, **env) as working,
    ):
        publish(address, 1, traceparent=PRODUCER)
        publish(address, 2, traceparent=UNSAMPLED)
        stopped(working)
        stopped(serving)
        lines = [json.loads(line) for line in working.lines if '"run.succeeded"' in line]
    spans = [(service, span) for service, span in received(collector) if not span.name.startswith("GET ")]
    trace = bytes.fromhex(PRODUCER.split("-")[1])
    assert {span.trace_id for _, span in spans} == {trace}
    [request] = [span for _, span in spans if span.name == "POST /v1/events"]
    assert request.parent_span_id.hex() == PRODUCER.split("-")[2]
    known = {span.span_id for _, span in spans}
    assert all(span.parent_span_id in known for _, span in spans if span is not request)
    assert {service for service, span in spans if span.name == "POST /v1/events"} == {"gate-api"}
    assert {service for service, span in spans if span.name != "POST /v1/events"} == {"tidegate"}
    names = sorted(span.name for _, span in spans)
    assert names == ["POST /v1/events", "card", "deliver", "gate", "match", "run fulfil", "step charge"]
    below = {span.name: {other.span_id: other.name for _, other in spans}.get(span.parent_span_id) for _, span in spans}
    assert (below["card"], below["step charge"], below["run fulfil"]) == (
        "step charge",
        "run fulfil",
        "POST /v1/events",
    )
    assert {line["trace_id"] for line in lines} == {PRODUCER.split("-")[1], UNSAMPLED.split("-")[1]}


def test_a_sampler_that_takes_nothing_and_a_disabled_sdk_send_nothing(database_url: str, collector: Receiver) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.port}"}
    with (
        api(database_url, OTEL_TRACES_SAMPLER="parentbased_always_off", **env) as (serving, address),
        worker(database_url, DEMO, OTEL_SDK_DISABLED="true", **env) as working,
    ):
        publish(address, 3)
        stopped(working)
        stopped(serving)
    assert collector.seen == []


def test_a_collector_that_is_away_keeps_nobody_from_working_and_stopping(database_url: str) -> None:
    with socket.socket() as taken:  # bound and not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{taken.getsockname()[1]}"}
        with api(database_url, **env) as (serving, address), worker(database_url, DEMO, **env) as working:
            publish(address, 4)
            stopped(working)
            stopped(serving)


def test_without_the_extra_everything_works_and_says_why_there_are_no_traces(database_url: str, tmp_path: Path) -> None:
    absent = tmp_path / "opentelemetry"
    absent.mkdir()
    (absent / "__init__.py").write_text("raise ImportError('not installed here')\n")
    env = {"PYTHONPATH": str(tmp_path), "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    with api(database_url, **env) as (serving, address), worker(database_url, DEMO, **env) as working:
        publish(address, 5, traceparent=PRODUCER)
        for process in (serving, working):
            assert "tidegate[otel]" in process.wait_for_line("traces.off").string
        stopped(working)
        stopped(serving)


def test_off_nothing_of_opentelemetry_is_loaded(database_url: str) -> None:
    probe = """
import asyncio, sys
import tidegate.cli, tidegate.cli.process
from tidegate import Tidegate
from tidegate.clock import utc_now

app = Tidegate()
ran = []

@app.workflow(on="go")
async def fulfil(ctx):
    ran.append(await ctx.step("one", lambda: 1))

async def main():
    async with app:
        worker = await app.worker()
        await app.publish("go", source="shop")
        while (await worker.turn(utc_now())).done:
            pass
        await worker.close()

asyncio.run(main())
print("executed" if ran else "not executed")
print(sorted(name for name in sys.modules if name.startswith("opentelemetry")))
"""
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False,
        env={"TIDEGATE_DATABASE_URL": database_url},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["executed", "[]"]


def test_a_programs_own_provider_is_used(database_url: str) -> None:
    probe = """
import asyncio
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tidegate import Tidegate
from tidegate.clock import utc_now

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
app = Tidegate()

@app.workflow(on="go")
async def fulfil(ctx): ...

async def main():
    async with app:
        worker = await app.worker()
        with trace.get_tracer("shop").start_as_current_span("caller"):
            await app.publish("go", source="shop")
        while (await worker.turn(utc_now())).done:
            pass
        await worker.close()

asyncio.run(main())
spans = exporter.get_finished_spans()
print(len({span.context.trace_id for span in spans}), *sorted(span.name for span in spans))
"""
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, check=False,
        env={"TIDEGATE_DATABASE_URL": database_url},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 caller deliver gate match run fulfil"
