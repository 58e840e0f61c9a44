"""A long history and a long line: events that are finished with all that came of them, and retries that wait.

What is finished was received on the days before today, as many each day; what waits was received just now.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import asyncpg

from bench.stage import Stage

SOURCES, TRIGGERS = 20, 20
# Over so many days the finished events are spread, unless the caller wants more.
DAYS = 3

# Ids as ours are: the time in ms and a counter, which all that comes of an event has in common, and a tail by kind (0:
# an event, 1: a delivery and its run, 2: a step).
_IDS = """
create or replace function pg_temp.id(ms bigint, n bigint, kind integer) returns uuid language sql immutable
return (lpad(to_hex(ms), 12, '0') || '7' || lpad(to_hex(n & 4095), 3, '0')
        || '800' || kind || lpad(to_hex(n), 12, '0'))::uuid
"""
# The days from $1 days ago to today; those that exist stay.
_ADD_DAYS = """
select tidegate.add_day((tidegate.now() at time zone 'UTC')::date - n) from generate_series(0, $1::int) n
"""
# The first ms of the first of the finished days, and the present one.
_TIMES = """
select (extract(epoch from (tidegate.now() at time zone 'UTC')::date - $1::int) * 1000)::bigint,
       (extract(epoch from tidegate.now()) * 1000)::bigint
"""
# The tables that have the rows: partitions, or the table itself.
_LEAVES = """
select format('tidegate.%I', c.relname) from pg_class c
 where c.relnamespace = 'tidegate'::regnamespace and c.relkind = 'r'
   and regexp_replace(c.relname, '_(live|default|[0-9]{8})$', '') = any ($1::text[])
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
  insert into tidegate.workers (name, definitions, slots, version, heartbeat_ms)
  select 'bench', array_agg(id), 100, 'bench', 10000 from definitions
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
# One in ten was held before, one in four had a workflow with a step. $5 is the first ms of $6 days for $7 events.
_FINISHED = """
with numbered as (
  select t.id, t.workflow_definition_id, substr(t.name, 2)::int as n from tidegate.workflow_event_triggers t
   where t.created_by = 'bench' and t.name ~ '^t[0-9]+$'
), input as materialized (
  select n, ms, to_timestamp(ms / 1000.0) as at, pg_temp.id(ms, n, 0) as id, pg_temp.id(ms, n, 1) as run_id,
         's' || n % $3::int as source
    from generate_series($1::bigint, $2::bigint) n,
         lateral (select $5::bigint + (n - 1) * $6::bigint * 86400000 / $7::bigint as ms) m
), stored as (
  insert into tidegate.workflow_events
    (id, external_id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id)
  select id, 'e' || n, 'tick', source, at, at, n, jsonb_build_object('n', n), 'c' || n from input
), named as (
  insert into tidegate.event_external_ids (external_id, source, event_id) select 'e' || n, source, id from input
), held as (
  insert into tidegate.event_ingress_retries
    (event_id, source, ingress_sequence, retry_state, attempts, reason, created_at, updated_at)
  select id, source, n, 'completed', 1, 'rate_limit', at, at from input where n % 10 = 0
), decided as (
  insert into tidegate.event_decisions (event_id, at, stage, decision, reason, attempt)
  select id, at, 'gate', 'throttled', 'rate_limit', 1 from input where n % 10 = 0
), delivered as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, status, attempts, launched_at, workflow_run_id, source, ingress_sequence, created_at,
     updated_at)
  select e.run_id, t.id, e.id, 'launched', 1, at, e.run_id, e.source, e.n, at, at
    from input e join numbered t on t.n = e.n % $4::int
), run as (
  insert into tidegate.workflow_runs
    (id, workflow_definition_id, delivery_id, event_id, trigger_id, correlation_id, status, attempts, created_at,
     started_at, finished_at, updated_at)
  select e.run_id, t.workflow_definition_id, e.run_id, e.id, t.id, 'c' || e.n, 'succeeded', 1, at, at, at, at
    from input e join numbered t on t.n = e.n % $4::int
)
insert into tidegate.workflow_run_steps (id, workflow_run_id, name, status, result, created_at, updated_at)
select pg_temp.id(ms, n, 2), run_id, 'one', 'succeeded', '1', at, at from input where n % 4 = 0
"""
# The events of what waits. $4 is the present ms; a ms has as many ids as the counter has values.
_WAITING = """
numbered as (
  select t.id, t.workflow_definition_id, substr(t.name, 2)::int as n from tidegate.workflow_event_triggers t
   where t.created_by = 'bench' and t.name ~ '^t[0-9]+$'
), input as materialized (
  select n, ms, pg_temp.id(ms, n, 0) as id, pg_temp.id(ms, n, 1) as run_id, 's' || n % $3::int as source,
         n % $5::int as trigger
    from generate_series($1::bigint, $2::bigint) n, lateral (select $4::bigint + n / 4096 as ms) m
), stored as (
  insert into tidegate.workflow_events
    (id, external_id, type, source, occurred_at, received_at, ingress_sequence, payload, correlation_id)
  select id, 'e' || n, 'tick', source, now(), now(), n, '{}', 'c' || n from input
), named as (
  insert into tidegate.event_external_ids (external_id, source, event_id) select 'e' || n, source, id from input
)"""
_HELD_EVENTS = f"""
with {_WAITING}
insert into tidegate.event_ingress_retries
  (event_id, source, ingress_sequence, retry_state, attempts, next_attempt_at, reason)
select id, source, n, 'scheduled', 1, now() + (n % 36000 - 200) * interval '100 ms',
       case when n % $3::int % 5 = 0 then 'paused' when n % 7 = 0 then 'breaker_open' else 'rate_limit' end
  from input
"""
_HELD_DELIVERIES = f"""
with {_WAITING}
insert into tidegate.workflow_trigger_deliveries
  (id, trigger_id, event_id, status, attempts, retry_state, next_attempt_at, retry_attempts, reason, source,
   concurrency_key, ingress_sequence)
select e.run_id, t.id, e.id, 'throttled', 1, 'scheduled', now() + (e.n % 36000 - 100) * interval '100 ms', 1,
       case e.n % 4 when 0 then 'source_paused' when 1 then 'concurrency' when 2 then 'paused' else 'throttle' end,
       e.source, case when e.n % 4 = 1 then '' end, e.n
  from input e join numbered t on t.n = e.trigger
"""
_WAITING_STEPS = f"""
with {_WAITING}, delivered as (
  insert into tidegate.workflow_trigger_deliveries
    (id, trigger_id, event_id, status, attempts, launched_at, workflow_run_id, source, ingress_sequence)
  select e.run_id, t.id, e.id, 'launched', 1, now(), e.run_id, e.source, e.n
    from input e join numbered t on t.n = e.trigger
), run as (
  insert into tidegate.workflow_runs
    (id, workflow_definition_id, delivery_id, event_id, trigger_id, correlation_id, status, attempts, started_at,
     next_attempt_at)
  select e.run_id, t.workflow_definition_id, e.run_id, e.id, t.id, 'c' || e.n, 'pending', 1, now(),
         now() + (e.n % 3600 - 20) * interval '1 s'
    from input e join numbered t on t.n = e.trigger
)
insert into tidegate.workflow_run_steps
  (id, workflow_run_id, name, status, retry_state, next_attempt_at, retry_attempts, retry_metadata)
select pg_temp.id(ms, n, 2), run_id, 'one', 'pending', 'scheduled', now() + (n % 3600 - 20) * interval '1 s', 1,
       '{{"reason": "error"}}'
  from input
"""
TABLES = (
    "workflow_events", "event_ingress_retries", "workflow_trigger_deliveries", "workflow_runs", "workflow_run_steps",
    "event_decisions", "event_external_ids",
)  # fmt: skip
NAMES = ", ".join(f"tidegate.{table}" for table in TABLES)


async def database(stage: Stage, *, events: int, retries: int, days: int = DAYS) -> str:
    """The address of a database with so many; loaded by the first figure that asks, and shared. Not yet vacuumed, and
    nothing in it is until `settle`."""
    url, is_new = await stage.kept("bench_history")
    if is_new:
        connection = await asyncpg.connect(url, server_settings={"jit": "off"}, command_timeout=900)
        try:
            await add_days(connection, days)
            await set_autovacuum(connection, is_on=False)
            helper = await asyncpg.connect(url, server_settings={"jit": "off"}, command_timeout=900)
            await load(connection, helper, events=events, retries=retries, days=days)
            await helper.close()
            await connection.execute(f"analyze {NAMES}")
        finally:
            await connection.close()
    return url


async def add_days(connection: Any, days: int) -> None:
    """Partitions for so many days before today, and for today."""
    await connection.execute(_ADD_DAYS, days)


async def set_autovacuum(connection: Any, *, is_on: bool, tables: Sequence[str] = TABLES) -> None:
    """Let the server vacuum these tables by itself, or not. Partitions that are added later have its default."""
    change = "reset (autovacuum_enabled)" if is_on else "set (autovacuum_enabled = false)"
    for row in await connection.fetch(_LEAVES, list(tables)):
        await connection.execute(f"alter table {row[0]} {change}")


async def load(
    connection: Any, *helpers: Any, events: int, retries: int, days: int = DAYS, chunk: int = 100_000
) -> Mapping[str, int]:
    """So many finished events, over so many days before today; and so many retries that wait: six of ten are events,
    three deliveries, one a step.

    Connections that help take a part of the events each.
    """
    await connection.execute("set statement_timeout = 0")
    await add_days(connection, days)
    for given in (connection, *helpers):
        await given.execute(_IDS)
    await connection.execute(_STATES, SOURCES, TRIGGERS)
    begin, present = await connection.fetchrow(_TIMES, days)
    chunks = iter([(first, min(events, first + chunk - 1)) for first in range(1, events + 1, chunk)])

    async def finish(given: Any) -> None:
        for first, last in chunks:
            await given.execute(_FINISHED, first, last, SOURCES, TRIGGERS, begin, days, events)

    await asyncio.gather(*(finish(given) for given in (connection, *helpers)))
    counts = {"events": retries * 6 // 10, "deliveries": retries * 3 // 10, "steps": retries // 10}
    first = events + 1
    for kind, statement in (("events", _HELD_EVENTS), ("deliveries", _HELD_DELIVERIES), ("steps", _WAITING_STEPS)):
        await connection.execute(statement, first, first + counts[kind] - 1, SOURCES, present, TRIGGERS)
        first += counts[kind]
    await connection.execute(f"select setval('tidegate.ingress_sequence', {first})")
    return counts


async def settle(connection: Any) -> None:
    """What the server does by itself within minutes: statistics, and a mark on the pages whose rows everyone sees."""
    await connection.execute(f"vacuum (analyze) {NAMES}")
    await set_autovacuum(connection, is_on=True)
