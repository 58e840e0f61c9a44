"""Approvals that the function no longer waits for: what it has seen stays, and what was decided stays decided."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.flow.test_approvals import use
from tidegate import Context, NonRetryable, SyncContext, Tidegate
from tidegate.errors import Conflict
from tidegate.testing import Harness


async def cut(waiting: asyncio.Task[Any]) -> str:
    """Cancel a task that waits; what it raised."""
    waiting.cancel()
    [found] = await asyncio.gather(waiting, return_exceptions=True)
    return type(found).__name__


async def raised(call: Any) -> str:
    """What a call raises, or returns."""
    try:
        return str(await call)
    except TimeoutError as exc:
        return str(exc)


async def test_the_loser_is_cut_off_and_the_run_resumes_later() -> None:
    app, links, seen = Tidegate(), dict[str, str](), list[str]()

    @app.workflow()
    async def race(ctx: Context) -> str:
        asked = {name: await ctx.approval(name, timeout="1d") for name in ("ann", "bob")}
        links.update({name: one.link for name, one in asked.items()})
        tasks = {name: asyncio.create_task(one.decision()) for name, one in asked.items()}
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        decision = tasks["ann"].result()
        await cut(tasks["bob"])
        seen.append(await raised(asked["bob"].decision()))
        await ctx.sleep("1h")
        seen.append(await raised(asked["bob"].decision()))
        return f"ann: {decision is not None and decision.approved}"

    async with Harness(app) as harness:
        await harness.start(race)
        await harness.run_until_idle()
        await harness.approve(await harness.only_run("race"), "ann")
        await harness.run_until_idle()
        assert seen == ["step 'bob' was cut off before"]
        await harness.advance("1h")
        run = await harness.only_run("race")
        assert (run.status, run.error, run.output) == ("succeeded", None, "ann: True")
        assert seen == ["step 'bob' was cut off before"] * 3
        assert (await use(harness, links["bob"])).status_code == 410


async def test_a_child_whose_result_was_cut_off() -> None:
    app, seen = Tidegate(), list[str]()

    @app.workflow()
    async def slow(ctx: Context) -> None:
        await ctx.sleep("1d")

    @app.workflow()
    async def parent(ctx: Context) -> str:
        handle = await ctx.start(slow)
        waiting = asyncio.create_task(handle.result())
        await ctx.step("other", asyncio.sleep, 0)
        await cut(waiting)
        seen.append(await raised(handle.result()))
        await ctx.sleep("1h")
        return "went on"

    async with Harness(app) as harness:
        await harness.start(parent)
        await harness.advance("1h")
        run = await harness.only_run("parent")
        assert (run.status, run.error, run.output) == ("succeeded", None, "went on")
        assert seen == ["step 'run-1' was cut off before"] * 2


async def test_the_call_itself_was_cut_off() -> None:
    """Then it is the call that raises when the run resumes, as it did the first time."""
    app, seen = Tidegate(), list[str]()

    @app.workflow()
    async def hasty(ctx: Context) -> str:
        await ctx.approval("before", timeout="1d")  # the key of the links is known from now on
        asking = asyncio.create_task(ctx.approval("one", timeout="1d"))
        await asyncio.sleep(0)  # it has begun, and waits for the commit
        seen.append(await cut(asking) if ctx.attempt == 1 else await raised(asking))
        await ctx.sleep("1h")
        return "went on"

    async with Harness(app) as harness:
        await harness.start(hasty)
        await harness.advance("1h")
        assert (await harness.only_run("hasty")).output == "went on"
        assert seen == ["CancelledError", "step 'one' was cut off before"]


@pytest.mark.parametrize("is_failing", [False, True])
async def test_a_decision_that_was_accepted_stays_when_it_is_cut_off(is_failing: bool) -> None:
    """Somebody decides while the function still waits for something else; then it goes on without the decision, or
    fails and is retried."""
    app, links, is_asked, decided = Tidegate(), list[str](), asyncio.Event(), asyncio.Event()
    seen: list[str] = []

    @app.workflow()
    async def work(ctx: Context) -> str:
        approval = await ctx.approval("one", timeout="1d", note="Order 7")
        waiting = asyncio.create_task(approval.decision())
        links.append(approval.link)
        is_asked.set()
        await ctx.step("other", decided.wait)
        if is_failing and not seen:
            seen.append(await cut(waiting))
            raise NonRetryable("no")
        if not is_failing:
            return await cut(waiting)
        decision = await waiting
        return f"{decision and decision.approved} {decision and decision.comment}"

    async with Harness(app) as harness:
        await harness.start(work)
        turning = asyncio.create_task(harness.run_until_idle())
        await is_asked.wait()
        assert (await use(harness, links[0], json={"approved": False, "comment": "too much"})).status_code == 200
        decided.set()
        await turning
        run = await harness.only_run("work")
        assert run.status == ("failed" if is_failing else "succeeded")
        shown = (await use(harness, links[0], "GET")).json()
        assert (shown["state"], shown["approved"], shown["note"]) == ("decided", False, "Order 7")
        assert (await use(harness, links[0])).status_code == 409
        with pytest.raises(Conflict, match="it is decided"):
            await harness.approve(run, "one")
        if is_failing:
            await harness.client.request("POST", f"/v1/runs/{run.id}/retry")
            await harness.run_until_idle()
            assert (await harness.only_run("work")).output == "False too much", "it was not asked for again"
            assert (await use(harness, links[0])).status_code == 409


async def test_operators_learn_that_an_approval_was_cut_off() -> None:
    app = Tidegate()

    @app.workflow()
    async def leave(ctx: Context) -> None:
        approval = await ctx.approval("one", timeout="1d")
        waiting = asyncio.create_task(approval.decision())
        await ctx.step("other", asyncio.sleep, 0)
        await cut(waiting)
        await ctx.sleep("1h")

    async with Harness(app) as harness:
        await harness.start(leave)
        await harness.run_until_idle()
        run = await harness.only_run("leave")
        assert run.steps["one"].status == "cancelled"
        with pytest.raises(Conflict, match="it is ended"):
            await harness.approve(run, "one")


async def test_a_step_cannot_wait_for_a_decision_or_a_child() -> None:
    """It would hold the worker meanwhile."""
    app = Tidegate()

    @app.workflow()
    async def slow(ctx: Context) -> None:
        await ctx.sleep("1d")

    @app.workflow()
    async def inside(ctx: Context) -> None:
        await ctx.step("outer", (await ctx.approval("one", timeout="1d")).decision)

    @app.workflow()
    def inside_sync(ctx: SyncContext) -> None:
        ctx.step("outer", ctx.approval("one", timeout="1d").decision)

    @app.workflow()
    async def inside_child(ctx: Context) -> None:
        await ctx.step("outer", (await ctx.start(slow, name="one")).result)

    async with Harness(app) as harness:
        for workflow in (inside, inside_sync, inside_child):
            await harness.start(workflow)
        await harness.run_until_idle()
        for workflow in (inside, inside_sync, inside_child):
            run = await harness.only_run(workflow.__name__)
            assert run.status == "failed", workflow
            assert "step 'one' is called inside step 'outer'" in (run.error or "")
