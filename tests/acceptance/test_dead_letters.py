"""Dead letters as operators see them, over HTTP and on the command line, on real API and worker processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from tests.acceptance.test_top import terminal
from tests.flow.conftest import eventually
from tests.processes import api, run, worker
from tests.store.builders import make_events
from tidegate.client import Client
from tidegate.store.db import Connection, Database

APP = """
from pathlib import Path

from tidegate import Tidegate, NonRetryable

app = Tidegate()
MENDED = Path(__file__).with_name("mended")


def call():
    if not MENDED.exists():
        raise NonRetryable("the service is away")
    return "ok"


@app.workflow(on="order.created")
async def fulfil(ctx):
    return await ctx.step("call", call)
"""
OPEN = "select count(*) = $1 from tidegate.dead_letters where replayed_at is null and replay_at is null"
DONE = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"


def cli(url: str, *arguments: str) -> Any:
    done = run("dlq", *arguments, "--json", env={"TIDEGATE_URL": url})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


async def test_look_preview_replay(database_url: str, database: Database, tmp_path: Path) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP)
    with api(database_url) as (_, url), worker(database_url, app), Client(url) as client:
        for n in range(5):
            client.publish("order.created", source="shop.api", payload={"n": n})
        await eventually(database, OPEN, 5)
        first = client.request("GET", "/admin/dead-letters", kind="step", workflow="fulfil", limit=3)
        rest = client.request("GET", "/admin/dead-letters", cursor=first["next_cursor"])
        assert (len(first["dead_letters"]), len(rest["dead_letters"]), rest["next_cursor"]) == (3, 2, None)
        letter = rest["dead_letters"][-1]
        assert (letter["source"], letter["step"], letter["trigger"] is not None) == ("shop.api", "call", True)
        for wrong in ({"kind": "x"}, {"since": "x"}, {"state": "x"}, {"rate": "1"}):
            assert httpx.get(f"{url}/admin/dead-letters", params=wrong, trust_env=False).status_code == 422
        for body in ({"rate": 0}, {"rate": "x"}, {"since": "2026-01-31T09:30:00"}, {"what": 1}, {"reason": "\0"}):
            answer = httpx.post(f"{url}/admin/dead-letters/replay", json=body, trust_env=False)
            assert answer.status_code == 422, body
        assert cli(url, "replay", "--kind", "step", "--reason", "AWAY", "--dry-run")["count"] == 5
        assert cli(url, "replay", "--kind", "event", "--dry-run")["count"] == 0
        listed = run("dlq", "list", env={"TIDEGATE_URL": url}).stdout
        assert listed.count("fulfil/code") == 5, "of which trigger"
        (tmp_path / "mended").touch()
        one = cli(url, "replay", letter["id"])
        assert (one["status"], one["replayed_into"]) == ("replayed", letter["workflow_run_id"])
        refused = run("dlq", "replay", letter["id"], env={"TIDEGATE_URL": url})
        assert refused.returncode == 1 and "force it" in refused.stderr
        unasked = run("dlq", "replay", "--all", env={"TIDEGATE_URL": url}, input="")
        assert (unasked.returncode, unasked.stdout) == (2, ""), unasked
        assert "standard input is not a terminal: add --yes" in unasked.stderr
        plan = cli(url, "replay", "--trigger", f"fulfil/{letter['trigger']}", "--rate", "50", "--yes")
        assert (plan["status"], plan["count"]) == ("scheduled", 4)
        await eventually(database, DONE, 5)
        shown = cli(url, "show", letter["id"])
        assert shown["replayed_into"] == letter["workflow_run_id"] and shown["replayed_by"]
        replayed = client.request("GET", f"/v1/runs/{letter['workflow_run_id']}")["run"]
        assert (replayed["status"], replayed["replayed_from"]) == ("succeeded", letter["id"])
        assert cli(url, "list")["dead_letters"] == [] and cli(url, "stop") == {"count": 0}
        for command in (("list", "--state", "all"), ("show", letter["id"]), ("replay", "--all", "--yes"), ("stop",)):
            assert run("dlq", *command, env={"TIDEGATE_URL": url}).returncode == 0
        assert run("dlq", "replay", env={"TIDEGATE_URL": url}).returncode == 2
        assert run("dlq", "replay", letter["id"], "--all", env={"TIDEGATE_URL": url}).returncode == 2


async def test_at_a_terminal_a_replay_of_many_asks(database_url: str, connection: Connection) -> None:
    ids = await make_events(connection, 3)
    await connection.execute("delete from tidegate.event_inbox")
    await connection.execute(
        "insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason) "
        "select tidegate.uuid7(), 'event', e, e, 'broken' from unnest($1::uuid[]) e",
        ids,
    )
    scheduled = "select count(*) from tidegate.dead_letters where replay_at is not null"
    with api(database_url) as (_, url):
        with terminal("dlq", "replay", "--all", "--rate", "5", TIDEGATE_URL=url) as asking:
            asking.press("n\n")
            status, drawn = asking.wait()
        assert (status, await connection.fetchval(scheduled)) == (130, 0), drawn
        assert "Replay 3 dead letters, 5 per second?" in drawn
        with terminal("dlq", "replay", "--kind", "event", TIDEGATE_URL=url) as asking:
            asking.press("y\n")
            status, drawn = asking.wait()
        assert (status, await connection.fetchval(scheduled)) == (0, 3), drawn
        assert run("dlq", "stop", env={"TIDEGATE_URL": url}).returncode == 0
        with terminal("dlq", "replay", "--all", "--yes", TIDEGATE_URL=url) as unasked:
            status, drawn = unasked.wait()
        assert (status, await connection.fetchval(scheduled)) == (0, 3) and "?" not in drawn, drawn


async def test_killed_in_the_middle_nothing_is_lost_or_doubled(
    database_url: str, database: Database, connection: Connection, tmp_path: Path
) -> None:
    app = tmp_path / "app.py"
    app.write_text(APP)
    (tmp_path / "mended").touch()
    ids = await make_events(connection, 20)
    await connection.execute("delete from tidegate.event_inbox")
    await connection.execute(
        "insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason) "
        "select tidegate.uuid7(), 'event', e, e, 'broken' from unnest($1::uuid[]) e",
        ids,
    )
    with api(database_url) as (_, url):
        assert cli(url, "replay", "--all", "--rate", "100", "--yes")["count"] == 20
    for point in ("replay.before_commit=kill@5", "replay.after_commit=kill@5"):
        with worker(database_url, app, TIDEGATE_FAILPOINTS=point, TIDEGATE_LEASE_MS="1000") as process:
            assert process.wait() == 137
    with worker(database_url, app, TIDEGATE_LEASE_MS="1000"):
        await eventually(database, DONE, 20)
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 20
    assert await connection.fetchval("select count(*) from tidegate.dead_letters where replayed_at is null") == 0
    replays = "select count(*) from tidegate.audit_log where action = 'dead_letter.replay'"
    assert await connection.fetchval(replays) == 20
