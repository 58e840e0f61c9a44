"""One correlation id through the log lines of real processes, from publishing to the end of the run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import PATIENCE_SECONDS, TIDEGATE

APP = """
from tidegate import Tidegate

app = Tidegate()
failed = set()

def charge(order):
    if order not in failed:
        failed.add(order)
        raise RuntimeError("the bank does not answer")
    return "receipt"

@app.workflow(on="order.created")
async def fulfil(ctx, order: str):
    return await ctx.step("charge", charge, order)
"""
TRACE = "trace-4711"
PAYLOAD = "canary-in-the-payload"


@contextlib.contextmanager
def logging(log: Path, *arguments: str, **env: str) -> Iterator[subprocess.Popen[str]]:
    """A process whose standard error goes to a file: there are log lines and nothing else."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
    with log.open("w") as errors:
        process = subprocess.Popen(
            [TIDEGATE, *arguments], env=clean | env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
            text=True,
        )  # fmt: skip
        try:
            yield process
        finally:
            process.terminate()
            process.wait(PATIENCE_SECONDS)
            process.stdout.close()  # type: ignore[union-attr]


def until(question: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.05)
    return answer


def statuses(http: httpx.Client, event_ids: list[str]) -> list[str]:
    """Of the runs of these events."""
    found = [http.get("/v1/runs", params={"event_id": event_id}).json()["runs"] for event_id in event_ids]
    return [run["status"] for page in found for run in page]


def test_a_log_that_cannot_be_written_stops_nothing(shared_url: str, tmp_path: Path) -> None:
    """A full disk under the log: what is committed is acknowledged all the same, and what is due goes on."""
    (tmp_path / "app.py").write_text(APP.replace("order.created", "disk.full"))
    env = {"TIDEGATE_DATABASE_URL": shared_url, "TIDEGATE_POLL_MS": "100", "TIDEGATE_LOG_LEVEL": "debug"}
    env |= {"TIDEGATE_AUTH": "off"}
    env |= {"TIDEGATE_STEP_RETRY_BASE_MS": "50", "TIDEGATE_STEP_RETRY_JITTER_RATIO": "0"}
    full = Path("/dev/full")
    with (
        logging(full, "serve", "--port", "0", **env) as api,
        logging(full, "worker", str(tmp_path / "app.py"), TIDEGATE_LOG_FORMAT="console", **env),
    ):
        assert api.stdout is not None
        with httpx.Client(base_url=api.stdout.readline().split()[-1], trust_env=False) as http:
            event = {"type": "disk.full", "source": "shop", "payload": {"order": "a"}}
            ids = [http.post("/v1/events", json=event).raise_for_status().json()["id"] for _ in range(2)]

            until(lambda: statuses(http, ids) == ["succeeded", "succeeded"])


@pytest.fixture(scope="module")
def lines(shared_url: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every line that an API and a worker wrote about two events, of which the second was held."""
    folder = tmp_path_factory.mktemp("logs")
    (folder / "app.py").write_text(APP)
    env = {"TIDEGATE_DATABASE_URL": shared_url, "TIDEGATE_POLL_MS": "100", "TIDEGATE_LOG_LEVEL": "debug"}
    env |= {"TIDEGATE_AUTH": "off"}
    worker_env = env | {"TIDEGATE_STEP_RETRY_BASE_MS": "50", "TIDEGATE_STEP_RETRY_JITTER_RATIO": "0"}
    with (
        logging(folder / "api.log", "serve", "--port", "0", **env) as api,
        logging(folder / "worker.log", "worker", str(folder / "app.py"), **worker_env),
    ):
        assert api.stdout is not None
        url = api.stdout.readline().split()[-1]
        with httpx.Client(base_url=url, trust_env=False) as http:
            http.put("/admin/sources/shop/limit", json={"limit": 1, "interval_ms": 1000}).raise_for_status()
            ids = []
            for order, trace in (("first", "other"), ("second", TRACE)):
                event = {
                    "type": "order.created", "source": "shop", "payload": {"order": order, "card": PAYLOAD},
                    "correlation_id": trace,
                }  # fmt: skip
                ids.append(http.post("/v1/events", json=event).raise_for_status().json()["id"])
            until(lambda: statuses(http, ids) == ["succeeded"] * 2)
            until(lambda: (folder / "worker.log").read_text().count("run.succeeded") == 2)
    text = (folder / "api.log").read_text() + (folder / "worker.log").read_text()
    assert PAYLOAD not in text
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_has_its_frame(lines: list[dict[str, Any]]) -> None:
    for line in lines:
        assert {"action", "level", "timestamp", "component"} <= line.keys(), line
        assert line["timestamp"].endswith("Z"), line


def test_a_correlation_id_from_publish_to_the_end_of_the_run(lines: list[dict[str, Any]]) -> None:
    mine = sorted((one for one in lines if one.get("correlation_id") == TRACE), key=lambda one: one["timestamp"])
    story = [one["action"] for one in mine]
    in_order = [
        "event.accepted", "event.held", "event.retry_completed", "delivery.launched", "run.started", "step.failed",
        "run.succeeded",
    ]  # fmt: skip
    assert [action for action in dict.fromkeys(story) if action in in_order] in (
        in_order,
        [*in_order[:3], "run.started", "delivery.launched", *in_order[5:]],  # the run begins before it is told about
    ), story
    [event_id] = {one["event_id"] for one in mine}
    assert {one["source"] for one in mine} == {"shop"} and event_id
    found = {one["action"]: one for one in mine}
    held, failed, ended = found["event.held"], found["step.failed"], found["run.succeeded"]
    assert (held["attempt"], held["reason"]) == (1, "rate_limit") and held["next_attempt_at"] > held["timestamp"]
    assert (found["event.retry_completed"]["attempt"], found["delivery.launched"]["trigger"]) == (1, "fulfil/code")
    assert (failed["step"], failed["attempt"], failed["workflow"]) == ("charge", 1, "fulfil")
    assert failed["next_attempt_at"] and "the bank does not answer" in failed["reason"]
    run_ids = {one["run_id"] for one in mine if one.get("run_id")}
    assert run_ids == {ended["run_id"]} and ended["workflow"] == "fulfil" and ended["level"] == "info"


def test_the_calm_way_is_told_by_two_lines_at_info(lines: list[dict[str, Any]]) -> None:
    other = [one for one in lines if one.get("correlation_id") == "other" and one["level"] != "debug"]
    told = sorted(one["action"] for one in other if one["action"] != "step.failed")
    assert told == ["event.accepted", "run.succeeded"]


def test_for_people(shared_url: str, tmp_path: Path) -> None:
    env = {"TIDEGATE_DATABASE_URL": shared_url, "TIDEGATE_LOG_FORMAT": "console", "TIDEGATE_AUTH": "off"}
    with logging(tmp_path / "api.log", "serve", "--port", "0", **env) as api:
        assert api.stdout is not None
        url = api.stdout.readline().split()[-1]
        httpx.post(f"{url}/v1/events", json={"type": "a.b", "source": "s\n{}"}, trust_env=False)
        event = {"type": "a.b", "source": "shop.web", "correlation_id": "for-people"}
        httpx.post(f"{url}/v1/events", json=event, trust_env=False)
        until(lambda: "for-people" in (tmp_path / "api.log").read_text())
    notice, line = (tmp_path / "api.log").read_text().splitlines()
    assert "process.notice" in notice and "the API is open" in notice
    assert "event.accepted" in line and "UUID(" not in line and not line.startswith("{")
