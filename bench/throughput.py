"""Publish until the run exists, beside the floor of the same rows."""

from __future__ import annotations

from functools import partial

import msgspec

from bench import floor, neighbours, pipeline, side
from bench.side import Side
from bench.stage import Stage


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    """Floor and pipeline in turns, the order changing: the medians, and each turn's ratio of the two."""

    events: int
    floor: Side
    pipeline: Side
    ratios: list[float]


async def measure(stage: Stage, events: int, turns: int) -> Throughput:
    """Each once a turn."""
    ways = {"floor": partial(floor.measure, stage, events), "pipeline": partial(pipeline.measure, stage, events)}
    found = await side.in_turns(ways, turns)
    below, through = found["floor"], found["pipeline"]
    return Throughput(events=events, floor=below, pipeline=through, ratios=side.ratios(through, below))


def lines(found: Throughput) -> list[tuple[str, str]]:
    """The figure for people."""
    return [
        ("floor: plain SQL, batches of 500", found.floor.text("events")),
        ("publish until the run exists", found.pipeline.text("events")),
        ("ratio to the floor", side.spread(found.ratios)),
        *neighbours.disturbed("throughput", [*found.floor.neighbours, *found.pipeline.neighbours]),
    ]
