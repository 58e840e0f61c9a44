"""Shares: slots go to who waits, in proportion to the weights; nobody is left out, and no slot stays free."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.flow.decide.inbox import places_for
from tidegate.model import shares
from tidegate.model.shares import InboxRing, Lane, Line, Turns, WaitingLane


@pytest.mark.parametrize(
    ("slots", "lines", "wanted"),
    [
        pytest.param(10, [("a", 100, 0, 1)], {"a": 10}, id="alone"),
        pytest.param(10, [("a", 3, 0, 1)], {"a": 3}, id="alone with little"),
        pytest.param(0, [("a", 3, 0, 1), ("b", 3, 0, 1)], {}, id="no slot"),
        pytest.param(10, [], {}, id="nobody"),
        pytest.param(10, [("a", 100, 0, 1), ("b", 100, 0, 1)], {"a": 5, "b": 5}, id="halves"),
        pytest.param(10, [("a", 100, 0, 1), ("b", 1, 0, 1)], {"a": 9, "b": 1}, id="what one leaves the other gets"),
        pytest.param(1, [("a", 100, 9, 1), ("b", 1, 0, 1)], {"b": 1}, id="who holds none is next"),
        pytest.param(10, [("a", 100, 0, 4), ("b", 100, 0, 1)], {"a": 8, "b": 2}, id="by weight"),
        pytest.param(4, [("a", 100, 8, 4), ("b", 100, 0, 1)], {"a": 1, "b": 3}, id="by weight with what is held"),
        pytest.param(1, [("a", 100, 5, 5), ("b", 100, 0, 1)], {"b": 1}, id="a weight does not starve"),
        pytest.param(5, [("a", 0, 0, 1), ("b", 2, 0, 1)], {"b": 2}, id="who waits for nothing gets nothing"),
    ],
)  # fmt: skip
def test_slots_go_in_proportion(slots: int, lines: list[tuple[str, int, int, int]], wanted: dict[str, int]) -> None:
    assert Turns().give(slots, [Line(*line) for line in lines]) == wanted


@pytest.mark.parametrize("weights", [{"a": 1, "b": 1}, {"a": 5, "b": 1}, {"a": 10, "b": 3, "c": 1}])
def test_a_single_slot_goes_round_in_proportion(weights: dict[str, int]) -> None:
    turns, got = Turns(), Counter[str]()
    for _ in range(100 * sum(weights.values())):
        got.update(turns.give(1, [Line(name, 1000, 0, weight) for name, weight in weights.items()]))
    assert {name: round(count / 100) for name, count in got.items()} == weights


def test_who_comes_back_has_saved_up_no_turns() -> None:
    turns = Turns()
    for _ in range(50):
        turns.give(1, [Line("a", 9), Line("c", 9)])
    got = Counter[str]()
    for _ in range(20):
        got.update(turns.give(1, [Line("a", 9), Line("b", 9)]))
    assert abs(got["a"] - got["b"]) <= 1


def test_lines_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "MAX_LINES", 10)
    turns = Turns()
    for number in range(100):
        turns.give(3, [Line(f"{number}", 1), Line(f"{number + 1}", 1), Line("always", 9)])
    assert len(turns._turns) <= 13


_LINES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 20), st.integers(1, 10)), max_size=8).map(
    lambda found: [Line(str(place), *one) for place, one in enumerate(found)]
)


@given(st.lists(st.tuples(st.integers(0, 60), _LINES), max_size=6))
def test_no_slot_is_free_while_anyone_waits_and_the_least_served_come_first(
    asked: list[tuple[int, list[Line]]],
) -> None:
    turns = Turns()
    for slots, lines in asked:
        given_out = turns.give(slots, lines)
        by_name = {line.name: line for line in lines}
        assert sum(given_out.values()) == min(slots, sum(line.waiting for line in lines))
        for name, count in given_out.items():
            line = by_name[name]
            assert 0 < count <= line.waiting
            # Whoever still waits would not have been better served by the last slot that this line got.
            for other in lines:
                if given_out.get(other.name, 0) < other.waiting:
                    has = other.held + given_out.get(other.name, 0)
                    assert (line.held + count - 1) / line.weight <= has / other.weight


def lanes(*given: tuple[str, int, int]) -> list[WaitingLane]:
    return [WaitingLane(Lane(source), weight, waiting) for source, weight, waiting in given]


@pytest.mark.parametrize(
    ("places", "waiting", "wanted"),
    [
        pytest.param(500, lanes(("a", 1, 9999), ("b", 1, 1)), {"a": 499, "b": 1}, id="a flood and one"),
        pytest.param(500, lanes(("a", 1, 9999), ("b", 1, 9999)), {"a": 250, "b": 250}, id="two floods"),
        pytest.param(
            600, lanes(("a", 1, 9999), ("b", 1, 9999), ("c", 1, 1)), {"a": 300, "b": 299, "c": 1}, id="what one leaves"
        ),
        pytest.param(600, lanes(("a", 1, 9999), ("b", 5, 9999)), {"a": 100, "b": 500}, id="by weight"),
        pytest.param(2, lanes(("a", 1, 9), ("b", 1, 9), ("c", 1, 9)), {"a": 1, "b": 1}, id="fewer places than sources"),
        pytest.param(9, lanes(("a", 1, 2), ("b", 1, 3)), {"a": 2, "b": 3}, id="everything fits"),
    ],
)
def test_a_batch_is_divided_by_weight(places: int, waiting: list[WaitingLane], wanted: dict[str, int]) -> None:
    found = InboxRing().divide(places, waiting)
    assert {lane.source: count for lane, count in found.items()} == wanted


def ring_order(ring: InboxRing, sources: dict[str, int], most: int, waiting: int = 10**6) -> list[WaitingLane]:
    """What the database answers: at most so many sources, beginning after the last that had its share."""
    names = sorted(sources)
    later = [name for name in names if name > ring.after] + [name for name in names if name <= ring.after]
    return [WaitingLane(Lane(name), sources[name], waiting) for name in later[:most]]


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 12), min_size=1, max_size=12),
    st.integers(1, 20),
)
def test_the_proportions_hold_over_batches(sources: dict[str, int], places: int) -> None:
    """As many places as 20 whole rounds have: each source has its weight 20 times, to within one share."""
    ring, got = InboxRing(), Counter[str]()
    for _ in range(20 * sum(sources.values()) // places):
        divided = ring.divide(places, ring_order(ring, sources, places))
        assert sum(divided.values()) == places
        got.update({lane.source: count for lane, count in divided.items()})
    total = sum(got.values()) / sum(sources.values())
    for source, weight in sources.items():
        assert abs(got[source] - total * weight) <= weight


@given(
    st.integers(0, 200),
    st.dictionaries(st.tuples(st.sampled_from("abc"), st.integers(1, 10)), st.integers(1, 50), max_size=9),
)
def test_no_place_stays_free_while_anything_waits(places: int, given_lanes: dict[tuple[str, int], int]) -> None:
    waiting = [WaitingLane(Lane(*lane), 1, count) for lane, count in sorted(given_lanes.items())]
    found = InboxRing().divide(places, waiting)
    assert sum(found.values()) == min(places, sum(one.waiting for one in waiting))
    most = {one.lane: one.waiting for one in waiting}
    assert all(0 < count <= most[lane] for lane, count in found.items())


@pytest.mark.parametrize("places", [1, 2, 7, 500])
def test_priorities_share_what_their_source_gets(places: int) -> None:
    ring, got = InboxRing(), Counter[Lane]()
    waiting = [WaitingLane(Lane("a", priority), 1, 10**6) for priority in (1, 3, 10)]
    for _ in range(2000):
        got.update(ring.divide(places, [*waiting, WaitingLane(Lane("b"), 1, 0)]))
    for priority in (1, 3, 10):
        assert got[Lane("a", priority)] / sum(got.values()) == pytest.approx(priority / 14, rel=0.05)


@pytest.mark.parametrize(
    ("waiting", "limit", "wanted"),
    [
        pytest.param(lanes(("a", 1, 500), ("b", 1, 1)), 500, 100, id="one beside a flood"),
        pytest.param(lanes(("a", 1, 500), ("b", 1, 80)), 500, 160, id="some beside a flood"),
        pytest.param(lanes(("a", 1, 500), ("b", 1, 500)), 500, 500, id="floods alone"),
        pytest.param(lanes(("a", 1, 500), ("b", 1, 1)), 50, 50, id="never more than the limit"),
        pytest.param(lanes(("a", 1, 50), ("b", 9, 60)), 100, 100, id="with weights"),
    ],
)
def test_a_batch_is_small_while_someone_waits_with_little(waiting: list[WaitingLane], limit: int, wanted: int) -> None:
    assert places_for(waiting, limit) == wanted
