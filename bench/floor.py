"""The floor: the rows that one event leaves behind, written by plain SQL as fast as one connection can."""

from __future__ import annotations

import time
import uuid
from datetime import UTC, datetime
from typing import Any

import asyncpg
import msgspec

from bench import workload
from bench.stage import Stage
from headgate.clock import uuid7

BATCH = 500

_EVENTS = """
insert into headgate.workflow_events
  (id, external_id, type, source, occurred_at, received_at, payload, correlation_id, metadata)
select id, external_id, type, source, $5, $5, payload::jsonb, id::text, '{}'
  from unnest($1::uuid[], $2::text[], $3::text[], $4::text[], $6::text[])
    as u (id, external_id, type, source, payload)
"""
_DELIVERIES = """
insert into headgate.workflow_trigger_deliveries
  (id, trigger_id, event_id, trigger_version, workflow_run_id, status, attempts, launched_at, created_at, updated_at)
select id, $2, event_id, 1, run_id, 'launched', 1, $3, $3, $3
  from unnest($1::uuid[], $4::uuid[], $5::uuid[]) as u (id, event_id, run_id)
"""
_RUNS = """
insert into headgate.workflow_runs
  (id, workflow_definition_id, delivery_id, event_id, correlation_id, parameters, next_attempt_at, created_at,
   updated_at)
select id, $2, delivery_id, event_id, event_id::text, parameters::jsonb, $3, $3, $3
  from unnest($1::uuid[], $4::uuid[], $5::uuid[], $6::text[]) as u (id, delivery_id, event_id, parameters)
"""
_TRIGGER = "select id, workflow_definition_id from headgate.workflow_event_triggers"


async def measure(stage: Stage, events: int) -> float:
    """Events per second: event, delivery and run, in batches of 500, each in one transaction."""
    async with stage.database() as url:
        connection = await asyncpg.connect(url, server_settings={"jit": "off", "synchronous_commit": "on"})
        try:
            trigger, definition = await connection.fetchrow(_TRIGGER)
            await _write(connection, _batch(0, BATCH, trigger, definition))
            # Made before the clock starts: the floor is what the driver and the database take.
            batches = [
                _batch(first, min(BATCH, events + BATCH - first), trigger, definition)
                for first in range(BATCH, BATCH + events, BATCH)
            ]
            started_at = time.monotonic()
            for batch in batches:
                await _write(connection, batch)
            return events / (time.monotonic() - started_at)
        finally:
            await connection.close()


def _batch(first: int, count: int, trigger: uuid.UUID, definition: uuid.UUID) -> list[tuple[str, tuple[Any, ...]]]:
    numbers, now = range(first, first + count), datetime.now(UTC)
    event_ids, delivery_ids, run_ids = ([uuid7() for _ in numbers] for _ in range(3))
    external_ids = [workload.external_id(n) for n in numbers]
    types, sources = [workload.TYPE] * count, [workload.SOURCE] * count
    payloads = [msgspec.json.encode(workload.payload(n)).decode() for n in numbers]
    parameters = [msgspec.json.encode(workload.parameters(n)).decode() for n in numbers]
    return [
        (_EVENTS, (event_ids, external_ids, types, sources, now, payloads)),
        (_DELIVERIES, (delivery_ids, trigger, now, event_ids, run_ids)),
        (_RUNS, (run_ids, definition, now, delivery_ids, event_ids, parameters)),
    ]


async def _write(connection: Any, batch: list[tuple[str, tuple[Any, ...]]]) -> None:
    async with connection.transaction():
        for statement, arguments in batch:
            await connection.execute(statement, *arguments)
