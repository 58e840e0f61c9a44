"""Triggers and deliveries against a model: any order of events, edits, pauses, ended runs, clock steps, turns and
crashes keeps what the triggers promise.

The stages and verbs are the real ones on a real Postgres; the clock is moved by hand, as in `test_gate_machine`.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
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
from tests.flow.checker import carry_breaches, limit_breaches
from tests.flow.trigger_model import (
    DELIVERIES,
    EVENTS,
    FINAL,
    GATES,
    RUNS,
    SOURCES,
    GateRow,
    Kept,
    ModelEvent,
    ModelTrigger,
    Place,
    Row,
    Run,
    Tables,
    edits,
    payloads,
    specs,
)
from tests.flow.trigger_worker import BREAKER, POLICY, TriggerWorker
from tidegate import failpoints
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.flow import control
from tidegate.flow.hold import replan
from tidegate.flow.run import finish
from tidegate.flow.run.finish import Freed
from tidegate.model.run import ClaimedRun, FinishedRun, RunStatus
from tidegate.model.source import RateLimit
from tidegate.store import runs, triggers
from tidegate.store.db import Connection, Database
from tidegate.store.deliveries import Claim
from tidegate.store.locks import Unlocked

EXAMPLES = int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "12"))
STEPS = int(os.environ.get("TIDEGATE_TEST_STEPS", "40"))

# Making a failing example smaller takes minutes: asked for when it is wanted.
PHASES = set(Phase) - (set() if os.environ.get("TIDEGATE_TEST_SHRINK") else {Phase.shrink})

STAGES = ("dispatch", "replan", "retry", "delivery_replan", "delivery_retry")
POINTS = [
    ("dispatch", "dispatch.after_claim"), ("dispatch", "dispatch.after_gate"), ("dispatch", "dispatch.after_match"),
    ("dispatch", "dispatch.before_commit"), ("dispatch", "dispatch.after_commit"), ("retry", "retry.before_commit"),
    ("delivery_retry", "delivery_retry.before_commit"), ("delivery_retry", "delivery_retry.before_commit"),
    ("delivery_retry", "delivery_retry.after_commit"), ("delivery_replan", "delivery_replan.before_commit"),
]  # fmt: skip
MOST_TRIGGERS = 3
LEASE_MS = 60_000

TABLES = (
    "event_decisions", "dead_letters", "workflow_run_steps", "workflow_runs",
    "workflow_trigger_deliveries", "event_ingress_retries", "event_inbox", "event_scheduler_source_metrics",
    "event_scheduler_sources", "workflow_events", "trigger_idempotency_keys", "event_scheduler_trigger_metrics",
    "event_scheduler_triggers", "workflow_event_trigger_versions", "workflow_event_triggers",
)  # fmt: skip

Slot = tuple[uuid.UUID, str | None]


class Crash(BaseException):
    """Nothing catches it: the process is gone, its transaction with it."""


class World(NamedTuple):
    """What the examples share: one loop, one database, one clock, one workflow."""

    runner: asyncio.Runner
    database: Database
    clock: Clock
    definition: uuid.UUID


class TriggerMachine(RuleBasedStateMachine):
    """The model knows the events, the triggers and the pauses; the tables are asked for the rest after each step."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.run = self.world.runner.run
        self.database, self.clock = self.world.database, self.world.clock
        self.run(self._reset())
        self.workers = [self._worker(), self._worker()]
        self.running: list[list[ClaimedRun]] = [[], []]
        self.events: dict[uuid.UUID, ModelEvent] = {}
        self.triggers: dict[uuid.UUID, ModelTrigger] = {}
        self.paused: dict[str, datetime | None] = {}
        self.cancelled: set[uuid.UUID] = set()
        self.tables = Tables({}, {}, {}, {})
        self.latest = self.clock.now
        self.longest_ms = 0
        self.real_ms = 0.0  # what really passed: a clock set back takes nothing away

    def _worker(self) -> TriggerWorker:
        return TriggerWorker(self.database, batch_size=5)

    async def _reset(self) -> None:
        failpoints.disarm()
        async with self.database.transaction() as connection:
            for table in TABLES:
                await connection.execute(f"delete from tidegate.{table}")

    async def _read(self) -> Tables:
        async with self.database.connection() as connection:
            places = [Place(*row) for row in await connection.fetch(EVENTS)]
            rows = [Row(*row) for row in await connection.fetch(DELIVERIES)]
            found = [Run(*row) for row in await connection.fetch(RUNS)]
            gates = [GateRow(*row) for row in await connection.fetch(GATES)]
        assert len({(row.trigger_id, row.event_id) for row in rows}) == len(rows), "two deliveries of one event"
        return Tables(*({one.id: one for one in ones} for ones in (places, rows, found, gates)))  # type: ignore[attr-defined]

    @property
    def now(self) -> datetime:
        return self.clock.now

    @property
    def set_back_ms(self) -> float:
        """How far the clock is behind what it has shown already."""
        return (self.latest - self.now) / timedelta(milliseconds=1)

    def _is_source_paused(self, source: str) -> bool:
        return source in self.paused and ((until := self.paused[source]) is None or until > self.now)

    def _alive(self, which: int) -> uuid.UUID:
        alive = [key for key, trigger in self.triggers.items() if trigger.status != "deleted"]
        return alive[which % len(alive)]

    # ----- what may happen

    @initialize(first=specs, second=specs)
    def begin(self, first: dict[str, Any], second: dict[str, Any]) -> None:
        self._create(first)
        self._create(second)
        self.publish("tick", "a", 4, {"n": 1, "customer": "x", "order": 1}, None)

    def _create(self, spec: dict[str, Any]) -> None:
        given = spec | {"name": f"trigger {len(self.triggers)}"}
        made = self.run(control.create_trigger(self.database, "flow", given, "model"))
        self.triggers[made.id] = ModelTrigger(dict(given))
        self.triggers[made.id].begin_epoch(self.real_ms)
        self.longest_ms = max(self.longest_ms, given.get("throttle_window_ms") or 0)
        self._look(None)

    @rule(spec=specs, which=st.integers(0, 5))
    def create_or_delete(self, spec: dict[str, Any], which: int) -> None:
        alive = [key for key, trigger in self.triggers.items() if trigger.status != "deleted"]
        if len(alive) < MOST_TRIGGERS:
            self._create(spec)
            return
        self.run(control.delete_trigger(self.database, alive[which % len(alive)], "model"))
        self.triggers[alive[which % len(alive)]].status = "deleted"
        self._look(None)

    @rule(which=st.integers(0, 5), change=edits)
    def edit(self, which: int, change: dict[str, Any]) -> None:
        trigger_id = self._alive(which)
        trigger = self.triggers[trigger_id]
        self.run(control.update_trigger(self.database, trigger_id, change, "model"))
        trigger.status = change.get("status", trigger.status)
        trigger.spec |= {name: value for name, value in change.items() if name != "status"}
        trigger.begin_epoch(self.real_ms)
        self.longest_ms = max(self.longest_ms, trigger.throttle_window_ms or 0)
        self._look(None)

    @rule(
        kind=st.sampled_from(["tick", "tick", "tock", "none"]),
        source=st.sampled_from(SOURCES),
        count=st.integers(1, 6),
        payload=payloads,
        ttl_ms=st.sampled_from([None, None, None, None, 500, 5_000]),
    )
    def publish(self, kind: str, source: str, count: int, payload: dict[str, Any], ttl_ms: int | None) -> None:
        async def send() -> list[str]:
            async with self.database.connection() as connection:
                rows = await connection.fetch(
                    "select tidegate.publish($1, $2, $3, ttl_ms => $4) from generate_series(1, $5)",
                    kind, source, payload, ttl_ms, count,
                )  # fmt: skip
            return [row[0] for row in rows]

        for event_id in self.run(send()):
            self.events[uuid.UUID(event_id)] = ModelEvent(kind, source, payload, self.now, ttl_ms)
        self._look(None)

    @rule(which=st.integers(0, 5), how=st.sampled_from(["pause", "resume", "resume"]) | st.integers(1, 20_000))
    def pause_trigger(self, which: int, how: str | int) -> None:
        trigger_id = self._alive(which)
        trigger = self.triggers[trigger_id]
        if how == "resume":
            self.run(control.resume_trigger(self.database, trigger_id, "model"))
            trigger.paused = []
        else:
            ms = how if isinstance(how, int) else None
            self.run(control.pause_trigger(self.database, trigger_id, duration_ms=ms, actor="model"))
            trigger.paused = [None if ms is None else self.now + timedelta(milliseconds=ms)]
        self._look(None)

    @rule(
        source=st.sampled_from(SOURCES),
        how=st.sampled_from(["pause", "resume", "resume", "limit", "no limit"]) | st.integers(1, 20_000),
    )
    def change_source(self, source: str, how: str | int) -> None:
        if how == "resume":
            if source in self.paused:
                self.run(control.resume(self.database, source, "model"))
                del self.paused[source]
        elif how in ("limit", "no limit"):
            given = RateLimit(limit=2, interval_ms=1000) if how == "limit" else None
            self.run(control.set_limit(self.database, source, given, "model"))
        else:
            ms = how if isinstance(how, int) else None
            self.run(control.pause(self.database, source, duration_ms=ms, actor="model"))
            self.paused[source] = None if ms is None else self.now + timedelta(milliseconds=ms)
        self._look(None)

    @precondition(lambda self: any(row.waits for row in self.tables.rows.values()))
    @rule(verb=st.sampled_from(["cancel", "cancel all", "force"]), which=st.integers(0, 50))
    def change_waiting(self, verb: str, which: int) -> None:
        waiting = sorted((row.sequence, row.id) for row in self.tables.rows.values() if row.waits)
        chosen = self.tables.rows[waiting[which % len(waiting)][1]]
        if verb == "force":
            self.run(control.change_retry(self.database, "deliveries", chosen.id, "force", "model"))
        for _, delivery_id in waiting:
            is_beside = self.tables.rows[delivery_id].trigger_id == chosen.trigger_id
            if (verb == "cancel" and delivery_id == chosen.id) or (verb == "cancel all" and is_beside):
                self._cancel(delivery_id)
        self._look("change")

    def _cancel(self, delivery_id: uuid.UUID) -> None:
        self.run(control.change_retry(self.database, "deliveries", delivery_id, "cancel", "model"))
        self.cancelled.add(delivery_id)

    @rule(ms=st.integers(1, 50) | st.integers(50, 5_000) | st.sampled_from([600, 10_001, 61_000, 3_600_000]))
    def advance(self, ms: int) -> None:
        self.latest = max(self.latest, self.run(self.clock.advance(ms)))
        self.real_ms += ms

    @rule(ms=st.integers(1, 900))
    def step_back(self, ms: int) -> None:
        self.run(self.clock.advance(-ms))

    @rule(worker=st.integers(0, 1), stage=st.sampled_from(STAGES))
    def turn(self, worker: int, stage: str) -> None:
        done = self.run(getattr(self.workers[worker], stage).run_once())
        is_replanning = any(gate.is_replanning for gate in self.tables.gates.values())
        if any(done) if isinstance(done, tuple) else done or is_replanning:
            self._look(stage)
        if stage == "delivery_replan":
            assert not any(gate.is_replanning for gate in self.tables.gates.values())

    @rule(
        worker=st.integers(0, 1),
        kind=st.sampled_from(["tick", "tick", "tock"]),
        source=st.sampled_from(SOURCES),
        count=st.integers(2, 8),
        payload=payloads,
    )
    def arrive(self, worker: int, kind: str, source: str, count: int, payload: dict[str, Any]) -> None:
        """The ordinary beginning of things."""
        self.publish(kind, source, count, payload, None)
        for stage in STAGES:
            self.turn(worker, stage)

    @rule(worker=st.integers(0, 1), which=st.integers(0, 5), source=st.sampled_from(SOURCES), clears=st.booleans())
    def maintain(self, worker: int, which: int, source: str, clears: bool) -> None:
        """An operator pauses a trigger, drops what has piled up or not, and resumes it; then events come."""
        self.pause_trigger(which, "pause")
        self.arrive(worker, "tick", source, 2, {"n": 1, "customer": "x", "order": 5})
        waiting = [row for row in self.tables.rows.values() if row.waits and row.trigger_id == self._alive(which)]
        for row in waiting if clears else ():
            self._cancel(row.id)
        self.pause_trigger(which, "resume")
        self.arrive(worker, "tick", source, 4, {"n": 2, "customer": "x", "order": 6})

    @rule(worker=st.integers(0, 1), source=st.sampled_from(SOURCES), ms=st.sampled_from([600, 10_001]))
    def break_down(self, worker: int, source: str, ms: int) -> None:
        """Runs fail, the breakers open, and after their pause somebody looks."""
        self.finish(worker, 4, "failed", True, False)
        self.arrive(worker, "tick", source, 2, {"n": 3, "customer": "x", "order": 7})
        self.advance(ms)
        for stage in STAGES:
            self.turn(worker, stage)

    @rule(worker=st.integers(0, 1), ms=st.sampled_from([1, 20, 300, 1000]), times=st.integers(1, 4))
    def work(self, worker: int, ms: int, times: int) -> None:
        """The ordinary course of things: everything looked at, again and again."""
        for _ in range(times):
            for stage in STAGES:
                self.turn(worker, stage)
            self.advance(ms)

    @rule(worker=st.integers(0, 1))
    def rest(self, worker: int) -> None:
        """While the clock stands still, looking again and again comes to an end."""
        for _ in range(5 + 2 * sum(row.waits for row in self.tables.rows.values())):
            before = self.tables.rows, self.tables.gates
            self.turn(worker, "delivery_replan")
            self.turn(worker, "delivery_retry")
            if (self.tables.rows, self.tables.gates) == before:
                return
        raise AssertionError(f"never at rest: {self.tables.gates}")

    @rule(worker=st.integers(0, 1), count=st.integers(0, 3))
    def claim(self, worker: int, count: int) -> None:
        """Runs begin: what their trigger is now may change before they end. Those whose lease ran out are due again:
        who held them will write nothing."""
        self.run(self.database.run(partial(runs.release_expired, limit=100)))
        self.running[worker] += self.run(self.database.run(partial(self._claim_due, count=count)))
        self._look("claim")

    @rule(
        worker=st.integers(0, 1),
        count=st.integers(1, 4),
        status=st.sampled_from(["succeeded", "succeeded", "failed"]),
        is_filling=st.booleans(),
        dies=st.sampled_from([False, False, False, True]),
    )
    def finish(self, worker: int, count: int, status: RunStatus, is_filling: bool, dies: bool) -> None:
        """Runs end; what waits for their slots is launched with them or woken; or the worker dies first."""
        work = partial(self._finish, worker=worker, count=count, status=status, is_filling=is_filling, dies=dies)
        try:
            freed = self._locking(work)
        except Crash:
            self._die(worker)
            self._look("crash")
            return
        assert not (freed.filled and not is_filling)
        self.running[worker] = self.running[worker][count:]
        if freed.filled is not None:
            self.workers[worker].delivery_retry.committed(freed.filled)
            self.running[worker] += [run for run, _ in freed.filled.claimed]
        self._look("finish")
        assert not any(self.tables.runs[run_id].is_unfinished for run_id in freed.written)

    def _locking(self, work: Callable[..., Awaitable[Freed]]) -> Freed:
        """Begun again when a trigger that was not locked turns out to matter."""
        also: frozenset[uuid.UUID] = frozenset()
        while True:
            try:
                return self.run(self.database.run(partial(work, also=also)))
            except Unlocked as exc:
                also |= exc.trigger_ids

    async def _finish(
        self,
        connection: Connection,
        *,
        worker: int,
        count: int,
        status: RunStatus,
        is_filling: bool,
        dies: bool,
        also: frozenset[uuid.UUID],
    ) -> Freed:
        mine = self.running[worker][:count]
        mine = [*mine, *(await self._claim_due(connection, count - len(mine)))]
        finished = [
            FinishedRun(
                id=run.id, claim_generation=run.claim_generation, status=status, trigger_id=run.trigger_id,
                concurrency_key=run.concurrency_key, is_probe=run.is_probe,
            )
            for run in mine
        ]  # fmt: skip
        fill = self.workers[worker].delivery_retry.fill if is_filling else None
        claim = Claim(f"worker {worker}", LEASE_MS, [self.world.definition], len(finished))
        freed = await finish.end_held(connection, finished, breaker=BREAKER, fill=fill, claim=claim, also=also)
        if dies:
            raise Crash
        return freed

    async def _claim_due(self, connection: Connection, count: int) -> list[ClaimedRun]:
        """Due runs; those whose workers died again and again last, one by one."""
        claim: Any = {"definitions": [self.world.definition], "worker": "model", "lease_ms": LEASE_MS}
        claimed = await runs.claim_due(connection, **claim, limit=count)
        while len(claimed) < count and (found := await runs.claim_suspect(connection, **claim, is_counted=False)):
            claimed.append(found.run)
        return claimed

    @rule(worker=st.integers(0, 1), point=st.sampled_from(POINTS), nth=st.integers(1, 3))
    def crash(self, worker: int, point: tuple[str, str], nth: int) -> None:
        """The process dies in the middle of a transaction, or right after it."""
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
                self._die(worker)
        self._look(stage)

    def _die(self, worker: int) -> None:
        self.workers[worker] = self._worker()
        self.running[worker] = []

    @rule(worker=st.integers(0, 1), point=st.sampled_from(POINTS), times=st.sampled_from([1, 1, 2]))
    def fail(self, worker: int, point: tuple[str, str], times: int) -> None:
        """The batch fails and is taken apart; twice, and the first of those in it is given up as well."""
        stage, name = point
        if name.endswith("after_commit"):
            return
        left = times

        def hit(passed: str) -> None:
            nonlocal left
            if passed == name and left:
                left -= 1
                raise failpoints.FailpointHit(name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failpoints, "hit", hit)
            self.run(getattr(self.workers[worker], stage).run_once())
        self._look(stage)

    # ----- what must hold

    def _look(self, stage: str | None) -> None:
        """Read the tables after a step and judge what changed."""
        before, self.tables = self.tables, self.run(self._read())
        assert self.tables.events.keys() == self.events.keys()
        assert before.rows.keys() <= self.tables.rows.keys()
        self._judge_events(before)
        launched: dict[uuid.UUID, list[Row]] = {}
        for row in sorted(self.tables.rows.values(), key=lambda row: row.sequence):
            old = before.rows.get(row.id)
            self._judge_state(row)
            if old is not None and not old.waits:
                assert row == old, "what is decided stays"
            elif row.status == "launched":
                self._judge_time(old, stage)
                launched.setdefault(row.trigger_id, []).append(row)
            elif old is not None:
                assert row.attempts >= old.attempts
        for trigger_id, group in launched.items():
            self._judge_launches(trigger_id, group, before.gates[trigger_id])
        for row in self.tables.rows.values():  # what was skipped may point to a run launched in the same step
            old = before.rows.get(row.id)
            if (old is None or old.waits) and not row.waits and row.status != "launched":
                self._judge_end(row, stage)

    def _judge_events(self, before: Tables) -> None:
        fired: dict[uuid.UUID, set[uuid.UUID]] = {}
        for row in self.tables.rows.values():
            fired.setdefault(row.event_id, set()).add(row.trigger_id)
        for place in self.tables.events.values():
            assert place.inbox + (place.state == "scheduled") + place.is_decided == 1
            assert place.is_decided or place.id not in fired, "delivered before it was decided"
            old = before.events.get(place.id)
            if old is None or old.is_decided or not place.is_decided:
                assert old is None or not old.is_decided or place.is_decided
                continue
            event = self.events[place.id]
            wanted = {key for key, t in self.triggers.items() if t.status == "active" and t.matches(event)}
            assert fired.get(place.id, set()) == (wanted if place.is_delivered else set())

    def _judge_state(self, row: Row) -> None:
        assert row.state in ("none", "scheduled", "completed", "cancelled", "exhausted")
        if row.waits:
            assert row.status in ("throttled", "paused") and row.reason is not None
            assert row.next_attempt_at is not None, "no one will ever look at it"
            assert self.triggers[row.trigger_id].status == "active", "its trigger is gone"
        else:
            assert row.status in FINAL and row.next_attempt_at is None
        assert row.runs == (row.status == "launched")
        assert row.id not in self.cancelled or row.status == "cancelled"

    def _judge_time(self, old: Row | None, stage: str | None) -> None:
        if old is None:
            assert stage in ("dispatch", "retry")
        elif stage == "finish":
            assert old.reason == "concurrency"
        else:
            assert stage == "delivery_retry"
            assert old.next_attempt_at is not None and old.next_attempt_at <= self.now, "before its time"

    def _judge_launches(self, trigger_id: uuid.UUID, group: list[Row], gate: GateRow) -> None:
        trigger = self.triggers[trigger_id]
        assert trigger.status == "active" and not trigger.is_paused(self.now)
        assert gate.breaker_state != "half_open", "only one probe at a time"
        if gate.breaker_state == "open":
            assert gate.breaker_until is not None and gate.breaker_until <= self.now, "the breaker is open"
            assert len(group) == 1, "one probe"
            assert group[0].run_id is not None and self.tables.runs[group[0].run_id].is_probe
        for row in group:
            event = self.events[row.event_id]
            assert not self._is_source_paused(event.source) and not event.is_expired(self.now)
            assert trigger.matches(event) and not trigger.fails(event)
            assert row.launched_at == self.now and row.trigger_version == gate.version
            self._judge_key(trigger, row, event)
        trigger.launches += [(len(trigger.epochs) - 1, self.real_ms)] * len(group)
        assert not (found := limit_breaches(trigger.launches, trigger.epochs)), found
        assert not (found := carry_breaches(trigger.launches, trigger.epochs)), found
        if trigger.max_concurrency is not None:
            used = self._slots_in_use()
            for row in group:
                assert used[trigger_id, trigger.slot(self.events[row.event_id])] <= trigger.max_concurrency

    def _judge_key(self, trigger: ModelTrigger, row: Row, event: ModelEvent) -> None:
        key = trigger.dedupe(event)
        assert row.dedupe_key == key and row.run_id is not None
        if key is None:
            return
        kept = trigger.keys.get(key)
        assert kept is None or (kept.until is not None and kept.until <= self.now), "two launches with one key"
        window_ms = trigger.idempotency_window_ms
        trigger.keys[key] = Kept(row.run_id, self.now + timedelta(milliseconds=window_ms) if window_ms else None)

    def _judge_end(self, row: Row, stage: str | None) -> None:
        trigger, event = self.triggers[row.trigger_id], self.events[row.event_id]
        if row.status == "cancelled":
            assert row.id in self.cancelled or trigger.status != "active"
        elif row.status == "failed":
            assert row.is_dead
        elif row.status == "skipped" and row.reason == "filtered":
            assert not trigger.matches(event)
        elif row.status == "skipped":
            kept = trigger.keys[str(row.dedupe_key)]
            assert row.run_id == kept.run_id and (kept.until is None or kept.until > self.now)
        elif row.reason == "expired":
            assert event.is_expired(self.now)
        else:
            policy = trigger.policy
            is_old = policy.max_age_ms and self.now > event.received_at + timedelta(milliseconds=policy.max_age_ms)
            assert row.is_dead and (row.attempts >= policy.max_attempts or is_old)

    def _slots_in_use(self) -> Counter[Slot]:
        found = [run for run in self.tables.runs.values() if run.is_unfinished]
        return Counter((run.trigger_id, self.triggers[run.trigger_id].slot(self.events[run.event_id])) for run in found)

    @invariant()
    def promises(self) -> None:
        self.slots_are_held_by_the_rule_in_force()
        self.a_half_open_breaker_has_its_probe()
        self.nobody_waits_longer_than_is_asked()
        self.a_free_slot_is_offered()

    def a_free_slot_is_offered(self) -> None:
        """Who waits for a slot alone does not sit out its backoff while there is one."""
        used = self._slots_in_use()
        lines: dict[Slot, list[Row]] = {}
        for row in self.tables.rows.values():
            if row.waits:
                slot = self.triggers[row.trigger_id].slot(self.events[row.event_id])
                lines.setdefault((row.trigger_id, slot), []).append(row)
        for (trigger_id, key), line in lines.items():
            trigger, gate = self.triggers[trigger_id], self.tables.gates[trigger_id]
            is_held = trigger.is_paused(self.now) or gate.breaker_state != "closed" or gate.is_replanning
            if trigger.max_concurrency is None or trigger.throttle_count or is_held:
                continue
            free = trigger.max_concurrency - used[trigger_id, key]
            asleep = [row for row in line if row.reason == "concurrency" and row.next_attempt_at > self.latest]
            due = sum(row.next_attempt_at <= self.latest for row in line)
            assert due >= min(free, due + len(asleep)), (free, line)

    def slots_are_held_by_the_rule_in_force(self) -> None:
        for run in self.tables.runs.values():
            trigger = self.triggers[run.trigger_id]
            if run.is_unfinished and trigger.status != "deleted":
                assert run.concurrency_key == trigger.slot(self.events[run.event_id])

    def a_half_open_breaker_has_its_probe(self) -> None:
        for gate in self.tables.gates.values():
            assert (gate.breaker_state == "half_open") == (gate.probe_run_id is not None)
            if gate.probe_run_id is not None:
                run = self.tables.runs[gate.probe_run_id]
                assert run.is_probe and run.is_unfinished and run.trigger_id == gate.id

    def nobody_waits_longer_than_is_asked(self) -> None:
        """Without a pause, a time lies no further away than all deliveries of the trigger need, one after the other."""
        for row in self.tables.rows.values():
            trigger, gate = self.triggers[row.trigger_id], self.tables.gates[row.trigger_id]
            is_held = trigger.is_paused(self.now) or gate.breaker_state != "closed" or row.reason == "source_paused"
            if not row.waits or gate.is_replanning or is_held:
                continue
            count, window_ms = trigger.throttle_count, trigger.throttle_window_ms
            ahead = sum(other.trigger_id == row.trigger_id for other in self.tables.rows.values())
            turns = (ahead / count + 3) * window_ms * 1.05 if count else 0
            longest = max(POLICY.max_ms, self.longest_ms + turns) + self.set_back_ms + 1
            assert row.next_attempt_at is not None
            assert row.next_attempt_at <= self.now + timedelta(milliseconds=longest), (row, self.now)

    def teardown(self) -> None:
        """Lift every pause, end every run and let time pass: whatever waits comes to its end."""
        try:
            if self.triggers:
                self._lift()
                self._drain()
        finally:
            failpoints.disarm()

    def _lift(self) -> None:
        for source in SOURCES:
            self.change_source(source, "resume")
            self.change_source(source, "no limit")
        for trigger_id, trigger in self.triggers.items():
            if trigger.status != "deleted" and trigger.paused:  # a breaker closes by itself
                self.run(control.resume_trigger(self.database, trigger_id, "model"))
                trigger.paused = []

    def _drain(self) -> None:
        self.advance(LEASE_MS + self.set_back_ms + 1)  # whoever died gives back what it held
        self.claim(0, 0)
        self.workers[0], self.running = TriggerWorker(self.database), [[], []]
        waiting = len(self.events) * MOST_TRIGGERS
        for number in range(20 + 2 * waiting):
            for stage in STAGES:
                self.turn(0, stage)
            self.finish(0, 1000, "succeeded", number % 2 == 0, False)
            times = [row.next_attempt_at for row in self.tables.rows.values() if row.next_attempt_at is not None]
            times += [place.next_attempt_at for place in self.tables.events.values() if place.next_attempt_at]
            is_decided = all(place.is_decided for place in self.tables.events.values())
            if is_decided and not times and not self._slots_in_use():
                return
            ahead = (min(times, default=self.now) - self.now) / timedelta(milliseconds=1)
            self.advance(ahead if ahead > 0 else 500)
            self.promises()
        waits = [row for row in self.tables.rows.values() if row.waits]
        undecided = [place for place in self.tables.events.values() if not place.is_decided]
        raise AssertionError(f"at {self.now}, {waits} and {undecided} wait, {self._slots_in_use()} are in use")


@pytest.fixture
def world(postgres: EmbeddedPostgres, template: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(replan, "BATCH", 3)
    name = "trigger_machine"

    async def admin(statement: str) -> None:
        connection = await asyncpg.connect(postgres.admin_url())
        await connection.execute(statement)
        await connection.close()

    async def define(connection: Connection) -> uuid.UUID:
        return await triggers.upsert_definition(
            connection, slug="flow", kind="python", parameters=["*"], config={}, actor="test"
        )

    async def prepare() -> tuple[Database, Clock, uuid.UUID]:
        await admin(f"create database {name} template {template} owner {ROLE}")
        database = Database(postgres.url(name), "test", size=4)
        definition = await database.run(define)
        clock = Clock(database)
        await clock.install()
        return database, clock, definition

    with asyncio.Runner() as runner:
        database, clock, definition = runner.run(prepare())
        yield World(runner, database, clock, definition)
        runner.run(database.close())
        runner.run(admin(f"drop database {name} with (force)"))


@pytest.mark.timeout(max(300, EXAMPLES * 30))
def test_triggers_keep_their_promises(world: World) -> None:
    TriggerMachine.world = world
    run_state_machine_as_test(
        TriggerMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
            print_blob=False,
        ),
    )
