"""Limits that change while events wait, on a real database with a moved clock: for sources and triggers alike, the new
rate is there within one new window, the line keeps its order, and no limit is exceeded."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import pytest

from tests.conftest import Clock
from tests.flow.checker import Epoch, carry_breaches, inversions, limit_breaches, share_used
from tests.flow.trigger_worker import TriggerWorker, make_trigger
from tidegate.flow import control
from tidegate.model.source import RateLimit
from tidegate.store.db import Connection, Database

DAY_MS = 86_400_000
# Bulk of the backlogs: nobody may run out of them before the rate is judged.
BACKLOG = 700

LAUNCHED = """
select d.launched_at, e.ingress_sequence from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_events e on e.id = d.event_id
 where d.status = 'launched' order by d.launched_at, e.ingress_sequence
"""


class Edit(NamedTuple):
    """A limit, and how long it is in force, in its own windows."""

    limit: int
    interval_ms: int
    windows: float = 0.5
    pause_ms: int = 0


EDITS = {
    "a day to a second": [Edit(300, DAY_MS, 0.007), Edit(40, 1000, 5)],
    "a day to a second, after hours": [Edit(300, DAY_MS, 0.2), Edit(40, 1000, 5)],
    "a second to an hour": [Edit(40, 1000, 2.5), Edit(60, 3_600_000, 4)],
    "raised": [Edit(10, 1000, 1.3), Edit(60, 1000, 5)],
    "lowered": [Edit(60, 1000, 1.3), Edit(20, 1000, 5)],
    "there and back": [Edit(100, 60_000, 0.3), Edit(10, 1000, 0.4), Edit(100, 60_000, 4)],
    "several in a row": [Edit(200, DAY_MS, 0.01), Edit(50, 60_000, 0.1), Edit(7, 3_600_000, 0.01), Edit(30, 500, 6)],
    "at once, twice": [Edit(300, DAY_MS, 0.007), Edit(5, 3_600_000, 0), Edit(40, 1000, 5)],
}


class Side:
    """A source or a trigger whose limit is changed."""

    def __init__(self, database: Database, change: Callable[[Edit], Any]) -> None:
        self.worker = TriggerWorker(database)
        self.change = change


@pytest.fixture(params=["source", "trigger"])
async def side(request: pytest.FixtureRequest, database: Database, clock: Clock) -> Side:
    trigger_id = await make_trigger(database)

    async def limit_source(edit: Edit) -> None:
        limit = RateLimit(limit=edit.limit, interval_ms=edit.interval_ms, pause_ms=edit.pause_ms)
        await control.set_limit(database, "shop", limit, "test")

    async def limit_trigger(edit: Edit) -> None:
        fields = {"throttle_count": edit.limit, "throttle_window_ms": edit.interval_ms}
        await control.update_trigger(database, trigger_id, fields, "test")

    return Side(database, limit_source if request.param == "source" else limit_trigger)


async def publish(connection: Connection, count: int) -> None:
    await connection.execute("select tidegate.publish('tick', 'shop') from generate_series(1, $1)", count)


@pytest.mark.parametrize("edits", list(EDITS.values()), ids=list(EDITS))
async def test_the_new_rate_is_there_within_one_new_window(
    connection: Connection, clock: Clock, side: Side, edits: list[Edit]
) -> None:
    began_at = clock.now

    def elapsed(at: datetime) -> float:
        return (at - began_at) / timedelta(milliseconds=1)

    epochs = []
    await publish(connection, BACKLOG // 2)
    for edit in edits:
        await clock.advance(1)  # so that the time of a launch says which limit was in force
        epochs.append(Epoch(elapsed(clock.now), edit.limit, edit.interval_ms))
        await side.change(edit)
        await side.worker.turn()
        if edit is edits[-1]:
            await publish(connection, BACKLOG // 2)
        steps = round(edit.windows * 20) or 1
        for _ in range(steps):
            await clock.advance(edit.interval_ms * edit.windows / steps)
            await side.worker.turn()
    rows = await connection.fetch(LAUNCHED)
    assert inversions([row[1] for row in rows]) == []
    since = [epoch.since for epoch in epochs]
    admitted = [(sum(at >= one for one in since) - 1, at) for at in (elapsed(row[0]) for row in rows)]
    assert limit_breaches(admitted, epochs) == []
    assert carry_breaches(admitted, epochs) == []
    last = edits[-1]
    used = share_used([at for _, at in admitted], last.limit, last.interval_ms,
                      since=since[-1] + last.interval_ms, until=elapsed(clock.now))  # fmt: skip
    assert len(rows) < BACKLOG
    assert used >= 0.95


async def test_a_pause_after_an_exceeded_limit_that_is_edited_away_holds_nobody(
    database: Database, connection: Connection, clock: Clock
) -> None:
    worker = TriggerWorker(database)
    await make_trigger(database)
    limit = RateLimit(limit=10, interval_ms=1000, pause_ms=3_600_000)
    await control.set_limit(database, "shop", limit, "test")
    await publish(connection, 100)
    await worker.turn()
    assert len(await connection.fetch(LAUNCHED)) == 10
    await clock.advance(500)
    await control.set_limit(database, "shop", RateLimit(limit=10, interval_ms=1000), "test")
    for _ in range(100):
        await clock.advance(100)
        await worker.turn()
    assert len(await connection.fetch(LAUNCHED)) >= 0.95 * 100
