"""Steps that spend of budgets, in runs that hold their slots while they execute (`holds="executing"`): a run whose step
waits for a budget gives its slots back, and queues for them when the turn of its step has come."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import defaultdict
from pathlib import Path

import pytest

from tests.flow.conftest import eventually
from tests.flow.test_budgets import put
from tests.flow.test_holds import Sink, rows, sleeper
from tests.flow.test_trigger_workers import SUCCEEDED, fleet
from tidegate import Budget, Context, Tidegate
from tidegate.flow import control
from tidegate.store.db import Connection, Database
from tidegate.testing import Harness


async def publish(harness: Harness, kind: str, *numbers: int) -> None:
    for n in numbers:
        await harness.publish(kind, source="shop", payload={"n": n})


def asker(sink: Sink, step: Budget, *, app: Tidegate | None = None, **options: object) -> Tidegate:
    """A workflow with a step that spends of a budget."""
    app = app or Tidegate()

    async def call(n: int) -> None:
        with sink.executing("call"):
            await asyncio.sleep(0.002)
            sink.done.append(("call", n))

    @app.workflow(on="ask", **options)  # type: ignore[arg-type]
    async def ask(ctx: Context, n: int) -> None:
        with sink.executing("run"):
            await asyncio.sleep(0.002)
            await ctx.step("begin", lambda: sink.done.append(("begin", n)))
            await ctx.step("call", call, n, budget=step)
            await asyncio.sleep(0.002)
            sink.done.append(("end", n))

    return app


@pytest.mark.parametrize("step", [Budget("calls", "1/min"), Budget("calls", "1/min", concurrency=1)])
async def test_a_run_whose_step_waits_gives_its_slot_back_and_takes_it_again_when_its_turn_comes(step: Budget) -> None:
    sink = Sink()
    app = asker(sink, step, budgets=[Budget("gpu", concurrency=1)], holds="executing")
    async with Harness(app) as harness:
        await publish(harness, "ask", 1, 2, 3, 4)
        await harness.run_until_idle()
        # While a step waits, others begin.
        assert [n for what, n in sink.done if what == "begin"] == [1, 2, 3, 4]
        assert [one for one in sink.done if one[0] != "begin"] == [("call", 1), ("end", 1)]
        assert await rows(harness, "budget_holders") == 0
        assert await rows(harness, "budget_steps") == 3
        waiting = [run for run in await harness.runs("ask") if run.status == "pending"]
        summary = (await harness.explain(str(waiting[0].event_id))).summary
        assert "budget calls" in summary and "it holds no slot meanwhile" in summary
        await harness.advance("10m")
        assert [one for one in sink.done if one[0] != "begin"] == [
            (what, n) for n in (1, 2, 3, 4) for what in ("call", "end")
        ]
        assert sink.most == {"run": 1, "call": 1}
        assert {run.status for run in await harness.runs("ask")} == {"succeeded"}
        for table in ("budget_holders", "budget_steps", "slot_waits"):
            assert await rows(harness, table) == 0, table


@pytest.mark.parametrize("is_step_first", [True, False])
async def test_a_step_and_a_run_that_resumes_are_served_by_how_long_they_have_waited(is_step_first: bool) -> None:
    sink = Sink()
    gpu = Budget("gpu", concurrency=1)
    app = sleeper(sink, sleep="5m", budgets=[gpu])
    asker(sink, gpu, app=app)

    @app.workflow(on="hold", budgets=["gpu"])
    async def hold(ctx: Context, n: int) -> None:
        await ctx.sleep("10m")

    @app.workflow(on="late", budgets=["gpu"])
    async def late(ctx: Context, n: int) -> None:
        sink.done.append(("late", n))

    async with Harness(app) as harness:
        await publish(harness, "nap.asked", 1)
        await harness.run_until_idle()
        await publish(harness, "hold", 2)
        await harness.advance("1m" if is_step_first else "6m")  # the first sleeps until 5m
        await publish(harness, "ask", 3)
        await harness.run_until_idle()
        await harness.advance("6m" if is_step_first else "1m")
        await publish(harness, "late", 4)
        await harness.run_until_idle()
        assert sink.done == [("before", 1), ("begin", 3)]
        await harness.advance("30m")
        served = [one for one in sink.done if one[0] in ("call", "after", "late")]
        expected = [("call", 3), ("after", 1)] if is_step_first else [("after", 1), ("call", 3)]
        assert served == [*expected, ("late", 4)]
        for table in ("budget_holders", "budget_steps", "slot_waits"):
            assert await rows(harness, table) == 0, table


@pytest.mark.parametrize("is_cancelled", [True, False])
async def test_a_step_whose_turn_has_come_keeps_what_it_has_while_its_run_waits_for_its_slot(
    is_cancelled: bool,
) -> None:
    sink = Sink()
    calls = Budget("calls", concurrency=1)
    app = asker(sink, calls, budgets=[Budget("gpu", concurrency=1)], holds="executing")

    @app.workflow(on="busy", budgets=[calls])
    async def busy(ctx: Context, n: int) -> None:
        await ctx.sleep("5m")

    @app.workflow(on="hold", budgets=["gpu"])
    async def hold(ctx: Context, n: int) -> None:
        await ctx.sleep("10m")

    async with Harness(app) as harness:
        for kind, n in (("busy", 1), ("ask", 2), ("hold", 3), ("ask", 4)):
            await publish(harness, kind, n)
            await harness.run_until_idle()
        assert sink.done == [("begin", 2)]
        await harness.advance("6m")  # the budget of the step has room, that of its run has none
        [run] = await harness.runs("ask")
        summary = (await harness.explain(run)).summary
        assert "waits for a slot of budget gpu" in summary and "1 of 1 are held by run" in summary
        assert await rows(harness, "budget_holders where budget = 'calls' and step = 'call'") == 1
        assert await rows(harness, "slot_waits") == 1
        if is_cancelled:
            await harness.cancel(run)
            await harness.run_until_idle()
            assert await rows(harness, "budget_holders where budget = 'calls'") == 0
        await harness.advance("30m")
        served = [n for what, n in sink.done if what == "end"]
        assert sorted(served) == ([4] if is_cancelled else [2, 4])
        assert sink.most == {"run": 1, "call": 1}
        for table in ("budget_holders", "budget_steps", "slot_waits"):
            assert await rows(harness, table) == 0, table


async def test_a_step_gets_no_slot_of_a_budget_that_its_run_takes_again() -> None:
    """It would be kept from its own run, for ever."""
    sink = Sink()
    app = Tidegate()

    @app.workflow(on="other", budgets=[Budget("gpu", concurrency=1)])
    async def other(ctx: Context, n: int) -> None:
        sink.done.append(("other", n))

    entered, paused = asyncio.Event(), asyncio.Event()

    @app.workflow(on="both", budgets=["gpu"], holds="executing")
    async def both(ctx: Context, n: int) -> None:
        entered.set()
        await paused.wait()
        await ctx.step("call", lambda: sink.done.append(("both", n)), budget="gpu")

    async with Harness(app) as harness:
        await publish(harness, "both", 1)
        turning = asyncio.create_task(harness.run_until_idle())
        await entered.wait()
        database = Database(harness.database_url, "test", size=1)
        await database.open()
        await control.pause_budget(database, "gpu", reason="cost", actor="op")
        paused.set()
        await turning
        await publish(harness, "other", 2)
        await harness.run_until_idle()
        assert await rows(harness, "budget_holders") == 0  # paused: its step waits, and it gave its slot back
        await control.resume_budget(database, "gpu", "op")
        await put(database, "gpu", "100/s", concurrency=1)  # an edit: what waits is decided again
        await database.close()
        await harness.advance("10m")
        await publish(harness, "other", 3)
        await harness.run_until_idle()
        assert sink.done == [("other", 2), ("other", 3)]
        assert await rows(harness, "budget_holders") == 0


# With processes ------------------------------------------------------------------------------------------------------

APP = """
import asyncio
import os
import time

from tidegate import Budget, Context, Tidegate

app = Tidegate()
sink = os.open(os.environ["SINK"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

def note(what, of, run_id, n):
    os.write(sink, f"{time.monotonic_ns()} {what} {of} {run_id} {n}\\n".encode())

async def call(run_id, n):
    note("begin", "call", run_id, n)
    try:
        await asyncio.sleep(0.01)
    finally:
        note("leave", "call", run_id, n)

@app.workflow(on="tick", holds="executing", budgets=[Budget("slots", concurrency=3)])
async def tick(ctx: Context, n: int) -> None:
    note("begin", "run", ctx.run_id, n)
    try:
        await asyncio.sleep(0.01)
        await ctx.step("call", call, ctx.run_id, n, budget=Budget("calls", "20/s", concurrency=2))
        await asyncio.sleep(0.01)
        await ctx.sleep("50ms")
    finally:
        note("leave", "run", ctx.run_id, n)
"""


def _notes(sink: Path) -> list[tuple[int, str, str, str, int]]:
    lines = (line.split(" ") for line in sink.read_text().splitlines())
    return sorted((int(at), what, of, run, int(n)) for at, what, of, run, n in lines)


def _most_at_once(notes: list[tuple[int, str, str, str, int]]) -> dict[str, int]:
    """What did not leave, since its process was killed, counts until it begins again."""
    moves: dict[str, list[int]] = defaultdict(list)
    begun: set[tuple[str, str]] = set()
    for _, what, of, run, _ in notes:
        if what == "begin" and (of, run) in begun:
            continue
        begun.add((of, run)) if what == "begin" else begun.discard((of, run))
        moves[of].append(1 if what == "begin" else -1)
    return {of: max(itertools.accumulate(mine)) for of, mine in moves.items()}


@pytest.mark.alone
@pytest.mark.parametrize("kills", [0, 2])
async def test_workers_execute_no_more_than_there_are_slots_and_all_runs_end_in_a_sensible_order(
    database_url: str, database: Database, connection: Connection, tmp_path: Path, kills: int
) -> None:
    sink, app, count = tmp_path / "sink", tmp_path / "ticking.py", 60
    app.write_text(APP)
    settings = {"TIDEGATE_LEASE_MS": "1000", "SINK": str(sink)}
    with fleet(database_url, app, 4, **settings) as workers:
        await connection.execute(
            "select tidegate.publish('tick', 'shop', jsonb_build_object('n', n)) from generate_series(1, $1) n", count
        )
        await eventually(database, "select count(*) > 3 from tidegate.budget_steps")
        for victim in workers[len(workers) - kills :]:
            victim.signal(signal.SIGKILL)
        await eventually(database, SUCCEEDED, count)
    notes = _notes(sink)
    most = _most_at_once(notes)
    assert most["run"] <= 3
    if not kills:  # the call of a killed worker is over for its budget when its lease is, before it begins again
        assert most["call"] <= 2
        begun = list(dict.fromkeys(n for _, what, of, _, n in notes if (what, of) == ("begin", "call")))
        assert max(abs(place - n) for place, n in enumerate(begun, 1)) <= 12, begun
    for table in ("budget_holders", "budget_steps", "slot_waits"):
        assert await connection.fetchval(f"select count(*) from tidegate.{table}") == 0, table
