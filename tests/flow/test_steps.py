"""Durable steps on a real database with a moved clock: remembered results, retries, timers, cancellation, fences."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import AsyncMock

import msgspec
import pytest

from tests.conftest import Clock
from tests.flow.step_world import POLICY, World, the_run, the_steps
from tests.flow.test_dispatch import publish
from tidegate import Context, NonRetryable, RetryAfter, StepFailed, SyncContext
from tidegate.flow import control
from tidegate.flow.hold.delivery_retry import DeliveryRetry
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.look.explain import explain
from tidegate.model.retry import Retry
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import runs
from tidegate.store.db import Connection, Database


async def test_a_step_runs_once_and_its_result_is_remembered(
    connection: Connection, clock: Clock, world: World
) -> None:
    async def charge(amount: int) -> dict[str, Any]:
        world.done.append("charge")
        return {"receipt": amount}

    def ship(receipt: dict[str, Any]) -> list[Any]:
        world.done.append("ship")
        return [receipt, ("a", 1)]

    @world.app.workflow(on="go")
    async def fulfil(ctx: Context, amount: int) -> Any:
        receipt = await ctx.step("charge", charge, amount)
        await ctx.sleep("2h")
        return await ctx.step("ship", ship, receipt)

    runner = await world.runner()
    await publish(connection, "go", amount=7)
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["claimed_by"]) == ("pending", None)
    assert run["next_attempt_at"] is not None and (run["next_attempt_at"] - clock.now).total_seconds() > 7100
    await clock.advance(3_600_000)
    await world.turn(runner)
    assert world.done == ["charge"]
    await clock.advance(3_600_000)
    await world.turn(runner)
    assert world.done == ["charge", "ship"]
    run, steps = await the_run(connection), await the_steps(connection)
    assert (run["status"], run["output"]) == ("succeeded", [{"receipt": 7}, ["a", 1]])
    assert {name: row["status"] for name, row in steps.items()} == dict.fromkeys(
        ("charge", "sleep-1", "ship"), "succeeded"
    )


async def test_a_failed_step_is_tried_again_from_its_row_and_the_worker_is_free(
    connection: Connection, clock: Clock, world: World
) -> None:
    async def flaky() -> str:
        world.done.append("try")
        if len(world.done) < 3:
            raise ConnectionError("the service is away")
        return "ok"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return await ctx.step("call", flaky)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run, step = await the_run(connection), (await the_steps(connection))["call"]
    assert (run["status"], step["status"], step["retry_state"], step["retry_attempts"]) == (
        "pending", "pending", "scheduled", 1,
    )  # fmt: skip
    assert "step 'call' failed 1 times" in run["warning"] and "the service is away" in run["warning"]
    assert "Traceback" in step["error"]
    await clock.advance(500)
    await world.turn(runner)
    assert len(world.done) == 1  # not before its time
    await clock.advance(500)
    await world.turn(runner)
    await clock.advance(2000)
    await world.turn(runner)
    run, step = await the_run(connection), (await the_steps(connection))["call"]
    assert (run["status"], run["output"], run["warning"]) == ("succeeded", "ok", None)
    assert (step["status"], step["retry_attempts"]) == ("succeeded", 2)


async def test_a_step_that_is_given_up_fails_the_run_with_a_dead_letter(
    connection: Connection, clock: Clock, world: World
) -> None:
    async def broken() -> None:
        world.done.append("try")
        raise ValueError("never")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("call", broken)

    runner = await world.runner()
    await publish(connection, "go")
    for _ in range(5):
        await world.turn(runner)
        await clock.advance(10_000)
    run, step = await the_run(connection), (await the_steps(connection))["call"]
    assert len(world.done) == 3
    assert (run["status"], step["status"], step["retry_state"]) == ("failed", "failed", "exhausted")
    assert run["error"].startswith("step 'call' failed: ValueError: never")
    letter = await connection.fetchrow("select kind, subject_id from tidegate.dead_letters")
    assert letter is not None and tuple(letter) == ("step", step["id"])


async def test_nonretryable_and_caught_failures(connection: Connection, clock: Clock, world: World) -> None:
    async def refused() -> None:
        world.done.append("refused")
        raise NonRetryable("the card is stolen")

    async def refund() -> str:
        world.done.append("refund")
        return "refunded"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        try:
            await ctx.step("charge", refused)
        except StepFailed as exc:
            assert exc.error == "NonRetryable: the card is stolen"
            await ctx.sleep("1h")
            return await ctx.step("refund", refund)
        return "?"

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(3_600_000)
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["output"], world.done) == ("succeeded", "refunded", ["refused", "refund"])


async def test_retry_after_says_when(connection: Connection, clock: Clock, world: World) -> None:
    async def limited() -> str:
        world.done.append("try")
        if len(world.done) == 1:
            raise RetryAfter(120, "429")
        return "ok"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return await ctx.step("call", limited)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(119_000)
    await world.turn(runner)
    assert len(world.done) == 1
    await clock.advance(2000)
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "succeeded"


async def test_steps_side_by_side(connection: Connection, clock: Clock, world: World) -> None:
    """One fails and waits; the other's result is kept meanwhile, and its branch goes on."""

    async def one() -> int:
        world.done.append("one")
        await asyncio.sleep(0.05)
        return 1

    async def two() -> int:
        world.done.append("two")
        if world.done.count("two") == 1:
            raise OSError("again")
        return 2

    async def three() -> int:
        world.done.append("three")
        return 3

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> list[int]:
        async def branch() -> int:
            return await ctx.step("one", one) + await ctx.step("three", three)

        return list(await asyncio.gather(branch(), ctx.step("two", two)))

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert sorted(world.done) == ["one", "three", "two"]
    await clock.advance(1000)
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", [4, 2])
    assert sorted(world.done) == ["one", "three", "two", "two"]


async def test_a_plain_function_with_steps(connection: Connection, clock: Clock, world: World) -> None:
    def flaky(n: int) -> int:
        world.done.append("try")
        if len(world.done) == 1:
            raise OSError("again")
        return n * 2

    @world.app.workflow(on="go")
    def work(ctx: SyncContext, n: int) -> int:
        doubled = ctx.step("double", flaky, n)
        ctx.sleep("10s")
        return ctx.step("again", flaky, doubled)

    runner = await world.runner()
    await publish(connection, "go", n=5)
    for _ in range(4):
        await world.turn(runner)
        await clock.advance(10_000)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", 20)


async def test_timeouts_of_step_and_run(connection: Connection, clock: Clock, world: World) -> None:
    async def slow() -> None:
        await asyncio.sleep(60)

    @world.app.workflow(on="step")
    async def stepped(ctx: Context) -> None:
        await ctx.step("slow", slow, timeout="50ms", retry=Retry(max_attempts=1))

    @world.app.workflow(on="run", timeout="50ms")
    async def whole(ctx: Context) -> None:
        await ctx.step("slow", slow)

    runner = await world.runner()
    await publish(connection, "step")
    await publish(connection, "run")
    await world.turn(runner)
    rows = await connection.fetch("select status, error from tidegate.workflow_runs order by id")
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert "took longer than 50ms" in rows[0]["error"] and "timed out after 50 ms" in rows[1]["error"]


async def test_the_key_of_a_step_is_the_same_in_every_attempt(
    connection: Connection, clock: Clock, world: World
) -> None:
    contexts: list[Context] = []

    async def call() -> None:
        world.done.append(contexts[-1].idempotency_key)
        if len(world.done) == 1:
            raise OSError("again")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        contexts.append(ctx)
        assert ctx.idempotency_key == str(ctx.run_id)
        await ctx.step("call", call)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(1000)
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "succeeded"
    assert world.done == [f"{run['id']}:call"] * 2


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (lambda ctx: ctx.step("", print), "a step's name must be text"),
        (lambda ctx: ctx.step("x", object), "cannot be stored as JSON"),
        (lambda ctx: ctx.step("x", lambda: "\x00"), "U+0000"),
        (lambda ctx: ctx.step("x", lambda: "y" * 2_000_000), "at most 1048576 are kept"),
        (lambda ctx: ctx.sleep("soon"), "a duration is written like"),
    ],
)
async def test_what_cannot_be_done_fails_with_a_clear_error(
    connection: Connection, clock: Clock, world: World, wrong: Callable[[Context], Awaitable[Any]], reason: str
) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await wrong(ctx)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed" and reason in run["error"]


async def test_a_name_used_twice_is_refused(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("x", lambda: 1)
        await ctx.step("x", lambda: 2)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert "step 'x' is called twice" in (await the_run(connection))["error"]


async def test_cancel_a_waiting_run_at_once(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    @world.app.workflow(on="go", max_concurrency=1)
    async def work(ctx: Context) -> None:
        await ctx.sleep("1h")

    runner = await world.runner()
    await publish(connection, "go")
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert await control.cancel_run(database, run["id"], "ann", TRIGGER_BREAKER) == "cancelled"
    run, step = await the_run(connection), (await the_steps(connection))["sleep-1"]
    assert (run["status"], run["cancelled_by"], step["retry_state"]) == ("cancelled", "ann", "cancelled")
    due = await connection.fetchval(
        "select next_attempt_at <= tidegate.now() from tidegate.workflow_trigger_deliveries where status = 'throttled'"
    )
    assert due, "its slot is free for the next"


async def test_cancel_a_running_run_at_its_next_step(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def first() -> str:
        world.done.append("first")
        begun.set()
        await may_end.wait()
        return "done"

    async def second() -> None:
        world.done.append("second")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("first", first)
        await ctx.step("second", second)

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    await begun.wait()
    run = await the_run(connection)
    assert await control.cancel_run(database, run["id"], "ann", TRIGGER_BREAKER) == "cancelling"
    may_end.set()
    await asyncio.wait_for(runner.idle(), 30)
    run, steps = await the_run(connection), await the_steps(connection)
    assert (run["status"], run["cancelled_by"], world.done) == ("cancelled", "ann", ["first"])
    assert steps["first"]["result"] == "done"


async def test_a_zombies_step_changes_nothing(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    """The first worker freezes in a step; its lease ends; another does the step; then the first wakes up."""
    frozen = asyncio.Event()

    async def call() -> str:
        world.done.append("call")
        if len(world.done) == 1:
            await frozen.wait()
            return "zombie"
        return "heir"

    async def after() -> None:
        world.done.append("after")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        found = await ctx.step("call", call)
        await ctx.step("after", after)
        return found

    first, second = await world.runner(1000), await world.runner(1000)
    await publish(connection, "go")
    await world.dispatch.run_once()
    await first.run_once()
    await asyncio.sleep(0.05)
    await clock.advance(2000)
    await Reconcile(database, batch_size=10).run_once()
    await world.turn(second)
    frozen.set()
    await asyncio.wait_for(first.idle(), 30)
    run, steps = await the_run(connection), await the_steps(connection)
    assert (run["status"], run["output"], run["crashes"]) == ("succeeded", "heir", 0)
    assert steps["call"]["result"] == "heir"
    assert world.done == ["call", "call", "after"]


async def test_the_reason_is_the_first_line_of_what_was_raised(
    database: Database, connection: Connection, clock: Clock, world: World
) -> None:
    """As of httpx, whose last line is a link to a page about status codes; wherever a reason is told in one line."""

    async def call() -> None:
        raise OSError("404 Not Found for url 'https://shop.example'\nFor more information check: https://docs.example")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("call", call)

    @world.app.workflow(on="go", name="bare")
    async def bare(ctx: Context) -> None:
        await call()

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    reason = "OSError: 404 Not Found for url 'https://shop.example'"
    warning = await connection.fetchval("select warning from tidegate.workflow_runs where warning is not null")
    assert warning.endswith(reason)
    for _ in range(POLICY.max_attempts):
        await clock.advance(POLICY.max_ms)
        await world.turn(runner)
    letters = await connection.fetch("select kind, reason from tidegate.dead_letters order by kind")
    assert [tuple(row) for row in letters] == [("run", reason), ("step", f"step 'call' failed: {reason}")]
    event_id = await connection.fetchval("select id from tidegate.workflow_events")
    story = await explain(connection, str(event_id))
    assert {line.reason for line in story.decisions if line.stage == "run"} == {reason, f"step 'call' failed: {reason}"}


async def test_explain_says_why_and_until_when_a_run_waits(connection: Connection, clock: Clock, world: World) -> None:
    def away() -> None:
        raise ConnectionError("the bank is away")

    @world.app.workflow(on="go")
    async def naps(ctx: Context) -> None:
        await ctx.sleep("2h")

    @world.app.workflow(on="go")
    async def retries(ctx: Context) -> None:
        await ctx.step("pay", away)

    runner = await world.runner()
    await publish(connection, "go")
    event_id = str(await connection.fetchval("select id from tidegate.workflow_events"))
    await world.dispatch.run_once()
    fresh = [line for line in (await explain(connection, event_id)).decisions if line.stage == "run"]
    assert {line.waits_for for line in fresh} == {"a worker: none is running"}
    await world.turn(runner)
    story = await explain(connection, event_id)
    lines = {line.workflow: line for line in story.decisions if line.stage == "run"}
    due = dict(
        await connection.fetch(
            "select w.slug, r.next_attempt_at from tidegate.workflow_runs r "
            "join tidegate.workflow_definitions w on w.id = r.workflow_definition_id"
        )
    )
    assert {workflow: line.until for workflow, line in lines.items()} == due
    assert lines["naps"].waits_for == "the timer 'sleep-1'"
    assert lines["retries"].waits_for == "attempt 2 of 3 of step 'pay'"
    assert "it failed once: ConnectionError: the bank is away" in (lines["retries"].reason or "")
    assert f"naps sleeps until {due['naps']:%Y-%m-%d %H:%M:%S} UTC" in story.summary


async def test_unknown_run(database: Database) -> None:
    with pytest.raises(Exception, match="no run"):
        await control.cancel_run(database, uuid.uuid4(), "ann", TRIGGER_BREAKER)


@pytest.mark.parametrize("everyone", ["trigger", "key"])
async def test_retry_after_for_everyone(
    database: Database, connection: Connection, clock: Clock, world: World, everyone: Any
) -> None:
    """One run is told 429: its siblings, launched and not, leave the service alone until then."""

    async def call(customer: str) -> str:
        world.done.append(customer)
        if len(world.done) == 1:
            raise RetryAfter(60, "429 Too Many Requests", everyone=everyone)
        return "ok"

    @world.app.workflow(on="go", max_concurrency=5, concurrency_key="{{ event.payload.customer }}")
    async def work(ctx: Context, customer: str) -> str:
        return await ctx.step("call", call, customer)

    runner = await world.runner()
    await publish(connection, "go", customer="a")
    await world.turn(runner)
    for customer in ("a", "b"):
        await publish(connection, "go", customer=customer)
    await world.turn(runner)
    rows = await connection.fetch(
        "select status, reason, last_error from tidegate.workflow_trigger_deliveries where status <> 'launched'"
    )
    held = 2 if everyone == "trigger" else 1
    assert [tuple(row) for row in rows] == [("throttled", "retry_after", "RetryAfter: 429 Too Many Requests")] * held
    assert world.done == (["a"] if everyone == "trigger" else ["a", "b"])
    retry = DeliveryRetry(database, batch_size=10, after_launch=lambda: None)
    await clock.advance(61_000)
    await retry.run_once()
    await world.turn(runner)
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs where status = 'succeeded'") == 3


@pytest.mark.parametrize("everyone", ["trigger", "key"])
@pytest.mark.parametrize("how", ["step", "caught", "outside"])
async def test_retry_after_for_everyone_holds_although_the_run_gives_up(
    database: Database, connection: Connection, clock: Clock, world: World, everyone: Any, how: str
) -> None:
    """The last attempt asks everyone to wait: it has no other, and the others wait all the same."""

    async def call(customer: str) -> str:
        world.done.append(customer)
        raise RetryAfter(60, "429 Too Many Requests", everyone=everyone)

    @world.app.workflow(on="go", max_concurrency=5, concurrency_key="{{ event.payload.customer }}")
    async def work(ctx: Context, customer: str) -> str | None:
        if how == "outside":
            return await call(customer)
        try:
            return await ctx.step("call", call, customer, retry=Retry(max_attempts=1))
        except StepFailed:
            if how == "step":
                raise
            return None

    runner = await world.runner(policy=msgspec.structs.replace(POLICY, max_attempts=1))
    for customer in ("a", "a"):
        await publish(connection, "go", customer=customer)
        await world.turn(runner)
    assert (await the_run(connection))["status"] == ("succeeded" if how == "caught" else "failed")
    assert world.done == ["a"]
    rows = await connection.fetch(
        "select status, reason, last_error from tidegate.workflow_trigger_deliveries where status <> 'launched'"
    )
    assert [tuple(row) for row in rows] == [("throttled", "retry_after", "RetryAfter: 429 Too Many Requests")]
    await clock.advance(61_000)
    await DeliveryRetry(database, batch_size=10, after_launch=lambda: None).run_once()
    await world.turn(runner)
    assert world.done == ["a", "a"]


async def test_a_finally_has_its_turn_only_at_the_end(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        try:
            await ctx.sleep("2h")
            await ctx.step("use", world.done.append, "use")
        finally:
            await ctx.step("release", world.done.append, "release")

    @world.app.workflow(on="plain")
    def plain(ctx: SyncContext) -> None:
        try:
            ctx.sleep("2h")
        finally:
            ctx.step("release", world.done.append, "released")

    runner = await world.runner()
    await publish(connection, "go")
    await publish(connection, "plain")
    await world.turn(runner)
    assert world.done == []
    await clock.advance(7_200_000)
    await world.turn(runner)
    assert sorted(world.done) == ["release", "released", "use"]
    assert {row[0] for row in await connection.fetch("select status from tidegate.workflow_runs")} == {"succeeded"}


async def test_a_runs_time_is_over_while_it_sleeps(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(on="go", timeout="1h")
    async def work(ctx: Context) -> None:
        await ctx.sleep("2h")

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(3_600_000)
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["error"]) == ("failed", "timed out after 3600000 ms")


@pytest.mark.parametrize("wrong", [StopIteration("x"), SystemExit(3), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_would_end_a_process_is_a_failure_of_the_step(
    connection: Connection, clock: Clock, world: World, wrong: BaseException, is_async: bool
) -> None:
    def plain() -> None:
        raise wrong

    async def coroutine() -> None:
        raise wrong

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("call", coroutine if is_async else plain, retry=Retry(max_attempts=1))

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "failed"


async def test_retry_after_outside_a_step(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        world.done.append("try")
        if len(world.done) == 1:
            raise RetryAfter(120)
        return "ok"

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(119_000)
    await world.turn(runner)
    assert len(world.done) == 1
    await clock.advance(1000)
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "succeeded"


async def test_a_lambda_has_the_key_of_its_step(connection: Connection, clock: Clock, world: World) -> None:
    async def call(ctx: Context) -> None:
        world.done.append(ctx.idempotency_key)

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("a", lambda: call(ctx))
        await ctx.step("b", lambda: call(ctx))

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert world.done == [f"{run['id']}:a", f"{run['id']}:b"]


async def test_a_run_that_is_woken_while_a_step_executes_resumes_at_once_when_all_its_steps_wait(
    connection: Connection, clock: Clock, world: World
) -> None:
    """The shared primitive of waits and children, seen from the function: it is called again without a lost time."""

    async def woken_meanwhile(run_id: Any) -> None:
        async with world.database.transaction() as other:
            await runs.lock(other, [run_id])
            await runs.wake(other, [run_id])

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        world.done.append(f"attempt {ctx.attempt}")
        await ctx.step("slow", woken_meanwhile, ctx.run_id)
        await ctx.sleep("1h")
        world.done.append("slept")

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert world.done == ["attempt 1", "attempt 2"]  # once more for the wake-up, and no oftener
    assert (run["status"], run["wakes"], (run["next_attempt_at"] - clock.now).total_seconds()) == ("pending", 1, 3600)
    await clock.advance(3_600_000)
    await world.turn(runner)
    assert world.done == ["attempt 1", "attempt 2", "attempt 3", "slept"]


async def test_a_call_without_await_fails_the_run_and_names_the_step(connection: Connection, world: World) -> None:
    """Python would only warn, and the run would succeed without the step."""
    is_corrected = False

    @world.app.workflow(on="go")
    async def hasty(ctx: Context) -> str:
        await ctx.step("reserve", world.done.append, "reserved")
        forgotten = ctx.step("charge", world.done.append, "charged")
        if is_corrected:
            await forgotten
        else:
            ctx.sleep("1h")  # type: ignore[unused-coroutine]
        return "done"

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], world.done) == ("failed", ["reserved"])
    assert "ctx.step('charge', …) was called but not awaited, nor 1 other call" in run["error"]
    is_corrected = True
    await control.retry_run(world.database, run["id"], actor="test")
    await world.turn(runner)
    assert ((await the_run(connection))["status"], world.done) == ("succeeded", ["reserved", "charged"])


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (lambda ctx: ctx.wait_for("paid", timeout="1h"), "ctx.wait_for('paid', …)"),
        (lambda ctx: ctx.publish("paid", {}), "ctx.publish('paid', …)"),
        (lambda ctx: ctx.start("child"), "ctx.start('child', …)"),
        (lambda ctx: ctx.approval("boss", timeout="1h"), "ctx.approval('boss', …)"),
        (lambda ctx: ctx.transaction(publish), "ctx.transaction(publish, …)"),
    ],
)
async def test_every_call_without_await_is_noticed(
    connection: Connection, world: World, call: Callable[[Context], Awaitable[Any]], written: str
) -> None:
    @world.app.workflow(on="go")
    async def hasty(ctx: Context) -> None:
        call(ctx)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed" and f"{written} was called but not awaited, so" in run["error"]


async def test_a_decision_and_a_childs_result_without_await_are_noticed(connection: Connection, world: World) -> None:
    @world.app.workflow()
    async def child(ctx: Context) -> None: ...

    @world.app.workflow(on="go")
    async def hasty(ctx: Context, asks: bool) -> str:
        if asks:
            asked = await ctx.approval("boss", timeout="1h")
            asked.decision()  # type: ignore[unused-coroutine]
        else:
            started = await ctx.start(child)
            started.result()  # type: ignore[unused-coroutine]
        return "paid"

    runner = await world.runner()
    for asks in (True, False):
        await publish(connection, "go", asks=asks)
    await world.turn(runner)
    rows = await connection.fetch("select error from tidegate.workflow_runs where status = 'failed' order by id")
    told = [row["error"].partition(" was called but not awaited")[0] for row in rows]
    assert [text.rpartition(": ")[2].partition("(")[0] for text in told] == ["approval.decision", "child.result"]


def test_the_calls_of_a_context_are_async_to_whoever_asks() -> None:
    mock = AsyncMock(spec=Context)
    assert isinstance(mock.step, AsyncMock) and isinstance(mock.run, AsyncMock)
    assert not isinstance(mock.patched, AsyncMock)


async def test_calls_that_are_awaited_later_or_given_up_are_not_forgotten(connection: Connection, world: World) -> None:
    async def slow() -> None:
        await asyncio.sleep(60)

    @world.app.workflow(on="go")
    async def careful(ctx: Context) -> int:
        calls = [ctx.step(f"s{n}", world.done.append, str(n)) for n in range(600)]
        await asyncio.gather(*calls)
        given_up = asyncio.create_task(ctx.step("slow", slow))
        await asyncio.sleep(0)
        given_up.cancel()
        ctx.step("closed", slow).close()
        return len(world.done)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", 600)
