"""What an examination reads: the server, and every row that waits without a reason or without a way to resume."""

from __future__ import annotations

from datetime import datetime

import msgspec

from tidegate.store.db import Connection, take_time
from tidegate.store.sql import load

_sql = load("doctor")

# Every invariant of the `orphans` query, in words: what the rows it counts are.
ORPHANS: dict[str, str] = {
    "events_held_and_undecided": "events that are held back and in the inbox at once",
    "events_without_a_slot": "held events whose slot belongs to an older plan, with no new plan being made",
    "events_claimed_by_nobody": "held events whose claim is over and that nobody released",
    "deliveries_without_a_time": "deliveries that are undecided and not to be looked at again",
    "deliveries_without_a_slot": "waiting deliveries whose time belongs to an older plan, with no new plan being made",
    "deliveries_claimed_by_nobody": "deliveries whose claim is over and that nobody released",
    "deliveries_of_deleted_triggers": "deliveries that wait for a trigger that was deleted",
    "deliveries_waiting_for_a_free_slot": "deliveries that wait for a concurrency slot that nobody holds",
    "deliveries_waiting_for_no_budget": "deliveries that wait for a budget that is not there",
    "deliveries_waiting_for_a_free_budget_slot": "first in line for a slot of a budget that nobody holds",
    "steps_waiting_for_a_free_budget_slot": "steps that are first in line for a slot of a budget that nobody holds",
    "steps_waiting_for_no_budget": "steps that wait for a budget and stand in no line",
    "budget_places_of_nobody": "places in line of steps that do not wait",
    "budget_holders_without_a_run": "notes that a run holds a budget, without an unfinished run",
    "runs_waiting_for_a_free_slot": "runs that wait for a slot to go on that no run holds",
    "slot_waits_without_a_run": "notes that a run waits for a slot, without a run that does",
    "deliveries_stored_twice": "deliveries that wait and are decided at once",
    "runs_stored_twice": "runs that are unfinished and finished at once",
    "launches_without_a_run": "deliveries that launched, without their run",
    "runs_without_a_launch": "runs of deliveries that are gone or did not launch them",
    "collected_by_nobody": "deliveries that are collected in a window that is not to be launched",
    "collected_without_a_run": "deliveries that are collected by a run that is not there",
    "windows_of_nobody": "windows that are open or closed, without the delivery that waits for them",
    "waits_of_nobody": "waits for events whose run or step has ended",
    "steps_that_wait_for_nothing": "steps that wait for events, without the wait",
    "external_ids_without_an_event": "producers' ids of events that are not there",
    "held_events_without_an_event": "held events that are not there",
    "dead_letters_without_an_event": "dead letters of events that are not there",
    "inbox_rows_without_an_event": "places in the inbox of events that are not there",
    "deliveries_without_an_event": "deliveries of events that are not there",
    "deliveries_without_a_trigger": "deliveries of triggers that are not there",
    "runs_without_an_event": "runs of events that are not there",
    "runs_without_a_definition": "runs of workflows that are not there",
    "steps_without_a_run": "steps of runs that are not there",
    "runs_claimed_by_nobody": "runs whose claim is over and that nobody released",
    "runs_past_their_deadline": "runs that wait for longer than they may",
    "steps_of_finished_runs": "steps that wait in a run that has ended",
    "steps_claimed_by_nobody": "steps whose claim is over and that nobody released",
    "breakers_waiting_for_an_ended_run": "half-open breakers whose probe has ended or is gone",
    "source_plans_without_an_end": "sources whose events have been getting new slots for too long",
    "trigger_plans_without_an_end": "triggers whose deliveries have been getting new times for too long",
    "dead_letters_not_replayed_in_time": "dead letters that were to be replayed by now",
    "events_not_replayed_in_time": "events that were to be decided again by now",
    "ticks_not_published_in_time": "schedules whose tick was to be published by now",
}
# The unique indexes that guarantee "at most once".
GUARDS = (
    "workflow_events_pkey",
    "event_external_ids_pkey",
    "workflow_trigger_deliveries_live_pkey",
    "workflow_trigger_deliveries_history_pkey",
    "workflow_runs_live_pkey",
    "workflow_runs_history_pkey",
    "workflow_run_steps_pkey",
    "trigger_idempotency_keys_pkey",
    "trigger_windows_open_key",
    "dead_letters_open_key",
)


class Orphans(msgspec.Struct, frozen=True, kw_only=True):
    """How many rows break one invariant, and one of them."""

    name: str
    total: int
    example: str | None


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The database server as this session sees it."""

    version: int
    version_text: str
    fsync: str
    full_page_writes: str
    synchronous_commit: str
    synchronous_standby_names: str
    is_read_only: bool
    clock: datetime
    connections: int
    max_connections: int
    max_locks: int


async def orphans(connection: Connection, grace_ms: int) -> list[Orphans]:
    """The rows that break each invariant. Inside a transaction: it may take its time."""
    connection = await take_time(connection)
    return [Orphans(**dict(row)) for row in await connection.fetch(_sql["orphans"], grace_ms, list(ORPHANS))]


async def missing_guards(connection: Connection) -> list[str]:
    """The unique indexes that are not there, or not valid."""
    found = {row["name"] for row in await connection.fetch(_sql["guards"], list(GUARDS))}
    return [name for name in GUARDS if name not in found]


async def server(connection: Connection) -> ServerFacts:
    """What the server is like, now."""
    return ServerFacts(**dict(await connection.fetchrow(_sql["server"]) or {}))


async def own_clock_offset(connection: Connection) -> float:
    """How far `tidegate.now()` is from the server's clock, in seconds."""
    return float(await connection.fetchval(_sql["own_clock"]))
