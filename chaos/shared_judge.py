"""The verdicts of `chaos.shared`, from what the functions wrote, the launches that the database noted, and events."""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from chaos.judge import most_at_once
from chaos.shared_app import BUDGETS, USES, WINDOWS, Mark


class Launch(NamedTuple):
    """A launch of a run: when, by Tidegate's stamp, and between which times its transaction wrote it."""

    run: str
    workflow: str
    status: str
    error: str | None
    tenant: str
    tokens: int
    at: float
    not_before: float
    not_after: float


class Arrival(NamedTuple):
    """An accepted event: its place in the order of arrival, and when it was collected (None: it was not)."""

    event: str
    workflow: str
    sequence: int
    collected_at: float | None


class Told(NamedTuple):
    """What explain said of a delivery that waited for a budget before and after it was asked; `at` is the database's
    time."""

    delivery: str
    at: datetime
    answer: Mapping[str, Any]


class Evidence(NamedTuple):
    launches: Sequence[Launch]
    arrivals: Sequence[Arrival]
    marks: Sequence[Mark]
    told: Sequence[Told]
    waiting: Sequence[str]


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """Every list must be empty."""

    exceeded: list[str]
    crowded: list[str]
    held_without_reason: list[str]
    event_in_no_run: list[str]
    event_in_two_runs: list[str]
    out_of_order: list[str]
    window_exceeded: list[str]
    unfinished: list[str]


def judge(evidence: Evidence) -> Verdicts:
    """What is wrong."""
    taken = _taken(evidence.marks)
    return Verdicts(
        exceeded=[*_exceeded(evidence.launches), *_stamps(evidence.launches)],
        crowded=list(_crowded(evidence)),
        held_without_reason=list(_unexplained(evidence.told)),
        event_in_no_run=[
            f"event {one.event} of {one.workflow}" for one in evidence.arrivals if not taken[one.workflow, one.event]
        ],
        event_in_two_runs=[
            f"event {event} of {workflow}: runs {sorted(runs)}"
            for (workflow, event), runs in taken.items()
            if len(runs) > 1
        ],
        out_of_order=list(_out_of_order(evidence)),
        window_exceeded=list(_windows(evidence)),
        unfinished=[
            *(f"{o.workflow} {o.run} is {o.status}: {o.error}" for o in evidence.launches if o.status != "succeeded"),
            *evidence.waiting,
        ],
    )


def most_spent(spent: Iterable[tuple[float, int]], seconds: float) -> int:
    """The most that was spent in any half-open sliding interval."""
    ordered, most, total, first = sorted(spent), 0, 0, 0
    for at, cost in ordered:
        total += cost
        while ordered[first][0] <= at - seconds:
            total -= ordered[first][1]
            first += 1
        most = max(most, total)
    return most


def _of_keys(launches: Sequence[Launch], budget: str) -> dict[str, list[Launch]]:
    found: dict[str, list[Launch]] = defaultdict(list)
    for one in launches:
        if budget in USES[one.workflow]:
            found[one.tenant if BUDGETS[budget].is_keyed else ""].append(one)
    return found


def _exceeded(launches: Sequence[Launch]) -> Iterator[str]:
    """More was spent of a key in an interval than its rate allows."""
    for budget, limits in BUDGETS.items():
        if limits.rate is None:
            continue
        for key, mine in _of_keys(launches, budget).items():
            spent = [(one.at, one.tokens if limits.has_cost else 1) for one in mine]
            most = most_spent(spent, limits.interval_ms / 1000)
            if most > limits.rate:
                yield f"{budget} {key}: {most} within {limits.interval_ms} ms where {limits.rate} are allowed"


def _stamps(launches: Sequence[Launch]) -> Iterator[str]:
    """Launches with a time that is not of the transaction that made them: then the intervals would prove nothing."""
    for one in launches:
        if not one.not_before <= one.at <= one.not_after:
            yield f"run {one.run} is stamped {one.at}, and was written between {one.not_before} and {one.not_after}"


def _crowded(evidence: Evidence) -> Iterator[str]:
    """More runs of a key at once than its concurrency, by what their functions wrote: a run lasts from its first begin
    to the end of the execution that began last. What a worker writes that has lost the run does not count."""
    begun: dict[str, float] = {}
    ends = {mark.execution: mark.at for mark in evidence.marks if mark.what == "end"}
    ended: dict[str, float] = {}
    for mark in evidence.marks:  # in the order of time
        if mark.what == "begin":
            begun.setdefault(mark.run, mark.at)
            if mark.execution in ends:
                ended[mark.run] = ends[mark.execution]
    for budget, limits in BUDGETS.items():
        if limits.concurrency is None:
            continue
        for key, mine in _of_keys(evidence.launches, budget).items():
            spans = [(begun[one.run], ended[one.run]) for one in mine if one.run in begun and one.run in ended]
            most = most_at_once(spans)
            if most > limits.concurrency:
                yield f"{budget} {key}: {most} runs at once where {limits.concurrency} are allowed"


# Whose turn has come is decided at once: the end of a run, or the time at which there is room, makes it due.
FORGOTTEN_SECONDS = 2.0
_PLACE = re.compile(r"number \d+ in line")


def _unexplained(told: Sequence[Told]) -> Iterator[str]:
    """Deliveries that wait for a budget, and of which explain does not say which, at which place, and until when or for
    whom; and those whose turn has come, and that nobody will decide before long."""
    for one in told:
        summary, waits_for, until = (one.answer.get(name) or "" for name in ("summary", "waits_for", "until"))
        is_named = any(f"budget {budget}" in summary for budget in BUDGETS) and _PLACE.search(summary)
        is_bounded = until or "slots are held by" in summary or "turn" in waits_for
        is_forgotten = (
            "turn has come" in waits_for and until and (_at(until) - one.at).total_seconds() > FORGOTTEN_SECONDS
        )
        if not (waits_for and is_named and is_bounded) or is_forgotten:
            yield f"delivery {one.delivery}: {summary} (waits for {waits_for or 'nothing'}, until {until or 'no time'})"


def _at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _taken(marks: Sequence[Mark]) -> dict[tuple[str, str], set[str]]:
    """The runs that were given each event, of each workflow."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for mark in marks:
        for event in mark.events:
            found[mark.workflow, event].add(mark.run)
    return found


def _out_of_order(evidence: Evidence) -> Iterator[str]:
    """Runs that were given their events in another order than they came, twice, or others in another execution."""
    sequence = {one.event: one.sequence for one in evidence.arrivals}
    given: dict[str, list[str]] = {}
    for mark in evidence.marks:
        if mark.what != "begin":
            continue
        order = [sequence.get(event, -1) for event in mark.events]
        if any(a >= b for a, b in itertools.pairwise(order)):
            yield f"run {mark.run} was given {order}"
        if given.setdefault(mark.run, mark.events) != mark.events:
            yield f"run {mark.run} was given {len(given[mark.run])} events, and {len(mark.events)} in another execution"


def _windows(evidence: Evidence) -> Iterator[str]:
    """Runs with more events than a window may have, or that came further apart than it may last."""
    at = {(one.workflow, one.event): one.collected_at for one in evidence.arrivals}
    given = {mark.run: mark for mark in evidence.marks if mark.what == "begin" and mark.workflow in WINDOWS}
    for run, mark in given.items():
        most = WINDOWS[mark.workflow]
        times = sorted(one for event in mark.events if (one := at.get((mark.workflow, event))) is not None)
        whole = (times[-1] - times[0]) * 1000 if times else 0.0
        gap = max((b - a for a, b in itertools.pairwise(times)), default=0.0) * 1000
        if len(mark.events) > most.size or whole >= most.whole_ms or gap >= most.gap_ms:
            yield f"{mark.workflow} {run}: {len(mark.events)} events over {whole:.0f} ms, {gap:.0f} ms apart at most"


def counts(evidence: Evidence) -> dict[str, int]:
    """How many runs of each workflow were launched."""
    return dict(sorted(Counter(one.workflow for one in evidence.launches).items()))
