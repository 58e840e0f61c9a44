"""Explain: every decision about one event, in order: what was decided, when, and why."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Collection
from datetime import datetime
from typing import Any, TypeGuard

import msgspec

from tidegate.errors import Conflict, FieldError, NotFound, first_line
from tidegate.flow.decide.match import Matcher
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.model.budget import OverBudget
from tidegate.model.delivery import Delivery
from tidegate.model.event import Event
from tidegate.model.ids import DeliveryId, EventId, RunId, TriggerId
from tidegate.model.ingress_retry import IngressRetry
from tidegate.model.run import Run
from tidegate.model.trigger import CompiledTrigger
from tidegate.store import decisions, deliveries, events, ingress_retries, runs, sources, trigger_gates, triggers
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision. `until` is the next attempt; with `waits_for`, the time at which it continues is unknown."""

    at: datetime | None
    stage: str
    decision: str
    reason: str | None = None
    workflow: str | None = None
    trigger_id: TriggerId | None = None
    trigger: str | None = None
    delivery_id: DeliveryId | None = None
    run_id: RunId | None = None
    until: datetime | None = None
    waits_for: str | None = None
    attempt: int | None = None
    actor: str | None = None


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Every decision about an event."""

    event_id: EventId
    external_id: str | None
    type: str
    source: str
    correlation_id: str
    summary: str
    decisions: list[Decision]


async def find_event(connection: Connection, event_id: str) -> Event:
    """The event by our id or the producer's. NotFound; Conflict names the candidates when several sources share it."""
    return only_one(event_id, await events.find(connection, event_id))


def only_one(event_id: str, found: list[Event]) -> Event:
    """The one event that was found by an id."""
    if not found:
        raise NotFound(f"no event {event_id!r}")
    if len(found) > 1:
        raise Conflict(
            f"{event_id!r} is the id of {len(found)} events of different sources; use our id instead",
            [FieldError("id", f"{event.id} is from {event.source}") for event in found],
        )
    return found[0]


async def explain(connection: Connection, event_id: str) -> Explanation:
    """Every decision about the event, in order."""
    event = await find_event(connection, event_id)
    story = [Decision(at=event.received_at, stage="ingest", decision="accepted")]
    undecided, dead_reason = await events.is_waiting(connection, event.id)
    retry = await ingress_retries.get(connection, event.id)
    if undecided:
        story.append(Decision(at=None, stage="gate", decision="waiting", reason="waiting in the inbox for a worker"))
    elif retry is not None:
        lines = await decisions.list_of_event(connection, event.id)
        story += [_recorded_line(line) for line in lines if line.stage not in ("match", "deliver", "step")]
        if retry.retry_state == "completed":
            story += await _delivered(connection, event)
    elif dead_reason is not None:
        story.append(Decision(at=None, stage="dispatch", decision="dead_letter", reason=dead_reason))
    else:
        story.append(Decision(at=None, stage="gate", decision="allowed"))
        story += await _delivered(connection, event)
    return Explanation(
        event_id=event.id,
        external_id=event.external_id,
        type=event.type,
        source=event.source,
        correlation_id=event.correlation_id,
        summary=await _held_summary(connection, retry) if _waits(retry) else _summary(story),
        decisions=story,
    )


async def _delivered(connection: Connection, event: Event) -> list[Decision]:
    story = []
    decided = await deliveries.list_of_event(connection, event.id)
    names: dict[TriggerId, tuple[str, str]] = {
        delivery.trigger_id: (trigger_name, workflow) for delivery, trigger_name, workflow in decided
    }
    lines = await decisions.list_of_event(connection, event.id)
    found_runs = {run.id: run for run in await runs.list_page(connection, event_id=event.id, limit=500)}
    for delivery, trigger_name, workflow in decided:
        earlier = [line for line in lines if line.stage == "deliver" and line.trigger_id == delivery.trigger_id]
        last = earlier.pop() if earlier and earlier[-1].decision in (delivery.status, "rescheduled") else None
        story += [_delivery_line(line, names) for line in earlier]
        story.append(
            Decision(
                at=last.at if last else delivery.updated_at if earlier else delivery.created_at,
                actor=last.actor if last else None,
                stage="deliver",
                decision=delivery.status,
                reason=delivery.last_error,
                workflow=workflow,
                trigger_id=delivery.trigger_id,
                trigger=trigger_name,
                delivery_id=delivery.id,
                run_id=delivery.workflow_run_id,
                until=delivery.next_attempt_at,
                waits_for=await _waits_for(connection, delivery),
                attempt=delivery.retry_attempts or None,
            )
        )
        run = found_runs.get(delivery.workflow_run_id) if delivery.workflow_run_id else None
        if run:
            story += [
                msgspec.structs.replace(_delivery_line(line, names), run_id=run.id)
                for line in lines
                if line.stage == "step" and line.trigger_id == delivery.trigger_id
            ]
            story.append(_run_line(run, delivery.trigger_id, trigger_name))
    story += await _filtered(connection, event, known=names.keys(), lines=lines)
    if len(story) == 0:
        reason = f"no active trigger matches events of type {event.type} from {event.source}"
        story.append(Decision(at=None, stage="match", decision="no_trigger", reason=reason))
    return story


async def _waits_for(connection: Connection, delivery: Delivery) -> str | None:
    """What a delivery waits for when the time is unknown (the `eta_seconds` of its retry is null then)."""
    if delivery.retry_state != "scheduled":
        return None
    gate = await trigger_gates.get(connection, delivery.trigger_id)
    if gate is not None and gate.paused_at is not None and gate.paused_until is None:
        return "its trigger to be resumed"
    if gate is not None and gate.breaker_state == "half_open":
        return "the trial run to end"
    if delivery.reason == "source_paused" and delivery.source and await _needs_resuming(connection, delivery.source):
        return "its source to be resumed"
    return "a free slot" if delivery.reason == "concurrency" else None


async def _needs_resuming(connection: Connection, source: str) -> bool:
    """Whether the source is paused without an end time."""
    record = await sources.get(connection, source)
    return record is not None and record.paused_at is not None and record.paused_until is None


async def _filtered(
    connection: Connection, event: Event, *, known: Collection[TriggerId], lines: list[NewDecision]
) -> list[Decision]:
    """The triggers that the event did not fire: with the recorded reason, or else evaluated as they are now."""
    found = {
        (trigger_id := TriggerId(uuid.UUID(one["trigger_id"]))): _filtered_line(
            trigger_id, one["trigger"], one["workflow"], line.at, one["reason"]
        )
        for line in lines
        if line.stage == "match"
        for one in line.detail or []
    }
    index = await Matcher().at(connection, await triggers.registry_version(connection))
    envelope, time_slice = event.envelope(), TimeSlice()
    for compiled in index.candidates(event.type, event.source):
        trigger = compiled.trigger
        if trigger.id not in known and trigger.id not in found:
            text = _as_it_is_now(compiled, envelope)
            if time_slice.is_over:
                await time_slice.next()
            found[trigger.id] = _filtered_line(trigger.id, trigger.name, trigger.workflow, None, text)
    return list(found.values())


def _as_it_is_now(compiled: CompiledTrigger, envelope: dict[str, Any]) -> str:
    try:
        reason = compiled.reason(envelope)
    except OverBudget as exc:
        return str(exc)
    return reason or "it would match now: it was created or changed after the event was decided"


def _filtered_line(trigger_id: TriggerId, name: str, workflow: str, at: datetime | None, reason: str) -> Decision:
    return Decision(
        at=at, stage="match", decision="filtered", reason=reason, workflow=workflow, trigger_id=trigger_id, trigger=name
    )


def _delivery_line(line: NewDecision, names: dict[TriggerId, tuple[str, str]]) -> Decision:
    name, workflow = names.get(line.trigger_id, (None, None)) if line.trigger_id else (None, None)
    return msgspec.structs.replace(_recorded_line(line), trigger_id=line.trigger_id, trigger=name, workflow=workflow)


def _recorded_line(line: NewDecision) -> Decision:
    return Decision(
        at=line.at,
        stage=line.stage,
        decision=line.decision,
        reason=line.reason,
        until=line.until,
        attempt=line.attempt,
        actor=line.actor,
    )


def _run_line(run: Run, trigger_id: TriggerId, trigger: str) -> Decision:
    is_suspended = run.status == "pending" and run.attempts > 0
    return Decision(
        at=run.finished_at or run.started_at or run.created_at,
        stage="run",
        decision=run.status,
        reason=first_line(run.error) if run.error else _why_pending(run),
        until=run.next_attempt_at if is_suspended else None,
        workflow=run.workflow,
        trigger_id=trigger_id,
        trigger=trigger,
        run_id=run.id,
    )


def _why_pending(run: Run) -> str | None:
    if run.status != "pending":
        return None
    if run.attempts == 0:
        return "waits for a worker that has its code and a free slot"
    return run.warning or "suspended until its next step or timer is due"


def _waits(retry: IngressRetry | None) -> TypeGuard[IngressRetry]:
    return retry is not None and retry.retry_state == "scheduled"


async def _held_summary(connection: Connection, retry: IngressRetry) -> str:
    if await _needs_resuming(connection, retry.source):
        return f"held until its source is resumed: {retry.last_error}"
    assert retry.next_attempt_at is not None
    return f"held until {retry.next_attempt_at:%Y-%m-%d %H:%M:%S} UTC: {retry.last_error}"


def _summary(story: list[Decision]) -> str:
    """The state of the event in one line: its runs, then the deliveries without a run."""
    last = story[-1]
    shown = [line for line in story if line.stage == "run"]
    shown += [line for line in story if line.delivery_id is not None and line.decision != "launched"]
    if shown:
        triggers_of = Counter(workflow for workflow, _ in {(line.workflow, line.trigger_id) for line in shown})
        return "; ".join(_outcome(line, is_one_of_several=triggers_of[line.workflow] > 1) for line in shown)
    return f"{last.decision}: {last.reason}" if last.reason else last.decision


def _outcome(line: Decision, *, is_one_of_several: bool) -> str:
    """The state of a workflow for the event, with the trigger if several of its triggers matched."""
    what, whose = line.decision, f"{line.workflow}/{line.trigger}" if is_one_of_several else line.workflow
    if line.waits_for is not None:
        what = f"waits for {line.waits_for}"
    elif line.until is not None:
        what = f"waits until {line.until:%Y-%m-%d %H:%M:%S} UTC"
    return f"{whose} {what}: {line.reason}" if line.reason else f"{whose} {what}"
