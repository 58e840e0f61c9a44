"""`/admin/retries` and `tidegate retries` over all that wait: previews, questions, refusals, progress."""

from __future__ import annotations

import json
import signal
import uuid
from typing import Any

import pytest

from tests.acceptance.test_top import terminal
from tests.flow.test_bulk_retries import hold_events, states
from tests.processes import api, run, tidegate
from tests.store.builders import make_events, make_runs, make_triggers
from tidegate import Client, RequestRefused
from tidegate.clock import uuid7
from tidegate.model.ids import step_id
from tidegate.store.db import Connection


async def hold_steps(connection: Connection, count: int) -> list[uuid.UUID]:
    """Runs at rest, each with a step that is to be tried again in an hour."""
    at = await connection.fetchval("select tidegate.now() + interval '1 hour'")
    ids = []
    for run_id in await make_runs(connection, [at] * count):
        ids.append(step_id(run_id, "call"))
        await connection.execute(
            "insert into tidegate.workflow_run_steps (id, workflow_run_id, name, retry_state, next_attempt_at, "
            "retry_attempts, retry_metadata) values ($1, $2, 'call', 'scheduled', $3, 2, '{\"reason\": \"failed\"}')",
            ids[-1], run_id, at,
        )  # fmt: skip
    return ids


async def hold_deliveries(connection: Connection, count: int) -> None:
    [trigger_id] = await make_triggers(connection)
    for event_id in await make_events(connection, count):
        await connection.execute(
            "insert into tidegate.workflow_trigger_deliveries (id, trigger_id, event_id, status, retry_state, "
            "next_attempt_at, reason, source) values ($1, $2, $3, 'throttled', 'scheduled', "
            "tidegate.now() + interval '1 hour', 'throttle', 'shop.api')",
            uuid7(), trigger_id, event_id,
        )  # fmt: skip
    await connection.execute("delete from tidegate.event_inbox")


def at_terminal(url: str, answer: str, *arguments: str) -> tuple[int, str]:
    """The status of a `retries` command at a terminal that was answered so, and its question."""
    with terminal("retries", *arguments, TIDEGATE_URL=url) as asking:
        asking.press(answer)
        status, drawn = asking.wait()
    return status, next(line.partition("?")[0] + "?" for line in drawn.splitlines() if "?" in line)


async def test_commands_about_all_that_wait(database_url: str, connection: Connection) -> None:
    await hold_events(connection, 1203)
    await hold_events(connection, 2, source="other")
    with api(database_url) as (_, url):
        env = {"TIDEGATE_URL": url}

        def say(*arguments: str, answer: str = "", status: int = 0) -> Any:
            done = run("retries", *arguments, env=env, input=answer)
            assert done.returncode == status, (arguments, done)
            return done

        assert say("cancel", "--source", "shop.api", "--dry-run").stdout == "1203 events would be cancelled\n"
        previewed = json.loads(say("force", "--all", "--dry-run", "--json").stdout)
        assert (previewed["status"], previewed["remaining"], previewed["done"]) == ("preview", 1205, 0)
        assert at_terminal(url, "n\n", "cancel", "--source", "shop.api") == (130, "Cancel 1203 events?")
        for answer in ("", "y\n"):  # nobody to ask
            refused = say("cancel", "--source", "shop.api", answer=answer, status=2)
            assert "standard input is not a terminal: add --yes" in refused.stderr
        assert (await states(connection)) == {("shop.api", "scheduled"): 1203, ("other", "scheduled"): 2}

        done = say("cancel", "--source", "shop.api", "--yes")
        assert done.stdout.endswith("cancelled 1203 events\n") and "cancelled 1000 of 1203" in done.stderr
        assert (await states(connection)) == {("shop.api", "cancelled"): 1203, ("other", "scheduled"): 2}
        forced = json.loads(say("force", "--all", "--yes", "--json").stdout)
        assert (forced["status"], forced["done"], forced["cursor"]) == ("forced", 2, None)
        assert say("cancel", "--source", "nobody", "--yes").stdout == "Nothing that matches is waiting.\n"
        actors = await connection.fetch("select distinct actor from tidegate.audit_log where action like 'events.%'")
        assert len(actors) == 1 and actors[0][0] != "api"
        for wrong in (
            [], ["an-id", "--all"], ["--all", "--source", "x"], ["an-id", "--dry-run"], ["--all", "--json"],
            ["--workflow", "x"], ["--kind", "deliveries", "--run", str(uuid7())],
        ):  # fmt: skip
            say("cancel", *wrong, status=2)


async def test_a_stopped_command_leaves_whole_batches_and_says_so(database_url: str, connection: Connection) -> None:
    await hold_events(connection, 1500)
    # The first batch of the second call takes its time.
    with api(database_url, TIDEGATE_FAILPOINTS="bulk_retries.after_commit=sleep:5@11") as (_, url):
        with tidegate("retries", "cancel", "--all", "--yes", TIDEGATE_URL=url) as command:
            command.wait_for_line("cancelled 1000 of 1500")
            command.signal(signal.SIGINT)
            assert command.wait() == 130
            assert "stopped: 1000 of 1500 are cancelled; run it again to continue" in command.output
        again = run("retries", "cancel", "--all", "--yes", env={"TIDEGATE_URL": url})
        assert again.returncode == 0, again
    assert await states(connection) == {("shop.api", "cancelled"): 1500}
    noted = await connection.fetch("select after from tidegate.audit_log where action = 'events.cancel'")
    assert sum(row["after"]["count"] for row in noted) == 1500  # nothing twice


async def test_deliveries_and_steps_on_the_command_line(database_url: str, connection: Connection) -> None:
    await hold_deliveries(connection, 3)
    first, second, third = await hold_steps(connection, 3)
    with api(database_url) as (_, url):
        env = {"TIDEGATE_URL": url}

        def say(*arguments: str, status: int = 0) -> str:
            done = run("retries", *arguments, env=env)
            assert done.returncode == status, (arguments, done)
            return str(done.stdout)

        listed = say("list", "--kind", "steps", "--workflow", "fulfil")
        assert str(first) in listed and "call" in listed and "failed" in listed and "60m" in listed
        run_id = json.loads(say("list", "--kind", "steps", "--json"))["retries"][0]["workflow_run_id"]
        assert len(json.loads(say("list", "--kind", "steps", "--run", run_id, "--json"))["retries"]) == 1
        assert say("force", "--kind", "steps", str(first)) == f"forced {first}\n"
        assert say("cancel", "--kind", "steps", str(second)) == f"cancelled {second}\n"
        say("cancel", "--kind", "steps", str(second), status=1)
        asked = at_terminal(url, "n\n", "cancel", "--kind", "steps", "--all")
        assert asked == (130, "Cancel 2 steps, and with them their runs?")
        assert say("cancel", "--kind", "steps", "--reason", "failed", "--yes") == "cancelled 2 steps\n"
        assert say("force", "--kind", "deliveries", "--trigger", "fulfil/t0", "--yes") == "forced 3 deliveries\n"
        assert say("cancel", "--kind", "deliveries", "--workflow", "fulfil", "--yes") == "cancelled 3 deliveries\n"
    rows = await connection.fetch("select distinct status from tidegate.workflow_runs")
    assert [row[0] for row in rows] == ["cancelled"]
    settled = await connection.fetch("select id from tidegate.workflow_run_steps where retry_state = 'cancelled'")
    assert {row[0] for row in settled} == {first, second, third}


async def test_answers_and_refusals_of_the_verbs(database_url: str, connection: Connection) -> None:
    [step_id] = await hold_steps(connection, 1)
    await hold_events(connection, 5)
    before = await states(connection)
    with api(database_url) as (_, url), Client(url) as client:

        def refused(path: str, body: Any = None) -> tuple[int, set[str]]:
            with pytest.raises(RequestRefused) as found:
                client.request("POST", f"/admin/retries/{path}", body)
            return found.value.status, {error["field"] for error in found.value.problem.get("errors", [])}

        for verb in ("cancel", "force"):
            assert refused(f"events/{verb}", {}) == (422, {"all"})
            assert refused(f"events/{verb}", {"all": False, "dry_run": True}) == (422, {"all"})
            assert refused(f"events/{verb}", {"all": True, "source": "x"}) == (422, {"all"})
            assert refused(f"events/{verb}", {"workflow": "x", "trigger_id": str(uuid7())}) == (
                422, {"workflow", "trigger_id"},
            )  # fmt: skip
            assert refused(f"deliveries/{verb}", {"workflow_run_id": str(uuid7())}) == (422, {"workflow_run_id"})
            assert refused(f"steps/{verb}", {"trigger_id": "x"}) == (422, {"trigger_id"})
            assert refused(f"events/{verb}", {"source": "a\x00b"}) == (422, {"source"})
            assert refused(f"events/{verb}", {"source": "a", "limit": 0}) == (422, {"limit"})
            assert refused(f"events/{verb}", {"source": "a", "limit": 1001}) == (422, {"limit"})
            assert refused(f"events/{verb}", {"source": "a", "cursor": "nonsense"}) == (422, {"cursor"})
            assert refused(f"events/{verb}", {"source": "a", "cursor": "bnVsbA"}) == (422, {"cursor"})
            assert refused(f"events/{verb}", {"sources": "a"})[0] == 422
            assert refused(f"nonsense/{verb}", {"all": True})[0] == 404
            assert refused(f"steps/{uuid7()}/{verb}")[0] == refused(f"steps/x/{verb}")[0] == 404
        assert await states(connection) == before

        def verb_on(path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
            answer = client._http.post(f"/admin/retries/{path}", json=body or {})
            return answer.status_code, answer.json()

        assert verb_on("events/force", {"all": True, "dry_run": True})[0] == 200
        status, part = verb_on("events/force", {"source": "shop.api", "limit": 2})
        assert (status, part["done"], part["remaining"]) == (202, 2, 3) and part["cursor"]
        status, rest = verb_on("events/cancel", {"source": "shop.api", "cursor": part["cursor"]})
        assert (status, rest["status"], rest["done"], rest["remaining"]) == (200, "cancelled", 3, 0)
        assert rest["cursor"] is None
        assert verb_on(f"steps/{step_id}/force") == (202, {"id": str(step_id), "status": "forced"})
        assert verb_on(f"steps/{step_id}/cancel") == (200, {"id": str(step_id), "status": "cancelled"})
        assert verb_on(f"steps/{step_id}/cancel")[0] == verb_on(f"steps/{step_id}/force")[0] == 409
        listed = client.request("GET", "/admin/retries", kind="steps", state="cancelled")["retries"]
        assert [(row["id"], row["eta_seconds"]) for row in listed] == [(str(step_id), None)]
