"""The results as a file and as a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from bench import (
    aims,
    budgets,
    children,
    commit,
    fairness,
    gate,
    grown,
    health,
    memory,
    recovery,
    retention,
    runs,
    single,
    start,
    steps,
    throughput,
    trigger_limits,
    triggers,
    workers,
)
from bench.aims import Aim
from bench.budgets import Budgets
from bench.children import ChildEnd
from bench.fairness import Fairness
from bench.gate import Accuracy, Drain, LimitCost
from bench.grown import Grown
from bench.health import Health
from bench.latency import Latency
from bench.memory import Memory
from bench.recovery import Recovery
from bench.retention import Kept
from bench.runs import Runs
from bench.single import Single
from bench.start import Start
from bench.steps import StepOverhead
from bench.throughput import Throughput
from bench.trigger_limits import Concurrency, ThrottleDrain
from bench.triggers import Crowd, FanOut
from bench.workers import Workers

_LIBRARIES = ("tidegate", "asyncpg", "httptools", "msgspec", "starlette", "uvicorn", "uvloop")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran. `load_before` is what the machine was doing before we started, over one minute."""

    cores: int
    processor: str
    system: str
    python: str
    postgres: str
    libraries: dict[str, str]
    load_before: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one benchmark run found out; a figure that was not asked for is null. `seconds` is what each took."""

    quick: bool
    machine: Machine
    seconds: dict[str, float]
    commit: Latency | None = None
    throughput: Throughput | None = None
    single: Single | None = None
    limit: Accuracy | None = None
    drain: Drain | None = None
    limit_cost: LimitCost | None = None
    triggers: Crowd | None = None
    fanout: FanOut | None = None
    budgets: Budgets | None = None
    throttle_drain: ThrottleDrain | None = None
    concurrency: list[Concurrency] | None = None
    runs: Runs | None = None
    workers: Workers | None = None
    start: list[Start] | None = None
    step_overhead: StepOverhead | None = None
    children: ChildEnd | None = None
    fairness: Fairness | None = None
    recovery: Recovery | None = None
    health: Health | None = None
    history: Grown | None = None
    retention: Kept | None = None
    memory: Memory | None = None
    aims: list[Aim] = []


_LINES: dict[str, Callable[[Any], list[tuple[str, str]]]] = {
    "commit": commit.lines,
    "throughput": throughput.lines,
    "single": single.lines,
    "limit": gate.accuracy_lines,
    "drain": gate.drain_lines,
    "limit_cost": gate.cost_lines,
    "triggers": triggers.crowd_lines,
    "fanout": triggers.fan_out_lines,
    "budgets": budgets.lines,
    "throttle_drain": trigger_limits.drain_lines,
    "concurrency": trigger_limits.concurrency_lines,
    "runs": runs.lines,
    "workers": workers.lines,
    "start": start.lines,
    "step_overhead": steps.lines,
    "children": children.lines,
    "fairness": fairness.lines,
    "recovery": recovery.lines,
    "health": health.lines,
    "history": grown.lines,
    "retention": retention.lines,
    "memory": memory.lines,
}


def machine(postgres: str) -> Machine:
    return Machine(
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        processor=_processor(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        postgres=postgres,
        libraries={name: metadata.version(name) for name in _LIBRARIES},
        load_before=round(os.getloadavg()[0], 2),
    )


def judged(results: Results) -> Results:
    """With the aims of what was measured."""
    return msgspec.structs.replace(results, aims=aims.judge(results))


def write(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def table(results: Results) -> str:
    """The figures for people, and at the end the aims."""
    measured = ((lines, getattr(results, name)) for name, lines in _LINES.items())
    found = [line for lines, figure in measured if figure is not None for line in lines(figure)]
    rows = [*found, *aims.lines(results.aims)]
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
