"""Pruning on a real database: nothing alive goes, everything dead goes, by days or by rows, by several at once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import APP, World, eventually
from tests.flow.test_dispatch import publish
from tests.processes import run, worker
from tests.store.builders import make_events
from tidegate import Context, failpoints
from tidegate.flow.keep import prune
from tidegate.flow.keep.prune import Prune
from tidegate.model.retention import Retention
from tidegate.store import processes, retention
from tidegate.store.db import Connection, Database
from tidegate.store.events import ReceiptPlace

DAY_MS = 86_400_000
WEEK = Retention(events_seconds=7 * 86_400)
TABLES = (
    "workflow_events", "workflow_trigger_deliveries", "workflow_runs", "workflow_run_steps", "event_decisions",
    "event_ingress_retries",
)  # fmt: skip


@pytest.fixture
async def today(clock: Clock) -> None:
    """The database's clock begins today: ids have the real time, and days go by ids."""
    await clock.advance((datetime.now(UTC) - clock.now).total_seconds() * 1000)


@pytest.fixture(params=["by days", "by rows"])
def by_days(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, today: None) -> bool:
    """Whether a week of history is dropped by days, or deleted row by row as short retentions are."""
    if request.param == "by rows":
        monkeypatch.setattr(prune, "DAYS_FROM_SECONDS", 365 * 86_400)
    return bool(request.param == "by days")


@pytest.fixture
def by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prune, "DAYS_FROM_SECONDS", 365 * 86_400)


async def counts(connection: Connection) -> dict[str, int]:
    return {table: await connection.fetchval(f"select count(*) from tidegate.{table}") for table in TABLES}


async def done_world(connection: Connection, world: World, **options: Any) -> Any:
    """A workflow with a step, and three events that it has finished."""

    @world.app.workflow(on="go", **options)
    async def work(ctx: Context, wait: bool = False) -> None:
        await ctx.step("one", lambda: 1)
        if wait:
            await ctx.sleep("300d")

    runner = await world.runner()
    for n in range(3):
        await publish(connection, "go", n=n)
    await publish(connection, "nobody.wants.it")
    await world.turn(runner)
    return runner


async def test_everything_dead_goes(
    database: Database, connection: Connection, clock: Clock, world: World, by_days: bool
) -> None:
    await done_world(connection, world)
    [held] = await make_events(connection)
    await connection.execute("delete from tidegate.event_inbox")
    await connection.execute(
        "insert into tidegate.event_ingress_retries (event_id, source, retry_state) values ($1, 'shop', 'completed')",
        held,
    )
    await clock.advance(6 * DAY_MS)
    assert not await Prune(database, WEEK).run()
    await clock.advance(2 * DAY_MS)
    deleted = await Prune(database, WEEK).run()
    if by_days:
        assert deleted["days"] == 1 and not deleted["events"]
    else:
        assert (deleted["events"], deleted["runs"], deleted["steps"], deleted["retries"]) == (5, 3, 3, 1)
    assert set((await counts(connection)).values()) == {0}
    assert await connection.fetchval("select count(*) from tidegate.event_external_ids") == 0


async def test_nothing_alive_goes(
    database: Database, connection: Connection, clock: Clock, world: World, by_days: bool
) -> None:
    runner = await done_world(connection, world)
    sleeping = await publish(connection, "go", wait=True, n=7)
    await world.turn(runner)
    undecided, waiting, dead = await make_events(connection, 3)
    await connection.execute("delete from tidegate.event_inbox where event_id <> $1", undecided)
    await connection.execute(
        "insert into tidegate.event_ingress_retries (event_id, source, next_attempt_at) values ($1, 'shop', now())",
        waiting,
    )
    await connection.execute(
        "insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason) "
        "values (tidegate.uuid7(), 'event', $1, $1, 'broken')", dead,
    )  # fmt: skip
    await clock.advance(20 * DAY_MS)
    await Prune(database, WEEK).run()
    left = {str(row[0]) for row in await connection.fetch("select id from tidegate.workflow_events")}
    assert left == {str(one) for one in (undecided, waiting, dead, sleeping)}
    assert (await counts(connection))["workflow_run_steps"] == 2  # of the run that sleeps: its finished step, its timer
    await clock.advance(20 * DAY_MS)
    kept = Retention(WEEK.events_seconds, dead_letters_seconds=30 * 86_400)
    deleted = await Prune(database, kept).run()
    assert (deleted["dead_letters"], deleted["events"]) == (1, 1)
    # A delivery that waits keeps its event, too.
    await connection.execute(
        "update tidegate.workflow_trigger_deliveries set status = 'throttled', retry_state = 'scheduled', "
        "next_attempt_at = tidegate.now(), workflow_run_id = null"
    )
    await connection.execute("delete from tidegate.workflow_run_steps")
    await connection.execute("delete from tidegate.workflow_runs")
    assert not await Prune(database, WEEK).run()


async def test_an_idempotency_key_outlives_the_history_of_its_run(
    database: Database, connection: Connection, clock: Clock, world: World, by_days: bool
) -> None:
    runner = await done_world(connection, world, idempotency_key="{{ event.payload.n }}", idempotency_window="30d")
    await clock.advance(9 * DAY_MS)
    await Prune(database, WEEK).run()
    assert set((await counts(connection)).values()) == {0}
    await publish(connection, "go", n=1)
    await world.turn(runner)
    assert await connection.fetch("select status from tidegate.workflow_trigger_deliveries") == [("skipped",)]


ALIVE = {
    "its retry is claimed": "insert into tidegate.event_ingress_retries "
    "(event_id, source, retry_state, claimed_by, claim_expires_at) values ($1, 'shop', 'running', 'w', now())",
    "its delivery is claimed": "update tidegate.workflow_trigger_deliveries set status = 'matched', "
    "retry_state = 'running', claimed_by = 'w', claim_expires_at = now(), workflow_run_id = null where event_id = $1",
    "its run is claimed": "update tidegate.workflow_runs set status = 'running', finished_at = null, "
    "claim_expires_at = now() where event_id = $1",
    "its run is to go on": "update tidegate.workflow_runs set status = 'pending', finished_at = null, "
    "next_attempt_at = now() where event_id = $1",
    "it was replayed a moment ago": "update tidegate.workflow_events set replayed_at = tidegate.now() where id = $1",
    "a letter of its run is open": "insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason) "
    "select tidegate.uuid7(), 'run', id, $1, 'broken' from tidegate.workflow_runs where event_id = $1",
    "a letter is to be replayed": "insert into tidegate.dead_letters "
    "(id, kind, subject_id, event_id, reason, replay_at, replay_by) "
    "values (tidegate.uuid7(), 'event', $1, $1, 'broken', tidegate.now() + interval '300 days', 'ann')",
    "it is undecided again": "insert into tidegate.event_inbox (ingress_sequence, event_id, source) "
    "select ingress_sequence, id, source from tidegate.workflow_events where id = $1",
}


@pytest.mark.parametrize("what", ALIVE)
async def test_whatever_is_alive_keeps_its_event(
    database: Database, connection: Connection, clock: Clock, world: World, what: str, by_days: bool
) -> None:
    if by_days and what == "it was replayed a moment ago":
        pytest.skip("what was replayed has a run that ended later, or a dead letter: days ask for these")
    await done_world(connection, world)
    before = await counts(connection)
    await clock.advance(8 * DAY_MS)
    kept = await connection.fetchval(
        "select id from tidegate.workflow_events where type = 'go' order by ingress_sequence limit 1"
    )
    await connection.execute(ALIVE[what], kept)
    both = Retention(WEEK.events_seconds, dead_letters_seconds=7 * 86_400)
    deleted = await Prune(database, both).run()
    assert by_days or deleted["events"] == before["workflow_events"] - 1
    assert await connection.fetchval("select id from tidegate.workflow_events") == kept
    left = await counts(connection)
    assert (left["workflow_trigger_deliveries"], left["workflow_runs"], left["workflow_run_steps"]) == (1, 1, 1)


async def test_new_work_does_not_wait_for_a_batch_that_is_deleting(
    database: Database, connection: Connection, clock: Clock, world: World, by_rows: None
) -> None:
    runner = await done_world(connection, world)
    await clock.advance(8 * DAY_MS)
    async with database.transaction() as pruning:
        older = WEEK.events_seconds
        page = await retention.page(
            pruning, after=ReceiptPlace(), limit=100, older_seconds=older, is_default_only=False
        )
        ids = await retention.lock_finished_events(pruning, page.ids, older_seconds=WEEK.events_seconds)
        assert (await retention.delete_events(pruning, ids))["events"] == 4
        await publish(connection, "go", n=10)  # a lock that is in the way ends this after two seconds
        await world.turn(runner)
        finished = (
            "select count(*) from tidegate.workflow_runs where status = 'succeeded' and finished_at = tidegate.now()"
        )
        assert await connection.fetchval(finished) == 1
        assert not await Prune(database, WEEK).run()  # another takes nothing of it, and does not wait either
    assert (await counts(connection))["workflow_events"] == 1


async def test_what_finished_a_moment_ago_stays_however_old_its_event(
    database: Database, connection: Connection, clock: Clock, world: World, by_days: bool
) -> None:
    runner = await done_world(connection, world)
    await publish(connection, "go", wait=True)
    await world.turn(runner)
    await clock.advance(301 * DAY_MS)
    await world.turn(runner)
    await Prune(database, WEEK).run()
    left = await counts(connection)
    assert (left["workflow_events"], left["workflow_trigger_deliveries"], left["workflow_runs"]) == (1, 1, 1)
    await clock.advance(8 * DAY_MS)
    await Prune(database, WEEK).run()
    assert set((await counts(connection)).values()) == {0}


async def test_letters_and_the_audit_log_have_times_of_their_own(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await connection.execute(
        "insert into tidegate.dead_letters "
        "(id, kind, subject_id, reason, replay_at, replay_by, replayed_at, replayed_by) "
        "values (tidegate.uuid7(), 'run', gen_random_uuid(), 'old', null, null, null, null), "
        "(tidegate.uuid7(), 'run', gen_random_uuid(), 'soon', tidegate.now() + interval '90 days', 'ann', null, null), "
        "(tidegate.uuid7(), 'run', gen_random_uuid(), 'new', null, null, tidegate.now() + interval '19 days', 'ann')"
    )
    await connection.execute(
        "insert into tidegate.audit_log (id, actor, action, subject) select tidegate.uuid7(), 'ann', 'x', n::text "
        "from generate_series(1, 5) n"
    )
    await clock.advance(20 * DAY_MS)
    assert not await Prune(database, Retention()).run()
    kept = Retention(0, 7 * 86_400, 30 * 86_400)
    assert await Prune(database, kept).run() == {"dead_letters": 1}
    await clock.advance(11 * DAY_MS)
    assert await Prune(database, kept, batch_size=2).run() == {"dead_letters": 1, "audit_log": 5}


async def test_batches_are_small_and_several_may_prune_at_once(
    database: Database, connection: Connection, clock: Clock, by_rows: None
) -> None:
    await make_events(connection, 95)
    await connection.execute("delete from tidegate.event_inbox")
    await clock.advance(8 * DAY_MS)
    one = Prune(database, WEEK, batch_size=10)
    while not (first := await one.run_once()).deleted:  # no day is old enough
        pass
    assert first.deleted["events"] == 10
    totals = await asyncio.gather(*(Prune(database, WEEK, batch_size=10).run() for _ in range(4)))
    assert sum(total["events"] for total in totals) == 85
    assert (await counts(connection))["workflow_events"] == 0


async def test_several_may_drop_a_day_at_once(
    database: Database, connection: Connection, clock: Clock, world: World, today: None
) -> None:
    await done_world(connection, world)
    await clock.advance(8 * DAY_MS)
    totals = await asyncio.gather(*(Prune(database, WEEK).run() for _ in range(4)))
    assert sum(total["days"] for total in totals) == 1
    assert set((await counts(connection)).values()) == {0}


async def test_dying_between_the_tables_of_a_day_leaves_it_to_the_next(
    database: Database, connection: Connection, clock: Clock, world: World, today: None
) -> None:
    runner = await done_world(connection, world)
    await publish(connection, "go", wait=True)
    await world.turn(runner)
    await clock.advance(8 * DAY_MS)
    failpoints.arm("prune.before_commit=raise@3")
    with pytest.raises(failpoints.FailpointHit):
        await Prune(database, WEEK).run()
    found = await counts(connection)
    assert (found["workflow_runs"], found["workflow_run_steps"], found["workflow_trigger_deliveries"]) == (1, 2, 4)
    await Prune(database, WEEK).run()
    found = await counts(connection)
    assert (found["workflow_runs"], found["workflow_run_steps"], found["workflow_trigger_deliveries"]) == (1, 2, 1)
    await clock.advance(300 * DAY_MS)
    await world.turn(runner)
    assert await connection.fetchval("select status from tidegate.workflow_runs") == "succeeded"


async def test_a_transaction_in_progress_is_not_held_up_by_a_day_that_is_to_go(
    database: Database, connection: Connection, clock: Clock, world: World, today: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "_TRIES", 2)
    runner = await done_world(connection, world)
    await clock.advance(8 * DAY_MS)
    async with database.transaction() as reading:
        assert await reading.fetchval("select count(*) from tidegate.workflow_runs") == 3
        assert not (await Prune(database, WEEK).run())["days"]  # it gives up, and everyone else goes on
        await publish(connection, "go", n=10)
        await world.turn(runner)
    assert (await Prune(database, WEEK).run())["days"] == 1
    assert (await counts(connection))["workflow_runs"] == 1


async def test_a_day_of_which_much_is_alive_is_kept(
    database: Database, connection: Connection, clock: Clock, world: World, today: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prune, "MOST_MOVED", 2)
    runner = await done_world(connection, world)
    for _ in range(3):
        await publish(connection, "go", wait=True)
    await world.turn(runner)
    before = await counts(connection)
    await clock.advance(8 * DAY_MS)
    assert not await Prune(database, WEEK).run()
    assert await counts(connection) == before


async def test_dying_in_the_middle_leaves_whole_events(
    database: Database, connection: Connection, clock: Clock, world: World, by_rows: None
) -> None:
    await done_world(connection, world)
    await clock.advance(8 * DAY_MS)
    failpoints.arm("prune.before_commit=raise@2")
    with pytest.raises(failpoints.FailpointHit):
        await Prune(database, WEEK, batch_size=2).run()
    found = await counts(connection)
    assert (found["workflow_events"], found["workflow_runs"], found["workflow_run_steps"]) == (2, 1, 1)
    await Prune(database, WEEK, batch_size=2).run()
    assert set((await counts(connection)).values()) == {0}


async def test_a_killed_worker_and_the_command(database_url: str, database: Database, connection: Connection) -> None:
    async def old_events() -> None:
        await make_events(connection, 300)
        await connection.execute("delete from tidegate.event_inbox")
        await connection.execute("update tidegate.workflow_events set received_at = now() - interval '2 days'")

    await connection.execute("create table effects (n bigserial primary key, run_id uuid, what text)")
    await old_events()
    kept = {"TIDEGATE_RETENTION_EVENTS_SECONDS": "86400"}
    with worker(database_url, APP, TIDEGATE_FAILPOINTS="prune.before_commit=kill@2", **kept) as process:
        assert process.wait() == 137
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 100
    with worker(database_url, APP, **kept):
        await eventually(database, "select count(*) = 0 from tidegate.workflow_events")
    await old_events()
    env = {"TIDEGATE_DATABASE_URL": database_url}
    never = run("prune", "--events", "0s", "--yes", env=env)
    assert never.returncode == 2 and "'--events': must be at least 1s, not '0s'" in never.stderr
    asked = run("prune", "--events", "1d", env=env)
    assert asked.returncode == 2 and "--yes" in asked.stderr
    seen = run("prune", "--events", "1d", "--dry-run", env=env)
    assert seen.stdout == "older than: events 1d\n  days to drop: 0 (about 0 events)\n" + (
        "  events to delete one by one, unless they are needed: 300\n"
    )
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 300
    done = run("prune", "--events", "1d", "--yes", env=env)
    assert (done.returncode, done.stdout) == (0, "deleted 300 events\n"), done.stderr
    assert done.stderr == "older than: events 1d\n… 200 events\n… 300 events\n"
    assert await connection.fetchval("select after from tidegate.audit_log where action = 'prune'") == {
        "events": 300,
        "retention": {"events_seconds": 86_400, "dead_letters_seconds": 0, "audit_seconds": 0},
    }


async def alive(connection: Connection, kind: processes.ProcessKind, **kept: int) -> None:
    """A living process with that retention."""
    await processes.beat(connection, processes.this_process(kind, 1, Retention(**kept)))


async def test_a_process_removes_nothing_that_another_wants_to_keep(
    database: Database, connection: Connection, clock: Clock, by_rows: None
) -> None:
    """A laptop with the default settings beside workers that keep everything."""
    await make_events(connection, 5)
    await connection.execute("delete from tidegate.event_inbox")
    await clock.advance(8 * DAY_MS)
    worker = Prune(database, WEEK, is_agreed=True)
    for longer in (0, 9 * 86_400):
        await alive(connection, "api", events_seconds=longer)
        assert not await worker.run()
        await connection.execute("delete from tidegate.processes")
    await alive(connection, "api", events_seconds=0)
    await connection.execute("update tidegate.processes set seen_at = seen_at - interval '2 minutes'")
    await alive(connection, "worker", events_seconds=WEEK.events_seconds)
    assert (await worker.run())["events"] == 5  # nobody who wants to keep them is alive


async def test_the_command_without_an_age_does_what_the_processes_would(
    database_url: str, database: Database, connection: Connection
) -> None:
    env = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_RETENTION_EVENTS_SECONDS": "3600"}  # this shell's count not
    refused = run("prune", env=env)
    assert refused.returncode == 2 and "no API or worker is alive" in refused.stderr
    await alive(connection, "api", events_seconds=0)
    await alive(connection, "worker", events_seconds=3600)
    refused = run("prune", env=env)
    assert refused.returncode == 2 and "keep everything for ever" in refused.stderr
    await connection.execute("delete from tidegate.processes where kind = 'api'")
    done = run("prune", env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "deleted nothing\n", "older than: events 1h\n")


async def test_only_the_kinds_that_are_given_are_deleted(database_url: str, connection: Connection) -> None:
    await make_events(connection, 3)
    await connection.execute("delete from tidegate.event_inbox")
    await connection.execute("update tidegate.workflow_events set received_at = now() - interval '60 days'")
    done = run("prune", "--dead-letters", "1d", "--yes", "--json", env={"TIDEGATE_DATABASE_URL": database_url})
    assert (done.returncode, done.stdout) == (0, "{}\n")
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 3
