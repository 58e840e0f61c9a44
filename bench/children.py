"""How long a parent waits after its child has ended: from the last line of the child to the parent's next line."""

from __future__ import annotations

import asyncpg
import msgspec

from bench import commit, gate, marks, neighbours
from bench.app import CHILDREN
from bench.client import Job
from bench.latency import Latency, latency
from bench.stage import Stage, publish, without_triggers

_SUCCEEDED = "select count(*) from tidegate.workflow_runs where status = 'succeeded'"


class ChildEnd(msgspec.Struct, frozen=True, kw_only=True):
    """Parents that start one child after the other, one parent at a time. The multiple is of one commit's p50, measured
    right before and after."""

    parents: int
    children_each: int
    latency: Latency
    commits_p50_ms: list[float]
    p50_commits: float
    neighbours: float | None


async def measure(stage: Stage, parents: int, commits: int) -> ChildEnd:
    """The first parent is the warm-up."""
    before = await commit.measure(stage, commits)
    path = stage.folder / "children.marks"
    async with stage.database() as url:
        await without_triggers(url)
        async with stage.running(url, "talking", environment={marks.MARKS: str(path)}) as port:
            watcher = await asyncpg.connect(url)
            try:
                await gate.until_listening(watcher, 1)
                with neighbours.watched() as others:
                    for number in range(parents + 1):
                        publish(Job(port=port, first=number, events=1, batch=1, connections=1))
                        await gate.until(watcher, _SUCCEEDED, (number + 1) * (CHILDREN + 1))
            finally:
                await watcher.close()
    after = await commit.measure(stage, commits)
    found = marks.read(path)
    ended = {mark.number: mark.times[0] for mark in found if mark.number >= CHILDREN}
    resumed = {mark.number: mark.times for mark in found if 0 < mark.number < CHILDREN}
    if len(ended) != (parents + 1) * CHILDREN or len(resumed) != parents:
        raise RuntimeError(
            f"{parents} parents with {CHILDREN} children each left {len(resumed)} and {len(ended)} marks"
        )
    waited = [
        (at - ended[(parent + 1) * CHILDREN + child]) * 1000
        for parent, times in resumed.items()
        for child, at in enumerate(times)
    ]
    taken = latency(waited)
    return ChildEnd(
        parents=parents,
        children_each=CHILDREN,
        latency=taken,
        commits_p50_ms=[before.p50_ms, after.p50_ms],
        p50_commits=round(taken.p50_ms / ((before.p50_ms + after.p50_ms) / 2), 2),
        neighbours=others.cores,
    )


def lines(found: ChildEnd) -> list[tuple[str, str]]:
    """The figure for people."""
    taken = found.latency
    what = f"p50 {taken.p50_ms:.2f} ms, p99 {taken.p99_ms:.2f} ms: {found.p50_commits:.1f} commits (p50)"
    return [("from a child's end to its parent", what), *neighbours.disturbed("children", [found.neighbours])]
