"""The source gate on a real database with a moved clock: limits, pauses, breaker, drain, cancel, exhaustion."""

from __future__ import annotations

import itertools
import uuid
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.test_dispatch import publish
from tidegate.app import Tidegate
from tidegate.errors import Conflict, InvalidInput, NotFound
from tidegate.flow import control
from tidegate.flow.decide.dispatch import Dispatch, DispatchCounts
from tidegate.flow.hold.event_plan import EventPlans, EventReplan
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.flow.look.explain import explain
from tidegate.model.retry import RetryPolicy
from tidegate.model.source import Breaker, RateLimit, SourceBreakerPolicy
from tidegate.store import locks, sources
from tidegate.store.db import Connection, Database

POLICY = RetryPolicy(base_ms=100, factor=2, max_ms=1000, jitter_ratio=0, max_attempts=3, max_age_ms=3_600_000)
BREAKER = SourceBreakerPolicy(threshold=3, window_ms=60_000, pause_ms=10_000)


class Worker:
    """The stages of one worker, turned by hand."""

    def __init__(self, database: Database, retry: RetryPolicy = POLICY) -> None:
        self.dispatch = Dispatch(database, batch_size=500, after_launch=lambda: None, breaker=BREAKER)
        self.retry = EventRetry(database, batch_size=500, after_launch=lambda: None, breaker=BREAKER)
        self.replan = EventReplan(database, EventPlans(retry))

    async def turn(self) -> DispatchCounts:
        """One look at everything."""
        outcome = await self.dispatch.run_once()
        await self.replan.run_once()
        await self.retry.run_once()
        return outcome


@pytest.fixture
async def worker(database: Database, clock: Clock) -> Worker:
    app = Tidegate()

    @app.workflow(on="tick")
    async def tick(ctx: Any) -> None: ...

    # Its own breaker stays out of the way: these tests are about the source's.
    @app.workflow(on="bad", params={"x": "{{ event.payload.missing }}"}, breaker=Breaker(threshold=10_000))
    async def bad(ctx: Any, x: int) -> None: ...

    await database.run(app.register)
    return Worker(database)


async def ticks(connection: Connection, count: int, source: str = "noisy") -> list[str]:
    return [await publish(connection, "tick", source, n=n) for n in range(count)]


async def launched(connection: Connection) -> list[tuple[str, datetime]]:
    """Event ids and launch times, in order of launch, then arrival."""
    rows = await connection.fetch(
        "select d.event_id::text, d.launched_at from tidegate.workflow_trigger_deliveries d "
        "join tidegate.workflow_events e on e.id = d.event_id where d.status = 'launched' "
        "order by d.launched_at, e.ingress_sequence"
    )
    return [(row[0], row[1]) for row in rows]


async def states(connection: Connection) -> dict[str, int]:
    rows = await connection.fetch("select retry_state, count(*) from tidegate.event_ingress_retries group by 1")
    return {row[0]: row[1] for row in rows}


async def limit(
    database: Database, limit: int, interval_ms: int = 1000, pause_ms: int = 0, source: str = "noisy"
) -> None:
    await control.set_limit(
        database, source, RateLimit(limit=limit, interval_ms=interval_ms, pause_ms=pause_ms), "test"
    )


async def test_over_the_limit_is_held_with_its_slot_and_reason(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 10)
    await worker.turn()
    ids = await ticks(connection, 15)
    assert await worker.turn() == DispatchCounts(events=15, launched=10, held=5)
    rows = await connection.fetch("select * from tidegate.event_ingress_retries order by next_attempt_at")
    assert [str(row["event_id"]) for row in rows] == ids[10:]
    assert {(row["retry_state"], row["attempts"], row["reason"], row["source"]) for row in rows} == {
        ("scheduled", 1, "rate_limit", "noisy")
    }
    assert rows[0]["last_error"] == "over the limit of 10/s"
    assert rows[0]["next_attempt_at"] > clock.now + timedelta(milliseconds=999)
    gaps = [b["next_attempt_at"] - a["next_attempt_at"] for a, b in itertools.pairwise(rows)]
    assert min(gaps) >= timedelta(milliseconds=100)
    story = await explain(connection, ids[12])
    assert [(d.stage, d.decision) for d in story.decisions] == [("ingest", "accepted"), ("gate", "held")]
    assert story.summary.startswith("held until 2026-06-01 12:00:01 UTC: over the limit of 10")


async def test_a_backlog_drains_in_order_at_the_allowed_rate(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 100)
    ids = await ticks(connection, 300)
    await worker.turn()
    start = clock.now
    for _ in range(200):
        await clock.advance(20)
        await worker.turn()
        if await states(connection) == {"completed": 200}:
            break
    done = await launched(connection)
    assert [event_id for event_id, _ in done] == ids
    took = (done[-1][1] - start).total_seconds()
    assert took <= 1.1 * 3
    times = [at for _, at in done]
    for at in times:
        assert sum(at - timedelta(seconds=1) < t <= at for t in times) <= 100
    attempts = await connection.fetchval("select avg(attempts) from tidegate.event_ingress_retries")
    assert attempts <= 1.2


async def test_newcomers_wait_behind_the_backlog_and_other_sources_pass(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 10)
    first = await ticks(connection, 30)
    await worker.turn()
    await clock.advance(1500)
    later = await ticks(connection, 5)
    other = await ticks(connection, 5, source="quiet")
    outcome = await worker.dispatch.run_once()
    assert (outcome.launched, outcome.held) == (5, 5)
    assert {event_id for event_id, _ in await launched(connection)} == {*first[:10], *other}
    for _ in range(200):
        await clock.advance(50)
        await worker.turn()
    order = [event_id for event_id, _ in await launched(connection) if event_id not in other]
    assert order == first + later


async def test_after_the_backlog_newcomers_pass_at_once(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 10)
    await ticks(connection, 12)
    await worker.turn()
    for _ in range(40):
        await clock.advance(50)
        await worker.turn()
    await clock.advance(5000)
    await ticks(connection, 10)
    assert (await worker.turn()).launched == 10


async def test_the_pause_after_an_exceeded_limit(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 10, interval_ms=100, pause_ms=5000)
    await ticks(connection, 20)
    await worker.turn()
    await clock.advance(4900)
    await worker.turn()
    assert len(await launched(connection)) == 10
    for _ in range(110):
        await clock.advance(50)
        await worker.turn()
    assert len(await launched(connection)) == 20


async def test_the_default_limit_counts_for_each_source_without_its_own(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 2, source="*")
    await limit(database, 5, source="own")
    for source in ("one", "two", "own"):
        await ticks(connection, 6, source=source)
    await worker.turn()
    rows = await connection.fetch(
        "select e.source, count(*) from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id "
        "group by 1 order by 1"
    )
    assert [tuple(row) for row in rows] == [("one", 2), ("own", 5), ("two", 2)]


async def test_a_pause_holds_and_an_early_resume_plans_anew(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    paused = await control.pause(database, "noisy", duration_ms=3_600_000, reason="maintenance", actor="ann")
    assert paused.paused_until == clock.now + timedelta(hours=1)
    ids = await ticks(connection, 5)
    assert (await worker.turn()).held == 5
    row = await connection.fetchrow("select * from tidegate.event_ingress_retries limit 1")
    assert row is not None and row["reason"] == "paused" and row["last_error"] == "paused by ann: maintenance"
    assert row["next_attempt_at"] == clock.now + timedelta(hours=1)
    await clock.advance(60_000)
    await worker.turn()
    assert await launched(connection) == []
    await control.resume(database, "noisy", "ann")
    await worker.turn()
    await worker.turn()
    assert [event_id for event_id, _ in await launched(connection)] == ids
    assert await connection.fetchval("select max(attempts) from tidegate.event_ingress_retries") == 1


async def test_a_pause_without_an_end_lasts_until_resumed(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await control.pause(database, "noisy", actor="ann")
    await ticks(connection, 3)
    await worker.turn()
    for _ in range(3):
        await clock.advance(86_400_001)
        await worker.turn()
        await worker.turn()
    assert await launched(connection) == []
    assert await states(connection) == {"scheduled": 3}
    await control.resume(database, "noisy", "ann")
    await worker.turn()
    await worker.turn()
    assert len(await launched(connection)) == 3


async def test_a_pause_longer_than_the_maximum_age_gives_nobody_up(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 1)
    await control.pause(database, "noisy", actor="ann")
    ids = await ticks(connection, 3)
    await worker.turn()
    await clock.advance(10 * 86_400_000)  # no worker looked; the slots of the open pause have long come
    await control.resume(database, "noisy", "ann")
    for _ in range(100):
        await worker.turn()
        await clock.advance(50)
    assert [event_id for event_id, _ in await launched(connection)] == ids
    assert await states(connection) == {"completed": 3}


async def test_a_pause_during_a_drain_moves_everyone_behind_it_in_order(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 10)
    ids = await ticks(connection, 40)
    await worker.turn()
    await clock.advance(1500)
    await worker.turn()
    before = len(await launched(connection))
    await control.pause(database, "noisy", duration_ms=2000, actor="ann")
    late = await ticks(connection, 5)
    for _ in range(39):
        await clock.advance(50)
        await worker.turn()
    assert len(await launched(connection)) == before
    for _ in range(120):
        await clock.advance(50)
        await worker.turn()
    assert [event_id for event_id, _ in await launched(connection)] == ids + late


async def test_raising_the_limit_speeds_up_who_waits_already(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 1, interval_ms=60_000)
    ids = await ticks(connection, 100)
    await worker.turn()
    await limit(database, 1000)
    for _ in range(10):
        await clock.advance(100)
        await worker.turn()
    assert [event_id for event_id, _ in await launched(connection)] == ids


async def test_a_late_worker_does_not_bunch_over_the_limit(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 10)
    ids = await ticks(connection, 60)
    await worker.turn()
    await clock.advance(4000)  # nobody was here for four seconds
    for _ in range(400):
        await worker.turn()
        await clock.advance(20)
    times = [at for _, at in await launched(connection)]
    assert len(times) == 60 and [e for e, _ in await launched(connection)] == ids
    for at in times:
        assert sum(at - timedelta(seconds=1) < t <= at for t in times) <= 10


async def test_the_breaker_opens_holds_probes_and_closes(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    for _ in range(3):
        await publish(connection, "bad", "noisy")
    await worker.turn()
    row = await connection.fetchrow("select * from tidegate.event_scheduler_sources where source = 'noisy'")
    assert row is not None and row["breaker_state"] == "open" and row["breaker_reason"] == "3 failures within 1m"
    good = await ticks(connection, 4)
    assert (await worker.turn()).held == 4
    await clock.advance(9_000)
    await worker.turn()
    assert await launched(connection) == []
    await clock.advance(1_001)
    await worker.retry.run_once()
    assert len(await launched(connection)) == 1  # the probe, alone
    for _ in range(3):
        await worker.turn()
    assert [event_id for event_id, _ in await launched(connection)] == good
    assert await connection.fetchval("select breaker_state from tidegate.event_scheduler_sources") == "closed"


async def test_a_failed_probe_opens_the_breaker_again(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    for _ in range(3):
        await publish(connection, "bad", "noisy")
    await worker.turn()
    for _ in range(2):
        await publish(connection, "bad", "noisy")
    good = await ticks(connection, 2)
    await worker.turn()
    await clock.advance(10_001)
    for _ in range(5):
        await worker.turn()
    assert await launched(connection) == []
    assert await connection.fetchval("select breaker_state from tidegate.event_scheduler_sources") == "open"
    await clock.advance(10_001)
    for _ in range(4):
        await worker.turn()
    assert [event_id for event_id, _ in await launched(connection)] == good


async def test_cancelled_is_never_launched(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 1)
    ids = await ticks(connection, 3)
    await worker.turn()
    await control.change_retry(database, "events", uuid.UUID(ids[1]), "cancel", "ann")
    with pytest.raises(Conflict, match="it was cancelled by"):
        await control.change_retry(database, "events", uuid.UUID(ids[1]), "cancel", "ann")
    with pytest.raises(NotFound):
        await control.change_retry(database, "events", uuid.UUID(ids[0]), "cancel", "ann")
    for _ in range(100):
        await clock.advance(50)
        await worker.turn()
    assert [event_id for event_id, _ in await launched(connection)] == [ids[0], ids[2]]
    with pytest.raises(Conflict, match="its time came at"):
        await control.change_retry(database, "events", uuid.UUID(ids[2]), "cancel", "ann")
    story = await explain(connection, ids[1])
    assert story.decisions[-1].decision == "cancelled"


async def test_a_pause_without_an_end_is_explained_without_a_time(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await control.pause(database, "noisy", reason="stocktaking", actor="ann")
    (event_id,) = await ticks(connection, 1)
    await worker.turn()
    story = await explain(connection, event_id)
    assert story.summary == "held until its source is resumed: paused by ann: stocktaking"
    assert (story.decisions[-1].decision, story.decisions[-1].waits_for) == ("held", "its source to be resumed")
    await control.pause(database, "noisy", duration_ms=60_000, reason="stocktaking", actor="ann")
    await worker.turn()
    story = await explain(connection, event_id)
    assert story.summary == "held until 2026-06-01 12:01:00 UTC: paused by ann: stocktaking"
    held = story.decisions[-1]
    told = (held.waits_for, f"{held.until:%H:%M}")
    assert told == ("the end of its source's pause", "12:01"), "of the pause as it is now"


async def test_too_many_refused_attempts_are_given_up_as_a_dead_letter(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 1, interval_ms=60_000)
    _, event_id = await ticks(connection, 2)
    await worker.turn()
    for _ in range(3):  # attempts 1, 2, 3 are refused
        await connection.execute("update tidegate.event_ingress_retries set next_attempt_at = tidegate.now()")
        await worker.retry.run_once()
        await worker.replan.run_once()
    assert await states(connection) == {"exhausted": 1}
    letter = await connection.fetchrow("select kind, subject_id::text, reason from tidegate.dead_letters")
    assert letter is not None and tuple(letter)[:2] == ("event", event_id)
    assert letter["reason"] == "retries exhausted (3 attempts): waiting in line for the rate limit"


async def test_refused_retries_count_their_attempts(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 1, interval_ms=60_000)
    ids = await ticks(connection, 2)
    await worker.turn()
    await connection.execute("update tidegate.event_ingress_retries set next_attempt_at = tidegate.now()")
    await worker.retry.run_once()
    await worker.replan.run_once()
    row = await connection.fetchrow("select attempts, retry_state, next_attempt_at from tidegate.event_ingress_retries")
    assert row is not None and (row["attempts"], row["retry_state"]) == (2, "scheduled")
    assert row["next_attempt_at"] >= clock.now + timedelta(seconds=60)
    assert [event_id for event_id, _ in await launched(connection)] == ids[:1]


async def test_ttl_over_is_expired_and_recorded(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    await limit(database, 1)
    sql = "select tidegate.publish('tick', 'noisy', ttl_ms => 500)"
    kept, held = await connection.fetchval(sql), await connection.fetchval(sql)
    await worker.turn()
    late = await connection.fetchval(sql)
    await clock.advance(600)
    assert (await worker.turn()).expired == 1
    for _ in range(40):
        await clock.advance(50)
        await worker.turn()
    assert [event_id for event_id, _ in await launched(connection)] == [kept]
    rows = await connection.fetch("select event_id::text, retry_state, reason from tidegate.event_ingress_retries")
    assert {tuple(row) for row in rows} == {(held, "exhausted", "expired"), (late, "exhausted", "expired")}


async def test_seeded_limits_give_way_to_an_operators(database: Database, connection: Connection, clock: Clock) -> None:
    seeds = {"noisy": RateLimit(limit=5, interval_ms=1000), "*": RateLimit(limit=50, interval_ms=1000)}
    assert await control.seed_limits(database, seeds) == ["*", "noisy"]
    assert await control.seed_limits(database, seeds) == []
    await limit(database, 7)
    assert await control.seed_limits(database, {"noisy": RateLimit(limit=9, interval_ms=1000)}) == []
    assert await connection.fetchval(
        "select rate_limit from tidegate.event_scheduler_sources where source = 'noisy'"
    ) == 7  # fmt: skip


async def test_limits_that_are_seeded_already_keep_nobody_from_starting(
    database: Database, connection: Connection, clock: Clock
) -> None:
    """The lock that changing them takes may be held for long; a process that starts again does not need it."""
    seeds = {"noisy": RateLimit(limit=5, interval_ms=1000), "*": RateLimit(limit=50, interval_ms=1000)}
    await control.seed_limits(database, seeds)
    async with database.transaction() as other:
        await locks.share(other, ["noisy"])
        assert await control.seed_limits(database, seeds) == []
        assert await control.seed_limits(database, {}) == []


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda db, now: control.pause(db, "noisy", until=now - timedelta(seconds=1), actor="a"), "until"),
        (lambda db, now: control.pause(db, "noisy", until=now, duration_ms=5, actor="a"), "until"),
        (lambda db, now: control.pause(db, "noisy", duration_ms=0, actor="a"), "duration_ms"),
        (lambda db, now: control.pause(db, "a b", actor="a"), "source"),
        (lambda db, now: control.pause(db, "*", actor="a"), "source"),
    ],
)
async def test_wrong_pauses_change_nothing(
    database: Database, connection: Connection, clock: Clock, call: Any, field: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        await call(database, clock.now)
    assert refused.value.errors[0].field == field
    assert await connection.fetchval("select count(*) from tidegate.event_scheduler_sources") == 0
    assert await connection.fetchval("select count(*) from tidegate.audit_log") == 0


async def test_resuming_an_unknown_source_is_not_found(database: Database, clock: Clock) -> None:
    with pytest.raises(NotFound, match="no source 'nobody': it has no limit"):
        await control.resume(database, "nobody", "ann")


async def test_every_change_is_audited(database: Database, connection: Connection, clock: Clock) -> None:
    await limit(database, 5)
    await control.pause(database, "noisy", reason="x", actor="ann")
    await control.resume(database, "noisy", "bob")
    rows = await connection.fetch("select actor, action, subject, before, after from tidegate.audit_log order by id")
    assert [tuple(row)[:3] for row in rows] == [
        ("test", "source.limit", "noisy"),
        ("ann", "source.pause", "noisy"),
        ("bob", "source.resume", "noisy"),
    ]
    assert rows[1]["before"]["is_paused"] is False and rows[1]["after"]["is_paused"] is True


async def test_metrics_add_up(database: Database, connection: Connection, clock: Clock, worker: Worker) -> None:
    await limit(database, 2)
    await ticks(connection, 3)
    await publish(connection, "bad", "noisy")
    await worker.turn()
    for _ in range(80):
        await clock.advance(50)
        await worker.turn()
    row = await connection.fetchrow("select * from tidegate.event_scheduler_source_metrics where source = 'noisy'")
    assert row is not None
    assert (row["total"], row["passed"], row["throttled"], row["dropped"]) == (4, 4, 2, 0)
    assert row["max_lag_ms"] >= 1000


# The policy of event retries ------------------------------------------------------------------------------------------


async def refused(database: Database, connection: Connection, clock: Clock, attempts: int, **policy: Any) -> float:
    """How many seconds an event waits whose slot has come, with so many attempts, and for which there is no room."""
    worker = Worker(database, retry=RetryPolicy(**{"jitter_ratio": 0, "max_age_ms": 0} | policy))
    await control.set_limit(database, "noisy", RateLimit(limit=1, interval_ms=60_000), "test")
    await ticks(connection, 2)
    await worker.turn()
    await connection.execute(
        "update tidegate.event_ingress_retries set attempts = $1, next_attempt_at = $2 where retry_state = 'scheduled'",
        attempts,
        clock.now,
    )
    for _ in range(2):  # it is refused, and gets a new slot
        await worker.turn()
    [row] = await connection.fetch(
        "select retry_state, next_attempt_at from tidegate.event_ingress_retries where retry_state <> 'completed'"
    )
    return -1 if row["retry_state"] == "exhausted" else (row["next_attempt_at"] - clock.now).total_seconds()


@pytest.mark.parametrize(
    ("attempts", "policy", "expected"),
    [
        (1, {"base_ms": 600_000, "max_ms": 6_000_000}, 60.9),  # a slot that fails once is followed by the next slot
        (2, {"base_ms": 600_000, "max_ms": 6_000_000}, 600),
        (2, {"base_ms": 900_000, "max_ms": 6_000_000}, 900),
        (2, {"base_ms": 5000}, 60.9),  # never before there is room
        (4, {"base_ms": 600_000, "max_ms": 6_000_000, "factor": 2}, 2400),
        (4, {"base_ms": 600_000, "max_ms": 6_000_000, "factor": 3}, 5400),
        (4, {"base_ms": 600_000, "max_ms": 1_000_000, "factor": 3}, 1000),
        (4, {"base_ms": 600_000, "max_ms": 1_000_000, "max_attempts": 5}, 1000),
        (4, {"base_ms": 600_000, "max_ms": 1_000_000, "max_attempts": 4}, -1),
    ],
)
async def test_a_slot_that_fails_again_is_backed_off_from(
    database: Database, connection: Connection, clock: Clock, attempts: int, policy: dict[str, Any], expected: float
) -> None:
    assert await refused(database, connection, clock, attempts, **policy) == pytest.approx(expected, abs=1)


async def test_waits_of_events_are_spread(database: Database, connection: Connection, clock: Clock) -> None:
    policy = {"base_ms": 1_000_000, "max_ms": 6_000_000, "jitter_ratio": 0.5}
    seconds = await refused(database, connection, clock, 2, **policy)
    assert 500 <= seconds <= 1500 and seconds != 1000


# A source's own breaker -----------------------------------------------------------------------------------------------


async def state(connection: Connection, source: str = "noisy") -> str:
    found: str = await connection.fetchval(
        "select breaker_state from tidegate.event_scheduler_sources where source = $1", source
    )
    return found


async def test_a_source_opens_on_a_share_of_what_was_delivered_before(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    """Four good events, then three bad ones: 3 of 7. Another bad one makes it half."""
    await ticks(connection, 4)
    await worker.turn()
    for _ in range(3):
        await publish(connection, "bad", "noisy")
    await worker.turn()
    assert await state(connection) == "closed"
    await publish(connection, "bad", "noisy")
    await worker.turn()
    assert await state(connection) == "open"
    row = await sources.get(connection, "noisy")
    assert row is not None and row.breaker_reason == "4 failures among 8 outcomes within 1m"


async def test_one_poisoned_event_does_not_keep_a_source_closed_off(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    for _ in range(3):
        await publish(connection, "bad", "noisy")
    await worker.turn()
    await publish(connection, "bad", "noisy")
    good = await ticks(connection, 3)
    await worker.turn()
    await clock.advance(10_001)
    for _ in range(5):
        await worker.turn()
    assert [event_id for event_id, _ in await launched(connection)] == good
    assert await state(connection) == "closed"


async def test_an_event_that_cannot_be_read_does_not_end_the_pause_of_a_breaker(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    for _ in range(3):
        await publish(connection, "bad", "noisy")
    await worker.turn()
    opened = await sources.get(connection, "noisy")
    unreadable = await publish(connection, "tick", "noisy")
    await connection.execute("alter table tidegate.workflow_events drop constraint workflow_events_occurred_at_check")
    await connection.execute(
        "update tidegate.workflow_events set occurred_at = '20000-01-01' where id::text = $1", unreadable
    )
    await clock.advance(1000)
    await worker.turn()
    assert await connection.fetchval("select count(*) from tidegate.dead_letters where kind = 'event'") == 1
    found = await sources.get(connection, "noisy")
    assert opened is not None and found is not None
    assert (found.breaker_state, found.breaker_until) == ("open", opened.breaker_until)
    await ticks(connection, 2)
    await worker.turn()
    assert await launched(connection) == []


async def test_a_source_has_its_own_policy_until_it_is_removed(
    database: Database, connection: Connection, clock: Clock, worker: Worker
) -> None:
    policy = SourceBreakerPolicy(threshold=1, ratio=0, window_ms=1000, pause_ms=500)
    set_by = await control.set_breaker(database, "noisy", policy, "ann")
    assert (set_by.breaker, set_by.breaker_set_by) == (policy, "operator")
    await ticks(connection, 5)
    await publish(connection, "bad", "noisy")
    await worker.turn()
    assert await state(connection) == "open"
    await control.set_breaker(database, "noisy", None, "ann")
    await control.resume(database, "noisy", "ann")
    await publish(connection, "bad", "noisy")
    await worker.turn()
    assert await state(connection) == "closed"
    seeded = {"noisy": policy, "quiet": policy}
    assert await control.seed_breakers(database, seeded) == ["quiet"], "an operator's decision stays"
    assert await control.seed_breakers(database, seeded) == []
    with pytest.raises(InvalidInput):
        await control.set_breaker(database, "*", policy, "ann")
