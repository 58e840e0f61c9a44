"""Backoff: the one rule that decides when something is tried again."""

import math
from datetime import UTC, datetime, timedelta

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.model.retry import (
    EVENT_RETRY,
    MAX_ATTEMPTS,
    STEP_RETRY,
    TRIGGER_RETRY,
    Retry,
    RetryPolicy,
    backoff_ms,
    is_exhausted,
    next_attempt_at,
    next_check_at,
)
from tidegate.model.units import MAX_DURATION_MS

MIDDLE = 0.5  # the random point at which jitter adds nothing


def policy(**changes: float) -> RetryPolicy:
    fields = {"base_ms": 1000, "factor": 2, "max_ms": 60_000, "jitter_ratio": 0.2, "max_attempts": 5} | changes
    return RetryPolicy(**fields)  # type: ignore[arg-type]


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    base_ms = draw(st.integers(1, MAX_DURATION_MS))
    return policy(
        base_ms=base_ms,
        max_ms=draw(st.integers(base_ms, MAX_DURATION_MS)),
        factor=draw(st.floats(1, 100)),
        jitter_ratio=draw(st.floats(0, 1)),
    )


ORDERED = st.integers(-(10**30), 10**400) | st.floats(allow_nan=False)
ANY_NUMBER = ORDERED | st.just(math.nan)


@pytest.mark.parametrize(
    ("given_policy", "point", "expected"),
    [
        (EVENT_RETRY, 0.5, [5000, 10000, 20000, 40000, 80000, 160000, 320000, 600000, 600000]),
        (EVENT_RETRY, 0.0, [4000, 8000, 16000, 32000, 64000, 128000, 256000, 480000, 480000]),
        (EVENT_RETRY, 1.0, [6000, 12000, 24000, 48000, 96000, 192000, 384000, 480000, 480000]),
        (TRIGGER_RETRY, 0.5, [10000, 20000, 40000, 80000, 160000, 320000, 640000, 900000, 900000]),
        (STEP_RETRY, 0.5, [1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 256000, 300000]),
        (policy(factor=1), 0.5, [1000, 1000, 1000]),
        (policy(factor=1.5, max_ms=2000), 0.5, [1000, 1500, 2000, 2000]),
        (policy(base_ms=60_000), 0.5, [60000, 60000]),
        (policy(base_ms=1, jitter_ratio=1), 0.0, [1, 1, 1]),
    ],
)
def test_sequence(given_policy: RetryPolicy, point: float, expected: list[int]) -> None:
    assert [backoff_ms(given_policy, n, lambda: point) for n in range(1, len(expected) + 1)] == expected


@pytest.mark.parametrize("attempt", [0, -1, -(10**400), math.nan, -math.inf, 0.5])
def test_attempt_below_one_counts_as_the_first(attempt: float) -> None:
    assert backoff_ms(policy(), attempt, lambda: MIDDLE) == 1000


@pytest.mark.parametrize("attempt", [10**400, math.inf, 2.0**1000, 2**63])
def test_huge_attempt_waits_the_maximum(attempt: float) -> None:
    assert backoff_ms(policy(), attempt, lambda: MIDDLE) == 60_000


@pytest.mark.parametrize(("point", "same_as"), [(-3.0, 0.0), (-math.inf, 0.0), (7.0, 1.0), (math.inf, 1.0)])
def test_random_outside_its_range_is_clamped(point: float, same_as: float) -> None:
    assert backoff_ms(policy(), 2, lambda: point) == backoff_ms(policy(), 2, lambda: same_as)


def test_random_that_is_no_number_adds_no_jitter() -> None:
    assert backoff_ms(policy(), 2, lambda: math.nan) == 2000


@given(policies(), ANY_NUMBER, st.floats())
def test_delay_is_always_within_one_and_the_maximum(given_policy: RetryPolicy, attempt: float, point: float) -> None:
    delay = backoff_ms(given_policy, attempt, lambda: point)
    assert type(delay) is int
    assert 1 <= delay <= given_policy.max_ms


@given(policies(), ANY_NUMBER, st.floats(0, 1))
def test_jitter_stays_within_its_ratio(given_policy: RetryPolicy, attempt: float, point: float) -> None:
    plain = backoff_ms(given_policy, attempt, lambda: MIDDLE)
    assert abs(backoff_ms(given_policy, attempt, lambda: point) - plain) <= plain * given_policy.jitter_ratio + 1


@given(policies(), ORDERED, ORDERED)
def test_without_jitter_delays_never_shrink(given_policy: RetryPolicy, first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert backoff_ms(given_policy, low, lambda: MIDDLE) <= backoff_ms(given_policy, high, lambda: MIDDLE)


@given(policies(), st.integers(1, 60))
def test_default_random_source_is_within_the_jitter(given_policy: RetryPolicy, attempt: int) -> None:
    plain = backoff_ms(given_policy, attempt, lambda: MIDDLE)
    assert abs(backoff_ms(given_policy, attempt) - plain) <= plain * given_policy.jitter_ratio + 1


def test_waits_at_the_cap_are_spread_below_it() -> None:
    at_cap = {backoff_ms(EVENT_RETRY, 40, lambda point=n / 100: point) for n in range(101)}
    assert len(at_cap) > 50
    assert min(at_cap) >= 480_000 and max(at_cap) == 600_000


def test_next_attempt_is_counted_from_the_given_time() -> None:
    now = datetime(2026, 1, 31, 9, 30, tzinfo=UTC)
    assert next_attempt_at(policy(), 3, now, lambda: MIDDLE) == now + timedelta(seconds=4)
    assert next_attempt_at(policy(), math.inf, now, lambda: MIDDLE) == now + timedelta(minutes=1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("base_ms", 0),
        ("base_ms", -1),
        ("base_ms", MAX_DURATION_MS + 1),
        ("base_ms", math.nan),
        ("factor", 0.99),
        ("factor", 100.1),
        ("factor", math.nan),
        ("factor", math.inf),
        ("max_ms", 0),
        ("max_ms", MAX_DURATION_MS + 1),
        ("max_ms", math.nan),
        ("max_ms", 999),
        ("jitter_ratio", -0.1),
        ("jitter_ratio", 1.1),
        ("jitter_ratio", math.nan),
        ("max_attempts", 0),
        ("max_attempts", MAX_ATTEMPTS + 1),
        ("max_attempts", math.nan),
    ],
)
def test_policy_refuses_and_names_the_field(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{field} .*{value}"):
        policy(**{field: value})


@pytest.mark.parametrize(
    ("given_json", "named"),
    [
        ({"base_ms": "5s"}, "base_ms"),
        ({"max_attempts": 1.5}, "max_attempts"),
        ({"factor": 0}, "factor"),
        ({"delay": 1}, "delay"),
    ],
)
def test_policy_from_json_refuses_and_names_the_field(given_json: dict[str, object], named: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=named):
        msgspec.convert(msgspec.structs.asdict(policy()) | given_json, RetryPolicy)


def test_policy_at_its_bounds() -> None:
    assert policy(base_ms=1, factor=1, max_ms=1, jitter_ratio=0, max_attempts=1).max_ms == 1
    assert policy(base_ms=MAX_DURATION_MS, max_ms=MAX_DURATION_MS, factor=100, jitter_ratio=1).factor == 100


def test_retry_as_people_write_it() -> None:
    assert Retry(max_attempts=8, base="5s", factor=2, cap="10m") == policy(base_ms=5000, max_ms=600_000, max_attempts=8)
    assert Retry(base=2, cap=2.5, jitter=0) == policy(base_ms=2000, max_ms=2500, jitter_ratio=0)
    assert Retry() == STEP_RETRY


@pytest.mark.parametrize(
    ("given_retry", "message"),
    [
        ({"base": "soon"}, "Retry: base: a duration is written like .*, not 'soon'"),
        ({"cap": "-1s"}, "Retry: cap: a duration .*, not '-1s'"),
        ({"max_age": "1y"}, "Retry: max_age: a duration .*, not '1y'"),
        ({"base": "10m", "cap": "5s"}, "Retry: cap is '5s', which is below base, '10m'"),
        ({"base": "0s"}, "Retry: base must be at least 1 ms, not '0s'"),
        ({"max_attempts": 0}, "Retry: max_attempts must be a number between 1 and 1000000, not 0"),
        ({"factor": "2"}, "Retry: factor must be a number between 1 and 100, not '2'"),
        ({"jitter": 2}, "Retry: jitter must be a number between 0 and 1, not 2"),
    ],
)
def test_retry_refuses_in_the_words_of_whoever_wrote_it(given_retry: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        Retry(**given_retry)  # type: ignore[arg-type]
    assert "_ms" not in str(refused.value) and "_ratio" not in str(refused.value)


def test_a_cap_that_is_not_given_follows_the_base() -> None:
    assert Retry(base="10m").max_ms == 600_000
    assert Retry(base="1m").max_ms == STEP_RETRY.max_ms
    assert RetryPolicy(base_ms=3_600_000).max_ms == 3_600_000
    assert msgspec.json.decode(b'{"base_ms": 3600000}', type=RetryPolicy).max_ms == 3_600_000
    assert type(RetryPolicy().max_ms) is int and RetryPolicy().max_ms == 900_000
    with pytest.raises(msgspec.ValidationError, match="max_ms must not be below base_ms, 3600000: it is 900000"):
        msgspec.json.decode(b'{"base_ms": 3600000, "max_ms": 900000}', type=RetryPolicy)


@pytest.mark.parametrize(("attempts", "exhausted"), [(0, False), (4, False), (5, True), (6, True)])
def test_exhausted_when_all_attempts_are_made(attempts: int, exhausted: bool) -> None:
    assert is_exhausted(policy(max_attempts=5), attempts) is exhausted


@given(policies(), st.integers(-1000, 400 * 86_400_000))
def test_looks_at_what_others_wake_lie_within_the_bounds(given_policy: RetryPolicy, waited_ms: int) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    wait = next_check_at(given_policy, timedelta(milliseconds=waited_ms), now) - now
    assert timedelta(0) < wait <= timedelta(milliseconds=given_policy.max_ms)


@pytest.mark.parametrize(("waited_ms", "expected_ms"), [(0, 1000), (1000, 1000), (7000, 7000), (3_600_000, 60_000)])
def test_the_next_look_is_after_as_long_as_it_has_waited(waited_ms: int, expected_ms: int) -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    found = next_check_at(policy(), timedelta(milliseconds=waited_ms), now, lambda: MIDDLE)
    assert found == now + timedelta(milliseconds=expected_ms)


def test_nothing_is_too_old_unless_someone_says_so() -> None:
    assert {one.max_age_ms for one in (EVENT_RETRY, TRIGGER_RETRY, STEP_RETRY, Retry(), RetryPolicy())} == {0}
