"""`make bench`, or `python -m bench [--quick] [--only FIGURE]... [--history EVENTS] [--out FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from bench import (
    budgets,
    children,
    commit,
    fairness,
    gate,
    grown,
    health,
    memory,
    recovery,
    results,
    retention,
    runs,
    single,
    stage,
    start,
    steps,
    throughput,
    trigger_limits,
    triggers,
    workers,
    yardstick,
)
from bench.stage import Stage
from tidegate.settings import Settings
from tidegate.telemetry import logs

DEFAULT_LEASE_MS = Settings().lease_ms
LATEST = Path(__file__).parent / "results" / "latest.json"


FAIR = fairness.Amount()
SHARED = budgets.Amount(
    events=20_000, turns=7, limit=200, intervals=8, workers=8, held=10_000, keys=(100, 10_000)
)  # fmt: skip
REMOVED = retention.Amount(days=5, events=500_000, busy_days=15, busy_events=75_000)


@dataclass(frozen=True, slots=True)
class Size:
    """How much each figure does."""

    turns: int = 3
    close_turns: int = 7
    events: int = 20_000
    singles: int = 10_000
    commits: int = 1_000
    limit_workers: int = 8
    limit: int = 200
    intervals: int = 8
    held: int = 10_000
    drain_limit: int = 1_000
    throttled: int = 5_000
    many_events: int = 5_000
    crowds: tuple[tuple[int, bool], ...] = triggers.KINDS
    crowd_turns: int = 2
    fanned: int = 300
    slow_runs: int = 200
    runs: int = 10_000
    started: int = 500
    stepped: int = 10
    stepped_at_once: int = 50
    parents: int = 10
    rounds: int = 5
    lease_ms: int = DEFAULT_LEASE_MS
    history: int = 1_000_000
    days: int = 90
    waiting: int = 100_000
    beside: int = 5_000
    looks: int = 10
    backlog: int = 100_000
    paced: int = 20_000
    removed: retention.Amount = REMOVED
    fair: fairness.Amount = FAIR
    budgets: budgets.Amount = SHARED


FULL = Size()
QUICK = Size(
    turns=1, close_turns=1, events=500, singles=200, commits=50, limit_workers=2, limit=50, intervals=2, held=300,
    drain_limit=200, throttled=300, many_events=200, crowds=((1, False), (1000, True)), crowd_turns=1, fanned=5,
    slow_runs=20, runs=200, started=25, stepped=2, stepped_at_once=5, parents=1, rounds=1, lease_ms=3_000,
    history=2_000,
    days=5, waiting=200, beside=200, looks=2, backlog=500, paced=200,
    removed=retention.Amount(days=2, events=1_000, busy_days=2, busy_events=500),
    fair=fairness.Amount(flood=1_000, events=3, slow_runs=60, sources=20),
    budgets=budgets.Amount(events=500, turns=1, limit=50, intervals=2, workers=2, held=300, keys=(10, 300)),
)  # fmt: skip


async def _concurrency(ground: Stage, size: Size) -> list[trigger_limits.Concurrency]:
    return [await trigger_limits.concurrency(ground, size.slow_runs, count) for count in (1, 2)]


# In the order in which they are measured: `health` wants the history as it was just written, `history` vacuumed.
FIGURES: dict[str, Callable[[Stage, Size], Awaitable[Any]]] = {
    "commit": lambda ground, size: commit.measure(ground, size.commits),
    "throughput": lambda ground, size: throughput.measure(ground, size.events, size.turns),
    "single": lambda ground, size: single.measure(ground, size.singles, size.turns),
    "limit": lambda ground, size: gate.accuracy(ground, size.limit, size.intervals, size.limit_workers),
    "drain": lambda ground, size: gate.drain(ground, size.held, size.drain_limit),
    "limit_cost": lambda ground, size: gate.cost(ground, size.events, size.close_turns),
    "triggers": lambda ground, size: triggers.crowd(ground, size.many_events, size.crowd_turns, size.crowds),
    "fanout": lambda ground, size: triggers.fan_out(ground, size.fanned, size.turns),
    "budgets": lambda ground, size: budgets.measure(ground, size.budgets),
    "throttle_drain": lambda ground, size: trigger_limits.drain(ground, size.throttled, size.drain_limit),
    "concurrency": _concurrency,
    "runs": lambda ground, size: runs.measure(ground, size.runs, size.close_turns),
    "workers": lambda ground, size: workers.measure(ground, size.runs, size.turns),
    "start": lambda ground, size: start.measure(ground, size.started, size.commits),
    "step_overhead": lambda ground, size: steps.measure(ground, size.stepped, size.stepped_at_once, size.commits),
    "children": lambda ground, size: children.measure(ground, size.parents, size.commits),
    "fairness": lambda ground, size: fairness.measure(ground, size.fair),
    "recovery": lambda ground, size: recovery.measure(ground, size.rounds, size.lease_ms),
    "health": lambda ground, size: health.measure(ground, size.history, size.days, size.waiting, size.looks),
    "history": lambda ground, size: grown.measure(
        ground, size.history, size.days, size.waiting, size.beside, size.turns
    ),
    "retention": lambda ground, size: retention.measure(ground, size.removed, size.beside, size.paced, size.turns),
    "memory": lambda ground, size: memory.measure(ground, size.backlog),
}


async def run(figures: list[str], size: Size, quick: bool) -> results.Results:
    """Measure what was asked for, one after the other."""
    found, seconds = {}, {}
    async with stage.opened() as ground:
        about = results.machine(await ground.version())
        for number, name in enumerate(figures, 1):
            print(f"bench: {name} ({number} of {len(figures)}) ...", end="", file=sys.stderr, flush=True)
            began_at = time.monotonic()
            found[name] = await FIGURES[name](ground, size)
            seconds[name] = round(time.monotonic() - began_at, 1)
            print(f" {seconds[name]:.0f} s", file=sys.stderr, flush=True)
    return results.judged(results.Results(quick=quick, machine=about, seconds=seconds, **found))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure Tidegate on this machine.")
    parser.add_argument("--quick", action="store_true", help="small counts: shows that it works, not how fast")
    parser.add_argument("--only", choices=FIGURES, action="append", help="one figure; may be repeated")
    parser.add_argument("--history", type=int, metavar="EVENTS", help=f"finished events in the tables [{FULL.history}]")
    parser.add_argument("--out", type=Path, default=LATEST, help="where the results go as JSON [%(default)s]")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything we started is taken down
    logs.configure("error", "console")
    figures = [name for name in FIGURES if name in (arguments.only or FIGURES)]
    size = QUICK if arguments.quick else FULL
    if arguments.history:
        size = replace(size, history=arguments.history)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        found = runner.run(run(figures, size, arguments.quick))
    results.write(found, arguments.out)
    if yardstick.OTHERS.exists():
        subprocess.run([yardstick.OTHERS, "-m", "bench.plots", arguments.out.resolve()], cwd=stage.ROOT, check=True)
    else:
        print("bench: no pictures; `make bench` installs what draws them", file=sys.stderr)
    print(results.table(found))


if __name__ == "__main__":
    main()
