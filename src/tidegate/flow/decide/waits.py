"""Waits: events meet the runs that wait for them. The event's decision, the step's result and the wake-up are one
commit; so are the event and the cancellation that it asks for (`cancel_on`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate import failpoints
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.model.approval import APPROVAL_DECIDED
from tidegate.model.event import Event
from tidegate.model.ids import EventId, RunId, StepId, WaitId
from tidegate.model.wait import MetWait, OpenWait, give, key_of_event
from tidegate.store import decisions, runs, waits
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.store.waits import KeptEvent, MetStep
from tidegate.telemetry.logs import logger

# Of the runs that an event woke or cancelled, at most MAX_LISTED are recorded by name.
MAX_LISTED = 100

_log = logger("wait")

# By run, the events that some of its waits may be given, in order, each with those waits.
Offers = Mapping[RunId, Sequence[tuple[Event, Collection[WaitId]]]]


class Meeting(NamedTuple):
    """A run that an event has woken or cancelled (then without a step)."""

    run_id: RunId
    event: Event
    step: str | None


class Part(NamedTuple):
    """An event that a run keeps for a `wait_all`, which another event ends, or has ended now."""

    run_id: RunId
    wait: OpenWait
    event: Event


class Met(NamedTuple):
    """Whether anybody waits for events of these types, the runs that were woken or are to be cancelled, and the events
    that meet a wait, in order."""

    is_awaited: bool = False
    meetings: Sequence[Meeting] = ()
    events: Sequence[Event] = ()


async def meet(connection: Connection, events: Sequence[Event], now: datetime) -> Met:
    """Give events that have passed the gate to the waits that they meet. The caller's transaction shares the locks
    under which events are decided: whoever begins to wait now is seen here, or sees these events (`look_back`)."""
    path_sets = await waits.list_path_sets(connection, {event.type for event in events})
    if not path_sets:
        return Met()
    offers = await _offers(connection, events, path_sets, now)
    failpoints.hit("wait.before_lock")
    await runs.lock(connection, sorted(offers))
    met = {event.id for offered in offers.values() for event, _ in offered}
    meetings = await hand_over(connection, offers, now, wakes=True)
    return Met(True, meetings, [event for event in events if event.id in met])


async def _offers(
    connection: Connection, events: Sequence[Event], path_sets: Mapping[str, Sequence[str]], now: datetime
) -> Offers:
    """The runs with waits that the events meet; not locked yet."""
    places: dict[tuple[str, str, str], int] = {}
    keys_of: list[tuple[Event, list[int]]] = []
    for event in events:
        mine = []
        for paths in path_sets.get(event.type, ()):
            if (key := key_of_event(event, paths)) is not None:
                mine.append(places.setdefault((event.type, paths, key), len(places)))
        if mine:
            keys_of.append((event, mine))
    if not places:
        return {}
    found: dict[int, list[waits.WaitOfRun]] = {}
    for place, one in await waits.find(connection, list(places), now):
        found.setdefault(place, []).append(one)
    offers: dict[RunId, list[tuple[Event, set[WaitId]]]] = {}
    time_slice = TimeSlice()
    for number, (event, mine) in enumerate(keys_of):
        for wait, parameters in (one for place in mine for one in found.get(place, ())):
            if wait.meets(event, parameters):
                offered = offers.setdefault(wait.workflow_run_id, [])
                if not offered or offered[-1][0] is not event:
                    offered.append((event, set()))
                offered[-1][1].add(wait.id)
            if time_slice.is_over:
                await time_slice.next()
        time_slice.check(number + 1, len(keys_of))
    return offers


async def hand_over(
    connection: Connection,
    offers: Offers,
    now: datetime,
    *,
    wakes: bool,
    taken: Mapping[RunId, set[EventId]] | None = None,
) -> list[Meeting]:
    """Give runs, which the caller has locked, the events that are offered to them: write the results of their steps,
    and wake them. What has ended or was given since the offer is read here, under the lock. With `wakes`, a wait that
    has yet to look back is only told to do so: it finds these events, after those that came before them. `taken` are
    the events that the runs were given before; by default only events that were replayed, or were decisions, can be
    among them."""
    if not offers:
        return []
    if taken is None:
        again = [run_id for run_id, offered in offers.items() if any(_may_repeat(event) for event, _ in offered)]
        taken = await waits.list_taken(connection, again) if again else {}
    open_waits = await waits.list_of_runs(connection, offers.keys())
    ready = open_waits
    if wakes:
        ready = {run_id: [w for w in mine if not w.looks_back] for run_id, mine in open_waits.items()}
        looking = {w.id: w.step_id for mine in open_waits.values() for w in mine if w.looks_back}
        offered_to = {wait_id for offered in offers.values() for _, met_by in offered for wait_id in met_by}
        await waits.look_again(connection, {looking[wait_id] for wait_id in looking.keys() & offered_to})
    given = {
        run_id: given
        for run_id, offered in offers.items()
        if (given := give(ready.get(run_id, ()), offered, taken.get(run_id, ())))
    }
    cancelled = {run_id: one[0] for run_id, one in given.items() if one[0].wait.mode == "cancel"}
    rest = {run_id: one for run_id, one in given.items() if run_id not in cancelled}
    texts: dict[EventId, str] = {}
    met, kept, last = _results(rest, open_waits, texts)
    await waits.keep(connection, kept)
    of_all = [Part(run_id, *pair) for run_id, one in rest.items() for pair in one if pair.wait.mode == "all"]
    parts = [one for one in of_all if one.event is not last.get(one.wait.step_id)]
    failpoints.hit("wait.before_result")
    names = await waits.complete(connection, met)
    asked = await waits.request_cancel(connection, list(cancelled.values()))
    failpoints.hit("wait.before_wake")
    if wakes:
        woken = {one.run_id for one in met if one.step_id in names}
        await runs.wake(connection, sorted(woken | asked))
    meetings = [Meeting(one.run_id, last[one.step_id], names[one.step_id]) for one in met if one.step_id in names]
    meetings += [Meeting(run_id, cancelled[run_id].event, None) for run_id in asked]
    await decisions.insert(connection, [*_recorded(meetings, now), *_kept(parts, now)])
    return meetings


def _may_repeat(event: Event) -> bool:
    """Whether a run may have been given the event before it was decided now."""
    return event.replayed_at is not None or event.type == APPROVAL_DECIDED


def _results(
    given: Mapping[RunId, Sequence[MetWait]],
    open_waits: Mapping[RunId, Sequence[OpenWait]],
    texts: dict[EventId, str],
) -> tuple[list[MetStep], list[KeptEvent], dict[StepId, Event]]:
    """The steps that are done, the patterns of `wait_all` that keep their event, and the last event of each step that
    is done."""
    met: list[MetStep] = []
    kept: list[KeptEvent] = []
    last: dict[StepId, Event] = {}
    for run_id, pairs in given.items():
        steps: dict[StepId, list[MetWait]] = {}
        for pair in pairs:
            steps.setdefault(pair.wait.step_id, []).append(pair)
        for step_id, mine in steps.items():
            if mine[0].wait.mode != "all":
                [(wait, event)] = mine
                text = _text(event, texts)
                result = text if wait.mode == "event" else f"[{wait.number},{text}]"
                met.append(MetStep(run_id, step_id, result, [event.id]))
                last[step_id] = event
                continue
            now_met = {wait.id: event for wait, event in mine}
            patterns = sorted((w for w in open_waits[run_id] if w.step_id == step_id), key=lambda w: w.number)
            if any(w.met_event_id is None and w.id not in now_met for w in patterns):
                kept += [KeptEvent(wait.id, event.id, _text(event, texts), step_id) for wait, event in mine]
                continue
            last[step_id] = mine[-1].event
            parts = [
                _text(now_met[w.id], texts) if w.id in now_met else msgspec.json.encode(w.met_event).decode()
                for w in patterns
            ]
            ids = [now_met[w.id].id if w.id in now_met else w.met_event_id for w in patterns]
            met.append(MetStep(run_id, step_id, f"[{','.join(parts)}]", [one for one in ids if one is not None]))
    return met, kept, last


def _text(event: Event, texts: dict[EventId, str]) -> str:
    """The event as JSON; encoded once, however many runs it wakes."""
    found = texts.get(event.id)
    if found is None:
        found = texts[event.id] = msgspec.json.encode(event).decode()
    return found


def _recorded(meetings: Sequence[Meeting], now: datetime) -> list[NewDecision]:
    """One decision for each event and outcome, with the runs."""
    by_event: dict[tuple[EventId, str], list[dict[str, str]]] = {}
    for run_id, event, step in meetings:
        found = by_event.setdefault((event.id, "cancelled" if step is None else "woke"), [])
        found.append({"run_id": str(run_id)} | ({} if step is None else {"step": step}))
    return [
        NewDecision(event_id, now, "wait", decision, _counted(decision, listed), detail=listed[:MAX_LISTED])
        for (event_id, decision), listed in by_event.items()
    ]


def _kept(parts: Sequence[Part], now: datetime) -> list[NewDecision]:
    """One decision for each event that runs keep, with the runs and their steps."""
    by_event: dict[EventId, list[dict[str, str]]] = {}
    for run_id, wait, event in parts:
        by_event.setdefault(event.id, []).append({"run_id": str(run_id), "step_id": str(wait.step_id)})
    return [
        NewDecision(event_id, now, "wait", "kept", _counted("kept", listed), detail=listed[:MAX_LISTED])
        for event_id, listed in by_event.items()
    ]


def _counted(decision: str, listed: Sequence[Mapping[str, str]]) -> str:
    verb = "kept for" if decision == "kept" else decision
    return f"{verb} run {listed[0]['run_id']}" if len(listed) == 1 else f"{verb} {len(listed)} runs"


def report(meetings: Sequence[Meeting]) -> None:
    """Log, after the commit, which runs were woken or are to be cancelled."""
    for run_id, event, step in meetings:
        _log.info(
            "run.cancelled_by_event" if step is None else "run.woken",
            run_id=run_id, event_id=event.id, correlation_id=event.correlation_id, source=event.source, step=step,
        )  # fmt: skip
