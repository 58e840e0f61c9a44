"""Limits that change: whatever the limit was before, the new one holds at once and is used fully within its window.

The rule (`docs/sources.md`, "Changing a limit"): after an edit at `t`, in any sliding window of the new limit at most
its number passes, and what passed before `t` counts as far as the ring knows it; one new window after `t` all of the
new rate is there to be used.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.model.allowance import BUCKETS
from tidegate.model.source import Gate, RateLimit

T0 = datetime(2026, 1, 1, 12, tzinfo=UTC)
DAY_MS = 86_400_000
US = timedelta(microseconds=1)

windows = st.sampled_from([1, 10, 64, 100, 999, 1_000, 1_001, 60_000, 3_600_000, DAY_MS, 7 * DAY_MS])
limits = st.builds(
    lambda limit, window, factor: RateLimit(limit=limit, interval_ms=max(1, round(window * factor))),
    st.sampled_from([1, 2, 7, 10, 100, 1_000]) | st.integers(1, 2_000),
    windows,
    st.floats(0.5, 2),
)


class Period(NamedTuple):
    """From when on a limit was in force; None: there was none."""

    since: datetime
    limit: RateLimit | None


class Line:
    """A source over time: its gate is built from its row for every decision, as in a worker."""

    def __init__(self, limit: RateLimit | None) -> None:
        self.now = T0
        self.periods = [Period(T0, limit)]
        self.passed: list[datetime] = []
        self.row = Gate("s")

    @property
    def limit(self) -> RateLimit | None:
        return self.periods[-1].limit

    def edit(self, limit: RateLimit | None) -> None:
        self.periods.append(Period(self.now, limit))

    def gate(self) -> Gate:
        row = self.row
        return Gate("s", limit=self.limit, ring=row.ring, ring_at=row.ring_at, ring_width_us=row.ring_width_us,
                    spent_at=row.spent_at)  # fmt: skip

    def ask(self, wanted: int) -> int:
        """Let up to `wanted` pass now; the row is written only when something has changed."""
        gate = self.gate()
        room = gate.room(self.now)
        count = wanted if room is None else min(wanted, room)
        gate.spend(self.now, count)
        if gate.is_changed:
            self.row = gate
        self.passed += [self.now] * count
        return count

    def known(self) -> int:
        """The checker: how many of those that passed the ring must still count now.

        Those in the window of the limit, unless a shorter window before had ended for them: it kept no longer. While
        there was no limit nothing was counted.
        """
        assert self.limit is not None
        oldest = self.now - window(self.limit)
        ends = [period.since for period in self.periods[1:]] + [self.now]
        counted = 0
        for (since, limit), end in reversed(list(zip(self.periods, ends, strict=True))):
            if limit is None:
                continue
            oldest = max(oldest, end - window(limit))
            counted += sum(since <= at <= end and at > oldest for at in self.passed) if end > since else 0
        return counted


def window(limit: RateLimit) -> timedelta:
    return timedelta(milliseconds=limit.interval_ms)


def bucket(limit: RateLimit) -> timedelta:
    return window(limit) / BUCKETS + US


moments = st.tuples(st.floats(0, 1.5), st.integers(0, 3_000))


@given(
    first=limits | st.none(),
    story=st.lists(st.tuples(st.lists(moments, max_size=8), limits | st.none()), min_size=1, max_size=6),
)
def test_after_any_edits_no_window_of_the_limit_in_force_is_exceeded(
    first: RateLimit | None, story: list[tuple[list[tuple[float, int]], RateLimit | None]]
) -> None:
    line = Line(first)
    for asked, limit in [*story, ([(0.0, 3_000), (0.5, 3_000), (0.6, 3_000)], None)]:
        for share, wanted in asked:
            line.now += (window(line.limit) if line.limit else timedelta(seconds=1)) * share + US
            passed = line.ask(wanted)
            assert passed == 0 or line.limit is None or line.known() <= line.limit.limit
        line.now += US
        line.edit(limit)


@given(
    first=limits,
    burst=st.integers(1, 2_000),
    idle=st.floats(0, 2),
    edits=st.lists(st.tuples(limits | st.none(), st.floats(0, 1), st.integers(0, 2_000)), max_size=4),
    last=limits,
)
def test_one_new_window_after_any_edits_all_of_the_rate_is_there(
    first: RateLimit,
    burst: int,
    idle: float,
    edits: list[tuple[RateLimit | None, float, int]],
    last: RateLimit,
) -> None:
    line = Line(first)
    line.ask(burst)
    line.now += window(first) * idle
    for limit, share, wanted in edits:
        line.edit(limit)
        line.now += (window(limit) if limit else timedelta(seconds=1)) * share + US
        line.ask(wanted)
    line.edit(last)
    edited_at = line.now
    assert line.gate().room_at(line.now) <= edited_at + window(last) + bucket(last)
    steps, rounds, passed = 130, 20, 0
    for _ in ticks(line, last, steps, 1):
        line.ask(10**6)
    for _ in ticks(line, last, steps, rounds):
        passed += line.ask(10**6)
    assert passed >= 0.95 * last.limit * rounds - last.limit


def ticks(line: Line, limit: RateLimit, steps: int, rounds: int) -> Iterator[None]:
    begun_at = line.now
    for step in range(1, steps * rounds + 1):
        line.now = begun_at + window(limit) * step / steps
        yield


@given(before=limits, later=limits, burst=st.integers(1, 2_000), idle=st.floats(0, 2), waiting=st.integers(1, 500))
def test_a_backlog_drains_at_the_new_rate_after_an_edit(
    before: RateLimit, later: RateLimit, burst: int, idle: float, waiting: int
) -> None:
    """An event that finds no room at its slot (others of the window were admitted since) retries when there is room."""
    line = Line(before)
    line.ask(burst)
    line.now += window(before) * idle
    line.edit(later)
    edited_at, gate = line.now, line.gate()
    slots = gate.slots(line.now, waiting, is_refusal=False)
    assert slots[0] <= edited_at + window(later) + bucket(later)
    for slot in slots:
        line.now = max(line.now, slot, gate.room_at(max(line.now, slot)))
        assert (gate.room(line.now) or 0) >= 1
        gate.spend(line.now, 1)
    assert line.now <= edited_at + window(later) + bucket(later) + later.pace * waiting + bucket(later)


@pytest.mark.parametrize("minutes_later", [0, 1, 10, 600])
def test_from_a_thousand_a_day_to_a_hundred_a_second(minutes_later: int) -> None:
    line = Line(RateLimit(limit=1000, interval_ms=DAY_MS))
    assert line.ask(5000) == 1000
    line.now += timedelta(minutes=minutes_later)
    new = RateLimit(limit=100, interval_ms=1000)
    line.edit(new)
    found = [line.ask(10**6)]
    found += [line.ask(10**6) for _ in ticks(line, new, 100, 10)]
    assert sum(found) >= 100 * 9
    assert found[0] == (100 if minutes_later else 0)


def test_changed_there_and_back_the_long_window_remembers() -> None:
    """No event arrived under the intermediate limit: all earlier admissions still count."""
    long = RateLimit(limit=1000, interval_ms=DAY_MS)
    line = Line(long)
    line.ask(1000)
    for limit in (RateLimit(limit=10, interval_ms=100), None, long):
        line.now += timedelta(minutes=5)
        line.edit(limit)
    assert line.ask(5000) == 0
    line.now += timedelta(days=1, minutes=25)
    assert line.ask(5000) == 1000
