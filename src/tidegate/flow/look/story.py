"""Story: what was decided about one event, and what became of it, as lines in order. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from tidegate.errors import first_line
from tidegate.flow.look.near.triggers import NearMiss
from tidegate.flow.look.waiting_steps import AwaitedChildren
from tidegate.flow.look.why import Why, moment, why_delivery, why_event
from tidegate.flow.look.why_run import RunFacts, why_run
from tidegate.model.approval import decided_text
from tidegate.model.event import Event
from tidegate.model.ids import DeliveryId, RunId, StepId, TriggerId
from tidegate.model.ingress_retry import IngressRetry
from tidegate.model.priority import share_of_event
from tidegate.model.run import INTERNAL_STEPS, Run, Step
from tidegate.store.circumstances import (
    BudgetWait,
    DeliveryCircumstances,
    EventCircumstances,
    RunCircumstances,
    SlotHolder,
    StoryLetter,
)
from tidegate.store.decisions import NewDecision
from tidegate.store.deliveries import EventDelivery
from tidegate.store.refusals import Refusal
from tidegate.store.windows import WindowFacts
from tidegate.store.workers import WorkerRecord


class Decision(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One decision. `waits_for` is null when it waits for nothing; `until` is when it continues, null when that cannot
    be known. `run_ids` are the waiting runs that the event woke or cancelled (stage `wait`), at most 100. `kind` is
    that of the step (stage `step`); the `until` of a `wait` or `sleep` is its end, that of a `step` its next attempt.
    """

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
    run_ids: list[RunId] = []
    kind: str | None = None


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the event for one trigger: the state in one word, and a sentence. `waits_for` is null when it
    waits for nothing, `until` when the time cannot be known."""

    workflow: str
    trigger: str | None
    delivery_id: DeliveryId | None
    run_id: RunId | None
    state: str
    summary: str
    waits_for: str | None
    until: datetime | None


class StoryFacts(NamedTuple):
    """What was read about an event, or about a run without one, at one moment of the database's clock."""

    now: datetime
    event: Event | None
    around: EventCircumstances
    retry: IngressRetry | None = None
    lines: Sequence[NewDecision] = ()
    deliveries: Sequence[EventDelivery] = ()
    waiting: Mapping[DeliveryId, DeliveryCircumstances] = MappingProxyType({})
    holders: Mapping[DeliveryId, list[SlotHolder]] = MappingProxyType({})
    runs: Sequence[Run] = ()
    around_runs: Mapping[RunId, RunCircumstances] = MappingProxyType({})
    steps: Mapping[RunId, list[Step]] = MappingProxyType({})
    workers: Sequence[WorkerRecord] = ()
    letters: Sequence[StoryLetter] = ()
    refusals: Sequence[Refusal] = ()
    filtered: Sequence[Decision] = ()
    misses: Sequence[NearMiss] = ()
    near_waits: Sequence[Decision] = ()
    published: Mapping[RunId, Sequence[tuple[datetime | None, str]]] = MappingProxyType({})
    awaited: Mapping[RunId, AwaitedChildren] = MappingProxyType({})
    windows: Mapping[DeliveryId, WindowFacts] = MappingProxyType({})
    leaders: Mapping[DeliveryId, Why] = MappingProxyType({})
    budgets: Mapping[StepId, BudgetWait] = MappingProxyType({})


class Told(NamedTuple):
    """A story: its lines, what became of the event for each trigger, and why the event itself waits or ended."""

    lines: list[Decision]
    outcomes: list[Outcome]
    event: Why | None


def tell(facts: StoryFacts) -> Told:
    """The story of an event."""
    event = facts.event
    if event is None:
        return Told(*_runs(facts, facts.runs), None)
    story = [refused(one) for one in facts.refusals if one.at < event.received_at]
    with_priority = None if event.priority is None else f"with {share_of_event(event.priority)}"
    story.append(Decision(at=event.received_at, stage="ingest", decision="accepted", reason=with_priority))
    gate = [_recorded(line) for line in facts.lines if line.stage not in ("match", "deliver", "step", "run", "wait")]
    why = why_event(facts.retry, facts.around, facts.letters, facts.workers)
    outcomes: list[Outcome] = []
    if why is None:
        story += gate or [Decision(at=None, stage="gate", decision="allowed")]
        delivered, outcomes = _delivered(facts)
        story += delivered
    elif facts.retry is not None and not facts.around.is_undecided and gate:
        is_held = facts.retry.retry_state == "scheduled"
        now = {"until": why.until, "waits_for": why.waits_for} if is_held else {}  # of the plan as it is now
        story += [*gate[:-1], msgspec.structs.replace(gate[-1], **now)]
        delivered, outcomes = _delivered(facts) if facts.deliveries else ([], [])
        story += delivered
    elif why.state == "dead_letter":
        story.append(Decision(at=None, stage="dispatch", decision="dead_letter", reason=why.text))
    else:
        story += gate
        story.append(Decision(at=None, stage="gate", decision="waiting", reason=why.text, waits_for=why.waits_for))
    if facts.around.replay_at is not None:
        story.append(
            Decision(at=None, stage="gate", decision="replay_scheduled", until=facts.around.replay_at,
                     actor=facts.around.replay_by)
        )  # fmt: skip
    later = [refused(one) for one in facts.refusals if one.at >= event.received_at]
    return Told([*story, *later], outcomes, why)


def refused(one: Refusal) -> Decision:
    """A publish request that was refused."""
    return Decision(at=one.at, stage="ingest", decision="refused", reason=f"{one.status}: {one.reason}")


def only(told: Told, *, run_id: RunId | None = None, delivery_id: uuid.UUID | None = None) -> Told:
    """The part of a story that is about one run or delivery, with what happened to the event before."""
    mine = [one for one in told.outcomes if run_id == one.run_id or (run_id is None and one.delivery_id == delivery_id)]
    of = {(one.workflow, one.trigger) for one in mine}
    lines = [
        line
        for line in told.lines
        if line.workflow is None
        or (line.stage not in ("match", "run", "step") and (line.workflow, line.trigger) in of)
        or (line.stage in ("run", "step") and line.run_id in (run_id, None) and run_id is not None)
    ]
    return Told(lines, mine, None)


def with_steps(told: Told, steps: Iterable[Step], run: Run) -> Told:
    """The story of a run with its steps, before the line that says how it is. A step that an operator cancelled has its
    line already, which says who."""
    cancelled = {line.reason for line in told.lines if (line.stage, line.decision) == ("step", "cancelled")}
    place = max(
        (n for n, line in enumerate(told.lines) if (line.stage, line.decision) == ("run", run.status)), default=0
    )
    lines = [
        Decision(
            at=step.updated_at, stage="step", decision="timed_out" if step.is_timed_out else step.status,
            workflow=run.workflow, run_id=run.id,
            reason=": ".join(filter(None, (step.name, _said(step)))),
            until=step.next_attempt_at, attempt=step.retry_attempts or None, kind=step.kind,
        )
        for step in steps
        if not step.name.startswith(INTERNAL_STEPS)
        and not (step.status == "cancelled" and f"step {step.name!r}" in cancelled)
    ]  # fmt: skip
    return told._replace(lines=[*told.lines[:place], *lines, *told.lines[place:]])


def _said(step: Step) -> str | None:
    """Why a step failed, or what was decided."""
    if step.error:
        return first_line(step.error)
    at = moment(step.updated_at) if step.updated_at else "its end"
    return decided_text(step.retry_metadata, step.result, is_timed_out=step.is_timed_out, at=at)


def _delivered(facts: StoryFacts) -> tuple[list[Decision], list[Outcome]]:
    story: list[Decision] = []
    outcomes: list[Outcome] = []
    names = {one.delivery.trigger_id: (one.trigger_name, one.workflow) for one in facts.deliveries}
    told: set[RunId] = set()
    for delivery, trigger_name, workflow in facts.deliveries:
        earlier = [line for line in facts.lines if line.stage == "deliver" and line.trigger_id == delivery.trigger_id]
        last = earlier.pop() if earlier and earlier[-1].decision in (delivery.status, "rescheduled") else None
        story += [_named(line, names) for line in earlier]
        why = why_delivery(
            delivery, facts.waiting.get(delivery.id), facts.holders.get(delivery.id, ()), facts.letters,
            last.actor if last else None, facts.windows.get(delivery.id), facts.leaders.get(delivery.id),
        )  # fmt: skip
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
                until=why.until,
                waits_for=why.waits_for,
                attempt=delivery.retry_attempts or None,
            )
        )
        mine = [run for run in facts.runs if delivery.status == "launched" and delivery.id in (run.id, run.delivery_id)]
        mine += [run for run in facts.runs if delivery.status == "collected" and run.id == delivery.workflow_run_id]
        mine += [run for run in facts.runs if run.rerun_of is not None and _root(run, facts.runs) == delivery.id]
        if mine:
            told |= {run.id for run in mine}
            lines, found = _runs(facts, mine, names, delivery.trigger_id)
            story += lines
            outcomes += found
        else:
            outcomes.append(_outcome(why, workflow, trigger_name, delivery.id, None))
    rest, found = _runs(facts, [run for run in facts.runs if run.id not in told], names)
    met = [_recorded(line) for line in facts.lines if line.stage == "wait"]  # the runs that it woke or cancelled
    story += [*rest, *met, *facts.filtered]
    story += [
        Decision(at=None, stage="match", decision="near_miss", reason=miss.reason, workflow=miss.trigger.workflow,
                 trigger_id=miss.trigger.id, trigger=miss.trigger.name)
        for miss in facts.misses
    ]  # fmt: skip
    if not story or (not outcomes and not found and not met and not facts.filtered and facts.event is not None):
        event = facts.event
        assert event is not None, "a story without an event has a run"
        reason = f"no active trigger matches events of type {event.type} from {event.source}"
        story.insert(0, Decision(at=None, stage="match", decision="no_trigger", reason=reason))
    return [*story, *facts.near_waits], [*outcomes, *found]


def _root(run: Run, runs: Sequence[Run]) -> RunId | None:
    """The first of the runs that a run repeats."""
    by_id = {one.id: one for one in runs}
    root = run.rerun_of
    while root in by_id and by_id[root].rerun_of is not None:
        root = by_id[root].rerun_of
    return root


def _runs(
    facts: StoryFacts,
    runs: Sequence[Run],
    names: dict[TriggerId, tuple[str, str]] | None = None,
    trigger_id: TriggerId | None = None,
) -> tuple[list[Decision], list[Outcome]]:
    story: list[Decision] = []
    outcomes: list[Outcome] = []
    for run in sorted(runs, key=lambda one: (one.created_at, one.id)):
        around = facts.around_runs[run.id]
        recorded = [line for line in facts.lines if _is_about(line, run, trigger_id)]
        if run.rerun_of is not None:
            story.append(
                Decision(at=run.created_at, stage="run", decision="rerun", reason=f"repeats run {run.rerun_of}",
                         workflow=run.workflow, trigger_id=around.trigger_id, trigger=around.trigger, run_id=run.id)
            )  # fmt: skip
        story += [msgspec.structs.replace(_named(line, names or {}), run_id=run.id) for line in recorded]
        of_run = facts.steps.get(run.id, ())
        awaited = facts.awaited.get(run.id)
        why = why_run(RunFacts(facts.now, run, around, of_run, facts.workers, facts.letters, awaited, facts.budgets))
        story.append(
            Decision(
                at=run.finished_at or around.updated_at,
                stage="run",
                decision=run.status,
                reason=_reason(run, why),
                until=why.until,
                waits_for=why.waits_for,
                workflow=run.workflow,
                trigger_id=around.trigger_id,
                trigger=around.trigger,
                run_id=run.id,
            )
        )
        story += [
            Decision(at=at, stage="run", decision="published", reason=text, workflow=run.workflow, run_id=run.id,
                     trigger_id=around.trigger_id, trigger=around.trigger)
            for at, text in facts.published.get(run.id, ())
        ]  # fmt: skip
        outcomes.append(_outcome(why, run.workflow, around.trigger, run.delivery_id, run.id))
    return story, outcomes


def _is_about(line: NewDecision, run: Run, trigger_id: TriggerId | None) -> bool:
    """Whether a decision is about a run: it says so, or else is about the first run of its trigger."""
    if line.stage not in ("step", "run"):
        return False
    named = line.detail.get("run_id") if isinstance(line.detail, dict) else None
    return named == str(run.id) if named else line.trigger_id == trigger_id and run.rerun_of is None


def in_order(lines: Sequence[Decision]) -> list[Decision]:
    """The lines in the order of their times. One without a time stays behind the line before it; how a run is now comes
    last."""
    keyed, place = [], (0, 0.0)
    for line in lines:
        if line.stage == "run" and line.decision in ("pending", "running"):
            place = (1, 0.0)
        elif line.at is not None:
            place = (0, line.at.timestamp())
        keyed.append((place, line))
    return [line for _, line in sorted(keyed, key=lambda one: one[0])]


def _reason(run: Run, why: Why) -> str | None:
    """Why a run is in its state; its dead letter is told in the summary."""
    if run.status == "succeeded":
        return None
    return first_line(run.error) if run.status == "failed" and run.error else why.text.removeprefix(f"{run.status}: ")


def _outcome(
    why: Why, workflow: str, trigger: str | None, delivery_id: DeliveryId | None, run_id: RunId | None
) -> Outcome:
    return Outcome(
        workflow=workflow, trigger=trigger, delivery_id=delivery_id, run_id=run_id, state=why.state, summary=why.text,
        waits_for=why.waits_for, until=why.until,
    )  # fmt: skip


def _named(line: NewDecision, names: dict[TriggerId, tuple[str, str]]) -> Decision:
    name, workflow = names.get(line.trigger_id, (None, None)) if line.trigger_id else (None, None)
    return msgspec.structs.replace(_recorded(line), trigger_id=line.trigger_id, trigger=name, workflow=workflow)


def _recorded(line: NewDecision) -> Decision:
    return Decision(
        at=line.at,
        stage=line.stage,
        decision=line.decision,
        reason=line.reason,
        until=line.until,
        attempt=line.attempt,
        actor=line.actor,
        run_ids=[RunId(uuid.UUID(one["run_id"])) for one in line.detail or ()] if line.stage == "wait" else [],
    )
