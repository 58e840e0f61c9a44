"""The database's side of the story: triggers that write down who held a run and what waited until when, whether all is
done, and all rows at the end.

The story is written by the database itself, in the transactions that it tells of: no process can forget or invent it.
"""

from __future__ import annotations

import time
from typing import Any

import asyncpg

from chaos.cluster import LIMITS
from chaos.records import DeliveryRow, Dump, EventRow, Owned, RunRow, StepRow, Waited
from tidegate.store import doctor
from tidegate.store.db import Database

# A plan that has just been asked for is not stuck.
GRACE_MS = 2000

_HISTORY = """
create schema if not exists chaos;
create table chaos.owned (
  n bigserial, run_id uuid, at timestamptz, worker text, due_at timestamptz, lease_ended boolean
);
create table chaos.waited (
  n bigserial, kind text, subject uuid, name text, at timestamptz, due_at timestamptz, went_on boolean
);

create function chaos.keep_run() returns trigger language plpgsql as $$
begin
  if tg_op = 'INSERT' then
    insert into chaos.owned (run_id, at, worker, due_at, lease_ended)
    values (new.id, new.updated_at, new.claimed_by, new.next_attempt_at, false);
  elsif old.claimed_by is distinct from new.claimed_by or old.claim_generation <> new.claim_generation then
    insert into chaos.owned (run_id, at, worker, due_at, lease_ended)
    values (new.id, new.updated_at, new.claimed_by, case when new.status = 'running' then old.next_attempt_at end,
            new.status = 'pending' and old.claim_expires_at <= tidegate.now());
  end if;
  return null;
end $$;
create trigger chaos_keep after insert or update on tidegate.workflow_runs
  for each row execute function chaos.keep_run();

create function chaos.keep_step() returns trigger language plpgsql as $$
begin
  if new.retry_state = 'scheduled' then
    insert into chaos.waited (kind, subject, name, at, due_at, went_on)
    values ('step', new.workflow_run_id, new.name, new.updated_at, new.next_attempt_at, false);
  end if;
  return null;
end $$;
create trigger chaos_keep after insert or update on tidegate.workflow_run_steps
  for each row execute function chaos.keep_step();

-- A delivery that waits for a slot is launched when one is free: its time is only a last resort.
create function chaos.keep_delivery() returns trigger language plpgsql as $$
begin
  if old.retry_state = 'scheduled' and new.status = 'launched' and old.reason is distinct from 'concurrency' then
    insert into chaos.waited (kind, subject, name, at, due_at, went_on)
    values ('delivery', new.id, old.reason, new.launched_at, old.next_attempt_at, true);
  end if;
  return null;
end $$;
create trigger chaos_keep after update on tidegate.workflow_trigger_deliveries
  for each row execute function chaos.keep_delivery();

create function chaos.keep_event() returns trigger language plpgsql as $$
begin
  if old.retry_state = 'scheduled' and (tg_op = 'DELETE' or new.retry_state = 'completed') then
    insert into chaos.waited (kind, subject, name, at, due_at, went_on)
    values ('event', old.event_id, old.reason, clock_timestamp(), old.next_attempt_at, true);
  end if;
  return null;
end $$;
create trigger chaos_keep after update or delete on tidegate.event_ingress_retries
  for each row execute function chaos.keep_event();
"""

_UNFINISHED = """
select (select count(*) from tidegate.event_inbox) as undecided_events,
       (select count(*) from tidegate.event_ingress_retries where retry_state in ('scheduled', 'running'))
         as held_events,
       (select count(*) from tidegate.workflow_trigger_deliveries where retry_state in ('scheduled', 'running'))
         as waiting_deliveries,
       (select count(*) from tidegate.workflow_runs where status in ('pending', 'running')) as unfinished_runs,
       (select count(*) from tidegate.workflow_run_steps where retry_state in ('scheduled', 'running')) as waiting_steps
"""

_EVENTS = "select id::text, external_id, type, source from tidegate.workflow_events"
_DELIVERIES = """
select d.id::text, d.event_id::text, d.trigger_id::text, w.slug as workflow, e.source, d.status, d.retry_state,
       d.workflow_run_id::text as run_id, d.dedupe_key, d.launched_at
  from tidegate.workflow_trigger_deliveries d
  join tidegate.workflow_events e on e.id = d.event_id
  join tidegate.workflow_event_triggers t on t.id = d.trigger_id
  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
"""
_RUNS = """
select r.id::text, w.slug as workflow, r.event_id::text, r.trigger_id::text, r.delivery_id::text, r.concurrency_key,
       r.status, r.error, r.attempts, r.created_at, r.finished_at
  from tidegate.workflow_runs r join tidegate.workflow_definitions w on w.id = r.workflow_definition_id
"""
_STEPS = """
select workflow_run_id::text as run_id, name, kind, status, retry_state, updated_at from tidegate.workflow_run_steps
"""
_OWNED = """
select run_id::text, at, worker, due_at, coalesce(lease_ended, false) as lease_ended from chaos.owned order by n
"""
_WAITED = "select kind, subject::text, coalesce(name, '') as name, at, due_at, went_on from chaos.waited order by n"
_TRIGGERS = """
select w.slug, t.throttle_count, t.throttle_window_ms, t.max_concurrency, t.idempotency_key, t.idempotency_window_ms
  from tidegate.workflow_event_triggers t
  join tidegate.workflow_definitions w on w.id = t.workflow_definition_id
"""


class Clock:
    """Turns the database's times into those of the machine's monotonic clock: measured at two moments, so that a wall
    clock that is being corrected does not matter."""

    def __init__(self) -> None:
        self._measured: list[tuple[float, float]] = []

    async def measure(self, connection: Any) -> None:
        """Compare the clocks; the quickest answer of several tells best."""
        best: tuple[float, float, float] | None = None
        for _ in range(20):
            before = time.monotonic()
            theirs = await connection.fetchval("select extract(epoch from clock_timestamp())::float8")
            taken = time.monotonic() - before
            if best is None or taken < best[0]:
                best = (taken, theirs, theirs - before - taken / 2)
        assert best is not None
        self._measured.append(best[1:])

    def monotonic(self, epoch: float) -> float:
        """The database's time, on our clock."""
        (first_at, first), (last_at, last) = self._measured[0], self._measured[-1]
        share = (epoch - first_at) / (last_at - first_at) if last_at > first_at else 0.0
        return epoch - (first + (last - first) * min(1.0, max(0.0, share)))


async def watch(url: str, clock: Clock) -> None:
    """Have the database write its story from now on."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(_HISTORY)
        await clock.measure(connection)
    finally:
        await connection.close()


async def unfinished(url: str) -> dict[str, int]:
    """What is not done, by kind."""
    connection = await asyncpg.connect(url)
    try:
        return dict(await connection.fetchrow(_UNFINISHED))
    finally:
        await connection.close()


async def dump(url: str, clock: Clock) -> Dump:
    """Everything that is judged."""
    connection = await asyncpg.connect(url)
    try:
        await clock.measure(connection)

        async def rows(query: str) -> list[dict[str, Any]]:
            return [{k: _time(v, clock) for k, v in row.items()} for row in await connection.fetch(query)]

        triggers = await rows(_TRIGGERS)
        return Dump(
            events=[EventRow(**row) for row in await rows(_EVENTS)],
            deliveries=[DeliveryRow(**row) for row in await rows(_DELIVERIES)],
            runs=[RunRow(**row) for row in await rows(_RUNS)],
            steps=[StepRow(**row) for row in await rows(_STEPS)],
            owned=[Owned(**row) for row in await rows(_OWNED)],
            waited=[Waited(**row) for row in await rows(_WAITED)],
            orphans=await _orphans(url),
            unfinished=dict(await connection.fetchrow(_UNFINISHED)),
            max_concurrency={t["slug"]: t["max_concurrency"] for t in triggers if t["max_concurrency"]},
            throttles={
                t["slug"]: (t["throttle_count"], t["throttle_window_ms"]) for t in triggers if t["throttle_count"]
            },
            limits=LIMITS,
            idempotency_windows={t["slug"]: t["idempotency_window_ms"] for t in triggers if t["idempotency_key"]},
        )
    finally:
        await connection.close()


async def _orphans(url: str) -> dict[str, int]:
    database = Database(url, "chaos", size=1)
    try:
        async with database.transaction() as connection:
            return {one.name: one.total for one in await doctor.orphans(connection, grace_ms=GRACE_MS)}
    finally:
        await database.close()


def _time(value: Any, clock: Clock) -> Any:
    return clock.monotonic(value.timestamp()) if hasattr(value, "timestamp") else value
