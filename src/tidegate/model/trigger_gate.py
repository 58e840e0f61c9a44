"""A trigger's gate: throttle, pause and breaker under its row lock.

The rules of a source's gate, but a probe lasts as long as its run: only then is known whether the trigger works again.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from tidegate.model.source import BreakerPolicy, Gate, Hold


class TriggerMove(NamedTuple):
    """A trigger's breaker that changed: `opened`, `reopened` or `closed`."""

    trigger_id: uuid.UUID
    move: str
    reason: str | None


class TriggerGate(Gate):
    """The state of one trigger: asked, spent, and written back by the transaction that holds its row."""

    def __init__(
        self,
        trigger_id: uuid.UUID,
        *,
        probe_run_id: uuid.UUID | None = None,
        closed_until: datetime | None = None,
        closed_reason: str | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(str(trigger_id), **rest)
        self.trigger_id = trigger_id
        self.probe_run_id = probe_run_id
        self.closed_until = closed_until
        self.closed_reason = closed_reason

    def hold(self, now: datetime) -> Hold | None:
        """Why nothing is launched now; None when throttle and concurrency alone decide."""
        held = super().hold(now)
        if held is None and self.closed_until is not None and self.closed_until > now:
            return Hold("retry_after", self.closed_until, self.closed_reason or "a step was told to come back later")
        if held is None and self.breaker_state == "half_open":
            return Hold("breaker_open", None, f"the breaker is half open: run {self.probe_run_id} is the trial")
        return held

    def begin_probe(self, run_id: uuid.UUID) -> None:
        """This run shows whether the trigger works again; nothing else is launched until it has ended."""
        self.breaker_state, self.probe_run_id, self.is_changed = "half_open", run_id, True

    def end_probe(self, now: datetime, run_id: uuid.UUID, policy: BreakerPolicy, *, is_good: bool) -> str | None:
        """The run has ended; `closed` or `reopened` if it was the probe."""
        if self.breaker_state != "half_open" or self.probe_run_id != run_id:
            return None
        if is_good:
            self.probe_run_id, self.is_changed = None, True
            self.breaker_state, self.breaker_until, self.breaker_reason, self.failures = "closed", None, None, []
            return "closed"
        return self._reopen(now, policy)

    def count_failures(self, now: datetime, count: int, policy: BreakerPolicy) -> str | None:
        """Deliveries or runs failed; `opened` or `reopened` (when it was to be the probe) when the breaker moved."""
        if self.breaker_state == "closed":
            return self.record(now, failures=count, admitted=0, policy=policy)
        return self._reopen(now, policy) if self.is_probing(now) else None

    def _reopen(self, now: datetime, policy: BreakerPolicy) -> str:
        self.breaker_state, self.probe_run_id, self.is_changed = "open", None, True
        self.breaker_until = now + timedelta(milliseconds=policy.pause_ms)
        return "reopened"
