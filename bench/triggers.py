"""Many triggers: what those of other event types cost an event, and what an event costs that fires a hundred."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import median

import msgspec

from bench import pipeline, workload
from bench.rate import Rate
from bench.stage import Stage, execute

FAN_OUT = 100
FAN_OUT_WARM_UP = 20

# Each case once in each place, and once right after each other one, in as many turns as there are cases.
_FIRST_ORDER = (0, 1, 3, 2)

_COPY = """
insert into headgate.workflow_event_triggers
  (id, workflow_definition_id, name, event_type, event_source, predicates, created_by, updated_by)
select gen_random_uuid(), t.workflow_definition_id, 'bench-' || u.number, u.event_type, t.event_source, t.predicates,
       'bench', 'bench'
  from headgate.workflow_event_triggers t, unnest($1::text[]) with ordinality as u (event_type, number)
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


async def crowd(stage: Stage, events: int, turns: int) -> Crowd:
    """1, 100 and 1,000 triggers, and 1,000 of which 999 are patterns; all but one of other event types."""
    kinds = ((1, False), (100, False), (1000, False), (1000, True))
    found: list[list[Rate]] = [[] for _ in kinds]
    for turn in range(turns):
        for case in ((first + turn) % len(kinds) for first in _FIRST_ORDER):
            found[case].append(await pipeline.measure(stage, events, _copies(_others(*kinds[case]))))
    cases = [_case(*kind, rates, found[0]) for kind, rates in zip(kinds, found, strict=True)]
    return Crowd(events=events, cases=cases)


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


def _others(triggers: int, are_patterns: bool) -> list[str]:
    """The event types of all triggers but one, none of which takes the events."""
    return [f"other-{number}.{'*' if are_patterns else 'created'}" for number in range(1, triggers)]


def _case(triggers: int, are_patterns: bool, found: Sequence[Rate], alone: Sequence[Rate]) -> Case:
    ratios = [round(one.per_second / other.per_second, 3) for one, other in zip(found, alone, strict=True)]
    pairs = zip(found, alone, strict=True)
    cpu_ratios = [one.cpu_us / other.cpu_us for one, other in pairs if one.cpu_us and other.cpu_us]
    return Case(
        triggers=triggers,
        are_patterns=are_patterns,
        rates=[one.per_second for one in found],
        ratios=ratios,
        cpu_us=[one.cpu_us for one in found],
        neighbours=[one.neighbours for one in found],
        per_second=round(median(one.per_second for one in found), 1),
        ratio=round(median(ratios), 3),
        cpu_ratio=round(median(cpu_ratios), 3) if cpu_ratios else None,
    )


def _copies(event_types: Sequence[str]) -> Callable[[str], Awaitable[None]]:
    """What makes copies of the trigger of `bench.app`, one for each event type."""
    return partial(execute, statement=_COPY, arguments=(list(event_types),))
