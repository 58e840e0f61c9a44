"""Many triggers: what those of other event types cost an event, and what an event costs that fires a hundred."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import median

import msgspec

from bench import neighbours, pipeline, workload
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
    """So many active triggers, of which one takes the events; `ratio` is to the rate with that one alone."""

    triggers: int
    are_patterns: bool
    rates: list[float]
    ratios: list[float]
    per_second: float
    ratio: float


class Crowd(msgspec.Struct, frozen=True, kw_only=True):
    """The pipeline beside triggers of other event types: turn by turn, the order changing; medians."""

    events: int
    cases: list[Case]
    neighbours: list[float | None]


class FanOut(msgspec.Struct, frozen=True, kw_only=True):
    """Every event fires every trigger: events and deliveries (each launches a run) per second; medians."""

    triggers: int
    events: int
    turns: list[float]
    events_per_second: float
    deliveries_per_second: float
    neighbours: list[float | None]


async def crowd(stage: Stage, events: int, turns: int) -> Crowd:
    """1, 100 and 1,000 triggers, and 1,000 of which 999 are patterns; all but one of other event types."""
    kinds = ((1, False), (100, False), (1000, False), (1000, True))
    rates: list[list[float]] = [[] for _ in kinds]
    beside = []
    for turn in range(turns):
        with neighbours.watched() as others:
            for case in ((first + turn) % len(kinds) for first in _FIRST_ORDER):
                prepare = _copies(_others(*kinds[case]))
                rates[case].append(round(await pipeline.measure(stage, events, prepare), 1))
        beside.append(others.cores)
    return Crowd(
        events=events,
        cases=[_case(*kind, found, rates[0]) for kind, found in zip(kinds, rates, strict=True)],
        neighbours=beside,
    )


async def fan_out(stage: Stage, events: int, turns: int) -> FanOut:
    """A hundred triggers that all take every event."""
    prepare = _copies([workload.TYPE] * (FAN_OUT - 1))
    rates, beside = [], []
    for _ in range(turns):
        with neighbours.watched() as others:
            rate = await pipeline.measure(
                stage, events, prepare, runs_per_event=FAN_OUT, warm_up=min(FAN_OUT_WARM_UP, events)
            )
        rates.append(round(rate, 1))
        beside.append(others.cores)
    return FanOut(
        triggers=FAN_OUT,
        events=events,
        turns=rates,
        events_per_second=median(rates),
        deliveries_per_second=round(median(rates) * FAN_OUT, 1),
        neighbours=beside,
    )


def _others(triggers: int, are_patterns: bool) -> list[str]:
    """The event types of all triggers but one, none of which takes the events."""
    return [f"other-{number}.{'*' if are_patterns else 'created'}" for number in range(1, triggers)]


def _case(triggers: int, are_patterns: bool, rates: Sequence[float], alone: Sequence[float]) -> Case:
    ratios = [round(rate / one, 3) for rate, one in zip(rates, alone, strict=True)]
    return Case(
        triggers=triggers,
        are_patterns=are_patterns,
        rates=list(rates),
        ratios=ratios,
        per_second=round(median(rates), 1),
        ratio=round(median(ratios), 3),
    )


def _copies(event_types: Sequence[str]) -> Callable[[str], Awaitable[None]]:
    """What makes copies of the trigger of `bench.app`, one for each event type."""
    return partial(execute, statement=_COPY, arguments=(list(event_types),))
