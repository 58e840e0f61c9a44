"""Pruning on a real database: nothing alive goes, everything dead goes, in small parts, by however many at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import APP, World, eventually
from tests.flow.test_dispatch import publish
from tests.processes import run, worker
from tests.store.builders import make_events
from tidegate import Context, failpoints
from tidegate.flow.keep.prune import Prune, Retention
from tidegate.store import retention
from tidegate.store.db import Connection, Database
from tidegate.store.events import ReceiptPlace

DAY_MS = 86_400_000
WEEK = Retention(events_seconds=7 * 86_400)
TABLES = (
    "workflow_events", "workflow_trigger_deliveries", "workflow_runs", "workflow_run_steps", "event_decisions",
    "event_ingress_retries",
)  # fmt: skip


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


async def test_everything_dead_goes(database: Database, connection: Connection, clock: Clock, world: World) -> None:
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
    assert (deleted["events"], deleted["runs"], deleted["steps"], deleted["retries"]) == (5, 3, 3, 1)
    assert set((await counts(connection)).values()) == {0}


async def test_nothing_alive_goes(database: Database, connection: Connection, clock: Clock, world: World) -> None:
    runner = await done_world(connection, world, idempotency_key="{{ event.payload.n }}", idempotency_window="30d")
    await publish(connection, "go", wait=True, n=7)  # a run that sleeps
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
    before = await counts(connection)
    await clock.advance(20 * DAY_MS)
    assert (await Prune(database, WEEK).run())["events"] == 1  # the one that no trigger took
    after = await counts(connection)
    assert after | {"workflow_events": 0, "event_decisions": 0} == before | {"workflow_events": 0, "event_decisions": 0}
    await clock.advance(20 * DAY_MS)  # the keys' windows are over
    assert (await Prune(database, WEEK).run())["events"] == 3
    left = {row[0] for row in await connection.fetch("select id from tidegate.workflow_events")}
    assert {undecided, waiting, dead} < left and len(left) == 4
    kept = Retention(WEEK.events_seconds, dead_letters_seconds=30 * 86_400)
    assert (await Prune(database, kept).run()) == {"dead_letters": 1, "events": 1}
    await connection.execute(
        "update tidegate.workflow_trigger_deliveries set status = 'throttled', retry_state = 'scheduled', "
        "next_attempt_at = tidegate.now(), workflow_run_id = null"
    )
    await connection.execute("delete from tidegate.workflow_run_steps")
    await connection.execute("delete from tidegate.workflow_runs")
    assert not await Prune(database, WEEK).run()  # a delivery that waits


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
    "it is undecided again": "insert into tidegate.event_inbox (ingress_sequence, event_id) "
    "select ingress_sequence, id from tidegate.workflow_events where id = $1",
}


@pytest.mark.parametrize("what", ALIVE)
async def test_whatever_is_alive_keeps_its_event(
    database: Database, connection: Connection, clock: Clock, world: World, what: str
) -> None:
    await done_world(connection, world)
    before = await counts(connection)
    await clock.advance(8 * DAY_MS)
    kept = await connection.fetchval(
        "select id from tidegate.workflow_events where type = 'go' order by ingress_sequence limit 1"
    )
    await connection.execute(ALIVE[what], kept)
    both = Retention(WEEK.events_seconds, dead_letters_seconds=7 * 86_400)
    assert (await Prune(database, both).run())["events"] == before["workflow_events"] - 1
    assert await connection.fetchval("select id from tidegate.workflow_events") == kept
    left = await counts(connection)
    assert (left["workflow_trigger_deliveries"], left["workflow_runs"], left["workflow_run_steps"]) == (1, 1, 1)


async def test_new_work_does_not_wait_for_a_batch_that_is_deleting(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    runner = await done_world(connection, world)
    await clock.advance(8 * DAY_MS)
    async with database.transaction() as pruning:
        page = await retention.page(pruning, after=ReceiptPlace(), limit=100, older_seconds=WEEK.events_seconds)
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
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    runner = await done_world(connection, world)
    await publish(connection, "go", wait=True)
    await world.turn(runner)
    await clock.advance(301 * DAY_MS)
    await world.turn(runner)
    assert (await Prune(database, WEEK).run())["runs"] == 3
    assert (await counts(connection))["workflow_runs"] == 1


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
    database: Database, connection: Connection, clock: Clock
) -> None:
    await make_events(connection, 95)
    await connection.execute("delete from tidegate.event_inbox")
    await clock.advance(8 * DAY_MS)
    prune = Prune(database, WEEK, batch_size=10)
    assert (await prune.run_once()).deleted == {"events": 10}
    totals = await asyncio.gather(*(Prune(database, WEEK, batch_size=10).run() for _ in range(4)))
    assert sum(total["events"] for total in totals) == 85
    assert (await counts(connection))["workflow_events"] == 0


async def test_dying_in_the_middle_leaves_whole_events(
    database: Database, connection: Connection, clock: Clock, world: World
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
    refused = run("prune", env={"TIDEGATE_DATABASE_URL": database_url})
    assert refused.returncode == 2 and "TIDEGATE_RETENTION_" in refused.stderr
    done = run("prune", "--events", "1d", env={"TIDEGATE_DATABASE_URL": database_url})
    assert (done.returncode, done.stdout) == (0, "deleted 300 events\n"), done.stderr
    assert done.stderr == "… 200 events\n… 300 events\n"
    assert await connection.fetchval("select after from tidegate.audit_log where action = 'prune'") == {"events": 300}
