"""Approvals from outside: the commands, the scopes of tokens, and links in the hands of many."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.flow.conftest import eventually
from tests.processes import api, run, worker
from tidegate.flow.accept.lookups import AT_ONCE, MAX_WAITING
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent.parent / "flow" / "waits_app.py"
SETUP = "create table effects (n bigserial primary key, run_id uuid, what text)"
PUBLISH = "select tidegate.publish('approve.async', $2, $1)"
SUSPENDED = "select count(*) = $1 from tidegate.workflow_runs where status = 'pending' and attempts = 1"
ENDED = "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'"
TOLD = "select what from effects where what not like 'http%' order by n"


def token(database_url: str, name: str, *options: str) -> str:
    done = run("token", "create", name, *options, env={"TIDEGATE_DATABASE_URL": database_url})
    secret: str = done.stdout.strip()
    return secret


async def in_thread(call: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(call)


async def test_operators_decide_on_the_command_line(
    database_url: str, database: Database, connection: Connection
) -> None:
    await connection.execute(SETUP)
    for n in (1, 2):
        await connection.execute(PUBLISH, {"id": n}, "test")
    with api(database_url, TIDEGATE_AUTH="on") as (_, address), worker(database_url, APP):
        await eventually(database, SUSPENDED, 2)
        secrets = {
            "reader": token(database_url, "reader", "--scope", "read"),
            "ann": token(database_url, "ann", "--scope", "read", "--scope", "operate"),
            "other": token(database_url, "other", "--scope", "operate", "--scope", "read", "--source", "elsewhere"),
        }

        def tidegate(name: str, *arguments: str) -> Any:
            return run(*arguments, env={"TIDEGATE_URL": address, "TIDEGATE_TOKEN": secrets[name]})

        found = json.loads((await in_thread(lambda: tidegate("reader", "approvals", "list", "--json"))).stdout)
        first, second = (one["id"] for one in found["approvals"])
        table = (await in_thread(lambda: tidegate("reader", "approvals", "list"))).stdout
        assert first in table and "manager" in table and "approve_async" in table
        weak = await in_thread(lambda: tidegate("reader", "approvals", "approve", first))
        assert (weak.returncode, "needs the scope operate" in weak.stderr) == (1, True)
        foreign = await in_thread(lambda: tidegate("other", "approvals", "approve", first))
        assert (foreign.returncode, f"no approval {first}" in foreign.stderr) == (1, True)
        assert "No run waits" in (await in_thread(lambda: tidegate("other", "approvals", "list"))).stdout
        explained = await in_thread(lambda: tidegate("reader", "explain", found["approvals"][0]["run_id"]))
        assert f"tidegate approvals approve {first}" in explained.stdout
        done = await in_thread(lambda: tidegate("ann", "approvals", "approve", first, "--comment", "fine"))
        assert done.stdout.startswith("approved manager of run "), done.stderr
        done = await in_thread(lambda: tidegate("ann", "approvals", "reject", second))
        assert done.stdout.startswith("rejected manager of run "), done.stderr
        again = await in_thread(lambda: tidegate("ann", "approvals", "reject", first))
        assert (again.returncode, "(by ann)" in again.stderr) == (1, True), again.stderr
        unknown = await in_thread(lambda: tidegate("ann", "approvals", "reject", "nonsense"))
        assert (unknown.returncode, "no approval 'nonsense'" in unknown.stderr) == (1, True)
        await eventually(database, ENDED, 2)
        for n, told in enumerate(("approved by ann (operator): fine", "rejected by ann (operator)")):
            run_id = found["approvals"][n]["run_id"]
            explained = await in_thread(lambda run_id=run_id: tidegate("reader", "explain", run_id))
            assert f"manager: {told}" in explained.stdout
            shown = await in_thread(lambda run_id=run_id: tidegate("reader", "runs", "show", run_id))
            assert [line for line in shown.stdout.splitlines() if line.startswith("manager ") and told in line]
    assert sorted(row[0] for row in await connection.fetch(TOLD)) == ["False None", "True fine"]
    rows = await connection.fetch(
        "select actor, action from tidegate.audit_log where action like 'approval.%' order by id"
    )
    assert [tuple(row) for row in rows] == [("ann", "approval.approve"), ("ann", "approval.reject")]


async def test_bearers_of_links_take_no_capacity_from_others(
    database_url: str, database: Database, connection: Connection
) -> None:
    """More people than may wait use a link whose run is locked. Those beyond the bound are refused at once, clients
    with a token go on, and of all others one decides."""
    await connection.execute(SETUP)
    await connection.execute(PUBLISH, {"id": 1}, "test")
    with api(database_url, TIDEGATE_AUTH="on") as (_, address), worker(database_url, APP):
        await eventually(database, SUSPENDED, 1)
        reader = {"authorization": f"Bearer {token(database_url, 'reader', '--scope', 'read')}"}
        path = urlsplit(await connection.fetchval("select what from effects where what like 'http%'")).path
        more, limits = 30, httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=address, timeout=60, trust_env=False, limits=limits) as client:
            assert (await client.get(path)).status_code == 200
            async with connection.transaction():
                await connection.execute("select from tidegate.workflow_runs for update")
                asked: list[Awaitable[httpx.Response]] = [
                    asyncio.create_task(client.post(path, json={"approved": True}))
                    for _ in range(AT_ONCE + MAX_WAITING + more)
                ]
                refused = [await one for one in await first_of(asked, more)]
                assert [one.status_code for one in refused] == [503] * more
                assert refused[0].headers["retry-after"]
                for _ in range(5):
                    assert (await client.get("/v1/events", headers=reader)).status_code == 200
                    assert (await client.get(f"/approvals/{'a' * 64}")).status_code == 404
            codes = [one.status_code for one in await asyncio.gather(*asked)]
        assert sorted(codes) == [200] + [409] * (AT_ONCE + MAX_WAITING - 1) + [503] * more
        await eventually(database, ENDED, 1)
    assert [row[0] for row in await connection.fetch(TOLD)] == ["True None"]


async def first_of(asked: list[Any], count: int) -> list[Any]:
    """The first of them that are answered."""
    done: set[Any] = set()
    while len(done) < count:
        done |= (await asyncio.wait([one for one in asked if one not in done], return_when="FIRST_COMPLETED"))[0]
    return list(done)
