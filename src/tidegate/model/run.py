"""A run of a workflow, and its steps."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Literal, get_args

import msgspec

from tidegate.model.child import ChildOf
from tidegate.model.event import Event
from tidegate.model.ids import DefinitionId, DeliveryId, EventId, RunId, StepId, TriggerId
from tidegate.model.retry import RetryState

RunStatus = Literal["pending", "running", "succeeded", "failed", "cancelled"]
RUN_STATUSES: tuple[RunStatus, ...] = get_args(RunStatus)
FINAL_RUN_STATUSES: tuple[RunStatus, ...] = ("succeeded", "failed", "cancelled")

StepStatus = Literal["pending", "running", "succeeded", "failed", "cancelled"]
STEP_STATUSES: tuple[StepStatus, ...] = get_args(StepStatus)
# Steps that the engine makes for itself have names that begin with this; they are not shown to people.
INTERNAL_STEPS = "tidegate."
# Kinds of steps whose `next_attempt_at` is when they end, not when they are tried again.
ENDING_KINDS = ("wait", "sleep")

# A run whose worker died this many times in a row is a suspect, whatever else the worker was executing: from then on
# it is executed alone. A single crash is no evidence: workers are killed for many reasons, with all that they execute.
SUSPECT_CRASHES = 2
# A run whose worker died this many times in a row while it was executed alone is dead-lettered.
MAX_TRIALS = 3
# How the error of a run begins whose parameters do not fit its function (`Workflow.bind`).
_MISFIT = re.compile(
    r"NonRetryable: (parameter '[^']*' of workflow \S+ is (missing|wrong)|workflow \S+ takes no parameter )"
)


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `workflow_runs`, with the slug of its workflow and the event that launched it."""

    id: RunId
    workflow: str
    workflow_definition_id: DefinitionId
    delivery_id: DeliveryId | None
    event_id: EventId | None
    correlation_id: str | None
    status: RunStatus
    parameters: dict[str, Any]
    output: Any
    error: str | None
    warning: str | None
    attempts: int
    crashes: int
    next_attempt_at: datetime | None
    cancel_requested_at: datetime | None
    cancelled_by: str | None
    replayed_from: RunId | None
    rerun_of: RunId | None = None
    window_id: RunId | None = None
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    version: str | None = None
    version_held_at: datetime | None = None
    tags: dict[str, str] = {}


class ClaimedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run that this worker holds until its lease ends; every write about it checks `claim_generation`. `now` is the
    database's time at the claim, `wakes` how often it was woken before: what came then is among its stored steps;
    `window` are the events of the window that it takes, if it takes one. With a `slot_key` it holds its slots while it
    executes; it holds one if it has a `concurrency_key`."""

    id: RunId
    workflow: str
    event_id: EventId | None
    correlation_id: str | None
    parameters: dict[str, Any]
    attempts: int
    claim_generation: int
    now: datetime
    started_at: datetime
    retry_attempts: int = 0
    cancel_requested: bool = False
    trigger_id: TriggerId | None = None
    concurrency_key: str | None = None
    slot_key: str | None = None
    is_probe: bool = False
    wakes: int = 0
    version: str | None = None
    version_since: datetime | None = None
    has_misfit: bool = False
    window_id: RunId | None = None
    window: tuple[Event, ...] = ()

    @property
    def needs_slot(self) -> bool:
        """Whether it must take its slots before its function is called."""
        return self.slot_key is not None and self.concurrency_key is None


class LaunchBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A run asked everyone to wait: until then nothing of its trigger, of its concurrency key, or (`budget`) of its
    key of a budget is launched: `budget_key`, or the one that its event gives."""

    trigger_id: TriggerId
    concurrency_key: str | None
    delay_ms: int
    reason: str
    budget: str | None = None
    event_id: EventId | None = None
    budget_key: str | None = None


class FinishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """How a claimed run ended; `output` is JSON text. `dead_step_id` is the step that made it fail, if any;
    `is_non_retryable`: retrying cannot help. `blocks`: who else has to wait. `budgets`: those of which its steps hold
    slots, or for which they wait, until now."""

    id: RunId
    claim_generation: int
    status: RunStatus
    output: str | None = None
    error: str | None = None
    trigger_id: TriggerId | None = None
    concurrency_key: str | None = None
    is_probe: bool = False
    dead_step_id: StepId | None = None
    is_non_retryable: bool = False
    has_waiting_steps: bool = False
    child_of: ChildOf | None = None
    is_timed_out: bool = False
    blocks: LaunchBlock | None = None
    budgets: tuple[str, ...] = ()

    @property
    def matters_to_trigger(self) -> bool:
        """Whether its end frees a slot, counts as a failure or ends a probe."""
        return self.concurrency_key is not None or self.is_probe or self.status == "failed"


_BEFORE = re.compile(r"it reaches (?P<new>.+?) before (?P<left>.+?), which is recorded(?P<earlier> as earlier)?\b")
_WITHOUT = re.compile(r"without (?P<left>.+?), which is recorded")


def risk_of_resuming(warning: str | None) -> str:
    """What it does if a run that waits for a version resumes on the code that workers have now, after the word `this`;
    by the run's warning, which says where the steps do not fit."""
    if (found := _BEFORE.search(warning or "")) is not None:
        if found["earlier"]:
            return f"uses the recorded results of {found['new']} and {found['left']} in another order than recorded"
        unused = f"leaves recorded step {found['left']} unused, unless the code asks for it later"
        return f"{unused}, and EXECUTES {found['new']}"
    rest = "EXECUTES the steps that the code has now and that are not recorded under their names"
    if (found := _WITHOUT.search(warning or "")) is not None:
        return f"leaves recorded step {found['left']} unused and {rest}"
    return rest


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `workflow_run_steps`; a `sleep` is a timer. `is_timed_out`: a wait that ended without its event; that is
    no failure: the status is `succeeded`, and the result null."""

    id: StepId
    workflow_run_id: RunId
    name: str
    kind: str = "step"
    status: StepStatus = "pending"
    result: Any = None
    error: str | None = None
    retry_state: RetryState = "none"
    next_attempt_at: datetime | None = None
    retry_attempts: int = 0
    retry_metadata: dict[str, Any] = {}
    claim_generation: int = 0
    claimed_by: str | None = None
    claim_expires_at: datetime | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
    is_timed_out: bool = False

    @property
    def begins_again(self) -> bool:
        """Whether a retry of the run has reset it, though steps that follow it may be finished: its children are
        started again, or its approval is asked for again (then its status is `cancelled`)."""
        is_reset = self.status == ("cancelled" if self.kind == "wait" else "pending")
        return is_reset and bool(self.retry_metadata.get("revived"))

    @property
    def is_to_be_asked_again(self) -> bool:
        """Whether it is an approval that a retry of the run has reset."""
        return self.kind == "wait" and self.begins_again


def is_misfit(error: str) -> bool:
    """Whether a run failed because its parameters are not those that its function takes: so will every further attempt
    with the same code."""
    return _MISFIT.match(error) is not None
