"""The operator's side of the source gate, on real API and worker processes: limits, pauses, retries, health, metrics.

Sources differ from test to test, so that one API and one worker serve them all. Nothing here waits by the clock: each
wait ends when what it waits for is so.
"""

from __future__ import annotations

import itertools
import json
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.conftest import ROOT
from tests.acceptance.test_readme import blocks, shell
from tests.processes import PATIENCE_SECONDS, api, run, worker
from tidegate.client import Client

APP = """
from tidegate import Tidegate

app = Tidegate()


@app.workflow(on="tick")
async def tick(ctx, n: int = 0):
    return {"n": n}


@app.workflow(on="bad", params={"x": "{{ event.payload.missing }}"})
async def bad(ctx, x: int):
    return None
"""
HOUR_MS = 3_600_000
_http = httpx.Client(timeout=30, trust_env=False)
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sources") / "app.py"
    file.write_text(APP)
    return file


@pytest.fixture(scope="module")
def metrics_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server(shared_url: str, address: str, app: Path, metrics_port: int) -> Iterator[str]:
    """An API and a worker; the API's address."""
    with worker(shared_url, app, TIDEGATE_METRICS_PORT=str(metrics_port)):
        yield address


@pytest.fixture
def source() -> str:
    return f"source-{next(_numbers)}"


def eventually(question: Callable[[], Any], what: str) -> Any:
    """Ask until the answer is true."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (answer := question()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)
    return answer


def act(address: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    given = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return _http.request(method, f"{address}{path}", content=content, headers=given)


def at(source: str, verb: str) -> str:
    return f"/admin/sources/{quote(source, safe='')}/{verb}"


def ok(response: httpx.Response, status: int = 200) -> Any:
    assert response.status_code == status, response.text
    return response.json()


def publish(address: str, source: str, count: int, type: str = "tick") -> list[str]:
    with Client(address) as client:
        events = [{"type": type, "source": source, "payload": {"n": n}} for n in range(count)]
        return [receipt.id for receipt in client.publish_many(events)]


def held(address: str, source: str, **filters: str) -> list[dict[str, Any]]:
    page = ok(_http.get(f"{address}/admin/retries", params={"source": source, "limit": "500", **filters}))
    return list(page["retries"])


def launched(address: str, ids: list[str]) -> list[str]:
    """Those of the events that have a run."""
    with Client(address) as client:
        return [i for i in ids if client.request("GET", "/v1/runs", event_id=i)["runs"]]


def known(address: str, source: str) -> dict[str, Any] | None:
    found = [s for s in ok(_http.get(f"{address}/admin/sources"))["sources"] if s["source"] == source]
    return found[0] if found else None


def health(address: str) -> dict[str, Any]:
    return dict(ok(_http.get(f"{address}/admin/event-health")))


def samples(address: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    response = _http.get(f"{address}/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(response.text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def sample(address: str, name: str, **labels: str) -> float:
    return samples(address).get((name, frozenset(labels.items())), 0.0)


# Limits -------------------------------------------------------------------------------------------------------------


def test_a_limit_is_tried_on_the_last_week(server: str, source: str) -> None:
    ids = publish(server, source, 5)
    eventually(lambda: launched(server, ids) == ids, "all are launched")
    asked = {"limit": 2, "interval_ms": HOUR_MS, "dry_run": True}
    found = ok(act(server, "PUT", at(source, "limit"), asked))
    assert (found["events"], found["is_cut"], found["waiting"], found["drained_at"]) == (5, False, 0, None)
    assert (found["predicted"]["held"], found["current"]["held"], found["predicted"]["most_waiting"]) == (3, 0, 3)
    assert found["predicted"]["longest_wait_event_id"] == ids[4] and found["not_predicted"]
    assert found["predicted"]["longest_wait_ms"] > 1.5 * HOUR_MS
    assert known(server, source) is None, "nothing was set"

    ok(act(server, "PUT", at(source, "limit"), asked | {"dry_run": False}))
    more = publish(server, source, 3)
    eventually(lambda: len(held(server, source)) == 1, "one is held")
    assert ok(act(server, "PUT", f"{at(source, 'limit')}?dry_run=true", asked | {"dry_run": False}))["events"] >= 5
    removed = ok(act(server, "DELETE", f"{at(source, 'limit')}?dry_run=true"))
    assert (removed["limit"], removed["predicted"]["held"], removed["current"]["held"]) == (None, 0, 6)
    assert removed["waiting"] == 1 and removed["drained_at"] is not None
    assert (known(server, source) or {})["limit"] == 2 and [row["event_id"] for row in held(server, source)] == more[2:]

    told = run("sources", "limit", source, "1/s", "--dry-run", env={"TIDEGATE_URL": server})
    assert told.returncode == 0, told.stderr
    assert f"{source}, 1/s: 8 events, " in told.stdout and "waiting now: 1; the last would pass: 20" in told.stdout
    assert (
        "with the current limit all that time:  6 held, the longest for " in told.stdout
        and "not predicted: " in told.stdout
    )
    told = run("sources", "limit", source, "--remove", "--dry-run", env={"TIDEGATE_URL": server})
    assert told.returncode == 0 and "with the current limit all that time:  6 held" in told.stdout, told.stderr
    assert (known(server, source) or {})["limit"] == 2


@pytest.mark.parametrize(
    ("query", "body", "field"),
    [
        ("", {"dry_run": True}, "dry_run"),
        ("", {"dry_run": False}, "dry_run"),
        ("?dry_run=true", {"dry_run": True}, "dry_run"),
        ("", {"limit": 5}, "limit"),
        ("?dry_run=yes", None, "dry_run"),
        ("?dryrun=true", None, "dryrun"),
    ],
)
def test_a_removal_that_may_be_meant_as_a_dry_run_is_refused(
    server: str, source: str, query: str, body: Any, field: str
) -> None:
    """A proxy may drop the body of a DELETE: nothing in it may decide whether a limit is removed."""
    ok(act(server, "PUT", at(source, "limit"), {"limit": 2, "interval_ms": HOUR_MS}))
    refused = ok(act(server, "DELETE", f"{at(source, 'limit')}{query}", body), 422)
    assert [error["field"] for error in refused["errors"]] == [field], refused
    assert (known(server, source) or {})["limit"] == 2


def test_a_limit_holds_what_is_over_it_and_says_until_when(server: str, source: str) -> None:
    limited = ok(act(server, "PUT", at(source, "limit"), {"limit": 2, "interval_ms": HOUR_MS}, x_tidegate_actor="ann"))
    assert (limited["limit"], limited["interval_ms"], limited["pause_ms"]) == (2, HOUR_MS, 0)
    assert (limited["set_by"], limited["updated_by"]) == ("operator", "ann")
    ids = publish(server, source, 5)
    rows = eventually(lambda: len(r := held(server, source)) == 3 and r, "three are held")
    assert [row["event_id"] for row in rows] == ids[2:]
    assert {row["reason"] for row in rows} == {"rate_limit"}
    etas = [row["eta_seconds"] for row in rows]
    assert etas == sorted(etas) and 0 < etas[0] <= HOUR_MS / 1000 * 1.1 and etas[2] > etas[0]
    assert all(row["next_attempt_at"] and row["attempts"] == 1 and row["kind"] == "events" for row in rows)
    assert "over the limit of 2/h" in rows[0]["last_error"]
    eventually(lambda: launched(server, ids) == ids[:2], "the first two launch")
    seen = known(server, source)
    assert seen and seen["waiting"] == 3 and seen["next_attempt_at"] == rows[0]["next_attempt_at"]

    # Changing the limit while they wait lets them go.
    ok(act(server, "PUT", at(source, "limit"), {"limit": 1000, "interval_ms": 1000, "pause_ms": 0}))
    eventually(lambda: launched(server, ids) == ids, "all launch under the new limit")
    assert held(server, source) == []
    done = held(server, source, state="completed")
    assert {row["event_id"] for row in done} == set(ids[2:]) and {row["eta_seconds"] for row in done} == {None}


def test_removing_a_limit_lets_everything_go(server: str, source: str) -> None:
    ok(act(server, "PUT", at(source, "limit"), {"limit": 1, "interval_ms": HOUR_MS}))
    ids = publish(server, source, 20)
    eventually(lambda: len(held(server, source)) == 19, "19 are held")
    removed = ok(act(server, "DELETE", at(source, "limit")))
    assert removed["limit"] is None and removed["set_by"] == "operator"
    eventually(lambda: launched(server, ids) == ids, "all launch without a limit")


def test_pages_of_retries(server: str, source: str) -> None:
    ok(act(server, "POST", at(source, "pause"), {"duration_ms": HOUR_MS}))
    ids = publish(server, source, 5)
    eventually(lambda: len(held(server, source)) == 5, "all are held")
    found: list[str] = []
    cursor = None
    while True:
        asked = {"source": source, "limit": "2"} | ({"cursor": cursor} if cursor else {})
        page = ok(_http.get(f"{server}/admin/retries", params=asked))
        found += [row["id"] for row in page["retries"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert sorted(found) == sorted(ids)
    assert held(server, source, reason="rate_limit") == [] and len(held(server, source, reason="paused")) == 5
    for kind in ("deliveries", "steps"):
        assert ok(_http.get(f"{server}/admin/retries", params={"kind": kind}))["retries"] == []
    ok(act(server, "POST", at(source, "resume")))


# Pauses -------------------------------------------------------------------------------------------------------------


def test_a_pause_holds_until_resumed_and_health_says_so(server: str, source: str) -> None:
    paused = ok(act(server, "POST", at(source, "pause"), {"reason": "maintenance"}, x_tidegate_actor="ann"))
    assert paused["paused"] and paused["paused_until"] is None
    assert (paused["pause_reason"], paused["paused_by"]) == ("maintenance", "ann")
    ids = publish(server, source, 3)
    rows = eventually(lambda: len(r := held(server, source)) == 3 and r, "all are held")
    assert [(r["reason"], r["eta_seconds"]) for r in rows] == [("paused", None)] * 3
    assert launched(server, ids) == []

    seen = health(server)
    assert seen["status"] == "degraded"
    [cause] = [c for c in seen["causes"] if c["subject"] == source]
    assert cause["code"] == "source_paused" and "by ann" in cause["message"] and "maintenance" in cause["message"]
    assert (
        cause["since"] == paused["paused_at"] and cause["runbook"] == "docs/operations/event-scheduler.md#source-paused"
    )
    [listed] = [p for p in seen["paused_sources"] if p["source"] == source]
    assert (listed["until"], listed["reason"], listed["paused_by"]) == (None, "maintenance", "ann")
    assert seen["retries"]["events"]["by_reason"]["paused"] >= 3
    assert seen["queues"]["ingress"]["delayed"] >= 3

    ok(act(server, "POST", at(source, "resume"), x_tidegate_actor="ann"))
    eventually(lambda: launched(server, ids) == ids, "all launch after the resume")
    after = health(server)
    assert not [c for c in after["causes"] if c["subject"] == source]
    assert source not in {p["source"] for p in after["paused_sources"]}
    [totals] = [s for s in after["sources"] if s["source"] == source]
    assert totals["total"] == 3 and totals["throttled"] == 3 and totals["average_lag_ms"] > 0
    assert totals["max_lag_ms"] >= int(totals["average_lag_ms"])  # it is in whole milliseconds


def cancel_what_nobody_can_run(server: str) -> None:
    """Other tests have had workers whose workflows nobody has any more."""
    slugs = [w["slug"] for w in ok(_http.get(f"{server}/v1/workflows"))["workflows"]]
    for slug in slugs:
        pending = ok(_http.get(f"{server}/v1/runs?workflow={slug}&status=pending&limit=500"))["runs"]
        for waiting in pending:
            act(server, "POST", f"/v1/runs/{waiting['id']}/cancel")


def test_health_is_ok_again_once_nothing_is_wrong(shared_url: str, server: str, source: str) -> None:
    for other in health(server)["paused_sources"]:
        ok(act(server, "POST", at(other["source"], "resume")))
    for cause in health(server)["causes"]:
        if cause["code"] == "trigger_breaker_open":  # of tests whose workflows fail
            ok(act(server, "POST", f"/admin/triggers/{cause['subject']}/resume"))
    cancel_what_nobody_can_run(server)
    eventually(lambda: health(server)["status"] == "ok", "everything moves")
    told = run("health", env={"TIDEGATE_URL": server})
    assert told.returncode == 0 and told.stdout.startswith("ok at ")
    ok(act(server, "POST", at(source, "pause"), {"duration_ms": HOUR_MS, "reason": "a test"}))
    told = run("health", env={"TIDEGATE_URL": server})
    assert told.returncode == 1 and told.stdout.startswith("degraded at ")
    assert "source_paused" in told.stdout and source in told.stdout and "a test" in told.stdout
    assert json.loads(run("health", "--json", env={"TIDEGATE_URL": server}).stdout)["status"] == "degraded"
    ok(act(server, "POST", at(source, "resume")))
    assert run("health", env={"TIDEGATE_URL": server}).returncode == 0


def test_a_pause_with_an_end(server: str, source: str) -> None:
    until = (datetime.fromisoformat(health(server)["generated_at"]) + timedelta(hours=1)).isoformat()
    paused = ok(act(server, "POST", at(source, "pause"), {"until": until}))
    assert datetime.fromisoformat(paused["paused_until"]) == datetime.fromisoformat(until)
    publish(server, source, 1)
    [row] = eventually(lambda: held(server, source), "it is held")
    assert row["next_attempt_at"] == paused["paused_until"] and row["eta_seconds"] > 0
    ok(act(server, "POST", at(source, "resume")))


def test_a_short_pause_ends_by_itself(server: str, source: str) -> None:
    ok(act(server, "POST", at(source, "pause"), {"duration_ms": 300}))
    ids = publish(server, source, 3)
    eventually(lambda: launched(server, ids) == ids, "all launch when the pause is over")
    seen = known(server, source)
    assert seen and not seen["paused"] and seen["pause_reason"] is None


@pytest.mark.parametrize("name", ["shop/api", "urn:shop:api", "https://shop.example/x?y=1&z=2#top", "a%2Fb", "x/limit"])
def test_names_with_every_character_that_sources_may_have(server: str, name: str) -> None:
    assert ok(act(server, "PUT", at(name, "limit"), {"limit": 5, "interval_ms": 1000}))["source"] == name
    assert ok(act(server, "POST", at(name, "pause"), {"duration_ms": HOUR_MS}))["source"] == name
    seen = known(server, name)
    assert seen and seen["paused"] and seen["limit"] == 5
    publish(server, name, 1)
    eventually(lambda: held(server, name), "it is held")
    assert not ok(act(server, "POST", at(name, "resume")))["paused"]


# Cancel and force ---------------------------------------------------------------------------------------------------


def test_cancel_and_force_by_either_id(server: str, source: str) -> None:
    ok(act(server, "POST", at(source, "pause"), {"duration_ms": HOUR_MS}))
    with Client(server) as client:
        theirs, ours, forced = (
            client.publish("tick", source=source, id=f"{source}/{name}") for name in ("theirs", "ours", "forced")
        )
    eventually(lambda: len(held(server, source)) == 3, "all are held")
    path = "/admin/retries/events/"
    quoted = quote(f"{source}/theirs", safe="")
    assert ok(act(server, "POST", f"{path}{quoted}/cancel")) == {"id": theirs.id, "status": "cancelled"}
    assert ok(act(server, "POST", f"{path}{ours.id}/cancel", x_tidegate_actor="bob"))["status"] == "cancelled"
    again = act(server, "POST", f"{path}{ours.id}/cancel")
    assert again.status_code == 409 and "no longer waiting" in again.json()["detail"]
    assert act(server, "POST", f"{path}{ours.id}/force").status_code == 409
    assert act(server, "POST", f"{path}no-such-event/cancel").status_code == 404
    assert act(server, "POST", f"{path}no-such-event/force").status_code == 404
    assert act(server, "POST", f"/admin/retries/nonsense/{ours.id}/force").status_code == 404

    # Forced while paused: the gate is asked and says no again.
    assert ok(act(server, "POST", f"{path}{forced.id}/force"), 202) == {"id": forced.id, "status": "forced"}
    ok(act(server, "POST", at(source, "resume")))
    eventually(lambda: launched(server, [forced.id]), "the forced one launches")
    assert launched(server, [theirs.id, ours.id]) == []
    with Client(server) as client:
        told = client.request("GET", f"/v1/events/{ours.id}/explain")["decisions"][-1]
    assert (told["decision"], told["actor"]) == ("cancelled", "bob")


def test_a_forced_event_still_asks_the_gate(server: str, source: str) -> None:
    ok(act(server, "PUT", at(source, "limit"), {"limit": 1, "interval_ms": HOUR_MS}))
    first, second, third = publish(server, source, 3)
    eventually(lambda: len(held(server, source)) == 2, "two are held")
    ok(act(server, "PUT", at(source, "limit"), {"limit": 2, "interval_ms": HOUR_MS}))
    eventually(lambda: len(launched(server, [first, second, third])) == 2, "one more goes")
    ok(act(server, "POST", f"/admin/retries/events/{third}/force"), 202)
    [row] = held(server, source)
    assert row["event_id"] == third and row["retry_state"] == "scheduled"  # the limit still counts
    assert launched(server, [third]) == []


# Bad input ----------------------------------------------------------------------------------------------------------

LIMIT = {"limit": 5, "interval_ms": 1000}
BAD: dict[str, tuple[str, str, Any, str]] = {
    "limit 0": ("PUT", "limit", LIMIT | {"limit": 0}, "limit"),
    "limit negative": ("PUT", "limit", LIMIT | {"limit": -1}, "limit"),
    "limit beyond bounds": ("PUT", "limit", LIMIT | {"limit": 10**30}, "limit"),
    "limit a fraction": ("PUT", "limit", LIMIT | {"limit": 1.5}, "limit"),
    "limit text": ("PUT", "limit", LIMIT | {"limit": "5"}, "limit"),
    "limit true": ("PUT", "limit", LIMIT | {"limit": True}, "limit"),
    "limit null": ("PUT", "limit", LIMIT | {"limit": None}, "limit"),
    "limit NaN": ("PUT", "limit", b'{"limit": NaN, "interval_ms": 1000}', "limit"),
    "limit infinite": ("PUT", "limit", b'{"limit": 1, "interval_ms": Infinity}', "interval_ms"),
    "limit 1e400": ("PUT", "limit", b'{"limit": 1e400, "interval_ms": 1000}', "limit"),
    "no limit": ("PUT", "limit", {"interval_ms": 1000}, "limit"),
    "no interval": ("PUT", "limit", {"limit": 1}, "interval_ms"),
    "interval 0": ("PUT", "limit", LIMIT | {"interval_ms": 0}, "interval_ms"),
    "pause negative": ("PUT", "limit", LIMIT | {"pause_ms": -1}, "pause_ms"),
    "unknown field": ("PUT", "limit", LIMIT | {"intervall": 1}, "intervall"),
    "an array": ("PUT", "limit", [1], "body"),
    "empty limit": ("PUT", "limit", None, "limit"),
    "until in the past": ("POST", "pause", {"until": "2020-01-01T00:00:00Z"}, "until"),
    "until without zone": ("POST", "pause", {"until": "2099-01-01T00:00:00"}, "until"),
    "until nonsense": ("POST", "pause", {"until": "tomorrow"}, "until"),
    "until a number": ("POST", "pause", {"until": 5}, "until"),
    "until in 9999": ("POST", "pause", {"until": "9999-12-31T23:59:59-05:00"}, "until"),
    "until and duration": ("POST", "pause", {"until": "2099-01-01T00:00:00Z", "duration_ms": 5}, "until"),
    "duration 0": ("POST", "pause", {"duration_ms": 0}, "duration_ms"),
    "duration beyond bounds": ("POST", "pause", {"duration_ms": 10**30}, "duration_ms"),
    "duration NaN": ("POST", "pause", b'{"duration_ms": NaN}', "duration_ms"),
    "reason a list": ("POST", "pause", {"reason": []}, "reason"),
    "reason with NUL": ("POST", "pause", {"reason": "a\x00"}, "reason"),
    "reason too long": ("POST", "pause", {"reason": "x" * 501}, "reason"),
    "pause unknown field": ("POST", "pause", {"durationms": 5}, "durationms"),
    "resume with a body": ("POST", "resume", {"x": 1}, "x"),
}


async def state(url: str) -> list[Any]:
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch("select * from tidegate.event_scheduler_sources order by source")
        audits: int = await connection.fetchval("select count(*) from tidegate.audit_log")
    finally:
        await connection.close()
    return [audits, *({k: v for k, v in row.items() if k not in _MOVING} for row in rows)]


# What a worker may change by itself while a test looks.
_MOVING = {
    "ring", "ring_at", "ring_width_us", "drain_at", "throttled_until", "plan_version", "is_replanning", "updated_at",
    "spent_at", "outcomes",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_names_its_field_and_changes_nothing(address: str, shared_url: str, name: str) -> None:
    method, verb, body, field = BAD[name]
    before = await state(shared_url)
    refused = act(address, method, at("bad-input", verb), body)
    assert refused.status_code == 422, refused.text
    assert refused.headers["content-type"] == "application/problem+json"
    assert [error["field"] for error in refused.json()["errors"]] == [field], refused.text
    assert await state(shared_url) == before


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", at("a b", "limit"), LIMIT, 422),
        ("POST", at("*", "pause"), {}, 422),
        ("PUT", at("x" * 201, "limit"), LIMIT, 422),
        ("PUT", at("x\x00", "limit"), LIMIT, 404),
        ("POST", at("nobody-knows-it", "resume"), None, 404),
        ("PUT", at("x", "limit"), b"{", 400),
        ("PUT", at("x", "limit"), b'{"limit": "\xff"}', 400),
        ("PUT", at("x", "limit"), b'{"limit": ' + b"[" * 30_000, 400),
        ("PUT", at("x", "limit"), b" " * 70_000, 413),
        ("GET", at("x", "limit"), None, 405),
        ("GET", "/admin/retries?state=nonsense", None, 422),
        ("GET", "/admin/retries?kind=nonsense", None, 422),
        ("GET", "/admin/retries?limit=0", None, 422),
        ("GET", "/admin/retries?cursor=nonsense", None, 422),
        ("GET", "/admin/retries?cursor=bnVsbA", None, 422),
        ("GET", "/admin/retries?kind=deliveries&workflow_run_id=x", None, 422),
        ("GET", "/admin/retries?nonsense=1", None, 422),
    ],
)
async def test_other_refusals(address: str, shared_url: str, method: str, path: str, body: Any, status: int) -> None:
    before = await state(shared_url)
    refused = act(address, method, path, body)
    assert refused.status_code == status, refused.text
    assert refused.headers["content-type"] == "application/problem+json"
    assert await state(shared_url) == before


def test_the_actor_must_be_a_plain_name(server: str, source: str) -> None:
    odd = "ann; drop table"
    assert ok(act(server, "PUT", at(source, "limit"), LIMIT, x_tidegate_actor=odd))["updated_by"] == "api"
    assert ok(act(server, "PUT", at(source, "limit"), LIMIT, x_tidegate_actor="ann@ops"))["updated_by"] == "ann@ops"


def test_another_content_type_is_refused(server: str) -> None:
    refused = _http.put(f"{server}{at('x', 'limit')}", content=b"limit=5", headers={"content-type": "text/plain"})
    assert refused.status_code == 415


# Settings -----------------------------------------------------------------------------------------------------------


def seeds(*entries: dict[str, Any]) -> dict[str, str]:
    return {"TIDEGATE_SOURCE_RATE_LIMITS": json.dumps(entries)}


def test_what_an_operator_set_survives_restarts_and_seeding(database_url: str, app: Path) -> None:
    seeded = seeds(
        {"source": "one", "limit": 1, "interval_ms": HOUR_MS}, {"source": "two", "limit": 2, "interval_ms": 5}
    )
    with api(database_url, **seeded) as (_, address), worker(database_url, app, **seeded):
        one, two = known(address, "one"), known(address, "two")
        assert one and two and (one["limit"], one["set_by"], two["limit"]) == (1, "settings", 2)
        ids = publish(address, "one", 2)
        eventually(lambda: len(held(address, "one")) == 1, "the seeded limit holds one")
        ok(act(address, "PUT", at("one", "limit"), {"limit": 3, "interval_ms": HOUR_MS}))
        eventually(lambda: launched(address, ids) == ids, "the operator's limit lets it go")
        ok(act(address, "DELETE", at("two", "limit")))
        ok(act(address, "POST", at("three", "pause"), {"reason": "stays"}))
    changed = seeds({"source": "one", "limit": 50, "interval_ms": 5}, {"source": "two", "limit": 60, "interval_ms": 5})
    with api(database_url, **changed) as (_, address), worker(database_url, app, **changed):
        one, two, three = (known(address, name) for name in ("one", "two", "three"))
        assert one and two and three
        assert (one["limit"], one["set_by"], two["limit"], two["set_by"]) == (3, "operator", None, "operator")
        assert (three["paused"], three["pause_reason"]) == (True, "stays")
        late = publish(address, "one", 2)  # the window goes on where it was: two of three are used
        eventually(lambda: len(held(address, "one")) == 1, "one is over the limit still")
        eventually(lambda: launched(address, late) == late[:1], "one passes")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "TIDEGATE_SOURCE_RATE_LIMITS must be a JSON list of objects"),
        ('[{"source": "a", "limit": 1, "interval_ms": 5}, {"source": "b", "limit": 0, "interval_ms": 5}]',
         "TIDEGATE_SOURCE_RATE_LIMITS[1] (b): limit must lie between 1 and"),
        ('[{"source": "a b", "limit": 1, "interval_ms": 5}]', "TIDEGATE_SOURCE_RATE_LIMITS[0].source must be the name"),
        ('[{"source": "a", "limit": 1}]', "LIMITS[0] (a): Object missing required field `interval_ms`"),
        ('[{"source": "a", "limit": 1, "interval_ms": 5, "x": 1}]', "[0] (a): Object contains unknown field `x`"),
    ],
)  # fmt: skip
def test_broken_seeds_refuse_to_start(database_url: str, app: Path, text: str, says: str) -> None:
    env = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_SOURCE_RATE_LIMITS": text}
    for command in (("serve", "--port", "0"), ("worker", str(app))):
        refused = run(*command, env=env)
        assert refused.returncode == 2
        assert says in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1


def test_a_busy_metrics_port_refuses_to_start(database_url: str, app: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        refused = run("worker", str(app), env={"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_METRICS_PORT": port})
    assert refused.returncode == 2
    assert f"TIDEGATE_METRICS_PORT {port} on 127.0.0.1 cannot be used" in refused.stderr


# The command line ---------------------------------------------------------------------------------------------------


def test_the_verbs_of_the_command_line(server: str, source: str) -> None:
    env = {"TIDEGATE_URL": server, "LOGNAME": "carol"}

    def told(*arguments: str) -> str:
        done = run(*arguments, env=env)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert told("sources", "limit", source, "100/s", "--pause", "5s").strip() == f"{source}: 100/s, pause 5s; ok"
    listed = told("sources", "list")
    assert source in listed and "100/s, pause 5s" in listed and "carol" in listed
    assert "paused until resumed by carol: tests" in told("sources", "pause", source, "--reason", "tests")
    ids = publish(server, source, 2)
    eventually(lambda: len(held(server, source)) == 2, "both are held")
    waiting = told("retries", "list", "--source", source)
    assert ids[0] in waiting and "paused" in waiting and "when resumed" in waiting
    assert told("retries", "cancel", ids[0]).strip() == f"cancelled {ids[0]}"
    assert json.loads(told("retries", "force", ids[1], "--json")) == {"id": ids[1], "status": "forced"}
    assert json.loads(told("sources", "pause", source, "--for", "10m", "--json"))["paused_until"]
    assert told("sources", "resume", source).startswith(f"{source}: 100/s, pause 5s; ok")
    eventually(lambda: launched(server, ids) == ids[1:], "the other one launches")
    assert "no limit" in told("sources", "limit", source, "--remove")
    found = json.loads(told("sources", "list", "--json"))["sources"]
    assert next(s for s in found if s["source"] == source)["limit"] is None
    policy = told("sources", "breaker", source, "--threshold", "20", "--ratio", "0.8", "--window", "1m", "--runs")
    assert policy.strip() == (
        f"{source}: breaker opens for 5m after 20 failures within 1m, if they are at least 80% of the outcomes; "
        "failed runs count; ok"
    )
    assert "no breaker policy of its own" in told("sources", "breaker", source, "--remove")
    for listed in ("events list --type no.such", "runs list --workflow nobody", "deliveries list --status exhausted",
                   "dlq list --source nobody", "audit list --actor nobody"):  # fmt: skip
        assert told(*listed.split()).strip().endswith(" match."), listed
    assert told("retries", "list", "--source", source).strip() == (
        "No waiting events match; use --kind deliveries and --kind steps for the others."
    )


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("sources", "limit", "x", "often"), 2, "a rate is written like"),
        (("sources", "limit", "x"), 2, "give a RATE such as 100/s"),
        (("sources", "limit", "x", "5/s", "--remove"), 2, "give a RATE such as 100/s"),
        (("sources", "limit", "x", "5/s", "--pause", "long"), 2, "a duration is written like"),
        (("sources", "limit", "a b", "5/s"), 1, "source: is not the name of a source"),
        (("sources", "limit", "*", "5/s", "--dry-run"), 1, "source: a dry run is for one source"),
        (("sources", "pause", "x", "--for", "5m", "--until", "2099-01-01T00:00:00Z"), 2, "--for or --until, not both"),
        (("sources", "pause", "x", "--until", "noon"), 2, "--until: must be an RFC 3339 time with a time zone"),
        (("sources", "pause", "x", "--until", "2099-01-01T00:00:00"), 2, "the time zone is missing"),
        (("sources", "pause", "x", "--until", "2020-01-01T00:00:00Z"), 1, "until: is in the past"),
        (("sources", "resume", "nobody-knows-it"), 1, "no source 'nobody-knows-it': it has no limit"),
        (("sources", "breaker", "x", "--threshold", "0"), 1, "--threshold: must lie between 1"),
        (("dlq", "list", "--since", "yesterday"), 1, "--since: must be an RFC 3339 time with a time zone"),
        (("dlq", "replay", "--all", "--yes", "--rate", "0"), 1, "--rate: must lie between 0.001 and 1000"),
        (("publish", "", "--source", "s"), 1, "TYPE: is empty; expected 1 to 200 letters"),
        (("retries", "cancel", "no-such"), 1, "no event 'no-such'; if the id is not one of --kind events"),
        (("retries", "list", "--kind", "nonsense"), 2, "nonsense"),
    ],
)
def test_refusals_of_the_command_line(address: str, arguments: tuple[str, ...], status: int, says: str) -> None:
    refused = run(*arguments, env={"TIDEGATE_URL": address})
    assert refused.returncode == status
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr


def test_health_without_a_server() -> None:
    refused = run("health", env={"TIDEGATE_URL": "http://127.0.0.1:9"})
    assert refused.returncode == 1 and "no answer from Tidegate" in refused.stderr


# Metrics ------------------------------------------------------------------------------------------------------------


def test_metrics_move_with_their_cause(server: str, metrics_port: int, source: str) -> None:
    own = f"http://127.0.0.1:{metrics_port}"
    paused_before = sample(server, "tidegate_paused_sources")
    ok(act(server, "PUT", at(source, "limit"), {"limit": 2, "interval_ms": HOUR_MS}))
    publish(server, source, 5)
    eventually(lambda: len(held(server, source)) == 3, "three are held")
    assert sample(server, "tidegate_events_received_total", source=source) == 5
    # The worker decided; the API did not. Both show the cluster's gauges.
    decided = "tidegate_source_decisions_total"
    eventually(lambda: sample(own, decided, source=source, decision="throttled") == 3, "counted")
    assert sample(own, decided, source=source, decision="allowed") == 2
    assert sample(own, "tidegate_event_ingress_lag_seconds_count", source=source) == 2
    assert sample(server, decided, source=source, decision="allowed") == 0
    for process in (server, own):
        eventually(
            lambda p=process: sample(p, "tidegate_deferred", kind="events", reason="rate_limit") >= 3, "the gauge moves"
        )
        assert sample(process, "tidegate_queue_depth", queue="ingress", state="delayed") >= 3
        assert sample(process, "tidegate_database_up") == 1

    ok(act(server, "POST", at(source, "pause"), {"duration_ms": HOUR_MS}))
    publish(server, source, 1)
    eventually(lambda: sample(own, decided, source=source, decision="paused") == 1, "the pause counts")
    for process in (server, own):
        eventually(lambda p=process: sample(p, "tidegate_paused_sources") == paused_before + 1, "the gauge goes up")
    ok(act(server, "POST", at(source, "resume")))
    ok(act(server, "DELETE", at(source, "limit")))
    eventually(lambda: sample(own, decided, source=source, decision="allowed") == 6, "all pass in the end")
    for process in (server, own):
        eventually(lambda p=process: sample(p, "tidegate_paused_sources") == paused_before, "the gauge goes down")
    names = {name for name, _ in samples(server)}
    assert {
        "tidegate_oldest_due_age_seconds", "tidegate_dead_letters", "tidegate_paused_triggers",
        "tidegate_last_processed_event_timestamp_seconds", "tidegate_event_retries_total",
    } <= names  # fmt: skip


def test_a_worker_serves_metrics_only(server: str, metrics_port: int) -> None:
    own = f"http://127.0.0.1:{metrics_port}"
    assert _http.get(f"{own}/").status_code == 404
    assert _http.post(f"{own}/metrics").status_code == 405
    with socket.create_connection(("127.0.0.1", metrics_port)) as rude:
        rude.sendall(b"x" * 100_000)
    assert _http.get(f"{own}/metrics").status_code == 200


def test_an_open_breaker_shows_in_health(server: str, source: str) -> None:
    publish(server, source, 5, type="bad")
    seen = eventually(lambda: (k := known(server, source)) and k["breaker_state"] == "open" and k, "the breaker opens")
    assert seen["breaker_until"] and "5 failures" in seen["breaker_reason"]
    [totals] = [s for s in health(server)["sources"] if s["source"] == source]
    assert totals["failures"] == 5
    [cause] = [c for c in health(server)["causes"] if c["subject"] == source]
    assert (
        cause["code"] == "source_breaker_open"
        and cause["runbook"] == "docs/operations/event-scheduler.md#source-breaker-open"
    )
    ok(act(server, "POST", at(source, "resume")))
    closed = known(server, source)
    assert closed and closed["breaker_state"] == "closed"


# The documentation --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_in_the_documentation_run(server: str) -> None:
    text = (ROOT / "docs" / "sources.md").read_text()
    commands = blocks(text, "bash")
    assert len(commands) >= 4
    for block in commands:
        shell(block, server)
    left = known(server, "shop.api")
    assert left and not left["paused"] and left["limit"] is None and left["updated_by"]


def test_every_metric_is_documented(server: str) -> None:
    text = "".join(
        (ROOT / "docs" / name).read_text()
        for name in ("sources.md", "triggers.md", "workflows.md", "operations/event-scheduler.md")
    )
    families = {family.name for family in text_string_to_metric_families(_http.get(f"{server}/metrics").text)}
    counted = {name.removesuffix("_created") for name in families}
    assert [name for name in sorted(counted) if name not in text] == []
