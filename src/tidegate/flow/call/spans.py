"""Run spans: one attempt at a run and the steps it tries, as spans of the trace of its event.

The span of a step is recorded when its outcome is committed, that of the run when its end or suspension is. What has no
effect, since the run belongs to another worker now, is recorded as `discarded`: the users' own spans are below it.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate.clock import epoch_ns
from tidegate.flow.call.endings import End
from tidegate.flow.call.journal import Written
from tidegate.model.event import Event, trace_id
from tidegate.model.run import ClaimedRun, FinishedRun
from tidegate.model.step import StepWrite
from tidegate.telemetry import traces

DISCARDED = "discarded"


class _Unwritten(NamedTuple):
    span: traces.Span
    ended_ns: int
    status: str
    is_bad: bool


class RunSpans:
    """The spans of one attempt at a run; none when its event has no trace."""

    def __init__(self, run: ClaimedRun, event: Event | None) -> None:
        self._under_way: dict[str, traces.Span] = {}
        self._unwritten: dict[asyncio.Future[Written], _Unwritten] = {}
        self._run = run
        self._span: traces.Span | None = None
        if event is not None and trace_id(event.traceparent) is not None:
            self._span = traces.begin(
                f"run {run.workflow}", event.traceparent, kind="CONSUMER", workflow=run.workflow, run_id=run.id,
                attempt=run.attempts, event_id=event.id,
            )  # fmt: skip

    def enter(self) -> None:
        """Make the run's span the current one of this task; a task that ended another run may have begun it."""
        traces.attach(self._span)

    def begin_step(self, name: str, attempt: int) -> None:
        """A step's function is about to be called."""
        if self._span is not None:
            self._under_way[name] = span = self._span.child(
                f"step {name}", workflow=self._run.workflow, run_id=self._run.id, step=name, attempt=attempt
            )
            span.enter()

    def leave_step(self, name: str) -> None:
        """Its function has returned, in the same task."""
        if name in self._under_way:
            self._under_way[name].leave()

    def fail_step(self, name: str, exc: BaseException) -> None:
        """Its function raised an exception."""
        if name in self._under_way:
            self._under_way[name].fail(exc)

    def fail(self, exc: BaseException) -> None:
        """The workflow's function raised an exception."""
        if self._span is not None:
            self._span.fail(exc)

    def wrote_step(self, write: StepWrite, written: asyncio.Future[Written]) -> None:
        """The outcome of an attempt is being written."""
        span = self._under_way.pop(write.name, None)
        if span is not None:
            self._unwritten[written] = _Unwritten(span, epoch_ns(), write.status, write.error is not None)
            written.add_done_callback(partial(self._settle, is_kept=False))

    def end(self, end: End | None, *, is_kept: bool) -> None:
        """The attempt is over: how, and whether that took effect."""
        for written in list(self._unwritten):
            self._settle(written, is_kept=is_kept)
        for step in self._under_way.values():
            _end(step, DISCARDED, is_bad=True)
        self._under_way.clear()
        span, self._span = self._span, None
        if span is None:
            return
        if end is None or not is_kept:
            _end(span, DISCARDED, is_bad=True)
        elif isinstance(end, FinishedRun):
            _end(span, end.status, is_bad=end.status == "failed")
        else:
            _end(span, "pending", is_bad=False, next_attempt_at=end.next_attempt_at)

    def _settle(self, written: asyncio.Future[Written], *, is_kept: bool) -> None:
        """A step's outcome is committed, or has no effect; `is_kept` applies to one that was written with the run's
        end."""
        found = self._unwritten.pop(written, None)
        if found is None:
            return
        next_attempt_at = None
        if written.done():
            has_answer = not written.cancelled() and written.exception() is None
            is_kept = has_answer and written.result().is_kept
            next_attempt_at = written.result().next_attempt_at if is_kept else None
        status = found.status if is_kept else DISCARDED
        _end(found.span, status, is_bad=found.is_bad or not is_kept, next_attempt_at=next_attempt_at, at=found.ended_ns)


def _end(
    span: traces.Span, status: str, *, is_bad: bool, next_attempt_at: datetime | None = None, at: int | None = None
) -> None:
    span.set_attributes(status=status, next_attempt_at=next_attempt_at)
    if is_bad:
        span.fail(status)
    span.end(at)
