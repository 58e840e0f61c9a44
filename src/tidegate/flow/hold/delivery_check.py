"""Delivery check: does a due delivery still stand, by the event and the trigger as they are now? Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from tidegate.flow.decide import deliver, delivery_state, gate
from tidegate.flow.decide.deliver import Candidate
from tidegate.model.backlog import TOO_LONG, TOO_OLD
from tidegate.model.delivery import DeliveryStatus
from tidegate.model.event import Event
from tidegate.model.ids import DefinitionId, RunId, TriggerId
from tidegate.model.run import ClaimedRun
from tidegate.model.source import OPEN_PAUSE, Hold
from tidegate.model.trigger_index import TriggerIndex
from tidegate.model.work_limit import TooMuchWork
from tidegate.store.budgets import Line, LockedBudget
from tidegate.store.deliveries import Decided, Taken
from tidegate.store.trigger_gates import LockedTrigger

# When a delivery is due again whose trigger this worker cannot read.
UNREADABLE = timedelta(seconds=30)
# Of a delivery whose trigger is not known here: it launches nothing.
_NO_DEFINITION = DefinitionId(uuid.UUID(int=0))


@dataclass(slots=True)
class DeliveryFacts:
    """What one transaction decides by, read under its locks; `wanted` are the triggers whose rows are locked if they
    matter, with their `budgets`."""

    now: datetime
    index: TriggerIndex
    gates: dict[TriggerId, LockedTrigger]
    paused_sources: dict[str, Hold]
    wanted: frozenset[TriggerId] = frozenset()
    budgets: dict[str, LockedBudget] = field(default_factory=dict)
    replanned: list[TriggerId] = field(default_factory=list)
    stopped: dict[RunId, str] = field(default_factory=dict)  # children that are to be cancelled with their parents
    room_at: datetime | None = None

    def lines(self, wanted: Iterable[Line]) -> set[Line]:
        """Those of the lines whose budget this transaction has locked."""
        return {line for line in wanted if line[0] in self.budgets}


def recheck(facts: DeliveryFacts, row: Taken, event: Event) -> Candidate | Decided:
    """Check the delivery against the trigger and the event as they are now: a decision, or a candidate to decide."""
    compiled = facts.index.get(row.trigger_id)
    if compiled is None and row.trigger_id in facts.index.invalid:
        return _settled(row, event, facts, "paused", "trigger_invalid", "this worker cannot read the trigger")
    if compiled is None:
        return _settled(row, event, facts, "cancelled", "trigger_gone", "the trigger is disabled or deleted")
    if (stopped := facts.stopped.get(RunId(row.id))) is not None:
        return _settled(row, event, facts, "cancelled", "parent_stopped", f"cancelled: {stopped}")
    bare = Candidate(row.id, event, compiled, attempts=row.retry_attempts, waited_for=row.reason)
    if row.stale_at is not None and row.stale_at <= facts.now:
        return deliver.decided(bare, "skipped", last_error=TOO_LONG, reason=TOO_OLD)
    paused = facts.paused_sources.get(event.source)
    if paused is not None:
        until = paused.until or facts.now + OPEN_PAUSE
        metadata = {"reason": "source_paused", "message": paused.message, "until": until,
                    "waits_for": {"source": event.source}}  # fmt: skip
        return deliver.decided(
            bare, "paused", last_error=paused.message, retry_state="scheduled", next_attempt_at=until,
            reason="source_paused", metadata=metadata, plan_version=_plan_version(facts, row),
        )  # fmt: skip
    if gate.is_expired(event, facts.now):
        text = "expired: its event's ttl_ms passed before it could be launched"
        return deliver.decided(bare, "exhausted", last_error=text, retry_state="exhausted", reason=gate.EXPIRED)
    envelope = event.envelope()
    try:
        reason = compiled.why_not(event, envelope) if event.starts is None else None
    except TooMuchWork as exc:
        return bare._replace(error=str(exc), is_too_much_work=True)
    if reason is not None:
        text = f"the trigger (version {compiled.trigger.version}) no longer matches the event: {reason}"
        return deliver.decided(bare, "skipped", last_error=text, reason="filtered")
    candidate = deliver.render(
        row.id, event, compiled, envelope, attempts=row.retry_attempts, waited_for=row.reason, waited_budget=row.budget
    )
    return candidate._replace(came_at=row.created_at)


def claimed_run(one: Decided, parameters: dict[str, Any], facts: DeliveryFacts) -> ClaimedRun:
    compiled = facts.index.get(one.trigger_id)
    assert compiled is not None, "it was launched by this trigger"
    return delivery_state.claimed_run(one, compiled, parameters, facts.now)


def _plan_version(facts: DeliveryFacts, row: Taken) -> int:
    locked = facts.gates.get(row.trigger_id)
    return locked.plan_version if locked else 0


def _settled(row: Taken, event: Event, facts: DeliveryFacts, status: DeliveryStatus, reason: str, text: str) -> Decided:
    """A delivery whose trigger is gone, or whose parent was stopped, is cancelled; one whose trigger only a newer
    worker can read waits for it."""
    is_waiting = status == "paused"
    return Decided(
        id=row.id,
        trigger_id=row.trigger_id,
        event_id=row.event_id,
        trigger_version=row.trigger_version,
        status=status,
        last_error=text,
        run_id=None,
        workflow_definition_id=_NO_DEFINITION,
        correlation_id=event.correlation_id,
        parameters="{}",
        concurrency_key=row.concurrency_key,
        retry_state="scheduled" if is_waiting else "cancelled",
        next_attempt_at=facts.now + UNREADABLE if is_waiting else None,
        retry_attempts=row.retry_attempts,
        reason=reason,
        metadata={"reason": reason, "message": text},
        source=event.source,
    )
