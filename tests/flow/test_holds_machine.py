"""Slots held while runs execute, against a model: any order of events, claims, suspensions, ends, deaths, edits, clock
steps and crashes lets no more execute than there are slots, and in the end everything is done.

The stages, claims and writes are the real ones on a real Postgres; functions are not called: a run executes from the
claim that lets it begin until its end or suspension is written. The clock is moved by hand.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.conftest import Clock
from tests.flow.trigger_worker import BREAKER, TriggerWorker, make_trigger
from tidegate import failpoints
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.errors import Conflict
from tidegate.flow import control
from tidegate.flow.run.claiming import DueRuns
from tidegate.flow.run.outcomes import OutcomeWriter
from tidegate.model.budget import Budget
from tidegate.model.ids import DefinitionId, RunId
from tidegate.model.run import ClaimedRun, FinishedRun
from tidegate.model.step import RunOutcome, SuspendedRun
from tidegate.store import doctor, runs, triggers
from tidegate.store.db import Database
from tidegate.store.deliveries import NOBODY

EXAMPLES = int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "10"))
STEPS = int(os.environ.get("TIDEGATE_TEST_STEPS", "40"))
PHASES = set(Phase) - (set() if os.environ.get("TIDEGATE_TEST_SHRINK") else {Phase.shrink})

KEY = "{{ event.payload.key }}"
# The limits of each trigger: its own by key, a budget by key, both; the event type is the trigger's name.
TRIGGERS: dict[str, dict[str, Any]] = {
    "t": {"max_concurrency": 2, "concurrency_key": KEY},
    "b": {"budgets": ["slots"]},
    "tb": {"max_concurrency": 1, "budgets": ["slots"]},
}
LEASE_MS = 2000
TABLES = (
    "event_decisions", "dead_letters", "workflow_runs", "workflow_trigger_deliveries", "event_inbox", "slot_waits",
    "event_scheduler_source_metrics", "workflow_events", "event_scheduler_trigger_metrics", "budget_keys",
    "budget_holders",
)  # fmt: skip
POINTS = ("slot_line.before_enter", "slot_line.before_commit", "outcome.before_commit")
RUNS = """
select r.id, e.type, e.payload ->> 'key' as key, r.status
  from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id
"""
HOLDING = """
select id from tidegate.workflow_runs
 where status in ('pending', 'running') and concurrency_key is not null and slot_key is null
"""


class Crash(BaseException):
    """Nothing catches it: the process is gone, its transaction with it."""


class World(NamedTuple):
    """What the examples share: one loop, one database, one clock, the workflows and the triggers."""

    runner: asyncio.Runner
    database: Database
    clock: Clock
    definitions: list[DefinitionId]
    triggers: dict[str, uuid.UUID]


class Worker:
    """One worker: its stages, its claims, and what it executes."""

    def __init__(self, database: Database, name: str) -> None:
        self.name = name
        self.stages = TriggerWorker(database, batch_size=6)
        self.due = DueRuns(database, name, LEASE_MS)
        self.executing: dict[RunId, ClaimedRun] = {}
        self._outcomes = OutcomeWriter(
            database, breaker=BREAKER, fill=self.stages.delivery_retry.fill, claim=lambda _: NOBODY,
            after_free=lambda _: None, after_wait=lambda _: None, after_block=lambda _: None,
            waits_here=lambda *_: False,
        )  # fmt: skip

    async def write(self, ends: list[FinishedRun | SuspendedRun]) -> None:
        """Write how runs ended, or that they are suspended, together."""
        written = [asyncio.get_running_loop().create_future() for _ in ends]
        for end, one in zip(ends, written, strict=True):
            self._outcomes.put(RunOutcome([], end), one.set_result)
        for answer in await asyncio.gather(*written):
            if isinstance(answer, BaseException):
                raise answer


class HoldsMachine(RuleBasedStateMachine):
    """`t` has slots of its own by key, `b` and `tb` those of a budget by key, `tb` one of its own, too."""

    world: ClassVar[World]
    names = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.run = self.world.runner.run
        self.database, self.clock = self.world.database, self.world.clock
        self.workers = [self._worker(), self._worker()]
        self.dead: dict[RunId, ClaimedRun] = {}  # executing when their worker died; not claimed since
        self.published = 0
        self.limits = {"t": 2, "tb": 1, "slots": 2}
        # Executing when the limits were changed, or holding a slot until they end: those keep it.
        self.before: set[RunId] = set()
        self.run(self._reset())

    def _worker(self) -> Worker:
        return Worker(self.database, f"worker {next(self.names)}")

    async def _reset(self) -> None:
        async with self.database.transaction() as connection:
            for table in TABLES:
                await connection.execute(f"delete from tidegate.{table}")
            await connection.execute("delete from tidegate.workers")
            # One worker is seen all the time, so that what waits is served.
            await connection.execute(
                "insert into tidegate.workers (name, definitions, slots, version, heartbeat_ms, seen_at) "
                "values ('w', $1, 1, '0', 1000, 'infinity')", self.world.definitions,
            )  # fmt: skip
        for kind, fields in TRIGGERS.items():
            await self._edit(kind, holds="executing", **{k: v for k, v in fields.items() if k == "max_concurrency"})
        await control.put_budget(self.database, Budget("slots", concurrency=2, key=KEY), "test")

    async def _edit(self, kind: str, **fields: Any) -> None:
        await control.update_trigger(self.database, self.world.triggers[kind], fields, "test")

    def _runs(self) -> dict[RunId, tuple[str, str, str]]:
        async def read() -> dict[RunId, tuple[str, str, str]]:
            async with self.database.connection() as connection:
                return {row[0]: (row[1], row[2], row[3]) for row in await connection.fetch(RUNS)}

        return self.run(read())

    def _executing(self) -> set[RunId]:
        return {run_id for worker in self.workers for run_id in worker.executing} | self.dead.keys()

    def _holding(self) -> set[RunId]:
        """The runs that hold their slots until they end."""

        async def read() -> set[RunId]:
            async with self.database.connection() as connection:
                return {row[0] for row in await connection.fetch(HOLDING)}

        return self.run(read())

    # What happens ------------------------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(sorted(TRIGGERS)), key=st.sampled_from("ab"), count=st.integers(1, 4))
    def publish(self, kind: str, key: str, count: int) -> None:
        async def store() -> None:
            async with self.database.connection() as connection:
                await connection.execute(
                    "select tidegate.publish($1, 'shop', $2) from generate_series(1, $3)", kind, {"key": key}, count
                )

        self.run(store())
        self.published += count

    @rule(worker=st.integers(0, 1))
    def turn(self, worker: int) -> None:
        self.run(self.workers[worker].stages.turn())

    @rule(worker=st.integers(0, 1), room=st.integers(1, 8))
    def claim(self, worker: int, room: int) -> None:
        self.run(self._claim(self.workers[worker], room))

    @rule(room=st.integers(1, 8))
    def all_at_once(self, room: int) -> None:
        """Both workers decide, claim and suspend at the same time."""

        async def together() -> None:
            one, two = self.workers
            await asyncio.gather(
                one.stages.turn(), two.stages.turn(), self._claim(one, room), self._claim(two, room),
                self._leave(one, 2, "suspend", 0), self._leave(two, 2, "end", 0),
            )  # fmt: skip

        self.run(together())

    async def _claim(self, worker: Worker, room: int) -> None:
        found, _ = await worker.due.claim(self.world.definitions, room)
        for one in found:
            worker.executing[one.run.id] = one.run
            self.dead.pop(one.run.id, None)

    @rule(
        worker=st.integers(0, 1), count=st.integers(1, 4), how=st.sampled_from(["suspend", "suspend", "end"]),
        ms=st.sampled_from([0, 1, 50, 400]),
    )  # fmt: skip
    def leave(self, worker: int, count: int, how: str, ms: int) -> None:
        self.run(self._leave(self.workers[worker], count, how, ms))

    async def _leave(self, worker: Worker, count: int, how: str, ms: int) -> None:
        """Some that execute are suspended for a while, or end. They do not execute any more when that is written."""
        some = list(worker.executing.values())[:count]
        await worker.write([_suspended(one, ms) if how == "suspend" else _ended(one) for one in some])
        for one in some:
            del worker.executing[one.id]

    @rule(ms=st.sampled_from([1, 20, 100, 500, LEASE_MS // 2]))
    def advance(self, ms: int) -> None:
        self.run(self.clock.advance(ms))

        async def renew() -> None:
            async with self.database.transaction() as connection:
                for worker in self.workers:
                    await runs.renew(connection, list(worker.executing.values()), LEASE_MS)

        self.run(renew())

    @rule()
    def reconcile(self) -> None:
        async def release() -> None:
            async with self.database.transaction() as connection:
                await runs.release_expired(connection, 100)

        self.run(release())

    @rule(worker=st.integers(0, 1))
    def die(self, worker: int) -> None:
        self.dead |= self.workers[worker].executing
        self.workers[worker] = self._worker()

    @rule(worker=st.integers(0, 1), point=st.sampled_from(POINTS), stop=st.sampled_from(["suspend", "end"]))
    def crash(self, worker: int, point: str, stop: str) -> None:
        """The process dies before a commit, of a claim or of what it writes."""

        def hit(passed: str) -> None:
            if passed == point:
                raise Crash

        mine = self.workers[worker]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failpoints, "hit", hit)
            try:
                if point.startswith("slot_line"):
                    self.run(self._claim(mine, 4))
                else:
                    self.run(asyncio.wait_for(self._leave(mine, 2, stop, 50), 1))
            except (Crash, TimeoutError):
                self.die(worker)

    @rule(limit=st.integers(1, 3), own=st.integers(1, 3), slots=st.integers(1, 3))
    def change_limits(self, limit: int, own: int, slots: int) -> None:
        self.limits = {"t": limit, "tb": own, "slots": slots}
        self.before = self._executing() | self._holding()

        async def change() -> None:
            await self._edit("t", max_concurrency=limit)
            await self._edit("tb", max_concurrency=own)
            await control.put_budget(self.database, Budget("slots", concurrency=slots, key=KEY), "test")

        self.run(change())

    @rule(kind=st.sampled_from(sorted(TRIGGERS)), holds=st.sampled_from(["unfinished", "executing", "executing"]))
    def change_holds(self, kind: str, holds: str) -> None:
        self.run(self._edit(kind, holds=holds))

    @rule(number=st.integers(0, 20))
    def cancel(self, number: int) -> None:
        waiting = sorted(run_id for run_id, (_, _, status) in self._runs().items() if status == "pending")
        if waiting:
            run_id = waiting[number % len(waiting)]
            try:
                self.run(control.cancel_run(self.database, run_id, "ada", BREAKER))
            except Conflict:
                return
            self.dead.pop(run_id, None)

    # What holds --------------------------------------------------------------------------------------------------

    @invariant()
    def no_more_execute_than_there_are_slots(self) -> None:
        known = self._runs()
        now = self._executing()
        executing = [(run_id, *known[run_id][:2]) for run_id in now]
        for key in "ab":
            self._check("t", [run_id for run_id, kind, of in executing if kind == "t" and of == key])
            self._check("slots", [run_id for run_id, kind, of in executing if kind != "t" and of == key])
        self._check("tb", [run_id for run_id, kind, _ in executing if kind == "tb"])

    def _check(self, name: str, executing: list[RunId]) -> None:
        new = [run_id for run_id in executing if run_id not in self.before]
        assert not new or len(executing) <= self.limits[name], f"{len(executing)} execute in {name}: {self.limits}"

    def teardown(self) -> None:
        """In the end everything ends, without waiting for a safety net, and nobody holds or waits for anything."""
        self.die(0), self.die(1)
        self.run(self.clock.advance(2 * LEASE_MS))
        self.reconcile()
        for _ in range(150):  # three seconds: less than until a run asks for its slot again by itself
            self.turn(0)
            self.claim(0, 50)
            self.leave(0, 50, "end", 0)
            self.run(self.clock.advance(20))
            found = self._runs()
            self.no_more_execute_than_there_are_slots()
            if len(found) == self.published and all(status != "pending" for _, _, status in found.values()):
                break
        left = Counter((kind, status) for kind, _, status in self._runs().values())
        assert len(self._runs()) == self.published and not any(status == "pending" for _, status in left), left

        async def kept() -> tuple[int, int, dict[str, int]]:
            async with self.database.transaction() as connection:
                held = await connection.fetchval("select count(*) from tidegate.budget_holders")
                waits = await connection.fetchval("select count(*) from tidegate.slot_waits")
                return held, waits, {one.name: one.total for one in await doctor.orphans(connection, 0) if one.total}

        assert self.run(kept()) == (0, 0, {})


def _suspended(run: ClaimedRun, ms: int) -> SuspendedRun:
    given = None if run.slot_key is None else run.trigger_id
    return SuspendedRun(
        id=run.id, claim_generation=run.claim_generation, next_attempt_at=None, delay_ms=ms, gives_back=given
    )


def _ended(run: ClaimedRun) -> FinishedRun:
    return FinishedRun(
        id=run.id, claim_generation=run.claim_generation, status="succeeded", trigger_id=run.trigger_id,
        concurrency_key=run.concurrency_key, is_probe=run.is_probe,
    )  # fmt: skip


@pytest.fixture
def world(postgres: EmbeddedPostgres, template: str) -> Iterator[World]:
    name = "holds_machine"

    async def admin(statement: str) -> None:
        connection = await asyncpg.connect(postgres.admin_url())
        await connection.execute(statement)
        await connection.close()

    async def prepare() -> tuple[Database, Clock, list[DefinitionId], dict[str, uuid.UUID]]:
        await admin(f"create database {name} template {template} owner {ROLE}")
        database = Database(postgres.url(name), "test", size=10)
        clock = Clock(database)
        await clock.install()
        await control.put_budget(database, Budget("slots", concurrency=2, key=KEY), "test")
        made = {
            kind: await make_trigger(database, kind, event_type=kind, holds="executing", **limits)
            for kind, limits in TRIGGERS.items()
        }
        async with database.connection() as connection:
            definitions = [d.id for d in await triggers.list_definitions(connection)]
        return database, clock, definitions, made

    with asyncio.Runner() as runner:
        database, clock, definitions, made = runner.run(prepare())
        yield World(runner, database, clock, definitions, made)
        runner.run(database.close())
        runner.run(admin(f"drop database {name} with (force)"))


@pytest.mark.timeout(max(300, EXAMPLES * 40))
def test_no_more_execute_than_there_are_slots(world: World) -> None:
    HoldsMachine.world = world
    run_state_machine_as_test(
        HoldsMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
