"""Slots that are held while a run executes (`holds="executing"`). Judged by what executes at the same time."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from tidegate import Batch, Budget, Context, RetryAfter, Tidegate
from tidegate.errors import AppError
from tidegate.testing import Harness

KEY = "{{ event.payload.key }}"


class Sink:
    """What executes now, by key, the most that did at the same time, and what was done."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self.done: list[Any] = []

    @contextlib.contextmanager
    def executing(self, key: str = "") -> Iterator[None]:
        self.now[key] += 1
        self.most[key] = max(self.most[key], self.now[key])
        try:
            yield
        finally:
            self.now[key] -= 1


def sleeper(sink: Sink, sleep: str = "1m", app: Tidegate | None = None, name: str = "nap", **options: Any) -> Tidegate:
    """A workflow that executes, sleeps, and executes again."""
    app = app or Tidegate()

    @app.workflow(on=f"{name}.asked", name=name, holds="executing", **options)
    async def nap(ctx: Context, n: int, key: str = "") -> int:
        with sink.executing(key):
            await asyncio.sleep(0.002)
            await ctx.step("before", lambda: sink.done.append(("before", n)))
            await ctx.sleep(sleep)
            await asyncio.sleep(0.002)
            await ctx.step("after", lambda: sink.done.append(("after", n)))
        return n

    return app


async def ask(harness: Harness, *numbers: int, name: str = "nap", **payload: Any) -> list[Any]:
    return [await harness.publish(f"{name}.asked", source="shop", payload={"n": n, **payload}) for n in numbers]


async def rows(harness: Harness, table: str) -> int:
    async with harness.connection() as connection:
        found: int = await connection.fetchval(f"select count(*) from tidegate.{table}")
    return found


async def test_a_run_that_sleeps_gives_its_slot_back_and_takes_it_again_to_go_on() -> None:
    sink = Sink()
    async with Harness(sleeper(sink, max_concurrency=1)) as harness:
        await ask(harness, 1, 2, 3)
        await harness.run_until_idle()
        assert sink.done == [("before", 1), ("before", 2), ("before", 3)]  # while the first sleeps, the others begin
        await harness.advance("2m")
        assert sink.done[3:] == [("after", 1), ("after", 2), ("after", 3)]
        assert sink.most == {"": 1}
        assert [run.status for run in await harness.runs()] == ["succeeded"] * 3
        assert await rows(harness, "slot_waits") == 0


async def test_by_default_a_run_that_sleeps_keeps_its_slot() -> None:
    sink = Sink()
    app = Tidegate()

    @app.workflow(on="nap.asked", max_concurrency=1)
    async def nap(ctx: Context, n: int) -> None:
        await ctx.step("before", lambda: sink.done.append(("before", n)))
        await ctx.sleep("1m")

    async with Harness(app) as harness:
        await ask(harness, 1, 2)
        await harness.run_until_idle()
        assert sink.done == [("before", 1)]


async def test_each_key_has_slots_of_its_own() -> None:
    sink = Sink()
    async with Harness(sleeper(sink, max_concurrency=2, concurrency_key=KEY)) as harness:
        for key in "abc":
            await ask(harness, *range(5), key=key)
        await harness.advance("5m")
        assert len(sink.done) == 30
        assert set(sink.most.values()) == {2}


async def test_budgets_are_held_while_a_run_executes_by_key_and_by_several_workflows() -> None:
    sink = Sink()
    budget = Budget("gpu", concurrency=2, key=KEY)
    app = sleeper(sink, budgets=[budget])
    sleeper(sink, app=app, name="doze", budgets=["gpu"])
    async with Harness(app) as harness:
        for key in "ab":
            await ask(harness, *range(4), key=key)
            await ask(harness, *range(4), name="doze", key=key)
        await harness.run_until_idle()
        assert Counter(what for what, _ in sink.done) == {"before": 16}
        assert await rows(harness, "budget_holders") == 0
        await harness.advance("5m")
        assert Counter(what for what, _ in sink.done) == {"before": 16, "after": 16}
        assert sink.most == {"a": 2, "b": 2}
        assert await rows(harness, "budget_holders") == await rows(harness, "slot_waits") == 0


# What gives a slot back ----------------------------------------------------------------------------------------------


def waiters(sink: Sink) -> Tidegate:
    """One workflow for each way to wait, each with one slot."""
    app = Tidegate()

    @app.workflow(on="wait.event", max_concurrency=1, holds="executing")
    async def for_event(ctx: Context, n: int) -> None:
        with sink.executing("event"):
            await ctx.step("begin", lambda: sink.done.append(("begin", n)))
            await ctx.wait_for("go", timeout="1h", match={"n": n})
            sink.done.append(("end", n))

    @app.workflow(on="wait.approval", max_concurrency=1, holds="executing")
    async def for_approval(ctx: Context, n: int) -> None:
        with sink.executing("approval"):
            await ctx.step("begin", lambda: sink.done.append(("begin", n)))
            approval = await ctx.approval("ok?", timeout="1h")
            await approval.decision()
            sink.done.append(("end", n))

    @app.workflow(on="wait.retry", max_concurrency=1, holds="executing")
    async def for_retry(ctx: Context, n: int) -> None:
        with sink.executing("retry"):
            await ctx.step("begin", lambda: sink.done.append(("begin", n)))
            await ctx.step("call", _fails_once(sink, n))
            sink.done.append(("end", n))

    @app.workflow(on="wait.later", max_concurrency=1, holds="executing")
    async def for_later(ctx: Context, n: int) -> None:
        with sink.executing("later"):
            if ("begin", n) not in sink.done:
                sink.done.append(("begin", n))
                raise RetryAfter(60, "busy")
            sink.done.append(("end", n))

    @app.workflow()
    async def child(ctx: Context) -> None:
        await ctx.sleep("1m")

    @app.workflow(on="wait.child", max_concurrency=1, holds="executing")
    async def for_child(ctx: Context, n: int) -> None:
        with sink.executing("child"):
            await ctx.step("begin", lambda: sink.done.append(("begin", n)))
            await ctx.run(child)
            sink.done.append(("end", n))

    return app


def _fails_once(sink: Sink, n: int) -> Any:
    def call() -> None:
        if ("failed", n) not in sink.done:
            sink.done.append(("failed", n))
            raise RuntimeError("not yet")

    return call


@pytest.mark.parametrize("how", ["event", "approval", "retry", "later", "child"])
async def test_whatever_a_run_waits_for_gives_its_slot_back(how: str) -> None:
    sink = Sink()
    async with Harness(waiters(sink)) as harness:
        for n in (1, 2, 3):
            await harness.publish(f"wait.{how}", source="shop", payload={"n": n})
        await harness.run_until_idle()
        begun = [n for what, n in sink.done if what == "begin"]
        assert begun == [1, 2, 3], sink.done
        if how == "event":
            for n in (3, 1, 2):
                await harness.publish("go", source="shop", payload={"n": n})
        if how == "approval":
            for run in await harness.runs():
                await harness.approve(run, "ok?")
        await harness.advance("10m")
        assert sorted(n for what, n in sink.done if what == "end") == [1, 2, 3]
        assert sink.most == {how: 1}
        assert {run.status for run in await harness.runs()} == {"succeeded"}
        assert await rows(harness, "slot_waits") == 0


# Fairness ------------------------------------------------------------------------------------------------------------


async def test_who_resumes_waits_in_line_with_the_deliveries_by_how_long_each_has_waited() -> None:
    """One slot, held for a minute by each: those that resume and those that come take it in the order in which they
    began to wait."""
    app = Tidegate()
    order: list[tuple[str, int]] = []
    begun, gate = asyncio.Event(), asyncio.Event()

    @app.workflow(on="nap.asked", max_concurrency=1, holds="executing")
    async def nap(ctx: Context, n: int) -> None:
        order.append(("begin" if ctx.attempt == 1 else "resume", n))
        if n == 0:
            begun.set()
            await asyncio.wait_for(gate.wait(), 20)
            return
        await ctx.sleep("10s")

    async with Harness(app) as harness:
        await ask(harness, 1)
        await harness.run_until_idle()
        await harness.advance("9s")
        await ask(harness, 0)  # executes, and keeps the slot
        running = asyncio.create_task(harness.run_until_idle())
        await asyncio.wait_for(begun.wait(), 20)
        gate.set()
        await running
        await harness.advance("5s")
        assert order == [("begin", 1), ("begin", 0), ("resume", 1)]


async def test_neither_newcomers_nor_those_that_resume_starve() -> None:
    """Runs that sleep and resume for ever keep one slot busy, and events come all the time: each gets its turn."""
    app = Tidegate()
    turns: Counter[str] = Counter()
    stop: list[bool] = []

    @app.workflow(on="poll", name="poll", budgets=[Budget("line", concurrency=1)], holds="executing")
    async def poll(ctx: Context, n: int) -> None:
        for round_ in range(1000):
            await asyncio.sleep(0.001)
            turns[f"poll {n}"] += 1
            if stop:
                return
            await ctx.sleep("1s", name=f"rest {round_}")

    @app.workflow(on="visit", name="visit", budgets=["line"], holds="executing")
    async def visit(ctx: Context, n: int) -> None:
        await asyncio.sleep(0.001)
        turns["visit"] += 1

    async with Harness(app) as harness:
        for n in range(4):
            await harness.publish("poll", source="shop", payload={"n": n})
        for second in range(6):
            await harness.publish("visit", source="shop", payload={"n": second})
            await harness.advance("1s")
        stop.append(True)
        await harness.advance("1m")
        assert turns["visit"] == 6
        polled = [turns[f"poll {n}"] for n in range(4)]
        assert min(polled) >= 6 and max(polled) - min(polled) <= 1, polled


# With other limits ---------------------------------------------------------------------------------------------------


async def test_skip_skips_while_another_executes_and_not_while_it_sleeps() -> None:
    sink = Sink()
    async with Harness(sleeper(sink, while_running="skip", key=KEY)) as harness:
        await ask(harness, 1, 2, key="a")  # together: the second finds the first executing
        await harness.run_until_idle()
        await ask(harness, 3, key="a")  # the first sleeps
        await harness.advance("5m")
        assert sorted(n for what, n in sink.done if what == "after") == [1, 3]
        async with harness.connection() as connection:
            why = await connection.fetchval(
                "select last_error from tidegate.workflow_trigger_deliveries where status = 'skipped'"
            )
        first = (await harness.runs())[0]
        assert why == f"run {first.id} was executing, and the trigger skips what overlaps (overlap: skip)"


async def test_queue_runs_one_after_the_other_while_they_execute() -> None:
    sink = Sink()
    async with Harness(sleeper(sink, while_running="queue", key=KEY)) as harness:
        await ask(harness, 1, 2, 3, key="a")
        await harness.run_until_idle()
        assert sink.done == [("before", 1), ("before", 2), ("before", 3)]
        await harness.advance("5m")
        assert sink.done[3:] == [("after", 1), ("after", 2), ("after", 3)] and sink.most == {"a": 1}


async def test_cancel_cancels_what_executes_and_leaves_what_sleeps() -> None:
    sink = Sink()
    async with Harness(sleeper(sink, while_running="cancel", key=KEY)) as harness:
        await ask(harness, 1, key="a")
        await harness.run_until_idle()
        await ask(harness, 2, key="a")  # the first sleeps, and goes on later
        await harness.advance("5m")
        assert sorted(n for what, n in sink.done if what == "after") == [1, 2]
        assert {run.status for run in await harness.runs()} == {"succeeded"}


async def test_a_window_launches_a_run_that_gives_its_slot_back() -> None:
    sink = Sink()
    app = Tidegate()

    @app.workflow(on="nap.asked", batch=Batch(2, "5s"), max_concurrency=1, holds="executing")
    async def nap(ctx: Context) -> None:
        with sink.executing():
            await asyncio.sleep(0.002)
            numbers = [event.payload["n"] for event in ctx.events]
            await ctx.step("before", lambda: sink.done.append(("before", numbers)))
            await ctx.sleep("1m")
            sink.done.append(("after", numbers))

    async with Harness(app) as harness:
        await ask(harness, *range(6))
        await harness.run_until_idle()
        assert sorted(n for what, numbers in sink.done if what == "before" for n in numbers) == list(range(6))
        await harness.advance("5m")
        assert sorted(n for what, numbers in sink.done if what == "after" for n in numbers) == list(range(6))
        assert sink.most == {"": 1}


async def test_a_run_that_asks_everyone_to_wait_holds_back_those_that_resume() -> None:
    sink = Sink()
    app = sleeper(sink, max_concurrency=2)

    @app.workflow(on="block.asked", holds="executing", max_concurrency=1)
    async def block(ctx: Context, n: int) -> None:
        with sink.executing("block"):
            if n == 1:
                await ctx.sleep("10s")
                sink.done.append(("resumed", harness.now))
            elif ctx.attempt == 1:
                raise RetryAfter(60, "429", everyone="trigger")

    async with Harness(app) as harness:
        await ask(harness, 1, name="block")
        await harness.run_until_idle()
        began = harness.now
        await ask(harness, 2, name="block")
        await harness.advance("3m")
        [(_, resumed)] = [one for one in sink.done if one[0] == "resumed"]
        assert (resumed - began).total_seconds() >= 60
        assert {run.status for run in await harness.runs("block")} == {"succeeded"}


async def test_a_run_that_waits_for_its_version_holds_nothing() -> None:
    sink = Sink()
    async with Harness(sleeper(sink, max_concurrency=1)) as harness:
        await ask(harness, 1)
        await harness.run_until_idle()
        async with harness.connection() as connection:  # as if it had misfitted the only version that workers have
            await connection.execute(
                "update tidegate.workflow_runs set version_held_at = tidegate.now(), misfits = array[version], "
                "next_attempt_at = tidegate.now() + interval '1 h'"
            )
        await ask(harness, 2)
        await harness.advance("10m")
        assert sink.done == [("before", 1), ("before", 2), ("after", 2)]


# What is said --------------------------------------------------------------------------------------------------------


async def test_explain_of_a_delivery_names_who_holds_the_slots_and_when_they_resume() -> None:
    app = Tidegate()

    @app.workflow(on="nap.asked", max_concurrency=1)
    async def nap(ctx: Context, n: int) -> None:
        await ctx.sleep("1h")

    async with Harness(app) as harness:
        await ask(harness, 1)
        [waits] = await ask(harness, 2)
        await harness.run_until_idle()
        run = await harness.only_run()
        assert run.next_attempt_at is not None
        said = await harness.explain(waits)
        assert f"held by run {run.id} (resumes {run.next_attempt_at:%Y-%m-%d %H:%M:%S} UTC)" in said.summary


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"holds": "sometimes", "max_concurrency": 1}, "holds: must be unfinished or executing, not 'sometimes'"),
        ({"holds": "executing"}, "holds: executing requires max_concurrency or budgets"),
    ],
)
def test_what_cannot_be_held_is_refused(options: dict[str, Any], said: str) -> None:
    app = Tidegate()
    with pytest.raises(AppError, match=said):

        @app.workflow(on="tick", **options)
        async def tick(ctx: Context) -> None: ...
