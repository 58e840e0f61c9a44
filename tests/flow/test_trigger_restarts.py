"""What is known of a trigger outlives every process: its window of failures, its breaker, its probe, its pause."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.flow.conftest import eventually
from tests.processes import api, worker
from tidegate.store.db import Connection, Database

Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]

# The first execution of a slow run lasts until its worker is killed; the next one ends at once.
APP = """
import asyncio
import os

import asyncpg

from tidegate import Breaker, Context, NonRetryable, Tidegate

app = Tidegate()

async def leave_effect(run_id, what):
    connection = await asyncpg.connect(os.environ["TIDEGATE_DATABASE_URL"])
    try:
        return await connection.fetchval(
            "insert into effects (run_id, what) values ($1, $2) "
            "returning (select count(*) from effects where run_id = $1)", run_id, what)
    finally:
        await connection.close()

@app.workflow(on="pay", breaker=Breaker(threshold=4, ratio=0.5, window="1h", pause="PAUSE", non_retryable=True))
async def pay(ctx: Context, how: str = "good", **given) -> None:
    done = await leave_effect(ctx.run_id, how)
    if how == "slow" and done == 0:
        await asyncio.sleep(3600)
    if how == "bad":
        raise NonRetryable("refused")

@app.workflow(on="ship")
async def ship(ctx: Context, **given) -> None:
    await leave_effect(ctx.run_id, "ship")
"""

STATE = """
select t.name, w.slug, (to_jsonb(g) - 'updated_at') as gate,
       (select coalesce(sum(s.succeeded), 0)::int from tidegate.trigger_successes s
         where s.trigger_id = g.trigger_id) as succeeded,
       (select jsonb_agg(to_jsonb(d) order by d.ingress_sequence) from tidegate.workflow_trigger_deliveries d
         where d.trigger_id = g.trigger_id and d.retry_state = 'scheduled') as waiting
  from tidegate.event_scheduler_triggers g
  join tidegate.workflow_event_triggers t on t.id = g.trigger_id
  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
 order by w.slug
"""
ENDED = "select count(*) = $1 from tidegate.workflow_runs where finished_at is not null"
WAITING = """
select count(*) = $2 from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_event_triggers t on t.id = d.trigger_id
  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
 where w.slug = $1 and d.retry_state = 'scheduled'
"""


def write_app(folder: Path, pause: str) -> Path:
    file = folder / "paying.py"
    file.write_text(APP.replace("PAUSE", pause))
    return file


class Site:
    """A worker and an API that are running."""

    def __init__(self, http: httpx.Client, end: Callable[[signal.Signals], None]) -> None:
        self.http = http
        self.end = end

    def publish(self, kind: str, **payload: Any) -> None:
        answer = self.http.post("/v1/events", json={"type": kind, "source": "shop", "payload": payload})
        assert answer.status_code == 202, answer.text

    def triggers(self) -> dict[str, dict[str, Any]]:
        """What the API says of each workflow's trigger."""
        answer = self.http.get("/admin/triggers")
        assert answer.status_code == 200, answer.text
        return {one["workflow"]: one for one in answer.json()["triggers"]}

    def act(self, workflow: str, verb: str, **body: Any) -> None:
        answer = self.http.post(f"/admin/triggers/{self.triggers()[workflow]['id']}/{verb}", json=body)
        assert answer.status_code == 200, answer.text


@contextlib.contextmanager
def site(database_url: str, app: Path, **env: str) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(worker(database_url, app, **env))
        serve, url = stack.enter_context(api(database_url))
        http = stack.enter_context(httpx.Client(base_url=url, timeout=30, trust_env=False))

        def end(signum: signal.Signals) -> None:
            for one in (process, serve):
                one.signal(signum)
            expected = 0 if signum == signal.SIGTERM else -signum
            assert [one.wait() for one in (process, serve)] == [expected] * 2

        yield Site(http, end)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
async def test_windows_breakers_and_pauses_outlive_all_processes(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path,
    signum: signal.Signals,
) -> None:  # fmt: skip
    app = write_app(tmp_path, pause="1h")

    async def state() -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await connection.fetch(STATE)]

    with site(database_url, app) as first:
        first.act("ship", "pause", reason="stocktaking")
        for number in range(2):
            first.publish("ship", n=number)
        await eventually(database, WAITING, "ship", 2)
        for number in range(3):
            first.publish("pay", how="bad")
            await eventually(database, ENDED, number + 1)
        for number in range(2):  # they succeed while the trigger counts
            first.publish("pay", how="good")
            await eventually(database, ENDED, number + 4)
        known, told = await state(), first.triggers()
        assert told["pay"]["state"]["breaker_state"] == "closed" and told["ship"]["state"]["paused"]
        first.end(signum)
    assert await state() == known

    with site(database_url, app) as second:
        assert second.triggers() == told
        assert await state() == known
        second.publish("pay", how="bad")  # the fourth of six outcomes, five of which other processes have seen
        await eventually(database, ENDED, 6)
        opened = second.triggers()["pay"]["state"]
        assert (opened["breaker_state"], opened["breaker_reason"]) == ("open", "4 failures among 6 outcomes within 1h")
        second.publish("pay", how="good")
        await eventually(database, WAITING, "pay", 1)
        known, told = await state(), second.triggers()
        second.end(signum)
    assert await state() == known

    with site(database_url, app) as third:
        assert third.triggers() == told
        third.publish("pay", how="good")
        third.publish("ship", n=2)
        await eventually(database, WAITING, "pay", 2)
        await eventually(database, WAITING, "ship", 3)
        kept = third.triggers()
        for field in ("breaker_state", "breaker_until", "breaker_reason"):
            assert kept["pay"]["state"][field] == told["pay"]["state"][field]
        for field in ("paused", "paused_at", "paused_until", "pause_reason", "paused_by"):
            assert kept["ship"]["state"][field] == told["ship"]["state"][field]
        assert Counter(what for _, what in await effects()) == {"bad": 4, "good": 2}
        for workflow in ("pay", "ship"):
            third.act(workflow, "resume")
        await eventually(database, ENDED, 11)
        assert third.triggers()["pay"]["state"]["breaker_state"] == "closed"
    assert Counter(what for _, what in await effects()) == {"bad": 4, "good": 4, "ship": 3}
    assert len({run for run, _ in await effects()}) == 11


async def test_a_probe_goes_on_in_the_next_process_and_closes_the_breaker(
    database_url: str, database: Database, connection: Connection, effects: Effects, tmp_path: Path
) -> None:
    app, lease = write_app(tmp_path, pause="100ms"), {"TIDEGATE_LEASE_MS": "3000"}
    with site(database_url, app, **lease) as first:
        for number in range(4):
            first.publish("pay", how="bad")
            await eventually(database, ENDED, number + 1)
        first.publish("pay", how="slow")
        await eventually(database, "select count(*) = 1 from effects where what = 'slow'")
        first.publish("pay", how="good")
        await eventually(database, WAITING, "pay", 1)
        probe = first.triggers()["pay"]["state"]
        assert probe["breaker_state"] == "half_open"
        first.end(signal.SIGKILL)
    assert await connection.fetchval("select breaker_state from tidegate.event_scheduler_triggers") == "half_open"
    with site(database_url, app, **lease) as second:
        await eventually(database, ENDED, 6)
        await eventually(database, WAITING, "pay", 0)
        assert second.triggers()["pay"]["state"]["breaker_state"] == "closed"
    assert Counter(what for _, what in await effects()) == {"bad": 4, "slow": 2, "good": 1}
    row = await connection.fetchrow("select min(attempts), max(attempts) from tidegate.workflow_runs where is_probe")
    assert row is not None and tuple(row) == (2, 2)
