"""Endings: how one attempt at a run ends: finished, or suspended until a time. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tidegate.errors import NonRetryable, RetryAfter, SecretsUnreadable, StepFailed, first_line
from tidegate.flow.code.user_calls import cleaned, error_text, reason_of, retry_after_ms
from tidegate.flow.code.workflow import Workflow
from tidegate.model.child import ChildOf
from tidegate.model.retry import RetryPolicy, backoff_ms, is_exhausted, why_exhausted
from tidegate.model.run import ClaimedRun, FinishedRun, LaunchBlock, Step
from tidegate.model.step import SuspendedRun
from tidegate.model.units import MAX_DURATION_MS

End = FinishedRun | SuspendedRun

MAX_WARNING = 1000
# Key in a step's `retry_metadata`: its function raised NonRetryable.
NON_RETRYABLE = "non_retryable"


class StepFailure(NamedTuple):
    """What the failure of an attempt at a step means: how many attempts failed so far, whether it was the last one, and
    otherwise when the next one is due."""

    attempt: int
    is_final: bool
    delay_ms: int


def step_failure(exc: BaseException, known: Step | None, policy: RetryPolicy, now: datetime) -> StepFailure:
    """Judge a failed attempt at a step by its retry policy."""
    # A key that the worker lacks is not the step's failure: the step waits for an operator and uses no attempt.
    is_failure = not isinstance(exc, SecretsUnreadable)
    attempt = (known.retry_attempts if known else 0) + is_failure
    age = now - known.created_at if known and known.created_at else timedelta()
    is_final = isinstance(exc, NonRetryable) or (is_failure and why_exhausted(policy, attempt, age) is not None)
    if isinstance(exc, RetryAfter | SecretsUnreadable):
        return StepFailure(attempt, is_final, retry_after_ms(exc))
    return StepFailure(attempt, is_final, 0 if is_final else backoff_ms(policy, attempt))


class Endings:
    """The ends that a run may come to. `steps` are the run's steps so far; `parked` the steps that wait, and until
    when; `waits_for` the events that they wait for; `warnings` what an operator reads about the run while it waits;
    `wakes` how often the run was woken for what this execution knows of; `slots` the budgets of which steps hold
    slots, or for which they wait."""

    __slots__ = (
        "_child_of", "_policy", "_run", "_steps", "_workflow", "misfit", "parked", "slots", "waits_for", "wakes",
        "warnings",
    )  # fmt: skip

    def __init__(
        self,
        run: ClaimedRun,
        workflow: Workflow,
        policy: RetryPolicy,
        steps: dict[str, Step],
        child_of: ChildOf | None = None,
    ) -> None:
        self.parked: dict[str, datetime] = {}
        self.waits_for: dict[str, str] = {}
        self.warnings: dict[str, str] = {}
        self.wakes = run.wakes
        self.slots: dict[str, tuple[str, ...]] = {}
        self.misfit: str | None = None  # why the code does not fit the recorded steps
        self._run = run
        self._workflow = workflow
        self._policy = policy
        self._steps = steps
        self._child_of = child_of

    @property
    def deadline(self) -> datetime | None:
        """When the run times out."""
        timeout_ms = self._workflow.timeout_ms
        return None if timeout_ms is None else self._run.started_at + timedelta(milliseconds=timeout_ms)

    def seconds_left(self, now: datetime) -> float | None:
        """How long the run may still take; None: no limit."""
        deadline = self.deadline
        return None if deadline is None else (deadline - now).total_seconds()

    def park(self, step: Step, until: datetime) -> None:
        """A step waits for a time; if it has failed, the run's warning says so."""
        self.parked[step.name] = until
        if step.error:
            failed = f"failed {step.retry_attempts} times" if step.retry_attempts else "waits"
            when = f"next at {until:%Y-%m-%d %H:%M:%S} UTC"
            self.warnings[step.name] = f"step {step.name!r} {failed}, {when}: {first_line(step.error)}"
        elif (event := self.waits_for.get(step.name)) is not None:
            self.warnings[step.name] = f"waits for {event} until {until:%Y-%m-%d %H:%M:%S} UTC"

    def unpark(self, name: str) -> None:
        """The time of a step has come."""
        self.parked.pop(name, None)
        self.warnings.pop(name, None)

    def succeeded(self, output: str | None) -> FinishedRun:
        return self._finished("succeeded", output=output)

    def cancelled(self) -> FinishedRun:
        return self._finished("cancelled", error="cancelled while it was running")

    def timed_out(self) -> FinishedRun:
        return self._finished("failed", error=f"timed out after {self._workflow.timeout_ms} ms", is_timed_out=True)

    def unwritable(self, exc: BaseException) -> FinishedRun:
        return self._finished("failed", error=f"its outcome cannot be stored: {reason_of(exc)}")

    def raised(self, exc: BaseException) -> End:
        """The function raised an exception."""
        if isinstance(exc, StepFailed):
            step = self._steps.get(exc.name)
            error = cleaned(f"{exc}\n{exc.error}")
            is_final = isinstance(exc.__cause__, NonRetryable) or (
                step is not None and bool(step.retry_metadata.get(NON_RETRYABLE))
            )
            dead_step_id = step.id if step else None
            return self._finished("failed", error=error, dead_step_id=dead_step_id, is_non_retryable=is_final)
        blocks = self.block(exc)
        if isinstance(exc, RetryAfter) and not is_exhausted(self._policy, self._run.retry_attempts + 1):
            self.warnings[""] = reason_of(exc)
            suspended = self._suspended(None, retry_after_ms(exc), is_retry=True)
            return msgspec.structs.replace(suspended, blocks=blocks)
        is_final = isinstance(exc, NonRetryable)
        return self._finished("failed", error=error_text(exc), is_non_retryable=is_final, blocks=blocks)

    def block(self, exc: BaseException, keys: Mapping[str, str] | None = None) -> LaunchBlock | None:
        """The trigger, key or budget that `RetryAfter(everyone=…)` blocks; a key only where the trigger limits by
        key. `keys` are those of budgets that were given with a step."""
        if not isinstance(exc, RetryAfter) or exc.everyone is None or self._run.trigger_id is None:
            return None
        key = self._run.concurrency_key or None if exc.everyone == "key" else None  # without a key, the whole trigger
        return LaunchBlock(
            trigger_id=self._run.trigger_id, concurrency_key=key, delay_ms=retry_after_ms(exc), reason=reason_of(exc),
            budget=None if exc.everyone in ("trigger", "key") else exc.everyone, event_id=self._run.event_id,
            budget_key=(keys or {}).get(exc.everyone),
        )  # fmt: skip

    def suspended(self) -> SuspendedRun:
        """Suspended until the first of its steps is due, or the run times out; or until a worker comes whose code fits
        its steps."""
        if self.misfit is not None:
            return self._held(self.misfit)
        return self._suspended(min(self.parked.values()), None)

    def without_slot(self) -> SuspendedRun:
        """Suspended, due at once: it was to time out, and has time left; it must take its slot first."""
        return self._suspended(None, 0)

    def _held(self, why: str) -> SuspendedRun:
        mine = self._workflow.version
        self.warnings = {"": (
            f"waits for a worker with version {self._run.version} of {self._run.workflow}: its recorded steps do not "
            f"fit version {mine}: {why}. Start such a worker, cancel the run, or let it go on: "
            f"tidegate runs resume {self._run.id} --on-current-code"
        )}  # fmt: skip
        return msgspec.structs.replace(self._suspended(None, MAX_DURATION_MS), misfit=mine)

    def _suspended(self, until: datetime | None, delay_ms: int | None, *, is_retry: bool = False) -> SuspendedRun:
        return SuspendedRun(
            id=self._run.id,
            claim_generation=self._run.claim_generation,
            next_attempt_at=until,
            delay_ms=delay_ms,
            deadline_at=self.deadline,
            is_retry=is_retry,
            warning=cleaned("; ".join(self.warnings.values())[:MAX_WARNING]) or None,
            wakes=self.wakes,
            gives_back=None if self._run.slot_key is None else self._run.trigger_id,
        )

    def _budgets(self) -> tuple[str, ...]:
        """The budgets that have to know of the end: steps hold slots of them, or wait for them."""
        waiting = [name for step in self._steps.values() for name in _waited_for(step)] if self._steps else []
        return tuple({*waiting, *(name for names in self.slots.values() for name in names)})

    def _finished(self, status: Any, **fields: Any) -> FinishedRun:
        return FinishedRun(
            id=self._run.id,
            claim_generation=self._run.claim_generation,
            status=status,
            trigger_id=self._run.trigger_id,
            concurrency_key=self._run.concurrency_key,
            is_probe=self._run.is_probe,
            has_waiting_steps=bool(self._workflow.cancel_on) or _has_waiting(self._steps.values()),
            budgets=self._budgets(),
            child_of=self._child_of,
            **fields,
        )


def _waited_for(step: Step) -> list[str]:
    """The budgets for which a step waits, or its turn has come."""
    names: list[str] = step.retry_metadata.get("budgets", [])
    return names if step.retry_state == "scheduled" else []


def _has_waiting(steps: Collection[Step]) -> bool:
    return any(step.retry_state == "scheduled" for step in steps)
