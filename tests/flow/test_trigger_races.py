"""Triggers with workers and operators at the same instant: real clock, separate pools, one winner each."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.checker import milliseconds, most_in_any_interval
from tests.flow.conftest import eventually, race
from tests.flow.trigger_worker import BREAKER, TriggerWorker, held, make_trigger, statuses
from tidegate.errors import Conflict, NotFound
from tidegate.flow import control
from tidegate.flow.code.workflow import Workflow
from tidegate.flow.control import RetryVerb
from tidegate.flow.hold.delivery_retry import DeliveryTurn
from tidegate.flow.run import finish
from tidegate.flow.run.runner import Runner
from tidegate.model.retry import RetryPolicy
from tidegate.model.run import ClaimedRun, FinishedRun, RunStatus
from tidegate.store import runs, trigger_gates, triggers
from tidegate.store.db import Connection, Database
from tidegate.store.deliveries import Claim
from tidegate.store.locks import Unlocked

WORKERS = 4
# Whoever waits for a slot and is not woken waits for an hour: a lost wake-up cannot hide behind the next attempt.
PATIENT = RetryPolicy(base_ms=3_600_000, factor=1, max_ms=3_600_000, jitter_ratio=0, max_attempts=10_000)

# Trigger, key and sequence of those that wait for a slot although one is free and nobody has told them.
FORGOTTEN = """
select d.trigger_id, d.concurrency_key, d.ingress_sequence
  from tidegate.workflow_trigger_deliveries d join tidegate.workflow_event_triggers t on t.id = d.trigger_id
 where d.retry_state = 'scheduled' and d.reason = 'concurrency' and d.next_attempt_at > tidegate.now()
   and t.max_concurrency > (select count(*) from tidegate.workflow_runs r
                             where r.trigger_id = d.trigger_id and r.concurrency_key = d.concurrency_key
                               and r.status in ('pending', 'running'))
"""
UNFINISHED = "select count(*) from tidegate.workflow_runs where status in ('pending', 'running')"
QUIET = """
select not exists (select 1 from tidegate.event_inbox)
   and not exists (select 1 from tidegate.event_ingress_retries where retry_state = 'scheduled')
   and not exists (select 1 from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled')
   and not exists (select 1 from tidegate.workflow_runs where status in ('pending', 'running'))
"""
ORPHANS = """
select (select count(*) from tidegate.workflow_events e
         where not exists (select 1 from tidegate.workflow_trigger_deliveries d where d.event_id = e.id)
           and not exists (select 1 from tidegate.event_inbox i where i.event_id = e.id)
           and not exists (select 1 from tidegate.event_decisions c where c.event_id = e.id)
           and e.type <> 'nobody')
     + (select count(*) from tidegate.workflow_trigger_deliveries d
         where (d.retry_state = 'scheduled') <> (d.next_attempt_at is not null)
            or (d.status = 'launched') <> exists (select 1 from tidegate.workflow_runs r where r.delivery_id = d.id)
            or d.retry_state = 'running')
     + (select count(*) from tidegate.trigger_idempotency_keys where run_id is null)
"""


class Worker(TriggerWorker):
    """The stages of one worker process and its runs, on a pool of its own."""

    def __init__(self, url: str, name: str, *, policy: RetryPolicy = PATIENT, batch_size: int = 20) -> None:
        super().__init__(Database(url, "worker", size=6), policy, batch_size)
        self.name = name
        self.seconds = 0.0
        self.fails = False
        self.runner = Runner(
            self.database,
            {"tick": Workflow("tick", self._tick, [])},
            worker=name,
            concurrency=10,
            lease_ms=60_000,
            breaker=BREAKER,
            fill=self.delivery_retry.fill,
            after_free=self._after_free,
        )

    async def _tick(self, ctx: Any, **given: Any) -> None:
        await asyncio.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("as asked")

    def _after_free(self, freed: finish.Freed) -> None:
        if isinstance(freed.filled, DeliveryTurn):
            self.delivery_retry.committed(freed.filled)

    async def claim(self, limit: int = 10) -> list[ClaimedRun]:
        """Due runs, held by this worker and not begun."""
        async with self.database.transaction() as connection:
            definitions = [d.id for d in await triggers.list_definitions(connection)]
            return await runs.claim_due(
                connection, definitions=definitions, limit=limit, worker=self.name, lease_ms=60_000
            )

    async def finish(self, held: Sequence[ClaimedRun], status: RunStatus = "succeeded", *, fill: bool = True) -> Any:
        """End runs and launch what waits for their slots, in one transaction."""
        ended = [
            FinishedRun(
                id=run.id,
                claim_generation=run.claim_generation,
                status=status,
                trigger_id=run.trigger_id,
                concurrency_key=run.concurrency_key,
                is_probe=run.is_probe,
            )
            for run in held
        ]

        async def work(connection: Connection) -> finish.Freed:
            definitions = [d.id for d in await triggers.list_definitions(connection)]
            return await finish.end_held(
                connection,
                ended,
                breaker=BREAKER,
                fill=self.delivery_retry.fill if fill else None,
                claim=Claim(self.name, 60_000, definitions, len(ended)),
                also=also,
            )

        also: frozenset[uuid.UUID] = frozenset()
        while True:
            try:
                return await self.database.run(work)
            except Unlocked as exc:
                also |= exc.trigger_ids

    async def drain(self) -> None:
        """Look until nothing is due any more."""
        while (await self.dispatch.run_once()).events:
            pass
        await self.delivery_replan.run_once()
        while (turn := await self.delivery_retry.run_once()).due or turn.replanned:
            await self.delivery_replan.run_once()


@pytest.fixture
async def workers(database_url: str) -> AsyncIterator[list[Worker]]:
    made = [Worker(database_url, f"w{n}") for n in range(WORKERS)]
    yield made
    for worker in made:
        await worker.runner.stop(5)
        await worker.database.close()


@contextlib.asynccontextmanager
async def working(database: Database, workers: Sequence[Worker], *, with_runs: bool = True) -> AsyncIterator[None]:
    """Every worker turns its stages, each in a loop of its own, until the block ends."""
    stopping = False

    async def loop(turn: Callable[[], Awaitable[Any]]) -> None:
        while not stopping:
            await turn()
            await asyncio.sleep(0.006)

    async with database.connection() as connection:
        definitions = [d.id for d in await triggers.list_definitions(connection)]
    stages: list[Callable[[], Awaitable[Any]]] = []
    for worker in workers:
        worker.runner.serve(definitions)
        stages += [worker.dispatch.run_once, worker.retry.run_once, worker.replan.run_once]
        stages += [worker.delivery_retry.run_once, worker.delivery_replan.run_once]
        stages += [worker.runner.run_once] if with_runs else []
    tasks = [asyncio.create_task(loop(stage)) for stage in stages]
    try:
        yield
    finally:
        stopping = True
        await asyncio.gather(*tasks)


async def publish(connection: Connection, count: int = 1, source: str = "shop", **payload: Any) -> None:
    await connection.execute(
        "select tidegate.publish('tick', $1, $2) from generate_series(1, $3)", source, payload, count
    )


async def deadlocks(connection: Connection) -> int:
    await connection.execute("select pg_stat_force_next_flush()")
    found: int = await connection.fetchval("select deadlocks from pg_stat_database where datname = current_database()")
    return found


async def launched(connection: Connection) -> int:
    found: int = await connection.fetchval("select count(*) from tidegate.workflow_runs")
    return found


def most_at_once(rows: Sequence[Any]) -> int:
    """The most runs that were unfinished at any instant, from their creation to their end."""
    steps = sorted([(row["finished_at"], -1) for row in rows] + [(row["created_at"], 1) for row in rows])
    return max(itertools.accumulate(step for _, step in steps))


# One launch ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "limits", [{}, {"throttle_count": 10_000, "throttle_window_ms": 1000}, {"max_concurrency": 10_000}]
)
async def test_looks_at_the_same_due_deliveries_launch_each_once(
    database: Database, connection: Connection, workers: list[Worker], limits: dict[str, Any]
) -> None:
    """Dispatchers and retries of every worker at once: newcomers and those whose time has come."""
    trigger_id = await make_trigger(database, **limits)
    rounds = 12
    for _ in range(rounds):
        await control.pause_trigger(database, trigger_id, actor="test")
        await publish(connection, 6)
        await workers[0].dispatch.run_once()
        await control.resume_trigger(database, trigger_id, "test")
        await workers[0].delivery_replan.run_once()
        await publish(connection, 2)
        looks = [look() for w in workers for look in (w.delivery_retry.run_once, w.dispatch.run_once)]
        before = await launched(connection)
        turns: list[Any] = await asyncio.gather(*looks)
        assert sum(turn.launched for turn in turns) == await launched(connection) - before
        await workers[0].drain()
    assert await statuses(connection) == {"launched": 8 * rounds}
    row = await connection.fetchrow(
        "select count(*), count(distinct event_id), count(distinct delivery_id) from tidegate.workflow_runs"
    )
    assert row is not None and tuple(row) == (8 * rounds,) * 3


async def test_one_due_delivery_and_eight_looks(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    trigger_id = await make_trigger(database)
    await control.pause_trigger(database, trigger_id, actor="test")
    await publish(connection, 40)
    await workers[0].drain()
    await control.resume_trigger(database, trigger_id, "test")
    await workers[0].delivery_replan.run_once()
    await connection.execute("update tidegate.workflow_trigger_deliveries set next_attempt_at = 'tomorrow'")
    for row in await held(connection):
        await control.change_retry(database, "deliveries", row["id"], "force", "test")
        turns = await asyncio.gather(*(worker.delivery_retry.run_once() for worker in workers * 2))
        assert sum(turn.launched for turn in turns) == 1
    assert await launched(connection) == 40


# Idempotency keys ---------------------------------------------------------------------------------------------------


async def test_events_with_one_key_at_once_launch_once_and_the_others_name_the_run(
    database: Database, connection: Connection, database_url: str
) -> None:
    single = [Worker(database_url, f"s{n}", batch_size=1) for n in range(WORKERS)]
    trigger_id = await make_trigger(database, idempotency_key="{{ event.payload.order }}")
    rounds = 40
    for order in range(rounds):
        waits = order % 2 == 1  # half of the rounds: two newcomers meet two whose time has come
        if waits:
            await control.pause_trigger(database, trigger_id, actor="test")
            await publish(connection, 2, order=order)
            await single[0].drain()
            await control.resume_trigger(database, trigger_id, "test")
            await single[0].delivery_replan.run_once()
        await publish(connection, 2 if waits else 4, order=order)
        await asyncio.gather(
            *(worker.dispatch.run_once() for worker in single),
            *(worker.delivery_retry.run_once() for worker in single[:2] if waits),
        )
        await single[0].drain()
    rows = await connection.fetch(
        "select dedupe_key, status, workflow_run_id from tidegate.workflow_trigger_deliveries"
    )
    assert Counter(row["status"] for row in rows) == {"launched": rounds, "skipped": 3 * rounds}
    run_of = {row["dedupe_key"]: row["workflow_run_id"] for row in rows if row["status"] == "launched"}
    for row in rows:
        if row["status"] == "skipped":
            assert row["workflow_run_id"] == run_of[row["dedupe_key"]]
    assert await connection.fetchval(ORPHANS) == 0
    for worker in single:
        await worker.database.close()


async def test_a_key_that_has_just_expired_is_taken_once(
    database: Database, connection: Connection, clock: Clock, database_url: str
) -> None:
    """A microsecond before the end of its window four events are skipped; at its end, one of four launches."""
    window_ms, rounds = 1000, 20
    single = [Worker(database_url, f"s{n}", batch_size=1) for n in range(WORKERS)]
    await make_trigger(database, idempotency_key="same", idempotency_window_ms=window_ms)
    await publish(connection)
    await single[0].drain()
    for n in range(1, rounds + 1):
        await clock.advance(window_ms - 0.001)
        await publish(connection, WORKERS)
        await asyncio.gather(*(worker.dispatch.run_once() for worker in single))
        await single[0].drain()
        assert await launched(connection) == n
        await clock.advance(0.001)
        await publish(connection, WORKERS)
        await asyncio.gather(*(worker.dispatch.run_once() for worker in single))
        await single[0].drain()
        assert await launched(connection) == n + 1
    rows = await connection.fetch(
        "select d.status, d.created_at - k.launched_at as age from tidegate.workflow_trigger_deliveries d "
        "  join tidegate.workflow_trigger_deliveries k on k.workflow_run_id = d.workflow_run_id "
        "   and k.status = 'launched'"
    )
    assert len(rows) == 1 + 2 * WORKERS * rounds, "each has launched, or names a run that was"
    assert {row["age"] < timedelta(milliseconds=window_ms) for row in rows} == {True}
    for worker in single:
        await worker.database.close()


async def test_launches_of_one_key_lie_a_window_apart(
    database: Database, connection: Connection, database_url: str
) -> None:
    """Four workers keep asking for one key around each end of its window, by the real clock."""
    window_ms = 40
    single = [Worker(database_url, f"s{n}", batch_size=1) for n in range(WORKERS)]
    await make_trigger(database, idempotency_key="same", idempotency_window_ms=window_ms)
    for _ in range(40):
        await publish(connection, WORKERS)
        await asyncio.gather(*(worker.dispatch.run_once() for worker in single))
    for worker in single:
        await worker.database.close()
    rows = await connection.fetch(
        "select launched_at from tidegate.workflow_trigger_deliveries where status = 'launched'"
    )
    assert most_in_any_interval(milliseconds([row[0] for row in rows]), window_ms) == 1


# Cancel and force ---------------------------------------------------------------------------------------------------


async def cancelled_or(database: Database, delivery_id: uuid.UUID) -> str:
    """What the operator who cancels is told."""
    try:
        await control.change_retry(database, "deliveries", delivery_id, "cancel", "test")
    except Conflict as exc:
        return str(exc).rsplit(" ", 1)[1]
    return "cancelled"


@pytest.mark.parametrize("limits", [{}, {"max_concurrency": 1000}])
async def test_cancel_or_launch_one_wins_and_the_answer_says_which(
    database: Database, connection: Connection, workers: list[Worker], limits: dict[str, Any]
) -> None:
    rounds, answers = 60, Counter[str]()
    trigger_id = await make_trigger(database, **limits)
    await control.pause_trigger(database, trigger_id, actor="test")
    await publish(connection, rounds)
    await workers[0].drain()
    await control.resume_trigger(database, trigger_id, "test")
    await workers[0].delivery_replan.run_once()
    await connection.execute("update tidegate.workflow_trigger_deliveries set next_attempt_at = 'tomorrow'")
    for row in await held(connection):
        await control.change_retry(database, "deliveries", row["id"], "force", "test")
        answer = await race(
            partial(cancelled_or, database, row["id"]),
            workers[0].delivery_retry.run_once,
            workers[1].delivery_retry.run_once,
        )
        found = await connection.fetchrow(
            "select status, (select count(*) from tidegate.workflow_runs r where r.delivery_id = d.id) as runs "
            "from tidegate.workflow_trigger_deliveries d where id = $1",
            row["id"],
        )
        assert found is not None and (answer, int(answer == "launched")) == tuple(found)
        answers[answer] += 1
    assert set(answers) == {"cancelled", "launched"}, f"no race took place: {answers}"


async def test_cancel_of_the_first_in_line_while_a_slot_becomes_free_wakes_the_next(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """The end of a run launches the first in line, or, when that is cancelled at this instant, the second."""
    await make_trigger(database, max_concurrency=1)
    answers = Counter[str]()
    for n in range(40):
        await publish(connection, 3)
        await workers[0].drain()
        running = await workers[0].claim()
        first, second = await held(connection)
        answer = await race(
            partial(cancelled_or, database, first["id"]),
            partial(workers[0].finish, running, fill=n % 2 == 0),
            workers[1].delivery_retry.run_once,
        )
        answers[answer] += 1
        await workers[1].drain()
        assert [row["id"] for row in await held(connection)] == ([second["id"]] if answer == "launched" else [])
        assert await connection.fetchval(UNFINISHED) == 1
        while await connection.fetchval(UNFINISHED):  # an empty stage for the next round
            await workers[1].finish(await held_runs(workers[1], connection))
    assert set(answers) == {"cancelled", "launched"}, f"no race took place: {answers}"


async def held_runs(worker: Worker, connection: Connection) -> list[ClaimedRun]:
    """Every unfinished run, claimed: by the transaction that launched it, or now."""
    await worker.claim()
    rows = await connection.fetch("select * from tidegate.workflow_runs where status = 'running' order by id")
    return [
        ClaimedRun(
            id=row["id"],
            workflow="tick",
            event_id=row["event_id"],
            correlation_id=row["correlation_id"],
            parameters=row["parameters"],
            attempts=row["attempts"],
            now=row["updated_at"],
            started_at=row["updated_at"],
            claim_generation=row["claim_generation"],
            trigger_id=row["trigger_id"],
            concurrency_key=row["concurrency_key"],
            is_probe=row["is_probe"],
        )
        for row in rows
    ]


async def test_force_while_it_is_launched_launches_once_and_keeps_the_limit(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    await make_trigger(database, max_concurrency=1)
    await publish(connection, 40)
    for worker in workers:
        await worker.drain()
    running = await workers[0].claim()
    answers = Counter[str]()

    async def force(delivery_id: uuid.UUID) -> str:
        try:
            await control.change_retry(database, "deliveries", delivery_id, "force", "test")
        except Conflict as exc:
            assert "it is launched" in str(exc)
            return "launched"
        return "forced"

    while waiting := await held(connection):
        answer = await race(
            partial(force, waiting[0]["id"]),
            partial(workers[0].finish, running),
            *(worker.delivery_retry.run_once for worker in workers[1:]),
        )
        answers[answer] += 1
        await workers[1].drain()
        assert await connection.fetchval(UNFINISHED) == 1
        running = await held_runs(workers[0], connection)
    assert await launched(connection) == 40
    assert set(answers) == {"forced", "launched"}, f"no race took place: {answers}"


# Pauses -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_source", "limits"),
    [
        (False, {}),
        (False, {"throttle_count": 40, "throttle_window_ms": 100}),
        (False, {"max_concurrency": 3}),
        (True, {"max_concurrency": 3}),
    ],
    ids=["trigger", "trigger with throttle", "trigger with slots", "source"],
)
async def test_a_pause_that_has_returned_is_followed_by_no_launch(
    database: Database, connection: Connection, workers: list[Worker], limits: dict[str, Any], of_source: bool
) -> None:
    """Judged twice: by the count of what is committed when the call returns, and by the stamps of the launches."""
    trigger_id = await make_trigger(database, **limits)
    pauses: list[tuple[datetime, datetime]] = []
    rounds, per_round = 3, 12
    async with working(database, workers):
        for _ in range(rounds):
            before = await launched(connection)
            await publish(connection, per_round)
            await eventually(database, "select count(*) > $1 from tidegate.workflow_runs", before)
            if of_source:
                await control.pause(database, "shop", actor="test")
            else:
                await control.pause_trigger(database, trigger_id, actor="test")
            returned_at = await connection.fetchval("select tidegate.now()")
            committed = await launched(connection)
            for _ in range(3):
                await publish(connection, 1)
                await eventually(database, "select not exists (select 1 from tidegate.event_inbox)")
                await asyncio.sleep(0.01)
                assert await launched(connection) == committed, "launched while paused"
            pauses.append((returned_at, await connection.fetchval("select tidegate.now()")))
            if of_source:
                await control.resume(database, "shop", "test")
            else:
                await control.resume_trigger(database, trigger_id, "test")
        await eventually(database, QUIET)
    rows = await connection.fetch("select launched_at from tidegate.workflow_trigger_deliveries")
    assert len(rows) == rounds * (per_round + 3)
    for row in rows:
        assert not any(begun <= row["launched_at"] <= ended for begun, ended in pauses)


# Breaker ------------------------------------------------------------------------------------------------------------


async def test_a_half_open_breaker_admits_one_probe(
    database: Database, connection: Connection, clock: Clock, workers: list[Worker]
) -> None:
    """Eight looks at the instant when the breaker's pause ends; each probe fails, so nobody may follow it."""
    await make_trigger(database)
    await publish(connection, BREAKER.threshold)
    await workers[0].drain()
    await workers[0].finish(await workers[0].claim(), "failed")
    state = "select breaker_state from tidegate.event_scheduler_triggers"
    assert await connection.fetchval(state) == "open"
    for n in range(1, 13):
        await publish(connection, 5)
        await workers[0].dispatch.run_once()
        await workers[0].delivery_replan.run_once()
        if n % 2:  # of the two probes that are to fail, the second follows at once
            await clock.advance(BREAKER.pause_ms)
        await publish(connection, 5)
        for _ in range(2):  # a second time while the probe is under way
            looks = [look() for w in workers for look in (w.delivery_retry.run_once, w.dispatch.run_once)]
            await asyncio.gather(*looks)
            await workers[0].delivery_replan.run_once()
        assert await launched(connection) == BREAKER.threshold + n
        assert await connection.fetchval(state) == "half_open"
        await workers[0].finish(await workers[0].claim(), "failed" if n < 12 else "succeeded")
    assert await connection.fetchval(state) == "closed"
    for _ in range(8):
        await workers[0].drain()
    assert await statuses(connection) == {"launched": BREAKER.threshold + 120}


# Edits --------------------------------------------------------------------------------------------------------------


async def test_after_an_edit_has_returned_nothing_is_launched_by_the_old_version(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    trigger_id = await make_trigger(database, parameter_template={"mark": 1})
    limits: list[dict[str, Any]] = [
        {"throttle_count": 30, "throttle_window_ms": 100},
        {"throttle_count": None, "throttle_window_ms": None, "max_concurrency": 2},
        {"max_concurrency": None},
    ]
    by_old = (
        "select count(*) from tidegate.workflow_trigger_deliveries where status = 'launched' and trigger_version < $1"
    )
    async with working(database, workers):
        for n in range(2, 14):
            before = await launched(connection)
            await publish(connection, 20)
            await eventually(database, "select count(*) > $1 from tidegate.workflow_runs", before)
            change = {"parameter_template": {"mark": n}, **limits[n % 3]}
            changed = await control.update_trigger(database, trigger_id, change, "test")
            assert changed.version == n
            committed = await connection.fetchval(by_old, n)
            await publish(connection, 5)
            await eventually(database, "select not exists (select 1 from tidegate.event_inbox)")
            assert await connection.fetchval(by_old, n) == committed, "launched by the old version"
        await eventually(database, QUIET)
    rows = await connection.fetch(
        "select d.trigger_version, (r.parameters ->> 'mark')::int as mark from tidegate.workflow_runs r "
        "  join tidegate.workflow_trigger_deliveries d on d.id = r.delivery_id"
    )
    assert len(rows) == 12 * 25
    assert all(row["trigger_version"] == row["mark"] for row in rows)
    assert await connection.fetchval(ORPHANS) == 0


@pytest.mark.parametrize("verb", ["disable", "delete"])
@pytest.mark.parametrize(
    "limits", [{}, {"throttle_count": 20, "throttle_window_ms": 50, "max_concurrency": 2}], ids=str
)
async def test_after_a_trigger_is_gone_nothing_is_launched_and_nothing_waits(
    database: Database, connection: Connection, workers: list[Worker], verb: str, limits: dict[str, Any]
) -> None:
    waiting = "select count(*) from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled'"
    trigger_id = await make_trigger(database, **limits)
    before_deadlocks = await deadlocks(connection)
    async with working(database, workers):
        for n in range(3):
            before = await launched(connection)
            await publish(connection, 40)
            await eventually(database, "select count(*) > $1 from tidegate.workflow_runs", before)
            if verb == "disable":
                await control.update_trigger(database, trigger_id, {"status": "disabled"}, "test")
            else:
                await control.delete_trigger(database, trigger_id, "test")
            committed = await launched(connection)
            assert await connection.fetchval(waiting) == 0
            await publish(connection, 3)
            await eventually(database, "select not exists (select 1 from tidegate.event_inbox)")
            await asyncio.sleep(0.01)
            assert await launched(connection) == committed, "launched although the trigger is gone"
            assert await connection.fetchval(waiting) == 0
            if verb == "disable":
                await control.update_trigger(database, trigger_id, {"status": "active"}, "test")
            else:
                new = {"name": f"again{n}", "event_type": "tick", **limits}
                trigger_id = (await control.create_trigger(database, "tick", new, "test")).id
        await eventually(database, f"select ({UNFINISHED}) = 0")
    assert set(await statuses(connection)) <= {"launched", "cancelled"}
    assert await deadlocks(connection) == before_deadlocks


async def test_a_lowered_max_concurrency_holds_for_every_launch_after_it(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """What runs goes on; nothing new begins until there is room under the new bound. No one is forgotten."""
    for worker in workers:
        worker.seconds = 0.004
    trigger_id = await make_trigger(database, max_concurrency=6)
    epochs: list[tuple[datetime, datetime, int]] = []
    since = await connection.fetchval("select tidegate.now()")
    async with working(database, workers):
        await publish(connection, 160)
        for n, bound in enumerate(itertools.cycle([6, 1, 4, 2])):
            if await connection.fetchval(QUIET) or n == 16:
                break
            await control.update_trigger(database, trigger_id, {"max_concurrency": bound}, "test")
            since = await connection.fetchval("select tidegate.now()")
            done = await launched(connection)
            await eventually(
                database, f"select count(*) >= $1 or ({QUIET}) from tidegate.workflow_runs", min(160, done + 8)
            )
            epochs.append((since, await connection.fetchval("select tidegate.now()"), bound))
        await eventually(database, QUIET)
    rows = await connection.fetch("select created_at, finished_at from tidegate.workflow_runs")
    assert len(rows) == 160
    assert most_at_once(rows) <= 6
    for begun, ended, bound in epochs:
        for row in rows:
            at = row["created_at"]
            if begun <= at <= ended:
                assert sum(one["created_at"] <= at < one["finished_at"] for one in rows) <= bound


# The last slot ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "{{ event.payload.key }}"], ids=["one line", "two keys"])
@pytest.mark.parametrize("fill", [True, False], ids=["filled", "woken"])
async def test_the_last_slot_is_neither_given_twice_nor_forgotten(
    database: Database, connection: Connection, workers: list[Worker], key: str | None, fill: bool
) -> None:
    """Ends of runs, retries, newcomers, force and cancel at once; then nobody waits beside a free slot."""
    bound = 2
    await make_trigger(database, max_concurrency=bound, concurrency_key=key)
    in_use = "select coalesce(max(n), 0) from (select count(*) as n from tidegate.workflow_runs "
    in_use += "where status in ('pending', 'running') group by trigger_id, concurrency_key) x"
    for n in range(40):
        await publish(connection, 1, key="a")
        await publish(connection, 1 + n % 2, key="b")
        waiting = await held(connection)
        some = (await held_runs(workers[0], connection))[: 1 + n % 4]
        forced = [row["id"] for row in waiting[-2:]]
        await asyncio.gather(
            *(worker.finish([run], fill=fill) for worker, run in zip(workers, some, strict=False)),
            *(worker.dispatch.run_once() for worker in workers[:2]),
            *(worker.delivery_retry.run_once() for worker in workers),
            *(quietly(control.change_retry(database, "deliveries", one, "force", "test")) for one in forced),
            *(
                quietly(control.change_retry(database, "deliveries", one, "cancel", "test"))
                for one in forced[:1]
                if n % 5 == 0
            ),
        )
        assert await connection.fetchval(in_use) <= bound
        await workers[0].drain()
        assert await connection.fetchval(in_use) <= bound
        assert await connection.fetch(FORGOTTEN) == []
    while not await connection.fetchval(QUIET):
        running = await held_runs(workers[0], connection)
        assert running, "somebody waits and nothing runs"
        await workers[0].finish(running)
        await workers[0].drain()
    assert await connection.fetchval(ORPHANS) == 0


async def quietly(work: Awaitable[Any]) -> None:
    with contextlib.suppress(Conflict, NotFound):
        await work


# A freed slot whose first in line is not launched after all has to go to the next: otherwise that one waits for its
# next attempt, up to `max_ms`, beside a free slot.


async def filled_slot_goes_on(connection: Connection, workers: list[Worker]) -> None:
    running = await held_runs(workers[0], connection)
    assert len(running) == 1
    await workers[0].finish(running)
    await workers[1].drain()
    assert await connection.fetch(FORGOTTEN) == []
    assert await connection.fetchval(UNFINISHED) == 1


async def test_newcomers_behind_a_woken_delivery_take_the_other_free_slots(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    await make_trigger(database, max_concurrency=2)
    await publish(connection, 3)
    await workers[0].drain()
    running = await held_runs(workers[0], connection)
    await workers[0].finish(running, fill=False)  # both slots are free, the third is due
    await publish(connection, 2)
    await workers[0].drain()
    assert await connection.fetch(FORGOTTEN) == []
    assert await connection.fetchval(UNFINISHED) == 2


async def test_a_slot_whose_first_in_line_is_skipped_goes_to_the_next(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    await make_trigger(database, max_concurrency=1, idempotency_key="{{ event.payload.order }}")
    await publish(connection, order=1)
    await workers[0].drain()
    await connection.execute("update tidegate.trigger_idempotency_keys set expires_at = tidegate.now()")
    await publish(connection, order=1)  # waits with a key that is free, and is taken before its turn comes
    await publish(connection, order=2)
    await workers[0].drain()
    assert len(await held(connection)) == 2
    await connection.execute("update tidegate.trigger_idempotency_keys set expires_at = null")
    await connection.execute(
        "insert into tidegate.trigger_idempotency_keys (trigger_id, dedupe_key, run_id) "
        "select trigger_id, '1', id from tidegate.workflow_runs limit 1 on conflict do nothing"
    )
    await filled_slot_goes_on(connection, workers)


async def test_a_slot_whose_first_in_line_has_a_paused_source_goes_to_the_next(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    await make_trigger(database, max_concurrency=1)
    for source in ("shop", "paused", "shop"):
        await publish(connection, source=source)
    await workers[0].drain()
    await control.pause(database, "paused", actor="test")
    await filled_slot_goes_on(connection, workers)


async def test_a_slot_whose_first_in_line_came_too_late_goes_to_the_next(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    await make_trigger(database, max_concurrency=1)
    await publish(connection, 3)
    await workers[0].drain()
    await connection.execute(
        "update tidegate.workflow_events set ttl_ms = 1 where id = $1", (await held(connection))[0]["event_id"]
    )
    await filled_slot_goes_on(connection, workers)


# Lock order ---------------------------------------------------------------------------------------------------------


async def two_triggers(database: Database, first: dict[str, Any], second: dict[str, Any]) -> list[uuid.UUID]:
    """Triggers of events `tick` with the given fields; the first has the lower id, whose row is locked first."""
    made = []
    await make_trigger(database, event_type="nobody")
    for name, fields in (("first", first), ("second", second)):
        given = {"name": name, "event_type": "tick", **fields}
        made.append((await control.create_trigger(database, "tick", given, "test")).id)
    assert made == sorted(made)
    return made


async def in_the_way(
    database: Database, connection: Connection, worker: Worker, ids: Sequence[uuid.UUID], work: Awaitable[Any]
) -> None:
    """`work` needs both triggers; another transaction holds the first and takes the second while it waits."""
    before = await deadlocks(connection)
    async with worker.database.transaction() as other:
        await trigger_gates.lock(other, always=[ids[0]])
        waiting = asyncio.ensure_future(work)
        await eventually(
            database,
            "select exists (select 1 from pg_stat_activity where wait_event_type = 'Lock' "
            "and datname = current_database())",
        )
        await trigger_gates.lock(other, always=[ids[1]])
    await waiting
    assert await deadlocks(connection) == before


async def test_runs_that_got_a_slot_while_they_ran_end_in_lock_order(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """A trigger gets its limit while a run is under way: the run's worker learns only at the end that it has a slot."""
    ids = await two_triggers(database, {}, {"max_concurrency": 5})
    await publish(connection)
    await workers[0].drain()
    running = await held_runs(workers[0], connection)
    await control.update_trigger(database, ids[0], {"max_concurrency": 5}, "test")
    await workers[0].drain()
    await in_the_way(database, connection, workers[1], ids, workers[0].finish(running))
    assert await connection.fetchval(UNFINISHED) == 0


async def test_triggers_that_were_never_locked_before_are_locked_in_order(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    ids = await two_triggers(database, {"max_concurrency": 5}, {"max_concurrency": 5})
    async with workers[2].database.transaction() as known:
        await trigger_gates.lock(known, always=[ids[1]])
    await publish(connection)
    await in_the_way(database, connection, workers[1], ids, workers[0].dispatch.run_once())
    assert await statuses(connection) == {"launched": 2}


async def test_deliveries_that_fail_at_their_retry_lock_in_order(
    database: Database, connection: Connection, workers: list[Worker]
) -> None:
    """A failure is told to its trigger's breaker, under its lock, also where the trigger has no limit."""
    missing = {"parameter_template": {"x": "{{ event.payload.missing }}"}}
    ids = await two_triggers(database, missing, {"max_concurrency": 5})
    for trigger_id in ids:
        await control.pause_trigger(database, trigger_id, actor="test")
    await publish(connection)
    await workers[0].dispatch.run_once()
    for trigger_id in ids:
        await control.resume_trigger(database, trigger_id, "test")
    await workers[0].delivery_replan.run_once()
    await in_the_way(database, connection, workers[1], ids, workers[0].delivery_retry.run_once())
    assert await statuses(connection) == {"failed": 1, "launched": 1}


# Everything at once -------------------------------------------------------------------------------------------------


async def test_a_storm_of_everything_has_no_deadlock_and_no_orphan(
    database: Database, connection: Connection, database_url: str
) -> None:
    hasty = RetryPolicy(base_ms=30, factor=1, max_ms=30, jitter_ratio=0.5, max_attempts=10_000)
    workers = [Worker(database_url, f"w{n}", policy=hasty) for n in range(WORKERS)]
    specs: dict[str, dict[str, Any]] = {
        "free": {},
        "throttled": {"throttle_count": 50, "throttle_window_ms": 50},
        "narrow": {"max_concurrency": 2},
        "keyed": {"max_concurrency": 1, "concurrency_key": "{{ event.source }}"},
        "once": {"idempotency_key": "{{ event.payload.order }}", "max_concurrency": 5},
        "all": {"idempotency_key": "{{ event.payload.order }}", "idempotency_window_ms": 50, "throttle_count": 30,
                "throttle_window_ms": 50, "max_concurrency": 3},
    }  # fmt: skip
    first = await make_trigger(database)
    ids = [first]
    for name, spec in specs.items():
        given = {"name": name, "event_type": "tick", "retry": None, **spec}
        ids.append((await control.create_trigger(database, "tick", given, "test")).id)
    names = [f"s{n}" for n in range(4)]
    tell = random.Random(11)
    before = await deadlocks(connection)

    async def send(count: int) -> None:
        async with database.connection() as own:
            for name in tell.sample(names, k=len(names)):
                await publish(own, count, name, order=tell.randint(0, 9))

    async def waiting() -> list[uuid.UUID]:
        async with database.connection() as own:
            return [row["id"] for row in (await held(own))[:20]]

    async def edit(trigger_id: uuid.UUID) -> None:
        bound = tell.choice([1, 3, None])
        count = tell.choice([20, 50, None])
        change: dict[str, Any] = {"max_concurrency": bound, "throttle_count": count}
        change |= {"throttle_window_ms": 50 if count else None}
        change |= {} if bound else {"concurrency_key": None}
        await control.update_trigger(database, trigger_id, change, "test")

    async def once() -> None:
        verbs = ("send", "send", "pause", "resume", "source", "edit", "toggle", "cancel", "force", "replace")
        verb = tell.choice(verbs)
        trigger_id = tell.choice(ids)
        if verb == "send":
            await send(2)
        elif verb == "pause":
            await control.pause_trigger(database, trigger_id, duration_ms=tell.randint(1, 40), actor="test")
        elif verb == "resume":
            await control.resume_trigger(database, trigger_id, "test")
        elif verb == "source":
            await control.pause(database, tell.choice(names), duration_ms=tell.randint(1, 40), actor="test")
        elif verb == "edit":
            await edit(trigger_id)
        elif verb == "toggle":
            await control.update_trigger(database, trigger_id, {"status": "disabled"}, "test")
            await control.update_trigger(database, trigger_id, {"status": "active"}, "test")
        elif verb == "replace":
            await control.delete_trigger(database, trigger_id, "test")
            ids.remove(trigger_id)
            given = {"name": f"new{uuid.uuid4().hex[:8]}", "event_type": "tick", "max_concurrency": 2}
            ids.append((await control.create_trigger(database, "tick", given, "test")).id)
        elif rows := await waiting():
            chosen: RetryVerb = "cancel" if verb == "cancel" else "force"
            await control.change_retry(database, "deliveries", tell.choice(rows), chosen, "test")

    async def operate() -> None:
        for _ in range(12):
            await quietly(once())

    async with working(database, workers):
        await asyncio.gather(*(operate() for _ in range(4)))
        for trigger_id in ids:
            await control.resume_trigger(database, trigger_id, "test")
        await eventually(database, QUIET)
    assert await connection.fetchval(ORPHANS) == 0
    runs_of = await connection.fetchrow("select count(*), count(distinct delivery_id) from tidegate.workflow_runs")
    assert runs_of is not None and runs_of[0] == runs_of[1] > 0
    assert await deadlocks(connection) == before
    for worker in workers:
        await worker.runner.stop(5)
        await worker.database.close()
