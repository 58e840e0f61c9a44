"""A long history and a long line: events that are finished with all that came of them, and retries that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import asyncpg

from bench.stage import Stage

SOURCES, TRIGGERS = 20, 20

# Ids in the order of their rows, as ours are.
_IDS = """
create or replace function pg_temp.id(kind integer, n bigint) returns uuid language sql immutable
return ('0190000' || kind || '-0000-7000-8000-' || lpad(to_hex(n), 12, '0'))::uuid
"""
_STATES = """
with definitions as (
  insert into tidegate.workflow_definitions (id, slug, kind, created_by, updated_by)
  select gen_random_uuid(), 'history' || n, 'python', 'bench', 'bench' from generate_series(0, 4) n returning id, slug
), triggers as (
  insert into tidegate.workflow_event_triggers
    (id, workflow_definition_id, name, event_type, throttle_count, throttle_window_ms, created_by, updated_by)
  select gen_random_uuid(), d.id, 't' || n, 'tick', 10, 1000, 'bench', 'bench'
    from generate_series(0, $2::int - 1) n join definitions d on d.slug = 'history' || n % 5
  returning id, name
), alive as (
  insert into tidegate.workers (name, definitions) select 'bench', array_agg(id) from definitions
), sources as (
  insert into tidegate.event_scheduler_sources
    (source, rate_limit, interval_ms, pause_ms, limit_set_by, paused_at, paused_by, updated_by)
  select 's' || n, 100, 1000, 0, 'operator', case when n % 5 = 0 then now() end, case when n % 5 = 0 then 'bench' end,
         'bench'
    from generate_series(0, $1::int - 1) n
)
insert into tidegate.event_scheduler_triggers (trigger_id, paused_at, paused_by)
select id, case when name = 't3' then now() end, case when name = 't3' then 'bench' end from triggers
"""
# Every event has come through an hour ago; one in ten was held before, one in four had a workflow with a step.
_FINISHED = """
with numbered as (
  select t.id, t.workflow_definition_id, substr(t.name, 2)::int as n from tidegate.workflow_event_triggers t
   where t.created_by = 'bench' and t.name ~ '^t[0-9]+$'
), stored as (
  insert into tidegate.workflow_events
    (id, external_id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id)
  select pg_temp.id(1, n), 'e' || n, 'tick', 's' || n % $3::int, now() - interval '1 hour',
         now() - interval '1 hour', n, jsonb_build_object('n', n), 'c' || n
    from generate_series($1::bigint, $2::bigint) n
  returning id, source, ingress_sequence as n
), held as (
  insert into tidegate.event_ingress_retries
    (event_id, source, ingress_sequence, retry_state, attempts, reason, created_at, updated_at)
  select id, source, n, 'completed', 1, 'rate_limit', now() - interval '1 hour', now() - interval '1 hour'
    from stored where n % 10 = 0
), decided as (
  insert into tidegate.event_decisions (event_id, at, stage, decision, reason, attempt)
  select id, now() - interval '1 hour', 'gate', 'throttled', 'rate_limit', 1 from stored where n % 10 = 0
), delivered as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, status, attempts, launched_at, workflow_run_id, source, ingress_sequence, created_at,
     updated_at)
  select pg_temp.id(2, e.n), t.id, e.id, 'launched', 1, now() - interval '1 hour', pg_temp.id(2, e.n), e.source, e.n,
         now() - interval '1 hour', now() - interval '1 hour'
    from stored e join numbered t on t.n = e.n % $4::int
  returning id, event_id, trigger_id, workflow_run_id, ingress_sequence as n
), run as (
  insert into tidegate.workflow_runs
    (id, workflow_definition_id, delivery_id, event_id, trigger_id, correlation_id, status, attempts, created_at,
     started_at, finished_at, updated_at)
  select d.workflow_run_id, t.workflow_definition_id, d.id, d.event_id, d.trigger_id, 'c' || d.n, 'succeeded', 1,
         now() - interval '1 hour', now() - interval '1 hour', now() - interval '1 hour', now() - interval '1 hour'
    from delivered d join numbered t on t.id = d.trigger_id
)
insert into tidegate.workflow_run_steps (id, workflow_run_id, name, status, result, created_at, updated_at)
select pg_temp.id(3, n), workflow_run_id, 'one', 'succeeded', '1', now() - interval '1 hour', now() - interval '1 hour'
  from delivered where n % 4 = 0
"""
_HELD_EVENTS = """
with stored as (
  insert into tidegate.workflow_events
    (id, external_id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id)
  select pg_temp.id(1, n), 'e' || n, 'tick', 's' || n % $3::int, now(), now(), n, '{}', 'c' || n
    from generate_series($1::bigint, $2::bigint) n
  returning id, source, ingress_sequence as n
)
insert into tidegate.event_ingress_retries
  (event_id, source, ingress_sequence, retry_state, attempts, next_attempt_at, reason)
select id, source, n, 'scheduled', 1, now() + (n % 36000 - 200) * interval '100 ms',
       case when n % $3::int % 5 = 0 then 'paused' when n % 7 = 0 then 'breaker_open' else 'rate_limit' end
  from stored
"""
_HELD_DELIVERIES = """
with numbered as (
  select t.id, substr(t.name, 2)::int as n from tidegate.workflow_event_triggers t
   where t.created_by = 'bench' and t.name ~ '^t[0-9]+$'
), stored as (
  insert into tidegate.workflow_events
    (id, external_id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id)
  select pg_temp.id(1, n), 'e' || n, 'tick', 's' || n % $3::int, now(), now(), n, '{}', 'c' || n
    from generate_series($1::bigint, $2::bigint) n
  returning id, source, ingress_sequence as n
)
insert into tidegate.workflow_trigger_deliveries
  (id, trigger_id, event_id, status, attempts, retry_state, next_attempt_at, retry_attempts, reason, source,
   concurrency_key, ingress_sequence)
select pg_temp.id(2, e.n), t.id, e.id, 'throttled', 1, 'scheduled', now() + (e.n % 36000 - 100) * interval '100 ms', 1,
       case e.n % 4 when 0 then 'source_paused' when 1 then 'concurrency' when 2 then 'paused' else 'throttle' end,
       e.source, case when e.n % 4 = 1 then '' end, e.n
  from stored e join numbered t on t.n = e.n % $4::int
"""
_WAITING_STEPS = """
with numbered as (
  select t.id, t.workflow_definition_id, substr(t.name, 2)::int as n from tidegate.workflow_event_triggers t
   where t.created_by = 'bench' and t.name ~ '^t[0-9]+$'
), stored as (
  insert into tidegate.workflow_events
    (id, external_id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id)
  select pg_temp.id(1, n), 'e' || n, 'tick', 's' || n % $3::int, now(), now(), n, '{}', 'c' || n
    from generate_series($1::bigint, $2::bigint) n
  returning id, source, ingress_sequence as n
), delivered as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, status, attempts, launched_at, workflow_run_id, source, ingress_sequence)
  select pg_temp.id(2, e.n), t.id, e.id, 'launched', 1, now(), pg_temp.id(2, e.n), e.source, e.n
    from stored e join numbered t on t.n = e.n % $4::int
  returning id, event_id, trigger_id, workflow_run_id, ingress_sequence as n
), run as (
  insert into tidegate.workflow_runs
    (id, workflow_definition_id, delivery_id, event_id, trigger_id, correlation_id, status, attempts, started_at,
     next_attempt_at)
  select d.workflow_run_id, t.workflow_definition_id, d.id, d.event_id, d.trigger_id, 'c' || d.n, 'pending', 1, now(),
         now() + (d.n % 3600 - 20) * interval '1 s'
    from delivered d join numbered t on t.id = d.trigger_id
)
insert into tidegate.workflow_run_steps
  (id, workflow_run_id, name, status, retry_state, next_attempt_at, retry_attempts, retry_metadata)
select pg_temp.id(3, n), workflow_run_id, 'one', 'pending', 'scheduled', now() + (n % 3600 - 20) * interval '1 s', 1,
       '{"reason": "error"}'
  from delivered
"""
TABLES = (
    "workflow_events", "event_ingress_retries", "workflow_trigger_deliveries", "workflow_runs", "workflow_run_steps",
    "event_decisions",
)  # fmt: skip
NAMES = ", ".join(f"tidegate.{table}" for table in TABLES)


async def database(stage: Stage, *, events: int, retries: int) -> str:
    """The address of a database with so many; loaded by the first figure that asks, and shared. Not yet vacuumed, and
    nothing in it is until `settle`."""
    url, is_new = await stage.kept("bench_history")
    if is_new:
        connection = await asyncpg.connect(url, server_settings={"jit": "off"}, command_timeout=900)
        try:
            for table in TABLES:
                await connection.execute(f"alter table tidegate.{table} set (autovacuum_enabled = false)")
            helper = await asyncpg.connect(url, server_settings={"jit": "off"}, command_timeout=900)
            await load(connection, helper, events=events, retries=retries)
            await helper.close()
            await connection.execute(f"analyze {NAMES}")
        finally:
            await connection.close()
    return url


async def load(connection: Any, *helpers: Any, events: int, retries: int, chunk: int = 100_000) -> Mapping[str, int]:
    """So many finished events, and so many retries that wait: six of ten are events, three deliveries, one a step.

    Connections that help take a part of the events each.
    """
    await connection.execute("set statement_timeout = 0")
    for given in (connection, *helpers):
        await given.execute(_IDS)
    await connection.execute(_STATES, SOURCES, TRIGGERS)
    chunks = iter([(first, min(events, first + chunk - 1)) for first in range(1, events + 1, chunk)])

    async def finish(given: Any) -> None:
        for first, last in chunks:
            await given.execute(_FINISHED, first, last, SOURCES, TRIGGERS)

    await asyncio.gather(*(finish(given) for given in (connection, *helpers)))
    counts = {"events": retries * 6 // 10, "deliveries": retries * 3 // 10, "steps": retries // 10}
    first = events + 1
    for kind, statement in (("events", _HELD_EVENTS), ("deliveries", _HELD_DELIVERIES), ("steps", _WAITING_STEPS)):
        shared = () if kind == "events" else (TRIGGERS,)
        await connection.execute(statement, first, first + counts[kind] - 1, SOURCES, *shared)
        first += counts[kind]
    await connection.execute(f"select setval('tidegate.ingress_sequence', {first})")
    return counts


async def settle(connection: Any) -> None:
    """What the server does by itself within minutes: statistics, and a mark on the pages whose rows everyone sees."""
    await connection.execute(f"vacuum (analyze) {NAMES}")
    for table in TABLES:
        await connection.execute(f"alter table tidegate.{table} reset (autovacuum_enabled)")
