"""Budgets as their users see them: in code, over HTTP, in YAML and on the command line, on real API and worker
processes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.acceptance.test_sources import eventually, ok
from tests.processes import run, worker
from tidegate.client import Client

APP = """
import asyncio
from tidegate import Budget, Context, RetryAfter, Tidegate

app = Tidegate()
scarce = Budget("scarce", "1/h", key="{{ event.payload.tenant }}")


@app.workflow(on="scarce.asked", budgets=[scarce])
async def ask(ctx, tenant: str):
    return tenant


@app.workflow(on="slow.asked", budgets=[Budget("gpu", concurrency=1)])
async def slow(ctx):
    await ctx.sleep("1h")


@app.workflow(on="step.asked")
async def steps(ctx, tenant: str):
    return await ctx.step("call", str.upper, tenant, budget=Budget("of-steps", "1/h"))


@app.workflow(on="busy.asked")
async def busy(ctx):
    await ctx.step("wait", asyncio.sleep, 3600, budget=Budget("of-busy-steps", concurrency=1))


@app.workflow(on="limited.asked", budgets=[Budget("limited", "100/s", key="{{ event.payload.tenant }}")])
async def limited(ctx, tenant: str):
    raise RetryAfter(7200, "429 Too Many Requests", everyone="limited")


@app.workflow(on="file.asked")
async def filed(ctx):
    return None
"""
_http = httpx.Client(timeout=30, trust_env=False)


@pytest.fixture(scope="module", autouse=True)
def _close_http_client() -> Iterator[None]:
    yield
    _http.close()


@pytest.fixture(scope="module")
def server(shared_url: str, address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An API and a worker; the API's address."""
    file = tmp_path_factory.mktemp("budgets") / "app.py"
    file.write_text(APP)
    with worker(shared_url, file):
        yield address


def act(address: str, method: str, path: str, body: Any = None) -> httpx.Response:
    headers = {"content-type": "application/json", "x-tidegate-actor": "ann"}
    content = None if body is None else json.dumps(body).encode()
    return _http.request(method, f"{address}{path}", content=content, headers=headers)


def publish(address: str, kind: str, count: int, **payload: Any) -> list[str]:
    with Client(address) as client:
        events = [{"type": kind, "source": "shop.api", "payload": payload} for _ in range(count)]
        return [receipt.id for receipt in client.publish_many(events)]


def explained(address: str, event_id: str) -> dict[str, Any]:
    return dict(ok(_http.get(f"{address}/v1/events/{event_id}/explain")))


def shown(address: str, name: str) -> dict[str, Any]:
    return dict(ok(_http.get(f"{address}/admin/budgets/{name}")))


def command(address: str, *arguments: str, code: int = 0) -> str:
    done = run("budgets", *arguments, env={"TIDEGATE_URL": address})
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_explain_names_the_budget_the_place_and_the_time(server: str) -> None:
    ids = publish(server, "scarce.asked", 3, tenant="acme")
    eventually(lambda: shown(server, "scarce")["budget"]["waiting"] == 2, "what waits")
    told = explained(server, ids[2])
    [outcome] = told["outcomes"]
    assert outcome["state"] == "budget" and told["waits_for"] == "room in its budget"
    assert "budget scarce: waiting in line for key acme; it is number 2 in line for key acme" in told["summary"]
    assert "0 of 1/h are left, and it costs 1" in told["summary"]
    assert told["until"] > explained(server, ids[1])["until"]
    asked = {"kind": "deliveries", "reason": "budget", "workflow": "ask"}
    [first, second] = ok(_http.get(f"{server}/admin/retries", params=asked))["retries"]
    assert (first["budget"], first["budget_key"]) == ("scarce", "acme") and second["eta_seconds"] > first["eta_seconds"]
    found = shown(server, "scarce")
    assert found["lines"][0]["key"] == "acme" and found["lines"][0]["waiting"] == 2
    assert found["budget"]["used_by"] == ["ask/code"]
    text = command(server, "explain", "scarce")
    assert "scarce (v1): 1/h per {{ event.payload.tenant }}; used by ask/code; ok; 2 waiting" in text and "acme" in text
    assert json.loads(command(server, "list", "--json"))["budgets"][-1]["name"] == "scarce"
    command(server, "pause", "scarce", "--reason", "costs")
    try:
        assert "when resumed" in command(server, "explain", "scarce")
    finally:
        command(server, "resume", "scarce")
    assert "when resumed" not in command(server, "explain", "scarce")


def test_explain_names_the_runs_that_hold_the_slots_and_when_they_resume(server: str) -> None:
    first, second = publish(server, "slow.asked", 2)
    eventually(lambda: shown(server, "gpu")["budget"]["waiting"] == 1, "what waits")
    holder = explained(server, first)["outcomes"][0]["run_id"]
    eventually(lambda: f"run {holder} (resumes " in explained(server, second)["summary"], "what waits")
    told = explained(server, second)
    assert told["waits_for"] == "a slot of its budget" and told["until"] is None
    assert "1 of 1 slots are held by run" in told["summary"]
    assert holder in command(server, "explain", "gpu")


def test_a_step_that_waits_is_shown_with_its_budget_its_place_and_its_time(server: str) -> None:
    ids = publish(server, "step.asked", 3, tenant="acme")
    eventually(lambda: _waiting(server, "of-steps") == 2, "what waits")
    eventually(lambda: "it is number 2 in line" in explained(server, ids[2])["summary"], "it is suspended")
    told = explained(server, ids[2])
    [outcome] = told["outcomes"]
    assert outcome["state"] == "budget" and told["waits_for"] == "room in its budget (step 'call')"
    assert "to call step 'call': budget of-steps: waiting in line" in told["summary"]
    assert told["until"] > explained(server, ids[1])["until"]
    by_run = ok(_http.get(f"{server}/v1/explain/{outcome['run_id']}"))
    assert by_run["waits_for"] == told["waits_for"]
    asked = {"kind": "steps", "reason": "budget", "workflow": "steps"}
    [first, second] = ok(_http.get(f"{server}/admin/retries", params=asked))["retries"]
    assert (first["budget"], first["budget_key"], first["step"]) == ("of-steps", "", "call")
    assert second["eta_seconds"] > first["eta_seconds"] > 0
    assert "budget of-steps" in first["last_error"]
    assert "of-steps (v1): 1/h; used by nobody; ok; 2 (2 steps) waiting" in command(server, "explain", "of-steps")
    shown_run = run("runs", "show", outcome["run_id"], env={"TIDEGATE_URL": server}).stdout
    assert "step 'call' waits: budget of-steps" in shown_run
    health = ok(_http.get(f"{server}/admin/event-health"))
    assert health["retries"]["steps"]["by_reason"]["budget"] >= 2  # other tests leave some, too
    gauge = re.search(r'tidegate_deferred\{kind="steps",reason="budget"\} (\S+)', _http.get(f"{server}/metrics").text)
    assert gauge is not None and float(gauge[1]) >= 2
    done = run("runs", "cancel", outcome["run_id"], env={"TIDEGATE_URL": server})
    assert done.returncode == 0, done.stderr
    assert _waiting(server, "of-steps") == 1


def test_the_steps_that_hold_slots_are_named(server: str) -> None:
    first, second = publish(server, "busy.asked", 2)
    eventually(lambda: _waiting(server, "of-busy-steps") == 1, "what waits")
    holder = explained(server, first)["outcomes"][0]["run_id"]
    eventually(lambda: f"run {holder} (step 'wait', running" in explained(server, second)["summary"], "who holds it")
    told = explained(server, second)
    assert told["waits_for"] == "a slot of its budget (step 'wait')" and told["until"] is None
    assert holder in command(server, "explain", "of-busy-steps")
    assert "1 step waits for it" in command(server, "delete", "of-busy-steps", code=1)


def _waiting(address: str, name: str) -> int:
    found = _http.get(f"{address}/admin/budgets/{name}")
    return found.json()["budget"]["waiting_steps"] if found.status_code == 200 else 0


def test_set_pause_resume_and_delete_on_the_command_line(server: str) -> None:
    text = command(server, "set", "mine", "5/s", "--concurrency", "3", "--key", "{{ event.source }}")
    assert text == "created mine (v1): 5/s, 3 at once per {{ event.source }}; used by nobody; ok\n"
    text = command(server, "set", "mine", "6/s", "--cost", "event.payload.n")
    assert "mine (v2): 6/s, 3 at once per {{ event.source }}, cost event.payload.n;" in text
    assert "paused until resumed by" in command(server, "pause", "mine", "--reason", "costs")
    health = ok(_http.get(f"{server}/admin/event-health"))
    cause = next(one for one in health["causes"] if one["code"] == "budget_paused")
    assert cause["subject"] == "mine" and cause["do"] == "tidegate budgets resume mine"
    assert command(server, "resume", "mine").endswith("ok\n")
    assert command(server, "delete", "mine") == "deleted mine\n"
    assert "no budget 'mine'" in command(server, "show", "mine", code=1)
    audited = ok(_http.get(f"{server}/admin/audit", params={"subject": "mine"}))["entries"]
    assert [one["action"] for one in reversed(audited)] == [
        "budget.create", "budget.update", "budget.pause", "budget.resume", "budget.delete",
    ]  # fmt: skip


def test_set_changes_what_is_given_and_nothing_else(server: str) -> None:
    fields = ("limit", "interval_ms", "concurrency", "key", "cost")

    def stored() -> list[Any]:
        budget = shown(server, "part")["budget"]
        return [budget[name] for name in fields]

    key = "{{ event.payload.tenant }}"
    dry = command(server, "set", "part", "3/10s", "--dry-run")
    assert dry == "there is no budget part: it would be created\n"
    assert "no budget 'part'" in command(server, "show", "part", code=1)
    text = command(server, "set", "part", "3/10s", "--key", key, "--cost", "event.payload.n")
    assert text.startswith("created part (v1): 3/10s per ")
    text = command(server, "set", "part", "--concurrency", "1", "--dry-run")
    assert text.endswith("\nwould change: concurrency from none to 1\n")
    assert stored() == [3, 10_000, None, key, "event.payload.n"]
    text = command(server, "set", "part", "--concurrency", "1")
    assert text.startswith("part (v2): ") and text.endswith("\nchanged: concurrency from none to 1\n")
    assert stored() == [3, 10_000, 1, key, "event.payload.n"]
    assert command(server, "set", "part", "60/10s").endswith("\nchanged: rate from 3/10s to 60/10s\n")
    assert stored() == [60, 10_000, 1, key, "event.payload.n"]
    assert command(server, "set", "part", "--concurrency", "1").endswith("\nchanged: nothing\n")
    assert shown(server, "part")["budget"]["version"] == 3
    assert "--cost: needs a rate" in command(server, "set", "part", "--no-rate", code=1)
    text = command(server, "set", "part", "--no-rate", "--no-cost", "--no-key")
    assert text.endswith(
        f"\nchanged: rate from 60/10s to none; key from {key} to none; cost from event.payload.n to none\n"
    )
    assert stored() == [None, None, 1, None, None]
    assert "is required, or " in command(server, "set", "part", "--no-concurrency", code=1)
    assert "give --key or --no-key, not both" in command(server, "set", "part", "--key", key, "--no-key", code=2)
    assert "give a RATE such as 300/min" in command(server, "set", "part", code=2)
    ok(act(server, "PUT", "/admin/budgets/part", {"limit": 1, "interval_ms": 1000}))
    assert stored() == [1, 1000, None, None, None]  # over HTTP the whole is replaced


def test_a_closed_budget_is_shown_key_by_key_and_reported(server: str) -> None:
    publish(server, "limited.asked", 1, tenant="acme")
    eventually(lambda: shown(server, "limited")["budget"]["closed_keys"] == 1, "a key is closed")
    [key] = shown(server, "limited")["budget"]["closed"]
    assert (key["key"], key["state"], key["run_id"]) == ("acme", "closed", None)
    publish(server, "limited.asked", 2, tenant="acme")
    eventually(lambda: shown(server, "limited")["budget"]["waiting"] == 2, "others wait")
    state = "key acme: closed until 20"
    reason = "RetryAfter: 429 Too Many Requests"
    for arguments in (("list",), ("show", "limited"), ("explain", "limited")):
        text = command(server, *arguments)
        assert state in text and reason in text, text
    assert "acme  closed until" in command(server, "explain", "limited", "--key", "acme")
    causes = ok(_http.get(f"{server}/admin/event-health"))["causes"]
    [cause] = [one for one in causes if one["code"] == "budget_closed"]
    assert cause["subject"] == "limited" and cause["do"].endswith("tidegate budgets resume limited")
    assert "key acme is closed until" in cause["message"]
    assert "closed" not in command(server, "resume", "limited")
    eventually(lambda: shown(server, "limited")["budget"]["closed_keys"] == 1, "it is closed again by the next")


def test_an_edit_that_cannot_be_evaluated_says_so_and_loses_nothing(server: str) -> None:
    command(server, "set", "edited", "1/h", "--cost", "event.payload.tokens")
    create = {"name": "edited", "event_type": "edited", "budgets": ["edited"]}
    ok(act(server, "POST", "/v1/workflows/filed/triggers", create), 201)
    ids = publish(server, "edited", 4, tokens=1)
    eventually(lambda: shown(server, "edited")["budget"]["waiting"] == 3, "what waits")
    typo = ("set", "edited", "1/h", "--cost", "event.payload.tokes")
    text = command(server, *typo, "--dry-run")
    assert text.startswith(
        "it cannot be evaluated for 3 of the 3 deliveries that wait at its triggers: they wait until"
    )
    assert "budget edited: cost: event.payload.tokes is not in the event" in text and ids[1] in text
    assert json.loads(command(server, *typo, "--dry-run", "--json"))["unread"] == 3
    assert shown(server, "edited")["budget"]["version"] == 1
    assert "they wait until it is corrected" in command(server, *typo)
    eventually(lambda: shown(server, "edited")["budget"]["unread"] == 3, "they wait for the correction")
    assert "its key or cost cannot be evaluated for 3 of those that wait" in command(server, "show", "edited")
    assert explained(server, ids[1])["waits_for"] == "its budget to be corrected"
    assert "cannot" not in command(server, "set", "edited", "100/s", "--cost", "event.payload.tokens")
    eventually(lambda: shown(server, "edited")["budget"]["waiting"] == 0, "what waits")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--concurrency", "2", "--cost", "1"), "--cost: needs a rate: it is what a launch spends of it"),
        (("3000000000/s",), "RATE: must be a whole number from 1 to 1000000000"),
        (("5/s", "--concurrency", "0"), "--concurrency: must be a whole number from 1 to"),
    ],
)
def test_errors_name_what_was_typed(server: str, arguments: tuple[str, ...], expected: str) -> None:
    done = run("budgets", "set", "typed", *arguments, env={"TIDEGATE_URL": server})
    text = done.stdout + done.stderr
    assert done.returncode != 0 and expected in text, text
    assert "interval_ms" not in text and "limit and" not in text, text


def test_a_trigger_in_yaml_names_its_budgets(server: str, tmp_path: Path) -> None:
    command(server, "set", "filed", "1/h")
    file = tmp_path / "trigger.yaml"
    file.write_text("workflow: filed\nname: file\nevent_type: filed\nbudgets: [filed]\n")
    done = run("triggers", "create", "-f", str(file), env={"TIDEGATE_URL": server})
    assert done.returncode == 0 and "budgets filed" in done.stdout, done.stderr
    publish(server, "filed", 2)
    eventually(lambda: shown(server, "filed")["budget"]["waiting"] == 1, "what waits")
    assert "in use" in command(server, "delete", "filed", code=1)
    command(server, "set", "filed", "100/s")
    eventually(lambda: shown(server, "filed")["budget"]["waiting"] == 0, "what waits")


@pytest.mark.parametrize(
    ("method", "path", "body", "field"),
    [
        ("PUT", "/admin/budgets/x", {}, "limit"),
        ("PUT", "/admin/budgets/x", {"limit": 1}, "interval_ms"),
        ("PUT", "/admin/budgets/x", {"limit": 0, "interval_ms": 1}, "limit"),
        ("PUT", "/admin/budgets/x", {"concurrency": 1, "key": "{{ nothing }}"}, "key"),
        ("PUT", "/admin/budgets/x", {"limit": 1, "interval_ms": 1, "cost": "1"}, "cost"),
        ("PUT", "/admin/budgets/not%20ok", {"concurrency": 1}, "name"),
        ("PUT", "/admin/budgets/x", {"concurrency": 1, "rate": "1/s"}, "rate"),
        ("POST", "/v1/workflows/filed/triggers", {"name": "n", "event_type": "t", "budgets": ["no"]}, "budgets[0]"),
        ("POST", "/v1/workflows/filed/triggers", {"name": "n", "event_type": "t", "budgets": "gpu"}, "budgets"),
    ],
)
def test_bad_input_names_the_field(server: str, method: str, path: str, body: Any, field: str) -> None:
    answer = act(server, method, path, body)
    assert answer.status_code == 422, answer.text
    assert field in [error["field"] for error in answer.json()["errors"]]
