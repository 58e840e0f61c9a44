"""A run that resumes on other code: it goes on if its recorded steps fit, and waits with a reason if they do not."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.step_world import POLICY, the_run, the_steps
from tests.flow.test_dispatch import publish
from tidegate import Context, NonRetryable, StepFailed, SyncContext, Tidegate
from tidegate.errors import AppError, Conflict, NotFound
from tidegate.flow import control
from tidegate.flow.call import fit
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.flow.look import health
from tidegate.flow.look.explain import explain_any
from tidegate.flow.run.runner import Runner
from tidegate.model.function_source import version_of
from tidegate.model.ids import RunId
from tidegate.model.source import TRIGGER_BREAKER
from tidegate.store.db import Connection, Database

Function = Callable[..., Awaitable[Any]]


class Cluster:
    """Workers with different code on one database, turned by hand; `done` are the effects of their steps."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self.database, self.clock = database, clock
        self.done: list[str] = []
        self.dispatch = Dispatch(database, batch_size=500, after_launch=lambda: None)
        self.runners: list[Runner] = []

    async def worker(self, version: str | None, function: Any, **options: Any) -> Runner:
        """A worker whose code is that function, as the workflow `work`."""
        app = Tidegate()
        app.workflow(on="go", name="work", version=version, **options)(function)
        definitions = await self.database.run(app.register)
        made = Runner(
            self.database, app.workflows, worker=f"worker-{len(self.runners)}", concurrency=10, lease_ms=60_000,
            policy=POLICY,
        )  # fmt: skip
        made.serve(definitions, [app.workflows["work"].version])
        self.runners.append(made)
        await made.announce()
        return made

    async def leave(self, runner: Runner, connection: Connection) -> None:
        """A worker is gone."""
        await connection.execute("delete from tidegate.workers where name = $1", runner._worker)

    async def turn(self, *runners: Runner) -> None:
        await self.dispatch.run_once()
        for runner in runners:
            while await runner.run_once():
                await asyncio.wait_for(runner.idle(), 60)

    def step(self, name: str) -> str:
        self.done.append(name)
        return name

    def sequence(self, *names: str) -> Function:
        """A function with these steps, one after another; `sleep` is a timer."""

        async def work(ctx: Context) -> list[str]:
            for name in names:
                await self.clock.advance(1)  # the time between two transactions
                if name == "sleep":
                    await ctx.sleep("1h")
                else:
                    await ctx.step(name, self.step, name)
            return list(names)

        return work

    def branches(self, *branches: tuple[str, ...], outside: bool = False) -> Function:
        """A function whose branches run side by side; with `outside`, each awaits something before its first step."""

        async def branch(ctx: Context, n: int, names: tuple[str, ...]) -> None:
            if outside:
                await asyncio.sleep(0.05 * (len(branches) - n))
            for name in names:
                if name == "sleep":
                    await ctx.sleep("1h", name=f"sleep of {n}")
                else:
                    await ctx.step(name, self.step, name)

        async def work(ctx: Context) -> None:
            async with asyncio.TaskGroup() as group:
                for n, names in enumerate(branches):
                    group.create_task(branch(ctx, n, names))

        return work


@pytest.fixture
async def cluster(database: Database, clock: Clock) -> AsyncIterator[Cluster]:
    made = Cluster(database, clock)
    yield made
    for runner in made.runners:
        await runner.stop(0)


async def begun(cluster: Cluster, connection: Connection, clock: Clock, old: Function, **options: Any) -> Runner:
    """A run that has begun on version 1 and sleeps; its worker is gone when this returns, and the sleep is over."""
    first = await cluster.worker("1", old, **options)
    await publish(connection, "go")
    await cluster.turn(first)
    run = await the_run(connection)
    assert (run["status"], run["version"]) == ("pending", "1")
    await cluster.leave(first, connection)
    await clock.advance(3_600_000)
    return first


async def test_explain_names_the_version_that_a_run_waits_for(
    cluster: Cluster, connection: Connection, clock: Clock
) -> None:
    await begun(cluster, connection, clock, cluster.sequence("a", "sleep", "b"))
    await cluster.turn(await cluster.worker("2", cluster.sequence("renamed", "sleep", "b")))
    await cluster.turn(await cluster.worker("3", cluster.sequence("again renamed")))
    run = await the_run(connection)
    found = await explain_any(connection, str(run["id"]))
    assert (found.waits_for, found.until) == ("a worker with version 1 of work", None)
    assert found.outcomes[0].state == "version_mismatch"
    assert found.summary.startswith("work waits for a worker with version 1 of work: its recorded steps do not fit")
    assert "; living workers have version 2 (worker-1), 3 (worker-2); " in found.summary
    assert f"tidegate runs resume {run['id']} --on-current-code" in found.summary
    await connection.execute("delete from tidegate.workers")
    assert "; no living worker has its workflow; " in (await explain_any(connection, str(run["id"]))).summary


async def test_timers_of_a_run_that_waits_for_its_version_are_not_overdue(
    cluster: Cluster, connection: Connection, clock: Clock
) -> None:
    await begun(cluster, connection, clock, cluster.sequence("a", "sleep", "b"))
    await clock.advance(60_000)
    assert "retries_overdue" in [one.code for one in (await health.snapshot(connection)).causes]
    await cluster.turn(await cluster.worker("2", cluster.sequence("renamed", "sleep", "b")))
    await clock.advance(60_000)
    causes = {one.code: one.message for one in (await health.snapshot(connection)).causes}
    assert "retries_overdue" not in causes
    assert causes["version_mismatch"].startswith("1 run waits for version 1 of work")


FITS = [
    (("a", "sleep", "b"), ("a", "sleep", "b")),
    (("a", "sleep", "b"), ("a", "sleep", "c", "b")),
    (("a", "sleep", "b"), ("a", "sleep")),
    (("a", "b", "sleep"), ("a", "b", "sleep", "c")),
    (("sleep", "b"), ("sleep", "c")),
]
MISFITS = [
    (("a", "sleep", "b"), ("c", "sleep", "b"), "it reaches 'c' before 'a', which is recorded"),  # renamed
    (("a", "b", "sleep"), ("b", "a", "sleep"), "it reaches 'b' before 'a', which is recorded as earlier"),  # reordered
    (("a", "sleep", "b"), ("b", "a", "sleep"), "it reaches 'b' before 'a', which is recorded"),
    (("a", "sleep", "b"), ("new", "a", "sleep", "b"), "it reaches 'new' before 'a'"),  # inserted before
    (("a", "b", "sleep", "c"), ("a", "sleep", "c"), "without 'b', which is recorded"),
    (("a", "sleep", "b"), ("a", "b"), "it reaches 'b' before 'sleep-1', which is recorded"),  # a timer removed
    (("a", "b", "sleep"), ("a",), "it ends without 'b', which is recorded"),  # a step removed
    (("a", "sleep"), (), "it ends without 'a', which is recorded"),
]


@pytest.mark.parametrize(("before", "after"), FITS)
async def test_a_run_whose_steps_fit_goes_on_with_the_new_code(
    cluster: Cluster, connection: Connection, clock: Clock, before: tuple[str, ...], after: tuple[str, ...]
) -> None:
    await begun(cluster, connection, clock, cluster.sequence(*before))
    second = await cluster.worker("2", cluster.sequence(*after))
    await cluster.turn(second)
    run = await the_run(connection)
    assert (run["status"], run["output"], run["version"]) == ("succeeded", list(after), "2")
    assert sorted(cluster.done) == sorted({*before, *after} - {"sleep"} - (set(before) - set(after)))


@pytest.mark.parametrize(("before", "after", "why"), MISFITS)
async def test_a_run_whose_steps_do_not_fit_waits_and_nothing_is_done_again(
    cluster: Cluster, connection: Connection, clock: Clock, before: tuple[str, ...], after: tuple[str, ...], why: str
) -> None:
    first = await begun(cluster, connection, clock, cluster.sequence(*before))
    effects = list(cluster.done)
    second = await cluster.worker("2", cluster.sequence(*after))
    await cluster.turn(second)
    run = await the_run(connection)
    assert (run["status"], run["version"], run["misfits"]) == ("pending", "1", ["2"])
    assert run["version_held_at"] == clock.now and cluster.done == effects
    assert why in run["warning"] and f"tidegate runs resume {run['id']} --on-current-code" in run["warning"]
    assert "waits for a worker with version 1 of work" in run["warning"]
    # Time and heartbeats of workers with the same code change nothing.
    await clock.advance(86_400_000)
    await second.announce()
    await cluster.turn(second)
    assert (await the_run(connection))["attempts"] == run["attempts"] and cluster.done == effects
    # A worker with its version comes.
    await first.announce()
    await cluster.turn(second, first)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", list(before)) and len(cluster.done) == len(set(cluster.done))


SIDE_BY_SIDE = [
    (("p", "x", "sleep", "y"), ("b", "sleep")),
    (("sleep", "y"), ("b", "c", "d")),
    (("a",), ("b", "sleep", "c"), ("d", "sleep")),
]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("branches", SIDE_BY_SIDE)
async def test_branches_side_by_side_are_never_stopped_by_their_order(
    cluster: Cluster, connection: Connection, clock: Clock, branches: Any, outside: bool
) -> None:
    """The branches are begun the other way round, and reach new steps before recorded ones of others."""
    await begun(cluster, connection, clock, cluster.branches(*branches, outside=outside))
    await connection.execute("delete from tidegate.workflow_run_steps where name = 'a'")  # as if it had not finished
    new = tuple((*names, f"new of {n}") for n, names in enumerate(branches))

    async def work(ctx: Context) -> None:
        await cluster.branches(*new, outside=outside)(ctx)

    second = await cluster.worker("2", work)
    for _ in range(4):  # with `outside`, a branch that sleeps suspends the run before others have begun
        await cluster.turn(second)
        assert (await the_run(connection))["warning"] is None
        await clock.advance(3_600_000)
    run = await the_run(connection)
    assert (run["status"], run["version"]) == ("succeeded", "2") and len(cluster.done) - len(set(cluster.done)) <= 1


async def test_a_branch_that_misses_a_recorded_step_waits_for_its_version(
    cluster: Cluster, connection: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "PATIENCE_SECONDS", 0.2)
    await begun(cluster, connection, clock, cluster.branches(("a", "sleep"), ("b",)))
    second = await cluster.worker("2", cluster.branches(("a", "sleep"), ("renamed",)))
    await cluster.turn(second)
    run = await the_run(connection)
    assert run["status"] == "pending" and "it goes on without 'b', which is recorded" in run["warning"]
    assert cluster.done == ["a", "b"]


async def test_a_task_that_nobody_waits_for_reaches_its_step(
    cluster: Cluster, connection: Connection, clock: Clock
) -> None:
    async def work(ctx: Context) -> str:
        task = asyncio.create_task(ctx.step("log", cluster.step, "log"))
        await ctx.step("a", cluster.step, "a")
        await ctx.sleep("1h")
        return str(task.get_name() == "x")

    await begun(cluster, connection, clock, work)
    second = await cluster.worker("2", work)
    await cluster.turn(second)
    assert (await the_run(connection))["status"] == "succeeded" and sorted(cluster.done) == ["a", "log"]


async def test_a_synchronous_function(
    cluster: Cluster, connection: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "THREAD_PATIENCE_SECONDS", 0.2)

    def sequence(*names: str) -> Any:
        def work(ctx: SyncContext) -> None:
            for name in names:
                ctx.step(name, cluster.step, name)
            ctx.sleep("1h")
            ctx.step("end", cluster.step, "end")

        return work

    first = await begun(cluster, connection, clock, sequence("a", "b"))
    second = await cluster.worker("2", sequence("a", "c"))
    await cluster.turn(second)
    run = await the_run(connection)
    assert run["status"] == "pending" and "without 'b'" in run["warning"] and cluster.done == ["a", "b"]
    await first.announce()
    await cluster.turn(first)
    assert (await the_run(connection))["status"] == "succeeded" and cluster.done == ["a", "b", "end"]


async def test_a_worker_with_the_runs_version_claims_it_before_others(
    cluster: Cluster, connection: Connection, clock: Clock
) -> None:
    first = await begun(cluster, connection, clock, cluster.sequence("a", "sleep", "b"))
    second = await cluster.worker("2", cluster.sequence("a", "sleep", "c"))
    await first.announce()
    await cluster.turn(second)
    assert (await the_run(connection))["status"] == "pending" and await second.next_due_seconds() is None
    await clock.advance(61_000)  # the first has not been heard of for a lease
    await second.announce()
    await cluster.turn(second)
    assert (await the_run(connection))["status"] == "succeeded" and cluster.done == ["a", "c"]


async def test_new_runs_begin_on_any_version(cluster: Cluster, connection: Connection, clock: Clock) -> None:
    first, second = [await cluster.worker(v, cluster.sequence("a", "sleep", v)) for v in ("1", "2")]
    await publish(connection, "go")
    await cluster.turn(second, first)
    assert (await the_run(connection))["version"] == "2"


async def test_code_that_fits_again_takes_the_run(cluster: Cluster, connection: Connection, clock: Clock) -> None:
    """Version 2 was a mistake; version 3 knows how runs of version 1 go on."""
    await begun(cluster, connection, clock, cluster.sequence("a", "sleep", "b"))
    second = await cluster.worker("2", cluster.sequence("c", "sleep", "b"))
    await cluster.turn(second)
    third = await cluster.worker("3", cluster.sequence("a", "sleep", "d"))
    await cluster.turn(second, third)
    run = await the_run(connection)
    assert (run["status"], run["version"]) == ("succeeded", "3") and cluster.done == ["a", "d"]


async def test_versions_that_do_not_fit_are_tried_once_each(
    cluster: Cluster, connection: Connection, clock: Clock
) -> None:
    await begun(cluster, connection, clock, cluster.sequence("a", "sleep"))
    workers = [await cluster.worker(v, cluster.sequence("c", "sleep")) for v in ("2", "3")]
    for _ in range(4):
        await cluster.turn(*workers)
        for one in workers:
            await one.announce()
    run = await the_run(connection)
    assert (run["misfits"], run["attempts"], run["status"]) == (["2", "3"], 3, "pending")


async def test_an_operator_resumes_it_on_the_current_code(
    cluster: Cluster, connection: Connection, clock: Clock, database: Database
) -> None:
    await begun(cluster, connection, clock, cluster.sequence("a", "sleep", "b"))
    run_id = (await the_run(connection))["id"]
    with pytest.raises(Conflict, match="does not wait for a version of its code"):
        await control.resume_run(database, run_id, "ann")
    second = await cluster.worker("2", cluster.sequence("c", "sleep", "sleep", "b"))
    await cluster.turn(second)
    risk = "leaves recorded step 'a' unused, unless the code asks for it later, and EXECUTES 'c'"
    assert f"--on-current-code (this {risk})" in (await explain_any(connection, str(run_id))).summary
    await control.resume_run(database, run_id, "ann")
    [told] = [d for d in (await explain_any(connection, str(run_id))).decisions if d.decision == "resumed"]
    assert (told.actor, told.reason) == ("ann", f"from version 1 on the code that workers have now: {risk}")
    await cluster.turn(second)
    run = await the_run(connection)
    assert (run["status"], run["version"], run["warning"]) == ("pending", "2", None) and cluster.done == ["a", "c"]
    # What was recorded before is not asked for again, neither by this version nor by a later one.
    third = await cluster.worker("3", cluster.sequence("c", "sleep", "sleep", "d"))
    await cluster.leave(second, connection)
    await clock.advance(3_600_000)
    await cluster.turn(third)
    assert (await the_run(connection))["status"] == "succeeded" and cluster.done == ["a", "c", "d"]
    audited = await connection.fetchrow("select actor, action, subject from tidegate.audit_log where actor = 'ann'")
    assert audited is not None and tuple(audited) == ("ann", "run.resume", str(run_id))
    with pytest.raises(NotFound):
        await control.resume_run(database, RunId(uuid.uuid4()), "ann")


async def test_a_run_that_times_out_while_it_waits_for_its_version_fails(
    cluster: Cluster, connection: Connection, clock: Clock
) -> None:
    await begun(cluster, connection, clock, cluster.sequence("a", "sleep", "b"), timeout="2h")
    second = await cluster.worker("2", cluster.sequence("c"), timeout="2h")
    await cluster.turn(second)
    assert (await the_run(connection))["status"] == "pending"
    await clock.advance(2 * 3_600_000)
    await cluster.turn(second)
    run = await the_run(connection)
    assert (run["status"], run["error"]) == ("failed", "timed out after 7200000 ms") and cluster.done == ["a"]


async def test_a_failed_and_a_waiting_step_are_recorded_too(
    cluster: Cluster, connection: Connection, clock: Clock
) -> None:
    def fail() -> None:
        cluster.done.append("fail")
        raise NonRetryable("no")

    def again() -> None:
        cluster.done.append("again")
        raise ConnectionError("later")

    async def old(ctx: Context) -> None:
        try:
            await ctx.step("fails", fail)
        except StepFailed:
            await ctx.step("waits", again)

    async def new(ctx: Context) -> None:
        await ctx.step("other", cluster.step, "other")

    await begun(cluster, connection, clock, old)
    second = await cluster.worker("2", new)
    await cluster.turn(second)
    run = await the_run(connection)
    assert "it reaches 'other' before 'fails'" in run["warning"] and cluster.done == ["fail", "again"]


async def test_a_stored_result_that_no_longer_fits_its_type(
    cluster: Cluster, connection: Connection, clock: Clock
) -> None:
    def function(kind: Any, value: Any) -> Function:
        def make() -> Any:
            return value

        make.__annotations__["return"] = kind

        async def work(ctx: Context) -> None:
            await ctx.step("make", make)
            await ctx.sleep("1h")

        return work

    await begun(cluster, connection, clock, function(dict[str, int], {"a": 1}))
    second = await cluster.worker("2", function(int, 1))
    await cluster.turn(second)
    run = await the_run(connection)
    assert (run["status"], run["version"], run["misfits"]) == ("pending", "1", ["2"])
    assert "the stored result of step 'make' is not the int that its function declares now" in run["warning"]
    await cluster.leave(second, connection)
    same = await cluster.worker("1", function(int, 1))  # the same version, although the type has changed: it fails
    await cluster.turn(same)
    run = await the_run(connection)
    assert run["status"] == "failed" and "NonRetryable: the stored result of step 'make' is not" in run["error"]


async def test_a_patch_is_decided_once_and_kept(cluster: Cluster, connection: Connection, clock: Clock) -> None:
    def patched(*order: str) -> Function:
        async def work(ctx: Context) -> list[bool]:
            found = []
            for name in order:
                if name == "sleep":
                    await ctx.sleep("1h")
                elif name.startswith("?"):
                    found.append(ctx.patched(name[1:]))
                    await ctx.step(f"{'new' if found[-1] else 'old'} {name[1:]}", cluster.step, name)
                    assert ctx.patched(name[1:]) is found[-1]
                else:
                    await ctx.step(name, cluster.step, name)
            return found

        return work

    await begun(cluster, connection, clock, cluster.sequence("old p", "sleep", "old q"))
    second = await cluster.worker("2", patched("?p", "sleep", "?q", "sleep"))
    await cluster.turn(second)
    await cluster.leave(second, connection)
    await clock.advance(3_600_000)
    third = await cluster.worker("3", patched("?p", "sleep", "?q", "sleep"))
    await cluster.turn(third)
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", [False, True]), run["warning"]
    steps = await the_steps(connection)
    assert {n: s["result"] for n, s in steps.items() if n.startswith("patched:")} == {
        "patched:p": False, "patched:q": True,
    }  # fmt: skip


async def test_a_patch_of_a_new_run_is_taken(cluster: Cluster, connection: Connection, clock: Clock) -> None:
    async def work(ctx: Context) -> list[bool]:
        found = [ctx.patched("p")]
        await ctx.sleep("1h")
        return [*found, ctx.patched("p")]

    def plain(ctx: SyncContext) -> list[bool]:
        return [ctx.patched("p"), ctx.patched("p")]

    first = await cluster.worker(None, work)
    await publish(connection, "go")
    await cluster.turn(first)
    await clock.advance(3_600_000)
    await cluster.turn(first)
    assert (await the_run(connection))["output"] == [True, True]
    other = await cluster.worker(None, plain)
    await publish(connection, "go")
    await cluster.turn(other)
    outputs = await connection.fetch("select output from tidegate.workflow_runs")
    assert [row[0] for row in outputs] == [[True, True]] * 2


def test_what_a_version_ignores_and_what_it_notices() -> None:
    async def one(ctx: Context, a: int) -> int:
        """A docstring."""
        return await ctx.step(f"a-{a}", int, a)  # a comment

    async def same(ctx: Any, a: str) -> Any:
        return await ctx.step(f"a-{a}", int,
                              a)  # fmt: skip

    async def other(ctx: Context, a: int) -> int:
        return await ctx.step(f"b-{a}", int, a)

    first, second, third = (version_of(function, "ctx") for function in (one, same, other))
    assert first != third and len(first) == 12
    source = version_of(_renamed(same, "one"), "ctx")
    assert source == second


def _renamed(function: Any, name: str) -> Any:
    function.__name__ = name
    return function


def test_a_version_must_be_short_text() -> None:
    for wrong in ("", "two words", "x" * 101, 3):
        with pytest.raises(AppError, match="workflow work: version: must be text of 1 to 100"):
            Tidegate().workflow(on="a", name="work", version=wrong)(_nothing)  # type: ignore[arg-type]


async def _nothing(ctx: Context) -> None: ...


@pytest.mark.parametrize("same_first", [False, True])
@pytest.mark.parametrize("kind", ["approval", "child"])
async def test_a_retry_on_other_code_begins_again_what_precedes_a_recorded_step(
    cluster: Cluster, connection: Connection, clock: Clock, kind: str, same_first: bool
) -> None:
    """The retry resets what the run had begun and not finished; the code asks for it before a finished step."""

    def told(output: str) -> Any:
        async def work(ctx: Context) -> str:
            if kind == "approval":
                await ctx.approval("chef", timeout="1d")
            else:
                await ctx.start("missing", {}, name="chef")
            await clock.advance(1)
            await ctx.step("tell chef", cluster.step, "tell chef")
            await ctx.sleep("1h")
            return output

        return work

    first = await cluster.worker("1", told("old"))
    await publish(connection, "go")
    await cluster.turn(first)
    run_id = RunId((await the_run(connection))["id"])
    await control.cancel_run(cluster.database, run_id, "ann", TRIGGER_BREAKER)
    await clock.advance(1)
    await control.retry_run(cluster.database, run_id, "ann")
    retried_at = clock.now
    if same_first:
        await cluster.turn(first)
    await cluster.leave(first, connection)
    await cluster.turn(await cluster.worker("2", told("new")))
    run = await the_run(connection)
    assert run["version_held_at"] is None, run["warning"]
    steps = await the_steps(connection)
    assert "revived" not in steps["chef"]["retry_metadata"]
    if kind == "approval":
        until = await connection.fetchval("select until from tidegate.event_waits")
        assert steps["chef"]["status"] == "pending" and until == retried_at + timedelta(days=1)
    await clock.advance(3_600_000)
    await cluster.turn(cluster.runners[-1])
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", "new") and cluster.done == ["tell chef"]
