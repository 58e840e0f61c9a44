"""Budgets of steps against a model: any order of events, calls, ends, deaths, cancellations, edits, pauses, clock steps
and crashes keeps what budgets promise, beside deliveries that stand in the same lines.

The questions, the lines and the writes are the real ones on a real Postgres; the functions of steps are not called:
what was granted is executing until a rule ends it.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.conftest import Clock
from tests.flow.checker import milliseconds, most_in_any_interval
from tests.flow.test_budget_machine import COST, KEY, TABLES, Crash
from tests.flow.test_step_budget_workers import WATCH
from tests.flow.trigger_worker import BREAKER, POLICY, TriggerWorker, make_trigger
from tidegate import failpoints
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.flow import control
from tidegate.flow.call.journal import RecordedOutcome
from tidegate.flow.call.spending import SpendQuestion
from tidegate.flow.hold.step_lines import LineRetry
from tidegate.flow.keep.budgets import BudgetKeeper
from tidegate.flow.run.outcomes import OutcomeWriter
from tidegate.flow.run.step_budgets import StepBudgets, declare_nothing
from tidegate.model.budget import Budget, StepSpend
from tidegate.model.ids import StepId, step_id
from tidegate.model.run import ClaimedRun, FinishedRun
from tidegate.model.step import RunOutcome, StepWrite, SuspendedRun
from tidegate.store import doctor, events, runs, steps, triggers
from tidegate.store.db import Connection, Database

EXAMPLES = int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "8"))
STEPS = int(os.environ.get("TIDEGATE_TEST_STEPS", "40"))
PHASES = set(Phase) - (set() if os.environ.get("TIDEGATE_TEST_SHRINK") else {Phase.shrink})

# The budgets of the step of each workflow, and of the trigger of others; the event type is the workflow's name.
OF_STEPS = {"qr": ["rate"], "qs": ["slots"], "qb": ["both", "rate"]}
OF_TRIGGERS = {"r": ["rate"], "s": ["slots"]}
WINDOW_MS = {"rate": 1000, "both": 500}
HOLDERS = """
select h.run_id, h.step_id, h.budget, h.key from tidegate.budget_holders h
  join tidegate.workflow_runs r on r.id = h.run_id and r.status in ('pending', 'running')
   and (h.claim_generation is null or h.claim_generation = r.claim_generation)
"""
ENDED = "select count(*) from tidegate.workflow_runs where status not in ('pending', 'running')"


class StepScene(NamedTuple):
    """What the examples share: one loop, one database, one clock."""

    runner: asyncio.Runner
    database: Database
    clock: Clock


class Executing(NamedTuple):
    """A step that is being called, and the budgets that have to know when that has ended."""

    run: ClaimedRun
    budgets: tuple[str, ...]


class StepMachine(RuleBasedStateMachine):
    """`rate` counts costs by key, `slots` has a concurrency by key, `both` has a rate and a concurrency without one."""

    world: ClassVar[StepScene]

    def __init__(self) -> None:
        super().__init__()
        self.run = self.world.runner.run
        self.database, self.clock = self.world.database, self.world.clock
        self.workers = [self._worker(), self._worker()]
        self.desk = StepBudgets(self.database, declare_nothing, lambda: None)
        self.outcomes = OutcomeWriter(
            self.database, breaker=BREAKER, fill=None, claim=lambda _: None, after_free=lambda _: None,
            after_wait=lambda _: None, after_block=lambda _: None, waits_here=lambda *_: False,
        )  # fmt: skip
        self.executing: dict[StepId, Executing] = {}
        self.published = 0
        self.limits, self.bound = {"rate": 5, "slots": 2, "both": 4}, 2
        self.marks: dict[str, int] = defaultdict(int)  # what was spent before is not judged by the limit as it is
        self.old: set[Any] = set()  # slots that were held when a concurrency was changed
        self.paused: set[str] = set()
        self.run(self._reset())

    def _worker(self) -> TriggerWorker:
        made = TriggerWorker(self.database, batch_size=6)
        made.delivery_retry = LineRetry(
            self.database, batch_size=6, after_launch=lambda: None, breaker=BREAKER, policy=POLICY
        )
        return made

    async def _reset(self) -> None:
        async with self.database.transaction() as connection:
            for table in (*TABLES, "workflow_run_steps", "budget_steps"):
                await connection.execute(f"delete from tidegate.{table}")
            await connection.execute("truncate spent restart identity")
        for name in ("rate", "slots", "both"):
            await control.resume_budget(self.database, name, "test")
        await self._put()

    async def _put(self) -> None:
        rates = {name: f"{self.limits[name]}/{window}ms" for name, window in WINDOW_MS.items()}
        for budget in (
            Budget("rate", rates["rate"], key=KEY, cost=COST),
            Budget("slots", concurrency=self.limits["slots"], key=KEY),
            Budget("both", rates["both"], concurrency=self.bound),
        ):
            await control.put_budget(self.database, budget, "test")

    def _fetch(self, query: str) -> list[Any]:
        async def read() -> list[Any]:
            async with self.database.connection() as connection:
                return list(await connection.fetch(query))

        return self.run(read())

    # What happens ------------------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from([*OF_STEPS, *OF_STEPS, *OF_TRIGGERS]), key=st.sampled_from("ab"), cost=st.integers(0, 3),
        count=st.integers(1, 4),
    )  # fmt: skip
    def publish(self, kind: str, key: str, cost: int, count: int) -> None:
        async def store() -> None:
            async with self.database.connection() as connection:
                await connection.execute(
                    "select tidegate.publish($1, 'shop', $2) from generate_series(1, $3)", kind,
                    {"key": key, "cost": cost}, count,
                )  # fmt: skip

        self.run(store())
        self.published += count

    @rule(both=st.booleans())
    def turn(self, both: bool) -> None:
        async def work() -> None:
            await asyncio.gather(*(worker.turn() for worker in self.workers[: 1 + both]))

        self.run(work())

    @rule(count=st.integers(1, 4))
    def call(self, count: int) -> None:
        """Claim due runs and come to their steps; those without room are suspended."""
        self.run(self._call(count))

    async def _call(self, count: int) -> int:
        async def claim(connection: Connection) -> list[ClaimedRun]:
            wanted = [one.id for one in await triggers.list_definitions(connection) if one.slug in OF_STEPS]
            return await runs.claim_due(connection, definitions=wanted, limit=count, worker="test", lease_ms=60_000)

        claimed = await self.database.run(claim)
        async with self.database.connection() as connection:
            found = await events.get_many(connection, [run.event_id for run in claimed if run.event_id])
        questions = [
            SpendQuestion(
                run, found[run.event_id], step_id(run.id, "ask"), "ask", 0, StepSpend(OF_STEPS[run.workflow]), []
            )
            for run in claimed
            if run.event_id is not None
        ]  # fmt: skip
        answers = await asyncio.gather(*(self.desk.ask(one) for one in questions))
        for one, answer in zip(questions, answers, strict=True):
            assert answer.is_kept and answer.error is None, answer
            if answer.is_granted:
                self.executing[one.step_id] = Executing(one.run, answer.budgets)
            else:
                at = self.clock.now + timedelta(hours=1)
                end = SuspendedRun(
                    id=one.run.id, claim_generation=one.run.claim_generation, next_attempt_at=at, wakes=one.run.wakes
                )
                await self._write(RunOutcome([], end))
        return len(questions)

    async def _write(self, outcome: RunOutcome) -> None:
        written: asyncio.Future[RecordedOutcome | BaseException] = asyncio.get_running_loop().create_future()
        self.outcomes.put(outcome, written.set_result)
        found = await written
        assert isinstance(found, RecordedOutcome) and found.end.is_kept, found

    @rule(count=st.integers(1, 3))
    def end_steps(self, count: int) -> None:
        for one in [*self.executing][:count]:
            self.run(self._end(one))

    async def _end(self, ended: StepId) -> None:
        run, names = self.executing.pop(ended)
        async with self.database.connection() as connection:
            is_new = not await steps.list_of_run(connection, run.id)
        write = StepWrite(
            id=ended, workflow_run_id=run.id, claim_generation=run.claim_generation, name="ask", status="succeeded",
            is_new=is_new, budgets=names,
        )  # fmt: skip
        end = FinishedRun(
            id=run.id, claim_generation=run.claim_generation, status="succeeded", trigger_id=run.trigger_id
        )
        await self._write(RunOutcome([write], end))

    @rule(count=st.integers(1, 2))
    def die(self, count: int) -> None:
        """The worker of executing steps dies, and the leases end."""
        for one in [*self.executing][-count:]:
            run = self.executing.pop(one).run

            async def release(connection: Connection, run: ClaimedRun = run) -> None:
                await runs.release(connection, [run])

            self.run(self.database.run(release))

    @rule()
    def keep(self) -> None:
        self.run(BudgetKeeper(self.database).run_once())

    @rule()
    def cancel(self) -> None:
        """Cancel the run that is first in some line."""
        found = self._fetch(
            "select p.run_id from tidegate.budget_steps p join tidegate.workflow_runs r on r.id = p.run_id "
            "where r.status = 'pending' order by p.place limit 1"
        )
        for row in found:
            self.run(control.cancel_run(self.database, row[0], "test", BREAKER))

    @rule(count=st.integers(1, 4))
    def end_launched(self, count: int) -> None:
        ids = self._fetch(
            "select r.id from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id "
            "where r.status = 'pending' and e.type in ('r', 's') order by r.id"
        )
        self.run(self.workers[0].end_runs(ids=[row[0] for row in ids[:count]]))

    @rule(ms=st.sampled_from([1, 20, 100, 300, 700, 2000]))
    def advance(self, ms: int) -> None:
        self.run(self.clock.advance(ms))

    @rule(name=st.sampled_from(["rate", "both"]), limit=st.integers(3, 6))
    def change_rate(self, name: str, limit: int) -> None:
        if limit != self.limits[name]:
            self.limits[name] = limit
            self.marks[name] = len(self._fetch("select from spent"))
            self.run(self._put())

    @rule(limit=st.integers(1, 3), bound=st.integers(1, 3))
    def change_slots(self, limit: int, bound: int) -> None:
        self.limits["slots"], self.bound = limit, bound
        self.old = {tuple(row) for row in self._fetch(HOLDERS)}
        self.run(self._put())

    @rule(name=st.sampled_from(["rate", "slots", "both"]))
    def pause_or_resume(self, name: str) -> None:
        if name in self.paused:
            self.paused.discard(name)
            self.run(control.resume_budget(self.database, name, "test"))
        else:
            self.paused.add(name)
            self.run(control.pause_budget(self.database, name, actor="test"))
            self.marks[f"paused {name}"] = len(self._fetch("select from spent"))

    @rule(worker=st.integers(0, 1), point=st.sampled_from(["step_lines.before_commit", "step_lines.after_commit"]))
    def crash(self, worker: int, point: str) -> None:
        """The process dies at the end of a transaction, or right after it."""

        def hit(passed: str) -> None:
            if passed == point:
                raise Crash

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failpoints, "hit", hit)
            try:
                self.run(self.workers[worker].delivery_retry.run_once())
            except Crash:
                self.workers[worker] = self._worker()

    # What holds --------------------------------------------------------------------------------------------------

    @invariant()
    def budgets_are_not_exceeded(self) -> None:
        spent = self._fetch("select n, budget, key, amount, at from spent order by n")
        for name, window_ms in WINDOW_MS.items():
            by_key: dict[str, list[Any]] = defaultdict(list)
            for row in spent:
                if row["budget"] == name and row["n"] > self.marks[name]:
                    by_key[row["key"]] += [row["at"]] * row["amount"]
            for key, times in by_key.items():
                assert most_in_any_interval(milliseconds(times), window_ms) <= self.limits[name], (name, key)
        for name in self.paused:
            assert not [row for row in spent if row["budget"] == name and row["n"] > self.marks[f"paused {name}"]]
        held: dict[tuple[str, str], set[Any]] = defaultdict(set)
        for row in self._fetch(HOLDERS):
            held[row["budget"], row["key"]].add(tuple(row))
        for (name, key), found in held.items():
            most = {"slots": self.limits["slots"], "both": self.bound}[name]
            assert len(found) <= most or found <= self.old, (name, key, found)

    @invariant()
    def who_executes_holds_and_who_waits_has_a_place(self) -> None:
        held = {(row["step_id"], row["budget"]) for row in self._fetch(HOLDERS)}
        for one, (run, _) in self.executing.items():
            for name in {"slots", "both"} & {*OF_STEPS[run.workflow]}:
                assert (one, name) in held, run
        late = self._fetch(
            "select p.step_id from tidegate.budget_steps p join tidegate.workflow_runs r on r.id = p.run_id "
            "where p.granted_at is not null and r.status = 'pending' and r.next_attempt_at > tidegate.now()"
        )
        assert late == [], "its turn has come, and its run is not due"

    def teardown(self) -> None:
        """In the end everything was called, and nobody holds anything."""
        for name in list(self.paused):
            self.pause_or_resume(name)
        for _ in range(400):
            self.turn(both=False)
            self.call(10)
            self.end_steps(100)
            self.end_launched(10)
            self.advance(100)
            [[ended]] = self._fetch(ENDED)
            if ended == self.published:
                break
        assert ended == self.published, "something waits for ever"

        async def left() -> tuple[int, int, dict[str, int]]:
            async with self.database.transaction() as connection:
                held = await connection.fetchval("select count(*) from tidegate.budget_holders")
                waiting = await connection.fetchval("select count(*) from tidegate.budget_steps")
                return held, waiting, {o.name: o.total for o in await doctor.orphans(connection, 0) if o.total}

        self.keep()
        assert self.run(left()) == (0, 0, {})


@pytest.fixture
def world(postgres: EmbeddedPostgres, template: str) -> Iterator[StepScene]:
    name = "step_budget_machine"

    async def admin(statement: str) -> None:
        connection = await asyncpg.connect(postgres.admin_url())
        await connection.execute(statement)
        await connection.close()

    async def prepare() -> tuple[Database, Clock]:
        await admin(f"create database {name} template {template} owner {ROLE}")
        database = Database(postgres.url(name), "test", size=6)
        clock = Clock(database)
        await clock.install()
        async with database.connection() as connection:
            await connection.execute(WATCH)
        for budget in (Budget("rate", "5/s"), Budget("slots", concurrency=2), Budget("both", "5/s")):
            await control.put_budget(database, budget, "test")
        for kind in OF_STEPS:
            await make_trigger(database, kind, event_type=kind)
        for kind, used in OF_TRIGGERS.items():
            await make_trigger(database, kind, event_type=kind, budgets=used)
        return database, clock

    with asyncio.Runner() as runner:
        database, clock = runner.run(prepare())
        yield StepScene(runner, database, clock)
        runner.run(database.close())
        runner.run(admin(f"drop database {name} with (force)"))


@pytest.mark.timeout(max(300, EXAMPLES * 30))
def test_budgets_of_steps_keep_their_promises(world: StepScene) -> None:
    StepMachine.world = world
    run_state_machine_as_test(
        StepMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
