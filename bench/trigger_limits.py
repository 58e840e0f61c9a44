"""A trigger's limits: how a backlog drains through a throttle, and how much of its concurrency is used."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

import asyncpg
import msgspec

from bench import gate, neighbours, slots_floor
from bench.app import MAX_CONCURRENCY, RUN_SECONDS
from bench.client import Job
from bench.stage import Stage, execute, publish, without_triggers

WINDOW_MS = 1000

_THROTTLE = "update tidegate.workflow_event_triggers set throttle_count = $1, throttle_window_ms = $2"
_SUCCEEDED = "select count(*) from tidegate.workflow_runs where status = 'succeeded'"
_RUNS = "select created_at, started_at, finished_at from tidegate.workflow_runs"


class Span(NamedTuple):
    """One run's times."""

    created_at: datetime
    started_at: datetime
    finished_at: datetime


class ThrottleDrain(msgspec.Struct, frozen=True, kw_only=True):
    """A backlog until its last delivery is launched, against events / limit x window. `most_in_any_window` must not
    exceed `limit`."""

    events: int
    limit: int
    window_ms: int
    most_in_any_window: int
    took_seconds: float
    ideal_seconds: float
    ratio: float
    attempts_per_delivery: float
    out_of_order: int
    neighbours: float | None


class Concurrency(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of known length from the first start to the last finish, against runs / max_concurrency x length.
    `most_unfinished` must not exceed `max_concurrency`. `floor_ratio` is the same by plain SQL (`slots_floor`)."""

    workers: int
    runs: int
    run_ms: float
    max_concurrency: int
    most_unfinished: int
    took_seconds: float
    ideal_seconds: float
    ratio: float
    floor_ratio: float
    neighbours: float | None


async def drain(stage: Stage, events: int, limit: int) -> ThrottleDrain:
    """One worker lets a backlog through one trigger's throttle."""
    prepare = partial(execute, statement=_THROTTLE, arguments=(limit, WINDOW_MS))
    with neighbours.watched() as others:
        found = await gate.launches(stage, events, prepare)
    ideal = events / limit * WINDOW_MS / 1000
    return ThrottleDrain(
        events=events,
        limit=limit,
        window_ms=WINDOW_MS,
        most_in_any_window=gate.most_in_any(found.times, timedelta(milliseconds=WINDOW_MS)),
        took_seconds=round(found.took_seconds, 2),
        ideal_seconds=ideal,
        ratio=round(found.took_seconds / ideal, 3),
        attempts_per_delivery=round(found.attempts / events, 3),
        out_of_order=found.out_of_order,
        neighbours=others.cores,
    )


async def concurrency(stage: Stage, runs: int, workers: int) -> Concurrency:
    """Runs that take their time, all waiting for the same few slots."""
    floor_ratio = await slots_floor.measure(stage, runs)
    with neighbours.watched() as others:
        spans = await _spans(stage, runs, workers)
    took = max(s.finished_at for s in spans) - min(s.started_at for s in spans)
    ideal = runs / MAX_CONCURRENCY * RUN_SECONDS
    return Concurrency(
        workers=workers,
        runs=runs,
        run_ms=RUN_SECONDS * 1000,
        max_concurrency=MAX_CONCURRENCY,
        most_unfinished=most_at_once(spans),
        took_seconds=round(took.total_seconds(), 2),
        ideal_seconds=round(ideal, 2),
        ratio=round(took.total_seconds() / ideal, 3),
        floor_ratio=floor_ratio,
        neighbours=others.cores,
    )


def drain_lines(found: ThrottleDrain) -> list[tuple[str, str]]:
    """The figure for people."""
    most = f"at most {found.most_in_any_window:,} of {found.limit:,} in any window, {found.ratio:.3f} x ideal"
    rest = f"{found.attempts_per_delivery:.2f} attempts per delivery, {found.out_of_order} out of order"
    return [
        (f"throttle drain of {found.events:,}", f"{most}, {rest}"),
        *neighbours.disturbed("throttle_drain", [found.neighbours]),
    ]


def concurrency_lines(found: Sequence[Concurrency]) -> list[tuple[str, str]]:
    """The figure for people."""
    return [
        *(
            (
                f"{c.runs} runs of {c.run_ms:.0f} ms, {c.workers} worker{'s'[: c.workers - 1]}",
                f"{c.ratio:.3f} x ideal (by SQL alone {c.floor_ratio:.3f}), at most {c.most_unfinished} of "
                f"{c.max_concurrency} unfinished",
            )
            for c in found
        ),
        *neighbours.disturbed("concurrency", [c.neighbours for c in found]),
    ]


def most_at_once(spans: Sequence[Span]) -> int:
    """The most runs that existed unfinished at the same time. One that ends when another is created is before it."""
    steps = sorted([(s.created_at, 1) for s in spans] + [(s.finished_at, -1) for s in spans])
    return max(itertools.accumulate(step for _, step in steps))


async def _spans(stage: Stage, runs: int, workers: int) -> list[Span]:
    async with stage.database() as url:
        await without_triggers(url)
        async with stage.running(url, "few", workers) as port:
            watcher = await asyncpg.connect(url)
            try:
                await gate.until_listening(watcher, workers)
                publish(Job(port=port, first=0, events=runs, batch=100, connections=8))
                await gate.until(watcher, _SUCCEEDED, runs)
                return [Span(*row) for row in await watcher.fetch(_RUNS)]
            finally:
                await watcher.close()
