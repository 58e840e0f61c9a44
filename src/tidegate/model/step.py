"""What a run writes while it goes on: the outcome of a step, and that it waits."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec

from tidegate.model.ids import RunId, StepId, TriggerId
from tidegate.model.retry import RetryState
from tidegate.model.run import FinishedRun, StepStatus

StepKind = Literal["step", "sleep"]


class Closing(msgspec.Struct, frozen=True, kw_only=True):
    """A step was told to come back later, and so is everyone of its trigger, or of one of its keys."""

    trigger_id: TriggerId
    concurrency_key: str | None
    delay_ms: int
    reason: str


class StepWrite(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one attempt at a step, or a timer; `result` is JSON text. It counts only while the claim holds.

    `delay_ms` from the database's time on, it goes on. `is_new`: nothing was written of this step before.
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
    """What a run writes at once: the outcomes of steps, and its end or rest if it came to that. All or nothing."""

    steps: list[StepWrite]
    end: FinishedRun | SuspendedRun | None = None


class SuspendedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A claimed run that waits until `next_attempt_at`, or `delay_ms` from the database's time on, but not past its
    `deadline_at`, and holds no worker meanwhile. `is_retry`: its function has failed and is called anew."""

    id: RunId
    claim_generation: int
    next_attempt_at: datetime | None
    delay_ms: int | None = None
    deadline_at: datetime | None = None
    is_retry: bool = False
    warning: str | None = None
