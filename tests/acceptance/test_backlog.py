"""Backlogs from outside: over HTTP and on the command line, with a real API and a real worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.test_sources import eventually, held, known, ok
from tests.processes import run, worker
from tidegate import BacklogFull
from tidegate.client import Client

APP = """
from tidegate import Tidegate

app = Tidegate()


@app.workflow(on="tick", throttle="1/h", max_waiting=2, when_full="drop_oldest")
async def tick(ctx, n: int = 0):
    return {"n": n}
"""
_http = httpx.Client(timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def server(shared_url: str, address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    file = tmp_path_factory.mktemp("backlog") / "app.py"
    file.write_text(APP)
    with worker(shared_url, file), _http:
        yield address


def command(address: str, *arguments: str) -> str:
    done = run(*arguments, env={"TIDEGATE_URL": address})
    assert done.returncode == 0, done.stderr
    return done.stdout


def post(address: str, body: Any) -> httpx.Response:
    return _http.post(f"{address}/v1/events", json=body)


def event(source: str, n: int, **more: Any) -> dict[str, Any]:
    return {"type": "nothing", "source": source, "payload": {"n": n}, **more}


def test_a_full_source_is_refused_with_429_and_explained(server: str) -> None:
    said = command(server, "sources", "backlog", "full.api", "--max-waiting", "2")
    assert said.startswith("full.api: at most 2 events wait, then publishing is refused; ok")
    command(server, "sources", "pause", "full.api", "--reason", "drill")
    assert [post(server, event("full.api", n)).status_code for n in range(2)] == [202, 202]
    eventually(lambda: len(held(server, "full.api")) == 2, "both are held")

    refused = post(server, event("full.api", 2, id="too-much"))
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.headers["content-type"] == "application/problem+json"
    problem = refused.json()
    assert problem["type"] == "urn:tidegate:backlog-full" and problem["title"] == "Too many requests"
    assert problem["detail"] == (
        "source full.api is full: 2 of its events wait, at most 2 may wait (max_waiting); nothing was stored"
    )
    assert problem["errors"] == [{"field": "source", "message": "at most 2 may wait (max_waiting)"}]
    batch = post(server, [event("full.api", 3), event("other.api", 4, id="other-4")])
    assert batch.status_code == 429 and batch.json()["errors"][0]["field"] == "[0].source"
    assert _http.get(f"{server}/v1/events/other-4").status_code == 404
    with Client(server) as client, pytest.raises(BacklogFull) as full:
        client.publish("nothing", source="full.api", payload={})
    assert full.value.retry_after_seconds >= 1

    told = command(server, "explain", "too-much")
    assert "429" in told and "source full.api is full" in told
    listed = known(server, "full.api")
    assert listed is not None and (listed["max_waiting"], listed["when_full"], listed["waiting"]) == (2, "refuse", 2)
    assert "2 of 2" in command(server, "sources", "list")
    causes = ok(_http.get(f"{server}/admin/event-health"))["causes"]
    [cause] = [one for one in causes if one["code"] == "source_backlog"]
    assert cause["subject"] == "full.api" and cause["runbook"].endswith("#source-backlog")
    metrics = _http.get(f"{server}/metrics").text
    assert 'tidegate_backlog_left_total{kind="source",name="full.api",outcome="refused"}' in metrics
    assert 'tidegate_filling_backlogs{kind="source"} 1.0' in metrics

    command(server, "sources", "resume", "full.api")
    eventually(lambda: post(server, event("full.api", 5)).status_code == 202, "there is room again")
    command(server, "sources", "backlog", "full.api", "--remove")


def test_a_batch_that_does_not_fit_says_for_how_many_there_is_room_or_that_it_never_will(server: str) -> None:
    command(server, "sources", "backlog", "cap2", "--max-waiting", "10")
    command(server, "sources", "pause", "cap2", "--reason", "drill")
    never = post(server, [event("cap2", n, id=f"never-{n}") for n in range(20)])
    assert never.status_code == 422 and "retry-after" not in never.headers
    text = "20 events of source cap2 in one request, and at most 10 of it may wait (max_waiting): split the batch"
    assert never.json()["errors"] == [{"field": "[0].source", "message": text}]
    told = json.loads(command(server, "explain", "never-3", "--json"))
    assert told["summary"] == f"refused with 422, nothing was stored: the batch is too large: [0].source: {text}"

    assert post(server, [event("cap2", n) for n in range(8)]).status_code == 202
    full = post(server, [event("cap2", n, id=f"full-{n}") for n in range(5)])
    assert full.status_code == 429 and full.json()["type"] == "urn:tidegate:backlog-full"
    text = "source cap2 has room for 2 of these 5 events: 8 wait, at most 10 may wait (max_waiting); nothing was stored"
    assert full.json()["detail"] == text
    told = json.loads(command(server, "explain", "full-3", "--json"))
    assert text in told["summary"] and told["summary"].count("max_waiting") == 1
    command(server, "sources", "backlog", "cap2", "--remove")
    command(server, "sources", "resume", "cap2")


def test_wrong_input_names_the_field(server: str) -> None:
    path = f"{server}/admin/sources/wrong.api/backlog"
    for body, field in (
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_waiting": 5, "when_full": "explode"}, "when_full"),
        ({"max_waiting": 5, "most": 1}, "most"),
        ({}, "max_waiting"),
    ):
        answer = _http.put(path, json=body)
        assert answer.status_code == 422 and answer.json()["errors"][0]["field"] == field, answer.text
    refused = _http.put(f"{server}/admin/sources/tidegate.start/backlog", json={"max_waiting": 5})
    assert refused.status_code == 422 and "Tidegate's own" in refused.text
    assert known(server, "wrong.api") is None
    wrong = run("sources", "backlog", "wrong.api", env={"TIDEGATE_URL": server})
    assert wrong.returncode == 2 and "--max-waiting" in wrong.stderr


def test_a_full_trigger_drops_the_oldest_and_explain_says_why(server: str, tmp_path: Path) -> None:
    with Client(server) as client:
        eventually(lambda: client.request("GET", "/v1/workflows")["workflows"], "the worker has registered")
        ids = [client.publish("tick", source="ticks", payload={"n": n}).id for n in range(5)]
        waiting = ("GET", "/admin/retries")

        def has_settled() -> bool:
            rows = client.request(*waiting, kind="deliveries", source="ticks")["retries"]
            return sorted(row["event_id"] for row in rows) == sorted(map(str, ids[3:]))

        eventually(has_settled, "the two latest wait")
        for one in ids[1:3]:
            said = client.request("GET", f"/v1/explain/{one}")["summary"]
            assert "skipped: 2 deliveries wait (max_waiting), and the oldest leaves for event" in said
    shown = command(server, "triggers", "show", "tick/code")
    assert "at most 2 waiting, then drop_oldest" in shown
    file = tmp_path / "trigger.yaml"
    file.write_text("backlog: {max_waiting: 5, when_full: dead_letter, max_wait: 2h}\n")
    command(server, "triggers", "update", "tick/code", "-f", str(file))
    found = json.loads(command(server, "triggers", "show", "tick/code", "--json"))
    assert found["backlog"] == {"max_waiting": 5, "when_full": "dead_letter", "max_wait_ms": 7_200_000}
