"""Endings: how one attempt at a run ends: finished, or put to rest until a time; and how that is written."""

from __future__ import annotations

from collections.abc import Callable, Collection
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from tidegate.errors import NonRetryable, RetryAfter, StepFailed, first_line
from tidegate.flow.run.calls import cleaned, error_text, reason_of, retry_after_ms
from tidegate.flow.run.journal import Journal, Written
from tidegate.flow.run.workflow import Workflow
from tidegate.model.retry import RetryPolicy, is_exhausted
from tidegate.model.run import ClaimedRun, FinishedRun, Step
from tidegate.model.step import Closing, SuspendedRun

End = FinishedRun | SuspendedRun
# Hears how a run ended, and what became of writing that.
Then = Callable[[End, Written | BaseException], None]

MAX_WARNING = 1000
# Said of a step whose function raised NonRetryable, in its `retry_metadata`.
NON_RETRYABLE = "non_retryable"


class Endings:
    """The ends that a run may come to. `steps` are those of the run, as far as they are known; `parked` those that
    wait, until when; `warnings` what the run says meanwhile."""

    __slots__ = ("_policy", "_run", "_steps", "_workflow", "parked", "warnings")

    def __init__(self, run: ClaimedRun, workflow: Workflow, policy: RetryPolicy, steps: dict[str, Step]) -> None:
        self.parked: dict[str, datetime] = {}
        self.warnings: dict[str, str] = {}
        self._run = run
        self._workflow = workflow
        self._policy = policy
        self._steps = steps

    @property
    def deadline(self) -> datetime | None:
        """When the run's time is over."""
        timeout_ms = self._workflow.timeout_ms
        return None if timeout_ms is None else self._run.started_at + timedelta(milliseconds=timeout_ms)

    def seconds_left(self, now: datetime) -> float | None:
        """How long the run may go on; None: as long as it likes."""
        deadline = self.deadline
        return None if deadline is None else (deadline - now).total_seconds()

    def park(self, step: Step, until: datetime) -> None:
        """A step waits for a time; if it has failed, the run says so meanwhile."""
        self.parked[step.name] = until
        if step.error:
            failed = f"failed {step.retry_attempts} times" if step.retry_attempts else "waits"
            when = f"next at {until:%Y-%m-%d %H:%M:%S} UTC"
            self.warnings[step.name] = f"step {step.name!r} {failed}, {when}: {first_line(step.error)}"

    def unpark(self, step: Step) -> None:
        """Its time has come."""
        self.parked.pop(step.name, None)
        self.warnings.pop(step.name, None)

    def succeeded(self, output: str | None) -> FinishedRun:
        return self._finished("succeeded", output=output)

    def cancelled(self) -> FinishedRun:
        return self._finished("cancelled", error="cancelled while it was running")

    def timed_out(self) -> FinishedRun:
        return self._finished("failed", error=f"timed out after {self._workflow.timeout_ms} ms")

    def unwritable(self, exc: BaseException) -> FinishedRun:
        return self._finished("failed", error=f"its outcome cannot be stored: {reason_of(exc)}")

    def raised(self, exc: BaseException) -> End:
        """The function has raised something."""
        if isinstance(exc, StepFailed):
            step = self._steps.get(exc.name)
            error = cleaned(f"{exc}\n{exc.error}")
            is_final = isinstance(exc.__cause__, NonRetryable) or (
                step is not None and bool(step.retry_metadata.get(NON_RETRYABLE))
            )
            dead_step_id = step.id if step else None
            return self._finished("failed", error=error, dead_step_id=dead_step_id, is_non_retryable=is_final)
        if isinstance(exc, RetryAfter) and not is_exhausted(self._policy, self._run.retry_attempts + 1):
            self.warnings[""] = reason_of(exc)
            return self._rests(None, retry_after_ms(exc), is_retry=True)
        return self._finished("failed", error=error_text(exc), is_non_retryable=isinstance(exc, NonRetryable))

    def closing(self, exc: BaseException, delay_ms: int) -> Closing | None:
        """What a step's refusal closes for everyone; a key only where the trigger limits by key."""
        if not isinstance(exc, RetryAfter) or exc.everyone is None or self._run.trigger_id is None:
            return None
        key = self._run.concurrency_key if exc.everyone == "key" else None
        return Closing(trigger_id=self._run.trigger_id, concurrency_key=key, delay_ms=delay_ms, reason=reason_of(exc))

    def resting(self) -> SuspendedRun:
        """Until the first of its steps goes on, or its time is over."""
        return self._rests(min(self.parked.values()), None)

    def _rests(self, until: datetime | None, delay_ms: int | None, *, is_retry: bool = False) -> SuspendedRun:
        return SuspendedRun(
            id=self._run.id,
            claim_generation=self._run.claim_generation,
            next_attempt_at=until,
            delay_ms=delay_ms,
            deadline_at=self.deadline,
            is_retry=is_retry,
            warning=cleaned("; ".join(self.warnings.values())[:MAX_WARNING]) or None,
        )

    def _finished(self, status: Any, **fields: Any) -> FinishedRun:
        return FinishedRun(
            id=self._run.id,
            claim_generation=self._run.claim_generation,
            status=status,
            trigger_id=self._run.trigger_id,
            concurrency_key=self._run.concurrency_key,
            is_probe=self._run.is_probe,
            has_waiting_steps=_has_waiting(self._steps.values()),
            **fields,
        )


async def hand_in(
    end: End,
    then: Then,
    journal: Journal,
    cancelled: Callable[[], FinishedRun],
    unwritable: Callable[[Exception], FinishedRun],
) -> None:
    """Hand in an end, after what was written before it. Instead of one that cannot be written, or a rest of a run that
    is to be cancelled, another end is written, without steps. LeaseLost when what was written before did not count."""

    def closed(written: Written | BaseException) -> None:
        if isinstance(written, Exception):
            instead = unwritable(written)
        elif isinstance(end, SuspendedRun) and isinstance(written, Written) and written.is_cancel_requested:
            instead = cancelled()
        else:
            then(end, written)
            return
        try:
            journal.end(instead, partial(then, instead))
        except Exception as exc:  # noqa: BLE001 - reported to the caller of `hand_in`
            then(instead, exc)

    try:
        await journal.settle()
    except Exception as exc:  # noqa: BLE001 - the run ends as failed instead
        instead = unwritable(exc)
        journal.end(instead, partial(then, instead))
    else:
        journal.close(end, closed)


def _has_waiting(steps: Collection[Step]) -> bool:
    return any(step.retry_state == "scheduled" for step in steps)
