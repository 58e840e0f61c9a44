"""The source gate against a model: any order of events, verbs, clock steps, turns and crashes keeps its promises.

The stages and verbs are the real ones on a real Postgres; the clock is moved by hand. Turns come in any order, alone or
twice, early or late: a wake-up that is lost, doubled, early or late is nothing else. A crash is an error that no stage
catches, in the middle of a transaction, after which the worker is a new one.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any, ClassVar, NamedTuple

import asyncpg
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.conftest import Clock
from tests.flow.checker import Epoch, carry_breaches, limit_breaches
from tidegate import failpoints
from tidegate.app import Tidegate
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.flow import control
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.flow.hold import replan
from tidegate.flow.hold.event_plan import EventPlans, EventReplan
from tidegate.flow.hold.event_retry import EventRetry
from tidegate.model.retry import RetryPolicy
from tidegate.model.source import Breaker, RateLimit, SourceBreakerPolicy
from tidegate.store.db import Database

EXAMPLES = int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "40"))
STEPS = int(os.environ.get("TIDEGATE_TEST_STEPS", "40"))

# Making a failing example smaller takes minutes: asked for when it is wanted.
PHASES = set(Phase) - (set() if os.environ.get("TIDEGATE_TEST_SHRINK") else {Phase.shrink})

POLICY = RetryPolicy(base_ms=100, factor=2, max_ms=1000, jitter_ratio=0, max_attempts=6, max_age_ms=5 * 86_400_000)
BREAKER = SourceBreakerPolicy(threshold=3, window_ms=60_000, pause_ms=10_000)
SOURCES = ("a", "b", "c")
POINTS = {
    "dispatch": ["dispatch.after_claim", "dispatch.after_gate", "dispatch.after_match", "dispatch.before_commit",
                 "dispatch.after_commit"],
    "retry": ["retry.before_commit"],
    "replan": ["replan.before_commit"],
}  # fmt: skip
FINAL = ("completed", "cancelled", "exhausted")

TABLES = (
    "event_decisions", "dead_letters", "workflow_run_steps", "workflow_runs",
    "workflow_trigger_deliveries", "event_ingress_retries", "event_inbox", "event_scheduler_source_metrics",
    "event_scheduler_sources", "workflow_events",
)  # fmt: skip

# Where each event is: in the inbox, waiting, delivered, cancelled or given up.
PLACES = """
select e.id, e.source, e.ingress_sequence,
       exists (select 1 from tidegate.event_inbox i where i.event_id = e.id) as inbox,
       r.retry_state, r.attempts, r.next_attempt_at, r.plan_version,
       (select count(*) from tidegate.workflow_trigger_deliveries d where d.event_id = e.id) as deliveries,
       (select count(*) from tidegate.workflow_runs w where w.event_id = e.id) as runs,
       exists (select 1 from tidegate.dead_letters l where l.subject_id = e.id) as is_dead
  from tidegate.workflow_events e left join tidegate.event_ingress_retries r on r.event_id = e.id
 order by e.ingress_sequence
"""
ROWS = """
select source, breaker_state, breaker_until, throttled_until, plan_version, is_replanning
  from tidegate.event_scheduler_sources
"""


class Crash(BaseException):
    """Nothing catches it: the process is gone, its transaction with it."""


class Place(NamedTuple):
    """Where an event is."""

    id: uuid.UUID
    source: str
    sequence: int
    inbox: bool
    state: str | None
    attempts: int | None
    next_attempt_at: datetime | None
    plan_version: int | None
    deliveries: int
    runs: int
    is_dead: bool

    @property
    def is_final(self) -> bool:
        return not self.inbox and self.state != "scheduled"


class World(NamedTuple):
    """What the examples share: one loop, one database, one clock."""

    runner: asyncio.Runner
    database: Database
    clock: Clock


class Worker:
    """The stages of one worker, turned by hand; its batches are small, so that small examples have several."""

    def __init__(self, database: Database) -> None:
        self.dispatch = Dispatch(database, batch_size=7, after_launch=lambda: None, breaker=BREAKER)
        self.retry = EventRetry(database, batch_size=5, after_launch=lambda: None, breaker=BREAKER)
        self.replan = EventReplan(database, EventPlans(POLICY))


class GateMachine(RuleBasedStateMachine):
    """The model knows the pauses, the limits, and in which order what passed; the tables are asked for the rest."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.run = self.world.runner.run
        self.database, self.clock = self.world.database, self.world.clock
        self.run(self._reset())
        self.workers = [Worker(self.database), Worker(self.database)]
        self.set_back_ms = self.longest_ms = 0
        self.real_ms = 0.0  # what really passed: a clock set back takes nothing away
        self.paused: dict[str, datetime | None] = {}
        self.own: dict[str, RateLimit] = {}
        self.default: RateLimit | None = None
        self.epochs: dict[str, list[Epoch]] = {source: [Epoch(0, None, 1)] for source in SOURCES}
        self.admissions: dict[str, list[tuple[int, float]]] = {source: [] for source in SOURCES}
        self.closed_until: dict[str, datetime] = {}  # the pause after an exceeded limit
        self.last_sequence: dict[str, int] = {}
        self.forced: set[uuid.UUID] = set()
        self.cancelled: set[uuid.UUID] = set()
        self.published = 0
        self.places: dict[uuid.UUID, Place] = {}
        self.rows: dict[str, Any] = {}

    async def _reset(self) -> None:
        failpoints.disarm()
        async with self.database.transaction() as connection:
            for table in TABLES:
                await connection.execute(f"delete from tidegate.{table}")

    async def _read(self) -> tuple[dict[uuid.UUID, Place], dict[str, Any]]:
        async with self.database.connection() as connection:
            places = [Place(*row) for row in await connection.fetch(PLACES)]
            return {place.id: place for place in places}, {r["source"]: r for r in await connection.fetch(ROWS)}

    @property
    def now(self) -> datetime:
        return self.clock.now

    def _is_paused(self, source: str) -> bool:
        return source in self.paused and ((until := self.paused[source]) is None or until > self.now)

    def _limit(self, source: str) -> RateLimit | None:
        return self.own.get(source) or self.default

    # ----- what may happen

    @initialize(limits=st.lists(st.integers(1, 5), min_size=1, max_size=2))
    def begin(self, limits: list[int]) -> None:
        for source, limit in zip(SOURCES, limits, strict=False):
            self.set_limit(source, RateLimit(limit=limit, interval_ms=1000))
        self.publish("a", 6, "tick", None)

    @rule(
        source=st.sampled_from(SOURCES),
        count=st.integers(1, 12),
        kind=st.sampled_from(["tick", "tick", "tick", "bad"]),
        ttl_ms=st.sampled_from([None, None, None, 500, 5_000]),
    )
    def publish(self, source: str, count: int, kind: str, ttl_ms: int | None) -> None:
        async def send() -> None:
            async with self.database.connection() as connection:
                await connection.execute(
                    "select tidegate.publish($1, $2, ttl_ms => $3) from generate_series(1, $4)",
                    kind, source, ttl_ms, count,
                )  # fmt: skip

        self.run(send())
        self.published += count
        self._look(None)

    @rule(
        source=st.sampled_from(SOURCES), how=st.sampled_from(["until", "duration", "open"]), ms=st.integers(1, 20_000)
    )
    def pause(self, source: str, how: str, ms: int) -> None:
        end = self.now + timedelta(milliseconds=ms)
        given: dict[str, Any] = {"until": {"until": end}, "duration": {"duration_ms": ms}, "open": {}}[how]
        self.run(control.pause(self.database, source, actor="model", **given))
        self.paused[source] = None if how == "open" else end
        self._look(None)

    @rule(source=st.sampled_from(SOURCES))
    def resume(self, source: str) -> None:
        if source not in self.rows:
            return
        self.run(control.resume(self.database, source, "model"))
        self.paused.pop(source, None)
        self.closed_until.pop(source, None)
        self._look(None)

    @rule(
        source=st.sampled_from([*SOURCES, "*"]),
        limit=st.none()
        | st.builds(
            RateLimit,
            limit=st.integers(1, 5),
            interval_ms=st.sampled_from([10, 1000, 1001, 60_000]),
            pause_ms=st.sampled_from([0, 0, 3_000]),
        ),
    )
    def set_limit(self, source: str, limit: RateLimit | None) -> None:
        before = {s: self._limit(s) for s in SOURCES}
        self.longest_ms = max(self.longest_ms, limit.interval_ms if limit else 0)  # what passed under it still counts
        self.run(control.set_limit(self.database, source, limit, "model"))
        if source == "*":
            self.default = limit
        elif limit is None:
            self.own.pop(source, None)
        else:
            self.own[source] = limit
        for s in SOURCES:
            now = self._limit(s)
            if now != before[s]:
                bound = (now.limit, now.interval_ms) if now else (None, 1)
                self.epochs[s].append(Epoch(self.real_ms, *bound))
            if source in (s, "*"):
                self.closed_until.pop(s, None)
        self._look(None)

    @rule(ms=st.integers(1, 50) | st.integers(50, 5_000) | st.sampled_from([61_000, 3_600_000, 86_400_000]))
    def advance(self, ms: int) -> None:
        self.run(self.clock.advance(ms))
        self.real_ms += ms

    @rule(ms=st.integers(1, 900))
    def step_back(self, ms: int) -> None:
        self.run(self.clock.advance(-ms))
        self.set_back_ms += ms

    @rule(worker=st.integers(0, 1), stage=st.sampled_from(["dispatch", "retry", "replan"]))
    def turn(self, worker: int, stage: str) -> None:
        self.run(getattr(self.workers[worker], stage).run_once())
        self._look(stage)

    @rule(worker=st.integers(0, 1), ms=st.sampled_from([1, 20, 300]), times=st.integers(1, 6))
    def work(self, worker: int, ms: int, times: int) -> None:
        """The ordinary course of things: everything looked at, again and again."""
        for _ in range(times):
            for stage in ("dispatch", "replan", "retry"):
                self.turn(worker, stage)
            self.advance(ms)

    @rule(
        worker=st.integers(0, 1),
        point=st.sampled_from([(stage, point) for stage, points in POINTS.items() for point in points]),
        nth=st.integers(1, 3),
    )
    def crash(self, worker: int, point: tuple[str, str], nth: int) -> None:
        stage, name = point
        hits = 0

        def hit(passed: str) -> None:
            nonlocal hits
            hits += passed == name
            if passed == name and hits == nth:
                raise Crash

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failpoints, "hit", hit)
            try:
                self.run(getattr(self.workers[worker], stage).run_once())
            except Crash:
                self.workers[worker] = Worker(self.database)
        self._look(stage)

    @rule(worker=st.integers(0, 1), point=st.sampled_from(POINTS["dispatch"][:4]))
    def fail(self, worker: int, point: str) -> None:
        """The batch fails and is taken apart: each of its events gets a transaction of its own."""
        failpoints.arm(f"{point}=raise")
        self.run(self.workers[worker].dispatch.run_once())
        failpoints.disarm()
        self._look("single")

    @precondition(lambda self: any(place.state == "scheduled" for place in self.places.values()))
    @rule(verb=st.sampled_from(["cancel", "force"]), data=st.data())
    def change_waiting(self, verb: str, data: st.DataObject) -> None:
        waiting = [place.id for place in self.places.values() if place.state == "scheduled"]
        index = data.draw(st.integers(0, len(waiting) - 1), label="which")
        if verb == "cancel":
            self.run(control.change_retry(self.database, "events", waiting[index], "cancel", "model"))
            self.cancelled.add(waiting[index])
        else:
            self.run(control.change_retry(self.database, "events", waiting[index], "force", "model"))
            self.forced.add(waiting[index])
        self._look(None)

    # ----- what must hold

    def _look(self, stage: str | None) -> None:
        """Read the tables after a step and judge what changed."""
        before, rows = self.places, self.rows
        self.places, self.rows = self.run(self._read())
        assert len(self.places) == self.published
        passed: dict[str, list[Place]] = {}
        for place in self.places.values():
            old = before.get(place.id)
            self._judge_change(old, place, stage)
            if place.deliveries and not (old and old.deliveries):
                passed.setdefault(place.source, []).append(place)
        for source, group in passed.items():
            assert stage in ("dispatch", "retry", "single"), f"{stage} let {source} through"
            self._judge_passage(source, group, rows.get(source), stage)
        if stage == "dispatch":
            self._note_exceeded(before, passed, rows)

    def _judge_change(self, old: Place | None, new: Place, stage: str | None) -> None:
        assert new.deliveries <= 1 and new.runs <= 1
        if old is None:
            assert new.inbox and new.state is None and not new.deliveries
            return
        assert (new.attempts or 0) >= (old.attempts or 0)
        assert new.deliveries >= old.deliveries and new.runs >= old.runs
        if old.state in FINAL:
            assert new.state == old.state
        if old.state == "scheduled" and new.state == "completed":
            assert old.next_attempt_at is not None and old.next_attempt_at <= self.now, "before its time"
            assert stage == "retry"
        if not old.inbox:
            assert not new.inbox

    def _judge_passage(self, source: str, group: list[Place], row: Any, stage: str) -> None:
        assert not self._is_paused(source), f"{source} is paused until {self.paused[source]}"
        assert not {place.id for place in group} & self.cancelled
        if row is not None and row["breaker_state"] != "closed":
            assert row["breaker_until"] <= self.now, f"the breaker of {source} is open"
            assert len(group) == 1 or stage == "single", "one probe"
        if source in self.closed_until:
            assert self.closed_until[source] <= self.now, "within the pause after an exceeded limit"
        epochs = self.epochs[source]
        self.admissions[source] += [(len(epochs) - 1, self.real_ms)] * len(group)
        assert not (found := limit_breaches(self.admissions[source], epochs)), found
        assert not (found := carry_breaches(self.admissions[source], epochs)), found
        in_line = [place.sequence for place in group if place.id not in self.forced]
        if in_line:
            assert min(in_line) > self.last_sequence.get(source, 0), "out of order"
            self.last_sequence[source] = max(in_line)

    def _note_exceeded(
        self, before: dict[uuid.UUID, Place], passed: dict[str, list[Place]], rows: dict[str, Any]
    ) -> None:
        """Some of a batch passed, the limit refused the rest: nothing may follow within the limit's pause."""
        for source, group in passed.items():
            limit = self._limit(source)
            newly = [p for p in self.places.values() if p.source == source and p.state == "scheduled"]
            had_waiting = any(p.source == source and p.state == "scheduled" for p in before.values())
            row = self.rows.get(source)
            probing = source in rows and rows[source]["breaker_state"] != "closed"
            quiet = row is not None and row["breaker_state"] == "closed" and not row["is_replanning"]
            if limit and limit.pause_ms and newly and group and not had_waiting and not probing and quiet:
                self.closed_until[source] = self.now + timedelta(milliseconds=limit.pause_ms)

    @invariant()
    def nothing_is_lost_or_stuck(self) -> None:
        for place in self.places.values():
            waits = place.state == "scheduled"
            assert place.inbox + waits + bool(place.deliveries) + (place.state in ("cancelled", "exhausted")) == 1, (
                place
            )
            assert (place.state == "completed") <= (place.deliveries == 1), place
            if waits:
                row = self.rows[place.source]
                assert place.next_attempt_at is not None
                assert place.plan_version == row["plan_version"] or row["is_replanning"], "no one will ever look at it"
        assert all(self.places[event_id].state == "cancelled" for event_id in self.cancelled)

    @invariant()
    def nobody_waits_longer_than_the_limit_asks(self) -> None:
        """A slot lies no further away than all events of the source need, one after the other."""
        for place in self.places.values():
            row = self.rows.get(place.source)
            if place.state != "scheduled" or row is None or row["is_replanning"] or self._is_paused(place.source):
                continue
            if row["breaker_state"] != "closed":
                continue
            limit = self._limit(place.source)
            ahead = sum(other.source == place.source for other in self.places.values())
            turns = (ahead / limit.limit + 3) * max(limit.interval_ms, limit.pause_ms) * 1.05 if limit else 0
            longest = self.longest_ms + turns + self.set_back_ms + 1
            assert place.next_attempt_at is not None
            assert place.next_attempt_at <= self.now + timedelta(milliseconds=longest), (place, self.now, limit)

    def teardown(self) -> None:
        """Lift everything and let time pass: every event comes to its end."""
        try:
            for source in (*SOURCES, "*"):
                self.set_limit(source, None)
            for source in SOURCES:
                self.resume(source)
            for _ in range(4 * len(self.places) + 20):  # an open breaker lets one through in ten seconds
                for stage in ("dispatch", "replan", "retry"):
                    self.turn(0, stage)
                if all(place.is_final for place in self.places.values()):
                    break
                self.advance(3_000)
            self.nothing_is_lost_or_stuck()
            assert all(place.is_final for place in self.places.values())
        finally:
            failpoints.disarm()


@pytest.fixture
def world(postgres: EmbeddedPostgres, template: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(replan, "BATCH", 4)
    name = "gate_machine"

    async def admin(statement: str) -> None:
        connection = await asyncpg.connect(postgres.admin_url())
        await connection.execute(statement)
        await connection.close()

    async def prepare() -> tuple[Database, Clock]:
        await admin(f"create database {name} template {template} owner {ROLE}")
        database = Database(postgres.url(name), "test", size=4)
        app = Tidegate()

        @app.workflow(on="tick")
        async def tick(ctx: Any) -> None: ...

        # Its own breaker stays out of the way: these tests are about the source's.
        @app.workflow(on="bad", params={"x": "{{ event.payload.missing }}"}, breaker=Breaker(threshold=10_000))
        async def bad(ctx: Any, x: int) -> None: ...

        await database.run(app.register)
        clock = Clock(database)
        await clock.install()
        return database, clock

    with asyncio.Runner() as runner:
        database, clock = runner.run(prepare())
        yield World(runner, database, clock)
        runner.run(database.close())
        runner.run(admin(f"drop database {name} with (force)"))


@pytest.mark.timeout(max(300, EXAMPLES * 30))
def test_the_gate_keeps_its_promises(world: World) -> None:
    GateMachine.world = world
    run_state_machine_as_test(
        GateMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
            print_blob=False,
        ),
    )
