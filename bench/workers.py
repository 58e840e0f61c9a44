"""Two worker processes against one, from publish until every run has succeeded."""

from __future__ import annotations

from functools import partial

import msgspec

from bench import neighbours, pipeline, side
from bench.side import Side
from bench.stage import Stage, without_triggers


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """In turns, the order changing; the ratios are of two to one, of the rates and of the CPU for a run."""

    runs: int
    one: Side
    two: Side
    ratios: list[float]
    cpu_ratio: float | None


async def measure(stage: Stage, runs: int, turns: int) -> Workers:
    """One API; the workers have default settings."""
    run = partial(
        pipeline.measure,
        stage,
        runs,
        without_triggers,
        warm_up=min(pipeline.WARM_UP, runs),
        goal=pipeline.SUCCEEDED,
    )
    found = await side.in_turns({"one": partial(run, workers=1), "two": partial(run, workers=2)}, turns)
    one, two = found["one"], found["two"]
    return Workers(runs=runs, one=one, two=two, ratios=side.ratios(two, one), cpu_ratio=side.cpu_ratio(two, one))


def lines(found: Workers) -> list[tuple[str, str]]:
    """The figure for people."""
    cpu = f", {found.cpu_ratio:.2f} of its CPU" if found.cpu_ratio else ""
    return [
        ("one worker process", found.one.text("runs")),
        ("two worker processes", found.two.text("runs")),
        ("ratio of two to one", f"{side.spread(found.ratios)}{cpu}"),
        *neighbours.disturbed("workers", [*found.one.neighbours, *found.two.neighbours]),
    ]
