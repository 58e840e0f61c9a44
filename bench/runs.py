"""Runs: from publish until every run of a one-step workflow has succeeded; beside the floor of the same rows, and
beside another queue on Postgres."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from statistics import median

import msgspec

from bench import floor, neighbours, pipeline, yardstick
from bench.rate import Rate
from bench.stage import Stage, without_triggers


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One way of doing it: the median, and each turn. `cpu_us` is of all processes for one run; None where /proc does
    not tell."""

    per_second: float
    turns: list[float]
    cpu_us: list[float | None]
    neighbours: list[float | None]


class Runs(msgspec.Struct, frozen=True, kw_only=True):
    """Headgate, pgqueuer (enqueue until handled) and plain SQL in turns, the order changing; each turn's ratios."""

    runs: int
    pgqueuer_version: str
    headgate: Side
    pgqueuer: Side
    floor: Side
    to_pgqueuer: list[float]
    to_floor: list[float]


async def measure(stage: Stage, runs: int, turns: int) -> Runs:
    """Each side once a turn."""
    version = yardstick.version()
    ways: list[Callable[[Stage, int], Awaitable[Rate]]] = [_floor, _pgqueuer, _headgate]
    found: list[list[Rate]] = [[], [], []]
    for turn in range(turns):
        for way in ((first + turn) % len(ways) for first in range(len(ways))):
            found[way].append(await ways[way](stage, runs))
    of_floor, of_pgqueuer, of_headgate = found
    return Runs(
        runs=runs,
        pgqueuer_version=version,
        headgate=_side(of_headgate),
        pgqueuer=_side(of_pgqueuer),
        floor=_side(of_floor),
        to_pgqueuer=_ratios(of_headgate, of_pgqueuer),
        to_floor=_ratios(of_headgate, of_floor),
    )


def lines(found: Runs) -> list[tuple[str, str]]:
    """The figure for people."""
    cores = [*found.headgate.neighbours, *found.pgqueuer.neighbours, *found.floor.neighbours]
    return [
        ("publish until the run succeeded", _text(found.headgate, "runs")),
        (f"pgqueuer {found.pgqueuer_version}: until handled", _text(found.pgqueuer, "jobs")),
        ("floor of succeeded runs: plain SQL", _text(found.floor, "runs")),
        ("ratio to pgqueuer", _spread(found.to_pgqueuer)),
        ("ratio to the floor of succeeded", _spread(found.to_floor)),
        *neighbours.disturbed("runs", cores),
    ]


async def _headgate(stage: Stage, runs: int) -> Rate:
    return await pipeline.measure(stage, runs, without_triggers, warm_up=_warm_up(runs), goal=pipeline.SUCCEEDED)


async def _pgqueuer(stage: Stage, runs: int) -> Rate:
    return await yardstick.measure(stage, runs, _warm_up(runs))


async def _floor(stage: Stage, runs: int) -> Rate:
    return await floor.measure(stage, runs, floor.succeeded)


def _warm_up(runs: int) -> int:
    return min(pipeline.WARM_UP, runs)


def _side(rates: Sequence[Rate]) -> Side:
    return Side(
        per_second=round(median(rate.per_second for rate in rates), 1),
        turns=[rate.per_second for rate in rates],
        cpu_us=[rate.cpu_us for rate in rates],
        neighbours=[rate.neighbours for rate in rates],
    )


def _ratios(ours: Sequence[Rate], theirs: Sequence[Rate]) -> list[float]:
    return [round(a.per_second / b.per_second, 3) for a, b in zip(ours, theirs, strict=True)]


def _text(side: Side, what: str) -> str:
    known = [used for used in side.cpu_us if used is not None]
    cpu = f", {median(known):,.0f} µs of CPU each" if known else ""
    return f"{side.per_second:,.0f} {what}/s (turns: {min(side.turns):,.0f} to {max(side.turns):,.0f}){cpu}"


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.2f} (turns: {min(ratios):.2f} to {max(ratios):.2f})"
