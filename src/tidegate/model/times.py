"""Times as users write them: RFC 3339, with a time zone."""

from __future__ import annotations

from datetime import datetime

import msgspec

TIME_RULE = "must be an RFC 3339 time with a time zone, such as 2026-01-31T09:30:00Z"


def parse_time(text: str) -> datetime:
    """The time. ValueError says what is expected, and nothing of what was given, which may be a secret."""
    try:
        parsed = msgspec.convert(text, datetime)
    except msgspec.ValidationError as exc:
        raise ValueError(TIME_RULE) from exc
    if parsed.tzinfo is None:
        raise ValueError(f"{TIME_RULE}: the time zone is missing")
    return parsed
