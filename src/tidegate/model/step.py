"""What a run writes while it executes: the outcomes of its steps, and that it is suspended or has ended."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from tidegate.model.ids import RunId, StepId, TriggerId
from tidegate.model.retry import RetryState
from tidegate.model.run import FinishedRun, StepStatus

StepKind = Literal["step", "sleep"]


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """A step asked to be retried later: until then nothing of its trigger, or of its concurrency key, is launched."""

    trigger_id: TriggerId
    concurrency_key: str | None
    delay_ms: int
    reason: str


class StepWrite(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one attempt at a step, or a timer; `result` is JSON text. Ignored if the claim has been lost.

    It continues `delay_ms` after the database's current time. `is_new`: this step has no row yet.
    """

    id: StepId
    workflow_run_id: RunId
    claim_generation: int
    name: str
    status: StepStatus
    kind: StepKind = "step"
    result: str | None = None
    error: str | None = None
    retry_state: RetryState = "none"
    delay_ms: int | None = None
    retry_attempts: int = 0
    retry_metadata: dict[str, Any] = {}
    closes: Closing | None = None
    is_new: bool = False


class RunOutcome(msgspec.Struct, frozen=True):
    """What a run writes in one transaction: outcomes of steps, and its end or suspension, if any."""

    steps: list[StepWrite]
    end: FinishedRun | SuspendedRun | None = None


class SuspendedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is suspended until `next_attempt_at`, or for `delay_ms` from the database's current time, but not past
    its `deadline_at`; it occupies no worker meanwhile. `is_retry`: its function has failed and is called again."""

    id: RunId
    claim_generation: int
    next_attempt_at: datetime | None
    delay_ms: int | None = None
    deadline_at: datetime | None = None
    is_retry: bool = False
    warning: str | None = None
