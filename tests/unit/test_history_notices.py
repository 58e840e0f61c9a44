"""What health says about history: settings that differ, and days that do not go."""

from __future__ import annotations

from datetime import UTC, date, datetime

import pytest

from tidegate.flow.look.history import history_health, history_notices, overdue_seconds
from tidegate.model.retention import Retention, longest
from tidegate.store.processes import KeepingProcess
from tidegate.store.retention import HistorySpan

DAY = 86_400
NOW = datetime(2026, 3, 31, 12, tzinfo=UTC)
MONTH = Retention(events_seconds=30 * DAY)


def messages(kept: list[KeepingProcess], oldest: date | None, own: Retention = MONTH) -> dict[str, str]:
    found = history_health(own, kept, HistorySpan(oldest, date(2026, 4, 3), 0))
    return {notice.code: notice.message for notice in history_notices(kept, found, NOW)}


def test_the_longest_time_wins_and_for_ever_is_longest() -> None:
    assert longest([Retention(5, 0, 7), Retention(6, 3, 1)]) == Retention(6, 0, 7)


def test_settings_that_agree_and_history_that_goes_are_not_mentioned() -> None:
    both = [KeepingProcess("api", "a:1", MONTH), KeepingProcess("worker", "b:2", MONTH)]
    assert messages(both, date(2026, 2, 28)) == {}
    assert messages([], None) == {}


def test_settings_that_differ_are_named_with_who_has_them() -> None:
    kept = [
        KeepingProcess("api", "a:1", Retention()),
        KeepingProcess("worker", "b:2", MONTH),
        KeepingProcess("worker", "b:3", MONTH),
    ]
    assert messages(kept, date(2025, 1, 1)) == {
        "retention_differs": "processes have different TIDEGATE_RETENTION_EVENTS_SECONDS, and the longest applies: "
        "for ever (api a:1), 30d (worker b:2 and 1 more)"
    }


@pytest.mark.parametrize(
    ("oldest", "overdue"), [(date(2026, 2, 27), 0), (date(2026, 2, 26), 1), (date(2026, 2, 16), 11), (None, 0)]
)
def test_how_long_a_day_is_overdue(oldest: date | None, overdue: int) -> None:
    span = HistorySpan(oldest, oldest, 0)
    assert overdue_seconds([KeepingProcess("worker", "b:2", MONTH)], span, NOW) == overdue * DAY
    assert (
        overdue_seconds([KeepingProcess("worker", "b:2", MONTH), KeepingProcess("api", "a", Retention())], span, NOW)
        == 0
    )
    assert overdue_seconds([], span, NOW) == 0, "nobody says how long history is kept"


def test_a_day_that_is_too_old_and_still_there() -> None:
    alone = [KeepingProcess("worker", "b:2", MONTH)]
    assert messages(alone, date(2026, 2, 27)) == {}  # it may have ended only just long enough ago
    assert "the history of 2026-02-26 is still there" in messages(alone, date(2026, 2, 26))["history_overdue"]
    assert "2026-02-26" in messages([], date(2026, 2, 26))["history_overdue"]
