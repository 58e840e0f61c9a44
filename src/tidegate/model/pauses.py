"""Checks of a pause's length, the same for sources, triggers, schedules and budgets."""

from __future__ import annotations

from datetime import datetime, timedelta

from tidegate.errors import FieldError, InvalidInput
from tidegate.model.units import MAX_DURATION_MS


def check_length(until: datetime | None, duration_ms: int | None) -> None:
    """A pause has an end time or a duration within bounds, not both."""
    if until is not None and duration_ms is not None:
        raise InvalidInput("the pause is not valid", [FieldError("until", "give `until` or `duration_ms`, not both")])
    if duration_ms is not None and not 1 <= duration_ms <= MAX_DURATION_MS:
        raise InvalidInput(
            "the pause is not valid",
            [FieldError("duration_ms", f"must be a whole number from 1 to {MAX_DURATION_MS}, not {duration_ms}")],
        )


def check_until(until: datetime, now: datetime) -> None:
    """The end time must be after the database's clock, by at most MAX_DURATION_MS."""
    if until <= now:
        raise InvalidInput(
            "the pause is not valid", [FieldError("until", f"is in the past: it is {now:%Y-%m-%dT%H:%M:%SZ} now")]
        )
    if until - now > timedelta(milliseconds=MAX_DURATION_MS):
        raise InvalidInput("the pause is not valid", [FieldError("until", "is more than 366 days away")])
