"""The fast path of dispatch (`Batch.launch`), by itself or after the sources' gates, and its general path
(`Batch.deliver`): one table of batches through all, which must leave the same rows and return the same outcomes."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest

from tests.conftest import Clock
from tests.flow.trigger_worker import make_trigger
from tidegate.flow import control
from tidegate.flow.decide.batch import MAX_FILTERED, Batch, Delivered
from tidegate.flow.decide.dispatch import Dispatch, DispatchCounts
from tidegate.model.budget import Budget
from tidegate.model.source import SOURCE_BREAKER, RateLimit
from tidegate.store import sources, triggers
from tidegate.store.db import Connection, Database
from tidegate.store.deliveries import NOBODY, Claim

# Everything that a decision may write; the last of them are empty after either path.
TABLES = (
    "workflow_trigger_deliveries",
    "workflow_runs",
    "event_decisions",
    "event_scheduler_source_metrics",
    "event_scheduler_trigger_metrics",
    "event_scheduler_sources",
    "event_scheduler_triggers",
    "event_ingress_retries",
    "trigger_idempotency_keys",
    "budget_keys",
    "budget_holders",
    "trigger_windows",
    "trigger_rates",
    "dead_letters",
    "event_inbox",
)


FAST, GATED, GENERAL = "fast", "gated", "general"


class Case(NamedTuple):
    """Triggers by workflow, and the events of a batch: (type, source, payload) with more fields of `publish`."""

    triggers: dict[str, dict[str, Any]]
    events: list[tuple[str, str, dict[str, Any], dict[str, Any]]]
    claims: int = 0


def event(kind: str = "tick", source: str = "shop", payload: Any = None, **fields: Any) -> Any:
    return kind, source, payload or {}, fields


OVER_100: dict[str, Any] = {"where": "event.payload.n > 100"}

CASES = {
    "one event": Case({"a": {}}, [event(payload={"n": 7})]),
    "many events": Case({"a": {}}, [event(payload={"n": n}) for n in range(30)]),
    "several triggers": Case({"a": {}, "b": {}, "c": {"event_type": "*"}}, [event(), event("other"), event()]),
    "several sources": Case({"a": {}}, [event(source=name) for name in ("c", "a", "b", "a")]),
    "no trigger": Case({"a": {}}, [event("nobody.cares")]),
    "no trigger at all": Case({}, [event()]),
    "filtered": Case({"a": OVER_100}, [event(payload={"n": 7}), event(payload={"n": 101})]),
    "all filtered": Case({"a": OVER_100, "b": OVER_100}, [event(payload={"n": n}) for n in range(3)]),
    "some filtered": Case({"a": OVER_100, "b": {}}, [event(payload={"n": n}) for n in (7, 200)]),
    "more filtered than are recorded": Case(
        {f"w{n}": OVER_100 for n in range(MAX_FILTERED + 3)}, [event(payload={"n": 1})]
    ),
    "by source": Case({"a": {"event_source": "shop.*"}}, [event(source="shop.api"), event(source="crm")]),
    "parameters": Case(
        {"a": {"parameter_template": {"order": "{{ event.payload.n }}", "from": "{{ event.source }}"}}, "b": {}},
        [event(payload={"n": 7, "text": "ü\n\"'"}), event(payload={"n": 8})],
    ),
    "correlation": Case({"a": {}}, [event(correlation_id="order-7"), event()]),
    "time to live": Case({"a": {}}, [event(ttl_ms=60_000)]),
    "all claimed": Case({"a": {}, "b": {}}, [event(payload={"n": n}) for n in range(3)], claims=100),
    "some claimed": Case({"a": {}, "b": {}}, [event(payload={"n": n}) for n in range(3)], claims=4),
}


BUDGETS = {
    "shared": Budget("shared", "1000/min", cost="event.payload.n"),
    "keyed": Budget("keyed", "500/min", concurrency=30, key="{{ event.source }}"),
}
MANY = [event(source=f"s{n % 3}", payload={"n": n}) for n in range(30)]

# Limits of triggers that have room for the whole batch.
LIMITED = {
    "throttle": Case({"a": {"throttle_count": 100, "throttle_window_ms": 60_000}}, MANY),
    "throttle, exactly": Case({"a": {"throttle_count": 30, "throttle_window_ms": 60_000}, "b": {}}, MANY, claims=7),
    "slots": Case({"a": {"max_concurrency": 30}}, MANY, claims=100),
    "slots by key": Case({"a": {"max_concurrency": 10, "concurrency_key": "{{ event.source }}"}, "b": {}}, MANY),
    "budgets": Case({"a": {"budgets": ["keyed", "shared"]}, "b": {"budgets": ["shared"]}, "c": {}}, MANY, claims=5),
    "slots while executing": Case({"a": {"max_concurrency": 30, "holds": "executing"}}, MANY, claims=100),
    "budgets while executing": Case({"a": {"budgets": ["keyed"], "holds": "executing"}, "b": {}}, MANY, claims=5),
    "several limits": Case(
        {"a": {"throttle_count": 99, "throttle_window_ms": 1000, "max_concurrency": 50, "budgets": ["shared"]}}, MANY
    ),
    "filtered": Case({"a": OVER_100 | {"throttle_count": 1, "throttle_window_ms": 1000}}, MANY),
}
# The same with a limit that is reached within the batch, or something that only the general path decides.
NOT_WHOLE = {
    "throttle": Case({"a": {"throttle_count": 29, "throttle_window_ms": 60_000}}, MANY),
    "slots": Case({"a": {"max_concurrency": 29}}, MANY),
    "slots by key": Case({"a": {"max_concurrency": 9, "concurrency_key": "{{ event.source }}"}}, MANY),
    "rate of a budget": Case({"a": {"budgets": ["shared"]}}, [event(payload={"n": 400}) for _ in range(3)]),
    "slots of a budget": Case({"a": {"budgets": ["keyed"]}}, [event() for _ in range(31)]),
    "one of two triggers": Case({"a": {"max_concurrency": 2}, "b": {}}, MANY),
    "idempotency keys": Case({"a": {"max_concurrency": 99, "idempotency_key": "{{ event.source }}"}}, MANY),
    "windows": Case({"a": {"collect": {"batch_size": 10, "batch_ms": 5000}}}, MANY),
    "skipped over a rate": Case({"a": {"skip_over_count": 40, "skip_over_window_ms": 60_000}}, MANY),
}


class Path(Batch):
    """A batch that records which path was taken and its result."""

    def __init__(self, claim: Claim, path: str) -> None:
        super().__init__(SOURCE_BREAKER, claim=lambda: claim)
        self.path = path
        self.taken: list[tuple[str, Delivered]] = []

    async def launch(
        self, connection: Any, now: Any, matched: Any, gates: Any = None, state: Any = None
    ) -> Delivered | None:
        if self.path == GENERAL:
            return None
        done = await super().launch(connection, now, matched, gates, state)
        if done is not None:
            self.taken.append((FAST if gates is None else GATED, done))
        return done

    async def deliver(self, *given: Any) -> Delivered:
        done = await super().deliver(*given)
        self.taken.append((GENERAL, done))
        return done


class Result(NamedTuple):
    outcome: DispatchCounts
    delivered: dict[str, Any]
    rows: dict[str, list[Any]]


async def decide(
    database: Database,
    connection: Connection,
    case: Case,
    claim: Claim,
    path: str,
    limit: RateLimit | None = None,
    expected: str | None = None,
) -> Result:
    """Decide the events of a case by one of the paths, and leave the tables empty. `limit` is that of every source;
    `expected` the path that is taken, if it is not the one that is tried."""
    batch = Path(claim, path)
    one = Dispatch(database, batch_size=500, after_launch=lambda: None, batch=batch)
    await connection.execute("select tidegate.publish('warm.up', 'warm.up')")
    await one.run_once()  # loads the triggers
    await empty(connection)
    batch.taken.clear()
    for kind, source, payload, fields in case.events:
        names = "".join(f", {name} => ${n}" for n, name in enumerate(fields, start=4))
        await connection.execute(f"select tidegate.publish($1, $2, $3{names})", kind, source, payload, *fields.values())
    if limit is not None:
        await sources.set_limit(connection, "*", limit, "bob")
    one._expects_no_state = path == FAST
    outcome = await one.run_once()
    [(taken, delivered)] = batch.taken
    assert taken == (expected or path)
    labels = await name_rows(connection)
    seen = {
        "launched": delivered.launched,
        "failures": dict(delivered.failures),
        "statuses": [(d.status, d.retry_state, d.source, d.ingress_sequence is not None) for d in delivered.decided],
        "filtered": [(labels(one.event.id), one.trigger.trigger.id, one.reason) for one in delivered.filtered],
        "names": dict(delivered.names),
        "claimed": [labels(json.dumps(run, default=str)) for run, _ in delivered.claimed],
        "moves": [*delivered.moves, *delivered.source_moves],
        "lags": dict(delivered.lags),
    }
    rows = {table: await dump(connection, table, labels) for table in TABLES}
    await empty(connection)
    return Result(outcome, seen, rows)


async def empty(connection: Connection) -> None:
    await connection.execute(
        f"truncate {', '.join(f'tidegate.{name}' for name in (*TABLES, 'workflow_events'))} cascade"
    )


async def name_rows(connection: Connection) -> Any:
    """Replaces the ids of events, deliveries and runs, which are new each time, by names that are not."""
    events = await connection.fetch("select id, ingress_sequence from tidegate.workflow_events order by 2")
    names = {str(row[0]): f"event {n}" for n, row in enumerate(events)}
    sequences = {str(row[1]): f"sequence {n}" for n, row in enumerate(events)}
    for row in await connection.fetch("select id, event_id, trigger_id from tidegate.workflow_trigger_deliveries"):
        names[str(row[0])] = f"{names[str(row[1])]} by {row[2]}"

    def named(value: Any) -> str:
        text = re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", lambda found: names.get(found[0], found[0]), str(value))
        return re.sub(r'(?<="ingress_sequence": )\d+', lambda found: sequences.get(found[0], found[0]), text)

    return named


async def dump(connection: Connection, table: str, labels: Any) -> list[Any]:
    without = ["id"] if table == "event_decisions" else []
    rows = await connection.fetch(f"select (to_jsonb(t) - $1::text[])::text from tidegate.{table} t", without)
    return sorted(labels(row[0]) for row in rows)


@pytest.mark.parametrize("name", CASES)
async def test_all_paths_leave_the_same_rows(
    database: Database, connection: Connection, clock: Clock, name: str
) -> None:
    case = CASES[name]
    for slug, fields in case.triggers.items():
        await make_trigger(database, slug, **fields)
    definitions = [one.id for one in await triggers.list_definitions(connection)]
    claim = Claim("worker", 30_000, definitions, case.claims) if case.claims else NOBODY
    fast, gated, general = [await decide(database, connection, case, claim, path) for path in (FAST, GATED, GENERAL)]
    assert_same(gated, fast)
    assert_same(general, fast)
    assert fast.outcome.events == len(case.events)
    assert len(fast.rows["workflow_runs"]) == fast.outcome.launched
    assert sum('"status": "running"' in row for row in fast.rows["workflow_runs"]) == min(
        case.claims, fast.outcome.launched
    )


@pytest.mark.parametrize("name", CASES)
async def test_a_limit_with_room_is_counted_alike(
    database: Database, connection: Connection, clock: Clock, name: str
) -> None:
    case = CASES[name]
    for slug, fields in case.triggers.items():
        await make_trigger(database, slug, **fields)
    limit = RateLimit(limit=1000, interval_ms=60_000)
    gated, general = [await decide(database, connection, case, NOBODY, path, limit=limit) for path in (GATED, GENERAL)]
    assert_same(gated, general)
    spent = [json.loads(row)["ring"] for row in gated.rows["event_scheduler_sources"]]
    assert sum(sum(ring or ()) for ring in spent) == len(case.events)


async def prepare(database: Database, case: Case) -> None:
    for spec in BUDGETS.values():
        await control.put_budget(database, spec, "bob")
    for slug, fields in case.triggers.items():
        await make_trigger(database, slug, **fields)


@pytest.mark.parametrize("name", LIMITED)
async def test_limits_of_triggers_with_room_are_counted_alike(
    database: Database, connection: Connection, clock: Clock, name: str
) -> None:
    case = LIMITED[name]
    await prepare(database, case)
    definitions = [one.id for one in await triggers.list_definitions(connection)]
    claim = Claim("worker", 30_000, definitions, case.claims) if case.claims else NOBODY
    whole, general = [await decide(database, connection, case, claim, path) for path in (GATED, GENERAL)]
    assert_same(whole, general)
    assert whole.outcome.launched == (0 if name == "filtered" else len(MANY) * len(case.triggers))


@pytest.mark.parametrize("name", NOT_WHOLE)
async def test_a_batch_that_does_not_fit_as_a_whole_is_decided_one_by_one(
    database: Database, connection: Connection, clock: Clock, name: str
) -> None:
    """The path that is asked for is not taken, and nothing of the attempt is left."""
    case = NOT_WHOLE[name]
    await prepare(database, case)
    tried, general = [
        await decide(database, connection, case, NOBODY, path, expected=GENERAL) for path in (GATED, GENERAL)
    ]
    assert tried.outcome == general.outcome
    assert tried.delivered["statuses"] == general.delivered["statuses"]
    for table in ("workflow_runs", "event_scheduler_triggers", "budget_keys", "budget_holders"):
        assert tried.rows[table] == general.rows[table], table  # nothing is spent twice


async def test_whoever_waits_is_not_overtaken_by_a_batch_that_would_fit(
    database: Database, connection: Connection, clock: Clock
) -> None:
    await prepare(database, LIMITED["budgets"])
    batch = Path(NOBODY, GATED)
    one = Dispatch(database, batch_size=500, after_launch=lambda: None, batch=batch)
    await control.pause_budget(database, "shared", actor="bob")
    await connection.execute("select tidegate.publish('tick', 'shop', '{\"n\": 1}')")
    await one.run_once()
    await control.resume_budget(database, "shared", "bob")  # the first in line is due, and not yet launched
    await connection.execute("select tidegate.publish('tick', 'shop', '{\"n\": 1}')")
    await one.run_once()
    waiting = await connection.fetch(
        """select w.slug, count(*) from tidegate.workflow_trigger_deliveries d
             join tidegate.workflow_event_triggers t on t.id = d.trigger_id
             join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
            where d.retry_state = 'scheduled' and d.reason = 'budget' group by 1 order by 1"""
    )
    assert [tuple(row) for row in waiting] == [("a", 2), ("b", 2)]


def assert_same(one: Result, other: Result) -> None:
    assert one.outcome == other.outcome
    assert one.delivered == other.delivered
    for table in TABLES:
        assert one.rows[table] == other.rows[table], table
