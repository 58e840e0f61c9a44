"""A trigger's gate: throttle, pause and breaker under its row lock.

The rules of a source's gate, but a probe lasts as long as its run: only then is known whether the trigger works again.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tidegate.model.ids import EventId, RunId, TriggerId
from tidegate.model.source import BreakerPolicy, Gate, Hold


class TriggerMove(NamedTuple):
    """A trigger's breaker that moved: `opened`, `closed`, `reopened`, `trial_failed` or `trial_void`; and by whom."""

    trigger_id: TriggerId
    move: str
    reason: str | None
    event_id: EventId | None = None
    correlation_id: str | None = None
    run_id: RunId | None = None


class TriggerGate(Gate):
    """The state of one trigger: asked, spent, and written back by the transaction that holds its row."""

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
        """Why nothing is launched now; None when throttle and concurrency alone decide."""
        held = super().hold(now)
        if held is None and self.closed_until is not None and self.closed_until > now:
            return Hold("retry_after", self.closed_until, self.closed_reason or "a step was told to come back later")
        if held is None and self.breaker_state == "half_open":
            return Hold("breaker_open", None, f"the breaker is half open: run {self.probe_run_id} is the trial")
        return held

    def begin_probe(self, run_id: RunId) -> None:
        """This run shows whether the trigger works again; nothing else is launched until it has ended."""
        self.breaker_state, self.probe_run_id, self.is_changed = "half_open", run_id, True

    def end_probe(self, now: datetime, run_id: RunId, policy: BreakerPolicy, *, is_good: bool | None) -> str | None:
        """The run has ended; how the breaker moved if it was the probe. One that shows nothing (None), since it was
        cancelled or its failure does not count, is followed by another."""
        if self.breaker_state != "half_open" or self.probe_run_id != run_id:
            return None
        self.probe_run_id = None
        if is_good is None:
            self.breaker_state, self.breaker_until, self.is_changed = "open", now, True
            return "trial_void"
        if not is_good:
            return self._fail_trial(now, policy)
        self.counting_until = None
        return self._close_breaker()

    def count_failures(self, now: datetime, count: int, policy: BreakerPolicy) -> str | None:
        """Deliveries or runs failed; how the breaker moved, if it did: one that was to be the probe has failed it."""
        if self.breaker_state == "closed":
            self.counting_until = now + timedelta(milliseconds=policy.window_ms)
            return self.count(now, failed=count, succeeded=0, policy=policy)
        return self._fail_trial(now, policy) if self.is_probing(now) else None
