"""Approvals in real processes that are killed: the link stays the same, and the decision is made and heard once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.flow.conftest import eventually
from tests.processes import Process, api, worker
from tidegate.store.db import Connection, Database

APP = Path(__file__).parent / "waits_app.py"
Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
QUICK = {"TIDEGATE_LEASE_MS": "1000"}
PUBLISH = "select tidegate.publish($1, 'test', $2)"
MAILED = "select exists (select from effects where what like 'http%')"
ENDED = "select status = 'succeeded' from tidegate.workflow_runs"
NO_ROW_LEFT = "select not exists (select from tidegate.event_inbox) and not exists (select from tidegate.event_waits)"


async def decide(address: str, link: str, **decision: Any) -> int:
    """Use a link, in a thread: the processes of a test need nothing of its event loop."""

    def post() -> int:
        path = urlsplit(link).path
        return httpx.post(f"{address}{path}", json=decision, timeout=60, trust_env=False).status_code

    return await asyncio.to_thread(post)


def links(done: list[tuple[Any, str]]) -> list[str]:
    return [what for _, what in done if what.startswith("http")]


def said(process: Process, links: list[str]) -> bool:
    return any(link.rpartition("/")[2] in line for link in links for line in process.lines)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize(
    ("death", "is_decided"),
    [
        ("outcome.before_commit=kill", False),
        ("approval.registered=kill", False),
        ("step.before_commit=kill", False),
        ("outcome.after_commit=kill@2", False),
        ("run.before_finish=kill", False),
        ("run.after_claim=kill@2", True),
        ("step.before_commit=kill@2", True),
    ],
)
async def test_a_worker_dies(
    database_url: str,
    database: Database,
    connection: Connection,
    effects: Effects,
    death: str,
    is_decided: bool,
    kind: str,
) -> None:
    await connection.execute(PUBLISH, f"approve.{kind}", {"id": 7})
    with api(database_url) as (serving, address):
        with worker(database_url, APP, TIDEGATE_FAILPOINTS=death, **QUICK) as first:
            if is_decided:
                await eventually(database, "select status = 'pending' and attempts = 1 from tidegate.workflow_runs")
                assert await decide(address, links(await effects())[0], approved=True, comment="yes") == 200
            assert first.wait() == 137
        with worker(database_url, APP, **QUICK) as second:
            if not is_decided:
                await eventually(database, MAILED)
                assert await decide(address, links(await effects())[-1], approved=True, comment="yes") == 200
            await eventually(database, ENDED)
            await eventually(database, NO_ROW_LEFT)
        done = await effects()
        assert len(set(links(done))) == 1, "every execution has the same link"
        assert await decide(address, links(done)[0], approved=False) == 409
        assert not any(said(process, links(done)) for process in (serving, first, second))
    told = [what for _, what in done if not what.startswith("http")]
    # A step that died before its commit is called again; what it was told is the same.
    assert told == ["True yes"] * (2 if death == "step.before_commit=kill@2" else 1)
    assert await connection.fetchval("select count(*) from tidegate.audit_log where action like 'approval.%'") == 1


@pytest.mark.parametrize(
    "death",
    ["approval.before_result=kill", "wait.before_result=kill", "wait.before_wake=kill", "approval.before_commit=kill"],
)
async def test_an_api_dies_while_it_decides(
    database_url: str, database: Database, connection: Connection, effects: Effects, death: str
) -> None:
    """What it had not committed did not happen: the link can be used again, by somebody who decides otherwise."""
    await connection.execute(PUBLISH, "approve.async", {"id": 7})
    with worker(database_url, APP, **QUICK):
        await eventually(database, "select status = 'pending' and attempts = 1 from tidegate.workflow_runs")
        [link] = links(await effects())
        with api(database_url, TIDEGATE_FAILPOINTS=death) as (dying, address):
            with pytest.raises(httpx.TransportError):
                await decide(address, link, approved=True, comment="first")
            assert dying.wait() == 137
        with api(database_url) as (_, address):
            assert await decide(address, link, approved=False, comment="second") == 200
            await eventually(database, ENDED)
            await eventually(database, NO_ROW_LEFT)
    assert [what for _, what in await effects()] == [link, "False second"]
    events = "select count(*) from tidegate.workflow_events where type = 'tidegate.approval.decided'"
    assert await connection.fetchval(events) == 1


async def test_many_people_decide_many_approvals_over_two_apis(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    count = 20
    for n in range(count):
        await connection.execute(PUBLISH, f"approve.{'async' if n % 2 else 'sync'}", {"id": n})
    with worker(database_url, APP, **QUICK), api(database_url) as (_, one), api(database_url) as (_, other):
        await eventually(database, "select count(*) = $1 from effects where what like 'http%'", count)
        found = {link: run_id for run_id, link in await effects()}
        tries = [(link, place, approved) for link in found for place in (one, other) for approved in (True, False)]
        codes = await asyncio.gather(*(decide(place, link, approved=a, comment=place) for link, place, a in tries))
        won = {found[link]: f"{a} {place}" for (link, place, a), code in zip(tries, codes, strict=True) if code == 200}
        assert len(won) == count and sorted(codes) == [200] * count + [409] * (3 * count)
        await eventually(database, "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'", count)
    told = [(run_id, what) for run_id, what in await effects() if not what.startswith("http")]
    assert len(told) == count and dict(told) == won
