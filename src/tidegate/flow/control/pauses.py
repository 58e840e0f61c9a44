"""How long a pause may be: the same for sources and triggers."""

from __future__ import annotations

from datetime import datetime, timedelta

from tidegate.errors import FieldError, InvalidInput
from tidegate.model.units import MAX_DURATION_MS


def check_length(until: datetime | None, duration_ms: int | None) -> None:
    """Until a time or for a duration within bounds, not both."""
    if until is not None and duration_ms is not None:
        raise InvalidInput("the pause is not valid", [FieldError("until", "give `until` or `duration_ms`, not both")])
    if duration_ms is not None and not 1 <= duration_ms <= MAX_DURATION_MS:
        raise InvalidInput("the pause is not valid", [FieldError("duration_ms", f"must be 1 to {MAX_DURATION_MS}")])


def check_until(until: datetime, now: datetime) -> None:
    """A time ahead of the database's clock, and not too far."""
    if until <= now:
        raise InvalidInput("the pause is not valid", [FieldError("until", "lies in the past")])
    if until - now > timedelta(milliseconds=MAX_DURATION_MS):
        raise InvalidInput("the pause is not valid", [FieldError("until", "is more than 366 days away")])
