"""Each cause of the health verdict flips on at its threshold, off when it is over; it says since when."""

from __future__ import annotations

import asyncio
import re
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.test_gate import Worker, limit, ticks
from tests.flow.test_gate import worker as worker  # noqa: PLC0414 - a fixture
from tidegate.app import Tidegate
from tidegate.flow import control
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.look import health
from tidegate.flow.look.health import Exposition, Snapshots
from tidegate.flow.look.verdict import RUNBOOK, Cause
from tidegate.model.health import HEALTH, HealthPolicy, severity
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import health as store_health
from tidegate.store import workers
from tidegate.store.db import Connection, Database
from tidegate.telemetry import metrics
from tidegate.worker.loop import Loop

ROOT = Path(__file__).parent.parent.parent
ANCHORS = {
    re.sub(r"[^a-z0-9 -]", "", line.lstrip("# ").lower()).replace(" ", "-")
    for line in (ROOT / RUNBOOK).read_text().splitlines()
    if line.startswith("#")
}


@pytest.fixture(autouse=True)
async def _alive(connection: Connection) -> None:
    await connection.execute(
        "insert into tidegate.workers (name, definitions, slots, version, heartbeat_ms, seen_at) "
        "values ('w0', '{}', 1, '0.2.0', 10000, '2999-01-01')"
    )


async def cause(connection: Connection, code: str, policy: HealthPolicy = HEALTH) -> Cause | None:
    """The cause with this code, if there is one; its runbook exists."""
    found = await health.snapshot(connection, policy)
    [one] = [c for c in found.causes if c.code == code] or [None]
    if one is not None:
        page, _, anchor = one.runbook.partition("#")
        assert page == RUNBOOK and anchor in ANCHORS, one.runbook
        assert found.status == ("critical" if any(c.severity == "critical" for c in found.causes) else "degraded")
    return one


async def gauge(database: Database, name: str, **labels: str) -> float | None:
    await Exposition(database).text()
    return metrics.REGISTRY.get_sample_value(name, labels)


async def test_overdue_retries(database: Database, connection: Connection, clock: Clock, worker: Worker) -> None:
    await limit(database, 1)
    await ticks(connection, 4)
    await worker.turn()
    due = (await health.snapshot(connection)).retries["events"].next_attempt_at
    assert due is not None
    await clock.advance((due - clock.now) / timedelta(milliseconds=1) + HEALTH.overdue_ms - 1)
    assert await cause(connection, "retries_overdue") is None
    await clock.advance(1)
    found = await cause(connection, "retries_overdue")
    assert found and (found.severity, found.subject, found.since) == ("degraded", "events", due)
    assert await gauge(database, "tidegate_overdue_retries", kind="events") == 1
    await clock.advance(60_000)
    assert await cause(connection, "retries_overdue", HealthPolicy(overdue_degraded=4)) is None
    critical = await cause(connection, "retries_overdue", HealthPolicy(overdue_critical=3))
    assert critical and critical.severity == "critical"
    for _ in range(6):
        await worker.turn()
        await clock.advance(2000)
    assert await cause(connection, "retries_overdue") is None
    assert await gauge(database, "tidegate_overdue_retries", kind="events") == 0


async def test_what_is_held_on_purpose_is_not_late(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 1)
    await ticks(connection, 3)
    await worker.turn()
    await control.pause(database, "noisy", actor="ann")
    await clock.advance(3_600_000)  # no worker has moved their slots behind the pause
    found = await health.snapshot(connection)
    assert (found.queues["ingress"].ready, found.queues["ingress"].oldest_due_age_seconds) == (0, 0)
    assert (found.retries["events"].overdue, found.retries["events"].by_reason) == (0, {"paused": 2})
    assert await gauge(database, "tidegate_deferred", kind="events", reason="paused") == 2
    assert await gauge(database, "tidegate_oldest_due_age_seconds", queue="ingress") == 0
    await control.resume(database, "noisy", "ann")
    assert (await health.snapshot(connection)).queues["ingress"].oldest_due_age_seconds > 3500
    assert (await gauge(database, "tidegate_oldest_due_age_seconds", queue="ingress") or 0) > 3500


async def test_a_queue_that_stands_still(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await ticks(connection, 1)
    published = clock.now
    await clock.advance(HEALTH.due_age_degraded_ms - 1)
    assert await cause(connection, "ingress_stalled") is None
    await clock.advance(1)
    found = await cause(connection, "ingress_stalled")
    assert found and (found.severity, found.since) == ("degraded", published)
    await clock.advance(HEALTH.due_age_critical_ms - HEALTH.due_age_degraded_ms)
    found = await cause(connection, "ingress_stalled")
    assert found and found.severity == "critical"
    await worker.turn()
    assert await cause(connection, "ingress_stalled") is None
    await clock.advance(HEALTH.due_age_degraded_ms)
    found = await cause(connection, "runs_stalled")
    assert found and found.subject == "runs" and found.since is not None


async def bury(connection: Connection, count: int, kind: str = "run") -> None:
    await connection.execute(
        "insert into tidegate.dead_letters (id, kind, subject_id, reason) "
        "select tidegate.uuid7(), $1, gen_random_uuid(), 'x' from generate_series(1, $2)", kind, count
    )  # fmt: skip


async def test_dead_letters_that_grow(database: Database, connection: Connection, clock: Clock) -> None:
    first = clock.now
    await bury(connection, HEALTH.dead_letters_degraded - 1)
    assert await cause(connection, "dead_letters_growing") is None
    await bury(connection, 1)
    found = await cause(connection, "dead_letters_growing")
    assert found and (found.severity, found.subject, found.since) == ("degraded", "run", first)
    assert await gauge(database, "tidegate_dead_letters", kind="run") == 10
    await bury(connection, HEALTH.dead_letters_critical)
    found = await cause(connection, "dead_letters_growing")
    assert found and found.severity == "critical"
    off = HealthPolicy(dead_letters_degraded=0, dead_letters_critical=0)
    assert await cause(connection, "dead_letters_growing", off) is None
    await clock.advance(HEALTH.dead_letters_window_ms)
    assert await cause(connection, "dead_letters_growing") is None


async def test_paused_sources(database: Database, connection: Connection, clock: Clock) -> None:
    await control.pause(database, "one", actor="ann")
    since = clock.now
    found = await cause(connection, "source_paused")
    assert found and (found.severity, found.subject, found.since) == ("degraded", "one", since)
    late = HealthPolicy(paused_degraded_ms=60_000, paused_critical_ms=120_000)
    assert await cause(connection, "source_paused", late) is None
    await clock.advance(60_000)
    found = await cause(connection, "source_paused", late)
    assert found and found.severity == "degraded"
    await clock.advance(60_000)
    found = await cause(connection, "source_paused", late)
    assert found and found.severity == "critical"
    assert await gauge(database, "tidegate_paused_sources") == 1
    await control.resume(database, "one", "ann")
    assert await cause(connection, "source_paused") is None
    assert await gauge(database, "tidegate_paused_sources") == 0


async def test_paused_and_broken_triggers(database: Database, connection: Connection, clock: Clock) -> None:
    app = Tidegate()

    @app.workflow(on="tick")
    async def tick(ctx: Any) -> None: ...

    await database.run(app.register)
    trigger_id = await connection.fetchval("select id from tidegate.workflow_event_triggers")
    for state in ("paused_at = tidegate.now()", "breaker_state = 'open', breaker_at = tidegate.now()"):
        code = "trigger_paused" if "paused" in state else "trigger_breaker_open"
        await connection.execute(
            "insert into tidegate.event_scheduler_triggers (trigger_id) values ($1) on conflict do nothing", trigger_id
        )
        assert await cause(connection, code) is None
        await connection.execute(f"update tidegate.event_scheduler_triggers set {state}")
        found = await cause(connection, code)
        assert found and (found.severity, found.subject, found.since) == ("degraded", str(trigger_id), clock.now)
        assert found.message.startswith("tick/code: ")
        await connection.execute("update tidegate.event_scheduler_triggers set paused_at = null")
        assert await cause(connection, "trigger_paused") is None
    assert await gauge(database, "tidegate_open_breakers", kind="trigger") == 1
    assert await gauge(database, "tidegate_open_breakers", kind="source") == 0


async def test_an_open_source_breaker(database: Database, connection: Connection, clock: Clock) -> None:
    await control.pause(database, "bad", actor="ann")
    await control.resume(database, "bad", "ann")
    await connection.execute(
        "update tidegate.event_scheduler_sources set breaker_state = 'open', breaker_at = tidegate.now(), "
        "breaker_until = tidegate.now() + interval '1 h'"
    )
    found = await cause(connection, "source_breaker_open")
    assert found and (found.subject, found.since) == ("bad", clock.now)
    assert await gauge(database, "tidegate_open_breakers", kind="source") == 1
    await control.resume(database, "bad", "ann")
    assert await cause(connection, "source_breaker_open") is None


async def test_no_worker(database: Database, connection: Connection, clock: Clock) -> None:
    await connection.execute("delete from tidegate.workers")
    found = await cause(connection, "no_worker")
    assert found and (found.severity, found.since) == ("degraded", None)  # nobody has ever been there
    await workers.heartbeat(connection, "w", [], 1, 10_000)
    assert await cause(connection, "no_worker") is None
    assert await gauge(database, "tidegate_workers_alive") == 1
    await clock.advance(HEALTH.worker_degraded_ms)
    found = await cause(connection, "no_worker")
    assert found and (found.severity, found.since) == ("degraded", None)  # nothing waits for it
    assert await gauge(database, "tidegate_workers_alive") == 0
    await ticks(connection, 1)
    due_since = clock.now
    await clock.advance(HEALTH.worker_critical_ms)
    found = await cause(connection, "no_worker")
    assert found and (found.severity, found.since) == ("critical", due_since)
    assert "due: 1" in found.message and found.do == "start one: tidegate worker APP"
    await workers.heartbeat(connection, "w", [], 1, 10_000)
    assert await cause(connection, "no_worker") is None


async def test_a_worker_that_stopped_in_order_is_not_called_silent(connection: Connection, clock: Clock) -> None:
    """What is told is true a moment after the stop, also beside the row of another that crashed long ago."""
    await connection.execute("delete from tidegate.workers")
    await workers.heartbeat(connection, "crashed", [], 1, 10_000)
    await clock.advance(10 * HEALTH.worker_degraded_ms)
    await workers.heartbeat(connection, "w", [], 1, 10_000)
    await ticks(connection, 1)
    due_since = clock.now
    await clock.advance(2000)
    await workers.leave(connection, "w")
    found = await cause(connection, "no_worker")
    assert found and (found.severity, found.since) == ("degraded", due_since)
    assert found.message == "no worker is running: each has stopped, or sent no heartbeat for 60 s; due: 1"


async def test_reconcile_that_fails(database: Database, connection: Connection, clock: Clock, worker: Worker) -> None:
    await ticks(connection, 1)
    await worker.turn()
    await connection.execute(
        "update tidegate.workflow_runs set status = 'running', next_attempt_at = null, claimed_by = 'gone', "
        "claim_expires_at = tidegate.now()"
    )
    since = clock.now
    assert await gauge(database, "tidegate_expired_claims", kind="runs") == 1
    await clock.advance(HEALTH.reconcile_degraded_ms - 1)
    assert await cause(connection, "reconcile_failing") is None
    await clock.advance(1)
    found = await cause(connection, "reconcile_failing")
    assert found and (found.severity, found.subject, found.since) == ("degraded", "runs", since)
    await clock.advance(HEALTH.reconcile_critical_ms)
    found = await cause(connection, "reconcile_failing")
    assert found and found.severity == "critical"
    await Reconcile(database, batch_size=10).run_once()
    assert await cause(connection, "reconcile_failing") is None
    assert await gauge(database, "tidegate_expired_claims", kind="runs") == 0


async def test_reconcile_that_fails_in_every_worker(database: Database, connection: Connection, clock: Clock) -> None:
    await connection.execute("delete from tidegate.workers")
    await workers.heartbeat(connection, "w", [], 1, 10_000)
    began = clock.now
    reconcile = Reconcile(database, batch_size=10, worker="w")
    await connection.execute("alter table tidegate.trigger_idempotency_keys rename to moved")  # as a lost right would
    await clock.advance(HEALTH.reconcile_degraded_ms - 1)
    assert await cause(connection, "reconcile_failing") is None
    await clock.advance(1)
    with pytest.raises(Exception, match="trigger_idempotency_keys"):
        await reconcile.run_once()
    await workers.heartbeat(connection, "w", [], 1, 10_000)  # it lives
    found = await cause(connection, "reconcile_failing")
    assert found and (found.severity, found.subject, found.since) == ("degraded", "workers", began)
    await clock.advance(HEALTH.reconcile_critical_ms)
    await workers.heartbeat(connection, "w", [], 1, 10_000)
    found = await cause(connection, "reconcile_failing")
    assert found and found.severity == "critical"
    off = HealthPolicy(reconcile_degraded_ms=0, reconcile_critical_ms=0)
    assert await cause(connection, "reconcile_failing", off) is None
    await connection.execute("alter table tidegate.moved rename to trigger_idempotency_keys")
    await reconcile.run_once()
    assert await cause(connection, "reconcile_failing") is None


async def test_the_runbook_is_where_the_operator_published_it(database: Database, connection: Connection) -> None:
    await control.pause(database, "one", actor="ann")
    [found] = (await Snapshots(database, HEALTH, "https://wiki.example/tidegate").read()).causes
    assert found.runbook == "https://wiki.example/tidegate#source-paused"


async def test_a_crowd_costs_two_reads_and_nobody_gets_an_old_state(
    database: Database, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0
    read_once, is_reading = health.snapshot, asyncio.Event()

    async def counted(*given: Any) -> health.Snapshot:
        nonlocal reads
        reads += 1
        is_reading.set()
        return await read_once(*given)

    monkeypatch.setattr(health, "snapshot", counted)
    snapshots = Snapshots(database)
    early = asyncio.create_task(snapshots.read())
    await is_reading.wait()
    await control.pause(database, "one", actor="ann")
    crowd = await asyncio.gather(*(snapshots.read() for _ in range(50)))
    await early
    assert reads == 2
    assert {len(found.paused_sources) for found in crowd} == {1}


async def test_scrapers_at_once_share_one_read(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = 0
    read_once = health.shared_state

    async def counted(*given: Any) -> Any:
        nonlocal reads
        reads += 1
        return await read_once(*given)

    monkeypatch.setattr(health, "shared_state", counted)
    monkeypatch.setattr(health, "GAUGES_SECONDS", 3600)
    exposition = Exposition(database)
    texts = await asyncio.gather(*(exposition.text() for _ in range(20)))
    assert reads == 1 and all(b"tidegate_database_up 1.0" in text for text in texts)


async def test_a_very_long_inbox_is_counted_at_its_head_and_estimated_behind(
    connection: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ticks(connection, 30)
    monkeypatch.setattr(store_health, "INBOX_COUNTED", 31)
    assert (await health.snapshot(connection)).queues["ingress"].ready == 30
    for counted in (30, 10, 1):
        monkeypatch.setattr(store_health, "INBOX_COUNTED", counted)
        assert (await health.snapshot(connection)).queues["ingress"].ready == 30
    # Numbers that no event has are taken for events behind the head, and only there.
    await connection.execute(
        "delete from tidegate.event_inbox where ingress_sequence in "
        "(select ingress_sequence from tidegate.event_inbox order by 1 offset 20 limit 5)"
    )
    for counted, expected in ((30, 25), (20, 30), (22, 25)):
        monkeypatch.setattr(store_health, "INBOX_COUNTED", counted)
        assert (await health.snapshot(connection)).queues["ingress"].ready == expected


async def test_unserved(database: Database, connection: Connection, clock: Clock, worker: Worker) -> None:
    await ticks(connection, 1)
    await worker.turn()
    since = clock.now
    await clock.advance(10_000)
    found = await cause(connection, "workflow_unserved")
    assert found and (found.subject, found.since) == ("tick", since)
    assert await gauge(database, "tidegate_unserved_workflows") == 1
    await workers.heartbeat(connection, "w", [await definition(connection)], 1, 10_000)
    assert await cause(connection, "workflow_unserved") is None
    assert await gauge(database, "tidegate_unserved_workflows") == 0


async def test_a_workflow_that_every_worker_leaves_out(connection: Connection, clock: Clock, worker: Worker) -> None:
    """Those that have its code are named; a worker that is gone, or leaves out another workflow, is not."""
    await ticks(connection, 1)
    await worker.turn()
    await workers.heartbeat(connection, "gone", [], 1, 10_000, left_out=["tick"])
    await clock.advance(3_600_000)
    await workers.heartbeat(connection, "vm:1", [], 1, 10_000, left_out=["tick"])
    await workers.heartbeat(connection, "vm:3", [], 1, 10_000, left_out=["other"])
    found = await cause(connection, "workflow_unserved")
    has = "the code of tick and takes other workflows only (--only); due runs: 1. Start a worker that takes it"
    assert found and found.message == f"vm:1 has {has}, or cancel them"
    assert found.do == "start a worker without --only, or one that names it: tidegate worker APP --only tick"
    await workers.heartbeat(connection, "vm:2", [], 1, 10_000, left_out=["tick"])
    found = await cause(connection, "workflow_unserved")
    assert found and found.message.startswith("vm:1, vm:2 have the code of tick and take other workflows only")
    await workers.heartbeat(connection, "vm:3", [await definition(connection)], 1, 10_000)
    assert await cause(connection, "workflow_unserved") is None


async def test_a_forgotten_run_of_a_removed_workflow_is_a_cause_of_its_own(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    """More workers would not help, and nothing that they can run is late."""
    await ticks(connection, 1)
    await worker.turn()
    await clock.advance(86_400_000)
    await workers.heartbeat(connection, "w", [uuid.uuid4()], 1, 10_000)
    found = await health.snapshot(connection)
    assert [(c.code, c.severity, c.subject) for c in found.causes] == [("workflow_unserved", "degraded", "tick")]
    assert found.causes[0].message.endswith("Start a worker that has it, or cancel them")
    assert (found.status, found.queues["runs"].ready, found.queues["runs"].oldest_due_age_seconds) == ("degraded", 1, 0)
    await workers.heartbeat(connection, "w", [await definition(connection)], 1, 10_000)
    late = await cause(connection, "runs_stalled")
    assert late and late.severity == "critical", "now it is they who are late"


async def test_the_worst_cause_comes_first(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await control.pause(database, "noisy", duration_ms=None, actor="ann")
    await ticks(connection, 1, source="quiet")
    await worker.turn()
    await clock.advance(86_400_000)
    severities = [cause.severity for cause in (await health.snapshot(connection)).causes]
    assert severities == sorted(severities) and set(severities) == {"critical", "degraded"}


async def definition(connection: Connection) -> uuid.UUID:
    found: uuid.UUID = await connection.fetchval("select id from tidegate.workflow_definitions where slug = 'tick'")
    return found


@pytest.mark.parametrize(
    ("value", "expected"), [(0, None), (4, None), (5, "degraded"), (9, "degraded"), (10, "critical"), (11, "critical")]
)
def test_severity(value: int, expected: str | None) -> None:
    assert severity(value, 5, 10) == expected
    assert severity(value, 5, 0) == ("degraded" if value >= 5 else None)
    assert severity(value, 0, 0) is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"overdue_ms": 0}, "overdue_ms must be more than 0"),
        ({"overdue_critical": -1}, "must not be negative"),
        ({"overdue_degraded": 2000}, "overdue_critical is 1000, below overdue_degraded, which is 2000"),
    ],
)
def test_thresholds_are_checked(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HealthPolicy(**given)


async def test_runs_that_end_without_a_worker_are_counted(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    def count(status: str) -> float:
        return metrics.REGISTRY.get_sample_value("tidegate_runs_total", {"workflow": "tick", "status": status}) or 0

    cancelled, failed = count("cancelled"), count("failed")
    await ticks(connection, 2)
    await worker.turn()
    first, second = [row["id"] for row in await connection.fetch("select id from tidegate.workflow_runs order by id")]
    await control.cancel_run(database, first, "ann", TRIGGER_BREAKER)
    assert (count("cancelled"), count("failed")) == (cancelled + 1, failed)
    await connection.execute("update tidegate.workflow_runs set crashes = 5, trials = 3 where id = $1", second)
    await Reconcile(database, batch_size=10).run_once()
    assert (count("cancelled"), count("failed")) == (cancelled + 1, failed + 1)


async def test_a_failing_loop_is_counted() -> None:
    def count() -> float:
        return metrics.REGISTRY.get_sample_value("tidegate_loop_failures_total", {"loop": "reconcile"}) or 0

    before, turns = count(), 0

    async def once() -> int:
        nonlocal turns
        turns += 1
        if turns == 1:
            raise OSError("no")
        loop.stop()
        return 0

    loop = Loop("reconcile", once, wait_seconds=0)
    await loop.run()
    assert count() == before + 1


async def test_a_loop_that_is_not_vital_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_LONGEST_PAUSE_SECONDS", 0.001), ("_PAUSE_SECONDS", 0.001), ("MAX_FAILURES_IN_A_ROW", 3)):
        monkeypatch.setattr(f"tidegate.worker.loop.{name}", value)
    turns = 0

    async def once() -> int:
        nonlocal turns
        turns += 1
        if turns > 6:
            loop.stop()
        raise PermissionError("no")

    loop = Loop("prune", once, wait_seconds=0, is_vital=False)
    await loop.run()
    loop = Loop("dispatch", once, wait_seconds=0)
    turns = 0
    with pytest.raises(PermissionError):
        await loop.run()
    assert turns == 3
