"""Durations and rates as users write them."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.model.units import MAX_DURATION_MS, duration_ms, rate, written_duration, written_rate

DAY = 86_400_000


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("100ms", 100),
        ("5s", 5000),
        ("5 sec", 5000),
        ("10m", 600_000),
        ("10min", 600_000),
        ("2h", 7_200_000),
        ("1d", DAY),
        ("366d", MAX_DURATION_MS),
        ("1.5s", 1500),
        (" 5s ", 5000),
        ("0s", 0),
        (5, 5000),
        (0.25, 250),
        (0, 0),
    ],
)
def test_duration(text: str | float, ms: int) -> None:
    assert duration_ms(text) == ms


@pytest.mark.parametrize(
    "text",
    ["", "s", "5", "5x", "5S", "-5s", "5s5s", "5 s s", "1e3s", "٣s", "5s\n\x00", ".5s", "5.s", "nans", None, True, [5]],
)
def test_what_is_no_duration_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="written like 100ms, 5s, 10m, 2h or 1d"):
        duration_ms(text)


@pytest.mark.parametrize("text", ["367d", "9" * 400 + "s", -1, -0.001, math.inf, -math.inf, math.nan, 1e300, 10**400])
def test_duration_out_of_range_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="between 0 and 366 days"):
        duration_ms(text)


@given(st.text() | st.floats() | st.integers() | st.from_regex(r"[0-9. ]*(ms|s|m|h|d)", fullmatch=True))
def test_any_text_or_number_is_a_duration_or_a_value_error(text: Any) -> None:
    try:
        ms = duration_ms(text)
    except ValueError:
        return
    assert type(ms) is int
    assert 0 <= ms <= MAX_DURATION_MS


@given(st.integers(0, 366 * 24 * 60))
def test_units_agree(minutes: int) -> None:
    assert duration_ms(f"{minutes}m") == duration_ms(f"{minutes * 60}s") == duration_ms(minutes * 60)
    assert duration_ms(f"{minutes}m") == duration_ms(f"{minutes * 60_000}ms")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("20/s", (20, 1000)),
        ("20/min", (20, 60_000)),
        ("20/m", (20, 60_000)),
        ("500/h", (500, 3_600_000)),
        ("20/10s", (20, 10_000)),
        ("1/1.5s", (1, 1500)),
        ("1/250ms", (1, 250)),
        ("7/d", (7, DAY)),
        (" 20 / 10 s ", (20, 10_000)),
    ],
)
def test_rate(text: str, expected: tuple[int, int]) -> None:
    assert rate(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "20",
        "/s",
        "20/",
        "s/20",
        "-1/s",
        "1.5/s",
        "20/x",
        "20//s",
        "20/s/s",
        "9" * 13 + "/s",
        "9" * 5000 + "/s",
        None,
    ],
)
def test_what_is_no_rate_is_refused(text: Any) -> None:
    with pytest.raises(ValueError, match="written like 20/s, 20/min, 500/h, 1000/d or 20/10s"):
        rate(text)


@pytest.mark.parametrize("text", ["0/s", "5/0s", "5/0.1ms"])
def test_rate_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="at least 1 in a window longer than 0"):
        rate(text)


def test_rate_with_a_window_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 366 days"):
        rate("5/400d")


@given(st.integers(0, MAX_DURATION_MS))
def test_what_is_written_is_read_as_the_same(ms: int) -> None:
    assert duration_ms(written_duration(ms)) == ms
    assert rate(written_rate(7, ms + 1 if ms < MAX_DURATION_MS else ms))[0] == 7


@pytest.mark.parametrize(
    ("count", "window_ms", "text"),
    [(20, 1000, "20/s"), (500, 60_000, "500/min"), (2, 3_600_000, "2/h"), (20, 10_000, "20/10s"), (1, 1500, "1/1.5s")],
)
def test_rates_are_written_as_people_do(count: int, window_ms: int, text: str) -> None:
    assert written_rate(count, window_ms) == text
    assert rate(text) == (count, window_ms)
