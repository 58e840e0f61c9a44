"""Retention: how fast old days of history are removed, and what it costs those who publish meanwhile.

History is removed as a worker does it: step by step, with its rest after each. Whole days alone, so what is removed
is all that came of the events of a day.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from itertools import count
from statistics import median

import asyncpg
import msgspec

from bench import gate, history, neighbours, pipeline, side, single
from bench.client import Job
from bench.latency import Latency, latency
from bench.stage import Stage, prepared, publish
from tidegate.flow.keep.prune import DAYS_FROM_SECONDS, Prune
from tidegate.model.retention import Retention
from tidegate.store.db import Database
from tidegate.worker.supervisor import PRUNE_BATCH_SECONDS

# These days before today are too young for a retention that goes by days.
YOUNG = DAYS_FROM_SECONDS // 86_400
# The share of the most that is accepted that is published while days are dropped, and while none are.
PACE = 0.5

# How old a day has to be so that the first $1 of $2 days before today are, and no other; to a minute.
_OLDER_SECONDS = """
select (extract(epoch from tidegate.now() - ((tidegate.now() at time zone 'UTC')::date - $2::int + $1::int)::timestamp
        at time zone 'UTC'))::bigint - 60
"""


class Amount(msgspec.Struct, frozen=True, kw_only=True):
    """How much is removed: by itself `days` of history, of `events` together; in each turn beside load `busy_days`, of
    `busy_events` together."""

    days: int
    events: int
    busy_days: int
    busy_events: int


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """Days that were removed with nothing beside; the ratio is to the rate at which events are launched."""

    events: int
    days: int
    seconds: float
    per_second: float
    cpu_us: float | None
    launched: list[float]
    ratio: float


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A turn of steady load: how many a second were published and launched, and how long each POST took; where days
    were dropped, of those sent meanwhile."""

    per_second: float
    latency: Latency
    dropped_days: int
    neighbours: float | None


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """The ratios are of each turn with days dropped to the one without."""

    removal: Removal
    pace: float
    quiet: list[Turn]
    dropping: list[Turn]
    p99_ratios: list[float]
    rate_ratios: list[float]
    neighbours: list[float | None]


async def measure(stage: Stage, amount: Amount, launched: int, singles: int, turns: int) -> Kept:
    """First the removal alone, then beside load in turns."""
    before = await pipeline.measure(stage, launched)
    removal = await _remove(stage, amount)
    after = await pipeline.measure(stage, launched)
    rates = [before.per_second, after.per_second]
    removal = msgspec.structs.replace(removal, launched=rates, ratio=round(removal.per_second / median(rates), 2))
    pace, quiet, dropping = await _beside(stage, amount, singles, turns)
    pairs = list(zip(dropping, quiet, strict=True))
    return Kept(
        removal=removal,
        pace=round(pace, 1),
        quiet=quiet,
        dropping=dropping,
        p99_ratios=[round(ours.latency.p99_ms / theirs.latency.p99_ms, 3) for ours, theirs in pairs],
        rate_ratios=[round(ours.per_second / theirs.per_second, 3) for ours, theirs in pairs],
        neighbours=[turn.neighbours for turn in (*quiet, *dropping)] + [before.neighbours, after.neighbours],
    )


def lines(found: Kept) -> list[tuple[str, str]]:
    """The figure for people."""
    removal = found.removal
    cpu = f", {removal.cpu_us:,.1f} µs of CPU each" if removal.cpu_us is not None else ""

    def text(turns: list[Turn]) -> str:
        p50, p99 = (median(getattr(turn.latency, name) for turn in turns) for name in ("p50_ms", "p99_ms"))
        return f"{median(turn.per_second for turn in turns):,.0f}/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms"

    days = sum(turn.dropped_days for turn in found.dropping)
    return [
        (
            f"removed: {removal.events:,} events of {removal.days} days",
            f"{removal.per_second:,.0f} events/s{cpu}: {removal.ratio:.1f} times the rate of launches",
        ),
        (f"single POSTs at {found.pace:,.0f}/s until launched", text(found.quiet)),
        (f"  while {days} days are dropped", text(found.dropping)),
        ("  p99 against none dropped", side.spread(found.p99_ratios)),
        ("  rate against none dropped", side.spread(found.rate_ratios)),
        *neighbours.disturbed("retention", found.neighbours),
    ]


async def _remove(stage: Stage, amount: Amount) -> Removal:
    async with stage.database() as url:
        days = amount.days + YOUNG
        await _load(stage, url, amount.events * days // amount.days, days)
        with neighbours.watched() as others:
            started_at = time.monotonic()
            removed = await _prune(url, amount.days, days)
            seconds = time.monotonic() - started_at
    if removed["days"] != amount.days:
        raise RuntimeError(f"{amount.days} days are old, but {removed['days']} were dropped")
    events = removed["external_ids"]  # each event has one
    return Removal(
        events=events,
        days=removed["days"],
        seconds=round(seconds, 3),
        per_second=round(events / seconds, 1),
        cpu_us=others.our_us(events),
        launched=[],
        ratio=0,
    )


async def _load(stage: Stage, url: str, events: int, days: int) -> None:
    """Finished events over days before today, as the server has them after minutes: vacuumed and written out."""
    connections = [await asyncpg.connect(url, server_settings={"jit": "off"}, command_timeout=900) for _ in range(2)]
    try:
        await history.load(*connections, events=events, retries=0, days=days)
        await history.settle(connections[0])
    finally:
        for connection in connections:
            await connection.close()
    await stage.flush()


async def _prune(url: str, old: int, days: int, is_dropped: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Remove the first `old` of the days, as the worker's loop does; what was removed."""
    connection = await asyncpg.connect(url)
    try:
        older_seconds = await connection.fetchval(_OLDER_SECONDS, old, days)
    finally:
        await connection.close()
    database = Database(url, "bench", size=2)
    removed = {"days": 0, "external_ids": 0}
    try:
        prune = Prune(database, Retention(events_seconds=older_seconds))
        while not (pruned := await prune.run_once()).is_done:
            for table in removed:
                removed[table] += pruned.deleted.get(table, 0)
            if pruned.deleted.get("days"):
                is_dropped()
            await asyncio.sleep(PRUNE_BATCH_SECONDS)
    finally:
        await database.close()
    return removed


async def _beside(stage: Stage, amount: Amount, singles: int, turns: int) -> tuple[float, list[Turn], list[Turn]]:
    """The pace, the turns without and the turns with days dropped. One database, API and worker for all."""
    quiet: list[Turn] = []
    dropping: list[Turn] = []
    async with stage.database() as url:
        days = amount.busy_days * turns + YOUNG
        await _load(stage, url, amount.busy_events * days // amount.busy_days, days)
        watcher = await asyncpg.connect(url, server_settings={"enable_seqscan": "off"})
        try:
            async with stage.running(url, pipeline.LAUNCHED.application, environment=pipeline.KEEP_ALL) as port:
                await gate.until_listening(watcher, 1)
                numbers = count(0, singles)
                job = partial(Job, port=port, events=singles, batch=1, connections=single.CONNECTIONS)
                publish(job(first=next(numbers)))
                await pipeline.reached(watcher, pipeline.LAUNCHED.is_reached)
                sent = publish(job(first=next(numbers)))
                await pipeline.reached(watcher, pipeline.LAUNCHED.is_reached)
                pace = PACE * singles / (time.monotonic() - sent.started_at)
                for turn in range(turns):
                    ways = [
                        (quiet, None),
                        (dropping, partial(_prune, url, amount.busy_days, days - turn * amount.busy_days)),
                    ]
                    for found, remove in ways if turn % 2 == 0 else reversed(ways):
                        found.append(await _load_turn(watcher, job(first=next(numbers), per_second=pace), remove))
        finally:
            await watcher.close()
    if any(turn.dropped_days != amount.busy_days for turn in dropping):
        raise RuntimeError(
            f"in each turn {amount.busy_days} days are old, but {[t.dropped_days for t in dropping]} went"
        )
    return pace, quiet, dropping


async def _load_turn(
    watcher: asyncpg.Connection, job: Job, remove: Callable[..., Awaitable[dict[str, int]]] | None
) -> Turn:
    """Publish at the job's pace; what is removed meanwhile need not last as long, but is waited for."""
    ended: list[float] = []
    with prepared(job) as go, neighbours.watched() as others:
        sending = asyncio.create_task(asyncio.to_thread(go))
        removing = asyncio.ensure_future(remove(is_dropped=lambda: ended.append(time.monotonic()))) if remove else None
        try:
            sent = await sending
            await pipeline.reached(watcher, pipeline.LAUNCHED.is_reached)
            launched_at = time.monotonic()
            removed = await removing if removing else {"days": 0}
        finally:
            if removing:
                removing.cancel()
                with suppress(asyncio.CancelledError):
                    await removing
    until = min(ended[-1], sent.ended_at) if ended else sent.ended_at
    taken = [ms for at, ms in zip(sent.sent_at, sent.latencies_ms, strict=True) if at <= until]
    return Turn(
        per_second=round(job.events / (launched_at - sent.started_at), 1),
        latency=latency(taken),
        dropped_days=removed["days"],
        neighbours=others.cores,
    )
