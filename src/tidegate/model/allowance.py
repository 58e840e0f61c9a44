"""An allowance: how much may pass in any sliding interval, and when the rest may. The one implementation of rates: the
limit of a source, the throttle of a trigger, and each key of a budget are allowances.

**Limit.** What passes is counted in a ring of buckets, each 1/64 of the interval. A bucket counts until its *end* is
older than the interval, so in any sliding interval at most `limit` pass; at most 1/64 of the allowance is lost. What is
refused is not counted. The cost does not depend on the limit. When the limit changes, what passed under the old
limit moves to the buckets of the new one, at the latest time at which it can have happened but not after the last
admission: it delays what is new for at most one new interval.

**Pace.** What is refused gets a slot: the time at which the limit will have room for it, after all that already
waits. Slots are `max(interval, pause) / limit` apart, so a backlog drains at the allowed rate, in arrival order, with
one attempt for each.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

import msgspec

BUCKETS = 64
RING = BUCKETS + 2
MAX_LIMIT = 10**9
MAX_INTERVAL_MS = 366 * 86_400_000
# No slot is later than this: a long backlog at a slow limit would exceed the calendar. What is due then gets another.
HORIZON = timedelta(days=3660)

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


class RateLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most `limit` per `interval_ms`. When the limit is exceeded, the source pauses for `pause_ms`."""

    limit: int
    interval_ms: int
    pause_ms: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("limit", 1, MAX_LIMIT), ("interval_ms", 1, MAX_INTERVAL_MS),
                                ("pause_ms", 0, MAX_INTERVAL_MS)):  # fmt: skip
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must lie between {low} and {high}, not {value}")

    @property
    def pace(self) -> timedelta:
        """The time between slots: slightly longer than room takes to return, so that slots can be kept."""
        interval_us = self.interval_ms * 1000 * (BUCKETS + 1) / BUCKETS
        return timedelta(microseconds=math.ceil(max(interval_us, self.pause_ms * 1000) / self.limit))


class Allowance:
    """The state of one limit, read, changed and written back by the transaction that holds the lock on it."""

    def __init__(
        self,
        *,
        limit: RateLimit | None = None,
        ring: list[int] | None = None,
        ring_at: int = 0,
        ring_width_us: int = 0,
        spent_at: datetime | None = None,
        drain_at: datetime | None = None,
    ) -> None:
        self.limit = limit
        self.ring = [0] * RING
        self.ring_at = ring_at
        self.ring_width_us = ring_width_us
        self.spent_at = spent_at
        self._load_ring(ring or [])
        self.drain_at = drain_at
        self.is_changed = False

    def free(self, now: datetime) -> int | None:
        """How much may pass now; None if there is no limit."""
        return None if self.limit is None else max(0, self.limit.limit - self._used(now))

    def spend(self, now: datetime, count: int) -> None:
        """Count what passes at `now`."""
        if self.limit is None or count == 0:
            return
        self._roll(now)
        self.ring[self.ring_at % RING] += count
        self.ring_width_us = self._width_us()
        self.spent_at = max(now, self.spent_at or now)
        self.is_changed = True

    def spend_later(self, now: datetime, count: int) -> None:
        """Count this transaction's last admissions at `now` instead, when they actually happened."""
        if self.limit is None or count == 0:
            return
        self.ring[self.ring_at % RING] -= count
        self.spend(now, count)

    def take_slots(self, start: datetime, last: datetime, count: int, cost: int = 1) -> list[datetime]:
        """Slots for `count` that must wait, each for `cost`, from `start` or after those that already wait, none after
        `last`."""
        start = min(max(start, self.drain_at or start), last)
        pace = self.limit.pace * cost if self.limit is not None else timedelta(0)
        fitting = (last - start) // pace if pace else count  # the number of slots before the horizon
        found = [start + pace * i if i <= fitting else last for i in range(count)]
        if count:
            self.drain_at = start + pace * count if count <= fitting else last
            self.is_changed = True
        return found

    def forget_backlog(self) -> None:
        """Nothing waits any more: what must wait next gets the first slot."""
        if self.drain_at is not None:
            self.drain_at = None
            self.is_changed = True

    def room_at(self, now: datetime, cost: int = 1) -> datetime:
        """When the limit has room for `cost` more; for more than the limit, when it has all its room."""
        if self.limit is None:
            return now
        width = self._width_us()
        self._roll(now)
        free = self.limit.limit - sum(self.ring) - min(cost, self.limit.limit)
        if free >= 0:
            return now
        for number in range(self.ring_at - RING + 1, self.ring_at + 1):
            free += self.ring[number % RING]
            if free >= 0:
                return _from_us((number + 1) * width + self.limit.interval_ms * 1000)
        return now

    def _used(self, now: datetime) -> int:
        self._roll(now)
        return sum(self.ring)

    def _load_ring(self, stored: list[int]) -> None:
        """Load the stored ring into buckets of the current width: admissions under the old limit still count."""
        if len(stored) != RING:
            return
        if self.limit is None:  # kept unchanged, in case a limit is set again
            self.ring = list(stored)
            return
        old, new = self.ring_width_us, self._width_us()
        self.ring_width_us = new  # written back even if nothing is admitted
        if old == new:
            self.ring = list(stored)
            return
        last = self.ring_at
        # Admissions are taken to have happened at the end of their bucket, so that none expires too early, but not
        # after `spent_at`: the end of a bucket of a day would block a window of a second for many minutes.
        ends = [(number + 1) * old - 1 for number in range(last - RING + 1, last + 1)]
        if self.spent_at is not None:
            ends = [min(end, _to_us(self.spent_at)) for end in ends]
        self.ring_at = ends[-1] // new
        for number, end in zip(range(last - RING + 1, last + 1), ends, strict=True):
            if end // new > self.ring_at - RING:
                self.ring[end // new % RING] += stored[number % RING]

    def _width_us(self) -> int:
        assert self.limit is not None
        return max(1, math.ceil(self.limit.interval_ms * 1000 / BUCKETS))

    def _roll(self, now: datetime) -> None:
        """Move the ring to the bucket of `now` and clear expired buckets; a clock that steps back changes nothing."""
        assert self.limit is not None
        width = self._width_us()
        number = max(_to_us(now) // width, self.ring_at)
        for passed in range(max(self.ring_at + 1, number - RING + 1), number + 1):
            self.ring[passed % RING] = 0
        self.ring_at = number
        oldest = (_to_us(now) - self.limit.interval_ms * 1000) // width  # its end is at or before now - interval
        for expired in range(number - RING + 1, min(oldest, number - 1)):
            self.ring[expired % RING] = 0


def _to_us(at: datetime) -> int:
    return (at - _EPOCH) // _US


def _from_us(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)
