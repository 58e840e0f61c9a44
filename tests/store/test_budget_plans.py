"""The statements of budgets that every turn runs keep to their indexes, however much waits and however many keys."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from tidegate.embedded import EmbeddedPostgres
from tidegate.model.budget import Budget
from tidegate.model.ids import RunId
from tidegate.store import budget_steps, budgets, trigger_gates
from tidegate.store.budgets import LockedBudget

from .plans import MODES, STATISTICS, Recorder, Undone, filled
from .test_plans import FILL_DELIVERIES, FILL_TRIGGERS, ROWS, TRIGGER_TABLES, check

NOW = datetime(2026, 6, 1, tzinfo=UTC)
TABLES = (*TRIGGER_TABLES, "budgets", "budget_keys", "budget_holders", "budget_steps")
# Everything that waits waits for one budget, of one or of 10,000 keys, and as many steps; each key was used and is
# held by a run.
FILL_BUDGETS = """
with made as (
  insert into tidegate.budgets (name, rate_limit, interval_ms, concurrency, created_by, updated_by)
  values ('shared', 10, 1000, 2, 'test', 'test')
), waiting as (
  update tidegate.workflow_trigger_deliveries
     set reason = 'budget', budget = 'shared', budget_key = (ingress_sequence % $1)::text, budget_cost = 1
   where retry_state = 'scheduled' returning budget_key, ingress_sequence
), used as (
  insert into tidegate.budget_keys (budget, key) select 'shared', n::text from generate_series(0, $1::int - 1) n
), steps as (
  insert into tidegate.budget_steps (step_id, run_id, name, budget, key, cost, place, next_attempt_at, asked)
  select gen_random_uuid(), gen_random_uuid(), 'ask', 'shared', w.budget_key, 1, w.ingress_sequence,
         tidegate.now() + interval '1 h', '{"budgets": ["shared"]}' from waiting w
)
insert into tidegate.budget_holders (run_id, budget, key, step_id)
select r.id, 'shared', (row_number() over (order by r.id) % 10000)::text, r.id from tidegate.workflow_runs r
 order by r.id limit 10000
"""
LOCKED = {"shared": LockedBudget(Budget("shared", "10/s", concurrency=2))}
LINES = [("shared", "0"), ("shared", "7"), ("shared", "none")]
STATEMENTS: dict[str, Any] = {
    "lock": lambda c: budgets.lock(c, ["shared"]),
    "keys": lambda c: budgets.keys(c, LOCKED, LINES, []),
    "heads": lambda c: budgets.heads(c, LINES, 100),
    "nudge": lambda c: budgets.nudge(c, dict.fromkeys(LINES, NOW)),
    "release": lambda c: budgets.release(c, [RunId(uuid.uuid4())]),
    "lines_of": lambda c: budgets.lines_of(c, "shared"),
    "due": lambda c: budget_steps.due(c, 100),
    "next_due": budget_steps.next_due_seconds,
    "of_steps": lambda c: budget_steps.of_steps(c, [uuid.uuid4()]),
    "lines_of_runs": lambda c: budget_steps.lines_of_runs(c, [RunId(uuid.uuid4())]),
}
READ = {"workflow_trigger_deliveries", "workflow_runs", "budget_keys", "budget_holders", "budget_steps"}


@pytest.fixture(scope="module", params=[1, 10_000], ids=["one key", "10000 keys"])
def waiting_url(request: pytest.FixtureRequest, postgres: EmbeddedPostgres, template: str) -> Iterator[str]:
    """A database with 50,000 deliveries that wait for a budget, and no statistics."""
    fill = [
        ("set session_replication_role = replica", ()),
        (FILL_TRIGGERS, (2,)),
        (FILL_DELIVERIES, (2, ROWS)),
        (FILL_BUDGETS, (request.param,)),
    ]
    yield from filled(f"plans_of_{request.param}_budget_keys", postgres, template, TABLES, fill)


@MODES
@STATISTICS
async def test_no_turn_reads_all_that_waits_for_a_budget(waiting_url: str, mode: str, has_statistics: bool) -> None:
    connection = await asyncpg.connect(waiting_url)
    try:
        async with connection.transaction():
            if has_statistics:
                await connection.execute(f"analyze {', '.join(f'tidegate.{table}' for table in TABLES)}")
            await connection.execute(f"set local plan_cache_mode = {mode}")
            keys = await connection.fetchval("select count(*) from tidegate.budget_keys")
            trigger_id = await connection.fetchval("select id from tidegate.workflow_event_triggers limit 1")
            calls = {**STATEMENTS, "lines": lambda c: trigger_gates.lines(c, [trigger_id])}
            for name, call in calls.items():
                recorder = Recorder()
                await call(recorder)
                assert len(recorder.asked) == 1, name
                [(text, arguments)] = recorder.asked
                # What walks from key to key reads one row of each.
                await check(connection, name, text, arguments, READ, 4 * keys + 5000 if name == "lines_of" else 1000)
            raise Undone
    except Undone:
        pass
    finally:
        await connection.close()
