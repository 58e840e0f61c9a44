"""A trigger's gate: throttle, pause and breaker under its row lock.

The rules are those of a source's gate, but a probe lasts until its run ends: only then is its outcome known.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tidegate.model.ids import EventId, RunId, TriggerId
from tidegate.model.source import BreakerPolicy, Gate, Hold


class TriggerMove(NamedTuple):
    """A change of a breaker (`opened`, `closed`, `reopened`, `probe_failed` or `probe_void`) and what caused it."""

    trigger_id: TriggerId
    move: str
    reason: str | None
    event_id: EventId | None = None
    correlation_id: str | None = None
    run_id: RunId | None = None


class TriggerGate(Gate):
    """The state of one trigger, read, changed and written back by the transaction that holds the lock on its row."""

    def __init__(
        self,
        trigger_id: TriggerId,
        *,
        probe_run_id: RunId | None = None,
        closed_until: datetime | None = None,
        closed_reason: str | None = None,
        counting_until: datetime | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(str(trigger_id), **rest)
        self.trigger_id = trigger_id
        self.probe_run_id = probe_run_id
        self.closed_until = closed_until
        self.closed_reason = closed_reason
        self.counting_until = counting_until

    def hold(self, now: datetime) -> Hold | None:
        """Why nothing is launched now; None if only the throttle and the concurrency limit decide."""
        held = super().hold(now)
        if held is None and self.closed_until is not None and self.closed_until > now:
            return Hold("retry_after", self.closed_until, self.closed_reason or "a step asked to be retried later")
        if held is None and self.breaker_state == "half_open":
            return Hold("breaker_open", None, f"the breaker is half open: run {self.probe_run_id} is the probe")
        return held

    def begin_probe(self, run_id: RunId) -> None:
        """Make this run the probe: nothing else is launched until it has ended."""
        self.breaker_state, self.probe_run_id, self.is_changed = "half_open", run_id, True

    def end_probe(self, now: datetime, run_id: RunId, policy: BreakerPolicy, *, is_good: bool | None) -> str | None:
        """A run has ended; returns how the breaker moved, if the run was the probe. A probe without a result (`is_good`
        is None: it was cancelled, or its failure does not count) is followed by another."""
        if self.breaker_state != "half_open" or self.probe_run_id != run_id:
            return None
        self.probe_run_id = None
        if is_good is None:
            self.breaker_state, self.breaker_until, self.is_changed = "open", now, True
            return "probe_void"
        if not is_good:
            return self._fail_probe(now, policy)
        self.counting_until = None
        return self._close_breaker()

    def count_failures(self, now: datetime, count: int, policy: BreakerPolicy) -> str | None:
        """Count failed deliveries or runs, or a failed probe; returns how the breaker moved, if it did."""
        if self.breaker_state == "closed":
            self.counting_until = now + timedelta(milliseconds=policy.window_ms)
            return self.count(now, failed=count, succeeded=0, policy=policy)
        return self._fail_probe(now, policy) if self.is_probing(now) else None
