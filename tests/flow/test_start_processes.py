"""Starts over HTTP, from the clients and the command line, against a real API and worker."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.flow.conftest import eventually
from tests.flow.test_step_processes import QUICK, Effects
from tests.processes import api, run, worker
from tidegate import AsyncClient, Client, Conflict, InvalidInput, NotFound, RunFailed
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "steps_app.py"


@pytest.fixture
def url(database_url: str, effects: Effects) -> Iterator[str]:
    with api(database_url) as (_, address), worker(database_url, APP, **QUICK):
        yield address


async def registered(database: Database) -> None:
    await eventually(database, "select exists (select from tidegate.workflow_definitions)")


async def test_one_id_from_20_clients_is_one_run_and_one_effect(
    url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await registered(database)

    def one(_: int) -> object:
        with Client(url) as client:
            return client.run("fulfil", {"n": 7}, id="o-7", timeout="60s")

    with ThreadPoolExecutor(20) as threads:
        answers = await asyncio.gather(
            *(asyncio.get_running_loop().run_in_executor(threads, one, n) for n in range(20))
        )
    assert answers == [{"n": 7}] * 20
    assert [what for _, what in await effects()] == ["fulfil 7"]
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 1


async def test_the_answers(url: str, database: Database, effects: Effects) -> None:
    await registered(database)
    path = f"{url}/v1/workflows/fulfil/runs"
    with httpx.Client(timeout=60) as http:
        done = http.post(path, params={"wait": "30s"}, json={"parameters": {"n": 1}, "id": "a"})
        assert done.status_code == 200
        assert (done.json()["status"], done.json()["output"]) == ("succeeded", {"n": 1})
        again = http.post(path, json={"parameters": {"n": 1}, "id": "a"})
        assert (again.status_code, again.json()["status"]) == (202, "duplicate")
        assert again.json()["run_id"] == done.json()["run_id"]
        waits = http.post(path, params={"wait": "100ms"}, json={"parameters": {"n": 2, "seconds": 3600}})
        assert (waits.status_code, waits.json()["status"]) == (202, "accepted")
        seen = http.get(f"{url}/v1/runs/{waits.json()['run_id']}", params={"wait": "100ms"})
        assert (seen.status_code, seen.json()["run"]["status"]) == (200, "pending")
        wrong = http.post(path, json={"parameters": {"m": 1}})
        assert wrong.status_code == 422
        assert {e["field"] for e in wrong.json()["errors"]} == {"parameters.n", "parameters.m"}
        assert http.post(path, json={"parameters": {"n": 9}, "id": "a"}).status_code == 409
        assert http.post(f"{url}/v1/workflows/none/runs", json={}).status_code == 404
        too_long = http.post(path, params={"wait": "61s"}, json={"parameters": {"n": 1}})
        assert too_long.json()["errors"] == [{"field": "wait", "message": "must be at most 60s"}]
        assert http.get(f"{url}/v1/runs/01a1eb0c-46cd-76b4-a6e8-2bbf76306bbf").status_code == 404
        reserved = http.post(f"{url}/v1/events", json={"type": "tidegate.start", "source": "x"})
        assert reserved.status_code == 422 and reserved.json()["errors"][0]["field"] == "type"
        reserved = http.post(f"{url}/v1/events", json={"type": "x", "source": "tidegate.schedule"})
        assert reserved.status_code == 422 and reserved.json()["errors"][0]["field"] == "source"


async def test_the_clients(url: str, database: Database, effects: Effects) -> None:
    await registered(database)
    async with AsyncClient(url) as client:
        started = await client.start("fulfil", {"n": 3}, id="c")
        assert await started.result(timeout="60s") == {"n": 3}
        assert await client.run("fulfil", {"n": 3}, id="c") == {"n": 3}
        bad = await client.start("fulfil", {"n": 4, "fails": True})
        with pytest.raises(RunFailed, match="failed: ValueError: no such order"):
            await bad.result()
        with pytest.raises(TimeoutError):
            await client.run("fulfil", {"n": 5, "seconds": 3600}, timeout="200ms")
        with pytest.raises(InvalidInput, match=r"parameters\.x"):
            await client.start("fulfil", {"x": 1})
        with pytest.raises(NotFound):
            await client.start("none")
        with pytest.raises(Conflict):
            await client.start("fulfil", {"n": 6}, id="c")


async def test_the_command(url: str, database: Database, effects: Effects) -> None:
    await registered(database)
    env = {"TIDEGATE_URL": url}
    done = run("run", "fulfil", "--data", '{"n": 8}', "--id", "cli", "--wait", "60s", env=env)
    assert (done.returncode, json.loads(done.stdout)) == (0, {"n": 8}), done.stderr
    again = run("run", "fulfil", "--data", '{"n": 8}', "--id", "cli", env=env)
    assert again.returncode == 0 and again.stdout.startswith("duplicate ")
    failed = run("run", "fulfil", "--data", '{"n": 8, "fails": true}', "--wait", "60s", env=env)
    assert failed.returncode == 1 and "ValueError: no such order" in failed.stderr
    wrong = run("run", "fulfil", "--data", '{"m": 8}', env=env)
    assert wrong.returncode == 1 and "--data.n" in wrong.stderr
    asleep = run("run", "nap", "--data", '{"duration": "30m"}', "--wait", "200ms", env=env)
    assert asleep.returncode == 1 and "the run has not ended within 200ms; tidegate explain" in asleep.stderr
    unsaid = run("run", "fulfil", "--wait", "soon", env=env)
    assert unsaid.returncode == 2 and "--wait" in unsaid.stderr
    assert Counter(what for _, what in await effects())["fulfil 8"] == 2
