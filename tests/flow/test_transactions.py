"""`ctx.transaction`: what a function writes and the result of its step are one commit, or neither happens."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import asyncpg
import msgspec
import pytest
import sqlalchemy

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.step_world import World, the_run, the_steps
from tidegate import Context, Retry, SyncContext
from tidegate.embedded import EmbeddedPostgres
from tidegate.errors import Unavailable
from tidegate.flow.call import transaction
from tidegate.model.ids import step_id
from tidegate.model.run import ClaimedRun
from tidegate.model.step import StepWrite
from tidegate.store.db import Connection, Database
from tidegate.store.transactions import Bounds, CommitVerdict, FunctionTransaction, Transactions

KINDS = ["async", "psycopg", "sqlalchemy"]


@pytest.fixture
async def world(database: Database, connection: Connection, clock: Clock) -> AsyncIterator[World]:
    await connection.execute("create table effects (what text primary key, value jsonb)")
    made = World(database)
    yield made
    for runner in made.runners:
        await runner.stop(0)


@pytest.fixture
def engine(database_url: str) -> Any:
    made = sqlalchemy.create_engine(database_url.replace("postgresql://", "postgresql+psycopg://"))
    yield made
    made.dispose()


async def effects(connection: Connection) -> list[str]:
    return [row[0] for row in await connection.fetch("select what from effects order by what")]


async def publish(connection: Connection) -> None:
    await connection.execute("select tidegate.publish('go', 'test')")


async def write(connection: Any, what: str) -> str:
    await connection.execute("insert into effects (what) values ($1)", what)
    return f"wrote {what}"


def write_psycopg(connection: Any, what: str) -> str:
    connection.execute("insert into effects (what) values (%s)", [what])
    return f"wrote {what}"


def write_sqlalchemy(connection: Any, what: str) -> str:
    connection.execute(sqlalchemy.text("insert into effects (what) values (:what)"), {"what": what})
    return f"wrote {what}"


def writer(kind: str, engine: Any) -> tuple[Callable[..., Any], dict[str, Any]]:
    """A function of a kind that writes a row, and what `ctx.transaction` needs for it."""
    functions: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "async": (write, {}),
        "psycopg": (write_psycopg, {}),
        "sqlalchemy": (write_sqlalchemy, {"engine": engine}),
    }
    return functions[kind]


@pytest.mark.parametrize("kind", KINDS)
async def test_writes_and_result_are_stored(world: World, connection: Connection, engine: Any, kind: str) -> None:
    function, how = writer(kind, engine)

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> list[str]:
        first = await ctx.transaction(function, "one", **how)
        return [first, await ctx.transaction(function, "two", name="again", **how)]

    await publish(connection)
    await world.turn(await world.runner())
    assert (await the_run(connection))["output"] == ["wrote one", "wrote two"]
    assert await effects(connection) == ["one", "two"]
    steps = await the_steps(connection)
    assert {name: (row["status"], row["result"]) for name, row in steps.items()} == {
        function.__name__: ("succeeded", "wrote one"), "again": ("succeeded", "wrote two"),
    }  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
async def test_a_synchronous_workflow(world: World, connection: Connection, engine: Any, kind: str) -> None:
    function, how = writer(kind, engine)

    @world.app.workflow(on="go")
    def work(ctx: SyncContext) -> str:
        found: str = ctx.transaction(function, what="one", **how)
        return found

    await publish(connection)
    await world.turn(await world.runner())
    assert (await the_run(connection))["output"] == "wrote one"
    assert await effects(connection) == ["one"]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_failure_rolls_back_and_is_retried(
    world: World, connection: Connection, clock: Clock, engine: Any, kind: str
) -> None:
    function, how = writer(kind, engine)
    tries: list[int] = []

    def failing(connection: Any) -> str:
        tries.append(1)
        function(connection, f"try {len(tries)}")
        if len(tries) < 3:
            raise ConnectionError("away")
        return "done"

    async def failing_async(connection: Any) -> str:
        tries.append(1)
        await function(connection, f"try {len(tries)}")
        if len(tries) < 3:
            raise ConnectionError("away")
        return "done"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        chosen: Any = failing_async if kind == "async" else failing
        return str(await ctx.transaction(chosen, name="pay", **how))

    await publish(connection)
    runner = await world.runner()
    await world.turn(runner)
    assert await effects(connection) == []
    waiting = (await the_steps(connection))["pay"]
    assert (waiting["retry_state"], waiting["retry_attempts"]) == ("scheduled", 1)
    for _ in range(2):
        await clock.advance(10_000)
        await world.turn(runner)
    assert await effects(connection) == ["try 3"]
    run, step = await the_run(connection), (await the_steps(connection))["pay"]
    assert (run["status"], run["output"]) == ("succeeded", "done")
    assert (step["status"], step["retry_state"], step["retry_attempts"], step["error"]) == (
        "succeeded",
        "none",
        2,
        None,
    )


async def test_a_constraint_that_is_checked_at_the_commit(world: World, connection: Connection) -> None:
    await connection.execute("create table late (id int unique deferrable initially deferred)")

    async def twice(connection: Any) -> None:
        await connection.execute("insert into late values (1), (1)")

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.transaction(twice, retry=Retry(max_attempts=1))

    await publish(connection)
    await world.turn(await world.runner())
    run = await the_run(connection)
    assert run["status"] == "failed" and "UniqueViolationError" in run["error"]
    assert await connection.fetchval("select count(*) from late") == 0


class Entry(msgspec.Struct):
    what: str
    at: datetime
    amount: Decimal


@pytest.mark.parametrize("kind", ["async", "psycopg"])
async def test_results_keep_their_types(world: World, connection: Connection, clock: Clock, kind: str) -> None:
    entry, found = Entry("one", datetime(2026, 1, 2, tzinfo=UTC), Decimal("1.10")), []

    async def enter(connection: Any) -> Entry:
        await write(connection, "one")
        return entry

    def enter_sync(connection: Any) -> Entry:
        write_psycopg(connection, "one")
        return entry

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        found.append(await ctx.transaction(enter if kind == "async" else enter_sync, name="enter"))
        await ctx.sleep("1h")

    await publish(connection)
    runner = await world.runner()
    await world.turn(runner)
    await clock.advance(3_600_000)
    await world.turn(runner)
    assert found == [entry, entry] and await effects(connection) == ["one"]


async def test_a_result_of_another_type_than_declared_writes_nothing(world: World, connection: Connection) -> None:
    async def odd(connection: Any) -> int:
        await write(connection, "one")
        return "text"  # type: ignore[return-value]

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.transaction(odd)

    await publish(connection)
    await world.turn(await world.runner())
    assert "is not the int that it is declared to be" in (await the_run(connection))["error"]
    assert await effects(connection) == []


async def test_a_result_that_cannot_be_stored_writes_nothing(world: World, connection: Connection) -> None:
    async def odd(connection: Any) -> object:
        await write(connection, "one")
        return object()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.transaction(odd)

    await publish(connection)
    await world.turn(await world.runner())
    assert "the result of step 'odd' cannot be stored" in (await the_run(connection))["error"]
    assert await effects(connection) == []


LOSE = "update tidegate.workflow_runs set claim_generation = claim_generation + 1"
CANCEL = "update tidegate.workflow_runs set cancel_requested_at = tidegate.now(), cancelled_by = 'ada'"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("statement", "status"), [(LOSE, "running"), (CANCEL, "cancelled")], ids=["lost", "cancelled"])
async def test_a_lost_claim_or_a_cancelled_run_writes_nothing(
    world: World, connection: Connection, database: Database, engine: Any, kind: str, statement: str, status: str
) -> None:
    """Another worker takes the run, or an operator cancels it, while the function is being called."""
    function, how = writer(kind, engine)
    loop = asyncio.get_running_loop()

    async def meanwhile() -> None:
        async with database.connection() as other:
            await other.execute(statement)

    def wrote(connection: Any) -> None:
        function(connection, "one")
        asyncio.run_coroutine_threadsafe(meanwhile(), loop).result()

    async def wrote_async(connection: Any) -> None:
        await function(connection, "one")
        await meanwhile()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.transaction(wrote_async if kind == "async" else wrote, name="pay", **how)
        world.done.append("after")

    await publish(connection)
    await world.turn(await world.runner())
    assert await effects(connection) == [] and await the_steps(connection) == {} and world.done == []
    assert (await the_run(connection))["status"] == status


async def test_a_commit_whose_answer_was_lost_is_not_repeated(
    world: World, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit happens, and the connection breaks before the answer."""
    commit = FunctionTransaction.commit

    async def lost(self: FunctionTransaction) -> None:
        await commit(self)
        self.connection.terminate()
        raise ConnectionResetError("no answer")

    monkeypatch.setattr(FunctionTransaction, "commit", lost)
    calls: list[str] = []

    async def once(connection: Any) -> dict[str, int]:
        calls.append("call")
        await write(connection, f"call {len(calls)}")
        return {"id": 7}

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        return await ctx.transaction(once)

    await publish(connection)
    await world.turn(await world.runner())
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", {"id": 7})
    assert calls == ["call"] and await effects(connection) == ["call 1"]


async def test_a_commit_that_the_server_is_still_busy_with_is_waited_for(
    world: World, connection: Connection, database: Database
) -> None:
    """The connection broke, and nobody knows whether the COMMIT will be done: the lock on the run says so."""
    held: asyncio.Future[ClaimedRun] = asyncio.get_running_loop().create_future()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        held.set_result(ctx._execution.run)
        await asyncio.Event().wait()

    await publish(connection)
    runner = await world.runner()
    await world.dispatch.run_once()
    await runner.run_once()
    async with asyncio.timeout(30):
        run = await held
    step = StepWrite(
        id=step_id(run.id, "pay"), workflow_run_id=run.id, claim_generation=run.claim_generation, name="pay",
        status="succeeded", result="5",
    )  # fmt: skip
    transactions = Transactions(database.url, 2)
    try:
        assert await transactions.settled(step) is None
        async with transactions.begin(Bounds(30, "mark")) as begun:
            assert (await begun.write(step)).is_written
            asking = asyncio.create_task(transactions.settled(step))
            await eventually(database, "select count(*) > 0 from pg_locks where not granted")
            assert not asking.done()
            await begun.commit()
        assert await asking == ("succeeded", 5)
        async with transactions.begin(Bounds(30, "mark")) as again:
            assert (await again.write(step)) == CommitVerdict(True, is_written=False)  # it is done, and stays as it is
    finally:
        await transactions.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_timeout_rolls_back(world: World, connection: Connection, clock: Clock, engine: Any, kind: str) -> None:
    """In a statement, or in the function itself; a thread that goes on later commits nothing."""
    function, how = writer(kind, engine)
    goes_on, has_ended = threading.Event(), threading.Event()
    calls: list[str] = []

    async def slow_async(connection: Any) -> str:
        calls.append("call")
        await write(connection, f"call {len(calls)}")
        if len(calls) == 1:
            await connection.execute("select pg_sleep(60)")
        if len(calls) == 2:
            await asyncio.Event().wait()
        return "done"

    def slow(connection: Any) -> str:
        calls.append("call")
        function(connection, f"call {len(calls)}")
        if len(calls) == 1:
            statement = "select pg_sleep(60)"
            connection.execute(sqlalchemy.text(statement) if how else statement)
        if len(calls) == 2:
            goes_on.wait(30)  # not for ever: a test that fails must end
            has_ended.set()
        return "done"

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        chosen: Any = slow_async if kind == "async" else slow
        return str(await ctx.transaction(chosen, name="slow", timeout="500ms", **how))

    await publish(connection)
    runner = await world.runner()
    for attempts in (1, 2):
        await world.turn(runner)
        step = (await the_steps(connection))["slow"]
        assert (step["retry_state"], step["retry_attempts"]) == ("scheduled", attempts), step["error"]
        assert await effects(connection) == []
        await clock.advance(10_000)
    assert "took longer than 0.5 s" in step["error"]
    goes_on.set()
    if kind != "async":
        await asyncio.to_thread(has_ended.wait)
    await world.turn(runner)
    assert (await the_run(connection))["output"] == "done" and await effects(connection) == ["call 3"]


@pytest.mark.parametrize("how_ended", ["commit", "rollback", "close", "with"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_function_that_ends_its_transaction_fails_for_good(
    world: World, connection: Connection, engine: Any, kind: str, how_ended: str
) -> None:
    function, how = writer(kind, engine)
    if kind == "async" and how_ended in ("close", "with"):
        pytest.skip("to close a connection of asyncpg rolls back")
    calls: list[int] = []

    async def ends_async(connection: Any) -> None:
        calls.append(1)
        await write(connection, "one")
        await connection.execute(how_ended)
        await connection.execute("begin")

    def ends(connection: Any) -> None:
        calls.append(1)
        function(connection, "one")
        if how_ended == "with":
            with connection:
                pass
        else:
            getattr(connection, how_ended)()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.transaction(ends_async if kind == "async" else ends, name="ends", **how)

    await publish(connection)
    await world.turn(await world.runner())
    run = await the_run(connection)
    assert run["status"] == "failed" and "has ended its transaction itself" in run["error"]
    assert calls == [1]


async def test_a_function_may_use_savepoints(world: World, connection: Connection) -> None:
    async def partly(connection: Any) -> None:
        async with connection.transaction():
            await write(connection, "kept")
        with contextlib.suppress(RuntimeError):
            async with connection.transaction():
                await write(connection, "undone")
                raise RuntimeError

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.transaction(partly)

    await publish(connection)
    await world.turn(await world.runner())
    assert (await the_run(connection))["status"] == "succeeded" and await effects(connection) == ["kept"]


async def test_nothing_of_a_session_reaches_the_next_function(world: World, connection: Connection) -> None:
    asked = """select pg_backend_pid() as pid, current_setting('search_path') as path,
               current_setting('timezone') as zone, to_regclass('pg_temp.mine') as temporary,
               (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()) as locks"""

    async def leave(connection: Any) -> Any:
        found = dict(await connection.fetchrow(asked))
        await connection.execute("set search_path to other; set timezone to 'Asia/Tokyo'")
        await connection.execute("create temp table mine (); select pg_advisory_lock(7)")
        return found

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> Any:
        return [await ctx.transaction(leave), await ctx.transaction(leave, name="again")]

    await publish(connection)
    await world.turn(await world.runner())
    first, second = (await the_run(connection))["output"]
    assert first == second  # of the same session, too
    assert (first["zone"], first["locks"]) == ("UTC", 0)


async def test_transactions_side_by_side_are_bounded(world: World, connection: Connection, database: Database) -> None:
    """More than there are connections: they wait for each other, the run is not suspended meanwhile, and its other
    steps go on."""
    most: list[int] = []

    async def count(connection: Any, i: int) -> int:
        await write(connection, f"row {i}")
        others = "select count(*) from pg_stat_activity where application_name = 'tidegate-transaction' "
        most.append(await connection.fetchval(f"{others} and datname = current_database()"))
        return i

    async def other(i: int) -> int:
        return -i

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> list[int]:
        found = await asyncio.gather(
            *(ctx.transaction(count, i, name=f"count-{i}") for i in range(20)),
            *(ctx.step(f"other-{i}", other, i) for i in range(5)),
            ctx.sleep("1h", name="nap"),
        )
        return [one for one in found if one is not None]

    await publish(connection)
    runner = await world.runner()
    await world.turn(runner)
    assert len(await effects(connection)) == 20 and max(most) <= 4
    assert (await the_run(connection))["status"] == "pending"


async def test_a_workflow_that_stops_waiting_finds_the_commit_done_or_nothing_written(
    world: World, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`asyncio.timeout` of the workflow: before the commit it rolls back, during the commit it comes too late."""
    commit = FunctionTransaction.commit
    is_committing = asyncio.Event()

    async def slow(self: FunctionTransaction) -> None:
        is_committing.set()
        await asyncio.sleep(0.05)
        await commit(self)

    monkeypatch.setattr(FunctionTransaction, "commit", slow)

    async def endless(connection: Any) -> None:
        await write(connection, "never")
        await asyncio.Event().wait()

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> list[str]:
        said = []
        try:
            async with asyncio.timeout(0.05):
                await ctx.transaction(endless)
        except TimeoutError:
            said.append("cut off")
        task = asyncio.create_task(ctx.transaction(write, "one"))
        await is_committing.wait()
        task.cancel()
        said.append(await task)
        return said

    await publish(connection)
    await world.turn(await world.runner())
    run = await the_run(connection)
    assert (run["status"], run["output"]) == ("succeeded", ["cut off", "wrote one"])
    steps = {name: row["status"] for name, row in (await the_steps(connection)).items()}
    assert steps == {"endless": "cancelled", "write": "succeeded"} and await effects(connection) == ["one"]


async def fails_with(world: World, connection: Connection, **how: Any) -> str:
    """The error of a run whose transaction is called in a wrong way."""
    function = how.pop("function", write_sqlalchemy)

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        await ctx.transaction(function, "one", **how)

    await publish(connection)
    await world.turn(await world.runner())
    run = await the_run(connection)
    assert run["status"] == "failed" and await effects(connection) == []
    return str(run["error"])


async def test_an_engine_for_another_database_is_refused(
    world: World, connection: Connection, empty_database_url: str
) -> None:
    other = sqlalchemy.create_engine(empty_database_url.replace("postgresql://", "postgresql+psycopg://"))
    assert "engine leads to another database" in await fails_with(world, connection, engine=other)
    other.dispose()


async def test_an_engine_whose_role_has_no_rights_is_refused(
    world: World, connection: Connection, postgres: EmbeddedPostgres, engine: Any
) -> None:
    admin = await asyncpg.connect(postgres.admin_url())
    try:
        await admin.execute("do $$ begin create role bystander login; exception when duplicate_object then end $$")
    finally:
        await admin.close()
    other = sqlalchemy.create_engine(engine.url.set(username="bystander"))
    said = await fails_with(world, connection, engine=other)
    assert "tidegate migrate --grant-to bystander" in said
    other.dispose()


async def test_an_engine_in_autocommit_mode_is_refused(world: World, connection: Connection, engine: Any) -> None:
    automatic = engine.execution_options(isolation_level="AUTOCOMMIT")
    assert "engine is in autocommit mode" in await fails_with(world, connection, engine=automatic)


def returns_awaitable(connection: Any, what: str) -> Any:
    return Promise()


class Promise:
    """Something to be awaited, which nobody does."""

    def __await__(self) -> Any:
        return iter(())


class NoEngine:
    """Stands for another database's engine."""

    class dialect:  # noqa: N801
        name, driver = "mysql", "pymysql"

    def connect(self) -> None: ...


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"engine": "postgresql://"}, "engine must be an Engine of SQLAlchemy"),
        ({"engine": NoEngine()}, "engine uses mysql+pymysql"),
        ({"function": write, "engine": NoEngine()}, "engine: an async function gets a connection of asyncpg"),
        ({"timeout": "soon"}, "timeout"),
        ({"timeout": "2h"}, "timeout: a transaction may take up to 3600 s"),
        ({"function": lambda c, what: None}, "name: a function without a name of its own"),
        ({"function": returns_awaitable}, "returned an awaitable; make it async def"),
    ],
)
async def test_wrong_arguments(world: World, connection: Connection, how: dict[str, Any], said: str) -> None:
    assert said in await fails_with(world, connection, **how)


async def test_without_psycopg_it_says_what_to_install(
    world: World, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    assert "needs psycopg 3: install it, or the extra `psycopg`" in await fails_with(
        world, connection, function=write_psycopg
    )


async def test_no_transaction_inside_a_step(world: World, connection: Connection) -> None:
    @world.app.workflow(on="go")
    async def work(ctx: Context) -> None:
        async def inner(connection: Any) -> None:
            await ctx.step("more", len, "x")

        await ctx.transaction(inner)

    await publish(connection)
    await world.turn(await world.runner())
    assert "step 'more' is called inside step 'inner'" in (await the_run(connection))["error"]


async def test_a_database_that_is_away_is_waited_for(
    world: World, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the function is called that is no failure of the step."""
    monkeypatch.setattr(transaction, "RETRY_SECONDS", 0.01)
    begin, away = Transactions._start, [True, True]

    async def start(self: Transactions, *args: Any) -> Any:
        if away:
            away.pop()
            raise Unavailable("away")
        return await begin(self, *args)

    monkeypatch.setattr(Transactions, "_start", start)

    @world.app.workflow(on="go")
    async def work(ctx: Context) -> str:
        return await ctx.transaction(write, "one", retry=Retry(max_attempts=1))

    await publish(connection)
    await world.turn(await world.runner())
    assert (await the_run(connection))["output"] == "wrote one" and not away
