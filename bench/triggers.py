"""Many triggers: what those of other event types cost an event, and what an event costs that fires a hundred."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import median

import msgspec

from bench import neighbours, pipeline, side, workload
from bench.side import Side
from bench.stage import Stage, execute

FAN_OUT = 100
FAN_OUT_WARM_UP = 20

# How many triggers, and whether those of other event types are patterns.
KINDS = ((1, False), (100, False), (1000, False), (1000, True))

_COPY = """
insert into tidegate.workflow_event_triggers
  (id, workflow_definition_id, name, event_type, event_source, predicates, created_by, updated_by)
select gen_random_uuid(), t.workflow_definition_id, 'bench-' || u.number, u.event_type, t.event_source, t.predicates,
       'bench', 'bench'
  from tidegate.workflow_event_triggers t, unnest($1::text[]) with ordinality as u (event_type, number)
"""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """So many active triggers, of which one takes the events; `ratio` and `cpu_ratio` are to that one alone. `cpu_us`
    is what all processes took for an event; other work on the machine moves it far less than the rate."""

    triggers: int
    are_patterns: bool
    rates: list[float]
    ratios: list[float]
    cpu_us: list[float | None]
    neighbours: list[float | None]
    per_second: float
    ratio: float
    cpu_ratio: float | None


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline beside triggers of other event types: turn by turn, the order changing; medians."""

    events: int
    cases: list[Case]


class FanOut(msgspec.Struct, frozen=True, kw_only=True):
    """Every event fires every trigger: events and deliveries (each launches a run) per second; medians."""

    triggers: int
    events: int
    turns: list[float]
    cpu_us: list[float | None]
    neighbours: list[float | None]
    events_per_second: float
    deliveries_per_second: float


async def crowd(stage: Stage, events: int, turns: int, kinds: Sequence[tuple[int, bool]] = KINDS) -> Crowd:
    """So many triggers, all but one of other event types; the first kind is what the others are compared with."""
    ways = {
        f"{triggers} {are_patterns}": partial(pipeline.measure, stage, events, _copies(_others(triggers, are_patterns)))
        for triggers, are_patterns in kinds
    }
    found = list((await side.in_turns(ways, turns)).values())
    return Crowd(events=events, cases=[_case(*kind, one, found[0]) for kind, one in zip(kinds, found, strict=True)])


async def fan_out(stage: Stage, events: int, turns: int) -> FanOut:
    """A hundred triggers that all take every event."""
    prepare, warm_up = _copies([workload.TYPE] * (FAN_OUT - 1)), min(FAN_OUT_WARM_UP, events)
    found = [
        await pipeline.measure(stage, events, prepare, runs_per_event=FAN_OUT, warm_up=warm_up) for _ in range(turns)
    ]
    rate = median(one.per_second for one in found)
    return FanOut(
        triggers=FAN_OUT,
        events=events,
        turns=[one.per_second for one in found],
        cpu_us=[one.cpu_us for one in found],
        neighbours=[one.neighbours for one in found],
        events_per_second=rate,
        deliveries_per_second=round(rate * FAN_OUT, 1),
    )


def crowd_lines(found: Crowd) -> list[tuple[str, str]]:
    """The figure for people."""
    lines = []
    for case in found.cases:
        others = "patterns" if case.are_patterns else "of other types"
        name = "1 trigger" if case.triggers == 1 else f"{case.triggers:,} triggers, {case.triggers - 1:,} {others}"
        against = f", {side.spread(case.ratios)} of that with 1"
        if case.cpu_ratio:
            against += f", {case.cpu_ratio:.2f} of its CPU"
        lines.append((name, f"{case.per_second:,.0f} events/s" + (against if case.triggers > 1 else "")))
    return lines + neighbours.disturbed("triggers", [cores for case in found.cases for cores in case.neighbours])


def fan_out_lines(found: FanOut) -> list[tuple[str, str]]:
    """The figure for people."""
    rates = f"{found.deliveries_per_second:,.0f} deliveries/s, {found.events_per_second:,.0f} events/s"
    return [
        (f"{found.triggers} triggers fire for each event", rates),
        *neighbours.disturbed("fanout", found.neighbours),
    ]


def _others(triggers: int, are_patterns: bool) -> list[str]:
    """The event types of all triggers but one, none of which takes the events."""
    return [f"other-{number}.{'*' if are_patterns else 'created'}" for number in range(1, triggers)]


def _case(triggers: int, are_patterns: bool, found: Side, alone: Side) -> Case:
    ratios = side.ratios(found, alone)
    return Case(
        triggers=triggers,
        are_patterns=are_patterns,
        rates=found.turns,
        ratios=ratios,
        cpu_us=found.cpu_us,
        neighbours=found.neighbours,
        per_second=found.per_second,
        ratio=round(median(ratios), 3),
        cpu_ratio=side.cpu_ratio(found, alone),
    )


def _copies(event_types: Sequence[str]) -> Callable[[str], Awaitable[None]]:
    """What makes copies of the trigger of `bench.app`, one for each event type."""
    return partial(execute, statement=_COPY, arguments=(list(event_types),))
