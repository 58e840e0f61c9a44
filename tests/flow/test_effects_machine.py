"""What users' functions do against a model: any order of batches, shared idempotency keys, limits, pauses, edits,
fan-out, clock steps and worker restarts, and every effect that is to happen happens once.

The workers are whole ones on a real Postgres, turned by hand, alone or at the same time; so is the clock. The effects
are kept in a list, which the database knows nothing of. Nothing is killed here: nothing may be repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import uuid
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from tidegate import Context, Tidegate
from tidegate.flow import control
from tidegate.model.source import RateLimit
from tidegate.testing import Harness
from tidegate.worker.supervisor import Worker

EXAMPLES = int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "8"))
STEPS = int(os.environ.get("TIDEGATE_TEST_STEPS", "20"))
PHASES = set(Phase) - (set() if os.environ.get("TIDEGATE_TEST_SHRINK") else {Phase.shrink})

SOURCES = ("shop", "market")
DAY_MS = 86_400_000
KEYED = {"idempotency_key": "{{ event.payload.order }}", "idempotency_window_ms": 30 * DAY_MS}
# Each order is charged and booked once, however many events tell of it; each event is mailed.
TRIGGERS = {"charge": KEYED, "book": KEYED, "mail": {}}
NO_LIMITS = {"throttle_count": None, "throttle_window_ms": None, "max_concurrency": None, "concurrency_key": None}
LIMITS: list[dict[str, Any]] = [
    {},
    {"throttle_count": 1, "throttle_window_ms": 1000},
    {"throttle_count": 3, "throttle_window_ms": 10_000},
    {"max_concurrency": 1},
    {"max_concurrency": 2, "concurrency_key": "{{ event.payload.customer }}"},
    {"max_concurrency": 1, "throttle_count": 2, "throttle_window_ms": 500},
]

Effect = tuple[str, str]
_numbers = itertools.count()


class World(NamedTuple):
    """What the examples share: a loop, an application in a harness, its triggers, and what its functions did."""

    runner: asyncio.Runner
    app: Tidegate
    harness: Harness
    triggers: dict[str, uuid.UUID]
    sink: list[Effect]


class EffectsMachine(RuleBasedStateMachine):
    """The model knows what was published, and so what is to be done."""

    world: ClassVar[World]

    def __init__(self) -> None:
        super().__init__()
        self.run, self.harness = self.world.runner.run, self.world.harness
        _, self.database = self.harness._inside()
        self.example = next(_numbers)
        self.world.sink.clear()
        self.wanted: set[Effect] = set()
        self.workers: list[Worker] = [self.run(self.world.app.worker()) for _ in range(2)]

    # ----- what may happen

    @initialize(limits=st.lists(st.sampled_from(LIMITS), min_size=3, max_size=3))
    def begin(self, limits: list[dict[str, Any]]) -> None:
        for name, given in zip(TRIGGERS, limits, strict=True):
            self.edit(name, given)

    @rule(orders=st.lists(st.integers(0, 3), min_size=1, max_size=8), source=st.sampled_from(SOURCES))
    def publish(self, orders: list[int], source: str) -> None:
        """They are decided together, unless a turn comes in between."""
        for order in orders:
            told, event = f"{self.example}-{order}", f"e{next(_numbers)}"
            payload = {"order": told, "event": event, "customer": f"c{order % 2}"}
            self.run(self.harness.publish("paid", source=source, payload=payload))
            self.wanted |= {("charge", told), ("book one", told), ("book two", told), ("mail", event)}

    @rule(worker=st.integers(0, 1))
    def turn(self, worker: int) -> None:
        self.run(self.workers[worker].turn(self.harness.now))

    @rule()
    def turn_both(self) -> None:
        """At the same time: they meet at the same rows."""

        async def both() -> None:
            await asyncio.gather(*(worker.turn(self.harness.now) for worker in self.workers))

        self.run(both())

    @rule(orders=st.lists(st.integers(0, 3), min_size=2, max_size=8), worker=st.integers(0, 1))
    def arrive(self, orders: list[int], worker: int) -> None:
        """The ordinary course of things."""
        self.publish(orders, SOURCES[0])
        self.turn(worker)

    @rule(ms=st.sampled_from([1, 100, 500, 1000, 5000, 60_000]))
    def advance(self, ms: int) -> None:
        self.run(self.harness._set_clock(self.harness.now + timedelta(milliseconds=ms)))

    @rule(name=st.sampled_from(list(TRIGGERS)), limits=st.sampled_from(LIMITS))
    def edit(self, name: str, limits: dict[str, Any]) -> None:
        self.run(control.update_trigger(self.database, self.world.triggers[name], NO_LIMITS | limits, "model"))

    @rule(name=st.sampled_from(list(TRIGGERS)), is_paused=st.booleans())
    def pause_trigger(self, name: str, is_paused: bool) -> None:
        trigger_id = self.world.triggers[name]
        if is_paused:
            self.run(control.pause_trigger(self.database, trigger_id, actor="model"))
        else:
            self.run(control.resume_trigger(self.database, trigger_id, "model"))

    @rule(source=st.sampled_from(SOURCES), how=st.sampled_from(["pause", "resume", "limit", "no limit"]))
    def change_source(self, source: str, how: str) -> None:
        if how == "pause":
            self.run(control.pause(self.database, source, actor="model"))
        elif how == "resume":
            self.run(self._resume(source))
        else:
            given = RateLimit(limit=2, interval_ms=1000) if how == "limit" else None
            self.run(control.set_limit(self.database, source, given, "model"))

    async def _resume(self, source: str) -> None:
        await control.pause(self.database, source, actor="model")  # so that it is known
        await control.resume(self.database, source, "model")

    @rule(worker=st.integers(0, 1))
    def restart(self, worker: int) -> None:
        """As a deployment does: what runs is handed back."""
        self.run(self.workers[worker].close())
        self.workers[worker] = self.run(self.world.app.worker())

    @rule(orders=st.lists(st.integers(0, 3), min_size=1, max_size=6), worker=st.integers(0, 1))
    def pile_up(self, orders: list[int], worker: int) -> None:
        """Events come while a worker is away."""
        self.run(self.workers[worker].close())
        self.publish(orders, SOURCES[1])
        self.workers[worker] = self.run(self.world.app.worker())
        self.turn(worker)

    # ----- what must hold

    @invariant()
    def nothing_is_repeated(self) -> None:
        done = Counter(self.world.sink)
        assert [effect for effect, count in done.items() if count > 1] == []
        assert done.keys() <= self.wanted

    def teardown(self) -> None:
        try:
            for name in TRIGGERS:
                self.pause_trigger(name, is_paused=False)
            for source in SOURCES:
                self.change_source(source, "resume")
                self.change_source(source, "no limit")
            self._drain()
            self.nothing_is_repeated()
            assert self.wanted == set(self.world.sink), "every effect that is to happen happens"
        finally:
            for worker in self.workers:
                self.run(worker.close())

    def _drain(self) -> None:
        for _ in range(2000):
            turn = self.run(self.workers[0].turn(self.harness.now))
            if turn.done:
                continue
            if turn.next_at is None:
                return
            self.run(self.harness._set_clock(turn.next_at))
        raise AssertionError(f"something still waits at {self.harness.now}")


@pytest.fixture
def world() -> Iterator[World]:
    app, sink = Tidegate(), list[Effect]()

    @app.workflow()
    async def charge(ctx: Context, order: str, **_: Any) -> None:
        sink.append(("charge", order))
        await asyncio.sleep(0.001)

    @app.workflow()
    async def mail(ctx: Context, event: str, **_: Any) -> None:
        sink.append(("mail", event))

    @app.workflow()
    async def book(ctx: Context, order: str, **_: Any) -> None:
        await ctx.step("one", lambda: sink.append(("book one", order)))
        await ctx.sleep("3s")
        await ctx.step("two", lambda: sink.append(("book two", order)))

    async def prepare() -> tuple[Harness, dict[str, uuid.UUID]]:
        harness = await Harness(app).__aenter__()
        _, database = harness._inside()
        made = {}
        for name, given in TRIGGERS.items():
            spec = {"name": name, "event_type": "paid", "event_source": "*", **given}
            made[name] = (await control.create_trigger(database, name, spec, "model")).id
        return harness, made

    with asyncio.Runner() as runner:
        harness, triggers = runner.run(prepare())
        yield World(runner, app, harness, triggers, sink)
        runner.run(harness.__aexit__(None, None, None))


@pytest.mark.timeout(max(300, EXAMPLES * 60))
def test_every_effect_happens_once(world: World) -> None:
    EffectsMachine.world = world
    run_state_machine_as_test(
        EffectsMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=PHASES,
            print_blob=False,
        ),
    )
