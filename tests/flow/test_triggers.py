"""Triggers on a real database with a moved clock: throttle, concurrency, keys, pause, breaker, edits, giving up."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from datetime import timedelta
from typing import Any

import msgspec
import pytest

from tests.conftest import Clock
from tests.flow.checker import milliseconds, most_in_any_interval
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import TriggerWorker, held, launches, make_trigger, statuses
from tidegate.flow import control
from tidegate.flow.decide.dispatch import DispatchCounts
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.look.explain import explain
from tidegate.model.retry import RetryPolicy
from tidegate.model.source import BreakerPolicy, SourceBreakerPolicy
from tidegate.store import locks, trigger_gates
from tidegate.store.db import Connection, Database


@pytest.fixture
async def worker(database: Database, clock: Clock) -> TriggerWorker:
    return TriggerWorker(database)


async def ticks(connection: Connection, count: int, source: str = "shop", **payload: Any) -> list[str]:
    return [await publish(connection, "tick", source, n=n, **payload) for n in range(count)]


# Throttle -----------------------------------------------------------------------------------------------------------


async def test_over_the_throttle_is_held_with_its_time_and_reason(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database, throttle_count=10, throttle_window_ms=1000)
    ids = await ticks(connection, 15)
    assert await worker.turn() == DispatchCounts(events=15, launched=10)
    rows = await held(connection)
    assert [str(row["event_id"]) for row in rows] == ids[10:]
    assert {(r["status"], r["retry_state"], r["retry_attempts"], r["reason"], r["source"]) for r in rows} == {
        ("throttled", "scheduled", 1, "throttle", "shop")
    }
    metadata = rows[0]["retry_metadata"]
    assert metadata["reason"] == "throttle"
    assert metadata["waits_for"] == {"throttle": {"count": 10, "window_ms": 1000}}
    assert rows[0]["last_error"] == "over the throttle of 10/s"
    assert rows[0]["next_attempt_at"] == rows[0]["throttled_until"] > clock.now + timedelta(milliseconds=999)
    gaps = [b["next_attempt_at"] - a["next_attempt_at"] for a, b in itertools.pairwise(rows)]
    assert min(gaps) >= timedelta(milliseconds=100)
    assert {row["trigger_id"] for row in rows} == {trigger_id}


async def test_a_throttled_backlog_drains_paced_in_order_with_one_attempt_each(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, throttle_count=10, throttle_window_ms=1000)
    await ticks(connection, 60)
    began = clock.now
    while (await statuses(connection)).get("launched", 0) < 60:
        await worker.turn()
        await clock.advance(20)
        assert clock.now - began < timedelta(seconds=8), await statuses(connection)
    times = await launches(connection)
    assert most_in_any_interval(milliseconds(times), 1000) <= 10
    assert times[-1] - times[0] <= timedelta(milliseconds=6000 * 1.05)
    attempts = await connection.fetchval("select avg(retry_attempts)::float8 from tidegate.workflow_trigger_deliveries")
    assert attempts <= 1
    order = await connection.fetch(
        "select ingress_sequence from tidegate.workflow_trigger_deliveries where ingress_sequence > 0 "
        "order by launched_at, 1"
    )
    assert [row[0] for row in order] == sorted(row[0] for row in order)


async def test_newcomers_stand_behind_the_backlog(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, throttle_count=2, throttle_window_ms=1000)
    first = await ticks(connection, 4)
    await worker.turn()
    await clock.advance(1100)  # room again, but two wait
    last = await publish(connection, "tick", "shop", n=99)
    await worker.dispatch.run_once()
    assert [str(row["event_id"]) for row in await held(connection)] == [*first[2:], last]


async def test_a_refusal_spends_nothing(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    """However often it is asked in vain, a window's whole allowance is used, window after window."""
    await make_trigger(database, throttle_count=5, throttle_window_ms=1000)
    for _ in range(40):
        await ticks(connection, 2)
        await worker.turn()
        await clock.advance(100)
    times = milliseconds(await launches(connection))
    assert most_in_any_interval(times, 1000) <= 5
    assert len(times) >= 5 * 4 * 0.95


# Concurrency --------------------------------------------------------------------------------------------------------


async def test_concurrency_holds_and_the_end_of_a_run_wakes_the_oldest(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, max_concurrency=2)
    ids = await ticks(connection, 5)
    assert await worker.turn() == DispatchCounts(events=5, launched=2)
    rows = await held(connection)
    assert [(r["status"], r["reason"], r["retry_attempts"]) for r in rows] == [("throttled", "concurrency", 1)] * 3
    assert rows[0]["retry_metadata"]["waits_for"] == {"concurrency": {"max": 2, "key": None}}
    assert rows[0]["next_attempt_at"] == clock.now + timedelta(milliseconds=1000)

    freed = await worker.end_runs()
    assert freed.woken == 1
    assert [r["next_attempt_at"] <= clock.now for r in await held(connection)] == [True, False, False]
    await worker.delivery_retry.run_once()  # no clock was moved: it did not sit out its backoff
    assert [str(row["event_id"]) for row in await held(connection)] == ids[3:]
    assert await statuses(connection) == {"launched": 3, "throttled": 2}


async def test_concurrency_is_per_key(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, max_concurrency=1, concurrency_key="{{ event.payload.customer }}")
    for customer in ("a", "a", "b", "a", "c"):
        await publish(connection, "tick", "shop", customer=customer)
    assert await worker.turn() == DispatchCounts(events=5, launched=3)
    assert [row["concurrency_key"] for row in await held(connection)] == ["a", "a"]
    await worker.end_runs(3)
    await worker.turn()
    assert [row["concurrency_key"] for row in await held(connection)] == ["a"]
    in_use = await connection.fetch(
        "select concurrency_key from tidegate.workflow_runs where status in ('pending', 'running')"
    )
    assert [row[0] for row in in_use] == ["a"]


async def test_newcomer_of_a_key_that_waits_stands_behind(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, max_concurrency=1)
    first = await ticks(connection, 2)
    await worker.turn()
    await worker.end_runs()  # the second is due now, but nobody has looked yet
    newcomer = await publish(connection, "tick", "shop")
    await worker.dispatch.run_once()
    assert [str(row["event_id"]) for row in await held(connection)] == [first[1], newcomer]
    await worker.delivery_retry.run_once()
    assert [str(row["event_id"]) for row in await held(connection)] == [newcomer]


async def test_throttle_and_concurrency_together(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, throttle_count=3, throttle_window_ms=1000, max_concurrency=2)
    await ticks(connection, 12)
    began = clock.now
    while (await statuses(connection)).get("launched", 0) < 12:
        await worker.turn()
        active = await connection.fetchval("select count(*) from tidegate.workflow_runs where finished_at is null")
        assert active <= 2
        await worker.end_runs(1)
        await clock.advance(50)
        assert clock.now - began < timedelta(seconds=60), [dict(r) for r in await held(connection)]
    assert most_in_any_interval(milliseconds(await launches(connection)), 1000) <= 3


# Idempotency --------------------------------------------------------------------------------------------------------


async def test_same_key_launches_once_and_the_other_is_skipped_with_its_run(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, idempotency_key="{{ event.payload.order }}")
    for _ in range(3):
        await publish(connection, "tick", "shop", order=7)
    await worker.turn()
    await publish(connection, "tick", "shop", order="7")  # the same key, as text
    await publish(connection, "tick", "shop", order=8)
    await worker.turn()
    rows = await connection.fetch(
        "select status, dedupe_key, workflow_run_id from tidegate.workflow_trigger_deliveries order by created_at, id"
    )
    assert sorted((r["status"], r["dedupe_key"]) for r in rows) == [
        ("launched", "7"), ("launched", "8"), ("skipped", "7"), ("skipped", "7"), ("skipped", "7"),
    ]  # fmt: skip
    assert len({r["workflow_run_id"] for r in rows if r["dedupe_key"] == "7"}) == 1


@pytest.mark.parametrize(("window_ms", "later_ms", "launched"), [(1000, 999, 1), (1000, 1000, 2), (0, 10**9, 1)])
async def test_a_key_holds_for_its_window(
    database: Database,
    connection: Connection,
    clock: Clock,
    worker: TriggerWorker,
    window_ms: int,
    later_ms: int,
    launched: int,
) -> None:
    await make_trigger(database, idempotency_key="{{ event.payload.order }}", idempotency_window_ms=window_ms)
    await publish(connection, "tick", "shop", order=7)
    await worker.turn()
    await clock.advance(later_ms)
    await publish(connection, "tick", "shop", order=7)
    await worker.turn()
    assert (await statuses(connection))["launched"] == launched


async def test_a_key_is_free_again_when_its_delivery_was_cancelled(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database, idempotency_key="{{ event.payload.order }}")
    await control.pause_trigger(database, trigger_id, actor="test")
    await publish(connection, "tick", "shop", order=7)
    await worker.turn()
    [waiting] = await held(connection)
    await control.change_retry(database, "deliveries", waiting["id"], "cancel", "test")
    await control.resume_trigger(database, trigger_id, "test")
    await publish(connection, "tick", "shop", order=7)
    await worker.turn()
    assert await statuses(connection) == {"cancelled": 1, "launched": 1}


async def test_of_two_that_wait_with_one_key_the_first_is_launched(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database, idempotency_key="{{ event.payload.order }}")
    await control.pause_trigger(database, trigger_id, actor="test")
    ids = [await publish(connection, "tick", "shop", order=7) for _ in range(2)]
    await worker.turn()
    assert await statuses(connection) == {"paused": 2}
    await control.resume_trigger(database, trigger_id, "test")
    await worker.turn()
    rows = await connection.fetch(
        "select event_id::text, status, workflow_run_id from tidegate.workflow_trigger_deliveries "
        "order by ingress_sequence"
    )
    assert [(r["event_id"], r["status"]) for r in rows] == [(ids[0], "launched"), (ids[1], "skipped")]
    assert rows[0]["workflow_run_id"] == rows[1]["workflow_run_id"]


async def test_a_key_that_the_event_does_not_give_is_the_deliverys_failure(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, idempotency_key="{{ event.payload.order }}")
    await publish(connection, "tick", "shop")
    await publish(connection, "tick", "shop", order=None)
    await publish(connection, "tick", "shop", order="x" * 501)
    await worker.turn()
    rows = await connection.fetch(
        "select status, last_error from tidegate.workflow_trigger_deliveries order by created_at, id"
    )
    assert {row["status"] for row in rows} == {"failed"}
    assert all(row["last_error"].startswith("idempotency_key: ") for row in rows)


# Pause --------------------------------------------------------------------------------------------------------------


async def test_a_paused_trigger_holds_and_the_others_go_on(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    paused = await make_trigger(database, "one")
    other = await make_trigger(database, "two")
    await control.pause_trigger(database, paused, reason="maintenance", actor="ann")
    await ticks(connection, 3)
    await worker.turn()
    assert await statuses(connection) == {"paused": 3, "launched": 3}
    assert len(await launches(connection, other)) == 3
    row = (await held(connection))[0]
    assert (row["status"], row["reason"], row["last_error"]) == ("paused", "paused", "paused by ann: maintenance")
    await clock.advance(30_000)
    await worker.turn()
    assert len(await held(connection)) == 3
    await control.resume_trigger(database, paused, "ann")
    await worker.turn()
    assert await statuses(connection) == {"launched": 6}
    assert await connection.fetchval("select max(retry_attempts) from tidegate.workflow_trigger_deliveries") == 1


async def test_a_pause_with_an_end_lifts_itself_and_the_throttle_paces_what_follows(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database, throttle_count=2, throttle_window_ms=1000)
    await control.pause_trigger(database, trigger_id, duration_ms=5000, actor="ann")
    await ticks(connection, 6)
    for _ in range(100):
        await worker.turn()
        await clock.advance(100)
    times = await launches(connection)
    assert len(times) == 6
    assert most_in_any_interval(milliseconds(times), 1000) <= 2


async def test_a_paused_source_holds_its_waiting_deliveries(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, max_concurrency=1)
    await ticks(connection, 2)
    await worker.turn()
    await control.pause(database, "shop", reason="too much", actor="ann")
    await worker.end_runs()
    await worker.turn()
    [row] = await held(connection)
    assert (row["status"], row["reason"], row["retry_attempts"]) == ("paused", "source_paused", 1)
    assert "source shop is paused by ann: too much" in row["last_error"]
    await control.resume(database, "shop", "ann")
    await worker.turn()
    assert await statuses(connection) == {"launched": 2}


# Breaker ------------------------------------------------------------------------------------------------------------


async def test_failing_runs_open_the_breaker_and_one_probe_closes_it(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database)
    await ticks(connection, 3)
    await worker.turn()
    freed = await worker.end_runs(3, "failed")
    assert [move.move for move in freed.moves] == ["opened"]
    await ticks(connection, 4)
    await worker.turn()
    assert await statuses(connection) == {"launched": 3, "paused": 4}
    row = (await held(connection))[0]
    assert (row["reason"], row["last_error"]) == (
        "breaker_open", "the breaker is open: 3 failures within 1m",
    )  # fmt: skip

    await clock.advance(10_100)
    for _ in range(3):
        await worker.turn()
    assert await statuses(connection) == {"launched": 4, "paused": 3}  # one probe, however often we look
    freed = await worker.end_runs(1, "succeeded")
    assert [move.move for move in freed.moves] == ["closed"]
    await worker.turn()
    assert await statuses(connection) == {"launched": 7}


async def test_a_failing_probe_opens_the_breaker_again(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database)
    await ticks(connection, 3)
    await worker.turn()
    await worker.end_runs(3, "failed")
    await ticks(connection, 3)
    await worker.turn()
    await clock.advance(10_100)
    await worker.turn()
    freed = await worker.end_runs(1, "failed")
    assert [move.move for move in freed.moves] == ["probe_failed"]
    await worker.turn()
    freed = await worker.end_runs(1, "failed")
    assert [move.move for move in freed.moves] == ["reopened"]
    await worker.turn()
    assert await statuses(connection) == {"launched": 5, "paused": 1}
    await clock.advance(10_100)
    await worker.turn()
    await worker.end_runs(1, "succeeded")
    assert await statuses(connection) == {"launched": 6}


async def test_one_poisoned_delivery_does_not_keep_the_breaker_open(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    """The first in line fails its probe; the next probe is another delivery, at once, and closes the breaker."""
    await make_trigger(database)
    await ticks(connection, 3)
    await worker.turn()
    await worker.end_runs(3, "failed")
    await ticks(connection, 4)
    await worker.turn()
    await clock.advance(10_100)
    await worker.turn()
    [poisoned] = await unfinished(connection)
    await worker.end_runs(1, "failed")
    await worker.turn()
    [healthy] = await unfinished(connection)
    assert healthy != poisoned
    freed = await worker.end_runs(1, "succeeded")
    assert [move.move for move in freed.moves] == ["closed"]
    await worker.turn()
    assert await statuses(connection) == {"launched": 7}


async def test_a_cancelled_probe_shows_nothing_and_another_follows(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database)
    await ticks(connection, 3)
    await worker.turn()
    await worker.end_runs(3, "failed")
    await ticks(connection, 3)
    await worker.turn()
    await clock.advance(10_100)
    for _ in range(2):
        await worker.turn()
        freed = await worker.end_runs(1, "cancelled")
        assert [move.move for move in freed.moves] == ["probe_void"]
    await worker.turn()
    freed = await worker.end_runs(1, "succeeded")
    assert [move.move for move in freed.moves] == ["closed"]


async def test_a_breaker_opens_on_a_share_of_what_succeeded_before_and_meanwhile(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    """Three of ten fail: before the first failure five had succeeded, and two after it."""
    await make_trigger(database)
    await ticks(connection, 10)
    await worker.turn()
    await worker.end_runs(5, "succeeded")
    await clock.advance(1000)
    await worker.end_runs(1, "failed")
    await worker.end_runs(2, "succeeded")
    await clock.advance(1000)
    freed = await worker.end_runs(2, "failed")
    assert freed.moves == [] and await breaker(connection) == ("closed", None)
    await ticks(connection, 4)
    await worker.turn()
    assert [move.move for move in (await worker.end_runs(3, "failed")).moves] == []
    freed = await worker.end_runs(1, "failed")
    assert [move.move for move in freed.moves] == ["opened"]
    assert await breaker(connection) == ("open", "7 failures among 14 outcomes within 1m")


async def test_successes_leave_no_row_while_nothing_fails(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database)
    await ticks(connection, 6)
    await worker.turn()
    await worker.end_runs(2, "succeeded")
    counted = "select coalesce(sum(succeeded), 0)::int from tidegate.trigger_successes"
    assert await connection.fetchval(counted) == 0
    await worker.end_runs(1, "failed")
    await worker.end_runs(2, "succeeded")
    assert await connection.fetchval(counted) == 2
    await clock.advance(60_001)
    await worker.end_runs(1, "succeeded")
    await trigger_gates.forget_successes(connection)
    assert await connection.fetchval(counted) == 0


async def test_a_success_is_counted_once_though_a_new_window_begins(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database)
    await ticks(connection, 5)
    await worker.turn()
    await worker.end_runs(1, "failed")
    await clock.advance(50_000)
    await worker.end_runs(2, "succeeded")
    await clock.advance(12_000)  # the first failure is forgotten, the successes are not
    for _ in range(2):
        await worker.end_runs(1, "failed")
    outcomes = await connection.fetchval("select outcomes from tidegate.event_scheduler_triggers")
    assert (sum(one[1] for one in outcomes), sum(one[2] for one in outcomes)) == (2, 2)


async def test_what_is_counted_stays_small_however_often_runs_end(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    many, seconds = 20_000, 20
    await make_trigger(database, breaker=BreakerPolicy(threshold=3, window_ms=3_600_000, pause_ms=10_000))
    await ticks(connection, 4)
    await worker.turn()
    await worker.end_runs(1, "failed")
    await clock.advance(200_000)
    await connection.execute(
        "insert into tidegate.trigger_successes (trigger_id, at, succeeded) "
        "select trigger_id, tidegate.now() - interval '100 s' + n * interval '1 ms', 1 "
        "  from tidegate.event_scheduler_triggers, generate_series(1, $1::int) n",
        many,
    )
    await worker.end_runs(1, "succeeded")
    for _ in range(2):
        await Reconcile(database, batch_size=100).run_once()
        row = await connection.fetchrow("select count(*), sum(succeeded)::int from tidegate.trigger_successes")
        assert row is not None and row[0] <= seconds + 2 and row[1] == many + 1
    await worker.end_runs(2, "failed")
    assert await connection.fetchval("select count(*) from tidegate.trigger_successes") == 0
    outcomes = await connection.fetchval("select outcomes from tidegate.event_scheduler_triggers")
    assert (sum(one[1] for one in outcomes), sum(one[2] for one in outcomes)) == (3, many + 1)


@pytest.mark.parametrize("is_asked", [False, True])
async def test_what_cannot_be_retried_counts_only_if_asked_to(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker, is_asked: bool
) -> None:
    policy = BreakerPolicy(threshold=3, window_ms=60_000, pause_ms=10_000, non_retryable=is_asked)
    await make_trigger(database, breaker=policy)
    await ticks(connection, 5)
    await worker.turn()
    await worker.end_runs(5, "failed", is_non_retryable=True)
    assert (await breaker(connection))[0] == ("open" if is_asked else "closed")


async def test_a_breaker_that_moves_names_who_moved_it(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database)
    await ticks(connection, 3)
    await worker.turn()
    [move] = (await worker.end_runs(3, "failed")).moves
    row = await connection.fetchrow(
        "select event_id, correlation_id, trigger_id from tidegate.workflow_runs where id = $1", move.run_id
    )
    assert row is not None
    assert (move.event_id, move.correlation_id, move.trigger_id) == tuple(row)


@pytest.mark.parametrize("counts", [False, True])
async def test_failed_runs_count_for_their_source_if_asked_to(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker, counts: bool
) -> None:
    """Three of four runs of a source fail, and one of another source."""
    await make_trigger(database, breaker=BreakerPolicy(threshold=10_000))
    policy = SourceBreakerPolicy(threshold=3, window_ms=60_000, pause_ms=10_000, runs=counts)
    for source in ("shop", "other"):
        await control.set_breaker(database, source, policy, "test")
    await ticks(connection, 4)
    await ticks(connection, 1, "other")
    await worker.turn()
    await worker.end_runs(1, "succeeded")
    freed = await worker.end_runs(2, "failed")
    assert not freed.source_moves
    freed = await worker.end_runs(2, "failed")
    moves = [(move.source, move.move, move.reason) for move in freed.source_moves]
    assert moves == ([("shop", "opened", "3 failures among 4 outcomes within 1m")] if counts else [])
    states = await connection.fetch("select source, breaker_state from tidegate.event_scheduler_sources order by 1")
    assert [tuple(row) for row in states] == [("other", "closed"), ("shop", "open" if counts else "closed")]
    if counts:
        [move] = freed.source_moves
        assert None not in move
        await ticks(connection, 1)
        await worker.turn()
        held_by = await connection.fetchval("select reason from tidegate.event_ingress_retries")
        assert held_by == "breaker_open"


async def breaker(connection: Connection) -> tuple[str, str | None]:
    row = await connection.fetchrow("select breaker_state, breaker_reason from tidegate.event_scheduler_triggers")
    assert row is not None
    return tuple(row)


async def unfinished(connection: Connection) -> list[Any]:
    rows = await connection.fetch("select id from tidegate.workflow_runs where status in ('pending', 'running')")
    return [row[0] for row in rows]


async def test_a_trigger_may_have_its_own_threshold(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, breaker=BreakerPolicy(threshold=1, window_ms=1000, pause_ms=500))
    await ticks(connection, 1)
    await worker.turn()
    freed = await worker.end_runs(1, "failed")
    assert [move.move for move in freed.moves] == ["opened"]
    await ticks(connection, 1)
    await worker.turn()
    assert await statuses(connection) == {"launched": 1, "paused": 1}
    await clock.advance(600)
    await worker.turn()
    assert await statuses(connection) == {"launched": 2}


async def test_a_template_that_fails_opens_the_triggers_breaker_and_no_other(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, "bad", parameter_template={"x": "{{ event.payload.missing }}"})
    good = await make_trigger(database, "good")
    await ticks(connection, 5)
    await worker.turn()
    assert await statuses(connection) == {"failed": 5, "launched": 5}
    await ticks(connection, 2)
    await worker.turn()
    assert await statuses(connection) == {"failed": 5, "launched": 7, "paused": 2}
    assert len(await launches(connection, good)) == 7
    assert await connection.fetchval("select count(*) from tidegate.event_ingress_retries") == 0


# Edits --------------------------------------------------------------------------------------------------------------


async def test_an_edited_trigger_decides_its_waiting_deliveries_by_the_new_version(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database, max_concurrency=1)
    await ticks(connection, 3)
    await worker.turn()
    await control.update_trigger(
        database,
        trigger_id,
        {"max_concurrency": 10, "where": "event.payload.n < 2", "parameter_template": {"edited": True}},
        "ann",
    )
    await worker.turn()
    rows = await connection.fetch(
        "select d.status, d.trigger_version, d.last_error, r.parameters from tidegate.workflow_trigger_deliveries d "
        "left join tidegate.workflow_runs r on r.id = d.workflow_run_id order by d.created_at, d.id"
    )
    assert [(r["status"], r["trigger_version"]) for r in rows] == [("launched", 1), ("launched", 2), ("skipped", 2)]
    assert rows[1]["parameters"] == {"edited": True}
    assert "no longer matches the event: where is false" in rows[2]["last_error"]


@pytest.mark.parametrize("how", ["disabled", "deleted"])
async def test_a_trigger_that_goes_cancels_its_waiting_deliveries(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker, how: str
) -> None:
    trigger_id = await make_trigger(database, max_concurrency=1)
    ids = await ticks(connection, 3)
    await worker.turn()
    if how == "disabled":
        await control.update_trigger(database, trigger_id, {"status": "disabled"}, "ann")
    else:
        await control.delete_trigger(database, trigger_id, "ann")
    rows = await connection.fetch(
        "select status, retry_state, last_error from tidegate.workflow_trigger_deliveries where status <> 'launched'"
    )
    assert [tuple(row) for row in rows] == [("cancelled", "cancelled", f"trigger {how} by ann")] * 2
    await worker.end_runs()
    await publish(connection, "tick", "shop")
    await clock.advance(60_000)
    await worker.turn()
    assert await statuses(connection) == {"launched": 1, "cancelled": 2}
    story = await explain(connection, ids[2])
    assert any(line.decision == "cancelled" and line.actor == "ann" for line in story.decisions)


async def test_a_lowered_concurrency_kills_nobody_and_launches_nobody_until_below(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database, max_concurrency=3)
    await ticks(connection, 6)
    await worker.turn()
    await control.update_trigger(database, trigger_id, {"max_concurrency": 1}, "ann")
    for ended in (1, 2):
        await worker.end_runs(1)
        await worker.turn()
        assert await statuses(connection) == {"launched": 3, "throttled": 3}, ended
    await worker.end_runs(1)
    await worker.turn()
    assert await statuses(connection) == {"launched": 4, "throttled": 2}


async def test_runs_from_before_a_concurrency_limit_hold_its_slots(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database)
    for customer in ("a", "a", "b"):
        await publish(connection, "tick", "shop", customer=customer)
    await worker.turn()
    change = {"max_concurrency": 2, "concurrency_key": "{{ event.payload.customer }}"}
    await control.update_trigger(database, trigger_id, change, "ann")
    for customer in ("a", "b", "b"):
        await publish(connection, "tick", "shop", customer=customer)
    await worker.turn()
    assert [row["concurrency_key"] for row in await held(connection)] == ["a", "b"]
    await control.update_trigger(database, trigger_id, {"max_concurrency": None, "concurrency_key": None}, "ann")
    await worker.turn()
    assert await held(connection) == []


# Giving up, and telling ---------------------------------------------------------------------------------------------


async def test_attempts_are_used_up(database: Database, connection: Connection, clock: Clock) -> None:
    policy = RetryPolicy(base_ms=1000, factor=1, max_ms=1000, jitter_ratio=0, max_attempts=3, max_age_ms=0)
    worker = TriggerWorker(database)
    await make_trigger(database, throttle_count=1, throttle_window_ms=60_000, retry=policy)
    ids = await ticks(connection, 2)
    await worker.turn()
    for _ in range(3):  # at its time there is no room
        await connection.execute(
            "update tidegate.workflow_trigger_deliveries set next_attempt_at = tidegate.now() "
            "where retry_state = 'scheduled'"
        )
        await worker.delivery_retry.run_once()
        await worker.delivery_replan.run_once()
    row = await connection.fetchrow("select * from tidegate.workflow_trigger_deliveries where status = 'exhausted'")
    assert row is not None
    assert (row["retry_state"], row["retry_attempts"], row["next_attempt_at"]) == ("exhausted", 3, None)
    assert row["last_error"] == "retries exhausted (3 attempts): waiting in line for the throttle"
    letter = await connection.fetchrow("select kind, subject_id, event_id::text, reason from tidegate.dead_letters")
    assert letter is not None and tuple(letter) == ("delivery", row["id"], ids[1], row["last_error"])


async def test_age_is_used_up(database: Database, connection: Connection, clock: Clock, worker: TriggerWorker) -> None:
    policy = msgspec.structs.replace(RetryPolicy(), max_age_ms=60_000)
    await make_trigger(database, max_concurrency=1, retry=policy)
    await ticks(connection, 2)
    await worker.turn()
    await clock.advance(61_000)
    await worker.turn()
    assert await statuses(connection) == {"launched": 1, "exhausted": 1}


async def test_an_event_that_lives_no_longer_is_not_launched(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, max_concurrency=1)
    await ticks(connection, 1)
    await connection.execute("select tidegate.publish('tick', 'shop', '{}', ttl_ms => 500)")
    await worker.turn()
    await clock.advance(1000)
    await worker.end_runs()
    await worker.turn()
    rows = await connection.fetch(
        "select status, reason from tidegate.workflow_trigger_deliveries order by created_at, id"
    )
    assert [tuple(row) for row in rows] == [("launched", None), ("exhausted", "expired")]


async def test_filtered_events_are_counted_and_explained_as_they_were_decided(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database, predicates=[{"path": "$.payload.amount", "operator": "gt", "value": 100}])
    event_id = await publish(connection, "tick", "shop", amount=50)
    await worker.turn()
    await control.update_trigger(database, trigger_id, {"predicates": []}, "ann")
    story = await explain(connection, event_id)
    [line] = [line for line in story.decisions if line.stage == "match"]
    assert (line.decision, line.trigger_id) == ("filtered", trigger_id)
    assert line.reason == "$.payload.amount gt 100 does not hold for 50"
    row = await connection.fetchrow("select * from tidegate.event_scheduler_trigger_metrics")
    assert row is not None and (row["filtered"], row["matched"], row["last_status"]) == (1, 0, "filtered")


async def test_the_story_of_a_held_delivery(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, max_concurrency=1)
    ids = await ticks(connection, 2)
    await worker.turn()
    await clock.advance(1000)
    await worker.turn()
    await worker.end_runs()
    await worker.turn()
    story = await explain(connection, ids[1])
    told = [(line.stage, line.decision) for line in story.decisions]
    assert told == [
        ("ingest", "accepted"), ("gate", "allowed"), ("deliver", "throttled"), ("deliver", "launched"),
        ("run", "pending"),
    ]  # fmt: skip


async def test_a_wait_whose_end_nobody_knows_is_told_as_such(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database, max_concurrency=1)
    ids = await ticks(connection, 2)
    await worker.turn()
    story = await explain(connection, ids[1])
    assert story.decisions[-1].waits_for == "a free slot"
    assert "waits for a free slot: 1 of 1 slots are in use" in story.summary
    await control.pause_trigger(database, trigger_id, duration_ms=5000, reason="stocktaking", actor="ann")
    await worker.turn()
    assert "waits for" not in (await explain(connection, ids[1])).summary.replace("waits for a free slot", "")
    await control.pause_trigger(database, trigger_id, reason="stocktaking", actor="ann")
    await worker.turn()
    story = await explain(connection, ids[1])
    assert story.summary.endswith("waits for its trigger to be resumed: paused by ann: stocktaking")


async def test_several_triggers_of_one_workflow_are_told_apart(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, name="all")
    [alone] = await ticks(connection, 1)
    await worker.turn()
    pending = "waits for a worker: none is running; start one: tidegate worker APP"
    assert (await explain(connection, alone)).summary == f"tick {pending}"
    await make_trigger(database, name="some", max_concurrency=1)
    ids = await ticks(connection, 2)
    await worker.turn()
    story = await explain(connection, ids[1])
    told = [(line.decision, f"{line.workflow}/{line.trigger}") for line in story.decisions if line.workflow]
    assert sorted(told) == [("launched", "tick/all"), ("pending", "tick/all"), ("throttled", "tick/some")]
    assert story.summary.startswith(f"tick/all {pending}; tick/some waits for a free slot: ")


async def test_totals_of_a_trigger(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id: uuid.UUID = await make_trigger(database, max_concurrency=1, idempotency_key="{{ event.payload.k }}")
    for key in (1, 1, 2):
        await publish(connection, "tick", "shop", k=key)
    await worker.turn()
    await worker.end_runs()
    await worker.turn()
    row = await connection.fetchrow(
        "select * from tidegate.event_scheduler_trigger_metrics where trigger_id = $1", trigger_id
    )
    assert row is not None
    counts = {
        name: row[name] for name in ("filtered", "matched", "launched", "throttled", "skipped", "failed", "paused")
    }
    assert counts == {
        "filtered": 0, "matched": 3, "launched": 2, "throttled": 1, "skipped": 1, "failed": 0, "paused": 0,
    }  # fmt: skip


# What must not go wrong ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("why", ["expired", "same key", "source paused"])
async def test_a_slot_that_is_not_taken_goes_to_the_next_in_line(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker, why: str
) -> None:
    await make_trigger(database, max_concurrency=1, idempotency_key="{{ event.payload.k }}")
    await publish(connection, "tick", "shop", k=1)
    if why == "expired":
        await connection.execute("select tidegate.publish('tick', 'shop', '{\"k\": 2}', ttl_ms => 500)")
    else:
        await publish(
            connection, "tick", "other" if why == "source paused" else "shop", k=1 if why == "same key" else 2
        )
    last = await publish(connection, "tick", "shop", k=3)
    await worker.turn()
    if why == "same key":  # the first two have one key: the second is skipped at once, so a third one waits with it
        assert (await statuses(connection))["skipped"] == 1
    if why == "source paused":
        await control.pause(database, "other", actor="ann")
    if why == "expired":
        await clock.advance(900)
    await worker.end_runs()
    for _ in range(3):  # nobody sits out a backoff: the clock stands still
        await worker.delivery_retry.run_once()
    row = await connection.fetchrow(
        "select status from tidegate.workflow_trigger_deliveries where event_id = $1", uuid.UUID(last)
    )
    assert row is not None and row["status"] == "launched"


async def test_waiting_for_a_breaker_uses_no_attempts(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    policy = RetryPolicy(max_attempts=3, max_age_ms=3_600_000)
    await make_trigger(database, retry=policy, breaker=BreakerPolicy(threshold=1, window_ms=60_000, pause_ms=1000))
    await ticks(connection, 6)
    await worker.dispatch.run_once()
    await worker.end_runs(6, "failed")
    await ticks(connection, 10)
    for _ in range(8):  # eight probes fail
        await clock.advance(1100)
        await worker.turn()
        await worker.turn()
        await worker.end_runs(10, "failed")
    assert "exhausted" not in await statuses(connection)
    for _ in range(30):
        await clock.advance(1100)
        await worker.turn()
        await worker.end_runs(10)
    assert await statuses(connection) == {"launched": 16}


@pytest.mark.parametrize("what", ["resume", "edit"])
async def test_being_looked_at_again_uses_no_attempts(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker, what: str
) -> None:
    policy = RetryPolicy(max_attempts=3, max_age_ms=0)
    trigger_id = await make_trigger(database, max_concurrency=1, retry=policy)
    await ticks(connection, 4)
    await worker.turn()
    for n in range(8):
        if what == "resume":
            await control.pause_trigger(database, trigger_id, actor="ann")
            await worker.turn()
            await control.resume_trigger(database, trigger_id, "ann")
        else:
            await control.update_trigger(database, trigger_id, {"where": f"event.payload.n < {100 + n}"}, "ann")
        await worker.turn()
    assert await statuses(connection) == {"launched": 1, "throttled": 3}
    assert {row["retry_attempts"] for row in await held(connection)} == {1}


async def test_the_line_is_forgotten_when_nobody_stands_in_it(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, throttle_count=10, throttle_window_ms=3_600_000)
    await ticks(connection, 100)
    await worker.turn()
    for row in await held(connection):
        await control.change_retry(database, "deliveries", row["id"], "cancel", "ann")
    await clock.advance(3_700_000)
    await ticks(connection, 11)
    await worker.turn()
    [waiting] = await held(connection)
    assert waiting["next_attempt_at"] - clock.now <= timedelta(hours=1.1)


async def test_a_delivery_of_a_paused_source_holds_up_no_other_source(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database, throttle_count=2, throttle_window_ms=1000)
    await ticks(connection, 3, "noisy")
    await worker.turn()
    await control.pause(database, "noisy", actor="ann")
    await clock.advance(5000)
    await worker.turn()
    await ticks(connection, 2, "quiet")
    await worker.turn()
    assert await statuses(connection) == {"launched": 4, "paused": 1}


async def test_a_trigger_that_this_worker_cannot_read_keeps_its_deliveries(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    """A newer version of us may have made it."""
    trigger_id = await make_trigger(database, max_concurrency=1)
    await ticks(connection, 2)
    await worker.turn()
    await connection.execute(
        "update tidegate.workflow_event_triggers set \"where\" = 'event.payload.n.future()', version = version + 1"
    )
    await worker.end_runs()
    await clock.advance(5000)
    await worker.turn()
    [row] = await held(connection)
    assert (row["status"], row["reason"], row["trigger_version"]) == ("paused", "trigger_invalid", 1)
    await connection.execute('update tidegate.workflow_event_triggers set "where" = null, version = version + 1')
    await clock.advance(31_000)
    await worker.turn()
    assert len(await launches(connection, trigger_id)) == 2


async def test_a_throttle_that_comes_back_has_not_forgotten(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    trigger_id = await make_trigger(database, throttle_count=5, throttle_window_ms=3_600_000)
    await ticks(connection, 5)
    await worker.turn()
    await control.update_trigger(database, trigger_id, {"throttle_count": None, "throttle_window_ms": None}, "ann")
    await worker.end_runs(1, "failed")
    await control.update_trigger(database, trigger_id, {"throttle_count": 5, "throttle_window_ms": 3_600_000}, "ann")
    await ticks(connection, 5)
    await worker.turn()
    assert await statuses(connection) == {"launched": 5, "throttled": 5}


async def test_old_runs_that_fail_do_not_open_an_open_breaker_again(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(database)
    await ticks(connection, 6)
    await worker.turn()
    assert [move.move for move in (await worker.end_runs(3, "failed")).moves] == ["opened"]
    await clock.advance(10_100)
    assert (await worker.end_runs(3, "failed")).moves == []


async def test_new_times_follow_an_edit_that_comes_in_the_middle(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    """The plan waits for the trigger's row while an edit holds it; then it must plan by the new throttle."""
    trigger_id = await make_trigger(database, throttle_count=1, throttle_window_ms=3_600_000)
    await ticks(connection, 50)
    await worker.turn()
    await database.run(lambda c: trigger_gates.replan(c, trigger_id))
    async with database.transaction() as editing:
        await locks.exclude_triggers(editing)
        await editing.execute(
            "update tidegate.workflow_event_triggers set throttle_count = 100000, version = version + 1"
        )
        await trigger_gates.replan(editing, trigger_id)
        planning = asyncio.create_task(worker.delivery_replan.run_once())
        await asyncio.sleep(0.2)
    await planning
    late = max(row["next_attempt_at"] for row in await held(connection))
    assert late - clock.now <= timedelta(hours=1.1)


async def test_due_for_a_slot_without_room_in_the_throttle_joins_its_line_once(
    database: Database, connection: Connection, clock: Clock, worker: TriggerWorker
) -> None:
    await make_trigger(
        database,
        throttle_count=1,
        throttle_window_ms=20_000,
        max_concurrency=1,
        concurrency_key="{{ event.payload.k }}",
    )
    await publish(connection, "tick", "shop", k=0)
    await worker.turn()
    await clock.advance(20_400)
    for _ in range(12):
        await publish(connection, "tick", "shop", k=0)
    await worker.turn()
    await publish(connection, "tick", "shop", k=1)
    await worker.turn()
    await clock.advance(1100)
    for _ in range(12):
        await worker.turn()
    assert await connection.fetchval("select plan_version from tidegate.event_scheduler_triggers") <= 2
    assert {row["reason"] for row in await held(connection)} == {"throttle"}
