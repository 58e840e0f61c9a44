"""Windows against a model: any order of events, steps of the clock, failures, and operators' commands puts every event
into one run, and into the run that the model says.

The stages are the real ones on a real Postgres, with a clock that is moved by hand. The examples share one database:
each has customers, and so windows, of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tidegate import Batch, Context, Tidegate, failpoints
from tidegate.flow import control
from tidegate.model.ids import DeliveryId
from tidegate.testing import Harness

EXAMPLES = int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "12"))
STEPS = int(os.environ.get("TIDEGATE_TEST_STEPS", "25"))
PHASES = set(Phase) - (set() if os.environ.get("TIDEGATE_TEST_SHRINK") else {Phase.shrink})

POINTS = ("dispatch.before_commit", "window.closing", "delivery_retry.before_commit")
KEY = "{{ event.payload.customer }}"


class Policy(NamedTuple):
    """How a workflow collects, in seconds."""

    debounce: int = 0
    longest: int = 0
    leading: bool = False
    size: int = 1000


POLICIES = {
    "debounced": Policy(debounce=10, longest=25),
    "leading": Policy(debounce=10, longest=25, leading=True),
    "batched": Policy(longest=15, size=3),
}
given: dict[tuple[str, str], list[list[int]]] = {}


def application() -> Tidegate:
    app = Tidegate()

    async def note(ctx: Context, workflow: str) -> None:
        [customer] = {event.payload["customer"] for event in ctx.events}
        given.setdefault((workflow, customer), []).append([event.payload["n"] for event in ctx.events])

    @app.workflow(on="changed", debounce="10s", max_wait="25s", key=KEY)
    async def debounced(ctx: Context) -> None:
        await note(ctx, "debounced")

    @app.workflow(on="changed", debounce="10s", max_wait="25s", leading=True, key=KEY)
    async def leading(ctx: Context) -> None:
        await note(ctx, "leading")

    @app.workflow(on="changed", batch=Batch(3, "15s"), key=KEY)
    async def batched(ctx: Context) -> None:
        await note(ctx, "batched")

    return app


@dataclass
class Line:
    """The model of one workflow and customer."""

    policy: Policy
    taken: list[list[int]] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    closes_at: datetime | None = None
    opened_at: datetime | None = None
    quiet_until: datetime | None = None

    def add(self, n: int, now: datetime) -> None:
        policy = self.policy
        if policy.leading and not self.open and not (self.quiet_until and now < self.quiet_until):
            self.taken.append([n])
            self.quiet_until = now + timedelta(seconds=policy.debounce)
            return
        if not self.open:
            self.opened_at = now
        self.quiet_until = None
        self.open.append(n)
        assert self.opened_at is not None
        ends_at = self.opened_at + timedelta(seconds=policy.longest)
        self.closes_at = min(now + timedelta(seconds=policy.debounce), ends_at) if policy.debounce else ends_at
        if len(self.open) == policy.size:
            self.close()

    def pass_to(self, now: datetime) -> None:
        if self.open and self.closes_at is not None and self.closes_at <= now:
            self.close()

    def close(self) -> None:
        if self.open:
            self.taken.append(self.open)
        self.open, self.closes_at = [], None


class WindowMachine(RuleBasedStateMachine):
    """Events come, time passes, transactions fail, operators cancel and force."""

    runner: ClassVar[asyncio.Runner]
    harness: ClassVar[Harness]
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.name = f"example-{next(self.numbers)}"
        self.lines: dict[tuple[str, str], Line] = {}
        self.published = 0

    def teardown(self) -> None:
        failpoints.disarm()
        self.pass_time(60)
        self.is_as_the_model_says()
        left = [one for line in self.lines.values() for one in line.open]
        assert left == []

    @rule(customer=st.sampled_from(("ann", "bob")), count=st.integers(1, 4))
    def publish(self, customer: str, count: int) -> None:
        self.runner.run(self._publish(f"{self.name}-{customer}", count))

    async def _publish(self, customer: str, count: int) -> None:
        for n in range(self.published, self.published + count):
            await self.harness.publish("changed", source="shop", payload={"customer": customer, "n": n})
            for workflow, policy in POLICIES.items():
                line = self.lines.setdefault((workflow, customer), Line(policy))
                line.add(n, self.harness.now)
        self.published += count
        await self.harness.run_until_idle()

    @rule(seconds=st.integers(1, 12))
    def pass_time(self, seconds: int) -> None:
        self.runner.run(self.harness.advance(f"{seconds}s"))
        for line in self.lines.values():
            line.pass_to(self.harness.now)

    @rule(point=st.sampled_from(POINTS))
    def fail(self, point: str) -> None:
        """The next transaction that passes the point is rolled back, and its rows are decided one by one."""
        failpoints.disarm()  # what fails on its own as well is dead-lettered
        failpoints.arm(f"{point}=raise")

    @rule(data=st.data(), verb=st.sampled_from(("cancel", "force")))
    def command(self, data: st.DataObject, verb: str) -> None:
        waiting = [(key, line) for key, line in self.lines.items() if line.open]
        if not waiting:
            return
        (workflow, customer), line = data.draw(st.sampled_from(waiting))
        place = data.draw(st.integers(0, len(line.open) - 1))
        self.runner.run(self._command(workflow, customer, line.open[place], verb))
        if verb == "force":
            line.close()
        elif place == 0:
            line.cancelled += line.open
            line.open = []
        else:
            line.cancelled.append(line.open.pop(place))

    async def _command(self, workflow: str, customer: str, n: int, verb: str) -> None:
        failpoints.disarm()
        async with self.harness.connection() as connection:
            own_id = await connection.fetchval(
                "select d.id from tidegate.workflow_trigger_deliveries d "
                "join tidegate.workflow_events e on e.id = d.event_id "
                "join tidegate.workflow_event_triggers t on t.id = d.trigger_id "
                "join tidegate.workflow_definitions w on w.id = t.workflow_definition_id "
                "where w.slug = $1 and e.payload @> jsonb_build_object('customer', $2::text, 'n', $3::int)",
                workflow, customer, n,
            )  # fmt: skip
        kind = "cancel" if verb == "cancel" else "force"
        await control.change_retry(self.harness._inside()[1], "deliveries", DeliveryId(own_id), kind, "test")
        await self.harness.run_until_idle()

    @invariant()
    def is_as_the_model_says(self) -> None:
        for key, line in self.lines.items():
            assert given.get(key, []) == line.taken, key
            everything = [n for one in (*line.taken, line.open, line.cancelled) for n in one]
            assert len(set(everything)) == len(everything)


@pytest.fixture
def machine() -> Iterator[type[WindowMachine]]:
    harness = Harness(application())
    with asyncio.Runner() as runner:
        runner.run(harness.__aenter__())
        WindowMachine.runner, WindowMachine.harness = runner, harness
        yield WindowMachine
        failpoints.disarm()
        runner.run(harness.__aexit__(None, None, None))


def test_every_event_is_in_one_run(machine: type[WindowMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
