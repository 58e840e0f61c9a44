"""Backlogs against a model: any order of events, pauses, steps of the clock, failures, and operators' commands leaves
each event in one state, the one that the model says, and never more waiting than may.

The stages are the real ones on a real Postgres, with a clock that is moved by hand. The examples share one database:
each has customers of its own.
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

from tidegate import Context, Tidegate, failpoints
from tidegate.flow import control
from tidegate.model.ids import DeliveryId
from tidegate.testing import Harness

EXAMPLES = int(os.environ.get("TIDEGATE_TEST_EXAMPLES", "12"))
STEPS = int(os.environ.get("TIDEGATE_TEST_STEPS", "25"))
PHASES = set(Phase) - (set() if os.environ.get("TIDEGATE_TEST_SHRINK") else {Phase.shrink})

POINTS = ("dispatch.before_commit", "delivery_retry.before_commit")
KEY = "{{ event.payload.customer }}"
MOST = 3
LONGEST = timedelta(seconds=20)
WORKFLOWS = ("skipping", "dropping", "burying", "keeping", "forgetting")
STATES = """
select w.slug, e.payload ->> 'customer' as customer, (e.payload ->> 'n')::int as n,
       case when d.retry_state = 'scheduled' then 'waiting' else coalesce(d.reason, d.status) end as state
  from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_events e on e.id = d.event_id
  join tidegate.workflow_event_triggers t on t.id = d.trigger_id
  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
 where e.payload ->> 'customer' like $1 || '-%'
"""
done: dict[tuple[str, str], list[int]] = {}


def application() -> Tidegate:
    app = Tidegate()

    async def note(ctx: Context, workflow: str) -> None:
        assert ctx.event is not None
        done.setdefault((workflow, ctx.event.payload["customer"]), []).append(ctx.event.payload["n"])

    @app.workflow(on="changed", max_waiting=MOST, key=KEY)
    async def skipping(ctx: Context) -> None:
        await note(ctx, "skipping")

    @app.workflow(on="changed", max_waiting=MOST, when_full="drop_oldest", key=KEY)
    async def dropping(ctx: Context) -> None:
        await note(ctx, "dropping")

    @app.workflow(on="changed", max_waiting=MOST, when_full="dead_letter", key=KEY)
    async def burying(ctx: Context) -> None:
        await note(ctx, "burying")

    @app.workflow(on="changed", keep="latest", key=KEY)
    async def keeping(ctx: Context) -> None:
        await note(ctx, "keeping")

    @app.workflow(on="changed", max_wait="20s")
    async def forgetting(ctx: Context) -> None:
        await note(ctx, "forgetting")

    return app


class Waiting(NamedTuple):
    """An event that waits, and since when."""

    n: int
    since: datetime


@dataclass
class Backlog:
    """The model of one workflow and customer."""

    workflow: str
    waiting: list[Waiting] = field(default_factory=list)
    ended: dict[int, str] = field(default_factory=dict)

    def add(self, n: int, now: datetime, *, is_paused: bool) -> None:
        if not is_paused:
            self.ended[n] = "launched"
            return
        is_full = len(self.waiting) >= MOST
        if self.workflow in ("skipping", "burying") and is_full:
            self.ended[n] = "backlog_full"
            return
        if self.workflow == "dropping" and is_full:
            self.ended[self.waiting.pop(0).n] = "backlog_full"
        if self.workflow == "keeping" and self.waiting:
            self.ended[self.waiting.pop().n] = "superseded"
        self.waiting.append(Waiting(n, now))

    def launch(self) -> None:
        self.ended |= {one.n: "launched" for one in self.waiting}
        self.waiting = []

    def pass_to(self, now: datetime) -> None:
        if self.workflow != "forgetting":
            return
        self.ended |= {one.n: "max_wait" for one in self.waiting if one.since + LONGEST <= now}
        self.waiting = [one for one in self.waiting if one.since + LONGEST > now]


class BacklogMachine(RuleBasedStateMachine):
    """Events come, triggers are paused and resumed, time passes, transactions fail, operators cancel."""

    runner: ClassVar[asyncio.Runner]
    harness: ClassVar[Harness]
    numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.name = f"example{next(self.numbers)}"
        self.backlogs: dict[tuple[str, str], Backlog] = {}
        self.published = 0
        self.is_paused = False
        self.pause()

    def teardown(self) -> None:
        failpoints.disarm()
        self.resume()
        self.is_as_the_model_says()
        assert all(not one.waiting for one in self.backlogs.values())

    @rule(customer=st.sampled_from(("ann", "bob")), count=st.integers(1, 5))
    def publish(self, customer: str, count: int) -> None:
        self.runner.run(self._publish(f"{self.name}-{customer}", count))

    async def _publish(self, customer: str, count: int) -> None:
        for n in range(self.published, self.published + count):
            await self.harness.publish("changed", source="shop", payload={"customer": customer, "n": n})
            for workflow in WORKFLOWS:
                backlog = self.backlogs.setdefault((workflow, customer), Backlog(workflow))
                backlog.add(n, self.harness.now, is_paused=self.is_paused)
        self.published += count
        await self.harness.run_until_idle()

    @rule()
    def pause(self) -> None:
        self.is_paused = True
        self.runner.run(self._each(is_paused=True))

    @rule()
    def resume(self) -> None:
        self.is_paused = False
        self.runner.run(self._each(is_paused=False))
        for backlog in self.backlogs.values():
            backlog.launch()

    async def _each(self, *, is_paused: bool) -> None:
        failpoints.disarm()
        _, database = self.harness._inside()
        async with self.harness.connection() as connection:
            rows = await connection.fetch("select id from tidegate.workflow_event_triggers")
        for row in rows:
            if is_paused:
                await control.pause_trigger(database, row[0], actor="test")
            else:
                await control.resume_trigger(database, row[0], "test")
        await self.harness.run_until_idle()

    @rule(seconds=st.integers(1, 12))
    def pass_time(self, seconds: int) -> None:
        self.runner.run(self.harness.advance(f"{seconds}s"))
        for backlog in self.backlogs.values():
            backlog.pass_to(self.harness.now)

    @rule(point=st.sampled_from(POINTS))
    def fail(self, point: str) -> None:
        """The next transaction that passes the point is rolled back, and its rows are decided one by one."""
        failpoints.disarm()
        failpoints.arm(f"{point}=raise")

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        waiting = [(key, one) for key, one in self.backlogs.items() if one.waiting]
        if not waiting:
            return
        (workflow, customer), backlog = data.draw(st.sampled_from(waiting))
        place = data.draw(st.integers(0, len(backlog.waiting) - 1))
        n = backlog.waiting.pop(place).n
        self.runner.run(self._cancel(workflow, customer, n))
        backlog.ended[n] = "paused"  # it keeps the reason for which it waited

    async def _cancel(self, workflow: str, customer: str, n: int) -> None:
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
        await control.change_retry(self.harness._inside()[1], "deliveries", DeliveryId(own_id), "cancel", "test")

    @invariant()
    def is_as_the_model_says(self) -> None:
        rows = self.runner.run(self._states())
        found: dict[tuple[str, str], dict[int, str]] = {}
        for workflow, customer, n, state in rows:
            mine = found.setdefault((workflow, customer), {})
            assert n not in mine, "one delivery for each event and trigger"
            mine[n] = state
        for key, backlog in self.backlogs.items():
            assert found[key] == backlog.ended | {one.n: "waiting" for one in backlog.waiting}, key
            assert key[0] == "forgetting" or len(backlog.waiting) <= MOST
            launched = sorted(n for n, state in backlog.ended.items() if state == "launched")
            assert sorted(done.get(key, [])) == launched, key

    async def _states(self) -> list[tuple[str, str, int, str]]:
        async with self.harness.connection() as connection:
            return [(row[0], row[1], row[2], row[3]) for row in await connection.fetch(STATES, self.name)]


@pytest.fixture
def machine() -> Iterator[type[BacklogMachine]]:
    harness = Harness(application())
    with asyncio.Runner() as runner:
        runner.run(harness.__aenter__())
        BacklogMachine.runner, BacklogMachine.harness = runner, harness
        yield BacklogMachine
        failpoints.disarm()
        runner.run(harness.__aexit__(None, None, None))


def test_each_event_is_in_one_state(machine: type[BacklogMachine]) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES, stateful_step_count=STEPS, deadline=None, phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
