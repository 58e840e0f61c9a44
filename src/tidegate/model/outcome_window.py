"""Recent outcomes, as a breaker counts them: how many failed, and how many succeeded since.

Outcomes are counted in buckets of 1/64 of the window; a bucket is dropped when its end is older than the window. While
nothing has failed, nothing is counted: a window begins with its first failure.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

BUCKETS = 64

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)

# The start (ms since 1970), the number of failures, the number of successes.
Bucket = tuple[int, int, int]


class OutcomeWindow:
    """The outcomes of a source or a trigger that its row stores."""

    def __init__(self, buckets: Iterable[Iterable[int]] = ()) -> None:
        self.buckets: list[Bucket] = [(at, failed, succeeded) for at, failed, succeeded in buckets]

    @property
    def failed(self) -> int:
        return sum(bucket[1] for bucket in self.buckets)

    @property
    def succeeded(self) -> int:
        return max(0, sum(bucket[2] for bucket in self.buckets))

    def forget(self, now: datetime, window_ms: int) -> None:
        """Drop buckets older than the window; drop all of them once none contains a failure."""
        first = _to_ms(now) - window_ms
        self.buckets = [bucket for bucket in self.buckets if bucket[0] + width_ms(window_ms) > first]
        if not self.failed:
            self.buckets = []

    def add(self, at: datetime, window_ms: int, *, failed: int = 0, succeeded: int = 0) -> None:
        """Count outcomes at a time."""
        width = width_ms(window_ms)
        place = _to_ms(at) // width * width
        before = {bucket[0]: bucket for bucket in self.buckets}
        _, so_far, good = before.get(place, (place, 0, 0))
        before[place] = (place, so_far + failed, good + succeeded)
        self.buckets = [before[one] for one in sorted(before)]


def width_ms(window_ms: int) -> int:
    """The length of a bucket."""
    return max(1, -(-window_ms // BUCKETS))


def _to_ms(at: datetime) -> int:
    return (at - _EPOCH) // _MS
