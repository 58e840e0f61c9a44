"""Steps that spend of budgets, on a real database with a moved clock: rates, slots, keys, and the lines that they share
with deliveries."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.checker import milliseconds, most_in_any_interval
from tests.flow.conftest import eventually
from tests.flow.step_world import World, the_run, the_steps
from tests.flow.test_budgets import put
from tests.flow.test_dispatch import publish
from tests.flow.test_trigger_workers import until
from tidegate import Context, SyncContext, Tidegate
from tidegate.errors import Conflict, RetryAfter
from tidegate.flow import control
from tidegate.flow.hold.step_lines import LineRetry
from tidegate.flow.keep.budgets import BudgetKeeper
from tidegate.flow.look.explain import explain_any
from tidegate.flow.run.runner import Runner
from tidegate.model.budget import Budget
from tidegate.model.retry import RetryPolicy
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import budgets
from tidegate.store.db import Connection, Database
from tidegate.testing import Harness

TENANT = "{{ event.payload.tenant }}"
ONCE = RetryPolicy(base_ms=1000, factor=2, max_ms=8000, jitter_ratio=0, max_attempts=1)


class Scene(World):
    """A world whose worker also takes care of the lines of budgets; `calls` are the calls of steps, and when."""

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database)
        self.clock = clock
        self.calls: list[tuple[Any, datetime]] = []
        self.lines = LineRetry(database, batch_size=100, after_launch=lambda: None)

    def call(self, value: Any) -> Any:
        self.calls.append((value, self.clock.now))
        return value

    async def turn(self, runner: Runner) -> None:
        """Everything that can be done now."""
        while True:
            await super().turn(runner)
            if (await self.lines.run_once()).due == 0 and await runner.run_once() == 0:
                return
            await asyncio.wait_for(runner.idle(), 30)

    async def until(self, runner: Runner, count: int, step_ms: int = 20) -> None:
        """Turn and move the clock until so many calls were made."""
        began = self.clock.now
        while len(self.calls) < count:
            await self.turn(runner)
            await self.clock.advance(step_ms)
            assert self.clock.now - began < timedelta(minutes=2), self.calls

    @property
    def called(self) -> list[Any]:
        return [value for value, _ in self.calls]


@pytest.fixture
async def scene(database: Database, clock: Clock) -> Any:
    made = Scene(database, clock)
    yield made
    for runner in made.runners:
        await runner.stop(1)


def asks(scene: Scene, **options: Any) -> None:
    """A workflow that calls one step."""

    @scene.app.workflow(on="tick")
    async def ask(ctx: Context, **given: Any) -> Any:
        return await ctx.step("ask", scene.call, given.get("n"), **options)


async def ticks(connection: Connection, count: int, **payload: Any) -> list[str]:
    return [await publish(connection, "tick", "shop", n=n, **payload) for n in range(count)]


async def places(connection: Connection) -> list[Any]:
    return await connection.fetch("select * from tidegate.budget_steps order by place, step_id")


async def in_use(connection: Connection, name: str = "openai") -> int:
    record = await budgets.get(connection, name)
    assert record is not None
    return record.in_use


async def _is(value: bool) -> bool:
    return value


# Rates --------------------------------------------------------------------------------------------------------------


async def test_a_step_without_room_waits_in_line_and_holds_no_worker(
    scene: Scene, database: Database, connection: Connection, clock: Clock
) -> None:
    await put(database, "openai", "2/s")
    asks(scene, budget="openai")
    runner = await scene.runner(concurrency=1)
    await ticks(connection, 4)
    await scene.turn(runner)
    assert scene.called == [0, 1]
    rows = await places(connection)
    assert [(row["budget"], row["key"], row["cost"], row["granted_at"]) for row in rows] == [
        ("openai", "", 1, None)
    ] * 2
    steps = await connection.fetch(
        "select * from tidegate.workflow_run_steps where retry_state = 'scheduled' order by id"
    )
    assert [(s["status"], s["retry_metadata"]["reason"], s["retry_attempts"]) for s in steps] == [
        ("pending", "budget", 0)
    ] * 2
    assert steps[0]["retry_metadata"]["message"] == "budget openai: over 2/s"
    assert steps[0]["retry_metadata"]["waits_for"]["budget"] == {"name": "openai", "key": "", "cost": 1, "why": "rate"}
    assert steps[1]["retry_metadata"]["message"] == "budget openai: waiting in line"
    assert clock.now + timedelta(seconds=1) <= steps[0]["next_attempt_at"] < steps[1]["next_attempt_at"]
    statuses = await connection.fetch("select status, warning from tidegate.workflow_runs order by id")
    assert [row["status"] for row in statuses] == ["succeeded", "succeeded", "pending", "pending"]
    assert statuses[2]["warning"] == "step 'ask' waits: budget openai: over 2/s"
    await scene.until(runner, 4)
    await scene.turn(runner)
    assert scene.called == [0, 1, 2, 3]
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs where status = 'succeeded'") == 4
    assert await places(connection) == []


async def test_steps_and_deliveries_share_one_line_in_any_sliding_window(
    scene: Scene, database: Database, connection: Connection, clock: Clock
) -> None:
    await put(database, "openai", "10/s")
    asks(scene, budget="openai")

    @scene.app.workflow(on="tock", budgets=["openai"])
    async def launch(ctx: Context, n: int) -> None:
        scene.call(n)

    runner = await scene.runner(concurrency=20)
    began = clock.now
    for n in range(40):
        await publish(connection, "tick" if n % 2 else "tock", "shop", n=n)
        await scene.turn(runner)
    await scene.until(runner, 40)
    assert scene.called == sorted(scene.called), "one line, in the order of arrival"
    times = [at for _, at in scene.calls]
    assert most_in_any_interval(milliseconds(times), 1000) <= 10
    assert clock.now - began <= timedelta(seconds=3 * 1.1), "at least 95 % of the budget is used"


async def test_the_key_and_cost_of_the_event_or_as_given_at_the_call(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "tokens", "10/s", key=TENANT, cost="event.payload.tokens")
    await put(database, "requests", "5/s")

    @scene.app.workflow(on="tick")
    async def ask(ctx: Context, n: int, tenant: str, tokens: int) -> None:
        await ctx.step("a", scene.call, n, budget=["tokens", "requests"])
        await ctx.step("b", scene.call, n, budget="tokens", budget_cost=7, budget_key="shared")
        await ctx.step("c", scene.call, n, budget=["tokens", "requests"], budget_cost={"tokens": 2})

    runner = await scene.runner()
    await publish(connection, "tick", "shop", n=1, tenant="acme", tokens=4)
    await scene.turn(runner)
    spent = await connection.fetch("select budget, key, ring from tidegate.budget_keys order by 1, 2")
    assert [(row["budget"], row["key"], sum(row["ring"])) for row in spent] == [
        ("requests", "", 2), ("tokens", "acme", 6), ("tokens", "shared", 7)
    ]  # fmt: skip


async def test_a_step_spends_of_all_of_its_budgets_or_of_none(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "a", "10/s")
    await put(database, "b", "1/s")
    asks(scene, budget=["b", "a"])
    runner = await scene.runner()
    await ticks(connection, 3)
    await scene.turn(runner)
    spent = await connection.fetch("select budget, ring from tidegate.budget_keys order by 1")
    assert {row["budget"]: sum(row["ring"]) for row in spent} == {"a": 1, "b": 1}
    assert [row["budget"] for row in await places(connection)] == ["b", "b"]
    await scene.until(runner, 3)


async def test_lines_of_other_keys_do_not_wait(scene: Scene, database: Database, connection: Connection) -> None:
    await put(database, "tenants", "1/s", key=TENANT)
    asks(scene, budget="tenants")
    runner = await scene.runner()
    for n in range(5):
        await publish(connection, "tick", "shop", n=n, tenant="flood")
    await scene.turn(runner)
    await publish(connection, "tick", "shop", n=99, tenant="other")
    await scene.turn(runner)
    assert scene.called == [0, 99]


async def test_a_retry_of_a_failed_step_spends_again(scene: Scene, database: Database, connection: Connection) -> None:
    await put(database, "openai", "2/h")

    def fails(n: int) -> None:
        scene.call(n)
        raise ValueError("no")

    @scene.app.workflow(on="tick")
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", fails, n, budget="openai")

    runner = await scene.runner()
    await ticks(connection, 1)
    await scene.until(runner, 2, 500)
    await scene.clock.advance(10_000)
    await scene.turn(runner)
    step = (await the_steps(connection))["ask"]
    assert (step["retry_attempts"], step["retry_metadata"]["reason"]) == (2, "budget")
    await scene.clock.advance(3_700_000)
    await scene.turn(runner)
    assert (await the_run(connection))["status"] == "failed"
    assert len(scene.calls) == 3


# What cannot be spent -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": "nothing"}, "budget nothing: there is no such budget"),
        ({"budget": "openai", "budget_cost": 11}, "budget openai: cost: is 11, more than its rate of 10/s ever allows"),
        ({"budget": "openai", "budget_cost": -1}, "ctx.step: budget_cost: must be a whole number from 0"),
        ({"budget": "openai", "budget_cost": {"other": 1}}, "budget_cost: 'other' is not one of the step's budgets"),
        ({"budget": 7}, "ctx.step: budget: "),
        ({"budget": []}, "ctx.step: budget: names no budget"),
        ({"budget": "keyed"}, "budget keyed: key: "),
        ({"budget": "keyed", "budget_key": ""}, "ctx.step: budget_key: renders an empty text"),
        ({"budget_cost": 3}, "ctx.step: budget_cost: needs budget="),
    ],
)  # fmt: skip
async def test_what_can_never_be_spent_fails_the_step_at_once(
    scene: Scene, database: Database, connection: Connection, options: dict[str, Any], said: str
) -> None:
    await put(database, "openai", "10/s")
    await put(database, "keyed", "10/s", key=TENANT)
    asks(scene, **options)
    runner = await scene.runner()
    await ticks(connection, 1)
    await scene.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed" and said in run["error"], run["error"]
    assert scene.calls == []


async def test_a_run_that_holds_a_slot_cannot_have_a_step_that_needs_one(
    scene: Scene, database: Database, connection: Connection
) -> None:
    """All slots could be held by runs whose steps wait for one, for ever."""
    await put(database, "gpu", concurrency=2)

    @scene.app.workflow(on="tick", budgets=["gpu"])
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", scene.call, n, budget="gpu")

    runner = await scene.runner()
    await ticks(connection, 1)
    await scene.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed"
    assert "budget gpu: its run holds a slot of it, by budgets= of its workflow" in run["error"]
    assert await in_use(connection, "gpu") == 0


async def test_a_rate_may_be_used_by_a_run_and_its_steps(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "openai", "2/s")

    @scene.app.workflow(on="tick", budgets=["openai"])
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", scene.call, n, budget="openai")

    runner = await scene.runner()
    await ticks(connection, 3)
    await scene.until(runner, 3)
    assert sorted(scene.called) == [0, 1, 2]


# Slots --------------------------------------------------------------------------------------------------------------


async def test_a_slot_is_held_while_the_function_executes(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "openai", concurrency=2)
    busy: list[int] = []
    most = 0

    async def work(n: int) -> int:
        nonlocal most
        busy.append(n)
        most = max(most, len(busy))
        await asyncio.sleep(0.02)
        busy.remove(n)
        scene.call(n)
        return n

    @scene.app.workflow(on="tick")
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", work, n, budget="openai")
        await ctx.sleep("1h")

    runner = await scene.runner(concurrency=20)
    await ticks(connection, 9)
    await scene.turn(runner)
    assert len(scene.calls) == 9 and most == 2
    assert await in_use(connection) == 0, "a run that sleeps holds no slot of its step"
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 0


async def test_a_slot_is_given_back_when_the_step_fails_or_times_out_or_is_cut_off(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "openai", concurrency=1)

    async def forever() -> None:
        scene.call("begun")
        await asyncio.sleep(60)

    def fails() -> None:
        raise ValueError("no")

    @scene.app.workflow(on="tick")
    async def ask(ctx: Context, n: int) -> None:
        if n == 0:
            await ctx.step("fails", fails, budget="openai", retry=ONCE)
        elif n == 1:
            await ctx.step("late", forever, budget="openai", timeout="10ms", retry=ONCE)
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ctx.step("cut", forever, budget="openai"), 0.05)

    runner = await scene.runner()
    for n in range(3):
        await publish(connection, "tick", "shop", n=n)
        await scene.turn(runner)
        assert await in_use(connection) == 0, n
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 0


async def test_the_slot_of_a_run_that_times_out_or_is_cancelled_in_its_step(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "openai", concurrency=1)
    begun = asyncio.Event()

    async def forever() -> None:
        begun.set()
        await asyncio.sleep(60)

    @scene.app.workflow(on="tick", timeout="300ms")
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", forever, budget="openai")

    runner = await scene.runner()
    await ticks(connection, 2)
    await scene.dispatch.run_once()
    await runner.run_once()
    await asyncio.wait_for(runner.idle(), 30)
    await scene.turn(runner)
    rows = await connection.fetch("select status, error from tidegate.workflow_runs order by id")
    assert [row["status"] for row in rows] == ["failed", "failed"], rows
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 0
    assert await places(connection) == []


# Waiting runs -------------------------------------------------------------------------------------------------------


async def test_a_waiting_run_that_is_cancelled_leaves_the_line(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "openai", concurrency=1)
    release = asyncio.Event()

    async def work(n: int) -> None:
        scene.call(n)
        await release.wait()

    @scene.app.workflow(on="tick")
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", work, n, budget="openai")

    runner = await scene.runner()
    await ticks(connection, 3)
    await scene.dispatch.run_once()
    await runner.run_once()
    await eventually(database, "select count(*) = 2 from tidegate.workflow_runs where status = 'pending'")
    [second, _] = await places(connection)
    await control.cancel_run(database, second["run_id"], "test", TRIGGER_BREAKER)
    assert [row["run_id"] for row in await places(connection)] != [second["run_id"]]
    assert len(await places(connection)) == 1
    release.set()
    await scene.turn(runner)
    assert scene.called == [0, 2]


async def test_a_waiting_run_times_out(scene: Scene, database: Database, connection: Connection, clock: Clock) -> None:
    await put(database, "openai", "1/h")

    @scene.app.workflow(on="tick", timeout="1m")
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", scene.call, n, budget="openai")

    runner = await scene.runner()
    await ticks(connection, 2)
    await scene.turn(runner)
    await clock.advance(61_000)
    await scene.turn(runner)
    rows = await connection.fetch("select status from tidegate.workflow_runs order by id")
    assert [row["status"] for row in rows] == ["succeeded", "failed"]
    assert await places(connection) == []


async def test_synchronous_workflows_and_steps_beside_each_other(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "openai", "2/s")

    @scene.app.workflow(on="tick")
    def ask(ctx: SyncContext, n: int) -> list[int]:
        return [ctx.step(f"ask-{i}", scene.call, i, budget="openai") for i in range(3)]

    @scene.app.workflow(on="tock")
    async def gather(ctx: Context, n: int) -> list[int]:
        return await asyncio.gather(*(ctx.step(f"ask-{i}", scene.call, i, budget="openai") for i in range(3)))

    runner = await scene.runner()
    await publish(connection, "tick", "shop", n=0)
    await publish(connection, "tock", "shop", n=0)
    await scene.until(runner, 6)
    await scene.turn(runner)
    rows = await connection.fetch("select status, output from tidegate.workflow_runs")
    assert [(row["status"], row["output"]) for row in rows] == [("succeeded", [0, 1, 2])] * 2


# Operating ----------------------------------------------------------------------------------------------------------


async def test_a_pause_and_an_edit_apply_to_waiting_steps(
    scene: Scene, database: Database, connection: Connection, clock: Clock
) -> None:
    await put(database, "openai", "1/h")
    asks(scene, budget="openai")
    runner = await scene.runner()
    await ticks(connection, 3)
    await scene.turn(runner)
    await control.pause_budget(database, "openai", actor="test")
    await clock.advance(7_300_000)
    await scene.turn(runner)
    assert scene.called == [0]
    await control.resume_budget(database, "openai", "test")
    await scene.turn(runner)
    assert scene.called == [0, 1]
    await put(database, "openai", "5/h")
    await scene.turn(runner)
    assert scene.called == [0, 1, 2]


async def test_another_key_and_cost_are_computed_for_waiting_steps(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "openai", "1/h")
    asks(scene, budget="openai")
    runner = await scene.runner()
    for n, tenant in enumerate(("a", "a", "b", "b")):
        await publish(connection, "tick", "shop", n=n, tenant=tenant)
    await scene.turn(runner)
    await put(database, "openai", "1/h", key=TENANT)
    await scene.turn(runner)
    assert sorted(scene.called) == [0, 1, 2]  # between keys there is no order
    assert [(row["key"], row["cost"]) for row in await places(connection)] == [("b", 1)]
    await put(database, "openai", "5/h", key=TENANT, cost="event.payload.nothing")
    await scene.turn(runner)
    [row] = await places(connection)
    assert (row["key"], row["cost"]) == (None, None), "it cannot be evaluated, and waits"
    await put(database, "openai", "5/h", key=TENANT, cost="event.payload.n")
    await scene.turn(runner)
    assert scene.called[3:] == [3]


async def test_a_budget_for_which_steps_wait_is_not_deleted(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "openai", "1/h")
    asks(scene, budget="openai")
    runner = await scene.runner()
    await ticks(connection, 2)
    await scene.turn(runner)
    with pytest.raises(Conflict) as refused:
        await control.delete_budget(database, "openai", "test")
    assert refused.value.errors[0].message == "1 step waits for it: tidegate budgets explain openai"


async def test_everyone_waits_and_one_step_is_tried_first(
    scene: Scene, database: Database, connection: Connection, clock: Clock
) -> None:
    await put(database, "openai", "100/s")
    refuse = True
    release = asyncio.Event()
    release.set()

    async def work(n: int) -> None:
        scene.call(n)
        if refuse:
            raise RetryAfter(60, "429", everyone="openai")
        await release.wait()

    @scene.app.workflow(on="tick")
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", work, n, budget="openai")

    runner = await scene.runner()
    await ticks(connection, 1)
    await scene.turn(runner)
    refuse = False
    await ticks(connection, 3)
    await scene.turn(runner)
    assert scene.called == [0]
    rows = await connection.fetch(
        "select retry_metadata -> 'waits_for' -> 'budget' ->> 'why' from tidegate.workflow_run_steps"
    )
    assert [row[0] for row in rows].count("closed") == 3
    await clock.advance(61_000)
    release.clear()
    await scene.lines.run_once()
    await scene.dispatch.run_once()
    await runner.run_once()
    await until(lambda: _is(len(scene.calls) == 2))
    await scene.lines.run_once()
    await runner.run_once()
    assert len(scene.calls) == 2, "half open: one is tried, the others wait"
    key = await connection.fetchrow("select * from tidegate.budget_keys")
    assert key["probe_run_id"] is not None
    release.set()
    await asyncio.wait_for(runner.idle(), 30)
    await scene.turn(runner)
    assert sorted(scene.called) == [0, 0, 0, 1, 2]
    key = await connection.fetchrow("select * from tidegate.budget_keys")
    assert (key["closed_until"], key["probe_run_id"]) == (None, None)


async def test_explain_says_which_budget_holds_the_step_its_place_and_when(
    scene: Scene, database: Database, connection: Connection
) -> None:
    await put(database, "openai", "2/min")
    asks(scene, budget="openai")
    runner = await scene.runner()
    sent = await ticks(connection, 5)
    await scene.turn(runner)
    told = await explain_any(connection, str(sent[-1]))
    assert "waits until about" in told.summary
    assert (
        "to call step 'ask': budget openai: waiting in line; it is number 3 in line; 0 of 2/min are left"
        in told.summary
    )
    assert told.waits_for == "room in its budget (step 'ask')" and told.until is not None
    record = await budgets.get(connection, "openai")
    assert record is not None and (record.waiting, record.waiting_steps) == (3, 3)
    await control.pause_budget(database, "openai", reason="costs", actor="ada")
    told = await explain_any(connection, str(sent[-1]))
    pause = "waits to call step 'ask': budget openai: paused by ada until it is resumed: costs; it is number 3 in line"
    assert pause in told.summary and told.until is None


async def test_what_a_dead_worker_held_is_free_when_its_lease_has_ended(
    scene: Scene, database: Database, connection: Connection, clock: Clock
) -> None:
    await put(database, "openai", concurrency=1)
    never = asyncio.Event()

    async def work(n: int) -> None:
        scene.call(n)
        await never.wait()

    @scene.app.workflow(on="tick")
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", work, n, budget="openai")

    runner = await scene.runner()
    await ticks(connection, 1)
    await scene.dispatch.run_once()
    await runner.run_once()
    await until(lambda: _is(bool(scene.calls)))
    assert await in_use(connection) == 1
    await connection.execute(
        "update tidegate.workflow_runs set status = 'pending', claim_generation = claim_generation + 1, "
        "claimed_by = null, claim_expires_at = null, next_attempt_at = tidegate.now()"
    )
    assert await in_use(connection) == 0
    assert (await BudgetKeeper(database).run_once()).holders == 1
    assert await connection.fetchval("select count(*) from tidegate.budget_holders") == 0


async def test_a_run_that_was_cancelled_while_it_waited_can_be_retried(
    scene: Scene, database: Database, connection: Connection, clock: Clock
) -> None:
    await put(database, "openai", "1/h")
    asks(scene, budget="openai")
    runner = await scene.runner()
    await ticks(connection, 2)
    await scene.turn(runner)
    [row] = await places(connection)
    await control.cancel_run(database, row["run_id"], "test", TRIGGER_BREAKER)
    await control.retry_run(database, row["run_id"], "test")
    await scene.turn(runner)
    assert [one["run_id"] for one in await places(connection)] == [row["run_id"]]
    await clock.advance(3_700_000)
    await scene.turn(runner)
    assert scene.called == [0, 1] and await places(connection) == []


async def test_the_turn_of_a_step_comes_while_another_of_its_run_is_in_progress(
    scene: Scene, database: Database, connection: Connection, clock: Clock
) -> None:
    """The run is not suspended: its worker asks again after a moment."""
    await put(database, "openai", "1/s")
    release = asyncio.Event()

    @scene.app.workflow(on="tick")
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("first", scene.call, 1, budget="openai")
        await asyncio.gather(ctx.step("long", release.wait), ctx.step("second", scene.call, 2, budget="openai"))

    runner = await scene.runner()
    await ticks(connection, 1)
    await scene.dispatch.run_once()
    await runner.run_once()
    await eventually(database, "select count(*) = 1 from tidegate.budget_steps")
    await clock.advance(1100)
    assert len((await scene.lines.steps_once()).granted) == 1
    await until(lambda: _is(scene.called == [1, 2]))
    release.set()
    await asyncio.wait_for(runner.idle(), 30)
    assert (await the_run(connection))["status"] == "succeeded"


async def test_the_harness_moves_the_clock_to_the_turn_of_a_step() -> None:
    app, called = Tidegate(), []

    @app.workflow(on="tick")
    async def ask(ctx: Context, n: int) -> None:
        await ctx.step("ask", called.append, n, budget=Budget("openai", "2/min"))

    async with Harness(app) as harness:
        for n in range(5):
            await harness.publish("tick", source="shop", payload={"n": n})
        await harness.run_until_idle()
        assert sorted(called) == [0, 1]  # they are called side by side, in threads
        waiting = [run for run in await harness.runs("ask") if run.status == "pending"]
        assert "budget openai" in (await harness.explain(str(waiting[0].event_id))).summary
        await harness.advance("3m")
        assert sorted(called) == [0, 1, 2, 3, 4]
        assert {run.status for run in await harness.runs("ask")} == {"succeeded"}
