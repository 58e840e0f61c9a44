"""A source: its limit, its pause, its breaker, and the pure rules of the gate.

**Limit.** Admissions are counted in a ring of buckets, each 1/64 of the interval. A bucket counts until its *end* is
older than the interval, so in any sliding interval at most `rate_limit` pass; at most 1/64 of the allowance is lost. A
refused event is not counted. The cost does not depend on the limit. When the limit changes, admissions under the old
limit move to the buckets of the new one, at the latest time at which they can have happened but not after the last
admission: they delay new events for at most one new interval.

**Pace.** A refused event gets a slot: the time at which the limit will have room for it, after all events that already
wait. Slots are `max(interval, pause) / limit` apart, so a backlog drains at the allowed rate, in arrival order, with
one attempt per event.

**Breaker.** It opens after at least `threshold` failures within a window, if they are at least `ratio` of the outcomes
in it. After its pause, one event is admitted as a probe. A failed probe may be that event's own fault, so the next
event is a probe too; only if both fail does the next pause begin.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta
from typing import Literal, get_args

import msgspec

from tidegate.model.outcome_window import OutcomeWindow
from tidegate.model.units import check_number, named_duration_ms, written_duration

BUCKETS = 64
RING = BUCKETS + 2
MAX_LIMIT = 10**9
MAX_INTERVAL_MS = 366 * 86_400_000
# The assumed length of a pause without an end when slots are assigned; resuming the source replans them.
OPEN_PAUSE = timedelta(days=1)
# No slot is later than this: a long backlog at a slow limit would exceed the calendar. Events due then get new slots.
HORIZON = timedelta(days=3660)
# A due event that finds no room waits this long for it: slots of a draining backlog are slightly uneven. If room is
# further away, the event gets a new slot. Waiting events occupy places in the batch, hence the maximum.
GRACE = timedelta(milliseconds=100)
MAX_GRACE = timedelta(seconds=2)

BreakerState = Literal["closed", "open", "half_open"]
BREAKER_STATES: tuple[BreakerState, ...] = get_args(BreakerState)

HoldReason = Literal["rate_limit", "paused", "breaker_open", "retry_after"]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_US = timedelta(microseconds=1)


class RateLimit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most `limit` events per `interval_ms`. When the limit is exceeded, the source pauses for `pause_ms`."""

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


_BREAKER_BOUNDS = {
    "threshold": (1, 10_000),
    "ratio": (0, 1),
    "window_ms": (1, MAX_INTERVAL_MS),
    "pause_ms": (1, MAX_INTERVAL_MS),
}


class BreakerPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`threshold` failures within `window_ms`, at least `ratio` of the outcomes, open the breaker for `pause_ms`.

    Runs that fail with NonRetryable, including runs whose parameters are rejected, count only with `non_retryable`.
    """

    threshold: int = 5
    ratio: float = 0.5
    window_ms: int = 300_000
    pause_ms: int = 300_000
    non_retryable: bool = False

    def __post_init__(self) -> None:
        for name, (low, high) in _BREAKER_BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:
                raise ValueError(f"{name} must lie between {low} and {high}, not {value}")

    def is_exceeded(self, outcomes: OutcomeWindow) -> bool:
        """Whether these outcomes open the breaker."""
        failed = outcomes.failed
        return failed >= self.threshold and failed >= self.ratio * (failed + outcomes.succeeded)


class SourceBreakerPolicy(BreakerPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source's breaker. An event failed if each of its deliveries failed; with `runs`, failed runs count too."""

    runs: bool = False


SOURCE_BREAKER = SourceBreakerPolicy()
TRIGGER_BREAKER = BreakerPolicy()
# The number of probes, each with a different event or delivery, that must fail before the next pause begins.
PROBES = 2


def Breaker(  # noqa: N802 - read as a noun where it is used: breaker=Breaker(threshold=3)
    *,
    threshold: int = 5,
    ratio: float = 0.5,
    window: str | int | float = "5m",
    pause: str | int | float = "5m",
    non_retryable: bool = False,
) -> BreakerPolicy:
    """The breaker of a workflow's trigger: `Breaker(threshold=3, ratio=0.5, window="1m", pause="30s")`.

    After `threshold` failures within `window`, at least `ratio` of the outcomes, nothing is launched for `pause`.
    Runs that fail with NonRetryable count only with `non_retryable=True`. ValueError names the invalid argument.
    """
    for name, value in (("threshold", threshold), ("ratio", ratio)):
        check_number(f"Breaker: {name}", value, *_BREAKER_BOUNDS[name])
    return BreakerPolicy(
        threshold=threshold,
        ratio=ratio,
        window_ms=named_duration_ms("Breaker: window", window, low=1),
        pause_ms=named_duration_ms("Breaker: pause", pause, low=1),
        non_retryable=non_retryable,
    )


class Hold(msgspec.Struct, frozen=True):
    """Why a source admits no events, and until when (None: until an operator resumes it)."""

    reason: HoldReason
    until: datetime | None
    message: str


class Gate:
    """The state of one source, read, changed and written back by the transaction that holds the lock on its row."""

    def __init__(
        self,
        source: str,
        *,
        limit: RateLimit | None = None,
        ring: list[int] | None = None,
        ring_at: int = 0,
        ring_width_us: int = 0,
        spent_at: datetime | None = None,
        drain_at: datetime | None = None,
        throttled_until: datetime | None = None,
        paused_at: datetime | None = None,
        paused_until: datetime | None = None,
        pause_reason: str | None = None,
        paused_by: str | None = None,
        breaker_state: BreakerState = "closed",
        breaker_until: datetime | None = None,
        breaker_reason: str | None = None,
        breaker_at: datetime | None = None,
        failed_trials: int = 0,
        outcomes: list[list[int]] | None = None,
    ) -> None:
        self.source = source
        self.limit = limit
        self.ring = [0] * RING
        self.ring_at = ring_at
        self.ring_width_us = ring_width_us
        self.spent_at = spent_at
        self._load_ring(ring or [])
        self.drain_at = drain_at
        self.throttled_until = throttled_until
        self.paused_at = paused_at
        self.paused_until = paused_until
        self.pause_reason = pause_reason
        self.paused_by = paused_by
        self.breaker_state: BreakerState = breaker_state
        self.breaker_until = breaker_until
        self.breaker_reason = breaker_reason
        self.breaker_at = breaker_at
        self.failed_trials = failed_trials
        self.outcomes = OutcomeWindow(outcomes or ())
        self.is_changed = False

    def hold(self, now: datetime) -> Hold | None:
        """Why nothing is admitted now, regardless of the limit; None if only the limit decides."""
        if self.paused_at is not None and (self.paused_until is None or self.paused_until > now):
            by = f" by {self.paused_by}" if self.paused_by else ""
            return Hold("paused", self.paused_until, f"paused{by}: {self.pause_reason or 'no reason given'}")
        if self.breaker_state == "open" and self.breaker_until is not None and self.breaker_until > now:
            return Hold("breaker_open", self.breaker_until, f"the breaker is open: {self.breaker_reason}")
        if self.throttled_until is not None and self.throttled_until > now:
            return Hold("rate_limit", self.throttled_until, "the pause after an exceeded limit")
        return None

    def is_probing(self, now: datetime) -> bool:
        """Whether the breaker's pause is over: the next event is a probe, which shows if the source has recovered."""
        return self.breaker_state != "closed" and self.hold(now) is None

    def room(self, now: datetime) -> int | None:
        """How many events may be admitted now; None if there is no limit."""
        if self.hold(now) is not None:
            return 0
        free = None if self.limit is None else max(0, self.limit.limit - self._used(now))
        if self.is_probing(now):
            return min(1, free) if free is not None else 1
        return free

    def spend(self, now: datetime, count: int) -> None:
        """Count admissions at `now`."""
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

    def slots(self, now: datetime, count: int, *, is_refusal: bool = True) -> list[datetime]:
        """Slots for `count` events that must wait, after those of the events that already wait.

        If new events are refused, the pause of the limit begins, unless a backlog is already draining.
        """
        hold = self.hold(now)
        if is_refusal and hold is None and self._is_exceeded(now) and not self._is_draining(now):
            assert self.limit is not None
            if self.limit.pause_ms:
                self.throttled_until = now + timedelta(milliseconds=self.limit.pause_ms)
        last = now + HORIZON
        start = min(max(self._opens_at(now), self.drain_at or now), last)
        pace = self.limit.pace if self.limit is not None else timedelta(0)
        fitting = (last - start) // pace if pace else count  # the number of slots before the horizon
        found = [start + pace * i if i <= fitting else last for i in range(count)]
        if count:
            self.drain_at = start + pace * count if count <= fitting else last
            self.is_changed = True
        return found

    def forget_backlog(self) -> None:
        """No event waits any more: the next event that must wait gets the first slot."""
        if self.drain_at is not None:
            self.drain_at = None
            self.is_changed = True

    def forget_plan(self) -> None:
        """Discard the slots assigned so far, because the waiting events get new ones. The pause of the limit stays."""
        self.drain_at = None

    def has_no_failures(self, now: datetime, policy: BreakerPolicy) -> bool:
        """Whether the window contains no failure; successes are not counted until the next one."""
        self.outcomes.forget(now, policy.window_ms)
        return not self.outcomes.buckets

    def record(self, now: datetime, *, failures: int, admitted: int, policy: BreakerPolicy) -> str | None:
        """Count the outcomes of admitted events; returns how the breaker moved, if it did. Failures during its pause do
        not count: those events were admitted before it opened."""
        if self.breaker_state != "closed" and self.breaker_until is not None and self.breaker_until > now:
            return None
        if admitted and self.breaker_state != "closed":
            return self._fail_probe(now, policy) if failures else self._close_breaker()
        return self.count(now, failed=failures, succeeded=admitted - failures, policy=policy)

    def count(self, now: datetime, *, failed: int, succeeded: int, policy: BreakerPolicy) -> str | None:
        """Count outcomes while the breaker is closed; returns `opened` if they open it. A negative `succeeded` corrects
        outcomes that were counted as successes before."""
        if not failed and self.has_no_failures(now, policy):
            return None
        self.outcomes.add(now, policy.window_ms, failed=failed, succeeded=succeeded)
        self.outcomes.forget(now, policy.window_ms)
        self.is_changed = True
        if not failed or self.breaker_state != "closed" or not policy.is_exceeded(self.outcomes):
            return None
        bad, good = self.outcomes.failed, self.outcomes.succeeded
        among = f" among {bad + good} outcomes" if good else ""
        self.breaker_state, self.breaker_until = "open", now + timedelta(milliseconds=policy.pause_ms)
        self.breaker_reason = f"{bad} failures{among} within {written_duration(policy.window_ms)}"
        self.breaker_at, self.failed_trials = now, 0
        return "opened"

    def _fail_probe(self, now: datetime, policy: BreakerPolicy) -> str:
        """A probe failed, maybe by its own fault: another follows. After `PROBES` failed probes the pause begins."""
        self.failed_trials += 1
        self.breaker_state, self.breaker_until, self.is_changed = "open", now, True
        if self.failed_trials < PROBES:
            return "probe_failed"
        self.failed_trials, self.breaker_until = 0, now + timedelta(milliseconds=policy.pause_ms)
        return "reopened"

    def _close_breaker(self) -> str:
        self.breaker_state, self.breaker_until, self.breaker_reason, self.breaker_at = "closed", None, None, None
        self.failed_trials, self.outcomes, self.is_changed = 0, OutcomeWindow(), True
        return "closed"

    def room_at(self, now: datetime) -> datetime:
        """When the limit has room for one more event."""
        if self.limit is None:
            return now
        width = self._width_us()
        self._roll(now)
        free = self.limit.limit - sum(self.ring)
        if free > 0:
            return now
        for number in range(self.ring_at - RING + 1, self.ring_at + 1):
            free += self.ring[number % RING]
            if free > 0:
                return _from_us((number + 1) * width + self.limit.interval_ms * 1000)
        return now

    def _opens_at(self, now: datetime) -> datetime:
        hold = self.hold(now)
        at = max(now, self.room_at(now))
        if self.throttled_until is not None:
            at = max(at, self.throttled_until)
        if hold is not None:
            at = max(at, hold.until if hold.until is not None else now + OPEN_PAUSE)
        return at

    def _is_exceeded(self, now: datetime) -> bool:
        return self.limit is not None and self._used(now) >= self.limit.limit

    def _is_draining(self, now: datetime) -> bool:
        return self.drain_at is not None and self.drain_at > now

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


def room_soon(gate: Gate, now: datetime) -> datetime | None:
    """When the limit has room again, if that is within the grace time; None if a new slot is needed."""
    if gate.hold(now) is not None or gate.limit is None:
        return None
    grace = min(MAX_GRACE, max(GRACE, timedelta(milliseconds=gate.limit.interval_ms * 4 / BUCKETS)))
    opens = gate.room_at(now)
    return opens if opens - now <= grace else None


def _to_us(at: datetime) -> int:
    return (at - _EPOCH) // _US


def _from_us(us: int) -> datetime:
    return _EPOCH + timedelta(microseconds=us)
