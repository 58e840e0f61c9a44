"""Health on a real database with a moved clock: what each queue holds, what is overdue, and the verdict."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.conftest import Clock
from tests.flow.test_gate import Worker, limit, ticks
from tests.flow.test_gate import worker as worker  # noqa: PLC0414 - a fixture
from tidegate.flow import control
from tidegate.flow.look import health
from tidegate.flow.look.health import Exposition
from tidegate.model.health import HEALTH
from tidegate.model.source import RateLimit
from tidegate.store import triggers, workers
from tidegate.store.db import Connection, Database
from tidegate.telemetry import metrics


@pytest.fixture(autouse=True)
async def _alive(connection: Connection) -> None:
    """A worker that is alive for long, so that its absence does not hide what these tests are about."""
    await connection.execute(
        "insert into tidegate.workers (name, definitions, slots, version, heartbeat_ms, seen_at) "
        "values ('w0', '{}', 1, '0.2.0', 10000, '2999-01-01')"
    )


async def test_nothing_at_all_is_ok(connection: Connection, clock: Clock) -> None:
    found = await health.snapshot(connection)
    assert (found.status, found.causes, found.generated_at) == ("ok", [], clock.now)
    assert set(found.queues) == {"ingress", "triggers", "runs"}
    assert {depth.ready + depth.delayed + depth.active for depth in found.queues.values()} == {0}
    assert set(found.retries) == {"events", "deliveries", "steps"}
    assert (found.dead_letters.total, found.paused_sources, found.rate_limits) == (0, [], [])
    assert found.last_processed_event_at is None


async def test_depths_and_ages(database: Database, connection: Connection, clock: Clock, worker: Worker) -> None:
    await limit(database, 2, interval_ms=60_000)
    await ticks(connection, 5)
    await clock.advance(3000)
    ingress = (await health.snapshot(connection)).queues["ingress"]
    assert (ingress.ready, ingress.delayed, ingress.oldest_due_age_seconds) == (5, 0, 3)
    await worker.turn()
    found = await health.snapshot(connection)
    assert (found.queues["ingress"].ready, found.queues["ingress"].delayed) == (0, 3)
    assert (found.queues["runs"].ready, found.queues["runs"].oldest_due_age_seconds) == (2, 0)
    assert found.retries["events"].by_reason == {"rate_limit": 3}
    assert (found.retries["events"].total, found.retries["events"].overdue) == (3, 0)
    [seen] = found.sources
    assert (seen.source, seen.total, seen.throttled, seen.average_lag_ms) == ("noisy", 5, 3, 3000)
    [limited] = found.rate_limits
    assert (limited.source, limited.limit, limited.waiting) == ("noisy", 2, 3)
    assert limited.next_attempt_at == found.retries["events"].next_attempt_at
    assert found.last_processed_event_at == clock.now
    assert found.status == "ok"  # waiting for a limit is no fault


async def test_what_the_console_counts_is_what_the_database_holds(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 120, interval_ms=60_000)
    await ticks(connection, 130)  # more than a page of any list
    await worker.turn()
    await ticks(connection, 3)
    await connection.execute(
        "update tidegate.workflow_runs set status = 'running', claim_expires_at = tidegate.now() "
        "where id in (select id from tidegate.workflow_runs limit 70)"
    )
    await connection.execute(
        "update tidegate.workflow_runs set next_attempt_at = tidegate.now() + interval '1 hour' "
        "where id in (select id from tidegate.workflow_runs where status = 'pending' limit 20)"
    )
    found = await health.snapshot(connection)
    held = await connection.fetchrow(
        "select (select count(*) from tidegate.workflow_events), count(*), count(*) filter (where status = 'pending'), "
        "count(*) filter (where status = 'running') from tidegate.workflow_runs"
    )
    runs = found.queues["runs"]
    assert (found.totals.received, found.totals.launched, runs.ready + runs.delayed, runs.active) == tuple(held)
    assert tuple(held) == (133, 120, 50, 70)


async def test_overdue_and_stalled(database: Database, connection: Connection, clock: Clock, worker: Worker) -> None:
    await limit(database, 1)
    await ticks(connection, 2)
    await worker.turn()
    retry = (await health.snapshot(connection)).retries["events"]
    assert retry.next_attempt_at is not None
    await clock.advance((retry.next_attempt_at - clock.now) / timedelta(milliseconds=1) + HEALTH.overdue_ms)
    found = await health.snapshot(connection)
    # No worker has the code of it, which is told too.
    codes = [(cause.code, cause.subject) for cause in found.causes]
    assert codes == [("retries_overdue", "events"), ("workflow_unserved", "tick")]
    assert found.causes[0].since == retry.next_attempt_at
    await clock.advance(60_000)
    codes = [(cause.code, cause.subject) for cause in (await health.snapshot(connection)).causes]
    assert [code for code, _ in codes] == ["retries_overdue", "ingress_stalled", "runs_stalled", "workflow_unserved"]
    await worker.turn()
    codes = [cause.code for cause in (await health.snapshot(connection)).causes]
    assert codes == ["runs_stalled", "workflow_unserved"]


async def test_pauses_and_breakers(database: Database, connection: Connection, clock: Clock, worker: Worker) -> None:
    await control.pause(database, "one", duration_ms=60_000, reason="upgrade", actor="ann")
    await control.pause(database, "two", actor="bob")
    await connection.execute(
        "update tidegate.event_scheduler_sources set breaker_state = 'open', breaker_reason = '5 failures', "
        "breaker_until = tidegate.now() + interval '30 s' where source = 'two'"
    )
    causes = (await health.snapshot(connection)).causes
    assert [(c.code, c.subject) for c in causes] == [
        ("source_paused", "one"),
        ("source_paused", "two"),
        ("source_breaker_open", "two"),
    ]
    assert causes[0].message == "paused by ann until 2026-06-01 12:01:00 UTC: upgrade"
    assert causes[1].message == "paused by bob until it is resumed: no reason given"
    assert causes[2].message == "the breaker is open after 5 failures until 2026-06-01 12:00:30 UTC"
    await clock.advance(60_000)
    causes = (await health.snapshot(connection)).causes
    assert [(c.code, c.subject) for c in causes] == [("source_paused", "two"), ("source_breaker_open", "two")]
    assert causes[1].message == "the breaker is open after 5 failures; the next event is the probe"
    await control.resume(database, "two", "bob")
    assert (await health.snapshot(connection)).status == "ok"


async def test_dead_letters_of_today_and_before(connection: Connection, clock: Clock) -> None:
    for kind in ("event", "run"):
        await connection.execute(
            "insert into tidegate.dead_letters (id, kind, subject_id, reason) "
            "values (tidegate.uuid7(), $1, tidegate.uuid7(), 'x')", kind
        )  # fmt: skip
        await clock.advance(86_400_000)
    found = (await health.snapshot(connection)).dead_letters
    assert (found.total, found.last_24h) == (2, 0)
    await clock.advance(-1)
    assert (await health.snapshot(connection)).dead_letters.last_24h == 1


async def test_the_exposition_survives_a_database_that_is_away(database: Database, connection: Connection) -> None:
    await control.set_limit(database, "x", RateLimit(limit=1, interval_ms=1000), "ann")
    await control.pause(database, "x", actor="ann")
    exposition = Exposition(database)
    assert b"tidegate_paused_sources 1.0" in await exposition.text()
    nowhere = Exposition(Database("postgresql://nobody@127.0.0.1:9/none", "test", size=1))
    assert b"tidegate_database_up 0.0" in await nowhere.text()
    assert metrics.REGISTRY.get_sample_value("tidegate_deferred", {"kind": "events", "reason": "paused"}) is None


async def test_runs_that_nobody_has_the_code_of(database: Database, connection: Connection) -> None:
    [definition] = [await triggers.upsert_definition(
        connection, slug="lost", kind="python", parameters=[], config={}, actor="test"
    )]  # fmt: skip
    await connection.execute(
        "insert into tidegate.workflow_runs (id, workflow_definition_id, next_attempt_at) "
        "values (gen_random_uuid(), $1, tidegate.now() - interval '1 minute')",
        definition,
    )
    causes = (await health.snapshot(connection)).causes
    assert ("workflow_unserved", "lost") in [(cause.code, cause.subject) for cause in causes]
    await workers.heartbeat(connection, "w", [definition], 1, 10_000)
    causes = (await health.snapshot(connection)).causes
    assert "workflow_unserved" not in [cause.code for cause in causes]
