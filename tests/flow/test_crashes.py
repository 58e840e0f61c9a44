"""The process dies at a named point, as by kill -9; afterwards nothing is lost and nothing happened twice."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.flow.checker import milliseconds, most_in_any_interval
from tests.flow.conftest import APP, eventually
from tests.flow.trigger_worker import launches
from tests.processes import api, worker
from tidegate import failpoints
from tidegate.client import Client
from tidegate.errors import Unavailable
from tidegate.flow import control
from tidegate.store.db import Connection, Database
from tidegate.store.event_replays import EventRange

Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]

# point: how many rows the crash may leave behind, and whether the client can have seen a 202
INGEST_POINTS = {"ingest.before_begin": 0, "ingest.before_commit": 0, "ingest.after_commit": 1}
DISPATCH_POINTS = [p for p in sorted(failpoints.POINTS) if p.startswith("dispatch.")]
RUN_POINTS = {"run.after_claim": 1, "run.before_finish": 2, "run.after_finish": 1}

SETTLED = """
select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'
"""


@pytest.mark.parametrize(("point", "rows_left"), INGEST_POINTS.items())
async def test_api_dies_while_publishing(database_url: str, connection: Connection, point: str, rows_left: int) -> None:
    with api(database_url, TIDEGATE_FAILPOINTS=f"{point}=kill") as (process, url):
        with Client(url) as client, pytest.raises(Unavailable):
            client.publish("work.quick", source="test", id="e-1", payload={"n": 1})
        assert process.wait() == 137
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == rows_left
    with api(database_url) as (_, url), Client(url) as client:
        receipt = client.publish("work.quick", source="test", id="e-1", payload={"n": 1})
    assert receipt.status == ("duplicate" if rows_left else "accepted")
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 1
    assert await connection.fetchval("select count(*) from tidegate.event_inbox") == 1


@pytest.mark.parametrize("point", DISPATCH_POINTS)
async def test_worker_dies_while_deciding(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str
) -> None:
    for n in range(5):
        await connection.execute("select tidegate.publish('work.quick', 'test', $1)", {"n": n})
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=f"{point}=kill", **LEASE) as process:
        assert process.wait() == 137
    decided = point == "dispatch.after_commit"
    assert await connection.fetchval("select count(*) from tidegate.event_inbox") == (0 if decided else 5)
    assert await connection.fetchval("select count(*) from tidegate.workflow_trigger_deliveries") == 5 * decided
    with worker(database_url, APP, **LEASE):
        await eventually(database, SETTLED, 5)
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 5
    assert len({run for run, _ in await effects()}) == len(await effects()) == 5


@pytest.mark.parametrize(("point", "effects_expected"), RUN_POINTS.items())
async def test_worker_dies_while_running(
    database_url: str,
    database: Database,
    connection: Connection,
    effects: Effects,
    point: str,
    effects_expected: int,
) -> None:
    await connection.execute("select tidegate.publish('work.quick', 'test', '{\"n\": 1}')")
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=f"{point}=kill", TIDEGATE_LEASE_MS="1000") as process:
        assert process.wait() == 137
    with worker(database_url, APP):
        await eventually(database, SETTLED, 1)
    # The effect may repeat only when the crash came before its commit.
    assert len(await effects()) == effects_expected
    row = await connection.fetchrow("select status, output, claim_generation from tidegate.workflow_runs")
    assert row is not None and row["status"] == "succeeded" and row["output"] == {"n": 1}


async def test_reconcile_dies_in_the_middle(
    database_url: str, database: Database, connection: Connection, effects: Effects
) -> None:
    await connection.execute("select tidegate.publish('work.quick', 'test', '{\"n\": 1}')")
    # It has claimed the run and not begun it.
    with worker(
        database_url, APP, TIDEGATE_FAILPOINTS="dispatch.after_commit=kill", TIDEGATE_LEASE_MS="1000"
    ) as process:
        assert process.wait() == 137
    assert await connection.fetchval("select status from tidegate.workflow_runs") == "running"
    with worker(database_url, APP, TIDEGATE_FAILPOINTS="reconcile.mid_batch=kill", TIDEGATE_LEASE_MS="1000") as process:
        assert process.wait() == 137
    with worker(database_url, APP):
        await eventually(database, SETTLED, 1)
    assert len(await effects()) == 1


def test_every_failpoint_is_exercised() -> None:
    """A point that no test arms is a claim that nobody checked."""
    armed = {*INGEST_POINTS, *DISPATCH_POINTS, *RUN_POINTS, *HELD_POINTS, *DELIVERY_POINTS}
    for file in Path(__file__).parent.parent.rglob("test_*.py"):
        armed |= set(re.findall(r"[\"']?([a-z_]+\.[a-z_]+)=kill", file.read_text()))
    assert armed >= failpoints.POINTS


def test_every_failpoint_is_in_the_code() -> None:
    source = Path(failpoints.__file__).parent
    hit = {p for f in source.rglob("*.py") for p in re.findall(r"failpoints\.hit\(\"([^\"]+)\"\)", f.read_text())}
    assert hit == failpoints.POINTS


LEASE = {"TIDEGATE_LEASE_MS": "600"}
HELD_POINTS = ["retry.before_commit", "replan.before_commit"]
SLOW = '[{"source": "noisy", "limit": 1, "interval_ms": 300}]'


@pytest.mark.parametrize("point", HELD_POINTS)
async def test_worker_dies_while_letting_held_events_through(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str
) -> None:
    """Neither the events nor their place in line nor the admission is lost, and none is counted twice."""
    for n in range(5):
        await connection.execute("select tidegate.publish('work.quick', 'noisy', $1)", {"n": n})
    settings = LEASE | {"TIDEGATE_SOURCE_RATE_LIMITS": SLOW, "TIDEGATE_FAILPOINTS": f"{point}=kill@2"}
    with worker(database_url, APP, **settings) as one:
        await eventually(database, "select count(*) > 0 from tidegate.event_ingress_retries")
        if point.startswith("replan"):
            await control.pause(database, "noisy", duration_ms=100, actor="test")
            await eventually(
                database, "select not is_replanning from tidegate.event_scheduler_sources where source = 'noisy'"
            )
            await control.resume(database, "noisy", "test")
        assert one.wait() == 137
    with worker(database_url, APP):
        await eventually(database, SETTLED, 5)
    begun = Counter(run for run, _ in await effects())
    runs = await connection.fetch("select id, attempts from tidegate.workflow_runs")
    assert len(runs) == 5 and all(1 <= begun[row["id"]] <= row["attempts"] for row in runs)  # as it died, one may run
    rows = await connection.fetch("select launched_at from tidegate.workflow_trigger_deliveries order by 1")
    times = [row[0] for row in rows]
    assert all(later - earlier >= timedelta(milliseconds=300) for earlier, later in itertools.pairwise(times))


DELIVERY_POINTS = ["delivery_retry.before_commit", "delivery_retry.after_commit", "delivery_replan.before_commit"]
WAITING = "select count(*) from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled'"


async def check_limited(database: Database, connection: Connection, effects: Effects, count: int) -> None:
    """All have run, each launched once, by the limits; only what a dead worker had begun was begun again."""
    await eventually(database, SETTLED, count)
    rows = await connection.fetch("select * from tidegate.workflow_runs")
    assert len(rows) == len({row["delivery_id"] for row in rows}) == len({row["event_id"] for row in rows}) == count
    assert await connection.fetchval(WAITING) == 0
    begun = Counter(run for run, _ in await effects())
    assert all(1 <= begun[row["id"]] <= row["attempts"] for row in rows)
    assert most_in_any_interval(milliseconds(await launches(connection)), 200) <= 2 or rows[0]["concurrency_key"] == ""
    if rows[0]["concurrency_key"] == "":
        steps = sorted([(row["finished_at"], -1) for row in rows] + [(row["created_at"], 1) for row in rows])
        assert max(itertools.accumulate(step for _, step in steps)) <= 2


@pytest.mark.parametrize("workflow", ["paced", "narrow"])
@pytest.mark.parametrize("point", DELIVERY_POINTS)
async def test_worker_dies_while_deciding_waiting_deliveries(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str, workflow: str
) -> None:
    count, is_replan = 10, point.startswith("delivery_replan")
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=f"{point}=kill@{1 if is_replan else 2}", **LEASE) as one:
        await connection.execute(
            "select tidegate.publish($1, 'test') from generate_series(1, $2)", f"work.{workflow}", count
        )
        if is_replan:
            await eventually(database, f"select ({WAITING}) > 0")
            trigger_id = await connection.fetchval(
                "select t.id from tidegate.workflow_event_triggers t "
                "  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id where w.slug = $1",
                workflow,
            )
            await control.pause_trigger(database, trigger_id, duration_ms=300, actor="test")
        assert one.wait() == 137
    assert await connection.fetchval(WAITING) > 0
    with worker(database_url, APP, **LEASE):
        await check_limited(database, connection, effects, count)


@pytest.mark.parametrize("point", RUN_POINTS)
async def test_worker_dies_with_concurrency_slots_in_its_hands(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str
) -> None:
    """The slots are neither lost nor given away: the next worker ends the same runs and launches the next in line."""
    count = 6
    await connection.execute("select tidegate.publish('work.narrow', 'test') from generate_series(1, $1)", count)
    for where in ("dispatch.after_commit", point):  # the first leaves two runs to claim
        with worker(database_url, APP, TIDEGATE_FAILPOINTS=f"{where}=kill", **LEASE) as one:
            assert one.wait() == 137
    assert await connection.fetchval(WAITING) > 0
    with worker(database_url, APP, **LEASE):
        await check_limited(database, connection, effects, count)


@pytest.mark.parametrize("point", ["event_replay.before_commit=kill@3", "event_replay.after_commit=kill@3"])
async def test_worker_dies_while_events_are_decided_again(
    database_url: str, database: Database, connection: Connection, effects: Effects, point: str
) -> None:
    """Events that no trigger took are replayed once there is one; each is launched once."""
    for n in range(6):
        await connection.execute("select tidegate.publish('work.quick', 'test', $1)", {"n": n})
    await connection.execute("delete from tidegate.event_inbox")
    await control.replay_events(database, EventRange(type="work.quick"), "ann", rate=1000)
    with worker(database_url, APP, TIDEGATE_FAILPOINTS=point, **LEASE) as process:
        assert process.wait() == 137
    left = await connection.fetchval("select count(*) from tidegate.event_replays")
    assert left == (4 if "before" in point else 3)
    with worker(database_url, APP, **LEASE):
        await eventually(database, SETTLED, 6)
    assert await connection.fetchval("select count(*) from tidegate.event_replays") == 0
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 6
    assert len({run for run, _ in await effects()}) == 6  # the killed worker may have been executing some of them
