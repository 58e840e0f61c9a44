"""`tidegate.testing`: what users' own tests rely on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest

from tidegate import Context, NonRetryable, Retry, RetryAfter, SyncContext, Tidegate
from tidegate.errors import AppError
from tidegate.testing import Harness, with_harness
from tidegate.worker.supervisor import LoopTurn, Worker

PATIENT = Retry(max_attempts=50, base="10s", factor=2, cap="10m", jitter=0)


class Shop:
    """An application, and when (in seconds since the start) it did what."""

    def __init__(self) -> None:
        self.app = Tidegate()
        self.harness = Harness(self.app)
        self.began_at = self.harness.now
        self.done: list[tuple[str, float]] = []

    def do(self, what: str) -> None:
        self.done.append((what, (self.harness.now - self.began_at).total_seconds()))


@pytest.fixture
def shop() -> Shop:
    return Shop()


async def test_an_hour_of_backoff(shop: Shop) -> None:
    async def call() -> str:
        shop.do("call")
        if len(shop.done) < 10:
            raise ConnectionError("the service is away")
        return "ok"

    @shop.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return await ctx.step("call", call, retry=PATIENT)

    async with shop.harness as harness:
        await harness.publish("go", source="test")
        await harness.run_until_idle()
        run = await harness.only_run("work")
        assert (run.status, run.steps["call"].status, run.steps["call"].attempts) == ("pending", "pending", 1)
        assert run.warning is not None and "the service is away" in run.warning
        began = time.monotonic()
        assert await harness.advance("1h") == shop.began_at + timedelta(hours=1)
        assert time.monotonic() - began < 1200  # a third of the hour: nobody waited for it
        run = await harness.only_run()
    assert (run.status, run.output, run.steps["call"].attempts) == ("succeeded", "ok", 10)
    assert [at for _, at in shop.done] == [0, 10, 30, 70, 150, 310, 630, 1230, 1830, 2430]
    assert run.finished_at == shop.began_at + timedelta(seconds=2430)


async def test_a_sleep_of_two_hours_beside_retries_in_the_order_of_time(shop: Shop) -> None:
    async def flaky() -> None:
        shop.do("flaky")
        if len(shop.done) < 3:
            raise OSError("again")

    @shop.app.workflow(on="sleep")
    async def sleeper(ctx: Context) -> None:
        await ctx.sleep("2h")
        await ctx.step("wake", shop.do, "awake")

    @shop.app.workflow(on="retry")
    async def retrier(ctx: Context) -> None:
        await ctx.step("flaky", flaky, retry=Retry(max_attempts=9, base="1h", factor=1, cap="1h", jitter=0))
        await ctx.sleep("30m")
        await ctx.step("done", shop.do, "done")

    async with shop.harness as harness:
        await harness.publish("sleep", source="test")
        await harness.publish("retry", source="test")
        await harness.advance("119m")
        assert [what for what, _ in shop.done] == ["flaky", "flaky"]
        waiting = await harness.only_run("sleeper")
        assert waiting.steps["sleep-1"].next_attempt_at == shop.began_at + timedelta(hours=2)
        await harness.advance("2h")
        assert {run.status for run in await harness.runs()} == {"succeeded"}
    at_two_hours = {("awake", 7200.0), ("flaky", 7200.0)}
    assert shop.done[:2] == [("flaky", 0.0), ("flaky", 3600.0)]
    assert set(shop.done[2:4]) == at_two_hours and shop.done[4:] == [("done", 9000.0)]


async def test_a_throttle_launches_as_it_would_over_the_hour(shop: Shop) -> None:
    @shop.app.workflow(on="go", throttle="10/min")
    async def work(ctx: Context, n: int) -> int:
        shop.do("work")
        return n

    async with shop.harness as harness:
        for n in range(35):
            await harness.publish("go", source="test", payload={"n": n})
        await harness.run_until_idle()
        assert len(shop.done) == 10
        await harness.advance("1h")
        found = await harness.runs("work")
    assert [run.output for run in found if run.status == "succeeded"] == list(range(35))
    times = [at for _, at in shop.done]
    for at in times:
        assert sum(at <= other < at + 60 for other in times) <= 10
    assert 120 < times[-1] < 400


async def test_max_concurrency_and_held_sources(shop: Shop) -> None:
    busy = most = 0

    async def call() -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        await asyncio.sleep(0.01)
        busy -= 1

    @shop.app.workflow(on="go", max_concurrency=2)
    async def work(ctx: Context) -> None:
        await ctx.step("call", call)
        await ctx.sleep("1m")

    async with shop.harness as harness:
        for _ in range(6):
            await harness.publish("go", source="test")
        await harness.run_until_idle()
        assert len(await harness.runs()) == 2
        await harness.advance("10m")
        found = await harness.runs()
    assert [run.status for run in found] == ["succeeded"] * 6
    assert most == 2
    ends = [(run.finished_at - shop.began_at).total_seconds() for run in found if run.finished_at]
    assert ends == [60, 60, 120, 120, 180, 180]


async def test_a_failure_is_a_dead_letter(shop: Shop) -> None:
    async def refused() -> None:
        raise NonRetryable("the card is stolen")

    async def broken() -> None:
        raise ValueError("never")

    @shop.app.workflow(on="refused")
    async def charge(ctx: Context) -> None:
        await ctx.step("charge", refused)

    @shop.app.workflow(on="broken")
    async def ship(ctx: Context) -> None:
        await ctx.step("ship", broken)

    async with shop.harness as harness:
        accepted = await harness.publish("refused", source="test")
        await harness.run_until_idle()
        letters = await harness.dead_letters()
        assert [(one.kind, one.event_id, one.reason) for one in letters] == [
            ("step", accepted.id, "step 'charge' failed: NonRetryable: the card is stolen")
        ]
        await harness.publish("broken", source="test")
        await harness.advance("1h")
        run = await harness.only_run("ship")
        assert (run.status, run.steps["ship"].status, run.steps["ship"].attempts) == ("failed", "failed", 5)
        assert run.error is not None and "ValueError: never" in run.error
        assert [one.reason for one in await harness.dead_letters()][1:] == ["step 'ship' failed: ValueError: never"]


async def test_retry_after_and_what_a_workflow_publishes(shop: Shop) -> None:
    async def limited() -> None:
        shop.do("call")
        if len(shop.done) == 1:
            raise RetryAfter(120, "429")
        await shop.app.publish("done", source="work")

    @shop.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("call", limited)

    @shop.app.workflow(on="done")
    async def after(ctx: Context) -> None:
        assert ctx.event is not None
        shop.do("after")

    async with shop.harness as harness:
        await harness.publish("go", source="test", id="one")
        assert (await harness.publish("go", source="test", id="one")).status == "duplicate"
        await harness.advance("2m")
        assert (await harness.only_run("after")).status == "succeeded"
    assert shop.done == [("call", 0.0), ("call", 120.0), ("after", 120.0)]


async def test_schedules_tick_by_the_harnesss_clock(shop: Shop) -> None:
    @shop.app.workflow(every="15m")
    async def work(ctx: Context) -> None:
        shop.do("tick")

    async with shop.harness as harness:
        await harness.advance("1h")
        assert len(await harness.runs("work")) == 4
    ticks = [at for _, at in shop.done]
    assert [later - earlier for earlier, later in pairwise(ticks)] == [900.0] * 3


async def test_cancel(shop: Shop) -> None:
    @shop.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.sleep("1h")
        shop.do("never")

    async with shop.harness as harness:
        await harness.publish("go", source="test")
        await harness.run_until_idle()
        await harness.cancel(await harness.only_run())
        await harness.advance("2h")
        assert (await harness.only_run()).status == "cancelled"
    assert shop.done == []


async def test_a_jump_wakes_only_what_became_due(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty days, in which two runs sleep, cost as many turns as there are due times, and the same as an hour."""
    turns: list[datetime] = []
    turn = Worker.turn

    async def counted(self: Worker, now: datetime) -> LoopTurn:
        turns.append(now)
        return await turn(self, now)

    monkeypatch.setattr(Worker, "turn", counted)

    @shop.app.workflow(on="go")
    async def work(ctx: Context, days: int) -> None:
        await ctx.sleep(f"{days}d")
        shop.do("awake")

    async with shop.harness as harness:
        for days in (3, 20):
            await harness.publish("go", source="test", payload={"days": days})
        await harness.run_until_idle()
        began = harness.now
        turns.clear()
        await harness.advance("30d")
        times = {round((at - began) / timedelta(days=1), 3) for at in turns}
        assert times == {0, 3, 20, 30} and len(turns) <= 3 * len(times)
        assert [run.status for run in await harness.runs()] == ["succeeded"] * 2
        turns.clear()
        await harness.advance("365d")
        assert len(turns) <= 3
    assert len(shop.done) == 2


async def test_fail_step_counts_and_names(shop: Shop) -> None:
    @shop.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("call", shop.do, "work")

    @shop.app.workflow(on="go")
    def other(ctx: SyncContext) -> None:
        ctx.step("call", shop.do, "other")

    async with shop.harness as harness:
        with pytest.raises(ValueError, match="there is no 'nothing'; there are other, work"):
            harness.fail_step("call", workflow="nothing")
        with pytest.raises(ValueError, match="times must be at least 1"):
            harness.fail_step("call", times=0)
        harness.fail_step("call", workflow="work", times=2, error=OSError("away"))
        harness.fail_step("call", workflow="other", error=NonRetryable("never"))
        accepted = await harness.publish("go", source="test", id="one")
        await harness.run_until_idle()
        explained = await harness.explain(await harness.only_run("other"))
        assert "NonRetryable: never" in explained.summary
        assert (await harness.explain("one")).summary == (await harness.explain(accepted)).summary
        await harness.advance("1h")
        assert (await harness.only_run("work")).steps["call"].attempts == 3
        error = (await harness.only_run("other")).error
        assert error is not None and error.startswith("step 'call' failed: NonRetryable: never")
    assert [what for what, _ in shop.done] == ["work"]
    async with Harness(shop.app) as again:  # nothing of it is left
        await again.publish("go", source="test")
        await again.advance("1h")
        assert {run.status for run in await again.runs()} == {"succeeded"}


async def test_settings_are_the_applications_and_the_harnesss() -> None:
    tries: list[int] = []

    def call() -> None:
        tries.append(1)
        raise OSError("no")

    app = Tidegate(database_url="postgresql://nobody@nowhere.invalid/x", step_retry=Retry(max_attempts=2, base="1s"))

    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("call", call)

    for overrides, expected in (({}, 2), ({"step_retry": Retry(max_attempts=3, base="1s")}, 3)):
        tries.clear()
        async with Harness(app, **overrides) as harness:
            await app.publish("go", source="test")  # into the harness, whatever the application names
            await harness.advance("1m")
            assert (len(tries), (await harness.only_run()).status) == (expected, "failed")
    assert app.settings.database_url == "postgresql://nobody@nowhere.invalid/x"


async def test_several_harnesses_at_once() -> None:
    def application(name: str) -> Tidegate:
        app = Tidegate()

        @app.workflow(on="go")
        async def work(ctx: Context) -> str:
            await ctx.sleep("1h")
            return name

        return app

    async with Harness(application("a")) as first, Harness(application("b")) as second:
        await first.publish("go", source="test")
        await second.publish("go", source="test")
        await asyncio.gather(first.advance("1h"), second.advance("30m"))
        assert (await first.only_run()).output == "a"
        assert (await second.only_run()).status == "pending"


async def test_from_a_thread_that_ends() -> None:
    """The server stays, whoever was the first to need it."""

    def in_thread() -> None:
        @with_harness(Tidegate())
        async def test(harness: Harness) -> None:
            assert await harness.runs() == []

        test()

    thread = threading.Thread(target=in_thread)
    thread.start()
    await asyncio.to_thread(thread.join)
    async with Harness(Tidegate()) as harness:
        assert await harness.runs() == []


async def test_what_goes_wrong_is_told(shop: Shop) -> None:
    @shop.app.workflow(on="go")
    async def stuck(ctx: Context) -> None:
        await asyncio.Event().wait()

    with pytest.raises(AppError, match="inside `async with Harness"):
        await shop.harness.runs()
    async with Harness(shop.app, patience="300ms") as harness:
        with pytest.raises(AppError, match="already in another harness"):
            async with Harness(shop.app):
                pass
        with pytest.raises(AssertionError, match="0 runs of stuck, not 1"):
            await harness.only_run("stuck")
        await harness.publish("go", source="test")
        with pytest.raises(TimeoutError, match=r"not idle after 0\.3 s; running: stuck "):
            await harness.run_until_idle()
        await harness.publish("other", source="test")


app = Tidegate()


@app.workflow(on="order.created")
async def fulfil(ctx: Context, id: int) -> dict[str, Any]:
    await ctx.sleep("2h")
    return {"order": id}


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with Harness(app) as made:
        yield made


async def test_by_a_fixture(harness: Harness) -> None:
    await harness.publish("order.created", source="shop", payload={"id": 7})
    await harness.advance("2h")
    assert (await harness.only_run("fulfil")).output == {"order": 7}


@pytest.mark.parametrize("number", [1, 2])
@with_harness(app)
async def test_plain(harness: Harness, number: int) -> None:
    await harness.publish("order.created", source="shop", payload={"id": number})
    await harness.advance("2h")
    assert (await harness.only_run("fulfil")).output == {"order": number}
