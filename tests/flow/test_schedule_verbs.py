"""Operators and schedules: pause, resume, run now, backfill, overlap, and the ticks that were missed."""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.test_schedules import APP, HOUR, application, at, published, stage
from tests.flow.trigger_worker import TriggerWorker
from tests.processes import api, run, worker
from tidegate import Context, Tidegate, failpoints
from tidegate.client import Client
from tidegate.errors import AppError, InvalidInput, NotFound, RequestRefused, Unavailable
from tidegate.flow import control
from tidegate.flow.look.explain import explain
from tidegate.flow.look.health import Snapshots
from tidegate.model.health import HealthPolicy
from tidegate.store import schedules
from tidegate.store.db import Connection, Database
from tidegate.store.schedules import OperatedSchedule
from tidegate.testing import Harness

YEAR = timedelta(days=400)


async def operated(connection: Connection, workflow: str = "hourly") -> OperatedSchedule:
    [found] = await schedules.list_operated(connection, workflow=workflow, limit=1, alive_ms=60_000)
    return found


async def audited(connection: Connection) -> list[tuple[str, str, str]]:
    rows = await connection.fetch("select actor, action, subject from tidegate.audit_log order by at, id")
    return [tuple(row) for row in rows]


# Pauses --------------------------------------------------------------------------------------------------------------


async def test_ticks_in_a_pause_are_missed_on_purpose_and_counted(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await control.pause_schedule(database, "hourly", until=None, duration_ms=None, reason="stocktaking", actor="ada")
    for _ in range(3):
        await clock.advance(HOUR)
        assert (await schedule.run_once()).published == 0
    found = await operated(connection)
    assert (found.is_paused, found.pause_reason, found.paused_by, found.paused_until) == (
        True, "stocktaking", "ada", None,
    )  # fmt: skip
    assert (found.paused_total, found.missed_total, found.next_at, found.last_at) == (3, 0, at(16), None)
    await control.resume_schedule(database, "hourly", "ada")
    assert await published(connection) == []
    await clock.advance(HOUR)
    await schedule.run_once()
    assert await published(connection) == ["hourly:2026-06-01T16:00:00Z"]
    assert await audited(connection) == [("ada", "schedule.pause", "hourly"), ("ada", "schedule.resume", "hourly")]


async def test_a_pause_with_an_end_ends_by_itself(database: Database, connection: Connection, clock: Clock) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    until = at(14, 30)
    await control.pause_schedule(database, "hourly", until=until, duration_ms=None, reason=None, actor="ada")
    await clock.advance(3 * HOUR)  # no worker ran meanwhile: 13:00 and 14:00 were in the pause, 15:00 was not
    await schedule.run_once()
    assert await published(connection) == ["hourly:2026-06-01T15:00:00Z"]
    found = await operated(connection)
    assert (found.paused_total, found.missed_total, found.is_paused) == (2, 0, False)
    await clock.advance(3 * HOUR)
    await schedule.run_once()
    found = await operated(connection)
    assert (found.paused_total, found.missed_total, found.missed_from, found.missed_to) == (2, 2, at(16), at(17))


async def test_a_resume_counts_the_ticks_that_no_worker_has_seen(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await control.pause_schedule(database, "hourly", until=None, duration_ms=None, reason=None, actor="ada")
    await clock.advance(2.5 * HOUR)
    await control.resume_schedule(database, "hourly", "ada")
    found = await operated(connection)
    assert (found.paused_total, found.next_at) == (2, at(15))
    assert (await schedule.run_once()).published == 0
    await control.resume_schedule(database, "hourly", "ada")  # again changes nothing
    assert (await operated(connection)).next_at == at(15)


async def test_what_an_operator_set_survives_the_code(database: Database, connection: Connection, clock: Clock) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await control.pause_schedule(database, "hourly", until=None, duration_ms=None, reason="why", actor="ada")
    await clock.advance(HOUR)
    await schedule.run_once()
    for declaration in ({"every": "1h"}, {"every": "2h"}, {"every": "2h", "overlap": "skip"}, {"cron": "5 * * * *"}):
        other = await stage(database, application(hourly=declaration))
        found = await operated(connection)
        assert (found.is_paused, found.pause_reason, found.paused_by, found.paused_total) == (True, "why", "ada", 1)
        assert found.overlap == declaration.get("overlap", "allow")
    await clock.advance(5 * HOUR)
    await other.run_once()
    assert await published(connection) == []


async def test_a_changed_overlap_keeps_the_next_tick(database: Database, connection: Connection, clock: Clock) -> None:
    await stage(database, application(hourly={"every": "1h"}))
    await clock.advance(1.5 * HOUR)
    await stage(database, application(hourly={"every": "1h", "overlap": "queue"}))
    assert (await operated(connection)).next_at == at(13)


async def test_a_pause_waits_for_a_tick_that_is_being_published(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await clock.advance(HOUR)
    pause = control.pause_schedule(database, "hourly", until=None, duration_ms=None, reason=None, actor="ada")
    await asyncio.gather(pause, *(schedule.run_once() for _ in range(3)))
    before = await published(connection)
    await clock.advance(HOUR)
    await schedule.run_once()
    assert await published(connection) == before


async def test_invalid_pauses_name_the_field(database: Database, clock: Clock) -> None:
    await stage(database, application(hourly={"every": "1h"}))
    for until, duration_ms, field in (
        (at(11), None, "until"), (at(13), 5, "until"), (None, 0, "duration_ms"), (at(13) + YEAR, None, "until"),
    ):  # fmt: skip
        with pytest.raises(InvalidInput) as refused:
            await control.pause_schedule(
                database, "hourly", until=until, duration_ms=duration_ms, reason=None, actor="ada"
            )
        assert [error.field for error in refused.value.errors] == [field]
    with pytest.raises(NotFound, match="no schedule of a workflow 'other'"):
        await control.pause_schedule(database, "other", until=None, duration_ms=None, reason=None, actor="ada")


# Missed ticks --------------------------------------------------------------------------------------------------------


async def test_missed_ticks_are_counted_and_shown(database: Database, connection: Connection, clock: Clock) -> None:
    app = application(hourly={"every": "1h"}, daily={"cron": "30 * * * *", "timezone": "Europe/Berlin"})
    schedule = await stage(database, app)
    await clock.advance(5.5 * HOUR)  # 17:30
    await schedule.run_once()
    found = await operated(connection)
    assert (found.missed_total, found.missed_from, found.missed_to, found.last_at) == (4, at(13), at(16), at(17))
    found = await operated(connection, "daily")
    assert (found.missed_total, found.missed_from, found.missed_to, found.last_at) == (
        5, at(12, 30), at(16, 30), at(17, 30),
    )  # fmt: skip
    await clock.advance(HOUR)
    await schedule.run_once()
    assert (await operated(connection)).missed_total == 4


async def test_a_long_outage_of_a_minutely_cron_is_counted_up_to_a_bound(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"cron": "* * * * *"}))
    await clock.advance(30 * 24 * HOUR)
    await schedule.run_once()
    found = await operated(connection)
    assert (found.missed_total, found.last_at) == (2000, clock.now)


async def test_health_names_a_schedule_that_nobody_serves(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}, other={"every": "1h"}))
    await clock.advance(HOUR + 29_000)
    health = Snapshots(database, HealthPolicy())

    async def causes() -> list[tuple[str, str]]:
        found = (await health.read()).causes
        return [(cause.subject, cause.message) for cause in found if cause.code == "schedule_overdue"]

    assert await causes() == []
    await clock.advance(2_000)
    text = "the tick of 2026-06-01 13:00:00 UTC was not published for 31 s; no running worker has its code"
    assert await causes() == [("hourly", text), ("other", text)]
    await control.pause_schedule(database, "hourly", until=None, duration_ms=None, reason=None, actor="ada")
    assert [subject for subject, _ in await causes()] == ["other"]
    await schedule.run_once()
    assert await causes() == []


# Run now -------------------------------------------------------------------------------------------------------------


async def test_run_now_publishes_and_does_not_move_the_next_tick(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await clock.advance(10 * 60_000)
    await control.pause_schedule(database, "hourly", until=None, duration_ms=None, reason=None, actor="ada")
    first = await control.run_schedule_now(database, "hourly", "ada")
    second = await control.run_schedule_now(database, "hourly", "ada")
    assert first != second
    third, again = [await control.run_schedule_now(database, "hourly", "ada", "call-1") for _ in range(2)]
    assert third == again not in (first, second)
    assert await connection.fetchval("select count(*) from tidegate.audit_log where action = 'schedule.run_now'") == 3
    row = await connection.fetchrow("select * from tidegate.workflow_events where id = $1", first)
    assert row is not None
    assert (row["type"], row["source"]) == ("schedule.hourly", "tidegate.schedule")
    assert row["payload"] == {"scheduled_at": "2026-06-01T12:10:00Z", "workflow": "hourly"}
    assert row["metadata"] == {"manual": True, "by": "ada"}
    assert (await operated(connection)).next_at == at(13)
    assert (await TriggerWorker(database).turn()).launched == 3
    await control.resume_schedule(database, "hourly", "ada")
    await clock.advance(50 * 60_000)
    await schedule.run_once()
    assert (await published(connection))[-1] == "hourly:2026-06-01T13:00:00Z"


# Backfill ------------------------------------------------------------------------------------------------------------


async def backfill(database: Database, since: datetime, before: datetime, **options: Any) -> Any:
    return await control.backfill_schedule(database, "hourly", since=since, before=before, actor="ada", **options)


async def test_a_backfill_publishes_each_tick_of_the_range_once_at_a_rate(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await clock.advance(2 * HOUR)
    await schedule.run_once()  # 14:00; 13:00 is missed
    await clock.advance(HOUR)
    await schedule.run_once()
    preview = await backfill(database, at(10), at(15), rate="1/min", dry_run=True)
    assert (preview.status, preview.ticks, preview.known, preview.new) == ("preview", 5, 1, 4)
    assert (preview.first_at, preview.last_at, preview.ends_at) == (at(10), at(13), at(15, 3))
    assert len(await published(connection)) == 2
    done = await backfill(database, at(10), at(15), rate="1/min")
    assert (done.status, done.ticks, done.known, done.new) == ("published", 5, 1, 4)
    stages = TriggerWorker(database)
    launched = [(await stages.turn()).launched]
    for _ in range(5):
        await clock.advance(60_000)
        await stages.turn()
        launched.append(await connection.fetchval("select count(*) from tidegate.workflow_runs"))
    assert launched == [3, 4, 5, 6, 6, 6]  # the ticks of 14:00 and 15:00 and the first at once, then one a minute
    rows = await connection.fetch("select parameters ->> 'scheduled_at' as tick from tidegate.workflow_runs order by 1")
    assert [row[0] for row in rows] == [f"2026-06-01T{hour}:00:00Z" for hour in range(10, 16)]
    again = await backfill(database, at(10), at(15))
    assert (again.known, again.new, again.ends_at) == (5, 0, None)
    assert await audited(connection) == [("ada", "schedule.backfill", "hourly")]
    assert (await operated(connection)).next_at == at(16)


async def test_backfills_and_the_schedule_race_for_one_tick(
    database: Database, connection: Connection, clock: Clock
) -> None:
    schedule = await stage(database, application(hourly={"every": "1h"}))
    await clock.advance(HOUR)
    both = [backfill(database, at(8), at(13) + timedelta(milliseconds=0), rate="1000/s") for _ in range(3)]
    await clock.advance(1000)
    late = [backfill(database, at(8), at(13, 0) + timedelta(seconds=1), rate="1000/s") for _ in range(3)]
    await asyncio.gather(*both, *late, schedule.run_once(), schedule.run_once())
    assert sorted(await published(connection)) == sorted(f"hourly:2026-06-01T{h:02}:00:00Z" for h in range(8, 14))


async def test_a_backfill_that_dies_is_continued_by_the_next(
    database: Database, connection: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.flow.control.schedules.BATCH", 2)
    await stage(database, application(hourly={"every": "1h"}))
    failpoints.arm("backfill.after_commit=raise@2")
    with pytest.raises(failpoints.FailpointHit):
        await backfill(database, at(2), at(12))
    assert len(await published(connection)) == 4
    done = await backfill(database, at(2), at(12))
    assert (done.known, done.new) == (4, 6)
    assert len(await published(connection)) == 10


async def test_a_killed_backfill_leaves_whole_batches_and_is_repeated(
    database_url: str, database: Database, connection: Connection, clock: Clock
) -> None:
    await stage(database, application(hourly={"every": "1h"}))
    asked = {"from": (at(12) - timedelta(hours=600)).isoformat(), "to": at(12).isoformat(), "rate": "100/s"}
    path = "/admin/schedules/hourly/backfill"
    with api(database_url, TIDEGATE_FAILPOINTS="backfill.after_commit=kill") as (process, url), Client(url) as client:
        with pytest.raises(Unavailable):
            client.request("POST", path, asked)
        assert process.wait() == 137
    assert len(await published(connection)) == 500
    with api(database_url) as (_, url), Client(url) as client:
        done = client.request("POST", path, asked)
    assert (done["known"], done["new"]) == (500, 100)
    assert len(set(await published(connection))) == 600


@pytest.mark.parametrize(
    ("since", "before", "rate", "field"),
    [
        (at(11), at(13), "1/s", "to"),
        (at(11), at(11), "1/s", "from"),
        (at(10), at(11), "often", "rate"),
        (at(10) - timedelta(days=500), at(11), "1/s", "to"),
        (at(10) - timedelta(days=300), at(11), "1/300h", "rate"),
    ],
)
async def test_an_invalid_backfill_names_the_field(
    database: Database, clock: Clock, since: datetime, before: datetime, rate: str, field: str
) -> None:
    await stage(database, application(hourly={"every": "1h"}))
    with pytest.raises(InvalidInput) as refused:
        await backfill(database, since, before, rate=rate)
    assert [error.field for error in refused.value.errors] == [field]


# Overlap -------------------------------------------------------------------------------------------------------------


async def ticks(database: Database, connection: Connection, clock: Clock, overlap: str) -> tuple[TriggerWorker, Any]:
    schedule = await stage(database, application(hourly={"every": "1h", "overlap": overlap}))
    stages = TriggerWorker(database)
    for _ in range(3):
        await clock.advance(HOUR)
        await schedule.run_once()
        await stages.turn()
    return stages, schedule


async def statuses(connection: Connection) -> list[tuple[str, str | None]]:
    rows = await connection.fetch(
        "select d.status, d.reason from tidegate.workflow_trigger_deliveries d "
        "join tidegate.workflow_events e on e.id = d.event_id order by e.occurred_at"
    )
    return [(row[0], row[1]) for row in rows]


async def test_skip_launches_nothing_while_a_run_is_unfinished(
    database: Database, connection: Connection, clock: Clock
) -> None:
    stages, schedule = await ticks(database, connection, clock, "skip")
    assert await statuses(connection) == [("launched", None), ("skipped", "overlap"), ("skipped", "overlap")]
    story = await explain(connection, "hourly:2026-06-01T14:00:00Z")
    unfinished = str(await connection.fetchval("select id from tidegate.workflow_runs"))
    assert story.summary == (
        f"hourly skipped: run {unfinished} was unfinished, and the trigger skips what overlaps (overlap: skip)"
    )
    assert (await operated(connection)).skipped_total == 2
    await stages.end_runs()
    await clock.advance(HOUR)
    await schedule.run_once()
    await stages.turn()
    assert (await statuses(connection))[-1] == ("launched", None)


async def test_queue_runs_one_at_a_time(database: Database, connection: Connection, clock: Clock) -> None:
    stages, _ = await ticks(database, connection, clock, "queue")
    assert await statuses(connection) == [
        ("launched", None),
        ("throttled", "concurrency"),
        ("throttled", "concurrency"),
    ]
    for expected in (2, 3, 3):
        await stages.end_runs()
        await stages.turn()
        assert [status for status, _ in await statuses(connection)].count("launched") == expected


async def test_allow_lets_runs_overlap(database: Database, connection: Connection, clock: Clock) -> None:
    await ticks(database, connection, clock, "allow")
    assert [status for status, _ in await statuses(connection)] == ["launched"] * 3


async def test_two_ticks_decided_in_one_batch_do_not_overlap(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await stage(database, application(hourly={"every": "1h", "overlap": "skip"}))
    await asyncio.gather(*(control.run_schedule_now(database, "hourly", "ada") for _ in range(5)))
    stages = [TriggerWorker(database, batch_size=2) for _ in range(3)]
    for _ in range(5):
        await asyncio.gather(*(one.turn() for one in stages))
    found = [status for status, _ in await statuses(connection)]
    texts = await connection.fetch(
        "select last_error from tidegate.workflow_trigger_deliveries where status = 'skipped'"
    )
    [run_id] = [row[0] for row in await connection.fetch("select id from tidegate.workflow_runs")]
    assert {row[0].split(",")[0] for row in texts} == {f"run {run_id} was unfinished"}
    assert (found.count("launched"), found.count("skipped")) == (1, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"on": "a.b", "overlap": "skip"}, "overlap: requires every or cron"),
        ({"every": "1h", "overlap": "never"}, "overlap: must be one of allow, queue, skip"),
        ({"every": "1h", "overlap": "skip", "max_concurrency": 2}, "max_concurrency: cannot be combined"),
        ({"every": "1h", "overlap": "queue", "concurrency_key": "{{ event.type }}"}, "concurrency_key: cannot be"),
    ],
)
def test_an_invalid_overlap_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AppError, match=message):
        application(job=arguments)


# From outside --------------------------------------------------------------------------------------------------------


async def test_a_worker_killed_between_publish_and_advance_publishes_the_tick_once(
    database_url: str, database: Database, connection: Connection, clock: Clock, tmp_path: Path
) -> None:
    file = tmp_path / "scheduled.py"
    file.write_text(APP)
    await connection.execute("create table effects (n bigserial primary key, run_id uuid, what text)")
    with worker(
        database_url, file, TIDEGATE_FAILPOINTS="schedule.before_commit=kill@2", TIDEGATE_POLL_MS="50"
    ) as first:
        await clock.advance(HOUR)
        await eventually(database, "select count(*) = 1 from tidegate.workflow_runs where status = 'succeeded'")
        await clock.advance(HOUR)
        assert first.wait() == 137
    await control.backfill_schedule(database, "hourly", since=at(13), before=at(14) - timedelta(seconds=1), actor="ada")
    with worker(database_url, file, TIDEGATE_POLL_MS="50"), worker(database_url, file, TIDEGATE_POLL_MS="50"):
        await eventually(database, "select count(*) = 2 from tidegate.workflow_runs where status = 'succeeded'")
    effects = [row[0] for row in await connection.fetch("select what from effects order by what")]
    assert effects == ["2026-06-01T13:00:00Z", "2026-06-01T14:00:00Z"]


async def test_over_http_and_the_command_line(database_url: str, database: Database, clock: Clock) -> None:
    await stage(database, application(hourly={"every": "1h", "overlap": "skip"}))
    with api(database_url) as (_, url), Client(url) as client:

        def tidegate(*arguments: str) -> str:
            return str(run("schedules", *arguments, env={"TIDEGATE_URL": url}).stdout)

        assert "paused by" in tidegate("pause", "hourly", "--for", "2h", "--reason", "stocktaking")
        shown = json.loads(tidegate("show", "hourly", "--json"))
        assert (shown["schedule"]["pause_reason"], shown["schedule"]["overlap"]) == ("stocktaking", "skip")
        assert shown["upcoming"][:2] == ["2026-06-01T14:00:00Z", "2026-06-01T15:00:00Z"], "not those in the pause"
        assert "stocktaking" in tidegate("list")
        assert re.search(r"next +none until it is resumed", tidegate("pause", "hourly"))
        assert "active" in tidegate("resume", "hourly")
        shown = json.loads(tidegate("show", "hourly", "--json"))
        assert shown["upcoming"][:2] == ["2026-06-01T13:00:00Z", "2026-06-01T14:00:00Z"]
        assert tidegate("run-now", "hourly").startswith("published ")
        asked = ("backfill", "hourly", "2026-06-01T06:00:00Z", "2026-06-01T12:00:00Z")
        assert "6 would be published" in tidegate(*asked, "--dry-run")
        assert "published 6 ticks" in tidegate(*asked, "--yes", "--rate", "10/s")
        assert "nothing to publish" in tidegate(*asked, "--yes")
        refused = run("schedules", "backfill", "hourly", "2026-06-01T12:00:00Z", "2026-06-01T06:00:00Z", "--yes",
                      env={"TIDEGATE_URL": url})  # fmt: skip
        assert refused.returncode == 1 and "FROM: must be before" in refused.stderr
        listed = client.request("GET", "/admin/schedules")["schedules"]
        assert [one["workflow"] for one in listed] == ["hourly"]
        for verb, body in (("backfill", {"from": "x", "to": "2026-06-01T12:00:00Z"}), ("pause", {"until": "never"})):
            with pytest.raises(InvalidInput):
                client.request("POST", f"/admin/schedules/hourly/{verb}", body)
        with pytest.raises(NotFound):
            client.request("POST", "/admin/schedules/nobody/run-now")


async def test_delayed_events_over_http_and_the_command_line(
    database_url: str, database: Database, connection: Connection, clock: Clock
) -> None:
    real = datetime.now(UTC).replace(microsecond=0)
    await clock.advance((real - clock.now).total_seconds() * 1000)
    with api(database_url) as (_, url), Client(url) as client:
        later = clock.now + timedelta(days=2)
        first = client.publish("tick", source="shop", id="a", deliver_at=later)
        assert client.publish("tick", source="shop", id="a", deliver_at=later).status == "duplicate"
        client.publish_many([{"type": "tick", "source": "shop", "id": "b", "delay_ms": 60_000}])
        shown = client.request("GET", "/v1/events/a")
        assert shown["deliver_at"] == later.isoformat().replace("+00:00", "Z")
        env = {"TIDEGATE_URL": url}
        said = run("publish", "tick", "--source", "shop", "--id", "c", "--delay", "10m", env=env)
        assert said.stdout.startswith("accepted ")
        said = run("publish", "tick", "--source", "shop", "--at", later.isoformat(), env=env)
        assert said.stdout.startswith("accepted ")
        wrong = run("publish", "tick", "--source", "shop", "--delay", "soon", env=env)
        assert wrong.returncode != 0 and "--delay" in wrong.stderr
        listed = json.loads(run("retries", "list", "--reason", "scheduled", "--json", env=env).stdout)
        assert len(listed["retries"]) == 4
        assert "scheduled" in run("explain", "c", env=env).stdout
        assert run("events", "cancel", "c", env=env).stdout.startswith("cancelled ")
        again = run("events", "cancel", "c", env=env)
        assert again.returncode == 1 and "no longer waiting" in again.stderr
        client.cancel_event("b")
        client.cancel_event(first.id)
        health = client.request("GET", "/admin/event-health")
        assert health["retries"]["events"]["by_reason"] == {"scheduled": 1}
        with pytest.raises(RequestRefused) as refused:
            client.publish("tick", source="shop", deliver_at=clock.now + timedelta(days=400))
        assert refused.value.status == 422 and refused.value.errors[0].field == "deliver_at"


async def test_the_harness_moves_to_the_time_of_a_delayed_event() -> None:
    app = Tidegate()
    seen: list[tuple[str, datetime]] = []

    @app.workflow(on="trial.ending")
    async def remind(ctx: Context, customer: str) -> None:
        seen.append((customer, harness.now))

    @app.workflow(every="100d", overlap="skip")
    async def nightly(ctx: Context, scheduled_at: str) -> None: ...

    async with Harness(app) as harness:
        begin = harness.now
        await harness.publish("trial.ending", source="shop", payload={"customer": "ann"}, delay="13d")
        await harness.advance("300d")
        await harness.advance("300d")
        assert seen == [("ann", begin + timedelta(days=13))]
        at_time = harness.now + timedelta(hours=1)
        await harness.publish("trial.ending", source="shop", payload={"customer": "bob"}, deliver_at=at_time)
        await harness.publish("trial.ending", source="shop", payload={"customer": "eve"}, id="eve", delay="2h")
        await harness.cancel_event("eve")
        await harness.advance("1d")
        assert seen[1:] == [("bob", at_time)]
        before = len(await harness.runs("nightly"))
        await harness.run_now("nightly")
        await harness.run_until_idle()
        assert len(await harness.runs("nightly")) == before + 1
