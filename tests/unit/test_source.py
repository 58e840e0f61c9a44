"""The gate's pure rules: never over the limit in any sliding interval, nearly all of it used, slots that hold."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.model.source import OPEN_PAUSE, BreakerPolicy, Gate, RateLimit

T0 = datetime(2026, 1, 1, tzinfo=UTC)
POLICY = BreakerPolicy(threshold=3, window_ms=10_000, pause_ms=5_000)


def after(ms: float) -> datetime:
    return T0 + timedelta(milliseconds=ms)


def most_in_any_interval(times: list[datetime], interval_ms: int) -> int:
    """The checker: the most admissions in any half-open sliding interval."""
    most, first = 0, 0
    for last, at in enumerate(times):
        while times[first] <= at - timedelta(milliseconds=interval_ms):
            first += 1
        most = max(most, last - first + 1)
    return most


@given(
    limit=st.integers(1, 50),
    interval_ms=st.integers(1, 5_000),
    arrivals=st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 80)), max_size=60),
)
def test_never_over_the_limit_in_any_sliding_interval(
    limit: int, interval_ms: int, arrivals: list[tuple[int, int]]
) -> None:
    gate = Gate("s", limit=RateLimit(limit=limit, interval_ms=interval_ms))
    admitted: list[datetime] = []
    at = 0
    for gap, wanted in arrivals:
        at += gap
        count = min(wanted, gate.room(after(at)) or 0)
        gate.spend(after(at), count)
        admitted += [after(at)] * count
    assert most_in_any_interval(admitted, interval_ms) <= limit


@given(limit=st.integers(1, 1_000_000), interval_ms=st.integers(10, 3_600_000), steps=st.integers(130, 400))
def test_a_backlog_uses_at_least_95_percent(limit: int, interval_ms: int, steps: int) -> None:
    """Asked all the time with an endless backlog, for ten intervals after the first burst."""
    gate = Gate("s", limit=RateLimit(limit=limit, interval_ms=interval_ms))
    passed = 0
    for step in range(steps * 10):
        now = after(interval_ms * step / steps)
        room = gate.room(now)
        assert room is not None
        gate.spend(now, room)
        passed += room
    assert passed >= 0.95 * limit * 10


def test_a_refusal_spends_nothing_and_the_clock_may_step_back() -> None:
    gate = Gate("s", limit=RateLimit(limit=5, interval_ms=1000))
    gate.spend(after(0), 5)
    for ms in range(0, 990, 10):
        assert gate.room(after(ms)) == 0
    assert gate.room(after(1100)) == 5
    gate.spend(after(1100), 5)
    assert gate.room(after(500)) == 0
    assert gate.room(after(2300)) == 5


@pytest.mark.parametrize("limit", [1, 7, 1000, 1_000_000])
def test_after_idle_there_is_one_allowance_not_two(limit: int) -> None:
    gate = Gate("s", limit=RateLimit(limit=limit, interval_ms=1000))
    gate.spend(after(0), limit)
    assert gate.room(after(3_600_000)) == limit
    gate.spend(after(3_600_000), limit)
    assert gate.room(after(3_600_500)) == 0


def test_no_limit_means_no_bound() -> None:
    gate = Gate("s")
    assert gate.room(T0) is None
    gate.spend(T0, 10**9)
    assert not gate.is_changed


@given(
    limit=st.integers(1, 2000),
    interval_ms=st.integers(1, 10_000),
    pause_ms=st.integers(0, 20_000),
    waiting=st.integers(1, 3000),
)
def test_slots_hold_and_drain_in_the_ideal_time(limit: int, interval_ms: int, pause_ms: int, waiting: int) -> None:
    """A burst of `limit` is admitted, the others wait; each event that retries at its slot finds room."""
    rate = RateLimit(limit=limit, interval_ms=interval_ms, pause_ms=pause_ms)
    gate = Gate("s", limit=rate)
    gate.spend(T0, limit)
    slots = gate.slots(T0, waiting)
    assert slots == sorted(slots)
    assert slots[0] >= after(max(interval_ms, pause_ms))
    for slot in slots:
        assert gate.hold(slot) is None
        assert (gate.room(slot) or 0) >= 1
        gate.spend(slot, 1)
    ideal_ms = (waiting + limit) / limit * max(interval_ms, pause_ms)
    took_ms = (slots[-1] - T0) / timedelta(milliseconds=1)
    assert took_ms <= 1.05 * ideal_ms + interval_ms / 16 + waiting * 0.001


def test_newcomers_queue_behind_the_backlog() -> None:
    gate = Gate("s", limit=RateLimit(limit=10, interval_ms=1000))
    gate.spend(T0, 10)
    first = gate.slots(T0, 5)
    second = gate.slots(after(200), 5)
    assert second[0] > first[-1]
    assert second[0] - first[-1] == first[1] - first[0] == gate.limit.pace  # type: ignore[union-attr]
    gate.forget_backlog()
    assert gate.slots(after(60_000), 1) == [after(60_000)]


def test_the_limits_pause_begins_once_and_holds() -> None:
    gate = Gate("s", limit=RateLimit(limit=2, interval_ms=100, pause_ms=5000))
    gate.spend(T0, 2)
    gate.slots(T0, 1)
    assert gate.throttled_until == after(5000)
    gate.slots(after(1000), 1)
    assert gate.throttled_until == after(5000)
    hold = gate.hold(after(1000))
    assert hold is not None and hold.reason == "rate_limit"
    assert gate.room(after(1000)) == 0
    assert gate.room(after(5000)) == 2


def test_a_manual_pause_holds_everything() -> None:
    gate = Gate("s", paused_at=T0, paused_until=after(1000), pause_reason="maintenance", paused_by="ann")
    hold = gate.hold(after(999))
    assert hold is not None
    assert (hold.reason, hold.until, hold.message) == ("paused", after(1000), "paused by ann: maintenance")
    assert gate.slots(after(10), 3) == [after(1000)] * 3
    assert gate.hold(after(1000)) is None
    forever = Gate("s", paused_at=T0)
    assert forever.room(after(10**9)) == 0
    assert forever.slots(T0, 1) == [T0 + OPEN_PAUSE]


def test_the_breaker_opens_probes_once_and_closes() -> None:
    gate = Gate("s")
    assert gate.record(T0, failures=2, admitted=2, policy=POLICY) is None
    assert gate.record(after(100), failures=1, admitted=2, policy=POLICY) == "opened"
    assert gate.room(after(200)) == 0
    assert gate.slots(after(200), 1) == [after(5100)]
    assert gate.is_probing(after(5100)) and gate.room(after(5100)) == 1
    assert gate.record(after(5100), failures=1, admitted=1, policy=POLICY) == "probe_failed"
    assert gate.is_probing(after(5100)) and gate.room(after(5100)) == 1, "another one is the next probe"
    assert gate.record(after(5100), failures=1, admitted=1, policy=POLICY) == "reopened"
    assert gate.room(after(5200)) == 0
    assert gate.record(after(10_100), failures=0, admitted=1, policy=POLICY) == "closed"
    assert gate.room(after(10_200)) is None and gate.outcomes.buckets == []


def test_a_failure_during_the_pause_is_no_probe_and_does_not_end_it() -> None:
    policy = BreakerPolicy(threshold=2, window_ms=60_000, pause_ms=60_000)
    gate = Gate("shop")
    assert gate.record(T0, failures=2, admitted=2, policy=policy) == "opened"
    until, later = gate.breaker_until, T0 + timedelta(seconds=1)
    assert gate.record(later, failures=1, admitted=1, policy=policy) is None
    assert gate.record(later, failures=0, admitted=1, policy=policy) is None
    assert (gate.breaker_state, gate.breaker_until, gate.failed_trials) == ("open", until, 0)


def test_failures_outside_the_window_do_not_count() -> None:
    gate = Gate("s")
    for ms in (0, 6_000, 12_000, 18_000):
        assert gate.record(after(ms), failures=1, admitted=1, policy=POLICY) is None
    assert gate.record(after(18_001), failures=1, admitted=1, policy=POLICY) == "opened"


@pytest.mark.parametrize(
    ("field", "value"),
    [("limit", 0), ("limit", -1), ("interval_ms", 0), ("pause_ms", -1), ("limit", 10**10), ("interval_ms", math.inf)],
)
def test_limits_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"^{field} must lie between"):
        RateLimit(**({"limit": 1, "interval_ms": 1} | {field: value}))  # type: ignore[arg-type]


@given(
    before=st.tuples(st.integers(1, 30), st.integers(1, 3000)),
    later=st.tuples(st.integers(1, 30), st.integers(1, 3000)),
    at_ms=st.integers(0, 3000),
)
def test_admissions_under_the_old_limit_count_under_the_new(
    before: tuple[int, int], later: tuple[int, int], at_ms: int
) -> None:
    """Changed in the middle: over the shorter of the two intervals, the new limit holds from its first admission on."""
    old = Gate("s", limit=RateLimit(limit=before[0], interval_ms=before[1]))
    admitted = []
    for ms in range(0, at_ms + 1, 50):
        count = old.room(after(ms)) or 0
        old.spend(after(ms), count)
        admitted += [after(ms)] * count
    new = Gate("s", limit=RateLimit(limit=later[0], interval_ms=later[1]), ring=old.ring, ring_at=old.ring_at,
               ring_width_us=old.ring_width_us)  # fmt: skip
    window = min(before[1], later[1])
    for ms in range(at_ms, at_ms + 3000, 50):
        now = after(ms)
        count = new.room(now) or 0
        new.spend(now, count)
        recent = [t for t in admitted if t > now - timedelta(milliseconds=window)]
        assert count == 0 or len(recent) + count <= later[0]
        admitted += [now] * count


SHARE = BreakerPolicy(threshold=5, ratio=0.5, window_ms=64_000, pause_ms=1000)


@pytest.mark.parametrize(
    ("failed", "succeeded", "ratio", "is_open"),
    [
        (4, 0, 0.5, False),  # too few, whatever their share
        (5, 0, 0.5, True),
        (5, 5, 0.5, True),
        (5, 6, 0.5, False),
        (50, 51, 0.5, False),
        (50, 50, 0.5, True),
        (5, 1_000_000, 0, True),  # the count alone
        (5, 1, 1, False),
        (500, 0, 1, True),
    ],
)
def test_the_breaker_opens_on_a_count_and_a_share(failed: int, succeeded: int, ratio: float, is_open: bool) -> None:
    policy = msgspec.structs.replace(SHARE, ratio=ratio)
    gate = Gate("s")
    assert gate.record(T0, failures=1, admitted=1, policy=policy) is None
    gate.record(after(1000), failures=0, admitted=succeeded, policy=policy)
    moved = gate.record(after(2000), failures=failed - 1, admitted=failed - 1, policy=policy)
    assert (moved == "opened") == is_open
    if is_open:
        among = f" among {failed + succeeded} outcomes" if succeeded else ""
        assert gate.breaker_reason == f"{failed} failures{among} within 64s"


def test_successes_are_counted_only_while_a_failure_is_in_the_window() -> None:
    gate = Gate("s")
    assert gate.record(T0, failures=0, admitted=1000, policy=SHARE) is None
    assert gate.outcomes.buckets == [] and not gate.is_changed
    gate.record(after(10), failures=1, admitted=1, policy=SHARE)
    gate.record(after(1000), failures=0, admitted=7, policy=SHARE)
    assert (gate.outcomes.failed, gate.outcomes.succeeded) == (1, 7)
    gate.is_changed = False
    assert gate.record(after(66_000), failures=0, admitted=9, policy=SHARE) is None
    assert gate.outcomes.buckets == [] and not gate.is_changed


def test_a_window_keeps_few_buckets_however_much_happens() -> None:
    gate = Gate("s")
    for n in range(2000):
        gate.record(after(n * 100), failures=1, admitted=10, policy=SHARE)
        assert len(gate.outcomes.buckets) <= 66
    assert 640 <= gate.outcomes.failed <= 651
    assert gate.outcomes.succeeded == gate.outcomes.failed * 9


@pytest.mark.parametrize(("field", "value"), [("ratio", -0.1), ("ratio", 1.1), ("threshold", 0), ("window_ms", 0)])
def test_a_policy_is_checked(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} must lie between"):
        msgspec.structs.replace(SHARE, **{field: value})
