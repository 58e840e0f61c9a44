"""Who may take a concurrency slot: runs that resume and deliveries that wait, by how long they have waited."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from tidegate.model.slot_line import SlotLine

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def at(*seconds: int) -> list[datetime]:
    return [NOON + timedelta(seconds=one) for one in seconds]


# slots, in use, other runs that wait since, deliveries that are due and came, the run is due since, answer
CASES = {
    "nobody is there": (1, 0, [], [], 5, "free"),
    "no limit": (None, 9, [1], [1], 5, "free"),
    "all are in use": (2, 2, [], [], 5, "full"),
    "more are in use than there are": (1, 3, [], [], 5, "full"),
    "one is free": (2, 1, [], [], 5, "free"),
    "another run has waited longer": (1, 0, [4], [], 5, "full"),
    "another run waits since later": (1, 0, [6], [], 5, "free"),
    "another since the same time": (1, 0, [5], [], 5, "free"),
    "one for each": (2, 0, [4], [], 5, "free"),
    "two have waited longer for two": (2, 0, [3, 4], [], 5, "full"),
    "a delivery came before": (1, 0, [], [4], 5, "turn"),
    "a delivery came later": (1, 0, [], [6], 5, "free"),
    "a delivery came at the same time": (1, 0, [], [5], 5, "free"),
    "the first delivery stands for those behind it": (1, 0, [], [6, 4], 5, "free"),
    "one for the delivery and one for the run": (2, 0, [], [4], 5, "free"),
    "a delivery, and a run that has waited longer": (2, 0, [3], [4], 5, "turn"),
    "in use comes first": (1, 1, [], [4], 5, "full"),
}


@pytest.mark.parametrize(("most", "in_use", "waiting", "called", "since", "answer"), CASES.values(), ids=CASES)
def test_who_has_waited_longest_is_next(
    most: int | None, in_use: int, waiting: list[int], called: list[int], since: int, answer: str
) -> None:
    line = SlotLine(most, in_use, at(*waiting), at(*called))
    assert line.ask(at(since)[0]) == answer


def test_those_that_ask_together_are_counted() -> None:
    line = SlotLine(2)
    answers = []
    for since in at(1, 2, 3):
        answers.append(line.ask(since))
        line.take() if answers[-1] == "free" else line.wait(since)
    assert answers == ["free", "free", "full"]
    assert (line.in_use, line.waiting) == (2, at(3))


def test_nobody_is_passed_over_by_those_that_come_later() -> None:
    """Of a run and a delivery that want the last slot exactly one is next, whatever their times."""
    for due in range(4):
        for came in range(4):
            mine = SlotLine(1, called=at(came)).ask(at(due)[0]) == "free"
            is_before = at(due)[0] <= at(came)[0]  # the rule by which a delivery leaves the slot to a run
            assert mine == is_before
