"""Fairness: what a source that floods, or a workflow with many slow runs, costs the others; and shares by weight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import asyncpg
import msgspec

from bench import gate, marks, neighbours
from bench.client import Job, Report
from bench.latency import Latency, latency
from bench.stage import Stage, execute, prepared, publish, without_triggers
from tidegate.flow import control
from tidegate.flow.decide.dispatch import Dispatch
from tidegate.model.source import RateLimit
from tidegate.store.db import Database

FLOOD = "flood.api"
FLOOD_TYPE, SLOW_TYPE = "flood.created", "slow.created"
SLOW_SECONDS = 1.0
WARM_UP = 20
IDLE_PER_SECOND = 5
LIMIT = RateLimit(limit=1000, interval_ms=1000)
# The numbers of the flood's events begin here: the others' are below.
FIRST_OF_FLOOD = 1_000_000
ROUNDS, BATCH, WEIGHTS = 25, 500, (1, 2, 3)

_UNDECIDED = "select exists (select from tidegate.event_inbox where source = $1)"
_LAST = "select max(created_at) from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id "
_LAST += "where e.source = $1"
_SLOW = "select tidegate.publish($1, 'slow.api', jsonb_build_object('id', -1)) from generate_series(1, $2::int)"
_SHARES = """
insert into tidegate.event_scheduler_sources (source, weight, updated_by)
select 's' || n, ($1::bigint[])[n % cardinality($1) + 1], 'bench' from generate_series(1, $2::int) n
"""
_FILL = """
select tidegate.publish('order.created', 's' || n, '{}')
  from (select n from generate_series(1, $1::int) n, generate_series(1, $2::int) k order by k, n) each_in_turn
"""
_DECIDED = """
select s.weight, $1::int - coalesce(w.waiting, 0) as decided
  from tidegate.event_scheduler_sources s
  left join (select source, count(*) as waiting from tidegate.event_inbox group by 1) w on w.source = s.source
"""


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """Publish to start of a source's events beside a flood of another: those sent while the flood was undecided."""

    flood: int
    latency: Latency
    max_ms: float


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """`idle`: one source alone. `flooded` and `limited`: beside another that floods, without a limit and with one.
    `slow_ms`: from the POST to the start of runs beside `slow_runs` due runs of SLOW_SECONDS of another workflow;
    `slow_delay` is the longest of them, beyond the median of `idle`, in runs. `share_error`: how far the sources are
    from their shares, at most."""

    idle: Latency
    idle_max_ms: float
    flooded: Beside
    limited: Beside
    slow_runs: int
    slow_ms: list[float]
    slow_delay: float
    sources: int
    share_error: float
    neighbours: float | None


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """How much is done."""

    flood: int = 100_000
    events: int = 20
    slow_runs: int = 10_000
    sources: int = 1_000


async def measure(stage: Stage, amount: Amount) -> Fairness:
    """One API and one worker; the shares are decided in this process."""
    with neighbours.watched() as others:
        idle = await _idle(stage, amount)
        flooded = await _flooded(stage, amount, None)
        limited = await _flooded(stage, amount, LIMIT)
        slow = await _slow(stage, amount)
        error = await _shares(stage, amount.sources)
    return Fairness(
        idle=latency(idle), idle_max_ms=round(max(idle), 2), flooded=flooded, limited=limited,
        slow_runs=amount.slow_runs, slow_ms=[round(one, 1) for one in slow],
        slow_delay=_in_runs(max(slow), idle), sources=amount.sources,
        share_error=round(error, 4), neighbours=others.cores,
    )  # fmt: skip


async def _idle(stage: Stage, amount: Amount) -> list[float]:
    path = stage.folder / "fair-idle.marks"
    async with stage.database() as url:
        await without_triggers(url)
        async with stage.running(url, "shared", environment={marks.MARKS: str(path)}) as port:
            await _warm(url, port)
            job = Job(port=port, first=WARM_UP, events=amount.events * 3, batch=1, connections=1,
                      per_second=IDLE_PER_SECOND)  # fmt: skip
            sent = publish(job)
            return _taken(sent, await marks.until(path, WARM_UP + amount.events * 3))


async def _flooded(stage: Stage, amount: Amount, limit: RateLimit | None) -> Beside:
    """The flood is published as fast as it is accepted, in batches of 100; the other source one event a second."""
    path = stage.folder / f"fair-{'limited' if limit else 'flooded'}.marks"
    async with stage.database() as url:
        await without_triggers(url)
        async with stage.running(url, "shared", environment={marks.MARKS: str(path)}) as port:
            await _warm(url, port)
            if limit is not None:
                database = Database(url, "bench", size=1)
                await control.set_limit(database, FLOOD, limit, "bench")
                await database.close()
            flood = Job(port=port, first=FIRST_OF_FLOOD, events=amount.flood, batch=100, connections=4, type=FLOOD_TYPE,
                        source=FLOOD)  # fmt: skip
            job = Job(port=port, first=WARM_UP, events=amount.events, batch=1, connections=1, per_second=1)
            with prepared(flood) as begin, prepared(job) as go:
                flooding = asyncio.create_task(asyncio.to_thread(begin))
                sent = await asyncio.to_thread(go)
                await flooding
            found = await marks.until(path, WARM_UP + amount.events)
            watcher = await asyncpg.connect(url)
            try:
                undecided = await watcher.fetchval(_UNDECIDED, FLOOD)
                last = await watcher.fetchval(_LAST, FLOOD)
            finally:
                await watcher.close()
    until = time.monotonic() if undecided or last is None else last.timestamp() - _offset()
    every = list(zip(_taken(sent, found), sent.sent_at, strict=True))
    taken = [one for one, at in every if at < until]
    if len(taken) < 2:  # a flood that was over at once delayed at least these
        taken = [one for one, _ in every[:2]]
    return Beside(flood=amount.flood, latency=latency(taken), max_ms=round(max(taken), 2))


async def _slow(stage: Stage, amount: Amount) -> list[float]:
    path = stage.folder / "fair-slow.marks"
    async with stage.database() as url:
        await without_triggers(url)
        async with stage.running(url, "shared", environment={marks.MARKS: str(path)}) as port:
            await _warm(url, port)
            await execute(url, statement=_SLOW, arguments=(SLOW_TYPE, amount.slow_runs))
            watcher = await asyncpg.connect(url)
            try:
                async with asyncio.timeout(marks.STALLED_SECONDS):
                    while await watcher.fetchval(  # noqa: ASYNC110 - other processes write it
                        "select count(*) < $1 from tidegate.workflow_runs", min(amount.slow_runs, 40) + WARM_UP
                    ):
                        await asyncio.sleep(0.02)
            finally:
                await watcher.close()
            sent = publish(Job(port=port, first=WARM_UP, events=amount.events, batch=1, connections=1, per_second=1.7))
            return _taken(sent, await marks.until(path, WARM_UP + amount.events))


async def _shares(stage: Stage, sources: int) -> float:
    """Every source has more than is taken; whole rounds, so that each is to have its exact share."""
    each, total = ROUNDS * max(WEIGHTS) + 20, sum(WEIGHTS[n % len(WEIGHTS)] for n in range(1, sources + 1))
    async with stage.database() as url:
        await execute(url, statement=_SHARES, arguments=(list(WEIGHTS), sources))
        await execute(url, statement=_FILL, arguments=(sources, each))
        database = Database(url, "bench", size=2)
        try:
            dispatch = Dispatch(database, batch_size=min(BATCH, max(10, sources // 2)), after_launch=lambda: None)
            await dispatch.run_once()  # by the order of arrival
            async with database.connection() as connection:
                before = [tuple(row) for row in await connection.fetch(_DECIDED, each)]
            done = 0
            while done < ROUNDS * total:
                done += (await dispatch.run_once()).events
            async with database.connection() as connection:
                after = [tuple(row) for row in await connection.fetch(_DECIDED, each)]
        finally:
            await database.close()
    by_rest = sum(found for _, found in after) - sum(found for _, found in before)
    got = [(weight, found - had) for (weight, found), (_, had) in zip(after, before, strict=True)]
    return max(float(abs(count / (weight * by_rest / total) - 1)) for weight, count in got)


async def _warm(url: str, port: int) -> None:
    watcher = await asyncpg.connect(url)
    try:
        await gate.until_listening(watcher, 1)
    finally:
        await watcher.close()
    publish(Job(port=port, first=0, events=WARM_UP, batch=1, connections=1, per_second=20))


def _taken(sent: Report, found: Sequence[marks.Mark]) -> list[float]:
    began_at = {mark.number: mark.times[0] for mark in found}
    return [(began_at[WARM_UP + n] - at) * 1000 for n, at in enumerate(sent.sent_at)]


def _in_runs(longest_ms: float, idle: Sequence[float]) -> float:
    return round((longest_ms - latency(idle).p50_ms) / (SLOW_SECONDS * 1000), 2)


def _offset() -> float:
    return time.time() - time.monotonic()


def lines(found: Fairness) -> list[tuple[str, str]]:
    """The figure for people."""
    idle = f"p50 {found.idle.p50_ms:.1f} ms, p99 {found.idle.p99_ms:.1f} ms, max {found.idle_max_ms:.1f} ms"
    slow = f"{max(found.slow_ms):.0f} ms, {found.slow_delay:.2f} runs"
    return [
        ("publish to start, alone", idle),
        (f"  beside a flood of {found.flooded.flood:,}", _text(found.flooded)),
        (f"  beside one with a limit of {LIMIT.limit}/s", _text(found.limited)),
        (f"start beside {found.slow_runs:,} runs of {SLOW_SECONDS:g} s", f"at most {slow}"),
        (f"shares of {found.sources:,} sources", f"at most {found.share_error:.1%} off"),
        *neighbours.disturbed("fairness", [found.neighbours]),
    ]


def _text(one: Beside) -> str:
    taken = one.latency
    return f"p50 {taken.p50_ms:.1f} ms, p99 {taken.p99_ms:.1f} ms, max {one.max_ms:.1f} ms ({taken.count} events)"
