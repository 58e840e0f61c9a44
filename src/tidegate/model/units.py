"""Durations (`100ms`, `5s`, `10m`, `2h`, `1d`) and rates (`20/s`, `20/min`, `500/h`, `20/10s`) as users write them."""

from __future__ import annotations

import re

_MS = {"ms": 1, "s": 1000, "sec": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|sec|m|min|h|d)", re.ASCII)
_RATE = re.compile(r"(\d{1,12})\s*/\s*((?:\d+(?:\.\d+)?)?\s*(?:ms|s|sec|m|min|h|d))", re.ASCII)

MAX_DURATION_MS = 366 * 86_400_000


def duration_ms(text: str | int | float) -> int:
    """Milliseconds in `text`; a bare number means seconds. ValueError says what was expected."""
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise ValueError(f"a duration is written like 100ms, 5s, 10m, 2h or 1d, not {text!r}")
    if isinstance(text, int | float):
        value = text * 1000
    else:
        found = _DURATION.fullmatch(text.strip())
        if not found:
            raise ValueError(f"a duration is written like 100ms, 5s, 10m, 2h or 1d, not {text!r}")
        value = float(found[1]) * _MS[found[2]]
    if not 0 <= value <= MAX_DURATION_MS:
        raise ValueError(f"a duration lies between 0 and 366 days, not {text!r}")
    return round(value)


def named_duration_ms(place: str, value: str | int | float, low: int = 0) -> int:
    """Milliseconds in the value of a field, at least `low`. ValueError names the field."""
    try:
        found = duration_ms(value)
    except ValueError as exc:
        raise ValueError(f"{place}: {exc}") from exc
    if found < low:
        raise ValueError(f"{place} must be at least {low} ms, not {value!r}")
    return found


def check_number(place: str, value: float, low: float, high: float) -> None:
    """ValueError names the field if the value is not a number from `low` to `high`."""
    if not isinstance(value, int | float) or not low <= value <= high:  # NaN fails every comparison
        raise ValueError(f"{place} must be a number between {low} and {high}, not {value!r}")


def rate(text: str) -> tuple[int, int]:
    """`(count, window_ms)` of a rate such as `20/min`."""
    found = _RATE.fullmatch(text.strip()) if isinstance(text, str) else None
    if not found:
        raise ValueError(f"a rate is written like 20/s, 20/min, 500/h, 1000/d or 20/10s, not {text!r}")
    window = found[2].strip()
    count, window_ms = int(found[1]), duration_ms(window if window[0].isdigit() else f"1{window}")
    if count < 1 or window_ms < 1:
        raise ValueError(f"a rate must allow at least 1 in a window longer than 0, not {text!r}")
    return count, window_ms


def written_duration(ms: float) -> str:
    """`90s`, `5m`, `2h`: in the largest unit that gives a whole number."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)):
        if ms >= size and ms % size == 0:
            return f"{ms // size:.0f}{unit}"
    return f"{ms:.0f}ms" if ms < 1000 else f"{ms / 1000:.3f}".rstrip("0") + "s"


def written_rate(count: int, window_ms: int) -> str:
    """`20/s`, `500/min`, `20/10s`."""
    window = written_duration(window_ms)
    return f"{count}/{ {'1s': 's', '1m': 'min', '1h': 'h', '1d': 'd'}.get(window, window) }"
