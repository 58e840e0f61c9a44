"""Every change over the API leaves one row in the audit log, in its own transaction; nothing else leaves any."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest

from tests.processes import PATIENCE_SECONDS, api, run, worker
from tidegate.api.server import ROUTES
from tidegate.flow.decide.approvals import LINK
from tidegate.model.approval import link_of
from tidegate.model.ids import StepId

APP = """
from tidegate import Tidegate, NonRetryable, Retry

app = Tidegate()

@app.workflow(on="sleep.please")
async def sleeper(ctx):
    await ctx.sleep("2h")

@app.workflow(every="1h")
async def hourly(ctx): ...

@app.workflow(on="ask.please")
async def asker(ctx):
    await (await ctx.approval("manager", timeout="2h")).decision()

@app.workflow(on="fail.please")
async def broken(ctx):
    raise NonRetryable("as asked")

@app.workflow(on="wait.please")
async def flaky(ctx):
    def call():
        raise OSError("not now")

    await ctx.step("call", call, retry=Retry(max_attempts=3, base="2h", cap="2h"))
"""
# What changes nothing that an operator could have set: events are on record themselves, a test launches nothing.
NOT_AUDITED = {
    ("POST", "/v1/events"), ("POST", "/v1/webhooks/{source:path}"), ("POST", "/v1/workflows/{slug}/runs"),
    ("POST", "/v1/workflows/{slug}/triggers/{trigger_id}/test"),
}  # fmt: skip
MUTATIONS = [(r.method, r.path) for r in ROUTES if r.method != "GET" and (r.method, r.path) not in NOT_AUDITED]
SECRET = "whsec_" + "Y2FuYXJ5" * 4
NAME = "auditor"

_numbers = itertools.count(1)


class Call(NamedTuple):
    """A valid call of a route, and the row that it leaves."""

    path: str
    body: Any
    action: str
    subject: str
    has_before: bool = True
    has_after: bool = True
    actor: str = NAME


class World:
    """A real server with a worker, and whatever calls need to be about."""

    def __init__(self, url: str, database_url: str, secret: str) -> None:
        self.url, self.database_url = url, database_url
        self.http = httpx.Client(base_url=url, headers={"authorization": f"Bearer {secret}"}, trust_env=False)

    def ask(self, method: str, path: str, body: Any = None, **parameters: Any) -> Any:
        answer = self.http.request(method, path, json=body, params=parameters)
        assert answer.is_success, (method, path, answer.text)
        return answer.json()

    def until(self, question: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not (answer := question()):
            assert time.monotonic() < deadline, "what was waited for did not come"
            time.sleep(0.05)
        return answer

    def fetch(self, query: str, *arguments: Any) -> list[Any]:
        async def ask() -> list[Any]:
            connection = await asyncpg.connect(self.database_url)
            try:
                return await connection.fetch(query, *arguments)
            finally:
                await connection.close()

        return asyncio.run(ask())

    def workflow(self) -> str:
        slug = f"hook-{next(_numbers)}"
        body = {"slug": slug, "kind": "http", "url": "https://shop.example/", "secret": SECRET}
        self.ask("POST", "/v1/workflows", body | {"headers": {"authorization": "canary"}})
        return slug

    def trigger(self, event_type: str = "never") -> str:
        body = {"name": f"t{next(_numbers)}", "event_type": event_type}
        made: str = self.ask("POST", "/v1/workflows/broken/triggers", body)["id"]
        return made

    def paused_trigger(self, event_type: str = "never") -> str:
        trigger_id = self.trigger(event_type)
        self.ask("POST", f"/admin/triggers/{trigger_id}/pause", {})
        return trigger_id

    def source(self) -> str:
        name = f"source-{next(_numbers)}"
        self.ask("POST", f"/admin/sources/{name}/pause", {"reason": "a test"})
        self.ask("PUT", f"/admin/sources/{name}/limit", {"limit": 7, "interval_ms": 1000})
        self.ask("PUT", f"/admin/sources/{name}/breaker", {"threshold": 7})
        self.ask("PUT", f"/admin/sources/{name}/backlog", {"max_waiting": 70})
        return name

    def budget(self) -> str:
        name = f"budget-{next(_numbers)}"
        self.ask("PUT", f"/admin/budgets/{name}", {"limit": 7, "interval_ms": 1000})
        self.ask("POST", f"/admin/budgets/{name}/pause", {"reason": "a test"})
        return name

    def publish(self, event_type: str, source: str) -> str:
        published: str = self.ask("POST", "/v1/events", {"type": event_type, "source": source})["id"]
        return published

    def held_event(self) -> str:
        source = self.source()
        event_id = self.publish("nobody.takes.it", source)
        self.until(lambda: self.ask("GET", "/admin/retries", kind="events", source=source)["retries"])
        return event_id

    def held_delivery(self) -> str:
        event_type = f"wait-{next(_numbers)}"
        trigger_id = self.paused_trigger(event_type)
        self.publish(event_type, "shop")
        at = f"/v1/workflows/broken/triggers/{trigger_id}/deliveries"
        held: str = self.until(lambda: self.ask("GET", at)["deliveries"])[0]["id"]
        return held

    def sleeping_run(self) -> str:
        event_id = self.publish("sleep.please", "shop")
        found = (
            "select id::text from tidegate.workflow_runs where event_id = $1 and status = 'pending' and attempts > 0"
        )
        waiting: str = self.until(lambda: self.fetch(found, event_id))[0]["id"]
        return waiting

    def cancelled_run(self) -> str:
        run_id = self.sleeping_run()
        self.ask("POST", f"/v1/runs/{run_id}/cancel")
        return run_id

    def held_run(self) -> str:
        """A run that waits for another version of its code."""
        run_id = self.sleeping_run()
        self.fetch(
            "update tidegate.workflow_runs set version_held_at = tidegate.now() where id = $1", uuid.UUID(run_id)
        )
        return run_id

    def event_of(self, run_id: str) -> str:
        event_id: str = self.ask("GET", f"/v1/runs/{run_id}")["run"]["event_id"]
        return event_id

    def waiting_step(self) -> str:
        event_id = self.publish("wait.please", "shop")
        found = """select s.id::text from tidegate.workflow_run_steps s join tidegate.workflow_runs r
                       on r.id = s.workflow_run_id where r.event_id = $1 and s.retry_state = 'scheduled'"""
        waiting: str = self.until(lambda: self.fetch(found, event_id))[0]["id"]
        return waiting

    def approval(self) -> str:
        event_id = self.publish("ask.please", "shop")
        found = """select s.id::text from tidegate.workflow_run_steps s join tidegate.workflow_runs r
                       on r.id = s.workflow_run_id where r.event_id = $1 and s.kind = 'wait' and r.status = 'pending'"""
        asked: str = self.until(lambda: self.fetch(found, event_id))[0]["id"]
        return asked

    def held_source(self) -> str:
        event_id = self.held_event()
        source: str = self.ask("GET", f"/v1/events/{event_id}")["source"]
        return source

    def webhook(self) -> str:
        source = f"hooks-{next(_numbers)}"
        self.ask("PUT", f"/admin/sources/{source}/webhook", {"scheme": "standard", "secret": SECRET})
        return source

    def replaced_secret(self) -> tuple[str, str]:
        """A webhook with two secrets, and the fingerprint of the older one."""
        source = self.webhook()
        written = self.ask("POST", f"/admin/sources/{source}/webhook/rotate", {})
        return source, written["secrets"][1]["fingerprint"]

    def letter(self) -> str:
        event_id = self.publish("fail.please", "shop")
        found = "select id::text from tidegate.dead_letters where event_id = $1"
        given_up: str = self.until(lambda: self.fetch(found, event_id))[0]["id"]
        return given_up

    def token(self) -> dict[str, Any]:
        body = {"name": f"token-{next(_numbers)}", "scopes": ["read"]}
        made: dict[str, Any] = self.ask("POST", "/admin/tokens", body)["token"]
        return made

    def rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.fetch("select * from tidegate.audit_log order by id")]

    def tables(self) -> list[Any]:
        """What is in every table; but when a token was used last is a note, and no change."""
        names = [
            row[0]
            for row in self.fetch(
                "select tablename from pg_tables where schemaname = 'tidegate' and tablename <> 'processes'"
            )
        ]
        lines = " union all ".join(
            f"select '{name}' as name, (to_jsonb(t) - 'last_used_at')::text as line from tidegate.{name} t"
            for name in names
        )
        return self.fetch(f"select name, line from ({lines}) l order by name, line")


def retired_secret(w: World) -> Call:
    source, old = w.replaced_secret()
    return Call(f"/admin/sources/{source}/webhook/secrets/{old}", None, "webhook.retire", source)


def used_link(w: World) -> Call:
    asked = w.approval()
    key = bytes.fromhex(w.fetch("select approval_key from tidegate.installation")[0][0])
    link = link_of("", key, StepId(uuid.UUID(asked)))
    return Call(link, {"approved": True}, "approval.approve", asked, actor=LINK)


def created_trigger(w: World) -> Call:
    body = {"name": "made", "event_type": "never"}
    return Call("/v1/workflows/broken/triggers", body, "trigger.create", "", has_before=False)


CALLS: dict[tuple[str, str], Callable[[World], Call]] = {
    ("POST", "/v1/workflows"): lambda w: Call(
        "/v1/workflows", {"slug": "made", "kind": "http", "url": "https://shop.example/", "secret": SECRET},
        "workflow.create", "made", has_before=False,
    ),
    ("PATCH", "/v1/workflows/{slug}"): lambda w: Call(
        f"/v1/workflows/{(slug := w.workflow())}", {"timeout_ms": 5000, "secret": None}, "workflow.update", slug
    ),
    ("POST", "/v1/workflows/{slug}/rotate"): lambda w: Call(
        f"/v1/workflows/{(slug := w.workflow())}/rotate", {}, "workflow.rotate", slug
    ),
    ("DELETE", "/v1/workflows/{slug}"): lambda w: Call(
        f"/v1/workflows/{(slug := w.workflow())}", None, "workflow.delete", slug, has_after=False
    ),
    ("POST", "/v1/workflows/{slug}/triggers"): created_trigger,
    ("PATCH", "/v1/workflows/{slug}/triggers/{trigger_id}"): lambda w: Call(
        f"/v1/workflows/broken/triggers/{(one := w.trigger())}", {"event_type": "other"}, "trigger.update", one
    ),
    ("DELETE", "/v1/workflows/{slug}/triggers/{trigger_id}"): lambda w: Call(
        f"/v1/workflows/broken/triggers/{(one := w.trigger())}", None, "trigger.delete", one, has_after=False
    ),
    ("POST", "/v1/runs/{run_id}/cancel"): lambda w: Call(
        f"/v1/runs/{(one := w.sleeping_run())}/cancel", None, "run.cancel", one
    ),
    ("POST", "/v1/runs/{run_id}/retry"): lambda w: Call(
        f"/v1/runs/{(one := w.cancelled_run())}/retry", None, "run.retry", one
    ),
    ("POST", "/v1/runs/{run_id}/rerun"): lambda w: Call(
        f"/v1/runs/{(one := w.cancelled_run())}/rerun", None, "run.rerun", one
    ),
    ("POST", "/v1/runs/{run_id}/resume"): lambda w: Call(
        f"/v1/runs/{(one := w.held_run())}/resume", {"on_current_code": True}, "run.resume", one
    ),
    ("POST", "/v1/runs/cancel"): lambda w: Call(
        "/v1/runs/cancel", {"event_id": w.event_of(one := w.sleeping_run())}, "run.cancel", one
    ),
    ("POST", "/v1/runs/retry"): lambda w: Call(
        "/v1/runs/retry", {"event_id": w.event_of(one := w.cancelled_run())}, "run.retry", one
    ),
    ("POST", "/v1/runs/rerun"): lambda w: Call(
        "/v1/runs/rerun", {"event_id": w.event_of(one := w.cancelled_run())}, "run.rerun", one
    ),
    ("POST", "/v1/events/{id:path}/replay"): lambda w: Call(
        f"/v1/events/{(one := w.event_of(w.sleeping_run()))}/replay", None, "event.replay", one
    ),
    ("POST", "/admin/event-replays"): lambda w: Call(
        "/admin/event-replays", {"type": "sleep.please", "rate": 0.001}, "events.replay", "*", has_before=False
    ),
    ("POST", "/admin/event-replays/stop"): lambda w: Call(
        "/admin/event-replays/stop", None, "events.stop", "*", has_before=False
    ),
    ("PUT", "/admin/sources/{source:path}/limit"): lambda w: Call(
        f"/admin/sources/{(name := w.source())}/limit", {"limit": 5, "interval_ms": 1000}, "source.limit", name
    ),
    ("DELETE", "/admin/sources/{source:path}/limit"): lambda w: Call(
        f"/admin/sources/{(name := w.source())}/limit", None, "source.limit", name
    ),
    ("PUT", "/admin/sources/{source:path}/weight"): lambda w: Call(
        f"/admin/sources/{(name := w.source())}/weight", {"weight": 5}, "source.weight", name
    ),
    ("PUT", "/admin/sources/{source:path}/backlog"): lambda w: Call(
        f"/admin/sources/{(name := w.source())}/backlog", {"max_waiting": 5}, "source.backlog", name
    ),
    ("DELETE", "/admin/sources/{source:path}/backlog"): lambda w: Call(
        f"/admin/sources/{(name := w.source())}/backlog", None, "source.backlog", name
    ),
    ("PUT", "/admin/budgets/{name}"): lambda w: Call(
        f"/admin/budgets/{(name := w.budget())}", {"limit": 8, "interval_ms": 1000}, "budget.update", name
    ),
    ("DELETE", "/admin/budgets/{name}"): lambda w: Call(
        f"/admin/budgets/{(name := w.budget())}", None, "budget.delete", name, has_after=False
    ),
    ("POST", "/admin/budgets/{name}/pause"): lambda w: Call(
        f"/admin/budgets/{(name := w.budget())}/pause", {"reason": "x"}, "budget.pause", name
    ),
    ("POST", "/admin/budgets/{name}/resume"): lambda w: Call(
        f"/admin/budgets/{(name := w.budget())}/resume", None, "budget.resume", name
    ),
    ("PUT", "/admin/sources/{source:path}/breaker"): lambda w: Call(
        f"/admin/sources/{(name := w.source())}/breaker", {"threshold": 9, "runs": True}, "source.breaker", name
    ),
    ("DELETE", "/admin/sources/{source:path}/breaker"): lambda w: Call(
        f"/admin/sources/{(name := w.source())}/breaker", None, "source.breaker", name
    ),
    ("POST", "/admin/sources/{source:path}/pause"): lambda w: Call(
        f"/admin/sources/{(name := w.source())}/pause", {"duration_ms": 5000, "reason": "x"}, "source.pause", name
    ),
    ("POST", "/admin/sources/{source:path}/resume"): lambda w: Call(
        f"/admin/sources/{(name := w.source())}/resume", None, "source.resume", name
    ),
    ("POST", "/admin/triggers/{trigger_id}/pause"): lambda w: Call(
        f"/admin/triggers/{(one := w.trigger())}/pause", {"reason": "x"}, "trigger.pause", one
    ),
    ("POST", "/admin/triggers/{trigger_id}/resume"): lambda w: Call(
        f"/admin/triggers/{(one := w.paused_trigger())}/resume", None, "trigger.resume", one
    ),
    ("POST", "/v1/events/{id:path}/cancel"): lambda w: Call(
        f"/v1/events/{(one := w.held_event())}/cancel", None, "event.cancel", one
    ),
    ("POST", "/admin/schedules/{workflow}/pause"): lambda w: Call(
        "/admin/schedules/hourly/pause", {"reason": "x"}, "schedule.pause", "hourly"
    ),
    ("POST", "/admin/schedules/{workflow}/resume"): lambda w: Call(
        "/admin/schedules/hourly/resume", None, "schedule.resume", "hourly"
    ),
    ("POST", "/admin/schedules/{workflow}/run-now"): lambda w: Call(
        "/admin/schedules/hourly/run-now", None, "schedule.run_now", "hourly", has_before=False
    ),
    ("POST", "/admin/schedules/{workflow}/backfill"): lambda w: Call(
        "/admin/schedules/hourly/backfill", {"from": "2026-01-01T00:00:00Z", "to": "2026-01-01T01:30:00Z"},
        "schedule.backfill", "hourly", has_before=False,
    ),
    ("POST", "/admin/retries/events/{id:path}/cancel"): lambda w: Call(
        f"/admin/retries/events/{(one := w.held_event())}/cancel", None, "event.cancel", one
    ),
    ("POST", "/admin/retries/events/{id:path}/force"): lambda w: Call(
        f"/admin/retries/events/{(one := w.held_event())}/force", None, "event.force", one
    ),
    ("POST", "/admin/retries/deliveries/{delivery_id}/cancel"): lambda w: Call(
        f"/admin/retries/deliveries/{(one := w.held_delivery())}/cancel", None, "delivery.cancel", one
    ),
    ("POST", "/admin/retries/deliveries/{delivery_id}/force"): lambda w: Call(
        f"/admin/retries/deliveries/{(one := w.held_delivery())}/force", None, "delivery.force", one
    ),
    ("POST", "/admin/retries/steps/{step_id}/cancel"): lambda w: Call(
        f"/admin/retries/steps/{(one := w.waiting_step())}/cancel", None, "step.cancel", one
    ),
    ("POST", "/admin/retries/steps/{step_id}/force"): lambda w: Call(
        f"/admin/retries/steps/{(one := w.waiting_step())}/force", None, "step.force", one
    ),
    ("POST", "/admin/retries/{kind}/cancel"): lambda w: Call(
        "/admin/retries/events/cancel", {"source": w.held_source()}, "events.cancel", "*"
    ),
    ("POST", "/admin/retries/{kind}/force"): lambda w: Call(
        "/admin/retries/events/force", {"source": w.held_source()}, "events.force", "*"
    ),
    ("PUT", "/admin/sources/{source:path}/webhook"): lambda w: Call(
        f"/admin/sources/{(name := w.webhook())}/webhook", {"scheme": "standard", "event_type": "a.b"}, "webhook.set",
        name,
    ),
    ("POST", "/admin/sources/{source:path}/webhook/rotate"): lambda w: Call(
        f"/admin/sources/{(name := w.webhook())}/webhook/rotate", {}, "webhook.rotate", name
    ),
    ("DELETE", "/admin/sources/{source:path}/webhook/secrets/{fingerprint}"): retired_secret,
    ("DELETE", "/admin/sources/{source:path}/webhook"): lambda w: Call(
        f"/admin/sources/{(name := w.webhook())}/webhook", None, "webhook.delete", name, has_after=False
    ),
    ("POST", "/admin/dead-letters/replay"): lambda w: Call(
        "/admin/dead-letters/replay", {"kind": "run", "rate": 0.001}, "dead_letters.replay", "*", has_before=False
    ),
    ("POST", "/admin/dead-letters/stop"): lambda w: Call(
        "/admin/dead-letters/stop", None, "dead_letters.stop", "*", has_before=False
    ),
    ("POST", "/admin/dead-letters/{dead_letter_id}/replay"): lambda w: Call(
        f"/admin/dead-letters/{(one := w.letter())}/replay", None, "dead_letter.replay", one
    ),
    ("POST", "/admin/approvals/{approval_id}/approve"): lambda w: Call(
        f"/admin/approvals/{(one := w.approval())}/approve", {"comment": "x"}, "approval.approve", one
    ),
    ("POST", "/admin/approvals/{approval_id}/reject"): lambda w: Call(
        f"/admin/approvals/{(one := w.approval())}/reject", None, "approval.reject", one
    ),
    ("POST", "/approvals/{token}"): used_link,
    ("POST", "/admin/tokens"): lambda w: Call(
        "/admin/tokens", {"name": "made", "scopes": ["read"]}, "token.create", "", has_before=False
    ),
    ("DELETE", "/admin/tokens/{token}"): lambda w: Call(
        f"/admin/tokens/{(one := w.token())['name']}", None, "token.revoke", one["id"]
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(shared_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, dict[Any, Call]]]:
    """The world, and a valid call of every route. Its worker has ended: from here nothing happens by itself."""
    app = Path(tmp_path_factory.mktemp("audited")) / "app.py"
    app.write_text(APP)
    secret = run("token", "create", NAME, "--scope", "admin", env={"TIDEGATE_DATABASE_URL": shared_url}).stdout.strip()
    with api(shared_url, TIDEGATE_AUTH="on") as (_, url):
        world = World(url, shared_url, secret)
        with worker(shared_url, app):
            calls = {route: CALLS[route](world) for route in MUTATIONS if route in CALLS}
        yield world, calls
        world.http.close()


def test_every_route_that_changes_something_has_a_case() -> None:
    assert set(CALLS) == set(MUTATIONS)


@pytest.fixture(scope="module")
def done(made: tuple[World, dict[Any, Call]]) -> dict[Any, list[dict[str, Any]]]:
    """Each call made once: refused as a whole while its row cannot be written, then done; the rows that it left."""
    world, calls = made
    left = {}
    for (method, path), call in calls.items():
        world.fetch("alter table tidegate.audit_log add constraint full_disk check (false) not valid")
        before = world.tables()
        refused = world.http.request(method, call.path, json=call.body)
        assert refused.status_code == 500, (method, path, refused.text)
        assert world.tables() == before, f"{method} {path} changed something without a row in the audit log"
        world.fetch("alter table tidegate.audit_log drop constraint full_disk")
        known = {row["id"] for row in world.rows()}
        answer = world.http.request(method, call.path, json=call.body)
        assert answer.is_success, (method, path, answer.text)
        left[method, path] = [row for row in world.rows() if row["id"] not in known]
    return left


@pytest.mark.parametrize(("method", "path"), MUTATIONS)
def test_every_mutation_has_audit_row(
    made: tuple[World, dict[Any, Call]], done: dict[Any, list[dict[str, Any]]], method: str, path: str
) -> None:
    world, calls = made
    call = calls[method, path]
    (row,) = done[method, path]
    assert (row["actor"], row["action"]) == (call.actor, call.action)
    assert row["subject"] == call.subject if call.subject else row["subject"]
    assert (row["before"] is not None, row["after"] is not None) == (call.has_before, call.has_after), row
    listed = world.ask("GET", "/admin/audit", action=call.action, subject=row["subject"], actor=call.actor)["entries"]
    entry = next(one for one in listed if one["id"] == str(row["id"]))
    for side in ("before", "after"):
        assert entry[side] == (None if row[side] is None else json.loads(row[side]))
    assert entry["before"] != entry["after"]


def test_rows_hold_no_secrets(made: tuple[World, dict[Any, Call]], done: dict[Any, Any]) -> None:
    text = str(made[0].rows())
    assert "workflow.rotate" in text and "token.create" in text
    assert SECRET not in text and SECRET[6:] not in text and "canary" not in text
    assert not re.search(r"whsec_|tg_\w{20}", text)


def test_refused_calls_leave_no_row(made: tuple[World, dict[Any, Call]], done: dict[Any, Any], shared_url: str) -> None:
    world, calls = made
    reader = run("token", "create", "reader", "--scope", "read", env={"TIDEGATE_DATABASE_URL": shared_url})
    before = world.rows()
    for (method, path), call in calls.items():
        nobody = httpx.request(method, world.url + call.path, json=call.body, trust_env=False)
        weak = world.http.request(
            method, call.path, json=call.body, headers={"authorization": f"Bearer {reader.stdout.strip()}"}
        )
        broken = world.http.request(method, call.path, content=b"{")
        unknown = world.http.request(method, call.path, json={"no_such_field": 1})
        codes = [answer.status_code for answer in (nobody, weak, broken, unknown)]
        refusals = [409, 409, 400] if path == "/approvals/{token}" else [401, 403, 400]  # the link is used up
        assert codes[:3] == refusals and codes[3] in (404, 422), (method, path, codes)
    gone = [path for method, path in CALLS if "{" in path and "{source" not in path]
    for method, path in CALLS:
        if path in gone:
            address = re.sub(r"\{[^}]+\}", "01999999-9999-7999-8999-999999999999", path)
            assert world.http.request(method, address).status_code in (404, 422), (method, path)
    tried = world.ask("POST", "/admin/dead-letters/replay", {"dry_run": True})
    assert tried["status"] == "preview"
    assert world.rows() == before


def test_pages_filters_and_the_command(made: tuple[World, dict[Any, Call]], done: dict[Any, Any]) -> None:
    world, _ = made
    rows = world.rows()
    seen, cursor = [], None
    while True:
        page = world.ask("GET", "/admin/audit", limit=7, **({"cursor": cursor} if cursor else {}))
        seen += page["entries"]
        if (cursor := page["next_cursor"]) is None:
            break
    assert [one["id"] for one in seen] == [str(row["id"]) for row in reversed(rows)]
    wrong = world.http.get("/admin/audit", params={"cursor": "x", "who": "me"})
    assert wrong.status_code == 422 and {e["field"] for e in wrong.json()["errors"]} == {"cursor", "who"}
    assert httpx.get(f"{world.url}/admin/audit", trust_env=False).status_code == 401
    env = {"TIDEGATE_URL": world.url, "TIDEGATE_TOKEN": world.http.headers["authorization"].split()[1]}
    listed = run("audit", "list", "--action", "source.pause", "--limit", "3", "--json", env=env)
    found = json.loads(listed.stdout)["entries"]
    assert len(found) == 3 and {one["action"] for one in found} == {"source.pause"}
    for_people = run("audit", "list", "--actor", NAME, "--subject", "made", env=env)
    assert "workflow.create" in for_people.stdout and NAME in for_people.stdout, for_people.stderr
    nothing = run("audit", "list", "--actor", "nobody", env=env)
    assert nothing.stdout == "No changes match.\n"
