"""When to retry and when to stop: the backoff policy that events, deliveries and steps share, and the retry states."""

from __future__ import annotations

import math
import random as _random
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Literal, get_args

import msgspec

from tidegate.model.units import MAX_DURATION_MS, check_number, named_duration_ms

RetryState = Literal["none", "scheduled", "running", "completed", "cancelled", "exhausted"]
RETRY_STATES: tuple[RetryState, ...] = get_args(RetryState)
FINAL_RETRY_STATES: tuple[RetryState, ...] = ("completed", "cancelled", "exhausted")

MAX_ATTEMPTS = 1_000_000
MAX_AGE_MS = 3650 * 86_400_000


_BOUNDS = {
    "base_ms": (1, MAX_DURATION_MS),
    "factor": (1, 100),
    "max_ms": (1, MAX_DURATION_MS),
    "jitter_ratio": (0, 1),
    "max_attempts": (1, MAX_ATTEMPTS),
    "max_age_ms": (0, MAX_AGE_MS),
}


class _Default(int):
    """A default, as opposed to a number that the user gave."""


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Exponential backoff: `base_ms * factor ** (attempt - 1)`, at most `max_ms`, spread by ± `jitter_ratio`.

    A `max_ms` that is not given is at least `base_ms`. What has used `max_attempts`, or has become older than
    `max_age_ms` (0: no bound), is exhausted and moves to the dead letters. Waiting is not failing: without a bound,
    nothing is too old to be retried.
    """

    base_ms: int = 10_000
    factor: float = 2
    max_ms: int = msgspec.field(default_factory=partial(_Default, 900_000))
    jitter_ratio: float = 0.2
    max_attempts: int = 50
    max_age_ms: int = 0

    def __post_init__(self) -> None:
        if type(self.max_ms) is _Default:
            msgspec.structs.force_setattr(self, "max_ms", max(int(self.max_ms), self.base_ms))
        for name, (low, high) in _BOUNDS.items():
            value = getattr(self, name)
            if not low <= value <= high:  # NaN fails every comparison
                raise ValueError(f"{name} must lie between {low} and {high}, not {value!r}")
        if self.max_ms < self.base_ms:
            raise ValueError(f"max_ms must not be below base_ms, {self.base_ms}: it is {self.max_ms}")


EVENT_RETRY = RetryPolicy(base_ms=5_000, factor=2, max_ms=600_000, jitter_ratio=0.2, max_attempts=50)
TRIGGER_RETRY = RetryPolicy(base_ms=10_000, factor=2, max_ms=900_000, jitter_ratio=0.2, max_attempts=50)
STEP_RETRY = RetryPolicy(base_ms=1_000, factor=2, max_ms=300_000, jitter_ratio=0.2, max_attempts=5)


def Retry(  # noqa: N802 - read as a noun where it is used: retry=Retry(max_attempts=8)
    *,
    max_attempts: int = STEP_RETRY.max_attempts,
    base: str | int | float = "1s",
    factor: float = 2,
    cap: str | int | float | None = None,
    jitter: float = 0.2,
    max_age: str | int | float = 0,
) -> RetryPolicy:
    """A retry policy as people write it: `Retry(max_attempts=8, base="5s", factor=2, cap="10m")`.

    Without a `cap` it is 5 minutes, or `base` if that is longer. Errors name what is written here.
    """
    ms = {
        "base": named_duration_ms("Retry: base", base, low=1),
        "max_age": named_duration_ms("Retry: max_age", max_age),
    }
    ms["cap"] = max(STEP_RETRY.max_ms, ms["base"]) if cap is None else named_duration_ms("Retry: cap", cap, low=1)
    if ms["cap"] < ms["base"]:
        raise ValueError(f"Retry: cap is {cap!r}, which is below base, {base!r}")
    for name, field, value in (
        ("factor", "factor", factor),
        ("jitter", "jitter_ratio", jitter),
        ("max_attempts", "max_attempts", max_attempts),
    ):
        check_number(f"Retry: {name}", value, *_BOUNDS[field])
    return RetryPolicy(
        base_ms=ms["base"],
        factor=factor,
        max_ms=ms["cap"],
        jitter_ratio=jitter,
        max_attempts=max_attempts,
        max_age_ms=ms["max_age"],
    )


def backoff_ms(policy: RetryPolicy, attempt: float, random: Callable[[], float] = _random.random) -> int:
    """Milliseconds to wait before `attempt` (the first retry is attempt 1), always within 1 … `max_ms`.

    An attempt below 1 or NaN counts as 1; whatever `random` returns is taken as a point of [0, 1].
    """
    exponent = attempt - 1 if attempt > 1 else 0  # NaN > 1 is false
    if policy.factor == 1:
        delay = float(policy.base_ms)
    elif exponent >= math.log(policy.max_ms / policy.base_ms, policy.factor):
        delay = float(policy.max_ms)
    else:
        delay = policy.base_ms * policy.factor**exponent
    point = random()
    point = min(max(point, 0.0), 1.0) if not math.isnan(point) else 0.5
    delay *= 1 + policy.jitter_ratio * (2 * point - 1)
    if delay > policy.max_ms:  # folded back: at the cap, waits are spread below it instead of all being equal
        delay = 2 * policy.max_ms - delay
    return max(1, min(policy.max_ms, round(delay)))


def next_attempt_at(
    policy: RetryPolicy, attempt: float, now: datetime, random: Callable[[], float] = _random.random
) -> datetime:
    """When `attempt` is due, counted from `now` (the database's clock)."""
    return now + timedelta(milliseconds=backoff_ms(policy, attempt, random))


def next_check_at(
    policy: RetryPolicy, waited: timedelta, now: datetime, random: Callable[[], float] = _random.random
) -> datetime:
    """When to check a row again that another transaction should wake: after as long as it has waited, within the
    policy's bounds."""
    times = max(1.0, waited / timedelta(milliseconds=policy.base_ms))
    attempt = 1 + (math.log(times, policy.factor) if policy.factor > 1 else 0)
    return next_attempt_at(policy, attempt, now, random)


def is_exhausted(policy: RetryPolicy, attempts: int) -> bool:
    """Whether `attempts` so far exhaust the policy."""
    return attempts >= policy.max_attempts


def why_exhausted(policy: RetryPolicy, attempts: int, age: timedelta) -> str | None:
    """Why the policy allows no further attempt; None: it allows one."""
    if policy.max_age_ms and age > timedelta(milliseconds=policy.max_age_ms):
        return f"older than {timedelta(milliseconds=policy.max_age_ms)}"
    return f"{attempts} attempts" if is_exhausted(policy, attempts) else None
