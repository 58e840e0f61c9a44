"""Budgets against a model: any order of events, edits, pauses, ended runs, clock steps, turns and crashes keeps what
budgets promise.

The stages and verbs are the real ones on a real Postgres; the clock is moved by hand, as in `test_trigger_machine`.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import datetime
from typing import Any, ClassVar, NamedTuple

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.conftest import Clock
from tests.flow.checker import milliseconds, most_in_any_interval
from tests.flow.trigger_worker import TriggerWorker, make_trigger
from tidegate import failpoints
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.flow import control
from tidegate.model.budget import Budget
from tidegate.store import doctor
from tidegate.store.db import Database

EXAMPLES = int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "10"))
STEPS = int(os.environ.get("TIDEGATE_TEST_STEPS", "40"))
PHASES = set(Phase) - (set() if os.environ.get("TIDEGATE_TEST_SHRINK") else {Phase.shrink})

KEY, COST = "{{ event.payload.key }}", "event.payload.cost"
# The budgets that each trigger uses; the event type is the trigger's name.
TRIGGERS = {"r": ["rate"], "s": ["slots"], "rs": ["rate", "slots"], "rb": ["both", "rate"], "b": ["both"]}
WINDOW_MS = {"rate": 1000, "both": 500}
RATES, SLOTS = st.integers(3, 6), st.integers(1, 3)
TABLES = (
    "event_decisions", "dead_letters", "workflow_runs", "workflow_trigger_deliveries", "event_inbox",
    "event_scheduler_source_metrics", "workflow_events", "event_scheduler_trigger_metrics", "budget_keys",
    "budget_holders",
)  # fmt: skip
DELIVERIES = """
select d.id, e.type, e.payload ->> 'key' as key, (e.payload ->> 'cost')::int as cost, d.status, d.retry_state, d.reason,
       d.budget, d.launched_at, e.ingress_sequence as sequence, r.status in ('pending', 'running') as is_unfinished,
       d.last_error, (select count(*) from tidegate.workflow_runs w where w.delivery_id = d.id) as runs
  from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e on e.id = d.event_id
  left join tidegate.workflow_runs r on r.id = d.workflow_run_id
 order by d.launched_at, e.ingress_sequence
"""
POINTS = [
    ("dispatch", "dispatch.before_commit"), ("dispatch", "dispatch.after_commit"),
    ("delivery_retry", "delivery_retry.before_commit"), ("delivery_retry", "delivery_retry.after_commit"),
]  # fmt: skip


class Crash(BaseException):
    """Nothing catches it: the process is gone, its transaction with it."""


class World(NamedTuple):
    """What the examples share: one loop, one database, one clock."""

    runner: asyncio.Runner
    database: Database
    clock: Clock


class Row(NamedTuple):
    id: uuid.UUID
    type: str
    key: str
    cost: int
    status: str
    retry_state: str
    reason: str | None
    budget: str | None
    launched_at: datetime | None
    sequence: int
    is_unfinished: bool | None
    last_error: str | None
    runs: int


class BudgetMachine(RuleBasedStateMachine):
    """`rate` counts costs by key, `slots` has a concurrency by key, `both` has a rate and a concurrency without one."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.run = self.world.runner.run
        self.database, self.clock = self.world.database, self.world.clock
        self.workers = [self._worker(), self._worker()]
        self.published = 0
        # The limits so far, each with the launches that happened under it: what was launched before is not judged.
        self.limits = {"rate": 5, "slots": 2, "both": 4}
        self.bound = 2
        self.before: dict[str, set[uuid.UUID]] = defaultdict(set)
        self.paused: set[str] = set()
        self.run(self._reset())

    def _worker(self) -> TriggerWorker:
        return TriggerWorker(self.database, batch_size=6)

    async def _reset(self) -> None:
        async with self.database.transaction() as connection:
            for table in TABLES:
                await connection.execute(f"delete from tidegate.{table}")
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

    def _rows(self) -> list[Row]:
        async def read() -> list[Row]:
            async with self.database.connection() as connection:
                return [Row(*row) for row in await connection.fetch(DELIVERIES)]

        return self.run(read())

    # What happens ------------------------------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(sorted(TRIGGERS)), key=st.sampled_from("ab"), cost=st.integers(0, 3),
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

    @rule(worker=st.integers(0, 1))
    def turn(self, worker: int) -> None:
        self.run(self.workers[worker].turn())

    @rule()
    def turn_both(self) -> None:
        async def both() -> None:
            await asyncio.gather(*(worker.turn() for worker in self.workers))

        self.run(both())

    @rule(ms=st.sampled_from([1, 20, 100, 300, 700, 2000]))
    def advance(self, ms: int) -> None:
        self.run(self.clock.advance(ms))

    @rule(worker=st.integers(0, 1), count=st.integers(1, 4), status=st.sampled_from(["succeeded", "cancelled"]))
    def end_runs(self, worker: int, count: int, status: Any) -> None:
        self.run(self.workers[worker].end_runs(count, status))

    @rule(name=st.sampled_from(["rate", "both"]), limit=RATES)
    def change_rate(self, name: str, limit: int) -> None:
        if limit != self.limits[name]:
            self.limits[name] = limit
            self.before[name] = {row.id for row in self._rows()}
            self.run(self._put())

    @rule(limit=SLOTS, bound=SLOTS)
    def change_slots(self, limit: int, bound: int) -> None:
        """A lowered concurrency does not end what runs: those are not judged."""
        self.limits["slots"], self.bound = limit, bound
        self.before["in use"] = {row.id for row in self._rows() if row.is_unfinished}
        self.run(self._put())

    @rule(name=st.sampled_from(["rate", "slots", "both"]))
    def pause_or_resume(self, name: str) -> None:
        if name in self.paused:
            self.paused.discard(name)
            self.run(control.resume_budget(self.database, name, "test"))
        else:
            self.paused.add(name)
            self.before[f"paused {name}"] = {row.id for row in self._rows() if row.status == "launched"}
            self.run(control.pause_budget(self.database, name, actor="test"))

    @rule(worker=st.integers(0, 1), point=st.sampled_from(POINTS))
    def crash(self, worker: int, point: tuple[str, str]) -> None:
        """The process dies at the end of a transaction, or right after it."""
        stage, name = point

        def hit(passed: str) -> None:
            if passed == name:
                raise Crash

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failpoints, "hit", hit)
            try:
                self.run(getattr(self.workers[worker], stage).run_once())
            except Crash:
                self.workers[worker] = self._worker()

    # What holds --------------------------------------------------------------------------------------------------

    @invariant()
    def budgets_are_not_exceeded(self) -> None:
        rows = self._rows()
        assert len({row.id for row in rows}) == len(rows) and all(
            row.runs == (row.status == "launched") for row in rows
        )
        for name, window_ms in WINDOW_MS.items():
            spent: dict[str, list[datetime]] = defaultdict(list)
            for row in rows:
                if row.launched_at and name in TRIGGERS[row.type] and row.id not in self.before[name]:
                    is_rate = name == "rate"
                    spent[row.key if is_rate else ""] += [row.launched_at] * (row.cost if is_rate else 1)
            for key, times in spent.items():
                most = most_in_any_interval(milliseconds(times), window_ms) if times else 0
                assert most <= self.limits[name], f"{most} of {name} {key}"
        self._slots_are_not_exceeded(rows)

    def _slots_are_not_exceeded(self, rows: list[Row]) -> None:
        new = [row for row in rows if row.is_unfinished and row.id not in self.before["in use"]]
        old = [row for row in rows if row.is_unfinished and row.id in self.before["in use"]]
        for name, most in (("slots", self.limits["slots"]), ("both", self.bound)):
            for key in "ab":
                is_of = [row for row in new if name in TRIGGERS[row.type] and (name == "both" or row.key == key)]
                were = [row for row in old if name in TRIGGERS[row.type] and (name == "both" or row.key == key)]
                assert not is_of or len(is_of) + len(were) <= most, f"{len(is_of)} hold {name} {key}"

    @invariant()
    def nothing_is_launched_while_paused_and_nobody_waits_without_a_reason(self) -> None:
        for row in self._rows():
            for name in self.paused & set(TRIGGERS[row.type]):
                assert row.status != "launched" or row.id in self.before[f"paused {name}"], row
            if row.retry_state == "scheduled":
                assert row.reason == "budget" and row.budget in TRIGGERS[row.type] and row.last_error, row

    @invariant()
    def lines_are_in_order(self) -> None:
        """Of one trigger and key with the same cost, none is launched while an earlier one waits or before it."""
        first: dict[tuple[str, str], int] = {}
        for row in self._rows():  # by the time of launch; those that wait are last
            if row.launched_at is None or row.cost == 0:
                continue
            place = first.get((row.type, row.key), 0)
            if len(TRIGGERS[row.type]) == 1:
                assert row.sequence > place, f"{row} overtook"
            first[row.type, row.key] = max(place, row.sequence)

    def teardown(self) -> None:
        """In the end everything is launched, and nobody holds anything."""
        for name in list(self.paused):
            self.pause_or_resume(name)
        for _ in range(400):
            self.run(self.workers[0].turn())
            self.run(self.workers[1].end_runs(10))
            self.run(self.clock.advance(100))
            rows = self._rows()
            if len(rows) == self.published and all(row.status == "launched" for row in rows):
                break
        self.run(self.workers[0].end_runs(100))
        assert Counter(row.status for row in self._rows()) == ({"launched": self.published} if self.published else {})

        async def left() -> tuple[int, dict[str, int]]:
            async with self.database.transaction() as connection:
                held = await connection.fetchval("select count(*) from tidegate.budget_holders")
                return held, {one.name: one.total for one in await doctor.orphans(connection, 0) if one.total}

        assert self.run(left()) == (0, {})


@pytest.fixture
def world(postgres: EmbeddedPostgres, template: str) -> Iterator[World]:
    name = "budget_machine"

    async def admin(statement: str) -> None:
        connection = await asyncpg.connect(postgres.admin_url())
        await connection.execute(statement)
        await connection.close()

    async def prepare() -> tuple[Database, Clock]:
        await admin(f"create database {name} template {template} owner {ROLE}")
        database = Database(postgres.url(name), "test", size=6)
        clock = Clock(database)
        await clock.install()
        for budget in (Budget("rate", "5/s"), Budget("slots", concurrency=2), Budget("both", "5/s")):
            await control.put_budget(database, budget, "test")
        for kind, used in TRIGGERS.items():
            await make_trigger(database, kind, event_type=kind, budgets=used)
        return database, clock

    with asyncio.Runner() as runner:
        database, clock = runner.run(prepare())
        yield World(runner, database, clock)
        runner.run(database.close())
        runner.run(admin(f"drop database {name} with (force)"))


@pytest.mark.timeout(max(300, EXAMPLES * 30))
def test_budgets_keep_their_promises(world: World) -> None:
    BudgetMachine.world = world
    run_state_machine_as_test(
        BudgetMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
