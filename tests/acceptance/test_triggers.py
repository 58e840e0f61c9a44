"""Triggers as their users see them, over HTTP and on the command line, on real API and worker processes.

Each test has a workflow's trigger and event types of its own, so that one API and one worker serve them all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.acceptance.conftest import ROOT
from tests.acceptance.test_readme import blocks, shell
from tests.acceptance.test_sources import at, eventually, launched, ok
from tests.processes import api, run, worker
from tidegate.client import Client
from tidegate.model.trigger_change import TriggerPatch

APP = """
from tidegate import Breaker, Tidegate, Retry

app = Tidegate()


@app.workflow()
async def fulfil(ctx, n: int = 0, order: dict = None):
    return {"n": n, "order": order}


@app.workflow()
async def bill(ctx):
    return None


@app.workflow(on="coded", throttle="5/s", idempotency_window="2d",
             breaker=Breaker(threshold=3, window="1m", pause="30s"))
async def coded(ctx, n: int = 0):
    return None
"""
HOUR_MS = 3_600_000
_http = httpx.Client(timeout=30, trust_env=False)
_numbers = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _close_http_client() -> Iterator[None]:
    yield
    _http.close()


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("triggers") / "app.py"
    file.write_text(APP)
    return file


@pytest.fixture(scope="module")
def server(shared_url: str, address: str, app: Path) -> Iterator[str]:
    """An API and a worker; the API's address."""
    with worker(shared_url, app):
        yield address


@pytest.fixture
def kind() -> str:
    """An event type of this test's own."""
    return f"kind.{next(_numbers)}"


def act(address: str, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    sent = {"content-type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
    return _http.request(method, f"{address}{path}", content=content, headers=sent)


def of(workflow: str = "fulfil", trigger_id: str = "", verb: str = "") -> str:
    return "/".join(filter(None, (f"/v1/workflows/{workflow}/triggers", trigger_id, verb)))


def create(address: str, kind: str, **fields: Any) -> dict[str, Any]:
    body = {"name": kind, "event_type": kind} | fields
    return dict(ok(act(address, "POST", of(), body, x_tidegate_actor="ann"), 201))


def publish(address: str, kind: str, count: int, source: str = "shop.api") -> list[str]:
    with Client(address) as client:
        events = [{"type": kind, "source": source, "payload": {"n": n, "key": n % 2}} for n in range(count)]
        return [receipt.id for receipt in client.publish_many(events)]


def waiting(address: str, trigger_id: str, **filters: str) -> list[dict[str, Any]]:
    asked = {"kind": "deliveries", "trigger_id": trigger_id, "limit": "500", **filters}
    return list(ok(_http.get(f"{address}/admin/retries", params=asked))["retries"])


def deliveries(address: str, trigger_id: str, **filters: str) -> list[dict[str, Any]]:
    page = ok(_http.get(f"{address}{of('fulfil', trigger_id, 'deliveries')}", params={"limit": "500", **filters}))
    return list(page["deliveries"])


def decisions(address: str, event_id: str) -> list[tuple[str, str | None, str | None]]:
    story = ok(_http.get(f"{address}/v1/events/{event_id}/explain"))["decisions"]
    return [(line["decision"], line.get("reason"), line.get("actor")) for line in story]


async def audited(url: str, subject: str) -> list[Any]:
    connection = await asyncpg.connect(url)
    try:
        rows = await connection.fetch(
            "select actor, action, before, after from tidegate.audit_log where subject = $1 order by id", subject
        )
    finally:
        await connection.close()
    return [(r["actor"], r["action"], *(json.loads(r[c]) if r[c] else None for c in ("before", "after"))) for r in rows]


# Create, show, change, delete ---------------------------------------------------------------------------------------


def test_a_trigger_made_over_http_launches(server: str, kind: str) -> None:
    made = create(
        server, kind, event_source="shop.*", predicates=[{"path": "$.payload.n", "operator": "gte", "value": 1}],
        where="event.payload.n < 3", parameter_template={"order": {"number": "{{ event.payload.n }}"}},
        retry={"max_attempts": 3}, breaker={"threshold": 2},
    )  # fmt: skip
    assert (made["workflow"], made["status"], made["version"], made["created_by"]) == ("fulfil", "active", 1, "ann")
    assert made["retry"]["max_attempts"] == 3 and made["breaker"] == {
        "threshold": 2, "ratio": 0.5, "window_ms": 300_000, "pause_ms": 300_000, "non_retryable": False,
    }  # fmt: skip
    state = made["state"]
    assert (state["paused"], state["breaker_state"], state["waiting"]) == (False, "closed", 0)
    shown = ok(_http.get(f"{server}{of('fulfil', made['id'])}"))
    assert shown == made == ok(_http.get(f"{server}/admin/triggers/{made['id']}"))
    assert made in ok(_http.get(f"{server}{of()}"))["triggers"]
    assert made in ok(_http.get(f"{server}/admin/triggers"))["triggers"]
    ids = publish(server, kind, 5)
    eventually(lambda: launched(server, ids) == ids[1:3], "those that match launch")
    with Client(server) as client:
        [started] = client.request("GET", "/v1/runs", event_id=ids[2])["runs"]
    assert started["parameters"] == {"order": {"number": 2}}
    assert {d["status"] for d in deliveries(server, made["id"])} == {"launched"}


def test_a_change_makes_a_version_and_counts_at_once(server: str, shared_url: str, kind: str) -> None:
    made = create(server, kind, where="event.payload.n == 0")
    path = of("fulfil", made["id"])
    same = ok(act(server, "PATCH", path, {"where": "event.payload.n == 0", "name": kind}))
    assert same == made  # nothing new, no version
    changed = ok(
        act(server, "PATCH", path, {"where": None, "max_concurrency": 5, "version": 1}, x_tidegate_actor="bob")
    )
    assert (changed["where"], changed["max_concurrency"], changed["version"]) == (None, 5, 2)
    assert (changed["updated_by"], changed["created_by"]) == ("bob", "ann")
    late = act(server, "PATCH", path, {"where": "event.payload.n == 9", "version": 1})
    assert late.status_code == 409 and late.json()["errors"] == [
        {"field": "version", "message": "the current version is 2"}
    ]
    ids = publish(server, kind, 3)
    eventually(lambda: launched(server, ids) == ids, "the new version takes all")
    versions = ok(_http.get(f"{server}{path}/versions"))["versions"]
    assert [(v["version"], v["changed_by"], v["definition"]["where"]) for v in versions] == [
        (2, "bob", None), (1, "ann", "event.payload.n == 0"),
    ]  # fmt: skip
    page = ok(_http.get(f"{server}{path}/versions", params={"limit": "1"}))
    rest = ok(_http.get(f"{server}{path}/versions", params={"cursor": page["next_cursor"]}))
    assert [v["version"] for v in rest["versions"]] == [1] and rest["next_cursor"] is None
    (created, updated) = asyncio.run(audited(shared_url, made["id"]))
    assert created[:3] == ("ann", "trigger.create", None) and created[3]["name"] == kind
    assert updated[:2] == ("bob", "trigger.update")
    assert (updated[2]["version"], updated[3]["version"], updated[3]["where"]) == (1, 2, None)


def test_what_waits_is_judged_by_the_new_version(server: str, kind: str) -> None:
    made = create(server, kind, throttle_count=1, throttle_window_ms=HOUR_MS)
    ids = publish(server, kind, 4)
    eventually(lambda: len(waiting(server, made["id"])) == 3, "three wait")
    path = of("fulfil", made["id"])
    ok(act(server, "PATCH", path, {"throttle_count": None, "throttle_window_ms": None, "where": "event.payload.n < 3"}))
    eventually(lambda: not waiting(server, made["id"]), "nobody waits")
    assert launched(server, ids) == ids[:3]
    [skipped] = deliveries(server, made["id"], status="skipped")
    assert skipped["event_id"] == ids[3] and "where is false" in skipped["last_error"]


@pytest.mark.parametrize("verb", ["disable", "delete"])
def test_disabling_or_deleting_cancels_what_waits(server: str, kind: str, verb: str) -> None:
    made = create(server, kind, throttle_count=1, throttle_window_ms=HOUR_MS)
    ids = publish(server, kind, 3)
    eventually(lambda: len(waiting(server, made["id"])) == 2, "two wait")
    before = metric(server, "tidegate_delivery_retries_total", "cancelled")
    path = of("fulfil", made["id"])
    if verb == "disable":
        changed = ok(act(server, "PATCH", path, {"status": "disabled"}, x_tidegate_actor="bob"))
        assert (changed["status"], changed["version"], changed["state"]["waiting"]) == ("disabled", 2, 0)
        assert {d["status"] for d in deliveries(server, made["id"])} == {"launched", "cancelled"}
    else:
        deleted = ok(act(server, "DELETE", path, x_tidegate_actor="bob"))
        assert deleted == {"id": made["id"], "workflow": "fulfil", "name": kind, "cancelled": 2}
        assert act(server, "DELETE", path).status_code == 404
        assert _http.get(f"{server}{path}").status_code == 404
        assert act(server, "PATCH", path, {"where": None}).status_code == 404
        assert act(server, "POST", f"/admin/triggers/{made['id']}/pause").status_code == 404
    assert metric(server, "tidegate_delivery_retries_total", "cancelled") == before + 2
    assert waiting(server, made["id"]) == []
    assert ("cancelled", f"trigger {verb}d by bob", "bob") in decisions(server, ids[2])
    more = publish(server, kind, 1)
    eventually(lambda: "no_trigger" in [line[0] for line in decisions(server, more[0])], "nothing takes the new event")
    assert launched(server, [*ids, *more]) == ids[:1]
    if verb == "disable":
        ok(act(server, "PATCH", path, {"status": "active", "throttle_count": None, "throttle_window_ms": None}))
        again = publish(server, kind, 1)
        eventually(lambda: launched(server, again) == again, "it launches again")


def metric(address: str, name: str, outcome: str) -> float:
    text = _http.get(f"{address}/metrics").text
    line = next(line for line in text.splitlines() if line.startswith(f'{name}{{outcome="{outcome}"}}'))
    return float(line.rpartition(" ")[2])


def test_names_are_unique_in_a_workflow(server: str, kind: str) -> None:
    made = create(server, kind)
    for workflow, status in (("fulfil", 409), ("bill", 201)):
        again = act(server, "POST", of(workflow), {"name": kind, "event_type": kind})
        assert again.status_code == status, again.text
    other = create(server, f"{kind}.other")
    refused = act(server, "PATCH", of("fulfil", other["id"]), {"name": kind})
    assert refused.status_code == 409 and [e["field"] for e in refused.json()["errors"]] == ["name"]
    ok(act(server, "DELETE", of("fulfil", made["id"])))
    assert ok(act(server, "PATCH", of("fulfil", other["id"]), {"name": kind}))["name"] == kind


def test_a_trigger_of_another_workflow_is_not_found(server: str, kind: str) -> None:
    made = create(server, kind)
    elsewhere = of("bill", made["id"])
    for method, path, body in (
        ("GET", elsewhere, None), ("PATCH", elsewhere, {"where": None}), ("DELETE", elsewhere, None),
        ("POST", f"{elsewhere}/test", {"event_id": "x"}), ("GET", f"{elsewhere}/deliveries", None),
        ("GET", f"{elsewhere}/versions", None), ("GET", of("nobody"), None),
        ("POST", of("nobody"), {"name": "a", "event_type": "b"}), ("GET", of("fulfil", "nonsense"), None),
        ("GET", "/admin/triggers/nonsense", None), ("POST", "/admin/triggers/nonsense/resume", None),
        ("GET", f"/admin/triggers/{'0' * 32}", None), ("POST", f"/admin/triggers/{'0' * 32}/pause", None),
    ):  # fmt: skip
        assert act(server, method, path, body).status_code == 404, (method, path)


# Try out ------------------------------------------------------------------------------------------------------------


async def counts(url: str) -> list[int]:
    connection = await asyncpg.connect(url)
    tables = ("workflow_events", "workflow_trigger_deliveries", "workflow_runs", "audit_log", "event_decisions")
    try:
        return [await connection.fetchval(f"select count(*) from tidegate.{table}") for table in tables]
    finally:
        await connection.close()


def test_trying_a_trigger_out_stores_nothing(server: str, shared_url: str, kind: str) -> None:
    made = create(
        server, kind, where="event.payload.n > 1", parameter_template={"n": "{{ event.payload.n }}"},
        predicates=[{"path": "$.payload.key", "operator": "exists"}], idempotency_key="{{ event.payload.key }}",
        max_concurrency=1,
        concurrency_key="{{ event.payload.missing }}",
    )  # fmt: skip
    [stored] = publish(server, kind, 1)
    eventually(lambda: "filtered" in [line[0] for line in decisions(server, stored)], "it is decided")
    before = asyncio.run(counts(shared_url))
    path = of("fulfil", made["id"], "test")
    sample = {"type": kind, "source": "shop.api", "payload": {"n": 2, "key": "k"}}
    dry_run = ok(act(server, "POST", path, {"event": sample}))
    assert dry_run["matches"] and dry_run["reason"] is None and dry_run["parameters"] == {"n": 2}
    assert dry_run["idempotency_key"] == "k" and dry_run["concurrency_key"] is None
    assert dry_run["errors"] == ["concurrency_key: {{ event.payload.missing }} is not in the event"]
    dry_run = ok(act(server, "POST", path, {"event_id": stored}))
    assert not dry_run["matches"] and "where is false" in dry_run["reason"]
    assert dry_run["where"] == {"expression": "event.payload.n > 1", "holds": False, "reason": dry_run["reason"]}
    assert dry_run["predicates"] == [{"path": "$.payload.key", "operator": "exists", "holds": True, "reason": None}]
    assert dry_run["event_type"]["holds"] and dry_run["event_source"]["holds"]
    assert asyncio.run(counts(shared_url)) == before
    assert act(server, "POST", path, {"event_id": "no-such"}).status_code == 404


def test_an_edit_is_tried_on_past_events(server: str, shared_url: str, kind: str) -> None:
    made = create(server, kind, where="event.payload.n > 2")
    path, name = of("fulfil", made["id"], "test"), f"fulfil/{kind}"
    ids = publish(server, kind, 6)
    eventually(lambda: len(deliveries(server, made["id"], status="launched")) == 3, "three are launched")
    before = asyncio.run(counts(shared_url))

    found = ok(act(server, "POST", path, {"limit": 100}))
    assert (found["events"], found["would_launch"], found["filtered"], found["cut"]) == (6, 3, 3, None)
    assert (found["compared_with"], found["deliveries"]) == ("deliveries", {"launched": 3})
    change = {"where": "event.payload.n < 2", "throttle_count": 1, "throttle_window_ms": HOUR_MS}
    found = ok(act(server, "POST", path, {"change": change}))
    assert (found["is_edited"], found["version"], found["would_launch"], found["filtered"]) == (True, 1, 2, 4)
    assert (found["newly_matched"]["count"], found["no_longer_matched"]["count"]) == (2, 3)
    assert found["newly_matched"]["event_ids"] == [ids[1], ids[0]]
    assert [(one["check"], one["count"], one["event_id"]) for one in found["filters"]] == [("where", 4, ids[5])]
    assert found["throttle"]["held"] == 1 and found["throttle"]["longest_wait_ms"] > HOUR_MS / 2
    assert found["throttle"]["longest_wait_event_id"] == ids[1] and found["not_predicted"]
    old = {"from": "2026-01-01T00:00:00Z", "to": "2026-01-02T00:00:00Z"}
    assert ok(act(server, "POST", path, old))["events"] == 0
    sample = {"type": kind, "source": "s", "payload": {"n": 1}}
    assert not ok(act(server, "POST", path, {"event": sample}))["matches"]
    assert ok(act(server, "POST", path, {"event": sample, "change": change}))["matches"]

    def told(*arguments: str) -> str:
        done = run("triggers", "test", name, *arguments, env={"TIDEGATE_URL": server})
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    assert f"{name}: 6 events, " in told("--since", "7d")
    edited = told("--set", "where=event.payload.n < 2", "--set", "throttle=1/h", "--limit", "5")
    assert f"{name}, edited: 5 events, " in edited and "left out (--limit)" in edited
    assert "newly matched: 1" in edited and "no longer matched: 3" in edited and "deliveries of these events" in edited
    assert re.search(r"filtered +4 +where: where is false", edited) and "throttle: 0 held" in edited
    assert json.loads(told("--since", "1h", "--json"))["events"] == 6
    assert asyncio.run(counts(shared_url)) == before, "nothing is stored or launched"
    assert ok(_http.get(f"{server}{of('fulfil', made['id'])}"))["version"] == 1


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({}, ["event"]),
        ({"event": {}, "event_id": "x"}, ["event"]),
        ({"event": {"source": "s"}}, ["event.type"]),
        ({"event": 5}, ["event"]),
        ({"event": None}, ["event"]),
        ({"event": {"type": "a", "source": "s", "payload": {"a": ["\x00"]}}}, ["event.payload.a[0]"]),
        ({"event": {"type": "a", "source": "s", "nope": 1}}, ["event.nope"]),
        ({"event_id": "a\x00"}, ["event_id"]),
        ({"event_id": 5}, ["event_id"]),
        ({"sample": {}}, ["sample"]),
        ({"event_id": "x", "limit": 5}, ["event"]),
        ({"from": "2026-01-01T00:00:00"}, ["from"]),
        ({"from": "1000-01-01T00:00:00Z", "limit": 0}, ["limit", "from"]),
        ({"limit": 10_001}, ["limit"]),
        ({"change": []}, ["change"]),
        ({"change": {"nope": 1}}, ["change.nope"]),
        ({"change": {"where": "event.(", "name": None}}, ["change.name"]),
    ],
)
def test_a_wrong_dry_run_names_its_fields(server: str, body: Any, fields: list[str]) -> None:
    [coded] = ok(_http.get(f"{server}{of('coded')}"))["triggers"]
    refused = act(server, "POST", of("coded", coded["id"], "test"), body)
    assert refused.status_code == 422 and [e["field"] for e in refused.json()["errors"]] == fields, refused.text


# Pause, cancel, force -----------------------------------------------------------------------------------------------


def test_a_pause_holds_launches_until_resumed(server: str, shared_url: str, kind: str) -> None:
    made = create(server, kind)
    path = f"/admin/triggers/{made['id']}"
    paused = ok(act(server, "POST", f"{path}/pause", {"reason": "maintenance"}, x_tidegate_actor="bob"))["state"]
    assert paused["paused"] and paused["paused_until"] is None
    assert (paused["pause_reason"], paused["paused_by"]) == ("maintenance", "bob")
    ids = publish(server, kind, 3)
    rows = eventually(lambda: len(r := waiting(server, made["id"])) == 3 and r, "all wait")
    assert [(r["reason"], r["eta_seconds"], r["event_id"]) for r in rows] == [("paused", None, i) for i in ids]
    assert {(r["workflow"], r["trigger"], r["type"], r["kind"]) for r in rows} == {("fulfil", kind, kind, "deliveries")}
    assert launched(server, ids) == []
    assert ok(_http.get(f"{server}{path}"))["state"]["waiting"] == 3
    ended = ok(act(server, "POST", f"{path}/pause", {"duration_ms": HOUR_MS}))["state"]
    assert ended["paused_until"] and ended["pause_reason"] is None
    eventually(lambda: all(r["eta_seconds"] is not None for r in waiting(server, made["id"])), "they have an end")
    resumed = ok(act(server, "POST", f"{path}/resume", x_tidegate_actor="bob"))["state"]
    assert not resumed["paused"] and resumed["paused_at"] is None
    eventually(lambda: launched(server, ids) == ids, "all launch after the resume")
    actions = [line[:2] for line in asyncio.run(audited(shared_url, made["id"]))]
    assert actions == [
        ("ann", "trigger.create"), ("bob", "trigger.pause"), ("api", "trigger.pause"), ("bob", "trigger.resume"),
    ]  # fmt: skip


def test_cancel_and_force_deliveries(server: str, shared_url: str, kind: str) -> None:
    made = create(server, kind)
    ok(act(server, "POST", f"/admin/triggers/{made['id']}/pause", {"duration_ms": HOUR_MS}))
    ids = publish(server, kind, 3)
    first, second, third = eventually(lambda: len(r := waiting(server, made["id"])) == 3 and r, "all wait")
    path = "/admin/retries/deliveries"
    done = ok(act(server, "POST", f"{path}/{first['id']}/cancel", x_tidegate_actor="bob"))
    assert done == {"id": first["id"], "status": "cancelled"}
    for verb in ("cancel", "force"):
        again = act(server, "POST", f"{path}/{first['id']}/{verb}")
        assert again.status_code == 409 and "is no longer waiting: it is cancelled" in again.json()["detail"]
        assert act(server, "POST", f"{path}/{'0' * 32}/{verb}").status_code == 404
        assert act(server, "POST", f"{path}/nonsense/{verb}").status_code == 404
        assert act(server, "POST", f"{path}/{second['id']}/{verb}", {"x": 1}).status_code == 422
    # Forced while paused: the trigger's gate is asked and says no again.
    assert ok(act(server, "POST", f"{path}/{second['id']}/force"), 202) == {"id": second["id"], "status": "forced"}
    assert {r["id"] for r in waiting(server, made["id"])} == {second["id"], third["id"]}
    assert [r["id"] for r in waiting(server, made["id"], state="cancelled")] == [first["id"]]
    ok(act(server, "POST", f"/admin/triggers/{made['id']}/resume"))
    eventually(lambda: launched(server, ids) == ids[1:], "the others launch")
    refused = act(server, "POST", f"{path}/{second['id']}/cancel")
    assert refused.status_code == 409 and "it is launched" in refused.json()["detail"]
    assert ("cancelled", "cancelled by bob", "bob") in decisions(server, ids[0])
    assert "forced" in {decision for decision, _, _ in decisions(server, ids[1])}
    assert [line[:2] for line in asyncio.run(audited(shared_url, first["id"]))] == [("bob", "delivery.cancel")]


def test_exactly_one_of_cancelling_and_launching_wins(server: str, kind: str) -> None:
    made = create(server, kind, throttle_count=1, throttle_window_ms=HOUR_MS)
    publish(server, kind, 41)
    rows = eventually(lambda: len(r := waiting(server, made["id"])) == 40 and r, "forty wait")

    def cancel(row: dict[str, Any]) -> int:
        return act(server, "POST", f"/admin/retries/deliveries/{row['id']}/cancel").status_code

    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(cancel, reversed(rows))
        ok(act(server, "PATCH", of("fulfil", made["id"]), {"throttle_count": 1000, "throttle_window_ms": 1000}))
        statuses = {row["id"]: status for row, status in zip(reversed(rows), answers, strict=True)}
    eventually(lambda: not waiting(server, made["id"]), "nobody waits")
    assert set(statuses.values()) <= {200, 409}
    became = {d["id"]: d["status"] for d in deliveries(server, made["id"])}
    assert {i: became[i] for i in statuses} == {i: "cancelled" if s == 200 else "launched" for i, s in statuses.items()}
    events = [row["event_id"] for row in rows]
    assert len(launched(server, events)) == list(statuses.values()).count(409)


async def test_a_change_or_pause_lets_no_older_launch_follow(server: str, shared_url: str, kind: str) -> None:
    made = create(server, kind, parameter_template={"n": 0})
    path = of("fulfil", made["id"])
    is_over = threading.Event()
    sent: list[str] = []

    def keep_publishing() -> None:
        while not is_over.is_set():
            sent.extend(publish(server, kind, 20))

    def launches() -> int:
        return len(deliveries(server, made["id"], status="launched"))

    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(keep_publishing)
        for n in range(1, 11):
            seen = launches()
            eventually(lambda seen=seen: launches() > seen or seen == 500, "events flow")  # type: ignore[misc]
            ok(act(server, "PATCH", path, {"parameter_template": {"n": n}}))
        ok(act(server, "POST", f"/admin/triggers/{made['id']}/pause"))
        connection = await asyncpg.connect(shared_url)
        paused_at = await connection.fetchval("select tidegate.now()")
        eventually(lambda: waiting(server, made["id"]), "events go on to match, and wait")
        is_over.set()
        publishing.result()
    try:
        late = await connection.fetch(
            "select d.id from tidegate.workflow_trigger_deliveries d where d.trigger_id = $1 and d.status = 'launched' "
            "and (d.launched_at >= $2 or d.launched_at >= (select v.changed_at "
            "from tidegate.workflow_event_trigger_versions v where v.trigger_id = d.trigger_id "
            "and v.version = d.trigger_version + 1))",
            uuid.UUID(made["id"]), paused_at,
        )  # fmt: skip
        wrong = await connection.fetchval(
            "select count(*) from tidegate.workflow_trigger_deliveries d join tidegate.workflow_runs r "
            "on r.delivery_id = d.id where d.trigger_id = $1 and (r.parameters->>'n')::int + 1 <> d.trigger_version",
            uuid.UUID(made["id"]),
        )
    finally:
        await connection.close()
    assert late == [] and wrong == 0
    ok(act(server, "POST", f"/admin/triggers/{made['id']}/resume"))
    eventually(lambda: not waiting(server, made["id"]), "all go on")


def test_filters_and_pages_of_what_waits(server: str, kind: str) -> None:
    made = create(server, kind, throttle_count=1, throttle_window_ms=HOUR_MS)
    publish(server, kind, 4)
    publish(server, kind, 2, source="shop.web")
    rows = eventually(lambda: len(r := waiting(server, made["id"])) == 5 and r, "five wait")
    assert {r["reason"] for r in rows} == {"throttle"} and all(r["eta_seconds"] > 0 for r in rows)
    assert [r["eta_seconds"] for r in rows] == sorted(r["eta_seconds"] for r in rows)
    assert len(waiting(server, made["id"], source="shop.web")) == 2
    assert len(waiting(server, made["id"], workflow="fulfil", reason="throttle")) == 5
    assert waiting(server, made["id"], workflow="bill") == [] == waiting(server, made["id"], reason="paused")
    for ask, path, key in (
        ({"kind": "deliveries", "trigger_id": made["id"]}, "/admin/retries", "retries"),
        ({}, of("fulfil", made["id"], "deliveries"), "deliveries"),
    ):
        found: list[str] = []
        cursor = None
        while True:
            params = {**ask, "limit": "2"} | ({"cursor": cursor} if cursor else {})
            page = ok(_http.get(f"{server}{path}", params=params))
            found += [row["id"] for row in page[key]]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert len(found) == len(set(found)) == (5 if key == "retries" else 6)
    newest = ok(_http.get(f"{server}/v1/deliveries", params={"limit": "1", "status": "throttled"}))["deliveries"]
    assert newest[0]["trigger_id"] == made["id"]
    for wrong in ("kind=events&trigger_id=" + made["id"], "workflow=x", "kind=steps&workflow_run_id=x",
                  "kind=deliveries&trigger_id=x", "kind=deliveries&cursor=bnVsbA"):  # fmt: skip
        assert _http.get(f"{server}/admin/retries?{wrong}").status_code == 422, wrong
    for wrong in ("deliveries?status=nonsense", "deliveries?cursor=x", "versions?cursor=x", "versions?limit=0"):
        assert _http.get(f"{server}{of('fulfil', made['id'], wrong)}").status_code == 422, wrong


# What code declares -------------------------------------------------------------------------------------------------


def test_code_and_edits(database_url: str, tmp_path: Path) -> None:
    file = tmp_path / "app.py"
    text = APP[APP.index("@app.workflow(on") :]
    head = APP[: APP.index("@app.workflow()")]
    file.write_text(head + text)
    with api(database_url) as (_, address):

        def known() -> Any:
            return ok(_http.get(f"{address}{of('coded')}"))["triggers"]

        with worker(database_url, file):
            [made] = known()
            assert (made["throttle_count"], made["idempotency_window_ms"]) == (5, 172_800_000)
            assert made["breaker"] == {
                "threshold": 3, "ratio": 0.5, "window_ms": 60_000, "pause_ms": 30_000, "non_retryable": False,
            }  # fmt: skip
            assert made["created_by"] == "code"
            ok(act(address, "PATCH", of("coded", made["id"]), {"throttle_count": 9}))
        with worker(database_url, file):  # the same code again: the edit stays
            [same] = known()
            assert (same["throttle_count"], same["version"]) == (9, 2)
        file.write_text(head + text.replace("5/s", "7/s"))
        with worker(database_url, file):  # the code has changed: it wins
            [changed] = known()
            assert (changed["throttle_count"], changed["version"], changed["updated_by"]) == (7, 3, "code")
            ok(act(address, "DELETE", of("coded", made["id"])))
        with worker(database_url, file):  # and a deletion stays too
            assert known() == []


# Bad input ----------------------------------------------------------------------------------------------------------

EXISTS = {"path": "$.id", "operator": "exists"}
GOOD: dict[str, Any] = {"name": "bad input", "event_type": "a.b"}
DEEP = b'{"name": "x", "event_type": "a", "parameter_template": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}"
WRONG: dict[str, tuple[Any, int, list[str]]] = {
    "empty": ({}, 422, ["name", "event_type"]),
    "a list": ([GOOD], 422, ["body"]),
    "unknown field": (GOOD | {"throtle_count": 1}, 422, ["throtle_count"]),
    "two of many": (GOOD | {"where": "event.", "throttle_count": 5}, 422, ["throttle_window_ms", "where"]),
    "predicate path": (GOOD | {"predicates": [EXISTS, EXISTS | {"path": "x"}]}, 422, ["predicates[1].path"]),
    "predicate type": (GOOD | {"predicates": [{"path": 1}]}, 422, ["predicates[0].path"]),
    "template": (GOOD | {"parameter_template": {"order": {"id": "{{ order.id }}"}}}, 422,
                 ["parameter_template.order.id"]),
    "retry": (GOOD | {"retry": {"base_ms": 10, "max_ms": 5}}, 422, ["retry.max_ms"]),
    "retry null field": (GOOD | {"retry": {"base_ms": None}}, 422, ["retry.base_ms"]),
    "retry NaN": (b'{"name": "x", "event_type": "a", "retry": {"factor": NaN}}', 422, ["retry.factor"]),
    "breaker": (GOOD | {"breaker": {"threshold": "3"}}, 422, ["breaker.threshold"]),
    "huge": (GOOD | {"max_concurrency": 10**40}, 422, ["max_concurrency"]),
    "huge in a template": (GOOD | {"parameter_template": {"n": 10**40}}, 422, ["parameter_template.n"]),
    "NUL in a key": (GOOD | {"parameter_template": {"a\x00": 1}}, 422, ["parameter_template"]),
    "NUL in a type": (GOOD | {"event_type": "a\x00"}, 422, ["event_type"]),
    "deep": (DEEP, 400, ["body"]),
    "deeper than templates may be": (DEEP.replace(b"[" * 4950, b"").replace(b"]" * 4950, b""), 422, None),
    "not JSON": (b"{", 400, ["body"]),
    "too large": (b" " * 70_000, 413, []),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
async def test_bad_input_names_its_fields_and_changes_nothing(server: str, shared_url: str, name: str) -> None:
    body, status, fields = WRONG[name]
    before = await counts(shared_url)
    [coded] = ok(_http.get(f"{server}{of('coded')}"))["triggers"]
    for method, path in (("POST", of()), ("PATCH", of("coded", coded["id"]))):
        if name == "empty" and method == "PATCH":
            continue  # no change at all
        refused = act(server, method, path, body)
        assert refused.status_code == status, refused.text
        assert refused.headers["content-type"] == "application/problem+json"
        if fields is not None and not (name == "two of many" and method == "PATCH"):
            assert [e["field"] for e in refused.json().get("errors", [])] == fields, refused.text
    assert ok(_http.get(f"{server}{of('coded')}"))["triggers"] == [coded]
    assert (await counts(shared_url))[3] == before[3]


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.sampled_from(["{{ event.payload.n }}", "{{ event", "event.payload.n > 1", "$.payload.n", "equals", "\x00"])
    | st.just(10**40),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["path", "operator", "value", "values", "flags", "base_ms", "max_ms", "factor", "threshold"])
        | st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
_bodies = st.dictionaries(st.sampled_from(TriggerPatch.__struct_fields__), _values, max_size=6)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=_bodies, method=st.sampled_from(["POST", "PATCH"]))
def test_no_body_is_ever_a_500(server: str, body: Any, method: str) -> None:
    mine = [t for t in ok(_http.get(f"{server}{of('bill')}"))["triggers"] if t["created_by"] == "fuzz"]
    if not mine:
        new = {"name": "fuzz", "event_type": "fuzzed.never"}
        mine = [ok(act(server, "POST", of("bill"), new, x_tidegate_actor="fuzz"), 201)]
    path = of("bill") if method == "POST" else of("bill", mine[0]["id"])
    try:
        content = json.dumps(body).encode()
    except UnicodeEncodeError:
        return
    answer = act(server, method, path, content)
    assert answer.status_code in (200, 201, 400, 409, 422), (answer.status_code, answer.text, body)
    if answer.is_success:  # what was taken can be given back
        assert ok(_http.get(f"{server}{of('bill')}"))
        ok(_http.get(f"{server}{of('bill', answer.json()['id'], 'versions')}"))
    if answer.status_code == 201:
        ok(act(server, "DELETE", of("bill", answer.json()["id"])))


# The command line ---------------------------------------------------------------------------------------------------

FILE = """
workflow: fulfil
name: {kind}
event_type: {kind}
event_source: shop.*
where: event.payload.n >= 0
throttle: 1/h
idempotency_key: "{{{{ event.payload.n }}}}"
idempotency_window: 1d
retry: {{max_attempts: 8, base: 5s, cap: 10m}}
"""


LAUGHS = "\n".join(["a0: &a0 [x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))])


def test_the_verbs_of_the_command_line(server: str, kind: str, tmp_path: Path) -> None:
    env = {"TIDEGATE_URL": server, "LOGNAME": "carol"}
    (tmp_path / "trigger.yaml").write_text(FILE.format(kind=kind))
    (tmp_path / "event.yaml").write_text(f"type: {kind}\nsource: shop.api\npayload: {{n: 7}}\n")

    def told(*arguments: str, **more: Any) -> str:
        done = run(*arguments, env=env, cwd=tmp_path, **more)
        assert done.returncode == 0, done.stderr
        return str(done.stdout)

    name = f"fulfil/{kind}"
    assert told("triggers", "create", "-f", "trigger.yaml").startswith(f"created {name} (v1, ")
    made = json.loads(told("triggers", "show", name, "--json"))
    assert (made["throttle_count"], made["throttle_window_ms"], made["created_by"]) == (1, HOUR_MS, "carol")
    assert (made["idempotency_window_ms"], made["retry"]["base_ms"], made["retry"]["max_ms"]) == (
        86_400_000, 5000, 600_000,
    )  # fmt: skip
    shown = told("triggers", "show", made["id"])
    assert f"{kind} from shop.*" in shown and "1/h" in shown and "once per {{ event.payload.n }} within 1d" in shown
    assert name in told("triggers", "list") and name in told("triggers", "list", "fulfil")
    assert f"=> {name} matches" in told("triggers", "test", name, "--event", "event.yaml")
    sample = json.dumps({"type": kind, "source": "x"})
    tried = told("triggers", "test", name, "--event", "-", input=sample)
    assert f"=> {name} does not match: the trigger takes events from shop.*" in tried
    ids = publish(server, kind, 3)
    eventually(lambda: len(waiting(server, made["id"])) == 2, "two wait")
    listed = told("retries", "list", "--kind", "deliveries", "--trigger", name)
    first, second = (row["id"] for row in waiting(server, made["id"]))
    assert first in listed and re.search(r"\bthrottle +1 ", listed) and name in listed
    assert name in told("explain", ids[0]) and name in told("explain", ids[1])
    assert "paused until resumed by carol: tests" in told("triggers", "pause", name, "--reason", "tests")
    eventually(lambda: "when resumed" in told("retries", "list", "--kind", "deliveries", "--trigger", name), "no ETA")
    assert re.search(r"\bpaused +- ", told("retries", "list", "--kind", "deliveries", "--trigger", name)), (
        "none is used"
    )
    assert told("retries", "cancel", "--kind", "deliveries", first).strip() == f"cancelled {first}"
    forced = told("retries", "force", second, "--kind", "deliveries", "--json")
    assert json.loads(forced) == {"id": second, "status": "forced"}
    assert "active" in told("triggers", "resume", name)
    assert "trigger.id" not in told("deliveries", "list", "--trigger", name, "--status", "cancelled")
    assert ids[1] in told("deliveries", "list", "--trigger", made["id"])
    changed = told("triggers", "update", name, "--set", "throttle=null", "--set", "where=event.payload.n > 1")
    assert changed.startswith(f"changed {name} (v2, ") and "no limit" in changed
    eventually(lambda: launched(server, ids) == [ids[0], ids[2]], "the last one launches")
    # A trigger as it is shown can be edited and sent back; the version guards it.
    edited = json.loads(told("triggers", "show", name, "--json")) | {"max_concurrency": 4}
    (tmp_path / "edited.json").write_text(json.dumps(edited))
    assert "4 at once" in told("triggers", "update", name, "-f", "edited.json")
    late = run("triggers", "update", name, "-f", "edited.json", env=env, cwd=tmp_path)
    assert late.returncode == 1 and "the current version is 3" in late.stderr
    assert told("triggers", "update", name, "--set", "max_concurrency=4").startswith(f"unchanged {name} (v3, ")
    versions = told("triggers", "versions", name)
    assert "max_concurrency: null → 4" in versions and "created" in versions and "carol" in versions
    assert told("triggers", "update", name, "--set", "status=disabled").rstrip().endswith("; disabled")
    assert told("triggers", "delete", name).strip() == f"deleted {name}"


@pytest.mark.parametrize(
    ("arguments", "text", "status", "says"),
    [
        (("triggers", "create", "-f", "-"), "name: [a", 2, "standard input is not YAML, line 1, column"),
        (("triggers", "create", "-f", "-"), "name: a\nevent_type: b", 2, "name the workflow to launch"),
        (("triggers", "create", "-f", "-"), "[]", 2, "must contain one object (name: value), not a list"),
        (("triggers", "create", "-f", "-"), "", 2, "not nothing"),
        (("triggers", "create", "-f", "-"), "on: x", 2, "quote them"),
        (("triggers", "create", "-f", "-"), "a: !!python/object:os.system {}", 2, "is not YAML, line 1"),
        (("triggers", "create", "-f", "-"), "a: &x [*x]", 2, "nested too deeply"),
        (("triggers", "create", "-f", "-"), LAUGHS, 2, "is too large"),
        (("triggers", "create", "-f", "-"), "? [a]\n: b", 2, "is not YAML, line 1"),
        (("triggers", "create", "-f", "-"), "a: 1\na: 2", 2, "line 2, column 1: duplicate key a"),
        (("triggers", "create", "-f", "-"), "a: .nan", 2, "cannot be sent as JSON"),
        (("triggers", "create", "-f", "-", "--workflow", "bill"), "workflow: fulfil", 2, "--workflow names bill"),
        (("triggers", "create", "-f", "-", "--workflow", "bill"), "throttle: often", 2, "throttle: a rate is written"),
        (("triggers", "create", "-f", "-", "--workflow", "bill"), "idempotency_window: x", 2, "a duration is written"),
        (("triggers", "create", "-f", "-", "--workflow", "bill"), "retry: {base: x}", 2, "retry.base: a duration"),
        (("triggers", "create", "-f", "-", "--workflow", "bill"), "name: a", 1, "event_type: is required"),
        (("triggers", "create", "-f", "-", "--workflow", "nobody"), "name: a", 1, "no workflow 'nobody'"),
        (("triggers", "create", "-f", "nowhere.yaml"), "", 2, "nowhere.yaml cannot be read: No such file"),
        (("triggers", "create"), "", 2, "--file"),
        (("triggers", "show", "fulfil"), "", 2, "ID is a trigger's id or WORKFLOW/NAME"),
        (("triggers", "show", "coded/nope"), "", 1, "coded has no trigger 'nope'; its triggers: code"),
        (("triggers", "show", "0" * 32), "", 1, "no trigger 00000000"),
        (("triggers", "list", "nobody"), "", 1, "no workflow 'nobody'"),
        (("triggers", "update", "coded/code"), "", 2, "give -f FILE, or --set"),
        (("triggers", "update", "coded/code", "--set", "where"), "", 2, "--set takes field=value"),
        (("triggers", "update", "coded/code", "--set", "nope=1"), "", 1, "nope: unknown field"),
        (("triggers", "update", "coded/code", "--set", "max_concurrency=x"), "", 1, "must be a whole number or null"),
        (
            ("triggers", "update", "coded/code", "-f", "-"),
            "retry: {base: 9s, cap: 1s}",
            1,
            "retry.cap: must not be bel",
        ),
        (("triggers", "update", "coded/code", "--set", "concurrency_key=x"), "", 1, "max_concurrency: is required"),
        (("triggers", "pause", "coded/code", "--for", "5m", "--until", "x"), "", 2, "--for or --until, not both"),
        (("triggers", "pause", "coded/code", "--until", "2020-01-01T00:00:00Z"), "", 1, "--until: is in the past"),
        (("triggers", "test", "coded/code"), "", 2, "give --event FILE, or --event-id ID, or --since"),
        (("triggers", "test", "coded/code", "--event", "-"), "{}", 1, "event.type: is required"),
        (("triggers", "test", "coded/code", "--since", "soon"), "", 1, "--since: "),
        (("triggers", "test", "coded/code", "--since", "1d", "--event-id", "x"), "", 2, "give --event FILE, or"),
        (("triggers", "test", "coded/code", "--set", "where=event.("), "", 1, "(where: is not a CEL expression"),
        (("triggers", "test", "coded/code", "-f", "-"), "throttle_window_ms: null", 1, "(throttle_window_ms: is requ"),
        (("triggers", "test", "coded/code", "--event-id", "no-such"), "", 1, "no event 'no-such'"),
        (("deliveries", "list", "--status", "nonsense"), "", 2, "nonsense"),
        (("retries", "list", "--trigger", "coded/code"), "", 2, "need --kind deliveries"),
        (("retries", "cancel", "--kind", "deliveries", "nonsense"), "", 1, "no delivery 'nonsense'"),
    ],
)
def test_refusals_of_the_command_line(
    server: str, arguments: tuple[str, ...], text: str, status: int, says: str
) -> None:
    refused = run(*arguments, env={"TIDEGATE_URL": server}, input=text)
    assert refused.returncode == status, refused.stderr
    assert says in refused.stderr
    assert "Traceback" not in refused.stderr


# The documentation --------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_commands_in_the_documentation_run(server: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / "triggers-operate.md").read_text()
    (tmp_path / "trigger.yaml").write_text(blocks(text, "yaml")[0])
    commands = blocks(text, "bash")
    assert len(commands) >= 4
    told = [shell(f"cd {tmp_path}\n{block}", server) for block in commands]
    assert "=> fulfil/large-orders matches" in "".join(told) and "deleted fulfil/large-orders" in told[-1]


def test_the_openapi_document_knows_the_routes(server: str) -> None:
    document = ok(_http.get(f"{server}/openapi.json"))
    paths = document["paths"]
    assert {"get", "patch", "delete"} <= set(paths["/v1/workflows/{slug}/triggers/{trigger_id}"])
    body = paths["/v1/workflows/{slug}/triggers"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["name", "event_type"]
    names = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert len(names) == len(set(names))


def test_sources_and_triggers_pause_alone(server: str, kind: str) -> None:
    """A delivery that waits for its trigger does not care for its source's limit, and the other way round."""
    made = create(server, kind, throttle_count=1, throttle_window_ms=HOUR_MS)
    source = f"{kind}.source"
    ids = publish(server, kind, 2, source=source)
    eventually(lambda: len(waiting(server, made["id"])) == 1, "one waits for the throttle")
    ok(act(server, "POST", at(source, "pause"), {"duration_ms": HOUR_MS}))
    ok(act(server, "PATCH", of("fulfil", made["id"]), {"throttle_count": 5}))
    rows = eventually(lambda: waiting(server, made["id"], reason="source_paused"), "it waits for its source now")
    assert [r["event_id"] for r in rows] == ids[1:] and launched(server, ids) == ids[:1]
    ok(act(server, "POST", at(source, "resume")))
    eventually(lambda: launched(server, ids) == ids, "it launches once its source is resumed")
