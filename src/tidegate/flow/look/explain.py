"""Explain: why an event, a delivery or a run is where it is: one sentence, what it waits for and until when, and every
decision about it, in order.

The facts are read here, once; `story`, `why`, `why_run`, `waiting_steps` and `near` turn them into the answer.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal, NamedTuple

import msgspec

from tidegate.errors import Conflict, FieldError, NotFound
from tidegate.flow.decide.budgets import BUDGET
from tidegate.flow.look import budgets, lineage, story, waiting_steps
from tidegate.flow.look.near import look_up
from tidegate.flow.look.near.look_up import MaySee
from tidegate.flow.look.story import Decision, Outcome, StoryFacts, Told
from tidegate.flow.look.waiting_steps import AwaitedChildren
from tidegate.flow.look.why import ALIVE_MS, NAMED, Why
from tidegate.model.event import Event
from tidegate.model.ids import DeliveryId, EventId, RunId, StepId
from tidegate.model.run import Run, Step
from tidegate.store import (
    circumstances,
    decisions,
    deliveries,
    events,
    ingress_retries,
    refusals,
    runs,
    steps,
    windows,
    workers,
)
from tidegate.store.circumstances import BudgetWait, EventCircumstances
from tidegate.store.db import Connection
from tidegate.store.deliveries import EventDelivery
from tidegate.store.refusals import Refusal
from tidegate.store.windows import WindowFacts
from tidegate.store.workers import WorkerRecord

MAX_RUNS = 500
# How many of the runs that hold a slot are read.
MAX_HOLDERS = 5
# Of the runs that wait for children, this many are looked at with their first child, and its first child, this deep.
MAX_PARENTS, MAX_DEPTH = 5, 3

SubjectKind = Literal["event", "run", "delivery", "refusal"]


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """Why something is where it is. `summary` is one sentence; `waits_for` is null when it waits for nothing, `until`
    when the time cannot be known. Of several outcomes, these are of the one that continues first. `caused_by_run_id` is
    the run that published the event, `caused_by_event_id` that run's event."""

    kind: SubjectKind
    id: str
    event_id: EventId | None
    external_id: str | None
    type: str | None
    source: str | None
    correlation_id: str | None
    summary: str
    waits_for: str | None
    until: datetime | None
    outcomes: list[Outcome]
    decisions: list[Decision]
    caused_by_run_id: RunId | None = None
    caused_by_event_id: EventId | None = None


class Subject(NamedTuple):
    """What an id stands for: an event, perhaps one delivery or run of it; or refused requests only."""

    kind: SubjectKind
    event: Event | None
    run: Run | None = None
    delivery_id: DeliveryId | None = None
    refused: Sequence[Refusal] = ()


async def find_event(connection: Connection, event_id: str) -> Event:
    """The event by our id or the producer's. NotFound; Conflict names the candidates when several sources share it."""
    return only_one(event_id, await events.find(connection, event_id))


def only_one(event_id: str, found: list[Event]) -> Event:
    """The one event that was found by an id."""
    if not found:
        raise NotFound(f"no event {event_id!r}")
    if len(found) > 1:
        raise Conflict(
            f"{event_id!r} is the id of {len(found)} events of different sources; use that of Tidegate instead",
            [FieldError("id", f"{event.id} is from {event.source}") for event in found],
        )
    return found[0]


def _everything(_: str | None) -> bool:
    return True


async def explain(connection: Connection, event_id: str, may_see: MaySee = _everything) -> Explanation:
    """Why an event is where it is, by our id or the producer's."""
    event = await find_event(connection, event_id)
    refused = await refusals.find(connection, event.external_id) if event.external_id else []
    return await _explained(connection, Subject("event", event, refused=_of_source(refused, event.source)), may_see)


async def explain_any(connection: Connection, given: str, may_see: MaySee = _everything) -> Explanation:
    """The same for the id of an event, a run or a delivery, or a producer's id. NotFound; Conflict names the events of
    several sources that share a producer's id."""
    return await _explained(connection, await _find(connection, given, may_see), may_see)


async def _find(connection: Connection, given: str, may_see: MaySee) -> Subject:
    found = [event for event in await events.find(connection, given) if may_see(event.source)]
    if found:
        event = only_one(given, found)
        refused = await refusals.find(connection, event.external_id) if event.external_id else []
        return Subject("event", event, refused=_of_source(refused, event.source))
    own = _as_uuid(given)
    run = await runs.get(connection, RunId(own)) if own else None
    if run is not None:
        of = await events.get_many(connection, [run.event_id]) if run.event_id else {}
        subject = Subject("run", of.get(run.event_id) if run.event_id else None, run, run.delivery_id)
    elif own is not None and (event_id := await circumstances.event_of_delivery(connection, own)) is not None:
        of = await events.get_many(connection, [event_id])
        subject = Subject("delivery", of.get(event_id), None, DeliveryId(own))
    else:
        refused = [one for one in await refusals.find(connection, given) if may_see(one.source)]
        if not refused:
            raise NotFound(
                f"no event, run or delivery {given[:200]!r}, and no refused request with that id (one that was too "
                "large, or no JSON, is not kept)"
            )
        return Subject("refusal", None, refused=refused)
    if not may_see(subject.event.source if subject.event else None):
        raise NotFound(f"no event, run or delivery {given[:200]!r}")
    return subject


def _of_source(refused: Sequence[Refusal], source: str) -> list[Refusal]:
    return [one for one in refused if one.source in (source, None)]


def _as_uuid(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


async def _explained(connection: Connection, subject: Subject, may_see: MaySee) -> Explanation:
    if subject.kind == "refusal":
        return _refused(subject.refused)
    told = story.tell(facts := await _facts(connection, subject, may_see, MAX_DEPTH))
    run, event = subject.run, subject.event
    if run is not None:
        told = story.only(told, run_id=run.id)
    elif subject.delivery_id is not None:
        told = story.only(told, delivery_id=subject.delivery_id)
    if (shown := run or _only_run(told, facts)) is not None:
        of_run = await steps.list_of_run(connection, shown.id)
        told = story.with_steps(told, of_run, shown)
        near = await look_up.nearly_wakes(connection, shown, of_run, may_see)
        told = told._replace(lines=[*told.lines, *near])
    summary, waits_for, until = _answer(told, facts)
    caused_by = lineage.cause_of(event) if event else (None, None)
    return Explanation(
        kind=subject.kind,
        id=str(run.id if run else subject.delivery_id or (event.id if event else "")),
        event_id=event.id if event else None,
        external_id=event.external_id if event else None,
        type=event.type if event else None,
        source=event.source if event else None,
        correlation_id=event.correlation_id if event else run.correlation_id if run else None,
        summary=summary,
        waits_for=waits_for,
        until=until,
        outcomes=told.outcomes,
        decisions=story.in_order(told.lines),
        caused_by_run_id=caused_by[0],
        caused_by_event_id=caused_by[1],
    )


def _only_run(told: Told, facts: StoryFacts) -> Run | None:
    """The run that an event or delivery is about, if it is one, or the only one that has not ended; that of another
    event is not."""
    mine = {one.run_id for one in told.outcomes}
    found = [run for run in facts.runs if run.id in mine]
    if len(found) > 1:
        found = [run for run in found if run.status in ("pending", "running")]
    is_own = len(found) == 1 and facts.event is not None and found[0].event_id == facts.event.id
    return found[0] if is_own else None


def _answer(told: Told, facts: StoryFacts) -> tuple[str, str | None, datetime | None]:
    """The summary, what is waited for, and until when."""
    waits = [line for line in told.lines if line.stage == "wait" and line.reason]
    near = [f"near miss: {line.reason}" for line in waits if line.decision == "near_miss"][:NAMED]
    met = [line.reason or "" for line in waits if line.decision != "near_miss"]
    if met and not told.outcomes:
        return "; ".join(met), None, facts.around.replay_at
    if told.outcomes:
        waiting = [one for one in told.outcomes if one.waits_for is not None]
        # The one that continues first; among those whose time is unknown, the first.
        waiting.sort(key=lambda one: (one.until is None, one.until or facts.now))
        first = waiting[0] if waiting else None
        said = "; ".join([_summary(told.outcomes), *met, *near])
        if told.event is not None:  # it is decided again, beside what came of it before
            return f"{told.event.text}; {said}", told.event.waits_for, told.event.until
        if first is None and told.outcomes:
            return said, None, next((one.until for one in told.outcomes if one.until), None)
        return said, first.waits_for if first else None, first.until if first else None
    if told.event is not None:
        return told.event.text, told.event.waits_for, told.event.until
    return "; ".join([_nothing(told.lines), *near]), None, facts.around.replay_at


def _summary(outcomes: Sequence[Outcome]) -> str:
    """What became of the event for each trigger; with the trigger's name if several of a workflow took it."""
    of = Counter(workflow for workflow, _ in {(one.workflow, one.trigger) for one in outcomes})
    return "; ".join(
        f"{one.workflow}/{one.trigger} {one.summary}" if of[one.workflow] > 1 else f"{one.workflow} {one.summary}"
        for one in outcomes
    )


def _nothing(lines: Sequence[Decision]) -> str:
    """Why an event launched nothing."""
    why = [line for line in lines if line.stage == "match"]
    told = [f"{line.workflow}/{line.trigger}: {line.reason}" for line in why if line.decision == "filtered"]
    if not told:
        told = [line.reason or "" for line in why if line.decision == "no_trigger"]
    told += [f"near miss {line.workflow}/{line.trigger}: {line.reason}" for line in why if line.decision == "near_miss"]
    return f"launched nothing: {'; '.join(told)}"


def _refused(refused: Sequence[Refusal]) -> Explanation:
    last = refused[-1]
    times = f" (refused {len(refused)} times)" if len(refused) > 1 else ""
    return Explanation(
        kind="refusal", id=last.external_id or "", event_id=None, external_id=last.external_id, type=last.type,
        source=last.source, correlation_id=None, waits_for=None, until=None, outcomes=[],
        summary=f"refused with {last.status}, nothing was stored: {last.reason}{times}",
        decisions=[story.refused(one) for one in refused],
    )  # fmt: skip


def _seen(worker: WorkerRecord, may_see: MaySee) -> WorkerRecord:
    """A worker, without the workflows of the runs that may not be seen (`why.ANOTHERS`)."""
    executing = [one if may_see(one.source) else msgspec.structs.replace(one, workflow="") for one in worker.executing]
    return msgspec.structs.replace(worker, executing=executing)


async def _awaited(
    connection: Connection, of_runs: Mapping[RunId, Sequence[Step]], may_see: MaySee, depth: int
) -> dict[RunId, AwaitedChildren]:
    """The children that the runs wait for, if children are what they wait for first."""
    first = {run_id: waiting[0] for run_id, of_run in of_runs.items() if (waiting := waiting_steps.waiting(of_run))}
    parents = [(run_id, step) for run_id, step in first.items() if step.kind in waiting_steps.ENDED_BY_OTHERS]
    found = {}
    for run_id, step in parents[:MAX_PARENTS] if depth else ():
        children = await circumstances.children_of(connection, step.id)
        event_id = children.event_id
        event = (await events.get_many(connection, [event_id])).get(event_id) if event_id else None
        if event is None or children.run_id is None or not may_see(event.source):
            continue
        subject = Subject("delivery", event, delivery_id=DeliveryId(children.run_id))
        told = story.tell(await _facts(connection, subject, may_see, depth - 1))
        outcome = next(iter(story.only(told, delivery_id=subject.delivery_id).outcomes), None)
        why = Why(outcome.state, outcome.summary) if outcome else told.event
        found[run_id] = AwaitedChildren(children, why)
    return found


async def _budget_waits(
    connection: Connection, of_runs: Mapping[RunId, Sequence[Step]], may_see: MaySee
) -> dict[StepId, BudgetWait]:
    """Which budgets hold the steps that wait for one, where they stand, and until when."""
    waiting = [step for of_run in of_runs.values() for step in waiting_steps.waiting(of_run)]
    ids = [step.id for step in waiting if step.retry_metadata.get("reason") == BUDGET]
    return await budgets.waits(connection, ids, may_see)


async def _leaders(
    connection: Connection,
    delivered: Sequence[EventDelivery],
    of: Mapping[DeliveryId, WindowFacts],
    may_see: MaySee,
    depth: int,
) -> dict[DeliveryId, Why]:
    """For what the first delivery waits of each closed window that no run has taken, by the others' ids."""
    mine = [one.delivery for one in delivered if one.delivery.status == "collected" and one.delivery.id in of]
    closed = [(one.id, of[one.id].id) for one in mine if one.workflow_run_id is None and of[one.id].state == "closed"]
    found = {}
    for delivery_id, leader in [pair for pair in closed if pair[0] != pair[1]][:MAX_PARENTS] if depth else ():
        event_id = await circumstances.event_of_delivery(connection, leader)
        event = (await events.get_many(connection, [event_id])).get(event_id) if event_id else None
        if event is None or not may_see(event.source):
            continue
        subject = Subject("delivery", event, delivery_id=leader)
        told = story.only(story.tell(await _facts(connection, subject, may_see, depth - 1)), delivery_id=leader)
        for one in told.outcomes[:1]:
            found[delivery_id] = Why(one.state, one.summary, one.waits_for, one.until)
    return found


async def _window_runs(
    connection: Connection, delivered: Sequence[EventDelivery], known: Sequence[Run], may_see: MaySee
) -> list[Run]:
    """The runs that took the windows in which the event is collected, if they are of another event that may be seen."""
    wanted = {one.delivery.workflow_run_id for one in delivered if one.delivery.status == "collected"} - {None}
    found = [await runs.get(connection, run_id) for run_id in wanted - {run.id for run in known} if run_id is not None]
    taken = [run for run in found if run is not None]
    of = await events.get_many(connection, [run.event_id for run in taken if run.event_id is not None])
    return [run for run in taken if run.event_id in of and may_see(of[run.event_id].source)]


async def _facts(connection: Connection, subject: Subject, may_see: MaySee, depth: int) -> StoryFacts:
    """Everything that the answer depends on."""
    event, run = subject.event, subject.run
    alive = [_seen(worker, may_see) for worker in await workers.list_all(connection, ALIVE_MS)]
    if event is None:
        found = [run] if run is not None else []
        steps_of = {one.id: await steps.list_of_run(connection, one.id) for one in found}
        return StoryFacts(
            now := await circumstances.now(connection), None, EventCircumstances(now=now), runs=found, workers=alive,
            around_runs=await budgets.of_runs(connection, [one.id for one in found], may_see),
            steps=steps_of,
            letters=await circumstances.letters(connection, None, [one.id for one in found]),
            published={one.id: await lineage.published_by(connection, one) for one in found},
            awaited=await _awaited(connection, steps_of, may_see, depth),
            budgets=await _budget_waits(connection, steps_of, may_see),
        )  # fmt: skip
    around = await circumstances.of_event(connection, event.id)
    retry = await ingress_retries.get(connection, event.id)
    lines = await look_up.kept_for(connection, await decisions.list_of_event(connection, event.id), may_see)
    delivered = await deliveries.list_of_event(connection, event.id)
    waiting = await circumstances.of_deliveries(
        connection, [one.delivery.id for one in delivered if one.delivery.retry_state != "none"]
    )
    of_budgets = [one.delivery.id for one in delivered if one.delivery.reason == "budget"]
    for delivery_id, held in (await budgets.waits(connection, of_budgets, may_see)).items():
        waiting[delivery_id] = msgspec.structs.replace(waiting[delivery_id], budget=held)
    holders = {
        one.delivery.id: [
            holder if may_see(holder.source) else msgspec.structs.replace(holder, workflow="")
            for holder in await circumstances.slot_holders(connection, one.delivery.id, MAX_HOLDERS)
        ]
        for one in delivered
        if one.delivery.retry_state == "scheduled" and one.delivery.reason == "concurrency"
    }
    found = await runs.list_page(connection, event_id=event.id, limit=MAX_RUNS)
    found += await _window_runs(connection, delivered, found, may_see)
    of_steps = await steps.list_of_runs(connection, [one.id for one in found if one.status in ("pending", "running")])
    steps_of = {one.id: [step for step in of_steps if step.workflow_run_id == one.id] for one in found}
    of_windows = await windows.of_deliveries(connection, [one.delivery.id for one in delivered])
    facts = StoryFacts(
        around.now, event, around, retry, lines, delivered, waiting, holders, found,
        await budgets.of_runs(connection, [one.id for one in found], may_see),
        steps_of, alive, await circumstances.letters(connection, event.id), subject.refused,
        published={one.id: await lineage.published_by(connection, one) for one in found},
        awaited=await _awaited(connection, steps_of, may_see, depth),
        windows=of_windows, leaders=await _leaders(connection, delivered, of_windows, may_see, depth),
        budgets=await _budget_waits(connection, steps_of, may_see),
    )  # fmt: skip
    is_decided = not around.is_undecided and (retry is None or retry.retry_state == "completed")
    if subject.kind != "event" or not is_decided:
        return facts
    filtered, misses = await look_up.not_fired(connection, event, facts)
    has_met = any(line.stage == "wait" for line in lines)
    near = [] if has_met else await look_up.nearly_woken(connection, event, may_see)
    return facts._replace(filtered=filtered, misses=misses, near_waits=near)
