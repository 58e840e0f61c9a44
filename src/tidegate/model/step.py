"""What a run writes while it executes: the outcomes of its steps, and that it is suspended or has ended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec

from tidegate.model.child import ChildBatch
from tidegate.model.event import NewEvent
from tidegate.model.ids import RunId, StepId, TriggerId
from tidegate.model.retry import RetryState
from tidegate.model.run import FinishedRun, LaunchBlock, StepStatus
from tidegate.model.wait import NewWait

StepKind = Literal["step", "sleep", "publish", "wait", "child", "map"]


class StepWrite(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one attempt at a step, or a timer; `result` is JSON text. Ignored if the claim has been lost.

    It continues `delay_ms` after the database's current time. `is_new`: this step has no row yet. `event` is published
    (`has_cap`: its source has a cap on what waits) and `children` are started in the same transaction; `waits` are the
    events that it begins to wait for. `budgets` are those of which it held slots, or for which
    it waited, until now.
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
    blocks: LaunchBlock | None = None
    is_new: bool = False
    event: NewEvent | None = None
    has_cap: bool = False
    waits: Sequence[NewWait] = ()
    children: ChildBatch | None = None
    budgets: Sequence[str] = ()


class RunNotes(msgspec.Struct, frozen=True, kw_only=True):
    """What a run says of itself, written with what it writes next: the version of the code that it goes on with, if it
    is another one than before, and tags."""

    id: RunId
    claim_generation: int
    version: str | None = None
    tags: dict[str, str] = {}


class RunOutcome(msgspec.Struct, frozen=True):
    """What a run writes in one transaction: outcomes of steps, and its end or suspension, if any."""

    steps: list[StepWrite]
    end: FinishedRun | SuspendedRun | None = None
    notes: RunNotes | None = None


class SuspendedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is suspended until `next_attempt_at`, or for `delay_ms` from the database's current time, but not past
    its `deadline_at`; it occupies no worker meanwhile. `is_retry`: its function has failed and is called again.
    `wakes` is that of the claim: if it was woken since, it is due at once. `misfit` is the version of the code here, if
    the run's steps do not fit it: it waits for another one. `blocks`: who else has to wait. `gives_back`: the trigger
    to which it gives its slots back."""

    id: RunId
    claim_generation: int
    next_attempt_at: datetime | None
    delay_ms: int | None = None
    deadline_at: datetime | None = None
    is_retry: bool = False
    warning: str | None = None
    wakes: int = 0
    misfit: str | None = None
    blocks: LaunchBlock | None = None
    gives_back: TriggerId | None = None
