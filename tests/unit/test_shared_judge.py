"""The verdicts of `chaos.shared` find each kind of wrong, and nothing in what is right."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from chaos.shared_app import Mark
from chaos.shared_judge import Arrival, Evidence, Launch, Told, judge, most_spent

NOW = datetime(2026, 6, 1, tzinfo=UTC)
SUMMARY = "ask waits: budget openai: over 30/s; it is number 3 in line; 0 of 30/s are left, and it costs 2"


def launch(n: int, workflow: str = "ask", at: float = 0.0, **more: Any) -> Launch:
    one = Launch(f"r{n}", workflow, "succeeded", None, "acme", 1, at, at - 0.01, at + 0.01)
    return one._replace(**more)


def marks(n: int, workflow: str, begin: float, end: float | None, events: list[str]) -> list[Mark]:
    found = [Mark("begin", workflow, f"r{n}", f"x{n}-{begin}", begin, events)]
    return found if end is None else [*found, Mark("end", workflow, f"r{n}", f"x{n}-{begin}", end)]


def told(**more: Any) -> Told:
    answer = {"summary": SUMMARY, "waits_for": "room in its budget", "until": "2026-06-01T00:00:09Z"} | more
    return Told("d1", NOW, answer)


def sound() -> Evidence:
    """Eight launches of a key of tenant in a second, the ninth after it; two at once; a window of two events."""
    asks = [launch(n, at=n * 0.1 if n < 8 else 1.001) for n in range(9)]
    arrivals = [Arrival(f"e{n}", "ask", n, None) for n in range(9)]
    done = [mark for n in range(9) for mark in marks(n, "ask", n, n + 1.9, [f"e{n}"])]
    window = launch(20, "store", 3.0)
    rows = [Arrival("e20", "store", 20, 1.0), Arrival("e21", "store", 21, 1.9)]
    resumed = [*marks(20, "store", 4.0, None, ["e20", "e21"]), *marks(20, "store", 5.0, 5.1, ["e20", "e21"])]
    in_order = sorted([*done, *resumed], key=lambda mark: mark.at)
    return Evidence([*asks, window], [*arrivals, *rows], in_order, [told()], [])


def wrong(evidence: Evidence) -> set[str]:
    found = judge(evidence)
    return {name for name in found.__struct_fields__ if getattr(found, name)}


def test_what_is_right_is_right() -> None:
    assert wrong(sound()) == set()


CASES: list[tuple[str, Callable[[Evidence], Evidence]]] = [
    ("exceeded", lambda e: e._replace(launches=[*e.launches[:8], e.launches[8]._replace(at=0.999), e.launches[9]])),
    ("exceeded", lambda e: e._replace(launches=[e.launches[0]._replace(tokens=24), *e.launches[1:]])),
    ("exceeded", lambda e: e._replace(launches=[e.launches[0]._replace(not_before=0.001), *e.launches[1:]])),
    ("crowded", lambda e: e._replace(
        marks=[Mark(m.what, m.workflow, m.run, m.execution, m.at + (m.what == "end" and m.run == "r3"), m.events)
               for m in e.marks])),
    ("held_without_reason", lambda e: e._replace(told=[told(waits_for=None)])),
    ("held_without_reason", lambda e: e._replace(told=[told(summary="ask waits")])),
    ("held_without_reason", lambda e: e._replace(told=[told(until=None)])),
    ("held_without_reason", lambda e: e._replace(told=[told(waits_for="a worker to decide it: its turn has come")])),
    ("event_in_no_run", lambda e: e._replace(arrivals=[*e.arrivals, Arrival("e9", "ask", 99, None)])),
    ("event_in_two_runs", lambda e: e._replace(
        launches=[*e.launches, launch(21, "store", 9.0)], marks=[*e.marks, *marks(21, "store", 20.0, 20.1, ["e21"])])),
    ("out_of_order", lambda e: e._replace(
        arrivals=[a._replace(sequence=30) if a.event == "e20" else a for a in e.arrivals])),
    ("out_of_order", lambda e: e._replace(marks=[*e.marks, *marks(20, "store", 20.0, 20.1, ["e20"])])),
    ("window_exceeded", lambda e: e._replace(
        arrivals=[a._replace(collected_at=2.0) if a.event == "e21" else a for a in e.arrivals])),
    ("unfinished", lambda e: e._replace(launches=[e.launches[0]._replace(status="failed"), *e.launches[1:]])),
    ("unfinished", lambda e: e._replace(waiting=["delivery d1 waits"])),
]  # fmt: skip


@pytest.mark.parametrize(("verdict", "spoil"), CASES, ids=[f"{name}-{n}" for n, (name, _) in enumerate(CASES)])
def test_what_is_wrong_is_found(verdict: str, spoil: Callable[[Evidence], Evidence]) -> None:
    assert wrong(spoil(sound())) == {verdict}


def test_a_window_with_too_many_events_is_found() -> None:
    events = [f"w{n}" for n in range(11)]
    arrivals = [Arrival(event, "store", n, 1.0) for n, event in enumerate(events)]
    evidence = Evidence([launch(1, "store")], arrivals, marks(1, "store", 2.0, 2.1, events), [], [])
    assert wrong(evidence) == {"window_exceeded"}


def test_an_execution_that_lost_its_run_does_not_count() -> None:
    """A worker is stopped, another ends the run, and the first goes on: the slot was free since then."""
    done = [
        Mark("begin", "draw", "r1", "lost", 1.0, ["e1"]), Mark("begin", "draw", "r1", "own", 5.0, ["e1"]),
        Mark("end", "draw", "r1", "own", 5.5), *(m for n in (2, 3, 4) for m in marks(n, "draw", 6.0, 7.0, [f"e{n}"])),
        Mark("end", "draw", "r1", "lost", 6.5),
    ]  # fmt: skip
    launches = [launch(n, "draw", n) for n in (1, 2, 3, 4)]
    arrivals = [Arrival(f"e{n}", "draw", n, None) for n in (1, 2, 3, 4)]
    assert wrong(Evidence(launches, arrivals, sorted(done, key=lambda m: m.at), [], [])) == set()


def test_the_most_that_is_spent_in_any_interval() -> None:
    assert most_spent([], 1) == 0
    assert most_spent([(0.0, 3), (0.5, 4), (1.0, 5)], 1) == 9  # half open: what was spent a second ago is free
    assert most_spent([(0.0, 3), (0.5, 4), (0.999, 5)], 1) == 12
    assert datetime.fromisoformat("2026-06-01T00:00:09Z") - NOW == timedelta(seconds=9)
