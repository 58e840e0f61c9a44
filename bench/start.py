"""Publish to start: how long after its event is sent the workflow's function begins, when little is going on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import asyncpg
import msgspec

from bench import commit, gate, marks, neighbours, restate_server, workload
from bench.client import Job, Report
from bench.latency import Latency, latency
from bench.stage import Stage, publish, without_triggers

RATES = (20, 50)
CONNECTIONS = 8
WARM_UP = 50

_TIMES = """
select e.external_id, e.received_at, r.created_at, r.started_at
  from tidegate.workflow_runs r join tidegate.workflow_events e on e.id = r.event_id
"""


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time goes: the median of each part. The middle two are by the database's clock; a time that is written
    is that of its statement, so the commit belongs to the part after it."""

    sent_to_received_ms: float
    received_to_launched_ms: float
    launched_to_claimed_ms: float
    claimed_to_begun_ms: float


class Restate(msgspec.Struct, frozen=True, kw_only=True):
    """The same with Restate: from just before the POST to the first line of its handler."""

    version: str
    latency: Latency
    answered: Latency


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """From just before the POST to the first line of the function; the multiples are of one commit's p50, measured
    right before and after. `answered` is how long the POST took. Without Restate where it cannot be installed."""

    events: int
    per_second: int
    latency: Latency
    answered: Latency
    parts: Parts
    commits_p50_ms: list[float]
    p50_commits: float
    p99_commits: float
    p99_to_p50: float
    restate: Restate | None
    neighbours: float | None


async def measure(stage: Stage, events: int, commits: int) -> list[Start]:
    """At each of the rates."""
    return [await _measure(stage, events, per_second, commits) for per_second in RATES]


async def _measure(stage: Stage, events: int, per_second: int, commits: int) -> Start:
    """Single POSTs at even times, one worker, from the first event after a short warm-up on."""
    before = await commit.measure(stage, commits)
    path = stage.folder / f"start-{per_second}.marks"
    async with stage.database() as url:
        await without_triggers(url)
        async with stage.running(url, "one_step", environment={marks.MARKS: str(path)}) as port:
            watcher = await asyncpg.connect(url)
            try:
                await gate.until_listening(watcher, 1)
                job = partial(Job, port=port, batch=1, connections=CONNECTIONS, per_second=per_second)
                publish(job(first=0, events=WARM_UP))
                with neighbours.watched() as others:
                    sent = publish(job(first=WARM_UP, events=events))
                    found = await marks.until(path, WARM_UP + events)
                rows = await watcher.fetch(_TIMES)
            finally:
                await watcher.close()
    after = await commit.measure(stage, commits)
    began_at = {mark.number: mark.times[0] for mark in found}
    taken = latency([(began_at[WARM_UP + n] - at) * 1000 for n, at in enumerate(sent.sent_at)])
    one_commit = (before.p50_ms + after.p50_ms) / 2
    return Start(
        events=events,
        per_second=per_second,
        latency=taken,
        answered=latency(sent.latencies_ms),
        parts=_parts(sent, began_at, rows),
        commits_p50_ms=[before.p50_ms, after.p50_ms],
        p50_commits=round(taken.p50_ms / one_commit, 1),
        p99_commits=round(taken.p99_ms / one_commit, 1),
        p99_to_p50=round(taken.p99_ms / taken.p50_ms, 2),
        restate=await _restate(stage, events, per_second) if restate_server.is_there() else None,
        neighbours=others.cores,
    )


async def _restate(stage: Stage, events: int, per_second: int) -> Restate:
    path = stage.folder / f"restate-{per_second}.marks"
    with restate_server.started(stage, path) as port:
        job = partial(Job, port=port, path=restate_server.SEND, batch=1, connections=CONNECTIONS, per_second=per_second)
        publish(job(first=0, events=WARM_UP))
        sent = publish(job(first=WARM_UP, events=events))
        began_at = {mark.number: mark.times[0] for mark in await marks.until(path, WARM_UP + events)}
    return Restate(
        version=restate_server.version(),
        latency=latency([(began_at[WARM_UP + n] - at) * 1000 for n, at in enumerate(sent.sent_at)]),
        answered=latency(sent.latencies_ms),
    )


def lines(found: Sequence[Start]) -> list[tuple[str, str]]:
    """The figure for people."""
    return [line for one in found for line in _lines(one)]


def _lines(found: Start) -> list[tuple[str, str]]:
    taken, parts = found.latency, found.parts
    commits = f"{found.p50_commits:.1f} and {found.p99_commits:.1f} commits"
    where = (
        f"received after {parts.sent_to_received_ms:.1f} ms, launched {parts.received_to_launched_ms:.1f}, "
        f"claimed {parts.launched_to_claimed_ms:.1f}, begun {parts.claimed_to_begun_ms:.1f}"
    )
    return [
        (
            f"publish to start at {found.per_second}/s",
            f"p50 {taken.p50_ms:.1f} ms, p99 {taken.p99_ms:.1f} ms, {found.p99_to_p50:.1f} times it: {commits}",
        ),
        ("  of which, medians", where),
        *_beside(found),
        *neighbours.disturbed("start", [found.neighbours]),
    ]


def _beside(found: Start) -> list[tuple[str, str]]:
    if found.restate is None:
        return []
    theirs = found.restate.latency
    return [(f"  Restate {found.restate.version}", f"p50 {theirs.p50_ms:.1f} ms, p99 {theirs.p99_ms:.1f} ms")]


def _parts(sent: Report, began_at: dict[int, float], rows: Sequence[asyncpg.Record]) -> Parts:
    """All times on the wall clock, which does not move against the monotonic one in so short a time."""
    offset = time.time() - time.monotonic()
    stored = {external_id: [at.timestamp() for at in times] for external_id, *times in rows}
    gaps = []
    for n, at in enumerate(sent.sent_at, WARM_UP):
        times = [at + offset, *stored[workload.external_id(n)], began_at[n] + offset]
        gaps.append([(later - earlier) * 1000 for earlier, later in pairwise(times)])
    received, launched, claimed, begun = (round(median(part), 2) for part in zip(*gaps, strict=True))
    return Parts(
        sent_to_received_ms=received,
        received_to_launched_ms=launched,
        launched_to_claimed_ms=claimed,
        claimed_to_begun_ms=begun,
    )
