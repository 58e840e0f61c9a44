"""`make bench`, or `python -m bench [--quick] [--only FIGURE]... [--out FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import uvloop

from bench import (
    commit,
    floor,
    gate,
    health,
    pipeline,
    recovery,
    results,
    runs,
    single,
    stage,
    start,
    steps,
    trigger_limits,
    triggers,
)
from bench.stage import Stage
from headgate.settings import Settings
from headgate.telemetry import logs

EVENT_FIGURES = ("commit", "throughput", "single", "limit", "drain", "limit_cost")
TRIGGER_FIGURES = ("triggers", "fanout", "throttle_drain", "concurrency")
RUN_FIGURES = ("runs", "start", "step_overhead", "recovery")
OPERATION_FIGURES = ("health",)
FIGURES = EVENT_FIGURES + TRIGGER_FIGURES + RUN_FIGURES + OPERATION_FIGURES
DEFAULT_LEASE_MS = Settings().lease_ms
LATEST = Path(__file__).parent / "results" / "latest.json"


@dataclass(frozen=True, slots=True)
class Size:
    """How much each figure does."""

    turns: int = 3
    events: int = 20_000
    singles: int = 20_000
    commits: int = 2_000
    limit: int = 200
    intervals: int = 10
    held: int = 10_000
    drain_limit: int = 1_000
    crowd_turns: int = 4
    fanned: int = 1_000
    slow_runs: int = 200
    runs: int = 10_000
    started: int = 1_000
    stepped: int = 10
    stepped_at_once: int = 50
    rounds: int = 10
    lease_ms: int = DEFAULT_LEASE_MS
    history: int = 1_000_000
    waiting: int = 100_000
    looks: int = 20


FULL = Size()
QUICK = Size(
    turns=1, events=1_000, singles=500, commits=50, limit=50, intervals=3, held=600, drain_limit=200, crowd_turns=1,
    fanned=10, slow_runs=40, runs=500, started=50, stepped=2, stepped_at_once=5, rounds=3, lease_ms=1_500,
    history=2_000, waiting=200, looks=2,
)  # fmt: skip


async def run(figures: tuple[str, ...], size: Size, quick: bool) -> results.Results:
    """Measure what was asked for, one after the other."""
    async with stage.opened() as ground:
        about = results.machine(await ground.version())
        return results.Results(
            quick=quick,
            machine=about,
            commit=await commit.measure(ground, size.commits) if "commit" in figures else None,
            throughput=await _throughput(ground, size) if "throughput" in figures else None,
            single=await single.measure(ground, size.singles) if "single" in figures else None,
            limit=await gate.accuracy(ground, size.limit, size.intervals) if "limit" in figures else None,
            drain=await gate.drain(ground, size.held, size.drain_limit) if "drain" in figures else None,
            limit_cost=await gate.cost(ground, size.events, 2 * size.turns) if "limit_cost" in figures else None,
            triggers=await triggers.crowd(ground, size.events, size.crowd_turns) if "triggers" in figures else None,
            fanout=await triggers.fan_out(ground, size.fanned, size.turns) if "fanout" in figures else None,
            throttle_drain=await trigger_limits.drain(ground, size.held, size.drain_limit)
            if "throttle_drain" in figures
            else None,
            concurrency=[await trigger_limits.concurrency(ground, size.slow_runs, workers) for workers in (1, 2)]
            if "concurrency" in figures
            else None,
            runs=await runs.measure(ground, size.runs, size.turns) if "runs" in figures else None,
            start=await start.measure(ground, size.started, size.commits) if "start" in figures else None,
            step_overhead=await steps.measure(ground, size.stepped, size.stepped_at_once, size.commits)
            if "step_overhead" in figures
            else None,
            recovery=await recovery.measure(ground, size.rounds, size.lease_ms) if "recovery" in figures else None,
            health=await health.measure(ground, size.history, size.waiting, size.looks)
            if "health" in figures
            else None,
        )


async def _throughput(ground: Stage, size: Size) -> results.Throughput:
    return results.throughput(size.events, [await _turn(ground, size.events) for _ in range(size.turns)])


async def _turn(ground: Stage, events: int) -> results.Turn:
    below, through = await floor.measure(ground, events), await pipeline.measure(ground, events)
    return results.Turn(
        floor_per_second=below.per_second,
        pipeline_per_second=through.per_second,
        ratio=round(through.per_second / below.per_second, 3),
        floor_neighbours=below.neighbours,
        pipeline_neighbours=through.neighbours,
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Headgate on this machine.")
    parser.add_argument("--quick", action="store_true", help="small counts: shows that it works, not how fast")
    parser.add_argument("--only", choices=FIGURES, action="append", help="one figure; may be repeated")
    parser.add_argument("--out", type=Path, default=LATEST, help="where the results go as JSON [%(default)s]")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything we started is taken down
    logs.configure("warning", "console")
    figures = tuple(arguments.only or FIGURES)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(figures, QUICK if arguments.quick else FULL, arguments.quick))
    results.write(found, arguments.out)
    print(results.table(found))


if __name__ == "__main__":
    main()
