"""Where a fast path stands beside a general path, one table of cases goes through both: same rows, same answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from tidegate.model.event import NewEvent
from tidegate.model.ids import delivery_id
from tidegate.store import deliveries, events, totals
from tidegate.store.db import Connection
from tidegate.store.deliveries import NOBODY, Claim, Decided
from tidegate.store.sources import SourceMetrics
from tidegate.store.totals import BatchTotals, TriggerTotals

from .builders import HOUR, NOW, make_definition, make_events, make_runs, make_triggers, new_event, set_clock

FULL: dict[str, Any] = {
    "external_id": "o-7", "occurred_at": NOW - HOUR, "payload": '{"b":1,"a":[null,"é"]}', "correlation_id": "c-1",
    "ttl_ms": 1000, "metadata": '{"k":"v"}', "traceparent": "00-a-b-01",
}  # fmt: skip
# What is stored already, and the batch.
EVENTS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "nothing": ([], []),
    "one, without anything optional": ([], [{}]),
    "one, with everything": ([], [FULL]),
    "several that are alike": ([], [{}, {}, {}]),
    "several that differ": ([], [FULL, {}, {"type": "order.paid", "source": "crm", "ttl_ms": 5}]),
    "ids in another order than they are stored in": ([], [{"external_id": "z"}, {"external_id": "a"}, {}]),
    "one id of two sources": ([], [{"external_id": "o-7"}, {"external_id": "o-7", "source": "crm"}]),
    "an id that another source has": ([{"external_id": "o-7", "source": "crm"}], [{"external_id": "o-7"}]),
    "one that is stored already": ([{"external_id": "o-7"}], [{"external_id": "o-7"}]),
    "one of several that is stored already": ([{"external_id": "o-7"}], [{}, {"external_id": "o-7"}, {}]),
    "one id twice": ([], [{"external_id": "o-7"}, {"external_id": "o-7"}]),
}


async def stored(connection: Connection) -> list[tuple[Any, ...]]:
    """All events in the order of arrival, and whether each is in the inbox, without the numbers of the sequence; with
    the event that its producer's id leads to."""
    rows = await connection.fetch(
        "select e.id, e.external_id, e.type, e.source, e.occurred_at, e.received_at, e.payload, e.correlation_id, "
        "e.ttl_ms, e.metadata, e.traceparent, e.replayed_at, i.event_id = e.id, x.event_id "
        "from tidegate.workflow_events e left join tidegate.event_inbox i using (ingress_sequence) "
        "full join tidegate.event_external_ids x on x.external_id = e.external_id and x.source = e.source "
        "order by e.ingress_sequence"
    )
    return [tuple(row) for row in rows]


@pytest.mark.parametrize("case", EVENTS)
async def test_insert_and_insert_new(connection: Connection, case: str) -> None:
    await set_clock(connection)
    known, batch = ([new_event(**changes) for changes in part] for part in EVENTS[case])
    await events.insert(connection, known)
    before = await stored(connection)

    async def both(given: Sequence[NewEvent]) -> tuple[bool, list[Any], bool, list[Any]]:
        answers: list[Any] = []
        for is_fast in (False, True):
            undo = connection.transaction()
            await undo.start()
            if is_fast:
                attempt = connection.transaction()  # a unique key ends the transaction that it refuses
                await attempt.start()
                are_new = await events.insert_new(connection, given)
                await (attempt.commit() if are_new else attempt.rollback())
            else:
                are_new = await events.insert(connection, given) == {event.id for event in given}
            answers += [are_new, await stored(connection)]
            await undo.rollback()
        return answers[0], answers[1], answers[2], answers[3]

    are_new, rows, are_new_fast, rows_fast = await both(batch)
    assert are_new_fast == are_new
    assert rows_fast == (rows if are_new else before)  # all or nothing: then `insert` has its turn
    assert len(rows) == len(before) + len(batch) or not are_new
    assert all(row[-1] == (row[0] if row[1] else None) for row in rows)


# Launches: how many of each of two triggers, the worker's claim, how many runs of its definition are due already.
LAUNCHES: dict[str, tuple[tuple[int, int], int, int]] = {
    "none": ((0, 0), 0, 0),
    "one, claimed by no worker": ((1, 0), 0, 0),
    "several of one trigger, claimed by no worker": ((3, 0), 0, 0),
    "several of two triggers, claimed by no worker": ((2, 2), 0, 0),
    "all claimed": ((3, 0), 10, 0),
    "all of two triggers claimed": ((2, 2), 10, 0),
    "some claimed": ((3, 0), 2, 0),
    "none claimed, older runs are due": ((3, 0), 10, 1),
}


async def written(connection: Connection) -> list[tuple[Any, ...]]:
    """All deliveries with their runs, every column."""
    rows = await connection.fetch(
        "select d.*, r.* from tidegate.workflow_trigger_deliveries d "
        "join tidegate.workflow_runs r on r.delivery_id = d.id order by d.id"
    )
    return [tuple(row) for row in rows]


async def launches(connection: Connection, counts: Sequence[int]) -> list[Decided]:
    """Decisions to launch, so many of each trigger."""
    definition = await make_definition(connection)
    triggers = await make_triggers(connection, len(counts))
    owners = [trigger_id for trigger_id, count in zip(triggers, counts, strict=True) for _ in range(count)]
    return [
        Decided(
            id=(one := delivery_id(event_id, trigger_id)), trigger_id=trigger_id, event_id=event_id, trigger_version=1,
            status="launched", last_error=None, run_id=one, workflow_definition_id=definition,
            correlation_id=str(event_id), parameters='{"order_id":7,"a":[1]}',
        )
        for trigger_id, event_id in zip(owners, await make_events(connection, len(owners)), strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("case", LAUNCHES)
async def test_launch_and_launch_unrestricted(connection: Connection, case: str) -> None:
    counts, most, due = LAUNCHES[case]
    await set_clock(connection)
    decided = await launches(connection, counts)
    await make_runs(connection, [NOW - HOUR] * due)
    definition = await make_definition(connection)
    claim = Claim("w", 1000, [definition], most) if most else NOBODY
    version = await connection.fetchval("select version from tidegate.registry_version")

    general = connection.transaction()
    await general.start()
    created = await deliveries.launch(connection, decided, NOW, claim)
    rows = await written(connection)
    await general.rollback()
    claimed = await deliveries.launch_unrestricted(connection, decided, NOW, claim, BatchTotals(), version, [])

    assert set(created) == {one.id for one in decided}
    assert len(rows) == len(decided)
    assert await written(connection) == rows
    # The fast path names the claimed ones alone: it creates every run, or none.
    assert claimed == {one: parameters for one, parameters in created.items() if parameters is not None}
    assert len(claimed or ()) == (0 if due else min(most, len(decided)))


async def test_what_exists_is_refused_by_one_and_left_by_the_other(connection: Connection) -> None:
    decided = await launches(connection, (2, 0))
    version = await connection.fetchval("select version from tidegate.registry_version")
    await deliveries.launch(connection, decided[:1], NOW)
    before = await written(connection)
    attempt = connection.transaction()
    await attempt.start()
    with pytest.raises(asyncpg.UniqueViolationError):
        await deliveries.launch_unrestricted(connection, decided, NOW, NOBODY, BatchTotals(), version, [])
    await attempt.rollback()
    assert await written(connection) == before
    assert set(await deliveries.launch(connection, decided, NOW)) == {decided[1].id}


RESTRICTIONS = {
    "another version of the triggers": "update tidegate.registry_version set version = version + 1",
    "a source with a state": "insert into tidegate.event_scheduler_sources (source, updated_by) "
    "values ('shop.api', 't')",
    "a default limit": "insert into tidegate.event_scheduler_sources "
    "(source, rate_limit, interval_ms, pause_ms, updated_by) values ('*', 1, 1000, 0, 't')",
    "a paused trigger": "insert into tidegate.event_scheduler_triggers (trigger_id, paused_at, paused_by) "
    "select id, now(), 't' from tidegate.workflow_event_triggers",
    "an open breaker": "insert into tidegate.event_scheduler_triggers (trigger_id, breaker_state, breaker_until) "
    "select id, 'open', now() from tidegate.workflow_event_triggers",
    "a closed trigger": "insert into tidegate.event_scheduler_triggers (trigger_id, closed_until) "
    "select id, now() from tidegate.workflow_event_triggers",
}


@pytest.mark.parametrize("restriction", RESTRICTIONS)
async def test_the_fast_path_writes_nothing_where_something_may_limit(connection: Connection, restriction: str) -> None:
    decided = await launches(connection, (2, 0))
    version = await connection.fetchval("select version from tidegate.registry_version")
    await connection.execute(RESTRICTIONS[restriction])
    seen = BatchTotals(sources=[SourceMetrics(source="shop.api", total=2, last_event_at=NOW)])
    assert (
        await deliveries.launch_unrestricted(connection, decided, NOW, NOBODY, seen, version, ["shop.api", "*"]) is None
    )
    assert await written(connection) == []
    assert await connection.fetchval("select count(*) from tidegate.event_scheduler_source_metrics") == 0


async def test_totals_are_added_alike(connection: Connection) -> None:
    await set_clock(connection)
    [one, *_] = await launches(connection, (1, 0))
    version = await connection.fetchval("select version from tidegate.registry_version")
    seen = BatchTotals(
        [TriggerTotals(one.trigger_id, 1, 2, 3, 4, 5, 6, 7, 8, "launched", 'an "error" \u2028')],
        [SourceMetrics(source="crm", total=1, passed=2, throttled=3, dropped=4, failures=5, total_lag_ms=2**40,
                       last_lag_ms=7, max_lag_ms=8, last_event_at=NOW)],
    )  # fmt: skip

    async def totals_of() -> list[Any]:
        return [
            [tuple(row) for row in await connection.fetch(f"select * from tidegate.event_scheduler_{of}_metrics")]
            for of in ("trigger", "source")
        ]

    found = []
    for is_fast in (False, True):
        undo = connection.transaction()
        await undo.start()
        for _ in range(2):  # created, then added to
            if is_fast:
                assert (
                    await deliveries.launch_unrestricted(connection, [], NOW, NOBODY, seen, version, ["shop.api", "*"])
                    == {}
                )
            else:
                await totals.add(connection, seen)
        found.append(await totals_of())
        await undo.rollback()
    assert found[0] == found[1]
    [[trigger], [source]] = found[0]
    assert trigger[1:11] == (2, 4, 6, 8, 10, 12, 14, 16, "launched", 'an "error" \u2028')
    assert 2**41 in source
