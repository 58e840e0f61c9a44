"""The batch: every event is decided once, by the triggers of that moment; a bad one is alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tidegate import Context, failpoints
from tidegate.app import Tidegate
from tidegate.flow.decide.dispatch import Dispatch, DispatchCounts
from tidegate.flow.look.explain import explain
from tidegate.model.source import RateLimit
from tidegate.store import locks, sources, trigger_gates
from tidegate.store.db import Connection, Database


def dispatcher(database: Database, batch_size: int = 500) -> Dispatch:
    return Dispatch(database, batch_size=batch_size, after_launch=lambda: None)


async def publish(
    connection: Connection, event_type: str = "order.created", source: str = "shop.api", **payload: Any
) -> str:
    event_id: str = await connection.fetchval("select tidegate.publish($1, $2, $3)", event_type, source, payload)
    return event_id


@pytest.fixture
async def app(database: Database) -> Tidegate:
    app = Tidegate()

    @app.workflow(on="order.created", source="shop.*", where="event.payload.amount > 100")
    async def fulfil(ctx: Any, id: int) -> None: ...

    @app.workflow(on="order.*", params={"order": "{{ event.payload.id }}", "note": "order {{ event.payload.id }}"})
    async def audit(ctx: Any, order: int, note: str) -> None: ...

    await database.run(app.register)
    return app


async def test_matching_events_launch_runs_with_their_parameters(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    await publish(connection, id=7, amount=120)
    await publish(connection, id=8, amount=50)
    await publish(connection, "order.created", "elsewhere", id=9, amount=500)
    await publish(connection, "invoice.created", id=10, amount=500)
    assert await dispatcher(database).run_once() == DispatchCounts(events=4, launched=4)
    rows = await connection.fetch(
        "select w.slug, r.parameters, r.status from tidegate.workflow_runs r "
        "join tidegate.workflow_definitions w on w.id = r.workflow_definition_id order by r.id"
    )
    assert sorted((row["slug"], row["parameters"].get("id") or row["parameters"]["order"]) for row in rows) == [
        ("audit", 7),
        ("audit", 8),
        ("audit", 9),
        ("fulfil", 7),
    ]
    assert {row["parameters"]["note"] for row in rows if row["slug"] == "audit"} >= {"order 7"}
    assert await connection.fetchval("select count(*) from tidegate.event_inbox") == 0
    assert await dispatcher(database).run_once() == DispatchCounts()


async def test_workers_side_by_side_decide_each_event_once(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    for n in range(200):
        await publish(connection, id=n, amount=200)
    dispatchers = [dispatcher(database, batch_size=7) for _ in range(6)]

    async def drain(one: Dispatch) -> int:
        total = 0
        while outcome := await one.run_once():
            if not outcome.events:
                return total
            total += outcome.events
        return total

    assert sum(await asyncio.gather(*map(drain, dispatchers))) == 200
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 400
    assert await connection.fetchval("select count(distinct delivery_id) from tidegate.workflow_runs") == 400


async def test_a_changed_trigger_counts_from_the_next_batch(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    one = dispatcher(database)
    await publish(connection, id=1, amount=200)
    assert (await one.run_once()).launched == 2
    await connection.execute(
        "update tidegate.workflow_event_triggers set status = 'disabled' where \"where\" is not null"
    )
    await publish(connection, id=2, amount=200)
    assert (await one.run_once()).launched == 1


async def test_a_trigger_that_fails_on_an_event_fails_alone(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    event_id = await publish(connection, amount=200)  # no id: audit's template cannot be rendered
    assert await dispatcher(database).run_once() == DispatchCounts(events=1, launched=1, failed=1)
    row = await connection.fetchrow("select * from tidegate.workflow_trigger_deliveries where status = 'failed'")
    assert row is not None and "event.payload.id is undefined" in row["last_error"]
    story = await explain(connection, event_id)
    assert [(d.stage, d.decision, d.workflow) for d in story.decisions[2:]] == [
        ("deliver", "failed", "audit"),
        ("deliver", "launched", "fulfil"),
        ("run", "pending", "fulfil"),
    ]


async def test_an_event_that_cannot_be_read_is_dead_lettered_and_the_others_go_on(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    good = [await publish(connection, id=n, amount=200) for n in range(3)]
    bad = await publish(connection, id=99, amount=200)
    await connection.execute("alter table tidegate.workflow_events drop constraint workflow_events_occurred_at_check")
    await connection.execute("update tidegate.workflow_events set occurred_at = '20000-01-01' where id::text = $1", bad)
    outcome = await dispatcher(database).run_once()
    assert outcome == DispatchCounts(events=4, launched=6, dead_lettered=1)
    letter = await connection.fetchrow("select kind, subject_id::text, reason from tidegate.dead_letters")
    assert letter is not None and (letter["kind"], letter["subject_id"]) == ("event", bad)
    assert letter["reason"]
    assert await connection.fetchval("select (outcomes->0->1)::int from tidegate.event_scheduler_sources") == 1
    launched = await connection.fetch("select distinct event_id::text from tidegate.workflow_runs")
    assert {row[0] for row in launched} == set(good)


async def test_a_failure_before_the_commit_changes_nothing(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    await publish(connection, id=1, amount=200)
    failpoints.arm("dispatch.before_commit=raise")
    outcome = await dispatcher(database).run_once()  # the batch fails once, then each event on its own succeeds
    assert outcome == DispatchCounts(events=1, launched=2)
    assert await connection.fetchval("select count(*) from tidegate.workflow_runs") == 2


async def test_explain_says_why_not(database: Database, connection: Connection, app: Tidegate) -> None:
    waiting = await publish(connection, id=1, amount=50)
    story = await explain(connection, waiting)
    assert [(d.stage, d.decision) for d in story.decisions] == [("ingest", "accepted"), ("gate", "waiting")]
    unknown = await publish(connection, "nobody.cares")
    await dispatcher(database).run_once()
    story = await explain(connection, waiting)
    filtered = [d for d in story.decisions if d.decision == "filtered"]
    assert [(d.workflow, d.reason) for d in filtered] == [("fulfil", "where is false: event.payload.amount > 100")]
    story = await explain(connection, unknown)
    assert story.summary == "launched nothing: no active trigger matches events of type nobody.cares from shop.api"


async def test_registering_again_changes_nothing_and_a_change_raises_the_version(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    async def versions() -> list[tuple[str, int]]:
        rows = await connection.fetch(
            "select w.slug, t.version from tidegate.workflow_event_triggers t "
            "join tidegate.workflow_definitions w on w.id = t.workflow_definition_id order by 1"
        )
        return [(row[0], row[1]) for row in rows]

    await database.run(app.register)
    assert await versions() == [("audit", 1), ("fulfil", 1)]
    changed = Tidegate()

    @changed.workflow(on="order.created", where="event.payload.amount > 1000")
    async def fulfil(ctx: Any, id: int) -> None: ...

    await database.run(changed.register)
    assert await versions() == [("audit", 1), ("fulfil", 2)]


async def test_many_processes_register_the_same_workflows_at_once(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    await connection.execute("truncate tidegate.workflow_definitions cascade")
    ids = await asyncio.gather(*(database.run(app.register) for _ in range(10)))
    assert len({tuple(found) for found in ids}) == 1
    assert await connection.fetchval("select count(*) from tidegate.workflow_event_triggers") == 2


class _Counted:
    """A connection that writes down the statements it is given."""

    def __init__(self, connection: Any, statements: list[str]) -> None:
        self._connection = connection
        self._statements = statements

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._connection, name)

        def noted(query: str, *args: Any) -> Any:
            self._statements.append(query)
            return method(query, *args)

        return noted


async def _statements(database: Database, one: Dispatch) -> list[str]:
    """The statements of the transaction of one batch."""
    given: list[str] = []
    transaction = database.transaction

    @asynccontextmanager
    async def counted(wait_seconds: float = 5) -> AsyncIterator[Any]:
        async with transaction(wait_seconds) as connection:
            yield _Counted(connection, given)

    database.transaction = counted  # type: ignore[method-assign]
    try:
        await one.run_once()
    finally:
        database.transaction = transaction  # type: ignore[method-assign]
    return given


async def test_a_batch_that_nothing_holds_up_takes_two_statements(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    one = dispatcher(database)
    await publish(connection, id=1, amount=200)
    await one.run_once()  # it learns the triggers
    await publish(connection, id=2, amount=200)
    claim, launch = await _statements(database, one)
    assert "event_inbox" in claim
    assert "workflow_runs" in launch
    assert await connection.fetchval("select sum(launched) from tidegate.event_scheduler_trigger_metrics") == 4
    assert await connection.fetchval("select total from tidegate.event_scheduler_source_metrics") == 2


async def test_an_event_that_is_in_the_inbox_again_launches_nothing_twice(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    one = dispatcher(database)
    again = await publish(connection, id=1, amount=200)
    await one.run_once()
    await connection.execute("delete from tidegate.workflow_trigger_deliveries where id = "
                             "(select max(id::text)::uuid from tidegate.workflow_trigger_deliveries)")  # fmt: skip
    await connection.execute("delete from tidegate.workflow_runs where delivery_id not in "
                             "(select id from tidegate.workflow_trigger_deliveries)")  # fmt: skip
    await connection.execute("insert into tidegate.event_inbox (ingress_sequence, event_id, source) "
                             "select ingress_sequence, id, source from tidegate.workflow_events")  # fmt: skip
    fresh = await publish(connection, id=2, amount=200)
    await one.run_once()
    rows = await connection.fetch("select event_id, count(*) as n from tidegate.workflow_runs group by event_id")
    assert {str(row["event_id"]): row["n"] for row in rows} == {str(again): 2, str(fresh): 2}
    assert await connection.fetchval("select count(*) from tidegate.event_inbox") == 0
    assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 0


async def test_a_second_batch_is_called_for_only_where_it_helps(
    database: Database, connection: Connection, app: Tidegate
) -> None:
    called = 0

    def call() -> None:
        nonlocal called
        called += 1

    one = Dispatch(database, batch_size=2, after_launch=lambda: None, after_full=call)
    for n in range(7):
        await publish(connection, id=n, amount=200)
    found = []
    for _ in range(4):
        await one.run_once()
        found.append((called, one.allows_second_batch))
    assert found == [(0, False), (1, True), (2, True), (2, False)]  # at first it does not know the triggers
    await database.run(lambda c: sources.set_limit(c, "shop.api", RateLimit(limit=10, interval_ms=60_000), "bob"))
    for n in range(8):
        await publish(connection, id=n, amount=200)
    called, found = 0, []
    for _ in range(4):
        await one.run_once()
        found.append((called, one.allows_second_batch))
    # While the limit has room for two more batches, their order does not matter; from then on what it will hold back
    # goes by the order of arrival.
    assert found == [(1, True), (2, True), (3, True), (4, False)]
    for n in range(4):
        await publish(connection, id=n, amount=200)
    for _ in range(2):
        await one.run_once()
        assert (called, one.allows_second_batch) == (4, False)


async def test_a_trigger_with_a_limit_has_no_second_batch(database: Database, connection: Connection) -> None:
    """The first of the line are launched first, even when nothing stands in line yet."""
    app, called = Tidegate(), []

    @app.workflow(on="order.created", throttle="1/min")
    async def limited(ctx: Context) -> None: ...

    await database.run(app.register)
    one = Dispatch(database, batch_size=2, after_launch=lambda: None, after_full=lambda: called.append(1))
    for n in range(6):
        await publish(connection, id=n)
    for _ in range(2):
        await one.run_once()
        assert (called, one.has_more, one.allows_second_batch) == ([], True, False)


async def _pause_source(connection: Connection, _: Tidegate) -> None:
    await locks.exclude_source(connection, "shop.api")
    await sources.pause(connection, "shop.api", until=None, duration_ms=None, reason=None, actor="bob")


async def _limit_all(connection: Connection, _: Tidegate) -> None:
    await locks.exclude_source(connection, "*")
    await sources.set_limit(connection, "*", RateLimit(limit=1, interval_ms=3_600_000), "bob")


async def _pause_triggers(connection: Connection, _: Tidegate) -> None:
    await locks.exclude_triggers(connection)
    for row in await connection.fetch("select id from tidegate.workflow_event_triggers"):
        await trigger_gates.pause(connection, row["id"], until=None, duration_ms=None, reason=None, actor="bob")


async def _disable_triggers(connection: Connection, _: Tidegate) -> None:
    await locks.exclude_triggers(connection)
    await connection.execute("update tidegate.workflow_event_triggers set status = 'disabled'")


@pytest.mark.parametrize("change", [_pause_source, _limit_all, _pause_triggers, _disable_triggers])
async def test_a_batch_that_waited_for_a_change_goes_by_it(
    database: Database, connection: Connection, app: Tidegate, change: Callable[[Connection, Tidegate], Awaitable[None]]
) -> None:
    """The statement that waits for the locks sees the tables as they were before; nothing may be decided by that."""
    one = dispatcher(database)
    await publish(connection, id=1, amount=200)
    assert (await one.run_once()).launched == 2
    await publish(connection, id=2, amount=200)
    await publish(connection, id=3, amount=200)
    async with database.transaction() as changing:
        await change(changing, app)
        deciding = asyncio.ensure_future(one.run_once())
        await asyncio.wait([deciding], timeout=0.2)
        assert not deciding.done()
    assert (await deciding).launched == (2 if change is _limit_all else 0)
    assert await connection.fetchval("select count(*) from tidegate.event_inbox") == 0
