"""Looks up what almost took an event, and what almost ended the waits of a run."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from tidegate.flow.decide.match import Matcher
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.flow.look.near import triggers as compare
from tidegate.flow.look.near import waits as sides
from tidegate.flow.look.near.triggers import NearMiss
from tidegate.flow.look.near.waits import WaitSide
from tidegate.flow.look.story import Decision, StoryFacts
from tidegate.flow.look.waiting_steps import awaited_events, kept_events, pattern_text
from tidegate.model.event import Event
from tidegate.model.ids import EventId, RunId, TriggerId
from tidegate.model.run import INTERNAL_STEPS, Run, Step
from tidegate.model.trigger import CompiledTrigger, Trigger
from tidegate.model.wait import CORRELATION, WaitPattern, contained, key_of, key_of_event, read_paths, value_in
from tidegate.model.work_limit import TooMuchWork
from tidegate.store import circumstances, decisions, events, near_waits, runs, steps, triggers, waits
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.store.near_waits import RunningWait

# Whether the caller may see what belongs to a source; None: it has no source.
MaySee = Callable[[str | None], bool]

# How many near misses of waits are named.
MOST = 5
# How many types that differ by a slip are looked up.
_MAX_ALIKE = 5
_DAY_MS = 86_400_000
_MISSING = object()


async def not_fired(connection: Connection, event: Event, facts: StoryFacts) -> tuple[list[Decision], list[NearMiss]]:
    """The triggers that the event did not fire, with the recorded reason, or else evaluated as they are now; and, if it
    launched nothing, those that it almost fired."""
    taken = {one.delivery.trigger_id for one in facts.deliveries}
    recorded = {
        (trigger_id := TriggerId(uuid.UUID(one["trigger_id"]))): _filtered(
            trigger_id, one["trigger"], one["workflow"], line.at, one["reason"]
        )
        for line in facts.lines
        if line.stage == "match"
        for one in line.detail or []
    }
    decided_at = _decided_at(event, facts)
    index = await Matcher().at(connection, await triggers.registry_version(connection))
    envelope, time_slice = event.envelope(), TimeSlice()
    filtered, misses = list(recorded.values()), list[NearMiss]()
    for compiled in index.candidates(event.type, event.source):
        trigger = compiled.trigger
        if trigger.id in taken:
            continue
        reason = _as_it_is_now(compiled, envelope)
        if reason is None and (miss := await _changed(connection, trigger, decided_at)) is not None:
            misses.append(miss)
        elif trigger.id not in recorded:
            text = reason or "it would match now, and did not when the event was decided"
            filtered.append(_filtered(trigger.id, trigger.name, trigger.workflow, None, text))
        if time_slice.is_over:
            await time_slice.next()
    if not facts.deliveries and not facts.runs:
        misses += await _near(connection, event, {*taken, *recorded, *(miss.trigger.id for miss in misses)}, time_slice)
    return filtered, compare.nearest(misses)


async def _changed(connection: Connection, trigger: Trigger, decided_at: datetime) -> NearMiss | None:
    earlier = await circumstances.version_at(connection, trigger.id, decided_at)
    return compare.changed_since(trigger, decided_at, earlier)


async def _near(
    connection: Connection, event: Event, known: Collection[TriggerId], time_slice: TimeSlice
) -> list[NearMiss]:
    found = []
    for one in await circumstances.known_triggers(connection):
        miss = compare.off_or_alike(event, one) if one.trigger.id not in known else None
        found += [miss] if miss is not None else []
        if time_slice.is_over:
            await time_slice.next()
    return found


def _decided_at(event: Event, facts: StoryFacts) -> datetime:
    """When the event was decided, as far as that is recorded: an event without any trigger leaves no other trace than
    its receipt."""
    times = [line.at for line in facts.lines if line.at is not None]
    times += [one.delivery.created_at for one in facts.deliveries if one.delivery.created_at is not None]
    return max(times) if times else event.received_at


def _as_it_is_now(compiled: CompiledTrigger, envelope: dict[str, Any]) -> str | None:
    try:
        return compiled.reason(envelope)
    except TooMuchWork as exc:
        return str(exc)


def _filtered(trigger_id: TriggerId, name: str, workflow: str, at: datetime | None, reason: str) -> Decision:
    return Decision(
        at=at, stage="match", decision="filtered", reason=reason, workflow=workflow, trigger_id=trigger_id, trigger=name
    )


async def nearly_woken(connection: Connection, event: Event, may_see: MaySee) -> list[Decision]:
    """The runs that wait for almost this event, and in what it differs."""
    alike = [one for one in await near_waits.awaited_types(connection) if sides.is_alike_type(one, event.type)]
    path_sets = await waits.list_path_sets(connection, {event.type, *alike[:_MAX_ALIKE]})
    keys: dict[tuple[str, str, str], None] = {}
    lacking: list[tuple[str, str]] = []
    for event_type, paths in ((one, paths) for one, found in path_sets.items() for paths in found):
        key = key_of_event(event, paths)
        if key is not None:
            keys[event_type, paths, key] = None
        if event_type != event.type:
            continue
        values = {path: value_in(event, path, _MISSING) for path in read_paths(paths)}
        if _MISSING in values.values() or read_paths(paths) == [CORRELATION]:
            lacking.append((event_type, paths))
        elif values:
            others = [key_of(sorted(other), other.get) for other in sides.variants(values)]
            keys |= {(event_type, paths, other): None for other in others if other is not None}
    found = [*await near_waits.by_key(connection, keys), *await near_waits.by_fields(connection, lacking)]
    told: dict[tuple[RunId, str], Decision] = {}
    others_of: list[Decision] = []  # which wait for another correlation id
    time_slice = TimeSlice()
    for wait in found:
        reason = sides.why_missed(_side(wait), event) if may_see(wait.source) else None
        if reason is not None:
            told.setdefault((wait.run_id, wait.step), _nearly_woken(wait, reason))
        elif may_see(wait.source) and (another := sides.of_another(_side(wait), event)) is not None:
            others_of.append(_nearly_woken(wait, another))
        if time_slice.is_over:
            await time_slice.next()
    if others_of and not told:  # one is an example: the event may have been meant for a run that has ended
        more = f" ({len(others_of) - 1} other runs wait for theirs)" if len(others_of) > 1 else ""
        return [msgspec.structs.replace(others_of[0], reason=f"{others_of[0].reason}{more}")]
    return list(told.values())[:MOST]


def _nearly_woken(wait: RunningWait, reason: str) -> Decision:
    does = "would be cancelled by" if wait.mode == "cancel" else "waits for"
    text = f"run {wait.run_id} of {wait.workflow} {does} {pattern_text(wait.pattern)}: {reason}"
    return Decision(
        at=None, stage="wait", decision="near_miss", reason=text, workflow=wait.workflow, run_id=wait.run_id
    )


async def kept_for(connection: Connection, lines: Sequence[NewDecision], may_see: MaySee) -> list[NewDecision]:
    """The lines of an event, with what has become of each `wait_all` of a run that it was kept for."""
    return [
        line._replace(reason="; ".join(await _kept_for(connection, line, may_see)) or line.reason)
        if (line.stage, line.decision) == ("wait", "kept")
        else line
        for line in lines
    ]


async def _kept_for(connection: Connection, line: NewDecision, may_see: MaySee) -> list[str]:
    told, detail = list[str](), line.detail
    for one in detail[:MOST]:
        run = await runs.get(connection, RunId(uuid.UUID(one["run_id"])))
        of = await events.get_many(connection, [run.event_id]) if run is not None and run.event_id is not None else {}
        if run is None or not may_see(next((event.source for event in of.values()), None)):
            continue
        found = [step for step in await steps.list_of_run(connection, run.id) if str(step.id) == one["step_id"]]
        told += [_kept(run, step, line.event_id) for step in found]
    return told + ([f"and {len(detail) - MOST} more"] if told and len(detail) > MOST else [])


def _kept(run: Run, step: Step, event_id: EventId) -> str:
    if step.status == "pending" and run.status in ("pending", "running"):
        return f"is kept for run {run.id}, which still waits for {awaited_events(step)}"
    if others := [one for one in step.retry_metadata.get("events", ()) if str(one) != str(event_id)]:
        return f"ended the wait {step.name!r} of run {run.id} together with event {', event '.join(map(str, others))}"
    return f"was kept for run {run.id}, whose wait {step.name!r} ended without {awaited_events(step)}"


def _side(wait: RunningWait) -> WaitSide:
    of_run = {"id": str(wait.run_id), "parameters": wait.parameters}
    return WaitSide(wait.pattern, of_run, wait.after_sequence, wait.since, wait.until)


async def nearly_wakes(connection: Connection, run: Run, steps: Sequence[Step], may_see: MaySee) -> list[Decision]:
    """The newest events that almost ended a wait of the run, or will once they are decided; in what each differs."""
    found = {
        (wait.step, wait.pattern.type, contained(wait.pattern.match)): (wait.step, _side(wait), True)
        for wait in await near_waits.of_run(connection, run.id)
    }
    for step, side in _timed_out(run, steps):
        found.setdefault((step.name, side.pattern.type, contained(side.pattern.match)), (step.name, side, False))
    if not found:
        return []
    taken = {str(one) for step in steps if step.kind == "wait" for one in step.retry_metadata.get("events", ())}
    taken |= {event_id for step in steps if step.kind == "wait" for event_id in kept_events(step)}
    first_id = _first_of_day(run.id)
    types = await near_waits.event_types(connection, first_id)
    told: list[Decision] = []
    for step_name, side, is_open in found.values():
        told += await _near_events(connection, run, step_name, side, is_open, types, taken, first_id, may_see)
        if len(told) >= MOST:
            break
    return told[:MOST]


async def _near_events(
    connection: Connection,
    run: Run,
    step: str,
    side: WaitSide,
    is_open: bool,
    types: Iterable[str],
    taken: Collection[str],
    first_id: uuid.UUID,
    may_see: MaySee,
) -> list[Decision]:
    pattern = side.pattern
    alike = [one for one in types if sides.is_alike_type(pattern.type, one)]
    values = [contained(one) for one in (pattern.match, *sides.variants(pattern.match))]
    recent = await near_waits.recent_events(
        connection, [pattern.type, *alike[:_MAX_ALIKE]], values, sides.fields_of(pattern.match), first_id
    )
    told: list[Decision] = []
    others_of: list[tuple[Event, str]] = []  # with another correlation id, which may be another run's
    time_slice = TimeSlice()
    for event, has_passed in recent:
        if len(told) == MOST or not may_see(event.source) or str(event.id) in taken:
            continue
        reason = sides.why_missed(side, event)
        if reason is None and is_open and not has_passed and sides.is_met(side, event):
            reason = f"it fits, and is not decided: tidegate explain {event.id}"
        if reason is not None:
            told.append(_nearly_wakes(run, step, event, reason))
        elif (another := sides.of_another(side, event)) is not None:
            others_of.append((event, another))
        if time_slice.is_over:
            await time_slice.next()
    for event, another in [] if told else others_of[:MOST]:  # one is an example, if no other run was meant by it
        if not any(line.stage == "wait" for line in await decisions.list_of_event(connection, event.id)):
            return [_nearly_wakes(run, step, event, another)]
    return told


def _nearly_wakes(run: Run, step: str, event: Event, reason: str) -> Decision:
    does = "cancelled it" if step.startswith(INTERNAL_STEPS) else f"ended the wait {step!r}"
    text = f"{event.type} from {event.source} (event {event.id}) nearly {does}: {reason}"
    return Decision(
        at=event.received_at, stage="wait", decision="near_miss", reason=text, workflow=run.workflow, run_id=run.id
    )


def _timed_out(run: Run, steps: Sequence[Step]) -> Iterable[tuple[Step, WaitSide]]:
    """The waits whose time was over before their event came, the newest first."""
    of_run = {"id": str(run.id), "parameters": run.parameters}
    over = [step for step in steps if step.is_timed_out]
    for step in reversed(over[-MOST:]):
        for given in step.retry_metadata.get("waits_for", ()):
            pattern = msgspec.convert(given, WaitPattern)
            yield step, WaitSide(pattern, of_run, since=run.created_at, until=step.updated_at)


def _first_of_day(run_id: RunId) -> uuid.UUID:
    """The first id of the day before the run's: its clock, and that of whoever stored an event, may differ."""
    day = (run_id.int >> 80) // _DAY_MS - 1
    return uuid.UUID(int=max(0, day * _DAY_MS) << 80)
