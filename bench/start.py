"""Publish to start: how long after its event is sent the workflow's function begins, when little is going on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from statistics import median

import asyncpg
import msgspec

from bench import commit, gate, marks, neighbours, workload
from bench.app import MARKS
from bench.client import Job, Report
from bench.latency import Latency, latency
from bench.stage import Stage, publish, without_triggers

PER_SECOND = 50
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


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """From just before the POST to the first line of the function; the multiples are of one commit's p50, measured
    right before and after. `answered` is how long the POST took."""

    events: int
    per_second: int
    latency: Latency
    answered: Latency
    parts: Parts
    commits_p50_ms: list[float]
    p50_commits: float
    p99_commits: float
    neighbours: float | None


async def measure(stage: Stage, events: int, commits: int) -> Start:
    """Single POSTs at even times, one worker."""
    before = await commit.measure(stage, commits)
    path = stage.folder / "start.marks"
    async with stage.database() as url:
        await without_triggers(url)
        async with stage.running(url, "one_step", environment={MARKS: str(path)}) as port:
            watcher = await asyncpg.connect(url)
            try:
                await gate.until_listening(watcher, 1)
                job = partial(Job, port=port, batch=1, connections=CONNECTIONS, per_second=PER_SECOND)
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
        per_second=PER_SECOND,
        latency=taken,
        answered=latency(sent.latencies_ms),
        parts=_parts(sent, began_at, rows),
        commits_p50_ms=[before.p50_ms, after.p50_ms],
        p50_commits=round(taken.p50_ms / one_commit, 1),
        p99_commits=round(taken.p99_ms / one_commit, 1),
        neighbours=others.cores,
    )


def lines(found: Start) -> list[tuple[str, str]]:
    """The figure for people."""
    taken, parts = found.latency, found.parts
    commits = f"{found.p50_commits:.1f} and {found.p99_commits:.1f} commits"
    where = (
        f"received after {parts.sent_to_received_ms:.1f} ms, launched {parts.received_to_launched_ms:.1f}, "
        f"claimed {parts.launched_to_claimed_ms:.1f}, begun {parts.claimed_to_begun_ms:.1f}"
    )
    return [
        (
            f"publish to start at {found.per_second}/s",
            f"p50 {taken.p50_ms:.1f} ms, p99 {taken.p99_ms:.1f} ms: {commits}",
        ),
        ("  of which, medians", where),
        *neighbours.disturbed("start", [found.neighbours]),
    ]


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
