"""What the figures are to reach."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from bench.results import Results


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """A number that is to be at least, or else at most, another."""

    figure: str
    name: str
    found: float
    is_at_least: bool
    wanted: float
    is_met: bool


def judge(results: Results) -> list[Aim]:
    """The aims of all figures that were measured."""
    return [
        *_throughput(results),
        *_single(results),
        *_limits(results),
        *_budgets(results),
        *_triggers(results),
        *_start(results),
        *_children(results),
        *_fairness(results),
        *_history(results),
        *_retention(results),
        *_memory(results),
    ]


def lines(aims: list[Aim]) -> list[tuple[str, str]]:
    """The aims for people."""
    return [
        (f"aim: {aim.name}", f"{'met' if aim.is_met else 'NOT MET'}: {aim.found:g}, {_wanted(aim)}") for aim in aims
    ]


def _wanted(aim: Aim) -> str:
    return f"wanted {'at least' if aim.is_at_least else 'at most'} {aim.wanted:g}"


def _throughput(results: Results) -> Iterator[Aim]:
    if results.throughput:
        yield _at_least("throughput", "launched, of its floor", median(results.throughput.ratios), 0.60)
    if results.runs:
        yield _at_least("runs", "succeeded, of its floor", median(results.runs.to_floor), 0.60)
        yield _at_least("runs", "succeeded, of pgqueuer's rate", median(results.runs.to_pgqueuer), 1)


def _single(results: Results) -> Iterator[Aim]:
    if results.single and results.commit:
        commits = results.single.latency.p99_ms / results.commit.p50_ms
        yield _at_most("single", "single POSTs' p99, in commits", round(commits, 1), 10)
        half = results.single.half_latency.p99_ms / results.commit.p50_ms
        yield _at_most("single", "the same with half the load", round(half, 1), 10)


def _limits(results: Results) -> Iterator[Aim]:
    if found := results.limit:
        yield _at_most("limit", "launches in any interval", found.most_in_any_interval, found.limit)
        yield _at_least("limit", "share of the limit that is used", found.use, 0.95)
    if results.limit_cost:
        yield _at_least("limit_cost", "rate with a limit that never bites", results.limit_cost.ratio, 0.90)
    if results.drain:
        yield _at_least("drain", "share of the limit that a drain uses", round(1 / results.drain.ratio, 3), 0.95)
    if drained := results.throttle_drain:
        yield _at_most(
            "throttle_drain", "launches in any window of a throttle", drained.most_in_any_window, drained.limit
        )
        yield _at_least("throttle_drain", "share of the throttle that is used", round(1 / drained.ratio, 3), 0.95)
    for one in results.concurrency or ():
        workers = f"{one.workers} worker{'s'[: one.workers - 1]}"
        yield _at_most("concurrency", f"runs at once, {workers}", one.most_unfinished, one.max_concurrency)
        yield _at_least("concurrency", f"share of the slots used, {workers}", round(1 / one.ratio, 3), 0.95)
        of_floor = round(one.floor_ratio / one.ratio, 3)
        yield _at_least("concurrency", f"the same, of what SQL alone uses, {workers}", of_floor, 0.95)


def _budgets(results: Results) -> Iterator[Aim]:
    if found := results.budgets:
        yield _at_least("budgets", "rate with a budget that is never reached", found.cost.ratio, 0.90)
        use = found.use
        yield _at_most("budgets", "launches in any interval of a budget", use.most_in_any_interval, use.limit)
        yield _at_least("budgets", "share of a scarce budget that is used", use.use, 0.95)
        for one in found.drains:
            name = f"over {one.keys:,} keys"
            yield _at_most("budgets", f"launches of a key {name}", one.most_of_a_key, one.allowed_of_a_key)
            yield _at_least("budgets", f"share of 1,000/s that a drain uses {name}", round(1 / one.ratio, 3), 0.95)


def _triggers(results: Results) -> Iterator[Aim]:
    for case in results.triggers.cases if results.triggers else ():
        if case.triggers >= 1000:
            kind = "patterns" if case.are_patterns else "triggers"
            yield _at_least("triggers", f"rate with {case.triggers:,} {kind}, of that with 1", case.ratio, 0.90)


def _start(results: Results) -> Iterator[Aim]:
    for one in results.start or ():
        rate = f"at {one.per_second}/s"
        yield _at_most("start", f"publish to start {rate}, p50 in ms", one.latency.p50_ms, 4.5)
        yield _at_most("start", f"publish to start {rate}, p99 of its p50", one.p99_to_p50, 3)
        yield _at_most("start", f"publish to start {rate}, p50 in commits", one.p50_commits, 5)


def _children(results: Results) -> Iterator[Aim]:
    if found := results.children:
        yield _at_most("children", "a child's end to its parent's next line, p50 in commits", found.p50_commits, 10)


def _fairness(results: Results) -> Iterator[Aim]:
    if found := results.fairness:
        for name, one in (("a flood", found.flooded), ("a flood with a limit", found.limited)):
            ratio = round(one.latency.p99_ms / found.idle.p99_ms, 2)
            yield _at_most("fairness", f"publish to start beside {name}, p99 of its own alone", ratio, 3)
            yield _at_most("fairness", f"publish to start beside {name}, the most in ms", one.max_ms, 250)
        yield _at_most("fairness", "delay beside slow runs of another workflow, in runs", found.slow_delay, 1)
        yield _at_most("fairness", "sources off their shares, the most", found.share_error, 0.05)


def _history(results: Results) -> Iterator[Aim]:
    if results.health:
        yield _at_most("health", "a snapshot's database ms", results.health.settled.snapshot.database_ms, 50)
    if found := results.history:
        yield _at_least("history", "launched beside a history, of empty", median(found.launched.ratios), 0.90)
        yield _at_least("history", "succeeded beside a history, of empty", median(found.succeeded.ratios), 0.90)
        yield _at_most("history", "whole tables read beside it", sum(found.whole_table_reads.values()), 0)


def _retention(results: Results) -> Iterator[Aim]:
    if found := results.retention:
        yield _at_least("retention", "events removed, of the rate of launches", found.removal.ratio, 3)
        yield _at_most("retention", "p99 of POSTs while days are dropped", median(found.p99_ratios), 1.5)
        yield _at_least("retention", "rate while days are dropped", median(found.rate_ratios), 0.90)


def _memory(results: Results) -> Iterator[Aim]:
    if not results.memory:
        return
    for name, line in (("in the inbox", results.memory.inbox), ("held", results.memory.held)):
        if line.worker_mb is not None:
            yield _at_most("memory", f"a worker's MB, {line.events:,} {name}", line.worker_mb, 200)
        yield _at_least("memory", f"worked off, {line.events:,} {name}", float(line.is_worked_off), 1)


def _at_least(figure: str, name: str, found: float, wanted: float) -> Aim:
    return Aim(figure=figure, name=name, found=found, is_at_least=True, wanted=wanted, is_met=found >= wanted)


def _at_most(figure: str, name: str, found: float, wanted: float) -> Aim:
    return Aim(figure=figure, name=name, found=found, is_at_least=False, wanted=wanted, is_met=found <= wanted)
