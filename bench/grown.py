"""Throughput beside a long history and a long line, against empty tables; and whether a statement reads a whole table.

What waits there waits behind pauses, so nobody works on it meanwhile: we measure what it costs to be there.
"""

from __future__ import annotations

from functools import partial
from itertools import count

import asyncpg
import msgspec

from bench import history, neighbours, pipeline, side
from bench.pipeline import Goal, Numbers
from bench.rate import Rate
from bench.side import Side
from bench.stage import Stage, execute, without_triggers

# The slug of the workflow that takes the events, for each goal.
_SLUGS = {pipeline.LAUNCHED: "fulfil", pipeline.SUCCEEDED: "step_once"}
# Only that workflow's trigger among those that `bench.app` has made; the history's own stay as they are.
_ONLY = """
update tidegate.workflow_event_triggers t set status = case when d.slug = $1 then 'active' else 'disabled' end
  from tidegate.workflow_definitions d where d.id = t.workflow_definition_id and d.slug = any ($2)
"""
# A run is due when it is created, so those that wait for another day are not looked at.
_IS_REACHED = """
select not exists (select from tidegate.event_inbox)
   and not exists (select from tidegate.workflow_runs r join tidegate.workflow_definitions d
                     on d.id = r.workflow_definition_id
                    where r.status = 'pending' and r.next_attempt_at <= now() and d.slug = '{slug}')
   and not exists (select from tidegate.workflow_runs where status = 'running')
"""
# Of today, and of yesterday if midnight comes in between: to count all runs would read the whole table.
_RUNS = """
select count(*) from tidegate.workflow_runs r join tidegate.workflow_definitions d on d.id = r.workflow_definition_id
 where d.slug = '{slug}' and r.status = '{status}'
   and r.id >= tidegate.first_of_day((tidegate.now() at time zone 'UTC')::date - 1)
"""
# All of them behind pauses: what waits for a slot or a limit that is free would be launched whatever its time.
_PUT_OFF = """
update tidegate.event_scheduler_sources set paused_at = now(), paused_by = 'bench';
update tidegate.event_scheduler_triggers set paused_at = now(), paused_by = 'bench';
update tidegate.event_ingress_retries set reason = 'paused', next_attempt_at = now() + interval '1 day'
 where retry_state = 'scheduled';
update tidegate.workflow_trigger_deliveries
   set reason = 'paused', concurrency_key = null, next_attempt_at = now() + interval '1 day'
 where retry_state = 'scheduled';
update tidegate.workflow_run_steps set next_attempt_at = now() + interval '1 day' where retry_state = 'scheduled';
update tidegate.workflow_runs set next_attempt_at = now() + interval '1 day' where status = 'pending';
"""
# Of each table, or partition with the name of its table: how often it was read as a whole, and how many rows that were.
_SCANS = """
select s.relid, t.name, coalesce(s.seq_scan, 0), coalesce(s.seq_tup_read, 0)
  from unnest($1::text[]) as t (name)
  join pg_stat_user_tables s
    on s.schemaname = 'tidegate' and regexp_replace(s.relname, '_(live|default|[0-9]{8})$', '') = t.name
"""
_first = count(0, 10_000_000)


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Empty tables and grown ones in turns; the ratios are of the second to the first."""

    empty: Side
    grown: Side
    ratios: list[float]
    cpu_ratio: float | None


class Grown(msgspec.Struct, frozen=True, kw_only=True):
    """Beside so many events over so many days. `whole_table_reads` are the sequential scans of each grown table, summed
    over partitions that are not empty, in all turns, whoever's statement it was."""

    events: int
    days: int
    retries: int
    measured: int
    launched: Work
    succeeded: Work
    whole_table_reads: dict[str, int]


async def measure(stage: Stage, events: int, days: int, retries: int, measured: int, turns: int) -> Grown:
    """Both goals, each in turns."""
    url = await history.database(stage, events=events, retries=retries, days=days)
    connection = await asyncpg.connect(url, command_timeout=900)
    try:
        await connection.execute(_PUT_OFF)
        await history.settle(connection)
        before = await _scans(connection)
        launched = await _work(stage, url, pipeline.LAUNCHED, measured, turns)
        succeeded = await _work(stage, url, pipeline.SUCCEEDED, measured, turns)
        after = await _scans(connection)
    finally:
        await connection.close()
    return Grown(
        events=events,
        days=days,
        retries=retries,
        measured=measured,
        launched=launched,
        succeeded=succeeded,
        whole_table_reads=reads(before, after),
    )


def lines(found: Grown) -> list[tuple[str, str]]:
    """The figure for people."""

    def against(work: Work) -> str:
        cpu = f", {work.cpu_ratio:.2f} of the CPU" if work.cpu_ratio else ""
        return f"{side.spread(work.ratios)} of the empty tables' rate{cpu}"

    read = {table: scans for table, scans in found.whole_table_reads.items() if scans}
    sides = (found.launched.empty, found.launched.grown, found.succeeded.empty, found.succeeded.grown)
    return [
        (f"launched beside {found.events:,} events of {found.days} days", against(found.launched)),
        (f"succeeded beside {found.events:,} events of {found.days} days", against(found.succeeded)),
        ("  whole tables read meanwhile", ", ".join(f"{t} {n} times" for t, n in read.items()) or "none"),
        *neighbours.disturbed("history", [cores for one in sides for cores in one.neighbours]),
    ]


async def _work(stage: Stage, url: str, goal: Goal, events: int, turns: int) -> Work:
    ways = {
        "empty": partial(_empty, stage, goal, events),
        "grown": partial(_beside, stage, url, goal, events),
    }
    found = await side.in_turns(ways, turns)
    empty, grown = found["empty"], found["grown"]
    ratios = side.ratios(grown, empty)
    return Work(empty=empty, grown=grown, ratios=ratios, cpu_ratio=side.cpu_ratio(grown, empty))


async def _empty(stage: Stage, goal: Goal, events: int) -> Rate:
    prepare = without_triggers if goal is pipeline.SUCCEEDED else None
    warm_up = min(pipeline.WARM_UP, events)
    return await pipeline.measure(stage, events, prepare, warm_up=warm_up, goal=goal, environment=pipeline.KEEP_ALL)


async def _beside(stage: Stage, url: str, goal: Goal, events: int) -> Rate:
    slug = _SLUGS[goal]
    await execute(url, statement=_ONLY, arguments=(slug, list(_SLUGS.values())))
    await stage.flush()
    numbers = Numbers(next(_first), min(pipeline.WARM_UP, events), events)
    own = _beside_history(goal, slug)
    return await pipeline.measure_on(stage, url, numbers, goal=own, environment=pipeline.KEEP_ALL)


def _beside_history(goal: Goal, slug: str) -> Goal:
    """The goal for this workflow's runs alone."""
    if goal is pipeline.LAUNCHED:
        return goal._replace(runs=_RUNS.format(slug=slug, status="pending"))
    runs = _RUNS.format(slug=slug, status="succeeded")
    return goal._replace(is_reached=_IS_REACHED.format(slug=slug), runs=runs)


async def _scans(connection: asyncpg.Connection) -> dict[int, tuple[str, int, int]]:
    """Every process that counted has ended by now, and with that has told; this connection is made to."""
    await connection.execute("select pg_stat_force_next_flush()")
    await connection.execute("select pg_stat_clear_snapshot()")
    return {row[0]: (row[1], row[2], row[3]) for row in await connection.fetch(_SCANS, list(history.TABLES))}


def reads(before: dict[int, tuple[str, int, int]], after: dict[int, tuple[str, int, int]]) -> dict[str, int]:
    """The scans in between that read any row; those of partitions that are still empty cost nothing."""
    found = dict.fromkeys(history.TABLES, 0)
    for relation, (table, scans, rows) in after.items():
        _, scans_before, rows_before = before.get(relation, (table, 0, 0))
        if rows > rows_before:
            found[table] += scans - scans_before
    return found
