"""Events for a later time: stored at once, decided at their time and not before, taken back by id."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.conftest import Clock, _admin
from tests.flow.conftest import APP, eventually
from tests.flow.test_gate import Worker, launched, limit
from tests.flow.trigger_worker import TriggerWorker, held, make_trigger
from tests.processes import worker as worker_process
from tidegate import failpoints
from tidegate.app import Tidegate, checked
from tidegate.clock import uuid7
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.errors import Conflict, InvalidInput, NotFound
from tidegate.flow import control
from tidegate.flow.accept.ingest import Accepted, Ingest
from tidegate.flow.keep.prune import Prune
from tidegate.flow.keep.reconcile import Requeue
from tidegate.flow.look.explain import explain
from tidegate.model.ids import EventId
from tidegate.model.retention import Retention
from tidegate.model.source import RateLimit
from tidegate.queue.port import Wakeup
from tidegate.settings import Settings
from tidegate.store import bulk_retries, health, ingress_retries, sources
from tidegate.store.bulk_retries import IdRange
from tidegate.store.db import Connection, Database
from tidegate.store.retry_rows import RetryFilters
from tidegate.telemetry import metrics

HOUR = 3_600_000
Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]
Publish = Callable[..., Awaitable[Accepted]]


@contextlib.asynccontextmanager
async def publishing(database: Database, clock: Clock) -> AsyncIterator[Publish]:
    ingest = Ingest(database, max_waiting=1000, after_commit=lambda: None)

    async def publish(source: str = "noisy", **fields: Any) -> Accepted:
        given = {"type": "tick", "source": source, "payload": {}} | fields
        if "deliver_at" in given:
            given["deliver_at"] = given["deliver_at"].isoformat()
        return (await ingest.accept([checked(given, Settings(), clock.now)]))[0]

    yield publish
    await ingest.close()


@pytest.fixture
async def publish(database: Database, clock: Clock) -> AsyncIterator[Publish]:
    async with publishing(database, clock) as made:
        yield made


@pytest.fixture
async def worker(database: Database, clock: Clock) -> Worker:
    app = Tidegate()

    @app.workflow(on="tick")
    async def tick(ctx: Any) -> None: ...

    await database.run(app.register)
    return Worker(database)


async def waiting(connection: Connection) -> list[Any]:
    return list(
        await connection.fetch(
            "select * from tidegate.event_ingress_retries where retry_state = 'scheduled' order by next_attempt_at"
        )
    )


async def order(connection: Connection) -> list[str]:
    """The producers' ids of launched events, in the order in which they were launched."""
    rows = await connection.fetch(
        "select e.external_id from tidegate.workflow_trigger_deliveries d "
        "join tidegate.workflow_events e on e.id = d.event_id where d.status = 'launched' "
        "order by d.launched_at, d.ingress_sequence"
    )
    return [row[0] for row in rows]


# Stored at once, decided at its time ---------------------------------------------------------------------------------


async def test_it_is_stored_at_once_and_decided_at_its_time(
    connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    at = clock.now + timedelta(hours=2)
    made = await publish(id="a", deliver_at=at)
    assert made.status == "accepted"
    assert await connection.fetchval("select deliver_at from tidegate.workflow_events") == at
    [row] = await waiting(connection)
    assert (row["reason"], row["attempts"], row["next_attempt_at"]) == ("scheduled", 0, at)
    story = await explain(connection, "a")
    assert [(d.stage, d.decision, d.until) for d in story.decisions] == [
        ("ingest", "accepted", None),
        ("gate", "scheduled", at),
    ]
    assert story.summary == "scheduled for 2026-06-01 14:00:00 UTC: published for a later time"
    await clock.advance(2 * HOUR - 1)
    await worker.turn()
    assert await launched(connection) == []
    await clock.advance(1)
    await worker.turn()
    assert await launched(connection) == [(str(made.id), at)]
    row = await connection.fetchrow("select * from tidegate.event_ingress_retries")
    assert (row["retry_state"], row["attempts"]) == ("completed", 0)  # waiting for its time used no attempt
    story = await explain(connection, "a")
    assert [(d.stage, d.decision) for d in story.decisions[:3]] == [
        ("ingest", "accepted"), ("gate", "scheduled"), ("gate", "allowed"),
    ]  # fmt: skip
    totals = await connection.fetchrow("select * from tidegate.event_scheduler_source_metrics")
    assert (totals["total"], totals["passed"], totals["max_lag_ms"]) == (1, 1, 0)  # its lag is counted from its time


async def test_a_delay_is_counted_by_the_databases_clock(
    connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    await publish(delay_ms=1500)
    await publish(delay_ms=0)
    [row] = await waiting(connection)
    assert row["next_attempt_at"] == clock.now + timedelta(milliseconds=1500)
    await worker.turn()
    assert len(await launched(connection)) == 1
    await clock.advance(1500)
    await worker.turn()
    assert len(await launched(connection)) == 2


async def test_a_time_that_has_passed_means_now(
    connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    await publish(id="late", deliver_at=clock.now - timedelta(days=1), ttl_ms=1000)
    assert await waiting(connection) == []
    assert await connection.fetchval("select count(*) from tidegate.event_inbox") == 1
    await worker.turn()
    assert await order(connection) == ["late"]


async def test_they_are_decided_in_the_order_of_their_times(
    connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    for name, hours in (("third", 3), ("first", 1), ("second", 2)):
        await publish(id=name, deliver_at=clock.now + timedelta(hours=hours))
    await clock.advance(5 * HOUR)
    await worker.turn()
    decided = await connection.fetch(
        "select e.external_id from tidegate.event_decisions d join tidegate.workflow_events e on e.id = d.event_id "
        "where d.decision = 'allowed' order by d.id"
    )
    assert [row[0] for row in decided] == ["first", "second", "third"]


async def test_a_limited_trigger_takes_them_in_the_order_of_their_times(
    database: Database, connection: Connection, clock: Clock, publish: Publish
) -> None:
    await make_trigger(database, throttle_count=1, throttle_window_ms=60_000)
    stages = TriggerWorker(database)
    await publish(id="later", deliver_at=clock.now + timedelta(seconds=2))
    await publish(id="sooner", deliver_at=clock.now + timedelta(seconds=1))
    await publish(id="now")
    for _ in range(3):
        await stages.turn()
        await clock.advance(1000)
    await stages.turn()
    assert len(await held(connection)) == 2
    for _ in range(200):
        await clock.advance(1000)
        await stages.turn()
    assert await order(connection) == ["now", "sooner", "later"]


async def test_a_batch_with_delayed_events_stores_the_others_for_now(
    database: Database, connection: Connection, clock: Clock
) -> None:
    announced: list[str] = []
    ingest = Ingest(
        database, max_waiting=100, after_commit=lambda: announced.append("inbox"),
        after_later=lambda: announced.append("later"),
    )  # fmt: skip
    given = [
        {"type": "tick", "source": "s", "payload": {}, "id": f"{n}"} | ({"delay_ms": 1000} if n % 2 else {})
        for n in range(6)
    ]
    answers = await ingest.accept([checked(one, Settings(), clock.now) for one in given])
    assert [one.status for one in answers] == ["accepted"] * 6
    assert await connection.fetchval("select count(*) from tidegate.event_inbox") == 3
    assert len(await waiting(connection)) == 3
    assert announced == ["inbox", "later"]
    again = await ingest.accept([checked(one, Settings(), clock.now) for one in given])
    assert [(one.status, one.id) for one in again] == [("duplicate", one.id) for one in answers]
    await ingest.close()


async def test_sql_publishes_for_a_later_time_too(connection: Connection, clock: Clock, worker: Worker) -> None:
    call = "select tidegate.publish('tick', 'noisy', '{}', id => $1, delay_ms => $2)"
    first = await connection.fetchval(call, "a", 60_000)
    await clock.advance(1000)
    assert (
        await connection.fetchval(call, "a", 60_000) == first
    )  # the same delay is the same event, whenever it is sent
    with pytest.raises(Exception, match="another body"):
        await connection.fetchval(call, "a", 61_000)
    with pytest.raises(Exception, match="delay_ms: must be a whole number from 0 to 31622400000"):
        await connection.fetchval(call, "b", 367 * 86_400_000)
    with pytest.raises(Exception, match="deliver_at: must lie within"):
        await connection.fetchval(
            "select tidegate.publish('tick', 'noisy', '{}', deliver_at => $1)", clock.now + timedelta(days=367)
        )
    assert (await explain(connection, "a")).summary.startswith("scheduled for 2026-06-01 12:01:00 UTC")
    await clock.advance(58_999)
    await worker.turn()
    assert await order(connection) == []
    await clock.advance(1)
    await worker.turn()
    assert await order(connection) == ["a"]


@pytest.mark.parametrize(
    ("fields", "field", "message"),
    [
        ({"deliver_at": "tomorrow"}, "deliver_at", "RFC 3339"),
        ({"deliver_at": 7}, "deliver_at", "RFC 3339"),
        ({"deliver_at": "2028-01-01T00:00:00Z"}, "deliver_at", "at most 366 day"),
        ({"delay_ms": -1}, "delay_ms", "from 0 to 31622400000"),
        ({"delay_ms": 1.5}, "delay_ms", "from 0 to 31622400000"),
        ({"delay_ms": 2**70}, "delay_ms", "from 0 to 31622400000"),
        ({"delay_ms": 1, "deliver_at": "2026-06-01T13:00:00Z"}, "delay_ms", "cannot be combined"),
    ],
)
def test_an_invalid_time_names_its_field(fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        checked(
            {"type": "tick", "source": "s", "payload": {}} | fields, Settings(), datetime(2026, 6, 1, 12, tzinfo=UTC)
        )
    assert [error.field for error in refused.value.errors] == [field]
    assert re.search(message, refused.value.errors[0].message)


# Pauses, limits, plans -----------------------------------------------------------------------------------------------


async def test_a_lifted_pause_or_a_changed_limit_does_not_pull_it_forward(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    at = clock.now + timedelta(hours=1)
    await publish(id="later", deliver_at=at)
    await control.pause(database, "noisy", until=None, duration_ms=None, reason="maintenance", actor="ops")
    await publish(id="now")
    await worker.turn()
    await limit(database, 1)
    await worker.turn()
    await control.resume(database, "noisy", "ops")
    await limit(database, 1000)
    for _ in range(5):
        await clock.advance(1000)
        await worker.turn()
    assert await order(connection) == ["now"]
    [row] = await waiting(connection)
    assert (row["reason"], row["next_attempt_at"], row["attempts"]) == ("scheduled", at, 0)
    await clock.advance(HOUR)
    await worker.turn()
    assert await order(connection) == ["now", "later"]


async def test_it_takes_no_slot_before_its_time(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    """Newcomers of a limited source do not queue behind events of another day."""
    await limit(database, 10)
    for n in range(50):
        await publish(id=f"later-{n}", deliver_at=clock.now + timedelta(days=1))
    for n in range(10):
        await publish(id=f"now-{n}")
    assert (await worker.turn()).launched == 10
    async with database.connection() as other:
        [one] = await sources.list_page(other, limit=10)
    assert one.waiting == 0


async def test_a_pause_holds_it_when_it_is_due_and_a_resume_lets_it_pass(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    await publish(id="a", delay_ms=HOUR)
    await control.pause(database, "noisy", until=None, duration_ms=None, reason="maintenance", actor="ops")
    assert (await explain(connection, "a")).summary.startswith("scheduled for 2026-06-01 13:00:00 UTC")
    await clock.advance(HOUR)
    await worker.turn()
    [row] = await waiting(connection)
    assert (row["reason"], row["attempts"]) == ("paused", 1)
    story = await explain(connection, "a")
    assert [d.decision for d in story.decisions] == ["accepted", "scheduled", "held"]
    assert story.summary.startswith("held until its source is resumed: paused by ops")
    await control.resume(database, "noisy", "ops")
    for _ in range(3):
        await worker.turn()
        await clock.advance(100)
    assert await order(connection) == ["a"]


async def test_many_at_one_time_are_paced_by_the_limit_in_order(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    await limit(database, 10)
    at = clock.now + timedelta(hours=1)
    names = [f"{n:02}" for n in range(30)]
    for name in names:
        await publish(id=name, deliver_at=at)
    await clock.advance(HOUR)
    await worker.turn()
    assert len(await order(connection)) == 10
    await publish(id="newcomer")
    for _ in range(400):
        await clock.advance(20)
        await worker.turn()
    assert await order(connection) == [*names, "newcomer"]
    times = [time for _, time in await launched(connection)]
    for time in times:
        assert sum(time - timedelta(seconds=1) < other <= time for other in times) <= 10
    assert await connection.fetchval("select max(attempts) from tidegate.event_ingress_retries") <= 2


async def test_one_that_is_due_stands_behind_those_that_already_wait(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    await limit(database, 1, interval_ms=10_000)
    await publish(id="delayed", delay_ms=5_000)
    for name in ("a", "b", "c"):
        await publish(id=name)
    for _ in range(60):
        await worker.turn()
        await clock.advance(1000)
    assert await order(connection) == ["a", "b", "c", "delayed"]


async def test_its_time_to_live_and_its_age_are_counted_from_its_time(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    await publish(id="in time", delay_ms=10 * HOUR, ttl_ms=1000)
    await publish(id="expires", delay_ms=10 * HOUR, ttl_ms=1000, source="paused")
    await control.pause(database, "paused", until=None, duration_ms=None, reason=None, actor="ops")
    await clock.advance(10 * HOUR + 500)
    await worker.turn()
    assert await order(connection) == ["in time"]
    await clock.advance(1000)
    await control.resume(database, "paused", "ops")
    for _ in range(3):
        await worker.turn()
        await clock.advance(100)
    assert (await explain(connection, "expires")).decisions[-1].decision == "expired"
    await publish(id="too late", delay_ms=HOUR, ttl_ms=1000)
    await clock.advance(2 * HOUR)
    await worker.turn()
    assert (await explain(connection, "too late")).decisions[-1].decision == "expired"


# Taken back, repeated, forced ----------------------------------------------------------------------------------------


async def test_it_can_be_taken_back_until_it_is_decided(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    gone, kept, inboxed = (
        await publish(id="gone", delay_ms=1000),
        await publish(id="kept", delay_ms=1000),
        await publish(),
    )
    await control.cancel_event(database, gone.id, "ops")
    with pytest.raises(Conflict, match="is no longer waiting: it was cancelled by"):
        await control.cancel_event(database, gone.id, "ops")
    with pytest.raises(Conflict, match="does not wait: it has been decided, or will be at once"):
        await control.cancel_event(database, inboxed.id, "ops")
    await clock.advance(1000)
    await worker.turn()
    assert [event_id for event_id, _ in await launched(connection)] == [str(inboxed.id), str(kept.id)]
    with pytest.raises(Conflict, match="is no longer waiting: its time came at"):
        await control.cancel_event(database, kept.id, "ops")
    assert (await explain(connection, "gone")).decisions[-1].decision == "cancelled"
    [line] = await connection.fetch("select action, subject from tidegate.audit_log")
    assert tuple(line) == ("event.cancel", str(gone.id))
    again = await publish(id="gone", delay_ms=1000)  # taken back is not forgotten
    assert (again.status, again.id) == ("duplicate", gone.id)


async def test_taking_back_and_deciding_race_and_one_wins(
    database: Database, connection: Connection, clock: Clock, publish: Publish
) -> None:
    app = Tidegate()

    @app.workflow(on="tick")
    async def tick(ctx: Any) -> None: ...

    await database.run(app.register)
    for n in range(10):
        made = await publish(id=f"{n}", delay_ms=1000)
        await clock.advance(1000)
        stages = [Worker(database) for _ in range(3)]
        cancel = control.cancel_event(database, made.id, "ops")
        outcomes = await asyncio.gather(cancel, *(one.retry.run_once() for one in stages), return_exceptions=True)
        is_cancelled = not isinstance(outcomes[0], Conflict)
        runs = await connection.fetchval("select count(*) from tidegate.workflow_runs where event_id = $1", made.id)
        assert runs == (0 if is_cancelled else 1)


async def test_an_id_is_one_event_whatever_its_time(
    connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    at = clock.now + timedelta(hours=1)
    first = await publish(id="a", deliver_at=at)
    again = await publish(id="a", deliver_at=at)
    assert (again.status, again.id) == ("duplicate", first.id)
    for other in ({"deliver_at": at + timedelta(seconds=1)}, {"delay_ms": 7}, {}):
        with pytest.raises(Conflict):
            await publish(id="a", **other)
    delayed = await publish(id="b", delay_ms=HOUR)
    await clock.advance(60_000)
    repeated = await publish(id="b", delay_ms=HOUR)  # sent again by a client that saw no answer: the first time holds
    assert (repeated.status, repeated.id) == ("duplicate", delayed.id)
    assert len(await waiting(connection)) == 2
    await clock.advance(2 * HOUR)
    await worker.turn()
    assert await order(connection) == ["a", "b"]
    assert (await publish(id="b", delay_ms=HOUR)).status == "duplicate"


async def test_forcing_is_for_those_who_name_it(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    """An operator who forces what a limit or a pause holds does not mean events of another day."""
    one = await publish(id="one", delay_ms=HOUR)
    await publish(id="two", delay_ms=HOUR)
    await control.pause(database, "noisy", until=None, duration_ms=None, reason=None, actor="ops")
    await publish(id="held")
    await worker.turn()
    everything, named = RetryFilters(source="noisy"), RetryFilters(reason="scheduled")
    assert await control.preview_retries(database, "events", everything) == 1
    assert await control.preview_retries(database, "events", named) == 2
    found = await bulk_retries.match(connection, "events", named, IdRange(), 10)
    assert len(found) == 2
    await control.resume(database, "noisy", "ops")
    for _ in range(3):
        await worker.turn()
        await clock.advance(100)
    assert await order(connection) == ["held"]
    await control.change_retry(database, "events", EventId(one.id), "force", "ops")
    await worker.turn()
    assert await order(connection) == ["held", "one"]


async def test_it_is_shown_with_its_reason(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    made = await publish(id="a", delay_ms=HOUR)
    await control.pause(database, "noisy", until=None, duration_ms=None, reason=None, actor="ops")
    [row] = await ingress_retries.list_waiting(connection, reason="scheduled", limit=10)
    assert (row.event_id, row.reason, row.eta_seconds) == (made.id, "scheduled", 3600)
    groups, _ = await health.waiting(connection, clock.now, clock.now, ["noisy"])
    assert [(g.kind, g.reason, g.is_held, g.total, g.due) for g in groups] == [("events", "scheduled", False, 1, 0)]


async def test_history_that_is_dropped_leaves_it(
    database: Database, connection: Connection, clock: Clock, publish: Publish
) -> None:
    """Scheduled 60 days ahead, with 30 days of retention."""
    await clock.advance((datetime.now(UTC) - clock.now).total_seconds() * 1000)
    app = Tidegate()

    @app.workflow(on="tick")
    async def tick(ctx: Any) -> None: ...

    await database.run(app.register)
    await publish(id="later", deliver_at=clock.now + timedelta(days=60))
    await publish(id="old")
    worker = Worker(database)
    await worker.turn()
    await connection.execute(
        "update tidegate.workflow_runs set status = 'succeeded', finished_at = tidegate.now(), next_attempt_at = null"
    )
    prune = Prune(database, Retention(events_seconds=30 * 86_400))
    for _ in range(59):
        await clock.advance(24 * HOUR)
    for _ in range(20):
        await prune.run_once()
    left = await connection.fetch("select external_id from tidegate.workflow_events")
    assert [row[0] for row in left] == ["later"]
    assert (
        await publish(id="later", deliver_at=(await waiting(connection))[0]["next_attempt_at"])
    ).status == "duplicate"
    await clock.advance(24 * HOUR)
    await worker.turn()
    for _ in range(20):
        await prune.run_once()
    assert await order(connection) == ["later"]


# Several workers, kills, the queue -----------------------------------------------------------------------------------


async def test_many_workers_decide_each_once(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    await limit(database, 1000)
    for n in range(60):
        await publish(id=f"{n:02}", delay_ms=1000 * (1 + n % 7), source=("noisy", "free", "other")[n % 3])
    stages = [Worker(database) for _ in range(5)]
    for _ in range(8):
        await clock.advance(1000)
        await asyncio.gather(*(one.turn() for one in stages))
    assert len(await order(connection)) == 60
    early = "select count(*) from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id"
    assert await connection.fetchval(f"{early} where r.created_at < e.deliver_at") == 0


@pytest.mark.parametrize("point", ["arrival.before_commit=kill", "arrival.after_commit=kill"])
async def test_a_worker_killed_at_its_time_loses_and_repeats_nothing(
    database_url: str, database: Database, connection: Connection, clock: Clock, effects: Effects, point: str
) -> None:
    await connection.execute("select tidegate.publish('work.quick', 'noisy', '{\"n\": 1}', delay_ms => 60000)")
    with worker_process(database_url, APP, TIDEGATE_FAILPOINTS=point, TIDEGATE_POLL_MS="50") as process:
        process.wait_for_line("worker.started")
        assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 0
        await clock.advance(60_000)
        assert process.wait() == 137
    assert await effects() == []
    await clock.advance(60_000)  # the dead worker's lease has ended
    with worker_process(database_url, APP, TIDEGATE_POLL_MS="50"):
        await eventually(database, "select count(*) = 1 from tidegate.workflow_runs where status = 'succeeded'")
    assert [what for _, what in await effects()] == ["quick"]


async def test_what_is_not_committed_did_not_happen(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    await publish(id="a", delay_ms=1000)
    await clock.advance(1000)
    failpoints.arm("arrival.before_commit=raise")
    await worker.retry.run_once()  # the batch fails, and the event is decided by itself
    assert await order(connection) == ["a"]


async def test_an_event_that_no_batch_can_process_becomes_a_dead_letter_and_the_others_pass(
    database: Database, connection: Connection, clock: Clock, worker: Worker, publish: Publish
) -> None:
    bad = await publish(id="bad", delay_ms=1000)
    await publish(id="good", delay_ms=1000)
    await clock.advance(1000)

    async def fails(*given: Any) -> Any:
        if any(event.id == bad.id for event in given[2]):
            raise RuntimeError("cannot be read")
        return await deliver(*given)

    arrivals = worker.retry._arrivals
    deliver, arrivals._batch.deliver = arrivals._batch.deliver, fails  # type: ignore[method-assign]
    assert (await worker.retry.run_once()).due == 2
    assert await order(connection) == ["good"]
    [letter] = await connection.fetch("select kind, subject_id, reason from tidegate.dead_letters")
    assert tuple(letter) == ("event", bad.id, "RuntimeError: cannot be read")


class RecordingQueue:
    """A queue that lost everything and records what it is given."""

    holds_wakeups = True

    def __init__(self) -> None:
        self.sent: list[str] = []

    async def missing(self, wakeups: list[Wakeup]) -> list[Wakeup]:
        return [one for one in wakeups if one.job_id not in self.sent]

    def schedule(self, wakeups: list[Wakeup]) -> None:
        self.sent += [one.job_id for one in wakeups]


async def test_the_queue_gets_its_wakeup_within_the_hour_and_counts_none_as_lost(
    database: Database, connection: Connection, clock: Clock, publish: Publish
) -> None:
    soon, later = await publish(delay_ms=HOUR // 2), await publish(delay_ms=3 * HOUR)
    await clock.advance(5000)
    queue = RecordingQueue()
    requeue = Requeue(database, queue, batch_size=100)  # type: ignore[arg-type]
    before = metrics.RECONCILE_REQUEUED.labels("events")._value.get()
    assert await requeue.run_once() == 0
    assert queue.sent == [f"event-retry:{soon.id}:0"]
    await clock.advance(2.5 * HOUR)
    assert await requeue.run_once() == 0
    assert queue.sent[1:] == [f"event-retry:{later.id}:0"]
    assert metrics.RECONCILE_REQUEUED.labels("events")._value.get() == before


# Any order of everything ---------------------------------------------------------------------------------------------

ACTS = st.one_of(
    st.tuples(st.just("publish"), st.integers(0, 5000)),
    st.tuples(st.just("advance"), st.integers(0, 2500)),
    st.tuples(st.just("turn"), st.integers(1, 3)),
    st.tuples(st.just("pause"), st.integers(0, 3000)),
    st.tuples(st.just("resume"), st.just(0)),
    st.tuples(st.just("limit"), st.integers(1, 5)),
    st.tuples(st.just("cancel"), st.integers(0, 50)),
    st.tuples(st.just("crash"), st.just(0)),
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), phases=set(Phase) - {Phase.shrink})
@given(acts=st.lists(ACTS, min_size=5, max_size=30))
def test_none_is_decided_before_its_time_or_lost(postgres: EmbeddedPostgres, template: str, acts: list[Any]) -> None:
    asyncio.run(_any_order(postgres, template, acts))


async def _any_order(postgres: EmbeddedPostgres, template: str, acts: list[Any]) -> None:
    name = f"later_{uuid7().hex}"
    await _admin(postgres.admin_url(), f"create database {name} template {template} owner {ROLE}")
    database = Database(postgres.url(name), "test", size=6)
    clock = Clock(database)
    try:
        await clock.install()
        await _machine(database, clock, acts)
    finally:
        await database.close()
        await _admin(postgres.admin_url(), f"drop database {name} with (force)")


async def _machine(database: Database, clock: Clock, acts: list[Any]) -> None:
    app = Tidegate()

    @app.workflow(on="tick")
    async def tick(ctx: Any) -> None: ...

    await database.run(app.register)
    made: list[Accepted] = []
    cancelled: set[EventId] = set()
    async with publishing(database, clock) as publish:
        for act, value in acts:
            if act == "publish":
                made.append(await publish(id=f"{len(made)}", delay_ms=value))
            elif act == "advance":
                await clock.advance(value)
            elif act == "turn":
                await asyncio.gather(*(Worker(database).turn() for _ in range(value)))
            elif act == "pause":
                await control.pause(database, "noisy", until=None, duration_ms=value or None, reason=None, actor="ops")
            elif act == "resume":
                with contextlib.suppress(Conflict, NotFound):
                    await control.resume(database, "noisy", "ops")
            elif act == "limit":
                one = RateLimit(limit=value, interval_ms=1000, pause_ms=0)
                await control.set_limit(database, "noisy", one, "ops")
            elif act == "cancel" and made:
                with contextlib.suppress(Conflict):
                    chosen = made[value % len(made)].id
                    await control.cancel_event(database, chosen, "ops")
                    cancelled.add(chosen)
            elif act == "crash":
                failpoints.arm("arrival.before_commit=raise,retry.before_commit=raise")
                await Worker(database).turn()
                failpoints.disarm()
    with contextlib.suppress(Conflict, NotFound):
        await control.resume(database, "noisy", "ops")
    worker = Worker(database)
    for _ in range(60):
        await clock.advance(1000)
        await worker.turn()
    async with database.connection() as connection:
        rows = await connection.fetch(
            "select e.id, e.deliver_at, array_agg(r.created_at) filter (where r.id is not null) as runs "
            "from tidegate.workflow_events e left join tidegate.workflow_runs r on r.event_id = e.id group by e.id, 2"
        )
    assert {row["id"] for row in rows} == {one.id for one in made}
    for row in rows:
        runs = row["runs"] or []
        assert len(runs) == (0 if row["id"] in cancelled else 1), row
        assert all(at >= row["deliver_at"] for at in runs)
