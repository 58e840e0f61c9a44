"""A source: its limit, its pause, its breaker, and the pure rules of the gate.

**Limit and pace.** Those of an allowance (`model/allowance.py`).

**Breaker.** It opens after at least `threshold` failures within a window, if they are at least `ratio` of the outcomes
in it. After its pause, one event is admitted as a probe. A failed probe may be that event's own fault, so the next
event is a probe too; only if both fail does the next pause begin.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal, get_args

import msgspec

from tidegate.model.allowance import BUCKETS, Allowance
from tidegate.model.allowance import HORIZON as HORIZON  # noqa: PLC0414 - these four are part of a source's limit
from tidegate.model.allowance import MAX_INTERVAL_MS as MAX_INTERVAL_MS  # noqa: PLC0414
from tidegate.model.allowance import MAX_LIMIT as MAX_LIMIT  # noqa: PLC0414
from tidegate.model.allowance import RateLimit as RateLimit  # noqa: PLC0414
from tidegate.model.outcome_window import OutcomeWindow
from tidegate.model.units import check_number, named_duration_ms, written_duration

# The assumed length of a pause without an end when slots are assigned; resuming the source replans them.
OPEN_PAUSE = timedelta(days=1)
# A due event that finds no room waits this long for it: slots of a draining backlog are slightly uneven. If room is
# further away, the event gets a new slot. Waiting events occupy places in the batch, hence the maximum.
GRACE = timedelta(milliseconds=100)
MAX_GRACE = timedelta(seconds=2)

BreakerState = Literal["closed", "open", "half_open"]
BREAKER_STATES: tuple[BreakerState, ...] = get_args(BreakerState)

HoldReason = Literal["rate_limit", "paused", "breaker_open", "retry_after"]


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


class Gate(Allowance):
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
        super().__init__(
            limit=limit, ring=ring, ring_at=ring_at, ring_width_us=ring_width_us, spent_at=spent_at, drain_at=drain_at
        )
        self.source = source
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
        free = self.free(now)
        if self.is_probing(now):
            return min(1, free) if free is not None else 1
        return free

    def slots(self, now: datetime, count: int, *, is_refusal: bool = True) -> list[datetime]:
        """Slots for `count` events that must wait, after those of the events that already wait.

        If new events are refused, the pause of the limit begins, unless a backlog is already draining.
        """
        hold = self.hold(now)
        if is_refusal and hold is None and self._is_exceeded(now) and not self._is_draining(now):
            assert self.limit is not None
            if self.limit.pause_ms:
                self.throttled_until = now + timedelta(milliseconds=self.limit.pause_ms)
        return self.take_slots(self._opens_at(now), now + HORIZON, count)

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


def room_soon(gate: Gate, now: datetime) -> datetime | None:
    """When the limit has room again, if that is within the grace time; None if a new slot is needed."""
    if gate.hold(now) is not None or gate.limit is None:
        return None
    grace = min(MAX_GRACE, max(GRACE, timedelta(milliseconds=gate.limit.interval_ms * 4 / BUCKETS)))
    opens = gate.room_at(now)
    return opens if opens - now <= grace else None
