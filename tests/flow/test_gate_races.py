"""The source gate with workers and operators at the same instant: real clock, separate pools, one winner each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import datetime
from functools import partial
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.checker import inversions, milliseconds, most_in_any_interval
from tests.flow.conftest import eventually, race
from tidegate.app import Tidegate
from tidegate.errors import Conflict, NotFound
from tidegate.flow import control
from tidegate.flow.control import RetryVerb
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.flow.hold import replan
from tidegate.flow.hold.event_plan import EventPlans, EventReplan
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.model.retry import EVENT_RETRY
from tidegate.model.source import Breaker, RateLimit, SourceBreakerPolicy
from tidegate.store import ingress_retries, sources
from tidegate.store.db import Connection, Database

BREAKER = SourceBreakerPolicy(threshold=3, window_ms=60_000, pause_ms=200)
WORKERS = 4


class Worker:
    """The stages of one worker process, on a pool of its own."""

    def __init__(self, url: str, batch_size: int = 20) -> None:
        self.database = Database(url, "worker", size=4)
        self.dispatch = Dispatch(self.database, batch_size=batch_size, after_launch=lambda: None, breaker=BREAKER)
        self.retry = EventRetry(self.database, batch_size=batch_size, after_launch=lambda: None, breaker=BREAKER)
        self.replan = EventReplan(self.database, EventPlans(EVENT_RETRY))

    async def turn(self) -> None:
        await asyncio.gather(self.dispatch.run_once(), self.replan.run_once(), self.retry.run_once())


@pytest.fixture
async def workers(database_url: str, database: Database) -> AsyncIterator[list[Worker]]:
    app = Tidegate()

    @app.workflow(on="tick")
    async def tick(ctx: Any) -> None: ...

    # Its own breaker stays out of the way: these tests are about the source's.
    @app.workflow(on="bad", params={"x": "{{ event.payload.missing }}"}, breaker=Breaker(threshold=10_000))
    async def bad(ctx: Any, x: int) -> None: ...

    await database.run(app.register)
    made = [Worker(database_url) for _ in range(WORKERS)]
    yield made
    for worker in made:
        await worker.database.close()


@contextlib.asynccontextmanager
async def working(workers: list[Worker]) -> AsyncIterator[None]:
    """Every worker turns its stages, each in a loop of its own, until the block ends."""
    stopping = False

    async def loop(turn: Callable[[], Awaitable[Any]]) -> None:
        while not stopping:
            await turn()
            await asyncio.sleep(0.002)

    stages = [stage.run_once for w in workers for stage in (w.dispatch, w.retry, w.replan)]
    tasks = [asyncio.create_task(loop(stage)) for stage in stages]
    try:
        yield
    finally:
        stopping = True
        await asyncio.gather(*tasks)


async def publish(connection: Connection, count: int, source: str = "noisy", event_type: str = "tick") -> None:
    await connection.execute("select tidegate.publish($1, $2) from generate_series(1, $3)", event_type, source, count)


async def limit(database: Database, limit: int | None, interval_ms: int = 1000, source: str = "noisy") -> None:
    rate = RateLimit(limit=limit, interval_ms=interval_ms) if limit else None
    await control.set_limit(database, source, rate, "test")


async def deadlocks(connection: Connection) -> int:
    await connection.execute("select pg_stat_force_next_flush()")
    found: int = await connection.fetchval("select deadlocks from pg_stat_database where datname = current_database()")
    return found


LAUNCHED = """
select e.ingress_sequence, e.source, d.launched_at, r.event_id is not null as was_held
  from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e on e.id = d.event_id
  left join tidegate.event_ingress_retries r on r.event_id = d.event_id
 where d.status = 'launched' and e.source = $1 order by d.launched_at, e.ingress_sequence
"""
QUIET = """
select not exists (select 1 from tidegate.event_inbox)
   and not exists (select 1 from tidegate.event_ingress_retries where retry_state = 'scheduled')
"""


async def test_a_pause_that_has_returned_is_followed_by_no_launch(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """Judged twice: by the count of what is committed when the call returns, and by the stamps of the launches."""
    await limit(database, 60, interval_ms=100)
    pauses: list[tuple[datetime, datetime]] = []
    count = "select count(*) from tidegate.workflow_runs"
    async with working(workers):
        for _ in range(15):
            await publish(connection, 30)
            before = await connection.fetchval(count)
            await eventually(database, f"select ({count}) > $1", before)  # launches are going on
            await control.pause(database, "noisy", actor="test")
            returned_at = await connection.fetchval("select tidegate.now()")
            committed = await connection.fetchval(count)
            for _ in range(5):
                await publish(connection, 1)
                await eventually(database, "select not exists (select 1 from tidegate.event_inbox)")
                assert await connection.fetchval(count) == committed, "launched while paused"
            pauses.append((returned_at, await connection.fetchval("select tidegate.now()")))
            await control.resume(database, "noisy", "test")
        await eventually(database, QUIET)
    rows = await connection.fetch(LAUNCHED, "noisy")
    assert len(rows) == 15 * 35
    for row in rows:
        assert not any(begun <= row["launched_at"] <= ended for begun, ended in pauses)


async def test_cancel_or_launch_one_wins_and_the_answer_says_which(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """Each event is due for two workers while an operator cancels it; whoever is first, the others know."""
    rounds, answers = 300, {"cancelled": 0, "completed": 0}
    await control.pause(database, "noisy", actor="test")
    await publish(connection, rounds)
    while (await workers[0].dispatch.run_once()).events:
        pass
    ids = [r[0] for r in await connection.fetch("select event_id from tidegate.event_ingress_retries order by 1")]
    await control.resume(database, "noisy", "test")
    await workers[0].replan.run_once()
    await connection.execute("update tidegate.event_ingress_retries set next_attempt_at = 'tomorrow'")

    async def cancel(event_id: uuid.UUID) -> str:
        try:
            await control.change_retry(database, "events", event_id, "cancel", "test")
        except Conflict as exc:
            assert "its time came" in str(exc)
            return "completed"
        return "cancelled"

    for event_id in ids:
        await control.change_retry(database, "events", event_id, "force", "test")
        answer = await race(partial(cancel, event_id), workers[0].retry.run_once, workers[1].retry.run_once)
        state = await connection.fetchval(
            "select retry_state from tidegate.event_ingress_retries where event_id = $1", event_id
        )
        runs = await connection.fetchval("select count(*) from tidegate.workflow_runs where event_id = $1", event_id)
        assert (answer, runs) == (state, int(state == "completed"))
        answers[answer] += 1
    assert min(answers.values()) > 0, f"no race took place: {answers}"


async def test_workers_on_the_same_due_rows_launch_each_once_in_order(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    for _ in range(30):
        await control.pause(database, "noisy", actor="test")
        await publish(connection, 8)
        await workers[0].dispatch.run_once()
        await control.resume(database, "noisy", "test")
        await workers[0].replan.run_once()
        turns = await asyncio.gather(*(worker.retry.run_once() for worker in workers))
        assert sum(turn.launched for turn in turns) == 8
    rows = await connection.fetch(LAUNCHED, "noisy")
    assert len(rows) == len({row[0] for row in rows}) == 240
    assert inversions([row[0] for row in rows]) == []


async def test_batches_taken_at_once_keep_the_order_of_arrival(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """The worker with the later batch may reach the gate first; those who wait stand in order of arrival still."""
    await limit(database, 1, interval_ms=3_600_000)
    for _ in range(15):
        await publish(connection, 8 * 20)
        await asyncio.gather(*(worker.dispatch.run_once() for worker in [*workers, *workers]))
        rows = await connection.fetch(
            "select ingress_sequence from tidegate.event_ingress_retries where retry_state = 'scheduled' "
            "order by next_attempt_at, ingress_sequence"
        )
        assert inversions([row[0] for row in rows]) == []
    slots = "select count(*), count(distinct next_attempt_at) from tidegate.event_ingress_retries"
    assert len(set(await connection.fetchrow(slots) or [])) == 1, "two events share a slot"


async def test_a_worker_that_waited_for_the_gate_sees_who_waits_already(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """The second batch stands at the lock while the first puts its events in line: it queues behind them."""
    await limit(database, 1, interval_ms=3_600_000)
    await publish(connection, 1)
    await workers[0].dispatch.run_once()
    await publish(connection, 20)
    async with workers[2].database.transaction() as first:
        await sources.lock(first, ["noisy"])
        waiting = [asyncio.create_task(worker.dispatch.run_once()) for worker in workers[:1]]
        await eventually(database, "select exists (select 1 from pg_stat_activity where wait_event_type = 'Lock')")
        await publish(connection, 20)
        waiting.append(asyncio.create_task(workers[1].dispatch.run_once()))
        await eventually(
            database,
            "select count(*) = 2 from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()",
        )
    await asyncio.gather(*waiting)
    rows = await connection.fetch(
        "select ingress_sequence, next_attempt_at from tidegate.event_ingress_retries order by next_attempt_at"
    )
    assert len({row[1] for row in rows}) == 40, "two events share a slot"
    assert inversions([row[0] for row in rows]) == []


async def test_verbs_during_a_drain_of_several_workers(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """Pauses, resumes and new limits in the middle: nothing over the widest limit, nothing twice, order kept."""
    await limit(database, 50, interval_ms=250)
    await publish(connection, 400)
    while (await workers[0].dispatch.run_once()).events:
        pass
    async with working(workers):
        for step in itertools.count():
            if await connection.fetchval(QUIET):
                break
            await limit(database, [20, 50, 35][step % 3], interval_ms=250)
            await asyncio.sleep(0.06)
            if step % 4 == 3:
                await control.pause(database, "noisy", duration_ms=30, actor="test")
            elif step % 4 == 1:
                await control.resume(database, "noisy", "test")
    rows = await connection.fetch(LAUNCHED, "noisy")
    assert len(rows) == len({row[0] for row in rows}) == 400
    assert most_in_any_interval(milliseconds([row["launched_at"] for row in rows]), 250) <= 50
    assert inversions([row[0] for row in rows if row["was_held"]]) == []


async def test_a_storm_of_everything_has_no_deadlock(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    names = [f"s{n}" for n in range(6)]
    before = await deadlocks(connection)
    await control.seed_limits(database, {name: RateLimit(limit=30, interval_ms=100) for name in names[:3]})
    tell = random.Random(7)

    async def operate() -> None:
        for _ in range(25):
            name = tell.choice(names)
            verb = tell.choice(["pause", "resume", "limit", "default", "seed", "cancel", "force", "publish", "bad"])
            with contextlib.suppress(Conflict, NotFound):
                if verb == "pause":
                    await control.pause(database, name, duration_ms=tell.randint(1, 50), actor="test")
                elif verb == "resume":
                    await control.resume(database, name, "test")
                elif verb == "limit":
                    await limit(database, tell.choice([None, 10, 100]), interval_ms=100, source=name)
                elif verb == "default":
                    await limit(database, tell.choice([None, 200]), interval_ms=100, source="*")
                elif verb == "seed":
                    rate = RateLimit(limit=tell.randint(20, 40), interval_ms=100)
                    await control.seed_limits(database, {"*": rate, names[0]: rate, names[5]: rate})
                elif verb == "publish":
                    await publish_to_all()
                elif verb == "bad":
                    await send(tell.choice([*names, f"new{tell.randint(0, 99)}"]), 1, "bad")
                else:
                    await change_one(verb)

    async def send(name: str, count: int, event_type: str = "tick") -> None:
        async with database.connection() as own:
            await publish(own, count, name, event_type)

    async def publish_to_all() -> None:
        for name in tell.sample(names, k=len(names)):
            await send(name, 5)

    async def change_one(verb: str) -> None:
        async with database.connection() as own:
            rows = await ingress_retries.list_scheduled(own, limit=20)
        if rows:
            chosen: RetryVerb = "cancel" if verb == "cancel" else "force"
            await control.change_retry(database, "events", tell.choice(rows).event_id, chosen, "test")

    async with working(workers):
        await asyncio.gather(*(operate() for _ in range(6)))
        await limit(database, None, source="*")
        for name in names:
            await limit(database, None, source=name)
            await control.resume(database, name, "test")
        await eventually(database, QUIET)
    lost = await connection.fetchval(
        "select count(*) from tidegate.workflow_events e "
        " where not exists (select 1 from tidegate.workflow_trigger_deliveries d where d.event_id = e.id)"
        "   and not exists (select 1 from tidegate.event_ingress_retries r where r.event_id = e.id "
        "                    and r.retry_state in ('cancelled', 'exhausted'))"
    )
    assert lost == 0
    assert await deadlocks(connection) == before


async def test_limits_seeded_by_many_at_once(database_url: str, database: Database, connection: Connection) -> None:
    """Every process that starts seeds the same limits: one of them does it, nobody waits long, nobody fails."""
    seeds = {name: RateLimit(limit=5, interval_ms=1000) for name in ("*", "a", "b", "z")}
    pools = [Database(database_url, "worker", size=1) for _ in range(10)]
    before = await deadlocks(connection)
    changed = await asyncio.gather(*(control.seed_limits(pool, seeds) for pool in pools))
    for pool in pools:
        await pool.close()
    assert sorted(itertools.chain(*changed)) == ["*", "a", "b", "z"]
    rows = await connection.fetch("select version, limit_set_by from tidegate.event_scheduler_sources")
    assert [tuple(row) for row in rows] == [(1, "settings")] * 4
    assert await deadlocks(connection) == before


async def test_a_half_open_breaker_admits_one_probe(
    database: Database, connection: Connection, clock: Clock, workers: list[Worker]
) -> None:
    """Eight looks at the instant when the breaker's pause ends; the probe fails, so nobody may follow it."""
    await publish(connection, 3, event_type="bad")
    await workers[0].dispatch.run_once()
    for n in range(1, 16):
        await publish(connection, 10, event_type="bad")
        await workers[0].dispatch.run_once()
        await workers[0].replan.run_once()
        if n % 2:  # of the two probes that are to fail, the second follows at once
            await clock.advance(BREAKER.pause_ms)
        await publish(connection, 10, event_type="bad")
        stages = [stage.run_once() for worker in workers for stage in (worker.retry, worker.dispatch)]
        await asyncio.gather(*stages)
        assert await connection.fetchval("select count(*) from tidegate.workflow_trigger_deliveries") == 3 + n
        assert await connection.fetchval("select breaker_state from tidegate.event_scheduler_sources") == "open"


async def test_sources_made_by_failures_at_once_have_no_deadlock(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """A source's first failure makes its row, in the middle of a transaction that holds the rows of other sources."""
    before = await deadlocks(connection)
    await control.set_limit(database, "m", RateLimit(limit=1000, interval_ms=100), "test")
    for n in range(15):
        for name in (f"a{n}", "m", f"z{n}") * 8:
            await publish(connection, 3, name, "tick" if name == "m" else "bad")
        await asyncio.gather(*(worker.dispatch.run_once() for worker in workers * 2))
    assert await deadlocks(connection) == before
    while (await workers[0].dispatch.run_once()).events:
        pass
    assert await connection.fetchval("select count(*) from tidegate.event_scheduler_sources") == 31


async def test_a_new_plan_in_the_middle_of_a_plan_begins_at_the_front(
    database: Database, connection: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two batches of new slots an operator changes the limit: the first in line stay the first."""
    monkeypatch.setattr(replan, "BATCH", 5)
    worker = Worker(database.url)
    await limit(database, 1)
    await publish(connection, 20)
    await worker.dispatch.run_once()
    await limit(database, 2)
    run, batches = worker.database.run, 0

    async def interrupted(*args: Any, **kwargs: Any) -> Any:
        nonlocal batches
        batches += 1
        if batches == 3:
            await limit(database, 4)
        return await run(*args, **kwargs)

    monkeypatch.setattr(worker.database, "run", interrupted)
    await worker.replan.run_once()
    rows = await connection.fetch(
        "select ingress_sequence from tidegate.event_ingress_retries order by next_attempt_at, ingress_sequence"
    )
    assert inversions([row[0] for row in rows]) == []
    await worker.database.close()


async def test_a_long_line_does_not_hold_up_a_short_one(
    database: Database, connection: Connection, clock: Clock, workers: list[Worker]
) -> None:
    """Both are let go; the long one has been due for longer. The short one's events are in the first batch."""
    for source, count in (("long", 200), ("short", 3)):
        await control.pause(database, source, actor="test")
        await publish(connection, count, source)
    while (await workers[0].dispatch.run_once()).events:
        pass
    for source in ("long", "short"):
        await control.resume(database, source, "test")
        await workers[0].replan.run_once()
        await clock.advance(1)
    assert (await workers[0].retry.run_once()).launched == 20
    assert len(await connection.fetch(LAUNCHED, "short")) == 3


async def test_a_held_event_that_cannot_be_processed_is_alone(
    database: Database, connection: Connection, clock: Clock, workers: list[Worker]
) -> None:
    for source in ("one", "two"):
        await control.pause(database, source, actor="test")
        await publish(connection, 3, source)
    await workers[0].dispatch.run_once()
    await connection.execute("alter table tidegate.workflow_events drop constraint workflow_events_occurred_at_check")
    bad = await connection.fetchval(
        "update tidegate.workflow_events set occurred_at = '20000-01-01' where id = "
        "(select id from tidegate.workflow_events where source = 'one' order by ingress_sequence offset 1 limit 1) "
        "returning id"
    )
    for source in ("one", "two"):
        await control.resume(database, source, "test")
    await workers[0].replan.run_once()
    for _ in range(4):
        await workers[0].retry.run_once()
    assert await connection.fetchval(QUIET)
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 5
    letter = await connection.fetchrow("select subject_id, reason from tidegate.dead_letters")
    assert letter is not None and letter["subject_id"] == bad and letter["reason"]


async def test_forcing_an_event_does_not_end_the_limits_pause(
    database: Database, connection: Connection, clock: Clock, workers: list[Worker]
) -> None:
    rate = RateLimit(limit=2, interval_ms=100, pause_ms=60_000)
    await control.set_limit(database, "noisy", rate, "test")
    await publish(connection, 5)
    await workers[0].dispatch.run_once()
    held = await connection.fetchval("select event_id from tidegate.event_ingress_retries limit 1")
    await clock.advance(1000)
    await control.change_retry(database, "events", held, "force", "test")
    for _ in range(3):
        await workers[0].retry.run_once()
        await workers[0].replan.run_once()
        await clock.advance(1000)
    assert len(await connection.fetch(LAUNCHED, "noisy")) == 2


@pytest.mark.parametrize(("before_ms", "after_ms"), [(60_000, 1_000), (1_000, 60_000)])
async def test_a_changed_interval_neither_forgets_what_passed_nor_shuts_the_source(
    database: Database, connection: Connection, clock: Clock, workers: list[Worker], before_ms: int, after_ms: int
) -> None:
    await limit(database, 5, interval_ms=before_ms)
    await publish(connection, 5)
    await workers[0].dispatch.run_once()
    await limit(database, 5, interval_ms=after_ms)
    for _ in range(3):  # refused, and written back each time
        await publish(connection, 1)
        assert (await workers[0].dispatch.run_once()).held == 1
    await clock.advance(min(before_ms, after_ms) / 2)
    await workers[0].retry.run_once()
    assert len(await connection.fetch(LAUNCHED, "noisy")) == 5
    for _ in range(4):
        await clock.advance(after_ms * 1.05)
        await workers[0].retry.run_once()
    assert len(await connection.fetch(LAUNCHED, "noisy")) == 8


async def test_a_line_longer_than_the_calendar(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """One a year, for hundreds of events: every one gets a slot that the database can hold."""
    await limit(database, 1, interval_ms=366 * 86_400_000)
    await publish(connection, 30)
    for _ in range(2):
        assert (await workers[0].dispatch.run_once()).dead_lettered == 0
    await connection.execute("update tidegate.event_scheduler_sources set drain_at = '8990-01-01'")
    await publish(connection, 20)
    outcome = await workers[0].dispatch.run_once()
    assert (outcome.held, outcome.dead_lettered) == (20, 0)


@pytest.mark.parametrize("are_held", [False, True], ids=["newcomers", "held events"])
async def test_a_launch_that_waited_for_a_trigger_counts_from_when_it_was_launched(
    database_url: str, database: Database, connection: Connection, clock: Clock, are_held: bool
) -> None:
    """A batch has passed the source's gate and waits for the row of a limited trigger. The limit holds over the times
    at which events are launched, not over those at which they passed."""
    app = Tidegate()

    @app.workflow(on="tick", throttle="1000/s")
    async def tick(ctx: Any) -> None: ...

    await database.run(app.register)
    worker = Worker(database_url, batch_size=500)
    trigger_id = await connection.fetchval("select id from tidegate.workflow_event_triggers")
    await limit(database, 10)
    await connection.execute("insert into tidegate.event_scheduler_triggers (trigger_id) values ($1)", trigger_id)
    await publish(connection, 10)
    turn = worker.dispatch.run_once
    if are_held:
        await control.pause(database, "noisy", duration_ms=60_000, actor="test")
        await worker.turn()
        await control.resume(database, "noisy", "test")
        await worker.replan.run_once()
        await clock.advance(2000)
        turn = worker.retry.run_once
    async with database.transaction() as other:
        await other.execute("select 1 from tidegate.event_scheduler_triggers for update")
        first = asyncio.create_task(turn())
        await eventually(database, "select exists (select from pg_locks where not granted)")
        await clock.advance(600)
    await first
    await clock.advance(450)
    await publish(connection, 10)
    for _ in range(30):
        await worker.turn()
        await clock.advance(100)
    rows = await connection.fetch(LAUNCHED, "noisy")
    await worker.database.close()
    assert len(rows) == 20
    assert most_in_any_interval(milliseconds([row["launched_at"] for row in rows]), 1000) <= 10


async def test_rows_of_new_sources_are_created_before_any_row_is_locked(
    database: Database, connection: Connection
) -> None:
    """With a default limit each source gets a row; created while others are locked, it would be locked out of order."""
    limit = RateLimit(limit=5, interval_ms=1000)
    await sources.set_limit(connection, "*", limit, "test")
    await sources.set_limit(connection, "old", limit, "test")
    lock_old = "select from tidegate.event_scheduler_sources where source = 'old' for update skip locked"
    was_free: list[bool] = []
    async with database.transaction() as batch:

        class Watched:
            async def fetch(self, query: str, *args: Any) -> Any:
                if query.lstrip().startswith("insert"):
                    was_free.append(len(await connection.fetch(lock_old)) == 1)
                return await batch.fetch(query, *args)

        watched: Any = Watched()
        locked = await sources.lock(watched, ["new", "old"])
        assert (sorted(locked.sources), was_free) == (["new", "old"], [True])
        assert await connection.fetch(lock_old) == []
