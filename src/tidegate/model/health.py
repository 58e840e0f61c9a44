"""Health: the thresholds an operator can set, and notices about how a process is configured."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["degraded", "critical"]


class HealthPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The thresholds of the `degraded` and the `critical` status, per cause; 0 disables one."""

    overdue_ms: int = 5000
    overdue_degraded: int = 1
    overdue_critical: int = 1000
    due_age_degraded_ms: int = 30_000
    due_age_critical_ms: int = 300_000
    dead_letters_window_ms: int = 3_600_000
    dead_letters_degraded: int = 10
    dead_letters_critical: int = 100
    paused_degraded_ms: int = 1
    paused_critical_ms: int = 0
    worker_degraded_ms: int = 60_000
    worker_critical_ms: int = 60_000
    reconcile_degraded_ms: int = 60_000
    reconcile_critical_ms: int = 300_000

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, it is {getattr(self, name)}")
        for name in ("overdue_ms", "dead_letters_window_ms", "worker_degraded_ms"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} must be more than 0")
        for name in self.__struct_fields__:
            high = name.replace("degraded", "critical")
            if high != name and 0 < getattr(self, high) < getattr(self, name):
                raise ValueError(f"{high} is {getattr(self, high)}, below {name}, which is {getattr(self, name)}")


HEALTH = HealthPolicy()


def severity(value: float, degraded: float, critical: float) -> Severity | None:
    """The severity of a value; a threshold of 0 is never reached."""
    if critical and value >= critical:
        return "critical"
    return "degraded" if degraded and value >= degraded else None


class Notice(msgspec.Struct, frozen=True, kw_only=True):
    """A warning about the configuration, and what to do about it."""

    code: str
    message: str
