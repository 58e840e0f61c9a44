"""Two checkouts of one application as two worker processes: a deploy that renames a step repeats nothing."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.flow.conftest import eventually
from tests.processes import api, run, worker
from tidegate.client import Client
from tidegate.store.db import Connection, Database

OLD = Path(__file__).parent / "versions_app.py"
Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
QUICK = {"TIDEGATE_LEASE_MS": "1000"}
PUBLISH = "select tidegate.publish('order.created', 'test', $1)"
SLEEPS = (
    "select count(*) = $1 from tidegate.workflow_runs where status = 'pending' and attempts = 1 and version is not null"
)
HELD = "select count(*) = $1 from tidegate.workflow_runs where status = 'pending' and version_held_at is not null"
SUCCEEDED = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"


@pytest.fixture
def renamed(tmp_path: Path) -> Path:
    """A checkout in which a step has another name."""
    path = tmp_path / "renamed" / "versions_app.py"
    path.parent.mkdir()
    path.write_text(OLD.read_text().replace('"charge", record', '"take payment", record'))
    return path


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    """A checkout with another step behind those that are recorded."""
    path = tmp_path / "more" / "versions_app.py"
    path.parent.mkdir()
    path.write_text(OLD.read_text().replace('"ship", record, ctx.run_id, "ship"', '"send", record, ctx.run_id, "send"'))
    return path


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
async def test_a_run_waits_for_its_version_and_goes_on_when_it_comes(
    database_url: str, database: Database, connection: Connection, effects: Effects, renamed: Path, end: signal.Signals
) -> None:
    await connection.execute(PUBLISH, {"order": "o-7"})
    with worker(database_url, OLD, **QUICK) as first:
        await eventually(database, SLEEPS, 1)
        first.signal(end)
        first.wait()
    with api(database_url) as (_, url), worker(database_url, renamed, **QUICK), Client(url) as client:
        await eventually(database, HELD, 1)
        [found] = client.request("GET", "/v1/runs", tag="order:o-7")["runs"]
        assert "it reaches 'take payment' before 'charge', which is recorded" in found["warning"]
        health = client.request("GET", "/admin/event-health")
        assert ("version_mismatch", "fulfil") in [(one["code"], one["subject"]) for one in health["causes"]]
        doctor = run("doctor", env={"TIDEGATE_DATABASE_URL": database_url})
        assert f"version {found['version']} (1, e.g. {found['id']})" in doctor.stdout
        listed = run("runs", "list", "--tag", "order:o-7", env={"TIDEGATE_URL": url})
        assert found["id"] in listed.stdout
        assert run("runs", "list", "--tag", "order:o-8", env={"TIDEGATE_URL": url}).stdout == "No runs match.\n"
        wrong = run("runs", "list", "--tag", "order", env={"TIDEGATE_URL": url})
        assert wrong.returncode == 1 and "tag: must be a name and a value" in wrong.stderr
        assert [what for _, what in await effects()] == ["charge"]
        with worker(database_url, OLD, **QUICK):
            await eventually(database, SUCCEEDED, 1)
    assert [what for _, what in await effects()] == ["charge", "ship"]


async def test_an_operator_lets_it_go_on_with_the_new_code(
    database_url: str, database: Database, connection: Connection, effects: Effects, renamed: Path
) -> None:
    await connection.execute(PUBLISH, {"order": "o-7"})
    with worker(database_url, OLD, **QUICK) as first:
        await eventually(database, SLEEPS, 1)
        first.signal(signal.SIGTERM)
        first.wait()
    with api(database_url) as (_, url), worker(database_url, renamed, **QUICK):
        await eventually(database, HELD, 1)
        run_id = await connection.fetchval("select id::text from tidegate.workflow_runs")
        env = {"TIDEGATE_URL": url}
        assert run("runs", "resume", run_id, env=env).returncode == 2
        asks = run("runs", "resume", run_id, "--on-current-code", env=env)
        assert asks.returncode == 2 and "add --yes" in asks.stderr
        assert "leaves recorded step 'charge' unused" in asks.stderr.replace("\n", " ") and "EXECUTES" in asks.stderr
        said = run("runs", "resume", run_id, "--on-current-code", "--yes", env=env)
        assert said.returncode == 0 and "is due" in said.stdout, said.stderr
        await eventually(database, SUCCEEDED, 1)
        again = run("runs", "resume", run_id, "--on-current-code", env=env)
        assert again.returncode == 1 and "does not wait for a version" in again.stderr
    assert [what for _, what in await effects()] == ["charge", "charge", "ship"]


async def test_both_versions_side_by_side_each_finish_their_own(
    database_url: str, database: Database, connection: Connection, effects: Effects, renamed: Path
) -> None:
    with worker(database_url, OLD, **QUICK):
        for n in range(10):
            await connection.execute(PUBLISH, {"order": f"o-{n}", "seconds": 2})
        await eventually(database, SLEEPS, 10)
        with worker(database_url, renamed, **QUICK):
            await eventually(database, SUCCEEDED, 10)
    assert Counter(what for _, what in await effects()) == {"charge": 10, "ship": 10}
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs where misfits is not null") == 0


async def test_runs_that_fit_go_on_with_the_new_code(
    database_url: str, database: Database, connection: Connection, effects: Effects, extended: Path
) -> None:
    for n in range(10):
        await connection.execute(PUBLISH, {"order": f"o-{n}"})
    with worker(database_url, OLD, **QUICK) as first:
        await eventually(database, SLEEPS, 10)
        first.signal(signal.SIGKILL)
        first.wait()
    with worker(database_url, extended, **QUICK):
        await eventually(database, SUCCEEDED, 10)
    assert Counter(what for _, what in await effects()) == {"charge": 10, "send": 10}
