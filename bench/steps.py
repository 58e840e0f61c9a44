"""What a step costs: the time of one in a run alone, and how many a second many runs at once get done."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import asyncpg
import msgspec

from bench import commit, gate, marks, neighbours
from bench.app import STEPS
from bench.client import Job
from bench.latency import Latency, latency
from bench.stage import Stage, publish, without_triggers

_SUCCEEDED = "select count(*) from tidegate.workflow_runs where status = 'succeeded'"
_WRITTEN = "select count(*) from tidegate.workflow_run_steps where status = 'succeeded'"
_SPAN = """
select extract(epoch from max(finished_at) - min(started_at))::float8 from tidegate.workflow_runs
 where id in (select id from tidegate.workflow_runs order by created_at desc, id desc limit $1)
"""


class StepOverhead(msgspec.Struct, frozen=True, kw_only=True):
    """`latency` is from the beginning of a step to that of the next, in a run alone: the step does nothing, so this is
    what remembering it costs. The multiple is of one commit's p50, measured right before and after."""

    steps_per_run: int
    runs: int
    latency: Latency
    commits_p50_ms: list[float]
    p50_commits: float
    p99_commits: float
    runs_at_once: int
    steps_per_second: float
    neighbours: float | None


async def measure(stage: Stage, runs: int, at_once: int, commits: int) -> StepOverhead:
    """One run after the other, then all at once, in a worker with a slot for each."""
    before = await commit.measure(stage, commits)
    path = stage.folder / "steps.marks"
    environment = {marks.MARKS: str(path), "TIDEGATE_WORKER_CONCURRENCY": str(at_once)}
    async with stage.database() as url:
        await without_triggers(url)
        async with stage.running(url, "many_steps", environment=environment) as port:
            watcher = await asyncpg.connect(url)
            try:
                await gate.until_listening(watcher, 1)
                with neighbours.watched() as others:
                    taken = await _one_by_one(watcher, port, path, runs)
                    seconds = await _all_at_once(watcher, port, runs, at_once)
                expected, written = (runs + at_once) * STEPS, await watcher.fetchval(_WRITTEN)
                if written != expected:
                    raise RuntimeError(f"{expected} steps were to be done, but {written} are written")
            finally:
                await watcher.close()
    after = await commit.measure(stage, commits)
    one_commit = (before.p50_ms + after.p50_ms) / 2
    return StepOverhead(
        steps_per_run=STEPS,
        runs=runs,
        latency=taken,
        commits_p50_ms=[before.p50_ms, after.p50_ms],
        p50_commits=round(taken.p50_ms / one_commit, 2),
        p99_commits=round(taken.p99_ms / one_commit, 2),
        runs_at_once=at_once,
        steps_per_second=round(at_once * STEPS / seconds, 1),
        neighbours=others.cores,
    )


def lines(found: StepOverhead) -> list[tuple[str, str]]:
    """The figure for people."""
    taken, commits = found.latency, f"{found.p50_commits:.1f} and {found.p99_commits:.1f} commits"
    return [
        ("one step after the other", f"p50 {taken.p50_ms:.2f} ms, p99 {taken.p99_ms:.2f} ms each: {commits}"),
        (f"steps of {found.runs_at_once} runs at once", f"{found.steps_per_second:,.0f} steps/s"),
        *neighbours.disturbed("step_overhead", [found.neighbours]),
    ]


async def _one_by_one(watcher: asyncpg.Connection, port: int, path: Path, runs: int) -> Latency:
    """The first is the warm-up."""
    for number in range(runs):
        publish(Job(port=port, first=number, events=1, batch=1, connections=1))
        await gate.until(watcher, _SUCCEEDED, number + 1)
    timed = [mark for mark in marks.read(path) if mark.number > 0]
    return latency([(later - earlier) * 1000 for mark in timed for earlier, later in pairwise(mark.times)])


async def _all_at_once(watcher: asyncpg.Connection, port: int, first: int, runs: int) -> float:
    """Seconds from the first run's start to the last one's end."""
    publish(Job(port=port, first=first, events=runs, batch=runs, connections=1))
    await gate.until(watcher, _SUCCEEDED, first + runs)
    return float(await watcher.fetchval(_SPAN, runs))
