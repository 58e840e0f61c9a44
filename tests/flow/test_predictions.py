"""Predictions are what then happens: for an edited trigger, a throttle and a source's limit, on a real database."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Clock
from tests.flow.trigger_worker import TriggerWorker, make_trigger
from tidegate.errors import Overloaded
from tidegate.flow import control
from tidegate.flow.predict import source_limit, trigger_edit
from tidegate.flow.predict.trigger_edit import TriggerForecast
from tidegate.flow.predict.turn import PredictionTurn
from tidegate.model import trigger_change
from tidegate.model.ids import TriggerId
from tidegate.model.source import RateLimit
from tidegate.model.trigger import CompiledTrigger
from tidegate.model.trigger_change import SPEC_FIELDS
from tidegate.store import triggers
from tidegate.store.db import Connection, Database
from tidegate.store.predictions import ReceiptSpan

HOUR_MS = 3_600_000
# A large text and a pattern that looks at all of it: over the work limit.
LONG = "a" * 60_000
PAYLOADS: list[dict[str, Any]] = [
    {"n": 1}, {"n": 5}, {"n": 9}, {"n": 9, "to": "b"}, {"n": "text"}, {}, {"n": 9, "to": LONG}, {"n": 20, "to": "c"},
]  # fmt: skip
TABLES = ("workflow_events", "event_inbox", "event_ingress_retries", "workflow_trigger_deliveries", "workflow_runs",
          "event_decisions", "audit_log", "workflow_event_triggers", "event_scheduler_sources")  # fmt: skip


async def publish(
    connection: Connection, payload: dict[str, Any], type: str = "tick", source: str = "shop"
) -> uuid.UUID:
    text = json.dumps(payload)
    return uuid.UUID(await connection.fetchval("select tidegate.publish($1, $2, $3::text::jsonb)", type, source, text))


async def forecast(
    database: Database, trigger_id: uuid.UUID, clock: Clock, change: dict[str, Any] | None = None, *, limit: int = 1000,
    **options: Any,
) -> TriggerForecast:  # fmt: skip
    async with database.connection() as connection:
        current = await triggers.get(connection, TriggerId(trigger_id))
    assert current is not None
    edited = None
    if change is not None:
        new = trigger_change.changed(current, current.status, change, current.workflow, ["*"])
        fields = {name: getattr(new.spec, name) for name in SPEC_FIELDS}
        edited = CompiledTrigger(type(current)(**_fields(current) | fields | {"status": new.status}), ["*"])
    span = ReceiptSpan(clock.now - timedelta(days=7), clock.now + timedelta(seconds=1))
    return await trigger_edit.predict(database, CompiledTrigger(current, ["*"]), edited, span, limit, **options)


def _fields(trigger: Any) -> dict[str, Any]:
    return {name: getattr(trigger, name) for name in trigger.__struct_fields__}


async def decided(connection: Connection, trigger_id: uuid.UUID, ids: list[uuid.UUID]) -> dict[uuid.UUID, str]:
    rows = await connection.fetch(
        "select event_id, status from tidegate.workflow_trigger_deliveries d "
        "where d.trigger_id = $1 and d.event_id = any ($2)",
        trigger_id, ids,
    )  # fmt: skip
    return dict(rows)


async def rows_of_all(connection: Connection) -> list[int]:
    return [await connection.fetchval(f"select count(*) from tidegate.{table}") for table in TABLES]


EDITS: dict[str, dict[str, Any]] = {
    "a wider predicate": {"predicates": [{"path": "$.payload.n", "operator": "gt", "value": 0}]},
    "a narrower one": {"predicates": [{"path": "$.payload.n", "operator": "gt", "value": 10}]},
    "an expression": {"predicates": None, "where": "event.payload.n > 5"},
    "too much work": {"where": "event.payload.to.matches('(a|b|ab)*c(a|b)*(a|ba)*d')"},
    "a template that fails": {"parameter_template": {"to": "{{ event.payload.to }}"}},
    "another type": {"event_type": "tock"},
    "a pattern": {"event_type": "t*", "event_source": "shop*"},
    "another source": {"event_source": "store"},
    "a key": {"idempotency_key": "{{ event.payload.n }}", "parameter_template": None},
    "disabled": {"status": "disabled"},
}


@pytest.mark.parametrize("name", EDITS)
async def test_an_edit_does_what_was_predicted(
    database: Database, connection: Connection, clock: Clock, name: str
) -> None:
    predicate = {"path": "$.payload.n", "operator": "gte", "value": 5}
    trigger_id = await make_trigger(database)
    await control.update_trigger(database, trigger_id, {"predicates": [predicate]}, "test")
    worker = TriggerWorker(database)

    async def publish_all() -> list[uuid.UUID]:
        ids = [await publish(connection, one) for one in PAYLOADS]
        ids += [await publish(connection, one, "tock") for one in PAYLOADS[:3]]
        ids += [await publish(connection, one, source="store") for one in PAYLOADS[:3]]
        await worker.turn()
        return ids

    before = await publish_all()
    done = await decided(connection, trigger_id, before)
    rows = await rows_of_all(connection)
    found = await forecast(database, trigger_id, clock, EDITS[name])
    assert await rows_of_all(connection) == rows, "a prediction writes nothing"
    await control.update_trigger(database, trigger_id, EDITS[name], "test")
    after = await publish_all()
    really = await decided(connection, trigger_id, after)
    same = dict(zip(before, after, strict=True))

    by_status = [list(really.values()).count(status) for status in ("launched", "skipped", "failed")]
    assert [found.would_launch, found.would_skip, found.would_fail] == by_status
    new, gone = [e for e in before if e not in done and same[e] in really], [e for e in done if same[e] not in really]
    assert (found.newly_matched.count, found.no_longer_matched.count) == (len(new), len(gone))
    assert set(found.newly_matched.event_ids) <= set(new) and set(found.no_longer_matched.event_ids) <= set(gone)
    assert found.events == found.would_launch + found.would_skip + found.would_fail + found.filtered
    assert sum(one.count for one in found.filters) == found.filtered
    assert sum(one.count for one in found.errors) == found.would_fail
    assert sum(found.deliveries.values()) == len(done) and (found.cut, found.is_edited) == (None, True)
    assert new or gone or found.would_skip or found.would_fail, "the edit changes something"


async def test_without_an_edit_it_is_compared_with_what_was_delivered(
    database: Database, connection: Connection, clock: Clock
) -> None:
    trigger_id, worker = await make_trigger(database), TriggerWorker(database)
    first = [await publish(connection, {"n": n}) for n in range(3)]
    await worker.turn()
    same = await forecast(database, trigger_id, clock)
    assert (same.would_launch, same.newly_matched.count, same.no_longer_matched.count) == (3, 0, 0)
    assert (same.compared_with, same.deliveries) == ("deliveries", {"launched": 3})

    change = {"predicates": [{"path": "$.payload.n", "operator": "gt", "value": 1}]}
    await control.update_trigger(database, trigger_id, change, "test")
    undecided = await publish(connection, {"n": 9})
    found = await forecast(database, trigger_id, clock)
    assert (found.would_launch, found.filtered) == (2, 2)
    assert found.newly_matched.count == 0, f"{undecided} is still to be decided"
    assert found.no_longer_matched.event_ids == [first[1], first[0]]
    [check] = found.filters
    assert (check.check, check.count, check.event_id) == ("predicates[0]", 2, first[1]) and "1" in check.reason


async def test_what_is_cut_is_said(database: Database, connection: Connection, clock: Clock) -> None:
    trigger_id = await make_trigger(database)
    for n in range(250):
        await publish(connection, {"n": n})
        await clock.advance(1000)
    whole = await forecast(database, trigger_id, clock)
    assert (whole.events, whole.cut, whole.received_from) == (250, None, clock.now - timedelta(days=7))
    few = await forecast(database, trigger_id, clock, limit=10)
    assert (few.events, few.cut, few.received_from) == (10, "limit", clock.now - timedelta(seconds=10))
    none_left = await forecast(database, trigger_id, clock, most_seconds=0)
    assert none_left.cut == "time" and 1 <= none_left.events <= 100, "one page at most"
    assert none_left.received_from == clock.now - timedelta(seconds=none_left.events), "the newest"


async def test_the_event_loop_stays_free(database: Database, connection: Connection, clock: Clock) -> None:
    """Each event takes all the work that a trigger may use; in between, others have their turn."""
    slow = "event.payload.to.matches('(a|b|ab)*c(a|b)*(a|ba)*')"
    trigger_id = await make_trigger(database, where=slow)
    for _ in range(20):
        await publish(connection, {"to": "a" * 300})
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    found = await forecast(database, trigger_id, clock)
    task.cancel()
    assert found.events == 20 and turns > 3


async def test_predictions_take_turns() -> None:
    turn = PredictionTurn(wait_seconds=0.01)
    async with turn.take():
        with pytest.raises(Overloaded):
            async with turn.take():
                pass
    async with turn.take():
        pass


# Limits -------------------------------------------------------------------------------------------------------------

LIMITS = [
    RateLimit(limit=3, interval_ms=1000),
    RateLimit(limit=20, interval_ms=2000),
    RateLimit(limit=1, interval_ms=700),
    RateLimit(limit=2, interval_ms=1000, pause_ms=3000),
    RateLimit(limit=1000, interval_ms=1000),
]


def arrivals(seed: int) -> list[tuple[int, int]]:
    """When events arrive, in ms, and how many at once: alone, in bursts, after silences."""
    rng = random.Random(seed)
    at, found = 0, []
    for _ in range(25):
        at += rng.choice([1, 7, 40, 100, 333, 900, 4000])
        found.append((at, rng.choice([1, 1, 1, 2, 9])))
    return found


async def live(connection: Connection, clock: Clock, worker: TriggerWorker, seed: int, sources: Sequence[str]) -> None:
    """The same arrivals at all sources. Each is decided as it comes, and what waits at its time, as workers do."""
    began = clock.now
    for after_ms, count in arrivals(seed):
        await wait_until(connection, clock, worker, began + timedelta(milliseconds=after_ms))
        for source in sources:
            for _ in range(count):
                await publish(connection, {}, source=source)
        await worker.turn()
    await wait_until(connection, clock, worker, None)
    await clock.advance(1)


NEXT = """
select least((select min(next_attempt_at) from tidegate.event_ingress_retries where retry_state = 'scheduled'),
             (select min(next_attempt_at) from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled'))
"""


async def wait_until(connection: Connection, clock: Clock, worker: TriggerWorker, until: datetime | None) -> None:
    while (at := await connection.fetchval(NEXT)) is not None and (until is None or at <= until):
        # What is refused at its slot within the grace time stays due; a millisecond later there is room.
        await clock.advance(max((at - clock.now) / timedelta(milliseconds=1), 1 if at <= clock.now else 0))
        await worker.turn()
    if until is not None:
        await clock.advance((until - clock.now) / timedelta(milliseconds=1))


WAITED = """
select d.launched_at - e.received_at
  from tidegate.workflow_events e join tidegate.workflow_trigger_deliveries d on d.event_id = e.id
 where e.source = $1 and d.trigger_id = $2
"""


@pytest.mark.parametrize("number", range(len(LIMITS)))
async def test_a_limit_holds_what_was_predicted(
    database: Database, connection: Connection, clock: Clock, number: int
) -> None:
    limit, trigger_id, worker = LIMITS[number], await make_trigger(database), TriggerWorker(database)
    await control.set_limit(database, "limited", limit, "test")
    await live(connection, clock, worker, number, ("free", "limited"))
    found = await source_limit.predict(database, "free", limit)
    held = await connection.fetchval("select count(*) from tidegate.event_ingress_retries where source = 'limited'")
    waits: list[timedelta] = [row[0] for row in await connection.fetch(WAITED, "limited", trigger_id)]
    assert found.events == len(waits) == sum(count for _, count in arrivals(number)) and not found.is_cut
    assert found.predicted.held == held and (found.current.held, found.waiting, found.drained_at) == (0, 0, None)
    assert found.predicted.longest_wait_ms == pytest.approx(max(waits) / timedelta(milliseconds=1), abs=5)
    assert (await source_limit.predict(database, "limited", None)).current.held == held


@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_throttle_delays_what_was_predicted(
    database: Database, connection: Connection, clock: Clock, number: int
) -> None:
    limit, worker = LIMITS[number], TriggerWorker(database)
    free = await make_trigger(database)
    edit = {"throttle_count": limit.limit, "throttle_window_ms": limit.interval_ms}
    limited = await make_trigger(database, "limited", **edit)
    await live(connection, clock, worker, number, ("shop",))
    found = (await forecast(database, free, clock, edit)).throttle
    attempts = "select count(*) from tidegate.workflow_trigger_deliveries where trigger_id = $1 and retry_attempts > 0"
    assert found is not None and found.held == await connection.fetchval(attempts, limited)
    waits = [row[0] for row in await connection.fetch(WAITED, "shop", limited)]
    assert found.longest_wait_ms == pytest.approx(max(waits) / timedelta(milliseconds=1), abs=5)


@pytest.mark.parametrize("before", [None, RateLimit(limit=1, interval_ms=HOUR_MS)], ids=["paused", "limited"])
@pytest.mark.parametrize("limit", [*LIMITS, None])
async def test_the_backlog_drains_when_it_was_predicted(
    database: Database, connection: Connection, clock: Clock, before: RateLimit | None, limit: RateLimit | None
) -> None:
    await make_trigger(database)
    worker = TriggerWorker(database)
    if before is None:
        await control.pause(database, "shop", duration_ms=HOUR_MS, reason="r", actor="test")
    else:
        await control.set_limit(database, "shop", before, "test")
    for _ in range(30):
        await publish(connection, {})
    await worker.turn()
    await clock.advance(1234)
    found = await source_limit.predict(database, "shop", limit)
    assert found.waiting == (30 if before is None else 29)
    await control.set_limit(database, "shop", limit, "test")
    await worker.replan.run_once()
    last: datetime = await connection.fetchval("select max(next_attempt_at) from tidegate.event_ingress_retries")
    assert found.drained_at == last


async def test_a_backlog_behind_a_pause_without_an_end_has_no_time(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await control.pause(database, "shop", reason="r", actor="test")
    await publish(connection, {})
    await TriggerWorker(database).turn()
    found = await source_limit.predict(database, "shop", RateLimit(limit=1, interval_ms=1000))
    assert (found.waiting, found.drained_at) == (1, None)


async def test_only_the_newest_arrivals_are_looked_at(database: Database, connection: Connection, clock: Clock) -> None:
    for _ in range(8):
        await publish(connection, {})
        await clock.advance(1000)
    found = await source_limit.predict(database, "shop", RateLimit(limit=1, interval_ms=HOUR_MS), most=5)
    assert (found.events, found.is_cut, found.predicted.held) == (5, True, 4)
    assert found.received_from == clock.now - timedelta(seconds=5)
