"""Schedules on a real database with a moved clock: each tick once, one to catch up, and no tick lost in a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from structlog.testing import capture_logs

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.trigger_worker import TriggerWorker
from tests.processes import api, run, worker
from tidegate import Context, Tidegate, failpoints
from tidegate.client import Client
from tidegate.flow.keep.schedule import Scheduler, ScheduleTurn
from tidegate.model.schedule import Schedule as Shown
from tidegate.store import schedules
from tidegate.store.db import Connection, Database

Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
HOUR = 3_600_000

# The clock of the tests begins at 12:00, so the first tick of an hourly schedule is at 13:00.
APP = """
import os
import asyncpg
from tidegate import Tidegate

app = Tidegate()

@app.workflow(every="1h")
async def hourly(ctx, scheduled_at: str):
    connection = await asyncpg.connect(os.environ["TIDEGATE_DATABASE_URL"])
    try:
        await connection.execute("insert into effects (run_id, what) values ($1, $2)", ctx.run_id, scheduled_at)
    finally:
        await connection.close()
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    file = tmp_path / "scheduled.py"
    file.write_text(APP)
    return file


def application(**declarations: dict[str, Any]) -> Tidegate:
    """An application with workflows of these names; an empty declaration has no schedule."""
    app = Tidegate()
    for name, arguments in declarations.items():

        @app.workflow(name=name, **arguments)
        async def workflow(ctx: Context, scheduled_at: datetime) -> None: ...

    return app


async def stage(database: Database, app: Tidegate, batch_size: int = 500) -> Scheduler:
    return Scheduler(database, await database.run(app.register), batch_size=batch_size)


async def published(connection: Connection) -> list[str]:
    rows = await connection.fetch("select external_id from tidegate.workflow_events order by ingress_sequence")
    return [row[0] for row in rows]


async def only(connection: Connection) -> Shown:
    [found] = await schedules.list_page(connection, limit=50)
    return found


def at(hour: int, minute: int = 0) -> datetime:
    return datetime(2026, 6, 1, hour, minute, tzinfo=UTC)


# Ticks --------------------------------------------------------------------------------------------------------------


async def test_a_tick_is_an_ordinary_event_that_launches_its_workflow(
    database: Database, connection: Connection, clock: Clock
) -> None:
    looked = []
    definitions = await database.run(application(hourly={"every": "1h"}).register)
    schedule = Scheduler(database, definitions, batch_size=500, after_publish=lambda: looked.append(True))
    assert await schedule.run_once() == ScheduleTurn(0, 3600.0)
    await clock.advance(HOUR)
    assert (await schedule.run_once()).published == 1
    assert looked == [True]
    row = await connection.fetchrow("select * from tidegate.workflow_events")
    assert row is not None
    assert (row["type"], row["source"], row["external_id"], row["occurred_at"]) == (
        "schedule.hourly",
        "tidegate.schedule",
        "hourly:2026-06-01T13:00:00Z",
        at(13),
    )
    assert row["payload"] == {"scheduled_at": "2026-06-01T13:00:00Z", "workflow": "hourly"}
    outcome = await TriggerWorker(database).turn()
    assert (outcome.events, outcome.launched) == (1, 1)
    launched = await connection.fetchrow(
        "select r.parameters, t.name from tidegate.workflow_runs r "
        "join tidegate.workflow_event_triggers t on t.id = r.trigger_id"
    )
    assert launched is not None
    assert (launched["parameters"], launched["name"]) == ({"scheduled_at": "2026-06-01T13:00:00Z"}, "schedule")
    assert await schedule.run_once() == ScheduleTurn(0, 3600.0)
    found = await only(connection)
    assert (found.last_at, found.next_at) == (at(13), at(14))


async def test_each_tick_once_with_racing_workers(database: Database, connection: Connection, clock: Clock) -> None:
    app = application(a={"every": "1h"}, b={"cron": "*/30 * * * *"}, c={"cron": "0 14 * * *", "timezone": "UTC"})
    stages = [await stage(database, app, batch_size=1 + n) for n in range(6)]
    for _ in range(8):
        await clock.advance(HOUR / 4)
        while sum(turn.published for turn in await asyncio.gather(*(s.run_once() for s in stages))):
            pass
    found = await published(connection)
    hours = [f"a:2026-06-01T{h}:00:00Z" for h in (13, 14)]
    halves = [f"b:2026-06-01T{time}:00Z" for time in ("12:30", "13:00", "13:30", "14:00")]
    assert sorted(found) == [*hours, *halves, "c:2026-06-01T14:00:00Z"]
    assert await connection.fetchval("select count(*) from tidegate.event_inbox") == len(found)


async def test_a_locked_tick_is_left_to_whoever_holds_it(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await clock.advance(HOUR)
    async with database.transaction() as other:
        await other.execute("select from tidegate.schedules for update")
        assert (await schedule.run_once()).published == 0
    assert (await schedule.run_once()).published == 1


async def test_missed_ticks_are_caught_up_by_the_latest_alone(
    database: Database, connection: Connection, clock: Clock
) -> None:
    app = application(often={"every": "1m"}, daily={"cron": "0 3 * * *", "timezone": "Europe/Berlin"})
    schedule = await stage(database, app)
    await clock.advance(10 * 24 * HOUR + 30_000)
    with capture_logs() as logs:
        assert (await schedule.run_once()).published == 2
        assert (await schedule.run_once()).published == 0
    assert sorted(await published(connection)) == ["daily:2026-06-11T01:00:00Z", "often:2026-06-11T12:00:00Z"]
    lines = {line["workflow"]: line for line in logs if line["event"] == "schedule.caught_up"}
    assert lines["often"]["missed_since"] == "2026-06-01T12:01:00Z"
    assert lines["daily"]["missed_since"] == "2026-06-02T01:00:00Z"
    assert lines["daily"]["next_at"] == "2026-06-12T01:00:00Z"
    await clock.advance(30_000)
    assert (await schedule.run_once()).published == 1
    assert (await published(connection))[-1] == "often:2026-06-11T12:01:00Z"


async def test_a_late_look_that_misses_nothing_is_no_catching_up(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await clock.advance(1.9 * HOUR)
    with capture_logs() as logs:
        await schedule.run_once()
    assert [line["event"] for line in logs] == ["schedule.published"]
    assert await published(connection) == ["hourly:2026-06-01T13:00:00Z"]


async def test_a_tick_published_before_is_not_published_again(
    database: Database, connection: Connection, clock: Clock
) -> None:
    """The clock is set back and the schedule taken away and given again: the id knows."""
    app, without = application(hourly={"every": "1h"}), application(hourly={})
    schedule = await stage(database, app)
    await clock.advance(HOUR)
    await schedule.run_once()
    await clock.advance(-HOUR / 2)
    assert (await schedule.run_once()).published == 0
    await database.run(without.register)
    await database.run(app.register)
    assert (await only(connection)).next_at == at(13)
    await clock.advance(HOUR / 2)
    with capture_logs() as logs:
        await schedule.run_once()
    assert [line["event"] for line in logs] == ["schedule.repeated"]
    assert await published(connection) == ["hourly:2026-06-01T13:00:00Z"]
    assert (await only(connection)).next_at == at(14)


async def test_only_workers_that_have_the_workflow_publish_its_ticks(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await database.run(application(gone={"every": "1h"}).register)
    other = await stage(database, application(here={"every": "2h"}))
    await clock.advance(2 * HOUR)
    await other.run_once()
    assert await published(connection) == ["here:2026-06-01T14:00:00Z"]


async def test_a_schedule_that_this_process_cannot_read_is_left_to_others(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(strange={"cron": "0 * * * *"}, hourly={"every": "1h"}))
    await connection.execute("update tidegate.schedules set timezone = 'Mars/Olympus' where cron is not null")
    await clock.advance(HOUR)
    with capture_logs() as logs:
        assert (await schedule.run_once()).published == 1
        assert await schedule.run_once() == ScheduleTurn(0, 3600.0)
    assert [line["workflow"] for line in logs if line["event"] == "schedule.invalid"] == ["strange"]
    assert await published(connection) == ["hourly:2026-06-01T13:00:00Z"]


# Declarations -------------------------------------------------------------------------------------------------------


async def test_the_same_declaration_keeps_the_next_tick_and_a_changed_one_counts_from_now(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await database.run(application(job={"every": "1h"}).register)
    await clock.advance(1.5 * HOUR)  # 13:30, and 13:00 was missed
    await database.run(application(job={"every": "60m"}).register)
    assert (await only(connection)).next_at == at(13)
    await database.run(application(job={"cron": "15 * * * *", "timezone": "Europe/Berlin"}).register)
    found = await only(connection)
    assert (found.every_ms, found.cron, found.timezone, found.next_at) == (
        None,
        "15 * * * *",
        "Europe/Berlin",
        at(14, 15),
    )
    await database.run(application(job={"cron": "15 * * * *"}).register)
    assert (await only(connection)).timezone == "UTC"
    await database.run(application(job={"every": "20m"}).register)
    assert (await only(connection)).next_at == at(13, 40)


async def test_a_workflow_without_a_schedule_loses_it_and_others_keep_theirs(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(job={"every": "1h"}, other={"every": "1h"}))
    await database.run(application(job={"on": "a.b"}).register)
    assert (await only(connection)).workflow == "other"
    await clock.advance(HOUR)
    await schedule.run_once()
    assert await published(connection) == ["other:2026-06-01T13:00:00Z"]


@pytest.mark.parametrize(
    ("every_ms", "cron", "timezone"),
    [
        (None, None, None),
        (60_000, "* * * * *", "UTC"),
        (None, "* * * * *", None),
        (60_000, None, "UTC"),
        (1, None, None),
    ],
)
async def test_the_database_refuses_half_a_schedule(
    connection: Connection, database: Database, every_ms: int | None, cron: str | None, timezone: str | None
) -> None:
    [definition_id] = await database.run(application(job={}).register)
    with pytest.raises(asyncpg.CheckViolationError):
        await connection.execute(
            "insert into tidegate.schedules (workflow_definition_id, every_ms, cron, timezone, next_at) "
            "values ($1, $2, $3, $4, now())",
            *(definition_id, every_ms, cron, timezone),
        )


# Crashes and processes ----------------------------------------------------------------------------------------------


async def test_what_is_not_committed_did_not_happen(database: Database, connection: Connection, clock: Clock) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await clock.advance(HOUR)
    failpoints.arm("schedule.before_commit=raise")
    with pytest.raises(failpoints.FailpointHit):
        await schedule.run_once()
    assert await published(connection) == []
    assert (await only(connection)).next_at == at(13)
    assert (await schedule.run_once()).published == 1


async def test_a_worker_dies_between_the_event_and_the_commit(
    database_url: str, database: Database, connection: Connection, clock: Clock, effects: Effects, app: Path
) -> None:
    with worker(database_url, app, TIDEGATE_FAILPOINTS="schedule.before_commit=kill") as process:
        await clock.advance(HOUR)
        assert process.wait() == 137
    assert await published(connection) == []
    assert (await only(connection)).next_at == at(13)
    with worker(database_url, app):
        await eventually(database, "select count(*) = 1 from tidegate.workflow_runs where status = 'succeeded'")
    assert await published(connection) == ["hourly:2026-06-01T13:00:00Z"]
    assert [what for _, what in await effects()] == ["2026-06-01T13:00:00Z"]


async def test_worker_processes_share_the_ticks(
    database_url: str, database: Database, connection: Connection, clock: Clock, effects: Effects, app: Path
) -> None:
    settings = {"TIDEGATE_POLL_MS": "20"}
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(worker(database_url, app, **settings))
        for tick in range(1, 7):
            await clock.advance(HOUR)
            await eventually(
                database, "select count(*) = $1 from tidegate.workflow_runs where status = 'succeeded'", tick
            )
    expected = [f"2026-06-01T{12 + tick}:00:00Z" for tick in range(1, 7)]
    assert await published(connection) == [f"hourly:{time}" for time in expected]
    assert [what for _, what in await effects()] == expected


async def test_schedules_are_listed(database_url: str, database: Database, clock: Clock) -> None:
    app = application(nightly={"cron": "0 3 * * *", "timezone": "Europe/Berlin"}, often={"every": "15m"}, never={})
    schedule = await stage(database, app)
    await clock.advance(15 * 60_000)
    await schedule.run_once()
    with api(database_url) as (_, url):
        with Client(url) as client:
            found = msgspec.convert(client.request("GET", "/v1/schedules")["schedules"], list[Shown])
        listed = run("schedules", "list", env={"TIDEGATE_URL": url})
        as_json = run("schedules", "list", "--json", env={"TIDEGATE_URL": url})
    berlin = {"every_ms": None, "cron": "0 3 * * *", "timezone": "Europe/Berlin"}
    assert found == [
        Shown(workflow="nightly", **berlin, next_at=at(1) + timedelta(days=1), last_at=None),  # type: ignore[arg-type]
        Shown(workflow="often", every_ms=900_000, next_at=at(12, 30), last_at=at(12, 15)),
    ]
    printed = msgspec.json.decode(as_json.stdout)
    assert list(printed) == ["schedules"] and msgspec.convert(printed["schedules"], list[Shown]) == found
    assert [line.split() for line in listed.stdout.splitlines()] == [
        ["WORKFLOW", "WHEN", "TIMEZONE", "NEXT", "LAST", "MISSED", "STATE"],
        ["nightly", "0", "3", "*", "*", "*", "Europe/Berlin", "2026-06-02", "01:00:00", "0", "active"],
        ["often", "every", "15m", "2026-06-01", "12:30:00", "2026-06-01", "12:15:00", "0", "active"],
    ]
