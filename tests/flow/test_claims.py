"""Who runs what: runs claimed as they are created, claimed ahead, given back, and written together."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.flow.conftest import eventually
from tests.flow.test_dispatch import publish
from tidegate import Context, RetryAfter, Tidegate
from tidegate.flow.decide.batch import Batch
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.flow.keep.reconcile import Reconcile
from tidegate.flow.run import claiming
from tidegate.flow.run.runner import Runner
from tidegate.model.source import SOURCE_BREAKER
from tidegate.store.db import Connection, Database

LEASE_MS = 60_000
PENDING = "(select count(*) from tidegate.workflow_runs where status = 'pending')"


class Crew:
    """One worker: its dispatch claims for its runner."""

    def __init__(
        self, database: Database, app: Tidegate, name: str = "one", concurrency: int = 3, **given: Any
    ) -> None:
        self.database, self.app, self.name = database, app, name
        self.hints = 0
        self.runner = Runner(database, app.workflows, worker=name, concurrency=concurrency, lease_ms=LEASE_MS, **given)
        batch = Batch(SOURCE_BREAKER, claim=self.runner.claim, after_claim=self.runner.start)
        self.dispatch = Dispatch(database, batch_size=500, after_launch=self._hint, batch=batch)

    async def serve(self) -> None:
        self.runner.serve(await self.database.run(self.app.register))

    def _hint(self) -> None:
        self.hints += 1
        self.runner.expect()


@pytest.fixture
def app() -> Tidegate:
    return Tidegate()


@pytest.fixture
async def crew(database: Database, app: Tidegate) -> AsyncIterator[Crew]:
    made = Crew(database, app)
    yield made
    await made.runner.stop(0)


async def statuses(connection: Connection) -> dict[str, int]:
    rows = await connection.fetch("select status, count(*) from tidegate.workflow_runs group by 1")
    return {row[0]: row[1] for row in rows}


async def test_a_run_of_own_code_begins_with_the_transaction_that_creates_it(
    connection: Connection, app: Tidegate, crew: Crew
) -> None:
    seen: list[Any] = []

    @app.workflow(on="go")
    async def work(ctx: Context, n: int) -> int:
        seen.append((ctx.event.payload["n"] if ctx.event else None, n, ctx.attempt))
        return n

    await crew.serve()
    await publish(connection, "go", n=5)
    assert (await crew.dispatch.run_once()).launched == 1
    await asyncio.wait_for(crew.runner.idle(), 30)
    row = await connection.fetchrow("select * from tidegate.workflow_runs")
    assert (row["status"], row["output"], row["attempts"], row["claim_generation"]) == ("succeeded", 5, 1, 1)
    assert row["started_at"] == row["created_at"]
    assert seen == [(5, 5, 1)]
    assert crew.hints == 0  # nobody need look for it


async def test_no_more_is_claimed_than_there_is_room_for_and_the_rest_is_announced(
    connection: Connection, app: Tidegate, crew: Crew
) -> None:
    go_on = asyncio.Event()

    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await go_on.wait()

    await crew.serve()
    for _ in range(5):
        await publish(connection, "go")
    await crew.dispatch.run_once()
    assert (await statuses(connection), crew.hints) == ({"running": 3, "pending": 2}, 1)
    assert await crew.runner.run_once() == 0
    go_on.set()
    await asyncio.wait_for(crew.runner.idle(), 30)
    assert await crew.runner.run_once() == 2
    await asyncio.wait_for(crew.runner.idle(), 30)
    assert await statuses(connection) == {"succeeded": 5}


async def test_newcomers_stand_behind_runs_that_wait(connection: Connection, app: Tidegate, crew: Crew) -> None:
    order: list[int] = []

    @app.workflow(on="go")
    async def work(ctx: Context, n: int) -> None:
        order.append(n)

    await crew.serve()
    await publish(connection, "go", n=1)
    await Dispatch(crew.database, batch_size=10, after_launch=lambda: None).run_once()  # by a worker without the code
    await publish(connection, "go", n=2)
    await crew.dispatch.run_once()
    assert await statuses(connection) == {"pending": 2}
    await crew.runner.run_once()
    await asyncio.wait_for(crew.runner.idle(), 30)
    assert order == [1, 2]


async def test_runs_of_code_that_is_elsewhere_are_left_for_it(
    connection: Connection, app: Tidegate, crew: Crew
) -> None:
    other = Tidegate()

    @other.workflow(on="go")
    async def elsewhere(ctx: Context) -> None: ...

    @app.workflow(on="go")
    async def here(ctx: Context) -> None: ...

    await crew.database.run(other.register)
    await crew.serve()
    await publish(connection, "go")
    await crew.dispatch.run_once()
    await asyncio.wait_for(crew.runner.idle(), 30)
    assert (await statuses(connection), crew.hints) == ({"pending": 1, "succeeded": 1}, 1)


async def test_a_commit_whose_answer_was_lost_is_taken_over_when_the_lease_ends(
    connection: Connection, app: Tidegate, crew: Crew
) -> None:
    ran: list[int] = []

    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        ran.append(ctx.attempt)

    await crew.serve()
    await publish(connection, "go")
    crew.dispatch._batch._after_claim = lambda _: None  # the worker never learns that it has the run
    await crew.dispatch.run_once()
    assert await statuses(connection) == {"running": 1}
    await connection.execute("update tidegate.workflow_runs set claim_expires_at = tidegate.now()")
    await Reconcile(crew.database, batch_size=10).run_once()
    await crew.runner.run_once()
    await asyncio.wait_for(crew.runner.idle(), 30)
    assert (ran, await statuses(connection)) == ([2], {"succeeded": 1})


async def test_short_runs_are_claimed_ahead_and_never_more_than_the_slots_execute(
    connection: Connection, app: Tidegate, crew: Crew
) -> None:
    at_once, most = 0, 0

    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0)
        at_once -= 1

    await crew.serve()
    crew.runner._prefetch._typical_seconds = 0.001
    assert crew.runner.room > 3
    for _ in range(100):
        await publish(connection, "go")
    await crew.dispatch.run_once()
    await asyncio.wait_for(crew.runner.idle(), 30)
    assert (await statuses(connection), most, crew.hints) == ({"succeeded": 100}, 3, 0)


async def test_no_run_sees_what_another_one_has_set(connection: Connection, app: Tidegate, crew: Crew) -> None:
    whose: contextvars.ContextVar[int | None] = contextvars.ContextVar("whose", default=None)
    seen: list[int | None] = []

    async def note() -> None:
        seen.append(whose.get())

    @app.workflow(on="go")
    async def work(ctx: Context, n: int) -> None:
        await note()
        whose.set(n)
        await ctx.step("first", note)
        await ctx.step("second", note)

    await crew.serve()
    crew.runner._prefetch._typical_seconds = 0.001
    for n in range(9):  # three slots: most are begun by the end of another
        await publish(connection, "go", n=n)
    await crew.dispatch.run_once()
    await asyncio.wait_for(crew.runner.idle(), 30)
    assert await statuses(connection) == {"succeeded": 9}
    assert (seen.count(None), [seen.count(n) for n in range(9)]) == (9, [2] * 9)


async def test_what_is_claimed_and_does_not_begin_goes_to_a_worker_that_is_free(
    connection: Connection, app: Tidegate, crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claiming, "RELEASE_SECONDS", 0.05)
    go_on, ran = asyncio.Event(), []

    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        ran.append(ctx.attempt)
        await go_on.wait()

    await crew.serve()
    crew.runner._prefetch._typical_seconds = 0.001  # so far, all were short
    for _ in range(6):
        await publish(connection, "go")
    await crew.dispatch.run_once()
    assert await statuses(connection) == {"running": 6}

    await eventually(crew.database, f"select {PENDING} = 3")
    back = await connection.fetch(
        "select attempts, started_at, claimed_by, claim_expires_at, next_attempt_at <= tidegate.now() as is_due"
        "  from tidegate.workflow_runs where status = 'pending'"
    )
    assert {tuple(row.values()) for row in back} == {(0, None, None, None, True)}
    assert crew.runner.room == 0  # it has learned
    other = Crew(crew.database, app, "two")
    await other.serve()
    try:
        assert await other.runner.run_once() == 3
        go_on.set()
        for one in (crew, other):
            await asyncio.wait_for(one.runner.idle(), 30)
        assert (await statuses(connection), ran) == ({"succeeded": 6}, [1] * 6)
    finally:
        await other.runner.stop(0)


async def test_what_is_claimed_ahead_does_not_hammer_a_service_that_has_said_no(
    connection: Connection, app: Tidegate, crew: Crew
) -> None:
    calls: list[int] = []

    async def call(n: int) -> None:
        calls.append(n)
        raise RetryAfter(600, "429", everyone="trigger")

    @app.workflow(on="go")
    async def work(ctx: Context, n: int) -> None:
        await ctx.step("call", call, n)

    await crew.serve()
    crew.runner._prefetch._typical_seconds = 0.001
    for n in range(30):
        await publish(connection, "go", n=n)
    await crew.dispatch.run_once()
    assert await statuses(connection) == {"running": 30}
    await eventually(crew.database, f"select {PENDING} = 30")
    await asyncio.wait_for(crew.runner.idle(), 30)
    assert calls == [0, 1, 2]  # those that were under way
    early = "select count(*) from tidegate.workflow_runs where next_attempt_at < tidegate.now() + interval '500 s'"
    assert await connection.fetchval(early) == 0


async def test_a_stopping_worker_gives_back_at_once_what_it_has_not_begun(
    connection: Connection, app: Tidegate, crew: Crew
) -> None:
    @app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await asyncio.Event().wait()

    await crew.serve()
    crew.runner._prefetch._typical_seconds = 0.001
    for _ in range(5):
        await publish(connection, "go")
    await crew.dispatch.run_once()
    crew.runner.stop_claiming()
    stopping = asyncio.create_task(crew.runner.stop(30))

    await eventually(crew.database, f"select {PENDING} = 2")
    assert await statuses(connection) == {"running": 3, "pending": 2}  # what has begun gets its time
    stopping.cancel()
    await asyncio.gather(stopping, return_exceptions=True)


@pytest.mark.parametrize("after", ["the end", "a wait", "another step", "a step that fails"])
async def test_what_cannot_be_written_fails_its_own_run_and_no_other(
    connection: Connection, app: Tidegate, crew: Crew, after: str
) -> None:
    effects: list[int] = []

    async def nothing(n: int) -> str:
        effects.append(n)
        if after == "a step that fails" and n == 1:
            raise ValueError("not now")
        return "done"

    @app.workflow(on="go")
    async def work(ctx: Context, n: int) -> str:
        found = await ctx.step("nothing", nothing, n)
        if after == "a wait":
            await asyncio.sleep(0.05)
        elif after == "another step":
            await ctx.step("another", nothing, n + 10)
        return found

    await crew.serve()
    await connection.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin if new.workflow_run_id = (select id from tidegate.workflow_runs where parameters->>'n' = '1')"
        "    then raise data_exception using message = 'not this one'; end if; return new; end $$;"
        "create trigger refuse before insert on tidegate.workflow_run_steps for each row execute function refuse()"
    )
    for n in range(3):
        await publish(connection, "go", n=n)
    await crew.dispatch.run_once()
    await asyncio.wait_for(crew.runner.idle(), 30)
    rows = await connection.fetch("select parameters->>'n' n, status, error from tidegate.workflow_runs order by 1")
    assert [(row["n"], row["status"]) for row in rows] == [("0", "succeeded"), ("1", "failed"), ("2", "succeeded")]
    assert "its outcome cannot be stored" in rows[1]["error"] and "not this one" in rows[1]["error"]
    assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 1
    assert effects.count(1) == 1 and 11 not in effects
