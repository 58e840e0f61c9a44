"""Why did it not run, from outside: over HTTP and on the command line; and the verbs that follow."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.processes import api, run, tidegate, worker

APP = """
from tidegate import Breaker, Context, Retry, Tidegate

app = Tidegate()


@app.workflow(on="order.created", where="event.payload.amount > 100")
async def fulfil(ctx: Context, id: int = 0):
    await ctx.sleep("1h")


@app.workflow(on="order.quick")
async def quick(ctx: Context, id: int = 0):
    return {"id": id}


@app.workflow(on="order.placed")
async def approve(ctx: Context, id: int = 0):
    approved = await ctx.wait_for("order.approved", match={"id": id}, timeout="1h")
    if approved.payload.get("later"):
        await ctx.sleep("1h")
    if approved.payload.get("broken"):
        raise ValueError("no paper")


@app.workflow(on="order.impatient")
async def impatient(ctx: Context):
    return await ctx.wait_for("order.approved", match={"id": 0}, timeout="10ms")


@app.workflow(max_concurrency=1)
async def deliver(ctx: Context, id: int = 0):
    await ctx.sleep("1h")


@app.workflow(on="order.parcels")
async def parcels(ctx: Context):
    return await ctx.map(deliver, [{"id": 1}, {"id": 2}, {"id": 3}])


@app.workflow()
async def nap(ctx: Context, id: int = 0):
    await ctx.sleep("1h")


@app.workflow(on="order.pallets")
async def pallets(ctx: Context):
    return await ctx.map(nap, list(range(501)), at_once=1)


@app.workflow(on="order.twice")
async def once(ctx: Context):
    await ctx.sleep("1h")


@app.workflow(on="order.twice")
async def again(ctx: Context):
    await ctx.sleep("1h")


def busy():
    raise ValueError("busy")


@app.workflow(on="order.flaky")
async def flaky(ctx: Context):
    await ctx.step("charge", busy, retry=Retry(max_attempts=3, base="10m", cap="10m"))


@app.workflow(on="order.broken", breaker=Breaker(threshold=1000))
async def broken(ctx: Context, id: int = 0):
    raise ValueError("no paper")
"""


@pytest.fixture(scope="module")
def url(shared_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    app = Path(tmp_path_factory.mktemp("why")) / "app.py"
    app.write_text(APP)
    with api(shared_url) as (_, address), worker(shared_url, app):
        yield address


def cli(url: str, *arguments: str, status: int = 0, **environment: str) -> str:
    done = run(*arguments, env={"TIDEGATE_URL": url} | environment)
    assert done.returncode == status, (arguments, done.stdout, done.stderr)
    return str(done.stdout + done.stderr)


def publish(url: str, event_type: str, own_id: str, *extra: str, status: int = 0, **payload: Any) -> str:
    data = json.dumps(payload)
    return cli(url, "publish", event_type, "--source", "shop", "--id", own_id, "--data", data, *extra, status=status)


def settled(url: str, own_id: str, state: str) -> dict[str, Any]:
    """The explanation, once it says that state (the first lines of a run may be seen before)."""
    for _ in range(2000):
        found: dict[str, Any] = httpx.get(f"{url}/v1/explain/{own_id}", trust_env=False).json()
        if [one["state"] for one in found["outcomes"]] == [state]:
            return found
    raise AssertionError(found)


def test_the_summary_comes_first_and_times_may_be_local(url: str) -> None:
    publish(url, "order.created", "w-1", amount=120)
    found = settled(url, "w-1", "sleeping")
    assert found["waits_for"] == "the timer 'sleep-1'" and found["until"]
    text = cli(url, "explain", "w-1")
    assert text.splitlines()[0] == found["summary"]
    assert text.splitlines()[1] == "waits for: the timer 'sleep-1'"
    local = cli(url, "explain", "w-1", "--local", TZ="Etc/GMT-3").splitlines()
    assert local[2].endswith("+03") and "UTC" not in local[0]
    run_id = found["outcomes"][0]["run_id"]
    of_run = cli(url, "explain", run_id)
    assert of_run.splitlines()[0] == found["summary"]
    assert f"run:       {run_id} of fulfil" in text and "sleep-1 (until " in text, "as much as by the run's id"


def test_refused_requests_are_found_by_their_ids(url: str) -> None:
    publish(url, "order.quick", "w-2", "--wait", n=1)
    publish(url, "order.quick", "w-2", status=1, n=2)
    wrong = [{"id": "w-3", "source": "shop"}, {"id": "w-4", "source": "shop", "type": "a"}]
    assert httpx.post(f"{url}/v1/events", json=wrong, trust_env=False).status_code == 422
    for own_id in ("w-3", "w-4"):
        found = httpx.get(f"{url}/v1/explain/{own_id}", trust_env=False).json()
        assert (found["kind"], found["source"]) == ("refusal", "shop")
        assert (
            "refused with 422, nothing was stored" in found["summary"] and "[0].type: is required" in found["summary"]
        )
    for n in range(10):  # also those after the first, which is written at once
        wrong = [{"id": f"at-once-{n}", "source": "shop"}]
        assert httpx.post(f"{url}/v1/events", json=wrong, trust_env=False).status_code == 422
        assert httpx.get(f"{url}/v1/explain/at-once-{n}", trust_env=False).status_code == 200
    found = httpx.get(f"{url}/v1/explain/w-2", trust_env=False).json()
    assert found["summary"] == "quick succeeded"
    assert [(line["stage"], line["decision"]) for line in found["decisions"]][-1] == ("ingest", "refused")
    assert httpx.get(f"{url}/v1/explain/w-nobody", trust_env=False).status_code == 404


def test_refused_starts_are_found_by_their_ids(url: str) -> None:
    cli(url, "run", "quick", "--id", "start-1", "--data", '{"idd": 4}', status=1)
    found = httpx.get(f"{url}/v1/explain/start-1", trust_env=False).json()
    assert (found["kind"], found["type"], found["source"]) == ("refusal", "tidegate.start", "tidegate.start.quick")
    assert "refused with 422, nothing was stored" in found["summary"] and "idd" in found["summary"]
    cli(url, "run", "quick", "--id", "start-2", "--data", '{"id": 1}', "--wait", "60s")
    cli(url, "run", "quick", "--id", "start-2", "--data", '{"id": 2}', status=1)
    found = httpx.get(f"{url}/v1/explain/start-2", trust_env=False).json()
    assert found["summary"] == "quick succeeded"
    assert found["decisions"][-1]["decision"] == "refused"
    assert "started before with this id and other parameters" in found["decisions"][-1]["reason"]
    cli(url, "run", "nobody", "--id", "start-3", status=1)
    assert httpx.get(f"{url}/v1/explain/start-3", trust_env=False).status_code == 404


def test_waiting_for_what_an_event_launches(url: str) -> None:
    assert publish(url, "order.quick", "w-5", "--wait", id=5).splitlines()[-1] == "quick succeeded"
    text = publish(url, "order.broken", "w-6", "--wait", status=1)
    assert "broken failed: ValueError: no paper" in text and "has ended within" not in text
    text = publish(url, "order.quik", "w-7", "--wait", status=1)
    assert "near miss quick/code: its type is order.quick" in text
    text = publish(url, "order.created", "w-8", "--wait", "--timeout", "0.2", status=1, amount=500)
    event_id = httpx.get(f"{url}/v1/explain/w-8", trust_env=False).json()["event_id"]
    told = f"not everything has ended within 0.2s; tidegate explain {event_id} says what it waits for"
    assert text.splitlines()[-1] == told


@pytest.mark.parametrize(
    ("own_id", "payload", "status", "told"),
    [
        (20, {}, 0, "approve succeeded"),
        (21, {"later": True}, 0, "approve sleeps until"),
        (22, {"broken": True}, 1, "approve failed: ValueError: no paper"),
    ],
)
def test_waiting_for_what_an_event_wakes(
    url: str, own_id: int, payload: dict[str, Any], status: int, told: str
) -> None:
    publish(url, "order.placed", f"placed-{own_id}", id=own_id)
    run_id = settled(url, f"placed-{own_id}", "waiting_for_event")["outcomes"][0]["run_id"]
    text = publish(url, "order.approved", f"approved-{own_id}", "--wait", status=status, id=own_id, **payload)
    lines = text.splitlines()
    assert f"woke run {run_id}" in lines and lines[-1].startswith(told)


def test_a_wait_that_timed_out_is_shown_as_such(url: str) -> None:
    publish(url, "order.impatient", "impatient", "--wait")
    run_id = settled(url, "impatient", "succeeded")["outcomes"][0]["run_id"]
    [step] = httpx.get(f"{url}/v1/runs/{run_id}", trust_env=False).json()["steps"]
    assert (step["status"], step["is_timed_out"], step["result"]) == ("succeeded", True, None)
    assert "wait order.approved  timed out" in cli(url, "runs", "show", run_id)
    assert "timed_out" in cli(url, "explain", run_id)


def test_a_child_whose_start_is_held_is_shown_watched_and_cancelled(url: str) -> None:
    publish(url, "order.parcels", "parcels")
    parent = settled(url, "parcels", "waiting_for_child")["outcomes"][0]["run_id"]

    def children() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = httpx.get(f"{url}/v1/runs/{parent}", trust_env=False).json()["children"]
        return found

    for _ in range(2000):
        held = [one["run_id"] for one in children() if not one["is_launched"] and one["status"] == "started"]
        if len(held) == 2 and httpx.get(f"{url}/v1/explain/{held[1]}", trust_env=False).status_code == 200:
            break
    assert cli(url, "runs", "show", parent).count("not launched") == 2
    text = cli(url, "runs", "show", held[0])
    assert text.startswith(f"run {held[0]} is not launched yet: deliver waits for a free slot: 1 of 1 slots"), text
    with tidegate("runs", "watch", held[1], "--interval", "0.1", TIDEGATE_URL=url) as watching:
        watching.wait_for_line("deliver waits for a free slot")
        assert cli(url, "runs", "cancel", held[1]) == (f"the start of run {held[1]} is cancelled: no run is launched\n")
        watching.wait_for_line("deliver cancelled: cancelled by")
        assert watching.wait() == 1
    assert f"run {held[1]} was not launched: deliver cancelled: cancelled by" in cli(url, "runs", "show", held[1])
    assert "it is cancelled" in cli(url, "runs", "cancel", held[1], status=1)
    for verb in ("retry", "rerun"):
        said = cli(url, "runs", verb, held[1], status=1)
        assert f"run {held[1]} was not launched, and its start is not repeated: cancelled by" in said, said
        assert "is not launched yet: tidegate explain" in cli(url, "runs", verb, held[0], status=1)
    assert "resumes_at" not in cli(url, "runs", "show", parent), "children have no time"
    assert "no run" in cli(url, "runs", "cancel", "01a00000-0000-7000-8000-000000000000", status=1)


def test_children_that_are_not_listed_are_counted(url: str) -> None:
    publish(url, "order.pallets", "pallets")
    parent = settled(url, "pallets", "waiting_for_child")["outcomes"][0]["run_id"]
    found = httpx.get(f"{url}/v1/runs/{parent}", trust_env=False).json()
    assert (len(found["children"]), found["children_total"]) == (500, 501)
    assert cli(url, "runs", "show", parent).splitlines()[-1] == "the first 500 of 501 children"


def test_an_event_of_several_runs_names_them(url: str) -> None:
    publish(url, "order.twice", "twice")
    for _ in range(2000):
        found = httpx.get(f"{url}/v1/explain/twice", trust_env=False).json()
        if [one["state"] for one in found["outcomes"]] == ["sleeping", "sleeping"]:
            break
    text = cli(url, "explain", "twice")
    assert all(f"run:       {one['run_id']} of {one['workflow']}" in text for one in found["outcomes"]), text
    assert text.splitlines()[-1] == "tidegate explain RUN_ID says more about one of the runs"


def test_the_end_of_a_wait_is_not_called_an_attempt(url: str) -> None:
    publish(url, "order.placed", "until", id=77)
    run_id = settled(url, "until", "waiting_for_event")["outcomes"][0]["run_id"]
    [step] = [line for line in cli(url, "explain", run_id).splitlines() if " step " in line]
    assert "wait order.approved (until 20" in step, step
    shown = cli(url, "runs", "show", run_id)
    assert re.search(r"wait order.approved  pending +0 +until 20", shown), shown


def test_a_failed_step_has_a_next_attempt(url: str) -> None:
    publish(url, "order.flaky", "flaky")
    run_id = settled(url, "flaky", "step_retry")["outcomes"][0]["run_id"]
    text = cli(url, "explain", run_id)
    assert "charge: ValueError: busy (next attempt 20" in text, text
    assert "until" not in cli(url, "runs", "show", run_id)


def test_misspelt_variables_are_named_and_lists_say_whether_a_filter_was_given(url: str) -> None:
    misspelt = {"TIDEGATE_URI": "http://elsewhere", "TIDEGATE_LOG_LEVLE": "debug", "TIDEGATE_TOKEN": "none"}
    done = run("runs", "list", "--workflow", "nobody", env={"TIDEGATE_URL": url} | misspelt)
    assert (done.returncode, done.stdout) == (0, "No runs match.\n")
    assert done.stderr.splitlines() == [
        "tidegate: TIDEGATE_LOG_LEVLE is not a setting, and is ignored; did you mean TIDEGATE_LOG_LEVEL?",
        "tidegate: TIDEGATE_URI is not a setting, and is ignored; did you mean TIDEGATE_URL?",
    ]


def test_many_runs_at_once(url: str) -> None:
    for n in range(3):
        publish(url, "order.broken", f"many-{n}", "--wait", status=1, id=100 + n)
    chosen = ("--workflow", "broken", "--parameter", "id=101")
    assert json.loads(cli(url, "runs", "list", *chosen, "--json"))["runs"][0]["parameters"] == {"id": 101}
    assert cli(url, "runs", "retry", *chosen, "--dry-run").strip() == "1 would be resumed"
    assert "add --yes" in cli(url, "runs", "retry", *chosen, status=2)
    assert cli(url, "runs", "rerun", *chosen, "--yes").strip() == "1 repeated"
    assert cli(url, "runs", "retry", "--error", "no paper", "--yes").strip().endswith("resumed")
    note = cli(url, "runs", "list", "--workflow", "broken", "--limit", "2")
    assert "more than these 2 exist" in note and "--cursor" in note
    rest = note.split("--cursor ")[1].split()[0]
    assert json.loads(cli(url, "runs", "list", "--workflow", "broken", "--cursor", rest, "--json"))["runs"]
    assert "--status" in cli(url, "runs", "retry", "--status", "pending", "--yes", status=1)
    assert "say which runs" in cli(url, "runs", "cancel", status=2)
    refused = httpx.post(f"{url}/v1/runs/cancel", json={}, trust_env=False)
    assert refused.status_code == 422 and refused.json()["errors"][0]["field"] == "all"


def test_workers_and_events(url: str) -> None:
    [one] = json.loads(cli(url, "workers", "list", "--json"))["workers"]
    assert (
        one["is_alive"]
        and one["workflows"] == sorted(re.findall(r"^async def (\w+)", APP, re.MULTILINE))
        and one["slots"] > 0
    )
    assert one["name"] in cli(url, "workers", "list")
    publish(url, "order.quick", "tail-1", "--wait")
    assert "tail-1  quick succeeded" in cli(url, "events", "tail", "--once")
    predicted = json.loads(cli(url, "events", "replay", "tail-1", "--dry-run", "--json"))["triggers"]
    assert [(p["workflow"], p["would_launch"], p["already_decided"]) for p in predicted] == [("quick", 0, 1)]
    assert "is decided again" in cli(url, "events", "replay", "tail-1")
    assert "would be replayed" in cli(url, "events", "replay", "--type", "order.quick", "--dry-run")
    cli(url, "publish", "order.quick", "--source", "shop", "--id", "gone-1", "--delay", "1h")
    cli(url, "events", "cancel", "gone-1")
    left_out = "1 was taken back and is left out: tidegate events replay ID decides one of these"
    assert left_out in cli(url, "events", "replay", "--type", "order.quick", "--dry-run")
    done = cli(url, "events", "replay", "--type", "order.quick", "--yes", "--rate", "1000")
    assert "will be replayed" in done and left_out in done
    assert "was taken back" in cli(url, "events", "replay", "gone-1", "--dry-run")
    assert "is decided again, although it was taken back" in cli(url, "events", "replay", "gone-1")


def test_watching_a_run(url: str) -> None:
    publish(url, "order.quick", "watch-1", "--wait", id=9)
    run_id = httpx.get(f"{url}/v1/explain/watch-1", trust_env=False).json()["outcomes"][0]["run_id"]
    assert 'quick succeeded\n{"id":9}' in cli(url, "runs", "watch", run_id)
