"""The floor: the rows that one event leaves behind, written by plain SQL as fast as one connection can: until its
run exists, or until it has succeeded with one step."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import msgspec

from bench import neighbours, workload
from bench.rate import Rate
from bench.stage import Stage
from tidegate.clock import uuid7

BATCH = 500

_EVENTS = """
insert into tidegate.workflow_events
  (id, external_id, type, source, occurred_at, received_at, payload, correlation_id, metadata)
select id, external_id, type, source, $5, $5, payload::jsonb, id::text, '{}'
  from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $6::text[])
    as u (id, external_id, type, source, payload)
"""
_DELIVERIES = """
insert into tidegate.workflow_trigger_deliveries
  (id, trigger_id, event_id, trigger_version, workflow_run_id, status, attempts, launched_at, created_at, updated_at)
select id, $2, event_id, 1, run_id, 'launched', 1, $3, $3, $3
  from unnest($1::uuid[], $4::uuid[], $5::uuid[]) as u (id, event_id, run_id)
"""
_RUNS = """
insert into tidegate.workflow_runs
  (id, workflow_definition_id, delivery_id, event_id, correlation_id, parameters, next_attempt_at, created_at,
   updated_at)
select id, $2, delivery_id, event_id, event_id::text, parameters::jsonb, $3, $3, $3
  from unnest($1::uuid[], $4::uuid[], $5::uuid[], $6::text[]) as u (id, delivery_id, event_id, parameters)
"""
RUNNING = """
insert into tidegate.workflow_runs
  (id, workflow_definition_id, trigger_id, delivery_id, event_id, correlation_id, parameters, status, attempts,
   claim_generation, claimed_by, claim_expires_at, next_attempt_at, created_at, started_at, updated_at)
select id, $2, $7, delivery_id, event_id, event_id::text, parameters::jsonb, 'running', 1,
       1, 'bench', $8, $3, $3, $3, $3
  from unnest($1::uuid[], $4::uuid[], $5::uuid[], $6::text[]) as u (id, delivery_id, event_id, parameters)
"""
_STEPS = """
insert into tidegate.workflow_run_steps (id, workflow_run_id, name, status, result, created_at, updated_at)
select id, run_id, 'nothing', 'succeeded', result::jsonb, $4, $4
  from unnest($1::uuid[], $2::uuid[], $3::text[]) as u (id, run_id, result)
"""
FINISH = """
update tidegate.workflow_runs r
   set status = 'succeeded', output = u.output::jsonb, finished_at = $3, next_attempt_at = null, claimed_by = null,
       claim_expires_at = null, updated_at = $3
  from unnest($1::uuid[], $2::text[]) as u (id, output)
 where r.id = u.id and r.status = 'running' and r.claim_generation = 1
"""
TRIGGER = "select id, workflow_definition_id from tidegate.workflow_event_triggers"


# Statements with their arguments, committed together.
Transaction = list[tuple[str, tuple[Any, ...]]]
Made = Callable[[int, int, uuid.UUID, uuid.UUID], list[Transaction]]


def launched(first: int, count: int, trigger: uuid.UUID, definition: uuid.UUID) -> list[Transaction]:
    """Events, deliveries and runs, in one transaction."""
    events, run_ids, delivery_ids, event_ids = _events(first, count, trigger)
    parameters = _json(workload.parameters(n) for n in range(first, first + count))
    runs = (run_ids, definition, datetime.now(UTC), delivery_ids, event_ids, parameters)
    return [[*events, (_RUNS, runs)]]


def succeeded(first: int, count: int, trigger: uuid.UUID, definition: uuid.UUID) -> list[Transaction]:
    """The same with the runs begun; then, in a second transaction, their steps, and the runs ended."""
    events, run_ids, delivery_ids, event_ids = _events(first, count, trigger)
    numbers, now = range(first, first + count), datetime.now(UTC)
    parameters, outputs = _json(workload.parameters(n) for n in numbers), _json(numbers)
    lease_ends_at = now + timedelta(seconds=15)
    running = (run_ids, definition, now, delivery_ids, event_ids, parameters, trigger, lease_ends_at)
    steps = ([uuid7() for _ in numbers], run_ids, outputs, now)
    return [[*events, (RUNNING, running)], [(_STEPS, steps), (FINISH, (run_ids, outputs, now))]]


async def measure(stage: Stage, events: int, made: Made = launched) -> Rate:
    """Events per second, in batches of 500."""
    async with stage.database() as url:
        connection = await asyncpg.connect(url, server_settings={"jit": "off", "synchronous_commit": "on"})
        try:
            trigger, definition = await connection.fetchrow(TRIGGER)
            await _write(connection, made(0, BATCH, trigger, definition))
            # Made before the clock starts: the floor is what the driver and the database take.
            batches = [
                made(first, min(BATCH, events + BATCH - first), trigger, definition)
                for first in range(BATCH, BATCH + events, BATCH)
            ]
            with neighbours.watched() as others:
                started_at = time.monotonic()
                for batch in batches:
                    await _write(connection, batch)
                ended_at = time.monotonic()
            return Rate(round(events / (ended_at - started_at), 1), others.our_us(events), others.cores)
        finally:
            await connection.close()


def _events(
    first: int, count: int, trigger: uuid.UUID
) -> tuple[Transaction, list[uuid.UUID], list[uuid.UUID], list[uuid.UUID]]:
    """Events and deliveries; the ids of the runs, the deliveries and the events."""
    numbers, now = range(first, first + count), datetime.now(UTC)
    event_ids, delivery_ids = ([uuid7() for _ in numbers] for _ in range(2))
    run_ids = delivery_ids  # a run has the id of its delivery
    external_ids = [workload.external_id(n) for n in numbers]
    types, sources = [workload.TYPE] * count, [workload.SOURCE] * count
    payloads = _json(workload.payload(n) for n in numbers)
    statements: Transaction = [
        (_EVENTS, (event_ids, external_ids, types, sources, now, payloads)),
        (_DELIVERIES, (delivery_ids, trigger, now, event_ids, run_ids)),
    ]
    return statements, run_ids, delivery_ids, event_ids


def _json(values: Iterable[Any]) -> list[str]:
    return [msgspec.json.encode(value).decode() for value in values]


async def _write(connection: Any, batch: list[Transaction]) -> None:
    for transaction in batch:
        async with connection.transaction():
            for statement, arguments in transaction:
                await connection.execute(statement, *arguments)
