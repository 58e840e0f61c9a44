"""What one trigger may do on one event: whatever exceeds it is that trigger's failure, and delays nobody else's."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.conftest import eventually
from tests.flow.test_dispatch import publish
from tests.flow.trigger_worker import BREAKER, TriggerWorker, make_trigger, statuses
from tests.processes import worker as worker_process
from tidegate import failpoints
from tidegate.flow import control
from tidegate.flow.decide import time_slice
from tidegate.flow.look.explain import explain
from tidegate.flow.look.health import snapshot
from tidegate.model.predicate import Predicate
from tidegate.store.db import Connection, Database

Effects = Callable[[], Awaitable[list[tuple[Any, str]]]]

SLOW = Predicate(path="$.payload.text", operator="regex", value="error.{0,1000}timeout")
TEXT = "error " * 40_000

# What asks for too much of an event with a long text and many items, and the field that says so.
POISONS: dict[str, tuple[dict[str, Any], str]] = {
    "pattern": ({"predicates": [SLOW]}, "predicates[0]"),
    "search in a filter": (
        {"predicates": [Predicate(path="$.payload[?search(@, '(a|b)*a(a|b){30}')]", operator="exists")]},
        "predicates[0]",
    ),
    "path": ({"predicates": [Predicate(path="$..*..*..*", operator="equals", value="x")]}, "predicates[0]"),
    "predicates together": (
        {"predicates": [Predicate(path="$.payload.text", operator="regex", value="error.*z|x")] * 20},
        "predicates[",
    ),
    "where": ({"where": "event.payload.items.all(i, event.payload.items.all(j, i != -j))"}, "where"),
    "matches() in where": ({"where": "event.payload.text.matches('(a|b)*a(a|b){30}')"}, "where"),
    "template": (
        {"parameter_template": {"a": ["{% for i in event.payload.items %}{{ i | plus: 1 }}{% endfor %}"] * 30}},
        "parameter_template.a[",
    ),
    "key": (
        {"idempotency_key": "{% for i in event.payload.items %}" * 2 + "{% endfor %}" * 2},
        "idempotency_key",
    ),
}


async def poisoned(connection: Connection, **more: Any) -> str:
    return await publish(connection, "tick", "shop", text=TEXT, items=list(range(1500)), **more)


@pytest.mark.parametrize("name", POISONS)
async def test_it_is_the_triggers_failure_and_nobody_elses(
    database: Database, connection: Connection, clock: Clock, name: str
) -> None:
    fields, field = POISONS[name]
    bad = await make_trigger(database, "bad", **fields)
    good = await make_trigger(database, "good")
    worker = TriggerWorker(database)
    events = [await poisoned(connection) for _ in range(BREAKER.threshold)]
    await worker.turn()
    rows = await connection.fetch("select * from tidegate.workflow_trigger_deliveries where trigger_id = $1", bad)
    assert {(row["status"], row["reason"]) for row in rows} == {("failed", "too_much_work")}
    assert all(row["last_error"].startswith(field) and "over the work limit" in row["last_error"] for row in rows)
    launched = await connection.fetchval(
        "select count(*) from tidegate.workflow_trigger_deliveries where trigger_id = $1 and status = 'launched'", good
    )
    assert launched == len(events)
    story = await explain(connection, events[0])
    assert any(one.decision == "failed" and field in (one.reason or "") for one in story.decisions), story
    # Its breaker has heard of it, and health names it.
    assert "bad/main" in str([one.message for one in (await snapshot(connection)).causes])


async def test_it_is_no_failure_of_the_source(database: Database, connection: Connection, clock: Clock) -> None:
    """Or a trigger that asks for too much would hold up all other triggers of the source."""
    await make_trigger(database, "bad", predicates=[SLOW])
    for _ in range(3 * BREAKER.threshold):
        await poisoned(connection)
    await TriggerWorker(database).turn()
    states = await connection.fetch("select breaker_state from tidegate.event_scheduler_sources")
    assert {row[0] for row in states} <= {"closed"}


async def test_a_delivery_that_waited_fails_alone(database: Database, connection: Connection, clock: Clock) -> None:
    bad = await make_trigger(database, "bad", predicates=[SLOW], throttle_count=1, throttle_window_ms=1000)
    await control.pause_trigger(database, bad, actor="ann")
    worker = TriggerWorker(database)
    await poisoned(connection)
    assert await publish(connection, "tick", "shop", text="error: timeout")
    await worker.turn()
    assert await statuses(connection) == {"paused": 2}
    await control.resume_trigger(database, bad, "ann")
    for _ in range(5):
        await worker.turn()
        await clock.advance(2000)
    assert await statuses(connection) == {"failed": 1, "launched": 1}
    assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 1


async def test_matching_lets_others_go_on(database: Database, connection: Connection, clock: Clock) -> None:
    """Triggers that are slow, but within the work limit, are matched a slice at a time."""
    await make_trigger(
        database, "slow", parameter_template={"a": "{% for i in event.payload.items %}{{ i | plus: 1 }}{% endfor %}"}
    )
    worker = TriggerWorker(database)
    for _ in range(100):
        await publish(connection, "tick", "shop", items=list(range(1500)))
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    task = asyncio.create_task(others())
    while (await worker.dispatch.run_once()).events:
        pass
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert await statuses(connection) == {"launched": 100}
    assert turns > 10, "100 events of 5 ms each are many slices"


@pytest.mark.parametrize("fields", [{}, {"throttle_count": 1000, "throttle_window_ms": 60_000}])
async def test_a_batch_that_takes_too_long_is_decided_in_smaller_ones(
    database: Database, connection: Connection, clock: Clock, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(time_slice, "SLICE_SECONDS", 0.0)
    monkeypatch.setattr(time_slice, "MAX_WORK_SECONDS", 0.0)
    trigger_id = await make_trigger(database, **fields)
    if fields:
        await control.pause_trigger(database, trigger_id, actor="ann")
    worker = TriggerWorker(database)
    for n in range(20):
        await publish(connection, "tick", "shop", n=n)
    while (await worker.dispatch.run_once()).events:
        pass
    if fields:
        await control.resume_trigger(database, trigger_id, "ann")
    for _ in range(50):
        await worker.turn()
        await clock.advance(60)
        if await statuses(connection) == {"launched": 20}:
            break
    assert await statuses(connection) == {"launched": 20}
    assert await connection.fetchval("select count(*) from tidegate.dead_letters") == 0


async def test_triggers_are_read_again_after_a_batch_that_failed(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await make_trigger(database)
    worker = TriggerWorker(database)
    await publish(connection, "tick", "shop")
    await worker.dispatch.run_once()
    matcher = worker.dispatch._batch._matcher
    assert matcher.known[1] >= 0
    await publish(connection, "tick", "shop")
    failpoints.arm("dispatch.after_match=raise,dispatch.after_gate=raise@2")
    seen: list[int] = []
    forget = matcher.forget

    def forgets() -> None:
        forget()
        seen.append(matcher.known[1])

    matcher.forget = forgets  # type: ignore[method-assign]
    await worker.dispatch.run_once()
    assert seen == [-1]


# Real worker processes ------------------------------------------------------------------------------------------------

APP = """
import os
import asyncpg
from tidegate import Context, Tidegate

app = Tidegate()
pool = None

async def record(ctx, what):
    global pool
    if pool is None:
        pool = asyncpg.create_pool(os.environ["TIDEGATE_DATABASE_URL"], min_size=0, max_size=4)
    await (await pool).execute("insert into effects (run_id, what) values ($1, $2)", ctx.run_id, what)

@app.workflow(on="tick", params={"n": "{{ event.payload.n | default: 0 }}"})
async def healthy(ctx: Context, n: int) -> None:
    await record(ctx, "healthy")

@app.workflow(on="poison")
async def beside(ctx: Context) -> None:
    await record(ctx, "beside")

@app.workflow(on="nothing")
async def bad(ctx: Context) -> None:
    await record(ctx, "bad")
"""


@pytest.fixture
def app_file(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "beside.py"
    file.write_text(APP)
    yield file


async def poison_all(database: Database) -> list[uuid.UUID]:
    """A trigger of each kind of poison, for events of type `poison`."""
    made = []
    for name, (fields, _) in POISONS.items():
        given = {key: value for key, value in fields.items() if key != "predicates"}
        if "predicates" in fields:
            given["predicates"] = [
                {"path": p.path, "operator": p.operator, "value": p.value} for p in fields["predicates"]
            ]
        given |= {"name": name.replace(" ", "-"), "event_type": "poison"}
        made.append((await control.create_trigger(database, "bad", given, "ann")).id)
    return made


async def test_poison_does_not_delay_the_others(
    database_url: str, database: Database, connection: Connection, effects: Effects, app_file: Path
) -> None:
    async def round_of(count: int, poisons: int) -> float:
        """How long after their receipt the healthy events had their effect, in seconds, for the slowest."""
        done = await connection.fetchval("select count(*) from effects where what = 'healthy'")
        began = asyncio.get_running_loop().time()
        for first in range(0, count, 50):
            for _ in range(poisons):
                payload = {"text": TEXT, "items": list(range(1500))}
                await connection.execute("select tidegate.publish('poison', 'shop', $1)", payload)
            await connection.execute("select tidegate.publish('tick', 'shop') from generate_series(1, 50)")
            await eventually(database, "select count(*) >= $1 from effects where what = 'healthy'", done + first + 50)
        return asyncio.get_running_loop().time() - began

    with worker_process(database_url, app_file):
        await poison_all(database)
        await round_of(100, 0)  # whatever is slow only once
        alone = min([await round_of(200, 0) for _ in range(2)])
        beside = min([await round_of(200, 3) for _ in range(2)])
        await eventually(database, "select count(*) = 24 from effects where what = 'beside'")
    # 8 poisoned triggers on every 16th event, each of which is 250 KB: without a limit one of them takes seconds.
    assert beside < 10 * alone, (beside, alone)
    found = await connection.fetch(
        "select distinct d.status, d.reason from tidegate.workflow_trigger_deliveries d "
        "join tidegate.workflow_event_triggers t on t.id = d.trigger_id "
        "join tidegate.workflow_definitions w on w.id = t.workflow_definition_id where w.slug = 'bad'"
    )
    assert {tuple(row) for row in found} <= {("failed", "too_much_work"), ("paused", "breaker_open")}
    assert "bad" not in {what for _, what in await effects()}


async def test_a_poisoned_trigger_that_is_deleted_is_gone_at_once(
    database_url: str, database: Database, connection: Connection, effects: Effects, app_file: Path
) -> None:
    with worker_process(database_url, app_file):
        poisons = await poison_all(database)
        payload = {"text": TEXT, "items": list(range(1500))}
        await connection.execute("select tidegate.publish('poison', 'shop', $1)", payload)
        await eventually(database, "select count(*) = 1 from effects where what = 'beside'")
        before = await connection.fetchval("select count(*) from tidegate.workflow_trigger_deliveries")
        for poison in poisons:
            await control.delete_trigger(database, poison, "ann")
        for _ in range(5):
            await connection.execute("select tidegate.publish('poison', 'shop', $1)", payload)
        await eventually(database, "select count(*) = 6 from effects where what = 'beside'")
    assert await connection.fetchval("select count(*) from tidegate.workflow_trigger_deliveries") <= before + 5
