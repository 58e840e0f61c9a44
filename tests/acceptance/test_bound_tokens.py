"""A token that is bound to sources, on real processes: it sees and operates what belongs to them, and nothing else."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from tests.acceptance.test_auth import bearer, create, operations
from tests.processes import PATIENCE_SECONDS, api, run, worker
from tidegate.api.bound_tokens import RULES

MINE, OTHER = "shop.web", "bank-of-others"
APP = """
from tidegate import NonRetryable, Retry, Tidegate

app = Tidegate()


@app.workflow(on="go")
async def go(ctx):
    return {"done": True}


@app.workflow(on="rest")
async def rest(ctx):
    await ctx.sleep("1h")


@app.workflow(on="slow", throttle="1/h")
async def slow(ctx):
    return None


async def broken():
    raise NonRetryable("no")


@app.workflow(on="fail")
async def fail(ctx):
    await ctx.step("broken", broken)
"""


class World(NamedTuple):
    """An API with events of two sources, and tokens: of an admin, and of one who is for one of the sources."""

    url: str
    http: httpx.Client
    admin: dict[str, str]
    mine: dict[str, str]

    def get(self, path: str, **headers: str) -> Any:
        return self.http.get(self.url + path, headers=self.admin | headers).raise_for_status().json()


def until(found: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (value := found()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def world(shared_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    app = tmp_path_factory.mktemp("bound") / "app.py"
    app.write_text(APP)
    admin = bearer(create(shared_url, "chief", "--scope", "admin"))
    scopes = ("--scope", "read", "--scope", "operate", "--scope", "publish")
    mine = bearer(create(shared_url, "mine", *scopes, "--source", "shop.*"))
    with (
        api(shared_url, TIDEGATE_AUTH="on") as (_, url),
        worker(shared_url, app),
        httpx.Client(timeout=30, trust_env=False) as http,
    ):
        world = World(url, http, admin, mine)
        until(lambda: len(world.get("/v1/workflows")["workflows"]) == 4)
        for source in (MINE, OTHER):
            events = [{"type": "go", "source": source, "id": "same"}]
            events += [{"type": kind, "source": source} for kind in ("go", "rest", "fail", "slow", "slow")]
            http.post(f"{url}/v1/events", json=events, headers=admin).raise_for_status()
            body = {"scheme": "github"}
            http.put(f"{url}/admin/sources/{source}/webhook", json=body, headers=admin).raise_for_status()
        until(lambda: len(world.get("/admin/dead-letters")["dead_letters"]) == 2)
        until(lambda: len(world.get("/admin/retries?kind=steps")["retries"]) == 2)
        until(lambda: len(world.get("/admin/retries?kind=deliveries")["retries"]) == 3)
        for source in (MINE, OTHER):
            http.post(f"{url}/admin/sources/{source}/pause", headers=admin).raise_for_status()
            http.post(f"{url}/v1/events", json={"type": "go", "source": source}, headers=admin).raise_for_status()
        until(lambda: len(world.get("/admin/retries?kind=events")["retries"]) == 2)
        yield world


LISTS = {
    "/v1/events": "events", "/v1/runs": "runs", "/v1/deliveries": "deliveries", "/admin/decisions": "decisions",
    "/admin/retries?kind=events": "retries", "/admin/retries?kind=deliveries": "retries",
    "/admin/retries?kind=steps": "retries", "/admin/dead-letters": "dead_letters", "/admin/sources": "sources",
    "/admin/webhooks": "webhooks",
}  # fmt: skip


@pytest.mark.parametrize("path", LISTS)
def test_lists_show_what_is_its_own(world: World, path: str) -> None:
    events = {e["id"]: e["source"] for e in world.get("/v1/events?limit=500")["events"]}

    def source(row: dict[str, Any]) -> str:
        return row["source"] if "source" in row else events[row["event_id"]]

    everything = world.get(path)[LISTS[path]]
    assert {MINE, OTHER} <= {source(row) for row in everything}
    own = world.get(path, **world.mine)[LISTS[path]]
    expected = [row for row in everything if source(row) == MINE]
    assert [row.get("id") for row in own if source(row) == MINE] == [row.get("id") for row in expected]
    assert all(source(row).startswith("shop.") for row in own) and OTHER not in json.dumps(own)


def ids(world: World, source: str) -> dict[str, str]:
    """One of each kind of thing of a source, as routes name it."""
    events = [e["id"] for e in world.get("/v1/events?limit=500")["events"] if e["source"] == source]
    runs = [r["id"] for r in world.get("/v1/runs?limit=500")["runs"] if r["event_id"] in events]

    def first(path: str, rows: str) -> str:
        found: str = next(row["id"] for row in world.get(path)[rows] if row["source"] == source)
        return found

    return {
        "id": first("/admin/retries?kind=events", "retries"), "run_id": runs[0], "source": source, "kind": "events",
        "delivery_id": first("/admin/retries?kind=deliveries", "retries"),
        "step_id": first("/admin/retries?kind=steps", "retries"),
        "dead_letter_id": first("/admin/dead-letters", "dead_letters"),
    }  # fmt: skip


def test_nothing_of_another_source_can_be_reached(world: World) -> None:
    """Every operation of the document, with everything of the other source in its path and body."""
    others, before = ids(world, OTHER), world.get("/admin/audit?limit=1")["entries"]
    bounded = {(method, path.replace(":path", "")) for method, path in RULES}
    for method, path, scope in operations(world.http, world.url):
        if scope not in ("read", "operate") or path.startswith("/v1/webhooks/"):
            continue
        address = world.url + path
        for name, value in others.items():
            address = address.replace(f"{{{name}}}", value)
        address = address.replace("{slug}", "go").replace("{trigger_id}", str(uuid.uuid4()))
        for body in ({}, {"source": OTHER}, {"all": True}):
            answer = world.http.request(method, address, headers=world.mine, json=body if method == "POST" else None)
            case = (method, path, body, answer.status_code)
            assert OTHER not in answer.text or answer.status_code in (403, 404), case
            if (method, path) not in bounded or "{" in path or method == "POST":
                assert answer.status_code in (403, 404), case
            else:
                assert answer.status_code == 200, case
    assert world.get("/admin/audit?limit=1")["entries"] == before  # nothing was changed
    assert ids(world, OTHER) == others


def test_an_id_that_two_sources_share_is_its_own(world: World) -> None:
    both = world.http.get(f"{world.url}/v1/events/same", headers=world.admin)
    assert both.status_code == 409 and OTHER in both.text
    own = world.get("/v1/events/same", **world.mine)
    assert own["source"] == MINE
    assert world.get("/v1/events/same/explain", **world.mine)["event_id"] == own["id"]


def test_health_is_of_its_own_sources(world: World) -> None:
    found = world.get("/admin/event-health", **world.mine)
    assert OTHER not in json.dumps(found) and found["status"] == "degraded"
    assert MINE in [cause["subject"] for cause in found["causes"]]
    assert MINE in [one["source"] for one in found["paused_sources"]]
    told = run("health", env={"TIDEGATE_URL": world.url, "TIDEGATE_TOKEN": world.mine["authorization"].split()[1]})
    assert told.returncode == 1 and MINE in told.stdout and OTHER not in told.stdout


def test_it_operates_its_own_source(world: World) -> None:
    source = "shop.operated"
    events = [{"type": kind, "source": source} for kind in ("rest", "fail", "slow")]
    world.http.post(f"{world.url}/v1/events", json=events, headers=world.admin).raise_for_status()
    for path, rows in (("/admin/dead-letters", "dead_letters"), *((f"/admin/retries?kind={k}", "retries") for k in (
        "steps", "deliveries"))):  # fmt: skip
        until(lambda path=path, rows=rows: [row for row in world.get(path)[rows] if row["source"] == source])
    world.http.post(f"{world.url}/admin/sources/{source}/pause", headers=world.admin).raise_for_status()
    world.http.post(f"{world.url}/v1/events", json=events[0], headers=world.admin).raise_for_status()
    until(lambda: [row for row in world.get("/admin/retries?kind=events")["retries"] if row["source"] == source])
    own = ids(world, source)

    def post(path: str, body: Any = None) -> int:
        return world.http.post(f"{world.url}{path}", headers=world.mine, json=body).status_code

    assert post("/v1/events", {"type": "go", "source": source}) == 202
    assert post("/v1/events", {"type": "go", "source": OTHER}) == 403
    assert post("/admin/retries/events/cancel", {"source": source, "dry_run": True}) == 200
    assert post("/admin/dead-letters/replay", {"source": source, "dry_run": True}) == 200
    assert post(f"/admin/retries/events/{own['id']}/force") == 202
    assert post(f"/admin/retries/deliveries/{own['delivery_id']}/cancel") == 200
    assert post(f"/admin/retries/steps/{own['step_id']}/force") in (202, 409)  # a timer is no retry
    assert post(f"/admin/dead-letters/{own['dead_letter_id']}/replay") == 202
    assert post(f"/admin/sources/{source}/resume") == 200
    assert post(f"/admin/sources/{source}/pause") == 200
