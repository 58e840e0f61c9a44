"""The source gate: how exactly a limit is kept and used by eight workers, how a backlog drains, what a limit costs."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import datetime, timedelta
from statistics import median

import asyncpg
import msgspec

from bench import pipeline
from bench.client import Job
from bench.stage import Stage, publish
from headgate.model.source import RateLimit

WORKERS = 8
STALLED_SECONDS = 300
NEVER_BITES = RateLimit(limit=1_000_000_000, interval_ms=1000)

_LAUNCHES = """
select d.launched_at from headgate.workflow_trigger_deliveries d where d.status = 'launched' order by 1
"""
_RUNS = "select count(*) from headgate.workflow_runs"
_LISTENING = "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'"
_ATTEMPTS = "select coalesce(sum(attempts), 0) from headgate.event_ingress_retries"
_IN_ORDER = """
select count(*) from (
  select e.ingress_sequence < lag(e.ingress_sequence) over (order by d.launched_at, e.ingress_sequence) as is_behind
    from headgate.workflow_trigger_deliveries d join headgate.workflow_events e on e.id = d.event_id) x
 where is_behind
"""


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """A limit under a tenfold backlog. `most_in_any_interval` must not exceed `limit`; `use` is of what it allows."""

    workers: int
    limit: int
    interval_ms: int
    events: int
    most_in_any_interval: int
    use: float


class Drain(msgspec.Struct, frozen=True, kw_only=True):
    """A held backlog until its last event is launched, against events / limit x interval."""

    events: int
    limit: int
    took_seconds: float
    ideal_seconds: float
    ratio: float
    attempts_per_event: float
    out_of_order: int


class LimitCost(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput with a limit that never bites, against none: turn by turn, the order changing; medians."""

    turns: list[float]
    without_per_second: float
    with_per_second: float
    ratio: float


async def accuracy(stage: Stage, limit: int, intervals: int) -> Accuracy:
    """Eight workers, one source, `intervals` times the limit published at once."""
    rate = RateLimit(limit=limit, interval_ms=1000)
    times, _, _ = await _launches(stage, rate, limit * intervals, WORKERS)
    span = (times[-1] - times[0]).total_seconds()
    possible = limit * span / (rate.interval_ms / 1000)
    return Accuracy(
        workers=WORKERS,
        limit=limit,
        interval_ms=rate.interval_ms,
        events=len(times),
        most_in_any_interval=most_in_any(times, timedelta(milliseconds=rate.interval_ms)),
        use=round(len(times) / possible, 3),
    )


async def drain(stage: Stage, events: int, limit: int) -> Drain:
    """One worker lets a backlog through."""
    times, attempts, behind = await _launches(stage, RateLimit(limit=limit, interval_ms=1000), events, 1)
    took, ideal = (times[-1] - times[0]).total_seconds(), events / limit
    return Drain(
        events=events,
        limit=limit,
        took_seconds=round(took, 2),
        ideal_seconds=ideal,
        ratio=round(took / ideal, 3),
        attempts_per_event=round(attempts / events, 3),
        out_of_order=behind,
    )


async def cost(stage: Stage, events: int, turns: int) -> LimitCost:
    """The pipeline without a limit and with one that never bites."""
    without: list[float] = []
    limited: list[float] = []
    for turn in range(turns):
        for limit in (None, NEVER_BITES) if turn % 2 == 0 else (NEVER_BITES, None):
            (without if limit is None else limited).append(await pipeline.measure(stage, events, limit))
    ratios = [round(b / a, 3) for a, b in zip(without, limited, strict=True)]
    return LimitCost(
        turns=ratios,
        without_per_second=round(median(without), 1),
        with_per_second=round(median(limited), 1),
        ratio=median(ratios),
    )


def most_in_any(times: list[datetime], interval: timedelta) -> int:
    """The most launches in any sliding interval."""
    most, first = 0, 0
    for last, at in enumerate(times):
        while times[first] <= at - interval:
            first += 1
        most = max(most, last - first + 1)
    return most


async def _launches(stage: Stage, limit: RateLimit, events: int, workers: int) -> tuple[list[datetime], int, int]:
    """Publish a backlog to running workers; launch times, attempts, and launches out of order."""
    async with stage.database() as url, stage.api(url) as port:
        await pipeline.set_limit(url, limit)
        with contextlib.ExitStack() as stack:
            for number in range(workers):
                stack.enter_context(stage.worker(url, "nothing", f"worker-{number}"))
            watcher = await asyncpg.connect(url)
            try:
                await _until(watcher, _LISTENING, workers)
                publish(Job(port=port, first=0, events=events, batch=100, connections=8))
                await _until(watcher, _RUNS, events)
                rows = await watcher.fetch(_LAUNCHES)
                attempts, behind = await watcher.fetchval(_ATTEMPTS), await watcher.fetchval(_IN_ORDER)
            finally:
                await watcher.close()
    return [row[0] for row in rows], int(attempts), int(behind)


async def _until(watcher: asyncpg.Connection, question: str, count: int) -> None:
    async with asyncio.timeout(STALLED_SECONDS):
        while await watcher.fetchval(question) < count:  # noqa: ASYNC110 - the event is in the database
            await asyncio.sleep(0.1)
