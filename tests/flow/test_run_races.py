"""Races and hostile users: what durable runs promise, held against the code."""

from __future__ import annotations

import asyncio
import concurrent.futures
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.step_world import World, the_run, the_steps
from tests.flow.test_dispatch import publish
from tidegate import Context, NonRetryable, RetryAfter, StepFailed, SyncContext
from tidegate.errors import Conflict, Unavailable
from tidegate.flow import control
from tidegate.flow.call import stopping
from tidegate.flow.hold.delivery_retry import DeliveryRetry
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.keep.schedule import Scheduler
from tidegate.model.retry import Retry
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store import runs as store_runs
from tidegate.store import workers
from tidegate.store.db import Connection, Database


async def statuses(connection: Connection) -> dict[str, tuple[str, str | None, int]]:
    rows = await connection.fetch(
        "select w.slug, r.status, r.error, r.crashes from tidegate.workflow_runs r "
        "join tidegate.workflow_definitions w on w.id = r.workflow_definition_id"
    )
    return {row[0]: (row[1], row[2], row[3]) for row in rows}


# --- one write that the database refuses takes the writes of other runs with it -----------------------------------


def _nul_outside() -> Any:
    raise NonRetryable("bad \x00 byte")


def _surrogate_outside() -> Any:
    raise ValueError("no such file: caf\udce9.txt")


POISONS: dict[str, Any] = {
    "nul in NonRetryable outside a step": lambda ctx: _nul_outside(),
    "lone surrogate in an error outside a step": lambda ctx: _surrogate_outside(),
    "lone surrogate in a step's error": lambda ctx: ctx.step("x", _surrogate_outside, retry=Retry(max_attempts=1)),
    "lone surrogate in a step's name": lambda ctx: ctx.step("caf\udce9", lambda: 1),
    "nul in a step's name": lambda ctx: ctx.step("a\x00b", lambda: 1),
}


@pytest.mark.parametrize("poison", POISONS)
async def test_a_poisonous_run_fails_itself_and_at_once(
    connection: Connection,
    clock: Clock,
    world: World,
    poison: str,
) -> None:
    @world.app.workflow(on="bad")
    async def bad(ctx: Context) -> None:
        found = POISONS[poison](ctx)
        if found is not None:
            await found

    runner = await world.runner()
    await publish(connection, "bad")
    await world.turn(runner)
    assert (await statuses(connection))["bad"][0] == "failed"


async def test_a_poisonous_run_does_not_fail_its_neighbours(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    """Both hand in their writes while another is under way, so they share a transaction."""
    ready = asyncio.Event()

    async def good_step() -> str:
        await ready.wait()
        return "paid"

    @world.app.workflow(on="go")
    async def good(ctx: Context) -> str:
        paid = await ctx.step("pay", good_step)
        await ctx.step("after", lambda: 1)
        return paid

    @world.app.workflow(on="go")
    async def bad(ctx: Context) -> str:
        await ready.wait()
        raise NonRetryable("bad \x00 byte")

    first = asyncio.Event()

    @world.app.workflow(on="go")
    async def other(ctx: Context) -> None:
        await first.wait()

    runner = await world.runner()
    real, groups = runner._outcomes._write_all, []

    async def slow(items: list[Any]) -> Any:
        groups.append(items)
        await asyncio.sleep(0.05)  # a commit takes its time; meanwhile the next group gathers
        return await real(items)

    runner._outcomes._group._write = slow  # type: ignore[assignment]
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    await asyncio.sleep(0.05)
    first.set()
    await asyncio.sleep(0.01)
    ready.set()
    await asyncio.wait_for(runner.idle(), 30)
    found = await statuses(connection)
    assert found["good"][0] == "succeeded", found["good"]


# --- the same run claimed again by the same worker ----------------------------------------------------------------


async def test_a_run_taken_over_by_the_same_worker_stays_held_when_its_ghost_ends(
    database: Database,
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    """A database outage longer than a lease, one worker: it releases its own run and claims it again."""
    gates = [asyncio.Event(), asyncio.Event()]

    async def call() -> str:
        world.done.append("call")
        n = len(world.done) - 1
        await gates[n].wait()
        return f"call {n}"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return await ctx.step("call", call)

    runner = await world.runner(1000)
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    await asyncio.sleep(0.05)
    await clock.advance(2000)
    await Reconcile(database, batch_size=10).run_once()
    assert await runner.run_once() == 1
    await asyncio.sleep(0.05)
    gates[0].set()  # the ghost ends
    await asyncio.sleep(0.2)
    run = await the_run(connection)
    assert run["status"] == "running"
    try:
        assert run["id"] in {execution.run.id for execution in runner._slots.held()}, (
            "the heir is held: its lease is renewed, SIGTERM hands it back"
        )
    finally:
        gates[1].set()
        await asyncio.sleep(0.1)


# --- a zombie's RetryAfter(everyone=…) ----------------------------------------------------------------------------


async def test_a_zombies_retry_after_blocks_nothing(
    database: Database,
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    frozen = asyncio.Event()

    async def call() -> str:
        world.done.append("call")
        if len(world.done) == 1:
            await frozen.wait()
            raise RetryAfter(3600, "429 of long ago", everyone="trigger")
        return "heir"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return await ctx.step("call", call)

    first, second = await world.runner(1000), await world.runner(1000)
    await publish(connection, "go")
    await world.dispatch.run_once()
    await first.run_once()
    await asyncio.sleep(0.05)
    await clock.advance(2000)
    await Reconcile(database, batch_size=10).run_once()
    await world.turn(second)
    assert (await the_run(connection))["output"] == "heir"
    frozen.set()
    await asyncio.wait_for(first.idle(), 30)
    closed = await connection.fetchval("select closed_until from tidegate.event_scheduler_triggers")
    assert closed is None


# --- the lease keeper gives up for good when its first beat fails -------------------------------------------------


async def test_leases_are_kept_although_the_first_beat_failed(
    connection: Connection,
    clock: Clock,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beats, real = 0, workers.heartbeat

    async def beat(*args: Any) -> None:
        nonlocal beats
        beats += 1
        if beats == 1:
            raise Unavailable("the database is restarting")
        await real(*args)

    monkeypatch.setattr(workers, "heartbeat", beat)
    end = asyncio.Event()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await end.wait()

    runner = await world.runner(600)
    runner.keep_leases()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    try:
        await clock.advance(1200)
        await eventually(world.database, "select claim_expires_at > tidegate.now() from tidegate.workflow_runs")
        assert beats >= 1  # and the first of them failed
    finally:
        end.set()
        await runner.idle()


# --- a slow commit puts the run to rest although a branch is about to go on ---------------------------------------


async def test_a_branch_whose_commit_is_slow_is_not_held_up_by_one_that_waits(
    database: Database,
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    async def first() -> None:
        world.done.append("first")

    async def second() -> None:
        world.done.append("second")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        async def branch() -> None:
            await asyncio.sleep(0)
            await ctx.step("first", first)
            await ctx.step("second", second)

        await asyncio.gather(ctx.sleep("1h", name="hour"), branch())

    runner = await world.runner()
    real = runner._outcomes._write_all

    async def slow(items: list[Any]) -> Any:
        if any(write.name == "first" for item in items for write in item.steps):
            await asyncio.sleep(0.1)  # a disk that takes 100 ms for a commit
        return await real(items)

    runner._outcomes._group._write = slow  # type: ignore[assignment]
    await publish(connection, "go")
    await world.turn(runner)
    assert world.done == ["first", "second"], "the second need not wait an hour"


# --- timers change hands between branches -------------------------------------------------------------------------


async def test_a_branchs_timer_is_its_own(connection: Connection, clock: Clock, world: World) -> None:
    """Which sleeps first depends on how long the steps take; when the run goes on, on the order of the code."""

    async def slow() -> None:
        await asyncio.sleep(0.05)

    async def quick() -> None: ...

    async def note(what: str) -> None:
        world.done.append(what)

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        async def long_branch() -> None:
            await ctx.step("slow", slow)
            await ctx.sleep("1d", name="day")
            await ctx.step("a day later", note, "a day later")

        async def short_branch() -> None:
            await ctx.step("quick", quick)
            await ctx.sleep("10s", name="ten")
            await ctx.step("ten seconds later", note, "ten seconds later")

        await asyncio.gather(long_branch(), short_branch())

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(11_000)
    await world.turn(runner)
    assert world.done == ["ten seconds later"]


# --- a plain function with a bare except ends as succeeded while its step waits -----------------------------------


async def test_a_bare_except_does_not_end_a_run_that_waits(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    def flaky() -> str:
        world.done.append("try")
        if len(world.done) == 1:
            raise OSError("again")
        return "charged"

    @world.app.workflow(on="go")
    def work(ctx: SyncContext) -> str:
        try:
            return ctx.step("charge", flaky)
        except:  # noqa: E722
            return "fallback"

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "pending"
    await clock.advance(10_000)
    await world.turn(runner)
    assert (await the_run(connection))["output"] == "charged"


# --- user code that catches everything holds the run for ever -----------------------------------------------------


async def test_a_retry_loop_around_a_step_lets_the_run_rest(
    connection: Connection,
    clock: Clock,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "STOP_SECONDS", 0.2)

    async def broken() -> None:
        raise OSError("again")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        while True:
            try:
                await ctx.step("call", broken)
                return
            except BaseException:
                await asyncio.sleep(0.05)

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    for _ in range(40):
        await asyncio.sleep(0.05)
        if not len(runner._slots):
            break
    status = (await the_run(connection))["status"]
    for _ in range(20):  # so that the test itself ends
        for hung in asyncio.all_tasks() - {asyncio.current_task()}:  # type: ignore[arg-type]
            if "_execute" in repr(hung.get_coro()):
                hung.cancel()
        await asyncio.sleep(0.01)
    assert status == "pending"


# --- exceptions that are no Exception leave the run behind --------------------------------------------------------


async def _cancel_itself() -> None:
    task = asyncio.create_task(asyncio.sleep(10))
    task.cancel()
    await task


class Strange(BaseException):
    """As gevent's Timeout or trio's Cancelled."""


def _strange() -> None:
    raise Strange


def _cancelled_future() -> None:
    raise concurrent.futures.CancelledError


@pytest.mark.parametrize("place", ["step", "workflow", "group"])
@pytest.mark.parametrize("kind", ["cancelled", "strange", "future"])
async def test_whatever_a_function_raises_ends_its_run(
    connection: Connection,
    clock: Clock,
    world: World,
    place: str,
    kind: str,
) -> None:
    function = {"cancelled": _cancel_itself, "strange": _strange, "future": _cancelled_future}[kind]

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        if place == "step":
            await ctx.step("call", function, retry=Retry(max_attempts=1))
        elif place == "group":
            async with asyncio.TaskGroup() as group:
                group.create_task(ctx.step("call", function, retry=Retry(max_attempts=1)))
        else:
            found = function()
            if found is not None:
                await found

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "failed"


# --- cancelling a run whose steps run in a TaskGroup, or are gathered with their exceptions ----------------------


@pytest.mark.parametrize("how", ["TaskGroup", "return_exceptions", "bare except"])
async def test_a_cancelled_run_is_cancelled(
    database: Database,
    connection: Connection,
    clock: Clock,
    world: World,
    how: str,
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        begun.set()
        await may_end.wait()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        async def branch() -> None:
            await ctx.step("first", first)
            await ctx.step("second", lambda: 2)

        if how == "TaskGroup":
            async with asyncio.TaskGroup() as group:
                group.create_task(branch())
            return None
        if how == "return_exceptions":
            return await asyncio.gather(branch(), return_exceptions=True)
        try:
            await branch()
        except BaseException:
            return "never mind"

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    await begun.wait()
    run = await the_run(connection)
    await control.cancel_run(database, run["id"], "ann", TRIGGER_BREAKER)
    may_end.set()
    await asyncio.wait_for(runner.idle(), 30)
    assert (await the_run(connection))["status"] == "cancelled"
    assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 0


# --- cancel meets the moment in which the run is put to rest -----------------------------------------------------


async def test_cancel_while_the_run_is_put_to_rest(
    database: Database,
    connection: Connection,
    clock: Clock,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        begun.set()
        await may_end.wait()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("first", first)
        await ctx.sleep("1h")

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    await begun.wait()
    real, seen = store_runs.cancel_waiting, []

    async def cancel_waiting(*args: Any) -> Any:
        found = await real(*args)
        if not seen:
            seen.append(found)
            assert found is None  # it is running …
            may_end.set()
            await asyncio.wait_for(runner.idle(), 30)  # … and now it rests
        return found

    monkeypatch.setattr(store_runs, "cancel_waiting", cancel_waiting)
    run = await the_run(connection)
    # the trigger's lock is not needed by a run that rests, so nothing keeps it from moving meanwhile
    try:
        await control.cancel_run(database, run["id"], "ann", TRIGGER_BREAKER)
    except Conflict as exc:
        pytest.fail(f"cancel was refused: {exc}")
    assert (await the_run(connection))["status"] == "cancelled"


# --- commits whose answer was lost -------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["StepWrite", "SuspendedRun", "FinishedRun"])
async def test_a_commit_whose_answer_was_lost(
    connection: Connection,
    clock: Clock,
    world: World,
    which: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        await ctx.step("first", world.done.append, "first")
        await ctx.step("second", world.done.append, "second")
        if which == "SuspendedRun":
            await ctx.sleep("1h")
        return "done"

    runner = await world.runner()
    told: list[str] = []
    monkeypatch.setattr("tidegate.flow.run.worker_slots.report_ended", lambda _, __, run, ___: told.append(run.status))
    real, lost = runner._database.run, []

    async def run(work: Any, attempts: int = 5) -> Any:
        found = await real(work, attempts)
        items = getattr(work, "keywords", {}).get("items", [])
        if not lost and any(type(item.end or item.steps[0]).__name__ == which for item in items):
            lost.append(which)
            raise Unavailable("the connection broke after the commit")
        return found

    monkeypatch.setattr(runner._database, "run", run)
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    await asyncio.wait_for(runner.idle(), 30)
    run_row = await the_run(connection)
    assert lost == [which]
    assert world.done == ["first", "second"]
    assert run_row["status"] == ("pending" if which == "SuspendedRun" else "succeeded")
    if which != "SuspendedRun":
        assert told == ["succeeded"]


# --- timed out, with a step that waits ---------------------------------------------------------------------------


async def test_a_run_that_timed_out_leaves_no_waiting_step(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    async def broken() -> None:
        raise OSError("again")

    async def slow() -> None:
        await asyncio.sleep(60)

    @world.app.workflow(on="go", timeout="300ms")
    async def work(ctx: Context) -> None:
        await asyncio.gather(ctx.step("broken", broken), ctx.step("slow", slow))

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert "timed out" in (await the_run(connection))["error"]
    assert (await the_steps(connection))["broken"]["retry_state"] == "cancelled"


# --- RetryAfter outside of steps ---------------------------------------------------------------------------------


async def test_sleeps_do_not_use_up_attempts(connection: Connection, clock: Clock, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        for _ in range(3):
            await ctx.sleep("1h")
        world.done.append("try")
        if len(world.done) == 1:
            raise RetryAfter(10)
        return "ok"

    runner = await world.runner()
    await publish(connection, "go")
    for _ in range(6):
        await world.turn(runner)
        await clock.advance(3_600_000)
    run = await the_run(connection)
    assert (run["status"], run["error"]) == ("succeeded", None)


async def test_the_runs_time_is_over_while_it_waits_after_retry_after(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    @world.app.workflow(on="go", timeout="1h")
    async def work(ctx: Context) -> str:
        raise RetryAfter(7200)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(3_600_000)
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "failed"


@pytest.mark.parametrize("seconds", [float("nan"), "120"])
@pytest.mark.parametrize("place", ["step", "workflow"])
async def test_retry_after_with_a_strange_number(
    connection: Connection,
    clock: Clock,
    world: World,
    seconds: Any,
    place: str,
) -> None:
    """As in RetryAfter(response.headers["retry-after"])."""

    async def call() -> str:
        world.done.append("try")
        if len(world.done) == 1:
            raise RetryAfter(seconds)
        return "ok"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return await (ctx.step("call", call) if place == "step" else call())

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    # Whatever is no number waits a second, which may be over on a slow machine.
    assert run["status"] in ("pending", "failed", "succeeded"), "not left behind"
    await clock.advance(366 * 86_400_000)
    if place == "step":
        assert (await the_steps(connection)).get("call") is not None, "the attempt is recorded"


async def test_retry_after_beside_a_running_step(connection: Connection, clock: Clock, world: World) -> None:
    async def effect() -> str:
        world.done.append("effect")
        await asyncio.sleep(0.2)
        return "done"

    asked: list[int] = []

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        async def other() -> None:
            asked.append(1)
            await asyncio.sleep(0.05)
            if len(asked) == 1:
                raise RetryAfter(10)

        return (await asyncio.gather(ctx.step("effect", effect), other()))[0]

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await asyncio.sleep(0.4)
    await clock.advance(10_000)
    await world.turn(runner)
    assert (await the_run(connection))["status"] == "succeeded"
    assert world.done == ["effect"], "nobody crashed, so it is done once"


# --- an empty reason ---------------------------------------------------------------------------------------------


class Hostile(NonRetryable):
    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("exc", [NonRetryable(), NonRetryable(""), Hostile()], ids=["bare", "empty", "hostile"])
@pytest.mark.parametrize("place", ["step", "workflow"])
async def test_a_refusal_without_a_reason(
    connection: Connection,
    clock: Clock,
    world: World,
    exc: Exception,
    place: str,
) -> None:
    async def refused() -> None:
        raise exc

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        if place == "workflow":
            await refused()
        try:
            await ctx.step("call", refused)
        except StepFailed:
            return "caught"
        return "?"

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == ("succeeded" if place == "step" else "failed"), run["error"]


# --- a step, or a sleep, inside a step ---------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["sleep", "step"])
async def test_waiting_inside_a_step_does_not_hold_the_worker_for_ever(
    connection: Connection,
    clock: Clock,
    world: World,
    inner: str,
) -> None:
    async def broken() -> None:
        raise OSError("again")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        async def outer() -> None:
            await (ctx.sleep("1h") if inner == "sleep" else ctx.step("inner", broken))

        await ctx.step("outer", outer)

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    await asyncio.sleep(1)
    assert (await the_run(connection))["status"] != "running"


# --- a lease keeper's late news is about an earlier claim --------------------------------------------------------


async def test_news_of_an_earlier_claim_does_not_stop_the_present_one(
    database: Database,
    connection: Connection,
    clock: Clock,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = asyncio.Event()

    async def call() -> str:
        world.done.append("call")
        if len(world.done) == 1:
            await asyncio.sleep(0.2)
            raise RetryAfter(60)
        await gate.wait()
        return "ok"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return await ctx.step("call", call)

    runner = await world.runner()
    await publish(connection, "go")
    await world.dispatch.run_once()
    await runner.run_once()
    real = store_runs.renew
    asked = asyncio.Event()

    async def renew(conn: Connection, held: Any, lease_ms: int) -> Any:
        await asyncio.wait_for(runner.idle(), 10)  # the run rests …
        found = await real(conn, held, lease_ms)  # … so this claim is no more …
        await clock.advance(60_000)
        await runner.run_once()  # … and the run goes on here before the answer is heard
        asked.set()
        return found

    monkeypatch.setattr(store_runs, "renew", renew)
    await runner._leases._renew(database, asyncio.get_running_loop())
    await asyncio.sleep(0.1)
    gate.set()
    await asyncio.wait_for(runner.idle(), 10)
    assert (await the_run(connection))["status"] == "succeeded"


# --- a timer beside a long step ----------------------------------------------------------------------------------


async def test_a_timer_is_kept_beside_a_long_step(connection: Connection, clock: Clock, world: World) -> None:
    noted = asyncio.Event()

    async def long() -> None:
        await noted.wait()
        world.done.append("long")

    async def note() -> None:
        world.done.append("note")
        noted.set()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        async def branch() -> None:
            await ctx.sleep("200ms", name="moment")
            await ctx.step("note", note)

        await asyncio.gather(ctx.step("long", long), branch())

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert world.done == ["note", "long"]  # a timer that waited for the long step would wait for ever


# --- a result is not the same when it is remembered --------------------------------------------------------------


async def test_a_remembered_result_is_in_the_same_order(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    """The documentation says to number the steps of a loop."""

    async def orders() -> dict[str, int]:
        return {"zeta": 1, "a": 2}

    async def charge(customer: str) -> None:
        world.done.append(customer)

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        for i, customer in enumerate(await ctx.step("orders", orders)):
            await ctx.step(f"charge-{i}", charge, customer)
            await ctx.sleep("1h")

    runner = await world.runner()
    await publish(connection, "go")
    for _ in range(4):
        await world.turn(runner)
        await clock.advance(3_600_000)
    assert (await the_run(connection))["status"] == "succeeded"
    assert sorted(world.done) == ["a", "zeta"]


async def test_a_remembered_number_is_the_same(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    seen: list[str] = []

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        seen.append(repr(await ctx.step("x", lambda: [1e20, 1e308, 0.1, -0.0, 2.0])))
        await ctx.sleep("1h")

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(3_600_000)
    await world.turn(runner)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("value", [float("nan"), {"a": [float("inf")]}], ids=repr)
async def test_what_json_cannot_say_fails_the_step(
    connection: Connection,
    clock: Clock,
    world: World,
    value: Any,
) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.step("x", lambda: value)

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed" and "cannot be stored as JSON" in run["error"]


# --- RetryAfter for everyone, and a sibling that is running at that moment ---------------------------------------


async def test_a_sibling_that_comes_to_rest_later_is_held_too(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    closed = asyncio.Event()

    async def call(who: str) -> str:
        world.done.append(who)
        if world.done.count(who) > 1:
            return "ok"
        if who == "a":
            raise RetryAfter(600, "429", everyone="trigger")
        await closed.wait()
        raise OSError("again")  # by its own policy: in a second

    @world.app.workflow(on="go")
    async def work(ctx: Context, who: str) -> str:
        return await ctx.step("call", call, who)

    runner = await world.runner()
    for who in ("b", "a"):
        await publish(connection, "go", who=who)
    await world.dispatch.run_once()
    await runner.run_once()
    await eventually(world.database, "select count(closed_until) = 1 from tidegate.event_scheduler_triggers")
    closed.set()
    await asyncio.wait_for(runner.idle(), 30)
    await clock.advance(5000)
    await world.turn(runner)
    assert sorted(world.done) == ["a", "b"], "b leaves the service alone until then"


async def test_the_time_of_a_run_is_over_while_it_is_held(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    async def call(who: str) -> None:
        if who == "a":
            raise RetryAfter(86_400, "429", everyone="trigger")

    @world.app.workflow(on="go", timeout="1h")
    async def work(ctx: Context, who: str) -> None:
        if who == "b":
            await ctx.sleep("50m")
        await ctx.step("call", call, who)

    runner = await world.runner()
    await publish(connection, "go", who="b")
    await world.turn(runner)
    await publish(connection, "go", who="a")
    await world.turn(runner)
    await clock.advance(3_700_000)
    await world.turn(runner)
    rows = await connection.fetch("select status from tidegate.workflow_runs order by id")
    assert [row[0] for row in rows] == ["failed", "failed"], "both timed out, though neither had its turn"


# --- a step that the workflow itself cancelled -------------------------------------------------------------------


async def test_a_step_cut_off_by_wait_for_is_not_begun_again(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    async def slow() -> str:
        world.done.append("slow")
        await asyncio.sleep(0.2 if len(world.done) == 1 else 0)
        return "ok"

    paths: list[str] = []

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        try:
            await asyncio.wait_for(ctx.step("slow", slow), 0.05)
            paths.append("in time")
        except TimeoutError:
            paths.append("too late")
        await ctx.sleep("1h")
        return paths[-1]

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    await clock.advance(3_600_000)
    await world.turn(runner)
    assert world.done == ["slow"], "nobody crashed"
    assert len(set(paths)) == 1, "the function takes the same path when it goes on"


# --- what is claimed while the worker stops ----------------------------------------------------------------------


async def test_what_fills_a_slot_while_the_worker_stops_is_handed_back(
    database: Database,
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    async def nap() -> None: ...

    @world.app.workflow(on="go", max_concurrency=1)
    async def work(ctx: Context) -> None:
        world.done.append("begun")
        if len(world.done) > 1:
            await asyncio.sleep(30)

    retry = DeliveryRetry(database, batch_size=10, after_launch=lambda: None)
    runner = await world.runner()
    runner._outcomes._fill = retry.fill
    await publish(connection, "go")
    await publish(connection, "go")
    await world.dispatch.run_once()
    real = runner._database.run
    stopping: list[asyncio.Task[None]] = []

    async def run(work: Any, attempts: int = 5) -> Any:
        if not stopping and getattr(work, "keywords", {}).get("items"):
            runner.stop_claiming()  # SIGTERM while this commit is under way, and it takes longer than the patience
            stopping.append(asyncio.create_task(runner.stop(0.05)))
            await asyncio.sleep(0.3)
        return await real(work, attempts)

    runner._database.run = run  # type: ignore[method-assign]
    await runner.run_once()
    while not stopping:  # noqa: ASYNC110 - until the commit is under way
        await asyncio.sleep(0.01)
    await asyncio.wait_for(stopping[0], 30)
    rows = await connection.fetch("select status, crashes from tidegate.workflow_runs order by id")
    assert [row[0] for row in rows] == ["succeeded", "pending"], "the second is handed back, not left to its lease"


# --- a clock that was wrong for a moment silences a schedule -----------------------------------------------------


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_schedule_goes_on_after_the_clock_was_wrong_for_a_moment(
    database: Database,
    connection: Connection,
    clock: Clock,
    world: World,
    is_restarted: bool,
) -> None:
    @world.app.workflow(every="1h")
    async def hourly(ctx: Context, scheduled_at: str) -> None: ...

    definitions = await database.run(world.app.register)
    schedule = Scheduler(database, definitions, batch_size=10)
    year = 365 * 86_400_000
    await clock.advance(year)
    assert (await schedule.run_once()).published == 1
    await clock.advance(-year)  # the clock is set right
    if is_restarted:
        await database.run(world.app.register)
    published = 0
    for _ in range(5):
        await clock.advance(3_600_000)
        published += (await schedule.run_once()).published
    assert published >= 4


# --- a timer of a plain step name --------------------------------------------------------------------------------


async def test_threads_in_a_plain_function(connection: Connection, clock: Clock, world: World) -> None:
    """One of three threads waits; the others' results are kept, and nothing is done twice."""

    def call(n: int) -> int:
        world.done.append(str(n))
        if n == 1 and world.done.count("1") == 1:
            raise OSError("again")
        return n

    @world.app.workflow(on="go")
    def work(ctx: SyncContext) -> list[int]:
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda n: ctx.step(f"call-{n}", call, n), range(3)))

    runner = await world.runner()
    await publish(connection, "go")
    for _ in range(4):
        await world.turn(runner)
        await clock.advance(10_000)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", [0, 1, 2])
    assert sorted(world.done) == ["0", "1", "1", "2"]


async def test_a_loop_that_catches_everything_does_not_freeze_the_worker(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    async def broken() -> None:
        raise NonRetryable("never")

    @world.app.workflow(on="go", timeout="300ms")
    async def work(ctx: Context) -> None:
        while True:
            try:
                return await ctx.step("call", broken)
            except Exception:
                if len(world.done) > 200_000:
                    raise  # so that this test ends
                world.done.append("again")

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    assert "timed out" in (await the_run(connection))["error"]


async def test_a_sleep_beside_others_needs_a_name(
    connection: Connection,
    clock: Clock,
    world: World,
) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await asyncio.gather(ctx.sleep("1h"), ctx.sleep("2h"))

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed" and "needs a name" in run["error"]


async def test_a_wait_in_a_task_of_its_own_needs_a_name(connection: Connection, world: World) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await asyncio.create_task(ctx.wait_for("paid", timeout="1h"))

    runner = await world.runner()
    await publish(connection, "go")
    await world.turn(runner)
    run = await the_run(connection)
    assert run["status"] == "failed" and "in asyncio.wait_for, which its own timeout= can replace" in run["error"]
