"""The source gate: how exactly a limit is kept and used by many workers, how a backlog drains, what a limit costs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta
from functools import partial
from statistics import median
from typing import NamedTuple

import asyncpg
import msgspec

from bench import pipeline, side
from bench.client import Job
from bench.stage import Stage, publish
from tidegate.model.source import RateLimit

STALLED_SECONDS = 300
NEVER_BITES = RateLimit(limit=1_000_000_000, interval_ms=1000)

_LAUNCHES = """
select d.launched_at from tidegate.workflow_trigger_deliveries d where d.status = 'launched' order by 1
"""
RUNS = "select count(*) from tidegate.workflow_runs"
# How often something waited: an event for its source, a delivery for its trigger.
_ATTEMPTS = """
select (select coalesce(sum(attempts), 0) from tidegate.event_ingress_retries)
     + (select coalesce(sum(retry_attempts), 0) from tidegate.workflow_trigger_deliveries)
"""
_IN_ORDER = """
select count(*) from (
  select e.ingress_sequence < lag(e.ingress_sequence) over (order by d.launched_at, e.ingress_sequence) as is_behind
    from tidegate.workflow_trigger_deliveries d join tidegate.workflow_events e on e.id = d.event_id) x
 where is_behind
"""


class Launches(NamedTuple):
    """What a backlog left behind: the launch times in order, how often something waited, launches out of order."""

    times: list[datetime]
    attempts: int
    out_of_order: int

    @property
    def took_seconds(self) -> float:
        """From the first launch to the last."""
        return (self.times[-1] - self.times[0]).total_seconds()


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """A limit under a manifold backlog. `most_in_any_interval` must not exceed `limit`; `use` is of what it allows.
    `launches` are those of each interval since the first."""

    workers: int
    limit: int
    interval_ms: int
    events: int
    most_in_any_interval: int
    use: float
    launches: list[int]


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


async def accuracy(stage: Stage, limit: int, intervals: int, workers: int) -> Accuracy:
    """Several workers, one source, `intervals` times the limit published at once."""
    rate = RateLimit(limit=limit, interval_ms=1000)
    found = await launches(stage, limit * intervals, partial(pipeline.set_limit, limit=rate), workers)
    return judged(found, limit, rate.interval_ms, workers)


def judged(found: Launches, limit: int, interval_ms: int, workers: int) -> Accuracy:
    """How exactly a backlog kept a limit, and how much of it was used."""
    times, interval = found.times, timedelta(milliseconds=interval_ms)
    return Accuracy(
        workers=workers,
        limit=limit,
        interval_ms=interval_ms,
        events=len(times),
        most_in_any_interval=most_in_any(times, interval),
        use=round(len(times) / (limit * found.took_seconds / (interval_ms / 1000)), 3),
        launches=_by_interval(times, interval),
    )


async def drain(stage: Stage, events: int, limit: int) -> Drain:
    """One worker lets a backlog through."""
    rate = RateLimit(limit=limit, interval_ms=1000)
    found = await launches(stage, events, partial(pipeline.set_limit, limit=rate))
    took, ideal = found.took_seconds, events / limit
    return Drain(
        events=events,
        limit=limit,
        took_seconds=round(took, 2),
        ideal_seconds=ideal,
        ratio=round(took / ideal, 3),
        attempts_per_event=round(found.attempts / events, 3),
        out_of_order=found.out_of_order,
    )


async def cost(stage: Stage, events: int, turns: int) -> LimitCost:
    """The pipeline without a limit and with one that never bites."""
    without: list[float] = []
    limited: list[float] = []
    for turn in range(turns):
        for limit in (None, NEVER_BITES) if turn % 2 == 0 else (NEVER_BITES, None):
            prepare = None if limit is None else partial(pipeline.set_limit, limit=limit)
            found = await pipeline.measure(stage, events, prepare)
            (without if limit is None else limited).append(found.per_second)
    ratios = [round(b / a, 3) for a, b in zip(without, limited, strict=True)]
    return LimitCost(
        turns=ratios,
        without_per_second=round(median(without), 1),
        with_per_second=round(median(limited), 1),
        ratio=median(ratios),
    )


def accuracy_lines(found: Accuracy) -> list[tuple[str, str]]:
    """The figure for people."""
    most = f"at most {found.most_in_any_interval} of {found.limit} in any interval"
    return [(f"limit kept by {found.workers} workers", f"{most}, {found.use:.1%} of the allowance used")]


def drain_lines(found: Drain) -> list[tuple[str, str]]:
    """The figure for people."""
    rest = f"{found.attempts_per_event:.2f} attempts per event, {found.out_of_order} out of order"
    return [(f"drain of {found.events:,} at {found.limit:,}/s", f"{found.ratio:.3f} x ideal, {rest}")]


def cost_lines(found: LimitCost) -> list[tuple[str, str]]:
    """The figure for people."""
    return [("throughput with an idle limit", f"{side.spread(found.turns)} of that without")]


def most_in_any(times: list[datetime], interval: timedelta) -> int:
    """The most launches in any sliding interval."""
    most, first = 0, 0
    for last, at in enumerate(times):
        while times[first] <= at - interval:
            first += 1
        most = max(most, last - first + 1)
    return most


def _by_interval(times: list[datetime], interval: timedelta) -> list[int]:
    counts = Counter((at - times[0]) // interval for at in times)
    return [counts[number] for number in range(max(counts) + 1)]


async def launches(stage: Stage, events: int, prepare: Callable[[str], Awaitable[None]], workers: int = 1) -> Launches:
    """Publish a backlog to running workers, and wait for every run. `prepare` is given the database's address."""
    async with stage.database() as url:
        await prepare(url)
        async with stage.running(url, "nothing", workers) as port:
            watcher = await asyncpg.connect(url)
            try:
                await until_listening(watcher, workers)
                publish(Job(port=port, first=0, events=events, batch=100, connections=8))
                await until(watcher, RUNS, events)
                rows = await watcher.fetch(_LAUNCHES)
                attempts, behind = await watcher.fetchval(_ATTEMPTS), await watcher.fetchval(_IN_ORDER)
            finally:
                await watcher.close()
    return Launches([row[0] for row in rows], int(attempts), int(behind))


async def until_listening(watcher: asyncpg.Connection, workers: int) -> None:
    """Wait until so many workers are ready."""
    await until(watcher, pipeline.LISTENING, workers)


async def until(watcher: asyncpg.Connection, question: str, count: int) -> None:
    """Wait until the question's answer is at least `count`."""
    async with asyncio.timeout(STALLED_SECONDS):
        while await watcher.fetchval(question) < count:  # noqa: ASYNC110 - the event is in the database
            await asyncio.sleep(0.1)
