"""A limit applied to arrivals of the past, by table."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

import pytest

from tidegate.model.ids import EventId
from tidegate.model.limit_forecast import LimitForecast, LimitWaits
from tidegate.model.source import RateLimit

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
SECOND = RateLimit(limit=2, interval_ms=1000)


def waits(limit: RateLimit | None, *arrivals_ms: int) -> LimitWaits:
    forecast = LimitForecast(limit)
    for number, ms in enumerate(arrivals_ms):
        forecast.arrive(NOON + timedelta(milliseconds=ms), EventId(uuid.UUID(int=number)))
    return forecast.waits()


@pytest.mark.parametrize(
    ("limit", "arrivals_ms", "held", "most_waiting", "longest_ms"),
    [
        (None, (0, 0, 0), 0, 0, (0, 0)),
        (SECOND, (), 0, 0, (0, 0)),
        (SECOND, (0, 0), 0, 0, (0, 0)),
        (SECOND, (0, 400, 1100), 0, 0, (0, 0)),
        (SECOND, (0, 0, 0), 1, 1, (1000, 1020)),
        (SECOND, (0, 0, 0, 0, 0), 3, 3, (2000, 2060)),
        (SECOND, (0, 0, 0, 900), 2, 2, (1000, 1020)),
        (SECOND, (0, 0, 0, 10_000), 1, 1, (1000, 1020)),
        (RateLimit(limit=2, interval_ms=1000, pause_ms=5000), (0, 0, 0, 4000), 2, 2, (5000, 5020)),
    ],
)
def test_what_a_limit_would_have_held(
    limit: RateLimit | None, arrivals_ms: tuple[int, ...], held: int, most_waiting: int, longest_ms: tuple[int, int]
) -> None:
    found = waits(limit, *arrivals_ms)
    assert (found.held, found.most_waiting) == (held, most_waiting)
    assert longest_ms[0] <= found.longest_wait_ms <= longest_ms[1]
    assert (found.last_passed_at is None) is (found.longest_wait_event_id is None) is (held == 0)


def test_it_never_exceeds_the_limit() -> None:
    limit = RateLimit(limit=5, interval_ms=1000)
    forecast = LimitForecast(limit)
    for number in range(200):
        forecast.arrive(NOON + timedelta(milliseconds=number * 37 % 1900 + number * 20), EventId(uuid.UUID(int=number)))
    found = forecast.waits()
    assert found.last_passed_at is not None
    assert found.last_passed_at - NOON >= timedelta(milliseconds=1000 * (200 // 5 - 1))
