"""Fair claims read what they take, and not the backlog of who waits with a lot."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import asyncpg
import pytest

from tidegate.embedded import EmbeddedPostgres
from tidegate.model.shares import Lane
from tidegate.store import inbox_lanes, run_lines

from .plans import MODES, STATISTICS, Recorder, Undone, explain, filled, rows_read

ROWS = 100_000
WHO: dict[str, Any] = {"worker": "w", "lease_ms": 1000}

# One workflow with nearly all due runs, and 20 others with one each.
FILL_RUNS = """
with definitions as (
  insert into tidegate.workflow_definitions (id, slug, kind, created_by, updated_by)
  select tidegate.uuid7(), 'w' || n, 'python', 'test', 'test' from generate_series(0, 20) n returning id, slug
)
insert into tidegate.workflow_runs (id, workflow_definition_id, parameters, next_attempt_at)
select tidegate.uuid7(), d.id, '{}', now() - interval '1 hour' + n * interval '1 ms'
  from generate_series(1, $1::int) n join definitions d on d.slug = 'w' || greatest(0, n - $1::int + 20)
"""


@pytest.fixture(scope="module")
def runs_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    yield from filled("plans_of_fair_runs", postgres, template, ("workflow_runs_live",), [(FILL_RUNS, (ROWS,))])


class Facts:
    """The workflows, and some of their due runs."""

    def __init__(self, definitions: list[uuid.UUID], some: list[uuid.UUID]) -> None:
        self.definitions, self.some = definitions, some


Call = Callable[[Any, Facts], Awaitable[Any]]
RUNS: dict[str, tuple[Call, int]] = {
    "due_workflows": (lambda c, f: run_lines.due_workflows(c, f.definitions, 100, **WHO), 50),
    "list_due": (lambda c, f: run_lines.list_due(c, dict.fromkeys(f.definitions, 10), **WHO), 300),
    "claim": (lambda c, f: run_lines.claim(c, f.some, definitions=f.definitions, **WHO), 60),
}


@MODES
@STATISTICS
async def test_claims_by_workflow_read_what_they_take(runs_url: str, mode: str, has_statistics: bool) -> None:
    connection = await asyncpg.connect(runs_url)
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute("analyze tidegate.workflow_runs_live")
            rows = await connection.fetch("select id from tidegate.workflow_definitions order by slug")
            due = await connection.fetch("select id from tidegate.workflow_runs order by next_attempt_at limit 10")
            facts = Facts([row[0] for row in rows], [row[0] for row in due])
            await connection.execute(f"set local plan_cache_mode = {mode}")
            for name, (call, most) in RUNS.items():
                recorder = Recorder()
                await call(recorder, facts)
                [(text, arguments)] = recorder.asked
                for scan, read in rows_read(await explain(connection, text, arguments), {"workflow_runs"}):
                    assert read <= most, f"{name} reads {read:.0f} rows: {scan}"
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()


# A source with nearly all undecided events, and 1,000 others with one each, which came last.
FILL_INBOX = """
with stored as (
  insert into tidegate.workflow_events (id, type, source, occurred_at, ingress_sequence, payload, correlation_id)
  select tidegate.uuid7(), 'tick', 's' || greatest(0, n - $1::int + 1000), now(), n, '{}', 'c'
    from generate_series(1, $1::int) n
  returning id, source, ingress_sequence
)
insert into tidegate.event_inbox (ingress_sequence, event_id, source) select ingress_sequence, id, source from stored
"""
SOME = {Lane("s0"): 250, **{Lane(f"s{n}"): 1 for n in range(1, 100)}}
INBOX: dict[str, tuple[Callable[[Any], Awaitable[Any]], int]] = {
    "has_others": (lambda c: inbox_lanes.has_others(c, Lane("s0")), 5),
    "has_others beside few": (lambda c: inbox_lanes.has_others(c, Lane("s77")), 5),
    "claim_alone": (lambda c: inbox_lanes.claim_alone(c, Lane("s0"), 500), 1_500),
    "claim_others": (lambda c: inbox_lanes.claim_others(c, Lane("s0"), 100), 600),
    "claim_others before it": (lambda c: inbox_lanes.claim_others(c, Lane("s77"), 100), 600),
    "waiting": (lambda c: inbox_lanes.waiting(c, "", 500), 3_000),
    "waiting from the middle": (lambda c: inbox_lanes.waiting(c, "s5", 500), 3_000),
    "waiting of few": (lambda c: inbox_lanes.waiting(c, "", 20), 600),
    "lock": (lambda c: inbox_lanes.lock(c, SOME), 500),
    "claim": (lambda c: inbox_lanes.claim(c, SOME, 500), 1_500),
    "list": (lambda c: inbox_lanes.list_sequences(c, SOME, 500), 1_500),
    "are_in_turn": (lambda c: inbox_lanes.are_in_turn(c, dict.fromkeys(SOME, 1)), 200),
}


@pytest.fixture(scope="module")
def inbox_url(postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    tables = ("workflow_events", "event_inbox")
    yield from filled("plans_of_lanes", postgres, template, tables, [(FILL_INBOX, (ROWS,))])


@MODES
@STATISTICS
async def test_batches_of_lanes_read_what_they_take(inbox_url: str, mode: str, has_statistics: bool) -> None:
    connection = await asyncpg.connect(inbox_url)
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute("analyze tidegate.event_inbox, tidegate.workflow_events")
            await connection.execute(f"set local plan_cache_mode = {mode}")
            for name, (call, most) in INBOX.items():
                recorder = Recorder()
                await call(recorder)
                [(text, arguments)] = recorder.asked
                read = list(rows_read(await explain(connection, text, arguments), {"event_inbox", "workflow_events"}))
                for scan, rows in read:
                    assert rows <= most, f"{name} reads {rows:.0f} rows: {scan}"
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()
