"""`tidegate doctor`: each invariant is broken by hand and found by its name alone; a healthy database is well."""

from __future__ import annotations

import json
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, date, datetime
from typing import Any

import msgspec
import pytest

from tests.flow.conftest import World
from tests.flow.test_dispatch import publish
from tests.processes import run
from tests.redis_server import RedisServer, client_fixture, server_fixture  # noqa: F401
from tests.store.builders import make_definition, make_events, make_triggers
from tidegate import Context
from tidegate.flow.look import doctor
from tidegate.store import doctor as store
from tidegate.store.db import Connection, Database
from tidegate.store.doctor import GUARDS, ORPHANS, ServerFacts
from tidegate.store.health import Alive, QueueDepth
from tidegate.store.retention import HistorySpan
from tidegate.store.workers import Unserved

HOUR_MS = 3_600_000
PAST, FUTURE = "tidegate.now() - interval '1 hour'", "tidegate.now() + interval '1 hour'"
CLAIM = f"claimed_by = 'gone', claim_expires_at = {PAST}"


async def an_event(connection: Connection) -> uuid.UUID:
    """A decided event."""
    [event_id] = await make_events(connection)
    await connection.execute("delete from tidegate.event_inbox where event_id = $1", event_id)
    return event_id


async def a_delivery(connection: Connection, changes: str) -> tuple[uuid.UUID, uuid.UUID]:
    """A delivery that was cancelled, then changed; and its trigger."""
    [trigger_id] = await make_triggers(connection)
    delivery_id = uuid.uuid4()
    await connection.execute(
        "insert into tidegate.workflow_trigger_deliveries (id, trigger_id, event_id, status) "
        "values ($1, $2, $3, 'cancelled')",
        delivery_id, trigger_id, await an_event(connection),
    )  # fmt: skip
    await connection.execute(f"update tidegate.workflow_trigger_deliveries set {changes} where id = '{delivery_id}'")
    return delivery_id, trigger_id


async def a_run(connection: Connection, changes: str, **values: Any) -> uuid.UUID:
    """A run of no delivery, changed."""
    run_id = uuid.uuid4()
    columns = {"id": run_id, "workflow_definition_id": await make_definition(connection)} | values
    places = ", ".join(f"${n}" for n in range(1, len(columns) + 1))
    await connection.execute(
        f"insert into tidegate.workflow_runs ({', '.join(columns)}, next_attempt_at) values ({places}, {FUTURE})",
        *columns.values(),
    )
    await connection.execute(f"update tidegate.workflow_runs set {changes} where id = '{run_id}'")
    return run_id


async def a_retry(connection: Connection, event_id: uuid.UUID, changes: str) -> None:
    await connection.execute(
        "insert into tidegate.event_ingress_retries (event_id, source, next_attempt_at) "
        f"values ($1, 'shop', {FUTURE})", event_id,
    )  # fmt: skip
    await connection.execute(f"update tidegate.event_ingress_retries set {changes} where event_id = '{event_id}'")


async def a_step(connection: Connection, run_id: uuid.UUID, changes: str) -> None:
    await connection.execute(
        "insert into tidegate.workflow_run_steps (id, workflow_run_id, name) values (gen_random_uuid(), $1, 'one')",
        run_id,
    )
    await connection.execute(f"update tidegate.workflow_run_steps set {changes} where workflow_run_id = '{run_id}'")


async def held_and_undecided(connection: Connection) -> None:
    [event_id] = await make_events(connection)
    await a_retry(connection, event_id, "reason = 'rate_limit'")


async def without_a_slot(connection: Connection) -> None:
    await connection.execute(
        "insert into tidegate.event_scheduler_sources (source, plan_version, updated_by) values ('shop', 5, 'test')"
    )
    await a_retry(connection, await an_event(connection), "plan_version = 4")


async def event_claimed(connection: Connection) -> None:
    await a_retry(connection, await an_event(connection), f"retry_state = 'running', {CLAIM}")


async def delivery_without_time(connection: Connection) -> None:
    await a_delivery(connection, "status = 'throttled', retry_state = 'none'")


async def delivery_without_slot(connection: Connection) -> None:
    waits = f"status = 'throttled', retry_state = 'scheduled', next_attempt_at = {FUTURE}, reason = 'throttle'"
    _, trigger_id = await a_delivery(connection, waits)
    await connection.execute(
        "insert into tidegate.event_scheduler_triggers (trigger_id, plan_version) values ($1, 5)", trigger_id
    )


async def delivery_claimed(connection: Connection) -> None:
    await a_delivery(connection, f"status = 'matched', retry_state = 'running', {CLAIM}")


async def delivery_of_deleted(connection: Connection) -> None:
    waits = f"status = 'throttled', retry_state = 'scheduled', next_attempt_at = {FUTURE}, reason = 'throttle'"
    _, trigger_id = await a_delivery(connection, waits)
    await connection.execute(
        f"update tidegate.workflow_event_triggers set deleted_at = {PAST} where id = '{trigger_id}'"
    )


async def free_slot(connection: Connection) -> None:
    await a_delivery(
        connection,
        f"status = 'throttled', retry_state = 'scheduled', next_attempt_at = {FUTURE}, reason = 'concurrency', "
        f"concurrency_key = 'c', updated_at = {PAST}",
    )


async def launch_without_run(connection: Connection) -> None:
    await a_delivery(
        connection, "status = 'launched', workflow_run_id = gen_random_uuid(), launched_at = tidegate.now()"
    )


async def run_without_launch(connection: Connection) -> None:
    delivery_id, _ = await a_delivery(connection, "status = 'cancelled'")
    await a_run(connection, "status = 'succeeded', finished_at = tidegate.now()", delivery_id=delivery_id)


async def collected_by_nobody(connection: Connection) -> None:
    await a_delivery(connection, "status = 'collected', window_id = gen_random_uuid()")


async def collected_without_run(connection: Connection) -> None:
    await a_delivery(connection, "status = 'collected', window_id = id, workflow_run_id = gen_random_uuid()")


async def window_of_nobody(connection: Connection) -> None:
    [trigger_id] = await make_triggers(connection)
    await connection.execute(
        "insert into tidegate.trigger_windows (id, trigger_id, key, state, event_id, size, opened_at, closes_at, "
        "oldest_event_id, last_sequence, trigger_version) values (gen_random_uuid(), $1, '', 'open', "
        "gen_random_uuid(), 1, tidegate.now(), tidegate.now(), gen_random_uuid(), 1, 1)", trigger_id,
    )  # fmt: skip


async def wait_of_nobody(connection: Connection) -> None:
    await connection.execute(
        "insert into tidegate.event_waits (id, workflow_run_id, step_id, number, mode, event_type, source, paths, key, "
        "contained, after_sequence) "
        "values (gen_random_uuid(), gen_random_uuid(), gen_random_uuid(), 0, 'cancel', 'a', '*', '[]', '[]', '{}', 0)"
    )


async def step_waits_for_nothing(connection: Connection) -> None:
    run_id = await a_run(connection, "status = 'pending'")
    await a_step(connection, run_id, f"kind = 'wait', retry_state = 'scheduled', next_attempt_at = {FUTURE}")


async def delivery_twice(connection: Connection) -> None:
    delivery_id, _ = await a_delivery(connection, "status = 'cancelled'")
    await connection.execute(
        "insert into tidegate.workflow_trigger_deliveries "
        "(id, trigger_id, event_id, status, retry_state, next_attempt_at, reason) "
        f"select id, trigger_id, event_id, 'throttled', 'scheduled', {FUTURE}, 'throttle' "
        "from tidegate.workflow_trigger_deliveries where id = $1", delivery_id,
    )  # fmt: skip


async def run_twice(connection: Connection) -> None:
    run_id = await a_run(connection, "status = 'succeeded', finished_at = tidegate.now()")
    await connection.execute(
        "insert into tidegate.workflow_runs (id, workflow_definition_id, next_attempt_at) "
        f"select id, workflow_definition_id, {FUTURE} from tidegate.workflow_runs where id = $1", run_id,
    )  # fmt: skip


async def external_id_alone(connection: Connection) -> None:
    await connection.execute("insert into tidegate.event_external_ids values ('o-7', 'shop', $1)", uuid.uuid4())


async def held_event_alone(connection: Connection) -> None:
    await a_retry(connection, uuid.uuid4(), "reason = 'rate_limit'")


async def letter_alone(connection: Connection) -> None:
    await connection.execute(
        "insert into tidegate.dead_letters (id, kind, subject_id, event_id, reason) "
        "select gen_random_uuid(), 'event', $1, $1, 'test'", uuid.uuid4(),
    )  # fmt: skip


async def inbox_row_alone(connection: Connection) -> None:
    await connection.execute(
        "insert into tidegate.event_inbox (ingress_sequence, event_id, source) values (7, $1, 'shop')", uuid.uuid4()
    )


async def delivery_without_event(connection: Connection) -> None:
    await a_delivery(connection, "event_id = gen_random_uuid()")


async def delivery_without_trigger(connection: Connection) -> None:
    await a_delivery(connection, "trigger_id = gen_random_uuid()")


async def run_without_event(connection: Connection) -> None:
    await a_run(connection, "event_id = gen_random_uuid()")


async def run_without_definition(connection: Connection) -> None:
    await a_run(connection, "workflow_definition_id = gen_random_uuid()")


async def step_without_run(connection: Connection) -> None:
    await a_step(connection, uuid.uuid4(), "status = 'succeeded'")


async def run_claimed(connection: Connection) -> None:
    await a_run(connection, f"status = 'running', {CLAIM}")


async def run_past_deadline(connection: Connection) -> None:
    await a_run(connection, f"deadline_at = {PAST}")


async def step_of_finished(connection: Connection) -> None:
    run_id = await a_run(connection, "status = 'failed', finished_at = tidegate.now()")
    await a_step(connection, run_id, f"retry_state = 'scheduled', next_attempt_at = {FUTURE}")


async def step_claimed(connection: Connection) -> None:
    run_id = await a_run(connection, f"status = 'running', claimed_by = 'w', claim_expires_at = {FUTURE}")
    await a_step(connection, run_id, f"retry_state = 'running', {CLAIM}")


async def probe_gone(connection: Connection) -> None:
    [trigger_id] = await make_triggers(connection)
    await connection.execute(
        "insert into tidegate.event_scheduler_triggers (trigger_id, breaker_state, probe_run_id) "
        "values ($1, 'half_open', gen_random_uuid())", trigger_id,
    )  # fmt: skip


async def source_plan(connection: Connection) -> None:
    await connection.execute(
        "insert into tidegate.event_scheduler_sources (source, is_replanning, updated_by, updated_at) "
        f"values ('shop', true, 'test', {PAST})"
    )


async def trigger_plan(connection: Connection) -> None:
    [trigger_id] = await make_triggers(connection)
    await connection.execute(
        "insert into tidegate.event_scheduler_triggers (trigger_id, is_replanning, updated_at) "
        f"values ($1, true, {PAST})", trigger_id,
    )  # fmt: skip


BUDGET = "insert into tidegate.budgets (name, concurrency, created_by, updated_by) values ('gpu', 1, 'test', 'test')"
FOR_BUDGET = "status = 'throttled', retry_state = 'scheduled', reason = 'budget', budget = 'gpu', budget_key = ''"

STEP_FOR_BUDGET = "kind = 'step', retry_state = 'scheduled', retry_metadata = '{\"reason\": \"budget\"}'"


async def no_budget(connection: Connection) -> None:
    await a_delivery(connection, f"{FOR_BUDGET}, next_attempt_at = {FUTURE}, updated_at = {PAST}")


async def free_budget_slot(connection: Connection) -> None:
    await connection.execute(BUDGET)
    await a_delivery(connection, f"{FOR_BUDGET}, next_attempt_at = {FUTURE}, updated_at = {PAST}")


async def holder_without_run(connection: Connection) -> None:
    await connection.execute(BUDGET)
    await connection.execute(
        "insert into tidegate.budget_holders values (gen_random_uuid(), 'gpu', '', gen_random_uuid())"
    )


async def a_place(connection: Connection, of_step: str) -> None:
    """The place in line of a step."""
    run_id = await a_run(connection, "status = 'pending'")
    await a_step(connection, run_id, of_step)
    await connection.execute(
        "insert into tidegate.budget_steps (step_id, run_id, name, budget, key, cost, place, next_attempt_at, asked) "
        f"select id, workflow_run_id, name, 'gpu', '', 1, 1, {FUTURE}, '{{}}' from tidegate.workflow_run_steps "
        "where workflow_run_id = $1", run_id,
    )  # fmt: skip


async def step_for_no_budget(connection: Connection) -> None:
    run_id = await a_run(connection, "status = 'pending'")
    await a_step(connection, run_id, f"{STEP_FOR_BUDGET}, next_attempt_at = {FUTURE}")


async def step_for_free_slot(connection: Connection) -> None:
    await connection.execute(BUDGET)
    await a_place(connection, f"{STEP_FOR_BUDGET}, next_attempt_at = {FUTURE}, updated_at = {PAST}")


async def place_of_nobody(connection: Connection) -> None:
    await a_place(connection, "status = 'succeeded'")


async def free_slot_of_run(connection: Connection) -> None:
    [trigger_id] = await make_triggers(connection)
    await a_run(connection, f"trigger_id = '{trigger_id}', slot_key = '', updated_at = {PAST}")
    await connection.execute(
        f"insert into tidegate.slot_waits (run_id, trigger_id, key, since) select id, trigger_id, '', {PAST} "
        "from tidegate.workflow_runs"
    )


async def wait_without_run(connection: Connection) -> None:
    await connection.execute(
        f"insert into tidegate.slot_waits (run_id, budget, key, since) values (gen_random_uuid(), 'gpu', '', {PAST})"
    )


async def letter_late(connection: Connection) -> None:
    await connection.execute(
        "insert into tidegate.dead_letters (id, kind, subject_id, reason, replay_at, replay_by) "
        f"values (gen_random_uuid(), 'event', gen_random_uuid(), 'test', {PAST}, 'test')"
    )


async def event_replay_late(connection: Connection) -> None:
    await connection.execute(
        "insert into tidegate.event_replays (event_id, replay_at, replay_by) "
        f"values (gen_random_uuid(), {PAST}, 'test')"
    )


async def tick_late(connection: Connection) -> None:
    await connection.execute(
        f"insert into tidegate.schedules (workflow_definition_id, every_ms, next_at) values ($1, 1000, {PAST})",
        await make_definition(connection),
    )


PLANTED: dict[str, Callable[[Connection], Awaitable[None]]] = {
    "events_held_and_undecided": held_and_undecided,
    "events_without_a_slot": without_a_slot,
    "events_claimed_by_nobody": event_claimed,
    "deliveries_without_a_time": delivery_without_time,
    "deliveries_without_a_slot": delivery_without_slot,
    "deliveries_claimed_by_nobody": delivery_claimed,
    "deliveries_of_deleted_triggers": delivery_of_deleted,
    "deliveries_waiting_for_a_free_slot": free_slot,
    "deliveries_waiting_for_no_budget": no_budget,
    "deliveries_waiting_for_a_free_budget_slot": free_budget_slot,
    "steps_waiting_for_a_free_budget_slot": step_for_free_slot,
    "steps_waiting_for_no_budget": step_for_no_budget,
    "budget_places_of_nobody": place_of_nobody,
    "budget_holders_without_a_run": holder_without_run,
    "runs_waiting_for_a_free_slot": free_slot_of_run,
    "slot_waits_without_a_run": wait_without_run,
    "deliveries_stored_twice": delivery_twice,
    "runs_stored_twice": run_twice,
    "launches_without_a_run": launch_without_run,
    "runs_without_a_launch": run_without_launch,
    "collected_by_nobody": collected_by_nobody,
    "collected_without_a_run": collected_without_run,
    "windows_of_nobody": window_of_nobody,
    "waits_of_nobody": wait_of_nobody,
    "steps_that_wait_for_nothing": step_waits_for_nothing,
    "external_ids_without_an_event": external_id_alone,
    "held_events_without_an_event": held_event_alone,
    "dead_letters_without_an_event": letter_alone,
    "inbox_rows_without_an_event": inbox_row_alone,
    "deliveries_without_an_event": delivery_without_event,
    "deliveries_without_a_trigger": delivery_without_trigger,
    "runs_without_an_event": run_without_event,
    "runs_without_a_definition": run_without_definition,
    "steps_without_a_run": step_without_run,
    "runs_claimed_by_nobody": run_claimed,
    "runs_past_their_deadline": run_past_deadline,
    "steps_of_finished_runs": step_of_finished,
    "steps_claimed_by_nobody": step_claimed,
    "breakers_waiting_for_an_ended_run": probe_gone,
    "source_plans_without_an_end": source_plan,
    "trigger_plans_without_an_end": trigger_plan,
    "dead_letters_not_replayed_in_time": letter_late,
    "events_not_replayed_in_time": event_replay_late,
    "ticks_not_published_in_time": tick_late,
}
# What may be on its way for a while.
TIMED = {name for name in ORPHANS if name.endswith(("claimed_by_nobody", "_in_time", "without_an_end"))} | {
    "deliveries_of_deleted_triggers", "deliveries_waiting_for_a_free_slot", "runs_past_their_deadline",
    "deliveries_waiting_for_no_budget", "deliveries_waiting_for_a_free_budget_slot",
    "steps_waiting_for_a_free_budget_slot", "runs_waiting_for_a_free_slot", "slot_waits_without_a_run",
}  # fmt: skip


async def orphans(database: Database, grace_ms: int = 60_000) -> dict[str, int]:
    async with database.transaction() as connection:
        return {one.name: one.total for one in await store.orphans(connection, grace_ms) if one.total}


@pytest.mark.parametrize("name", ORPHANS)
async def test_each_invariant_is_found_when_broken(database: Database, connection: Connection, name: str) -> None:
    await PLANTED[name](connection)
    assert await orphans(database) == {name: 1}
    assert await orphans(database, 2 * HOUR_MS) == ({} if name in TIMED else {name: 1})


async def test_a_world_in_all_states_is_well(database: Database, connection: Connection, world: World) -> None:
    """Finished, failed, asleep, held for a slot, waiting to be tried again: none of these is an orphan."""

    @world.app.workflow(on="go", max_concurrency=1)
    async def work(ctx: Context, how: str = "done") -> None:
        await ctx.step("one", lambda: 1)
        if how == "sleep":
            await ctx.sleep("1h")
        if how == "retry":
            await ctx.step("two", lambda: 1 / 0)
        if how == "fail":
            raise ValueError("no")

    runner = await world.runner()
    for how in ("done", "fail", "sleep", "done", "retry"):
        await publish(connection, "go", how=how)
        await world.turn(runner)
    waiting = await connection.fetch("select reason from tidegate.workflow_trigger_deliveries where reason is not null")
    assert [row["reason"] for row in waiting] == ["concurrency", "concurrency"]
    assert await orphans(database, 0) == {}


async def test_a_missing_or_broken_guard_is_named(connection: Connection) -> None:
    assert await store.missing_guards(connection) == []
    await connection.execute("alter table tidegate.workflow_runs_live drop constraint workflow_runs_live_pkey")
    assert await store.missing_guards(connection) == ["workflow_runs_live_pkey"]
    assert len(GUARDS) == len(set(GUARDS))


def facts(**changes: Any) -> doctor.DoctorFacts:
    server = ServerFacts(
        version=180000, version_text="18.0", fsync="on", full_page_writes="on", synchronous_commit="on",
        synchronous_standby_names="", is_read_only=False, clock=datetime(2026, 1, 1, tzinfo=UTC), connections=10,
        max_connections=100, max_locks=25_600,
    )  # fmt: skip
    of_server = {name: changes.pop(name) for name in list(changes) if name in ServerFacts.__struct_fields__}
    depth = QueueDepth(ready=0, delayed=0, active=0, oldest_due_age_seconds=0.0)
    return doctor.DoctorFacts(
        server=msgspec.structs.replace(server, **of_server), clock_offset_seconds=0.0, own_clock_offset_seconds=0.0,
        missing_guards=[], orphans=[], queues={"runs": depth}, unserved=[],
        workers=Alive(alive=1, reconciled_at=None),
        history=HistorySpan(date(2025, 12, 1), date(2026, 1, 2), 0),
    )._replace(**changes)  # fmt: skip


LATE = QueueDepth(ready=3, delayed=0, active=0, oldest_due_age_seconds=31.0)


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"version": 130000}, "postgres"),
        ({"is_read_only": True}, "postgres"),
        ({"fsync": "off"}, "durability"),
        ({"full_page_writes": "off"}, "durability"),
        ({"synchronous_commit": "off"}, "durability"),
        ({"connections": 90}, "connections"),
        ({"max_locks": 950}, "locks"),
        ({"clock_offset_seconds": -5.1}, "clock"),
        ({"own_clock_offset_seconds": 1.1}, "scheduling clock"),
        ({"missing_guards": ["x"]}, "unique indexes"),
        ({"history": HistorySpan(date(2025, 12, 1), date(2026, 1, 1), 0)}, "history"),
        ({"history": HistorySpan(None, None, 0)}, "history"),
        ({"queues": {"runs": LATE}}, "due lag of runs"),
        ({"unserved": [Unserved(workflow="w", waiting=1, since=datetime(2026, 1, 1, tzinfo=UTC))]}, "workflows"),
    ],
)
def test_each_fact_is_judged(changes: dict[str, Any], check: str) -> None:
    assert [one.name for one in doctor.judge(facts()) if not one.is_ok] == []
    assert [one.name for one in doctor.judge(facts(**changes)) if not one.is_ok] == [check]


def test_no_worker_matters_when_something_is_due() -> None:
    nobody, depth = (
        Alive(alive=0, reconciled_at=None),
        QueueDepth(ready=1, delayed=0, active=0, oldest_due_age_seconds=0.1),
    )
    assert all(one.is_ok for one in doctor.judge(facts(workers=nobody)))
    assert [one.name for one in doctor.judge(facts(workers=nobody, queues={"runs": depth})) if not one.is_ok] == [
        "workers"
    ]


def test_the_command(database_url: str) -> None:
    done = run("doctor", env={"TIDEGATE_DATABASE_URL": database_url})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT OK" not in done.stdout
    for name in (*ORPHANS, "schema", "durability", "clock", "unique indexes", "due lag of ingress"):
        assert name in done.stdout


async def test_the_command_fails_when_something_is_wrong(database_url: str, connection: Connection) -> None:
    await run_claimed(connection)
    env = {"TIDEGATE_DATABASE_URL": database_url}
    done = run("doctor", env=env)
    assert done.returncode == 1
    assert [line.split()[2] for line in done.stdout.splitlines() if "NOT OK" in line] == ["runs_claimed_by_nobody"]
    done = run("doctor", "--json", "--grace", "7200", env=env)
    assert done.returncode == 0 and json.loads(done.stdout)["is_ok"] is True
    found = json.loads(run("doctor", "--json", env=env).stdout)
    assert found["is_ok"] is False
    assert [check["name"] for check in found["checks"] if not check["is_ok"]] == ["runs_claimed_by_nobody"]


def test_a_schema_that_is_not_there(empty_database_url: str) -> None:
    done = run("doctor", env={"TIDEGATE_DATABASE_URL": empty_database_url})
    assert done.returncode == 1
    assert "NOT OK" in done.stdout and "tidegate migrate" in done.stdout
    status = run("migrate", "--status", env={"TIDEGATE_DATABASE_URL": empty_database_url})
    assert status.returncode == 1 and "pending" in status.stdout


async def test_redis_that_may_evict_or_is_away(database_url: str, server: RedisServer, client: Any) -> None:
    env = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_QUEUE": "bullmq", "TIDEGATE_REDIS_URL": server.url}
    assert run("doctor", env=env).returncode == 0
    await client.config_set("maxmemory-policy", "allkeys-lru")
    done = run("doctor", env=env)
    assert done.returncode == 1 and "maxmemory-policy is allkeys-lru" in done.stdout
    server.stop()
    done = run("doctor", env=env)
    assert done.returncode == 1 and "nothing is lost" in done.stdout
