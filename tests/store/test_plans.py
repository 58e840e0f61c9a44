"""The statements that every turn runs keep to their indexes, however much waits and however the plan is made.

Plans are judged without statistics (a fresh installation that fills up) and with them, for the given values and as the
generic plan that a long-lived connection settles on.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import asyncpg
import msgspec
import pytest

from tidegate.embedded import EmbeddedPostgres
from tidegate.model.ids import delivery_id
from tidegate.store import deliveries, events, idempotency, predictions, trigger_gates
from tidegate.store.db import TransientConflict
from tidegate.store.deliveries import Claim, Decided
from tidegate.store.events import ReceiptPlace
from tidegate.store.predictions import ReceiptSpan
from tidegate.store.sql import load
from tidegate.store.totals import BatchTotals

from .plans import MODES, STATISTICS, Recorder, Undone, explain, filled, rows_read

ROWS = 50_000
_events, _retries, _sources = load("events"), load("ingress_retries"), load("sources")

# The statement, its arguments, and the tables of which it may not read every row.
STATEMENTS: dict[str, tuple[str, tuple[Any, ...], set[str]]] = {
    "claim_inbox": (_events["claim_inbox"], (500,), {"event_inbox", "workflow_events"}),
    "due_sources": (_retries["due_sources"], (50,), {"event_ingress_retries"}),
    "take_due": (_retries["take_due"], ("s0", "now", 500, None), {"event_ingress_retries"}),
    "first_due": (_retries["first_due"], ("s0",), {"event_ingress_retries"}),
    "take_stale": (_retries["take_stale"], ("s0", 9, 0, 500), {"event_ingress_retries", "workflow_events"}),
    "next_due": (_retries["next_due"], (), {"event_ingress_retries"}),
    "keep_order": (_retries["keep_order"], ("s0", ROWS - 100, 2000), {"event_ingress_retries"}),
    "backlogs": (_sources["backlogs"], (["s0", "s1"],), {"event_ingress_retries"}),
}
TABLES = ("workflow_events", "event_inbox", "event_ingress_retries")
MOST_ROWS = 5_000


FILL = """
with stored as (
  insert into tidegate.workflow_events
    (id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id, metadata)
  select tidegate.uuid7(), 'tick', 's' || n % $1, now(), now(), n, '{}', 'c', '{}' from generate_series(1, $2::int) n
  returning id, source, ingress_sequence
), inboxed as (
  insert into tidegate.event_inbox (ingress_sequence, event_id, source) select ingress_sequence, id, source from stored
)
insert into tidegate.event_ingress_retries
  (event_id, source, ingress_sequence, retry_state, attempts, next_attempt_at, reason)
select id, source, ingress_sequence, 'scheduled', 1, now() + (ingress_sequence - 1000) * interval '1 minute',
       'rate_limit'
  from stored
"""


@pytest.fixture(scope="module", params=[1, 10_000], ids=["one source", "10000 sources"])
def filled_url(request: pytest.FixtureRequest, postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A database with 50,000 events that wait, in the inbox and in line at once, and without statistics."""
    yield from filled(f"plans_{request.param}", postgres, template, TABLES, [(FILL, (request.param, ROWS))])


@MODES
@STATISTICS
async def test_no_turn_reads_the_whole_backlog(filled_url: str, mode: str, has_statistics: bool) -> None:
    connection = await asyncpg.connect(filled_url)
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute(f"analyze {', '.join(f'tidegate.{table}' for table in TABLES)}")
            await connection.execute(f"set local plan_cache_mode = {mode}")
            for name, (text, given, tables) in STATEMENTS.items():
                arguments = [await connection.fetchval("select now()") if value == "now" else value for value in given]
                await check(connection, name, text, arguments, tables)
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()


async def check(connection: Any, name: str, text: str, arguments: Any, tables: set[str], most: int = MOST_ROWS) -> None:
    """The statement, run and undone, reads few rows of each of the tables."""
    for scan, rows in rows_read(await explain(connection, text, arguments), tables):
        assert rows <= most, f"{name} reads {rows:.0f} rows: {scan}"


# Deliveries ---------------------------------------------------------------------------------------------------------

DELIVERIES, RUNS, KEYS = {"workflow_trigger_deliveries"}, {"workflow_runs"}, {"trigger_idempotency_keys"}
TRIGGER_TABLES = ("workflow_events", "workflow_event_triggers", "event_scheduler_triggers", "event_scheduler_sources",
                  "workflow_trigger_deliveries", "workflow_runs", "trigger_idempotency_keys")  # fmt: skip


class Facts(NamedTuple):
    """What the statements are asked about: a trigger whose deliveries wait for a time or a source, one whose
    deliveries all wait for a slot, one that waits for nothing, some of the deliveries."""

    paced: uuid.UUID
    narrow: uuid.UUID
    definition: uuid.UUID
    event: uuid.UUID
    some: list[uuid.UUID]
    now: datetime


def decided(facts: Facts, **changes: Any) -> Decided:
    fields: dict[str, Any] = {
        "id": (own_id := delivery_id(facts.event, facts.paced)), "trigger_id": facts.paced, "event_id": facts.event,
        "trigger_version": 1, "status": "launched", "last_error": None, "run_id": own_id,
        "workflow_definition_id": facts.definition,
        "correlation_id": "c", "parameters": "{}", "concurrency_key": "",
    }  # fmt: skip
    return Decided(**fields | changes)


def waits(facts: Facts) -> Decided:
    return decided(facts, status="throttled", run_id=None, retry_state="scheduled", next_attempt_at=facts.now,
                   retry_attempts=1, reason="throttle", source="s0", ingress_sequence=1)  # fmt: skip


def settled(facts: Facts) -> list[Decided]:
    settled = {"trigger_id": facts.narrow, "retry_state": "completed"}
    return [decided(facts, id=one, run_id=one, **settled) for one in facts.some[:10]]


Call = Callable[[Any, Facts], Awaitable[Any]]
TRIGGER_STATEMENTS: dict[str, tuple[Call, set[str]]] = {
    "due_triggers": (lambda c, f: deliveries.due_triggers(c, 50), DELIVERIES),
    "list_due": (lambda c, f: deliveries.list_due(c, [f.paced, f.narrow], 250), DELIVERIES),
    "take": (lambda c, f: deliveries.take(c, f.some, f.now), DELIVERIES),
    "settle": (lambda c, f: deliveries.settle(c, settled(f), f.now), DELIVERIES | RUNS),
    "launch": (lambda c, f: deliveries.launch(c, [decided(f)], f.now), DELIVERIES | RUNS),
    "launch_unrestricted": (
        lambda c, f: deliveries.launch_unrestricted(
            c, [decided(f)], f.now, Claim("w", 1000, [f.definition], 10), BatchTotals(), 1, []
        ),
        DELIVERIES | RUNS | {"event_scheduler_triggers"},
    ),
    "hold": (lambda c, f: deliveries.hold(c, [waits(f)], f.now), DELIVERIES),
    "take_stale": (
        lambda c, f: deliveries.take_stale(c, f.narrow, plan_version=9, after=0, limit=500),
        DELIVERIES | {"workflow_events"},
    ),
    "next_due": (lambda c, f: deliveries.next_due_seconds(c), DELIVERIES),
    "release_sources": (lambda c, f: deliveries.release_sources(c, 500), DELIVERIES),
    "lock": (lambda c, f: trigger_gates.lock(c, always=[f.paced], others=[f.narrow]), {"event_scheduler_triggers"}),
    "lines": (lambda c, f: trigger_gates.lines(c, [f.paced]), DELIVERIES),
    "lines beside a line for slots": (lambda c, f: trigger_gates.lines(c, [f.narrow]), DELIVERIES),
    "slots": (lambda c, f: trigger_gates.slots(c, [(f.narrow, ""), (f.paced, "")]), DELIVERIES | RUNS),
    "next_in_line": (lambda c, f: trigger_gates.next_in_line(c, {(f.narrow, ""): 2}), DELIVERIES | RUNS),
    "wake": (lambda c, f: trigger_gates.wake(c, [(f.narrow, "")]), DELIVERIES | RUNS),
    "replan": (lambda c, f: trigger_gates.replan(c, f.narrow), DELIVERIES),
    "claim of keys": (lambda c, f: idempotency.claim(c, [(f.paced, "1"), (f.paced, "new")]), KEYS),
}
# Triggers in two halves: even ones have deliveries that wait for a time or for their source to be resumed, odd ones
# have deliveries that wait for a slot. Every event has also launched something: a run that has ended, and a key. The
# ids begin as that of their event.
FILL_TRIGGERS = """
with definition as (
  insert into tidegate.workflow_definitions (id, slug, kind, created_by, updated_by)
  values (tidegate.uuid7(), 'tick', 'python', 'test', 'test') returning id
), made as (
  insert into tidegate.workflow_event_triggers
    (id, workflow_definition_id, name, event_type, max_concurrency, throttle_count, throttle_window_ms,
     created_by, updated_by)
  select tidegate.uuid7(), definition.id, 't' || n, 'tick', case when n % 2 = 1 then 5 end,
         case when n % 2 = 0 then 10 end, case when n % 2 = 0 then 1000 end, 'test', 'test'
    from definition, generate_series(0, $1::int - 1) n
  returning id
)
insert into tidegate.event_scheduler_triggers (trigger_id) select id from made
"""
FILL_DELIVERIES = """
with numbered as (
  select t.id, substr(t.name, 2)::int as n, t.workflow_definition_id from tidegate.workflow_event_triggers t
), stored as (
  insert into tidegate.workflow_events
    (id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id, metadata)
  select tidegate.uuid7(), 'tick', 's' || n % 7, now(), now(), n, '{}', 'c', '{}' from generate_series(1, $2::int) n
  returning id, left(id::text, 18) || '-8' as story, source, ingress_sequence as n
), waiting as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, status, attempts, retry_state, next_attempt_at, retry_attempts, reason, source,
     concurrency_key, ingress_sequence)
  select (e.story || '001-' || lpad(to_hex(e.n), 12, '0'))::uuid, t.id, e.id, 'throttled', 1, 'scheduled',
         now() + (e.n - 1000) * interval '1 minute', 1,
         case when t.n % 2 = 1 then 'concurrency' when e.n % 4 = 0 then 'source_paused' else 'throttle' end,
         case when e.n % 4 = 0 then 'paused' else e.source end, case when t.n % 2 = 1 then '' end, e.n
    from stored e join numbered t on t.n = e.n % $1::int
), done as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, status, attempts, launched_at, workflow_run_id)
  select d.id, t.id, e.id, 'launched', 1, now(), d.id
    from stored e join numbered t on t.n = (e.n + 1) % $1::int,
         lateral (select (e.story || '002-' || lpad(to_hex(e.n), 12, '0'))::uuid as id) d
  returning id, event_id, trigger_id, workflow_run_id
), keys as (
  insert into tidegate.trigger_idempotency_keys (trigger_id, dedupe_key, run_id, expires_at)
  select t.id, e.n::text, gen_random_uuid(), now() + e.n * interval '1 minute' from stored e, numbered t where t.n = 0
)
insert into tidegate.workflow_runs
  (id, workflow_definition_id, delivery_id, event_id, trigger_id, concurrency_key, parameters, status, finished_at,
   next_attempt_at)
select d.workflow_run_id, t.workflow_definition_id, d.id, d.event_id, d.trigger_id, '', '{}',
       case when e.n < 5 then 'pending' else 'succeeded' end, case when e.n < 5 then null else now() end,
       case when e.n < 5 then now() end
  from done d join numbered t on t.id = d.trigger_id join stored e on e.id = d.event_id
"""
FILL_SOURCES = """
insert into tidegate.event_scheduler_sources (source, paused_at, paused_by, updated_by)
values ('paused', now(), 'test', 'test')
"""


@pytest.fixture(scope="module", params=[2, 1000], ids=["two triggers", "1000 triggers"])
def waiting_url(request: pytest.FixtureRequest, postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A database with 50,000 deliveries that wait, as many that were launched, and no statistics."""
    fill = [
        ("set session_replication_role = replica", ()),  # the rows fit each other; checking that takes most of the time
        (FILL_TRIGGERS, (request.param,)),
        (FILL_DELIVERIES, (request.param, ROWS)),
        (FILL_SOURCES, ()),
    ]
    yield from filled(f"plans_of_{request.param}_triggers", postgres, template, TRIGGER_TABLES, fill)


async def facts_of(connection: Any) -> Facts:
    triggers = await connection.fetch(
        "select id, workflow_definition_id from tidegate.workflow_event_triggers order by name limit 2"
    )
    some = await connection.fetch(
        "select id from tidegate.workflow_trigger_deliveries where retry_state = 'scheduled' order by id limit 500"
    )
    event = await connection.fetchval("select id from tidegate.workflow_events order by ingress_sequence limit 1")
    now = await connection.fetchval("select now()")
    return Facts(triggers[0][0], triggers[1][0], triggers[0][1], event, [row[0] for row in some], now)


async def check_all(url: str, names: Iterable[str], mode: str, has_statistics: bool) -> None:
    connection = await asyncpg.connect(url)
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute(f"analyze {', '.join(f'tidegate.{table}' for table in TRIGGER_TABLES)}")
            facts = await facts_of(connection)
            await connection.execute(f"set local plan_cache_mode = {mode}")
            for name in names:
                call, tables = TRIGGER_STATEMENTS[name]
                recorder = Recorder()
                with contextlib.suppress(TransientConflict):  # nobody answers whose a key is
                    await call(recorder, facts)
                for text, arguments in recorder.asked:
                    await check(connection, name, text, arguments, tables)
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()


@MODES
@STATISTICS
async def test_no_decision_reads_every_delivery(waiting_url: str, mode: str, has_statistics: bool) -> None:
    await check_all(waiting_url, TRIGGER_STATEMENTS, mode, has_statistics)


# Lists --------------------------------------------------------------------------------------------------------------

# A hundred events in each second since noon, in commits of ten.
FILL_BY_TIME = """
insert into tidegate.workflow_events
  (id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id, metadata)
select tidegate.uuid7(), 'tick', 's' || n % 7, now(), $1::timestamptz + n / 10 * interval '100 ms', n, '{}', 'c', '{}'
  from generate_series(1, $2::int) n
"""
NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
SPANS = {
    "the first minute": (None, NOON + timedelta(minutes=1)),
    "a second long ago": (NOON + timedelta(seconds=30), NOON + timedelta(seconds=31)),
    "before all": (None, NOON - timedelta(days=1)),
    "after all": (NOON + timedelta(days=1), None),
    "since the first minute": (NOON + timedelta(minutes=1), None),
    "everything": (NOON - timedelta(days=1), NOON + timedelta(days=1)),
}


@pytest.fixture(scope="module")
def events_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    yield from filled("plans_of_lists", postgres, template, ("workflow_events",), [(FILL_BY_TIME, (NOON, ROWS))])


@MODES
@pytest.mark.parametrize("span", SPANS)
async def test_events_of_a_span_of_time_are_found_by_an_index(events_url: str, span: str, mode: str) -> None:
    received_from, received_to = SPANS[span]
    places = [None, ReceiptPlace(NOON + timedelta(milliseconds=ROWS // 2 // 10 * 100), ROWS // 2)]
    connection = await asyncpg.connect(events_url)
    try:
        async with connection.transaction():
            await connection.execute("analyze tidegate.workflow_events")
            await connection.execute(f"set local plan_cache_mode = {mode}")
            for before in places:
                recorder = Recorder()
                await events.list_page(
                    recorder, received_from=received_from, received_to=received_to, before=before, limit=51
                )
                [(text, arguments)] = recorder.asked
                await check(connection, span, text, arguments, {"workflow_events"}, most=200)
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()


PREDICTIONS: dict[str, Callable[[Any, ReceiptSpan, int], Awaitable[Any]]] = {
    "of a type": lambda c, span, limit: predictions.of_type(c, "tick", span, limit),
    "of a source": lambda c, span, limit: predictions.of_source(c, "s3", span, limit),
    "of a rare type": lambda c, span, limit: predictions.of_type(c, "tock", span, limit),
    "of all": predictions.of_all,
}


@MODES
@STATISTICS
@pytest.mark.parametrize("span", [name for name, (first, last) in SPANS.items() if first and last])
async def test_predictions_read_no_more_events_than_they_may(
    events_url: str, span: str, mode: str, has_statistics: bool
) -> None:
    first, last = SPANS[span]
    assert first and last
    connection = await asyncpg.connect(events_url)
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute("analyze tidegate.workflow_events")
            await connection.execute(f"set local plan_cache_mode = {mode}")
            for name, call in PREDICTIONS.items():
                recorder = Recorder()
                await call(recorder, ReceiptSpan(first, last), 50)
                [(text, arguments)] = recorder.asked
                await check(connection, f"{name}, {span}", text, arguments, {"workflow_events"}, most=60)
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()


async def test_a_prediction_reads_the_events_of_its_span(events_url: str) -> None:
    connection = await asyncpg.connect(events_url)
    first, last = SPANS["a second long ago"]
    assert first and last
    try:
        span = ReceiptSpan(first, last)
        of_type, of_all = (
            await predictions.of_type(connection, "tick", span, 100),
            await predictions.of_all(connection, span, 60),
        )
        of_source = await predictions.of_source(connection, "s3", span, 100)
    finally:
        await connection.close()
    assert [one.ingress_sequence for one in of_type.found] == list(range(3099, 2999, -1)) and not of_type.is_cut
    assert [one.ingress_sequence for one in of_all.found] == list(range(3099, 3039, -1)) and of_all.is_cut
    assert [one.ingress_sequence for one in of_source.found] == [n for n in range(3099, 2999, -1) if n % 7 == 3]


async def test_pages_of_a_span_of_time_have_every_event_once(events_url: str) -> None:
    connection = await asyncpg.connect(events_url)
    await connection.set_type_codec("jsonb", schema="pg_catalog", encoder=str, decoder=msgspec.json.decode)
    try:
        seen: list[int] = []
        before: ReceiptPlace | None = None
        received_from, received_to = SPANS["a second long ago"]
        while page := await events.list_page(
            connection, received_from=received_from, received_to=received_to, before=before, limit=7
        ):
            seen += [event.ingress_sequence for event in page]
            before = ReceiptPlace(page[-1].received_at, page[-1].ingress_sequence)
    finally:
        await connection.close()
    assert seen == list(range(3099, 2999, -1))
