"""The results as a file and as a table."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import median

import msgspec

from bench import health, neighbours, recovery, runs, start, steps
from bench.gate import Accuracy, Drain, LimitCost
from bench.health import Health
from bench.latency import Latency
from bench.recovery import Recovery
from bench.runs import Runs
from bench.single import Single
from bench.start import Start
from bench.steps import StepOverhead
from bench.trigger_limits import Concurrency, ThrottleDrain
from bench.triggers import Crowd, FanOut

_LIBRARIES = ("headgate", "asyncpg", "httptools", "msgspec", "starlette", "uvicorn", "uvloop")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran. `load_before` is what the machine was doing before we started, over one minute."""

    cores: int
    processor: str
    system: str
    python: str
    postgres: str
    libraries: dict[str, str]
    load_before: float


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One floor and the pipeline right after it. `neighbours` are the cores that others used meanwhile, each."""

    floor_per_second: float
    pipeline_per_second: float
    ratio: float
    floor_neighbours: float | None
    pipeline_neighbours: float | None

    @property
    def is_quiet(self) -> bool:
        return max(self.floor_neighbours or 0, self.pipeline_neighbours or 0) <= neighbours.QUIET_CORES


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Floor and pipeline in turns: the medians, and the median of the turns' ratios."""

    events: int
    turns: list[Turn]
    quiet_turns: int
    floor_median: float
    pipeline_median: float
    ratio: float


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one benchmark run found out; a figure that was not asked for is null."""

    quick: bool
    machine: Machine
    commit: Latency | None = None
    throughput: Throughput | None = None
    single: Single | None = None
    limit: Accuracy | None = None
    drain: Drain | None = None
    limit_cost: LimitCost | None = None
    triggers: Crowd | None = None
    fanout: FanOut | None = None
    throttle_drain: ThrottleDrain | None = None
    concurrency: list[Concurrency] | None = None
    runs: Runs | None = None
    start: Start | None = None
    step_overhead: StepOverhead | None = None
    recovery: Recovery | None = None
    health: Health | None = None


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


def throughput(events: int, turns: Sequence[Turn]) -> Throughput:
    """The turns as one figure, the disturbed ones included: `quiet_turns` says how far to trust it."""
    return Throughput(
        events=events,
        turns=list(turns),
        quiet_turns=sum(turn.is_quiet for turn in turns),
        floor_median=median(turn.floor_per_second for turn in turns),
        pipeline_median=median(turn.pipeline_per_second for turn in turns),
        ratio=median(turn.ratio for turn in turns),
    )


def write(results: Results, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=2) + b"\n")


def table(results: Results) -> str:
    """The figures for people."""
    lines = []
    if results.commit:
        lines.append(("one commit", f"p50 {results.commit.p50_ms:.2f} ms, p99 {results.commit.p99_ms:.2f} ms"))
    if results.throughput:
        found = results.throughput
        lines.append(("floor: plain SQL, batches of 500", f"{found.floor_median:,.0f} events/s"))
        lines.append(("publish until the run exists", f"{found.pipeline_median:,.0f} events/s"))
        ratios = [turn.ratio for turn in found.turns]
        lines.append(("ratio to the floor", f"{found.ratio:.2f} (turns: {min(ratios):.2f} to {max(ratios):.2f})"))
        if found.quiet_turns < len(found.turns):
            disturbed = len(found.turns) - found.quiet_turns
            lines.append(("NOT COMPARABLE", f"others used the machine in {disturbed} of {len(found.turns)} turns"))
    if results.single:
        rate, taken = results.single.accepted_per_second, results.single.latency
        lines.append(
            ("single POSTs, 64 connections", f"{rate:,.0f}/s, p50 {taken.p50_ms:.1f} ms, p99 {taken.p99_ms:.1f} ms")
        )
    lines += [*_gate_lines(results), *_trigger_lines(results), *_run_lines(results)]
    return "\n".join(f"{name:<36}{value}" for name, value in lines)


def _gate_lines(results: Results) -> list[tuple[str, str]]:
    lines = []
    if results.limit:
        a = results.limit
        most = f"at most {a.most_in_any_interval} of {a.limit} in any interval"
        lines.append((f"limit kept by {a.workers} workers", f"{most}, {a.use:.1%} of the allowance used"))
    if results.drain:
        d = results.drain
        lines.append(
            (f"drain of {d.events:,} at {d.limit:,}/s",
             f"{d.ratio:.3f} x ideal, {d.attempts_per_event:.2f} attempts per event, {d.out_of_order} out of order")
        )  # fmt: skip
    if results.limit_cost:
        c = results.limit_cost
        spread = f"(turns: {min(c.turns):.2f} to {max(c.turns):.2f})"
        lines.append(("throughput with an idle limit", f"{c.ratio:.2f} of that without {spread}"))
    return lines


def _trigger_lines(results: Results) -> list[tuple[str, str]]:
    lines = []
    for case in results.triggers.cases if results.triggers else ():
        others = "patterns" if case.are_patterns else "of other types"
        name = "1 trigger" if case.triggers == 1 else f"{case.triggers:,} triggers, {case.triggers - 1:,} {others}"
        against = f", {case.ratio:.2f} of that with 1 (turns: {min(case.ratios):.2f} to {max(case.ratios):.2f})"
        if case.cpu_ratio:
            against += f", {case.cpu_ratio:.2f} of its CPU"
        lines.append((name, f"{case.per_second:,.0f} events/s" + (against if case.triggers > 1 else "")))
    if results.fanout:
        f = results.fanout
        rates = f"{f.deliveries_per_second:,.0f} deliveries/s, {f.events_per_second:,.0f} events/s"
        lines.append((f"{f.triggers} triggers fire for each event", rates))
    if results.throttle_drain:
        d = results.throttle_drain
        most = f"at most {d.most_in_any_window:,} of {d.limit:,} in any window, {d.ratio:.3f} x ideal"
        rest = f"{d.attempts_per_delivery:.2f} attempts per delivery, {d.out_of_order} out of order"
        lines.append((f"throttle drain of {d.events:,}", f"{most}, {rest}"))
    for c in results.concurrency or ():
        most = f"{c.ratio:.3f} x ideal, at most {c.most_unfinished} of {c.max_concurrency} unfinished"
        lines.append((f"{c.runs} runs of {c.run_ms:.0f} ms, {c.workers} worker{'s'[: c.workers - 1]}", most))
    return lines + _disturbed(results)


def _run_lines(results: Results) -> list[tuple[str, str]]:
    return [
        *(runs.lines(results.runs) if results.runs else ()),
        *(start.lines(results.start) if results.start else ()),
        *(steps.lines(results.step_overhead) if results.step_overhead else ()),
        *(recovery.lines(results.recovery) if results.recovery else ()),
        *(health.lines(results.health) if results.health else ()),
    ]


def _disturbed(results: Results) -> list[tuple[str, str]]:
    """The trigger figures in which others used the machine."""
    found: dict[str, list[float | None]] = {
        "triggers": [cores for case in results.triggers.cases for cores in case.neighbours] if results.triggers else [],
        "fanout": results.fanout.neighbours if results.fanout else [],
        "throttle_drain": [results.throttle_drain.neighbours] if results.throttle_drain else [],
        "concurrency": [c.neighbours for c in results.concurrency or ()],
    }
    return [line for name, cores in found.items() for line in neighbours.disturbed(name, cores)]


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
