"""Trigger edit: what a trigger, edited or as it is, would have done with the events of the past.

Events are read page by page, and evaluated while no connection is held. Both are bounded; the answer says so if there
was more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Literal, NamedTuple

import msgspec

from tidegate.clock import monotonic
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.flow.predict.evaluation import Evaluation, evaluate
from tidegate.model.event import Event
from tidegate.model.ids import EventId, TriggerId, delivery_id
from tidegate.model.limit_forecast import LimitForecast, LimitWaits
from tidegate.model.trigger import CompiledTrigger
from tidegate.store import events, predictions
from tidegate.store.db import Connection, Database
from tidegate.store.predictions import Arrival, ReceiptSpan

# At most this many events are evaluated, and this many read to find those of the trigger's type and source.
MOST_EVENTS = 10_000
DEFAULT_EVENTS = 2000
MOST_READ = 20_000
MOST_SECONDS = 5.0
PAGE = 100
EXAMPLES = 5

# Why fewer events were evaluated than there are.
Cut = Literal["limit", "time"] | None


class CheckCount(msgspec.Struct, frozen=True):
    """How many events fail one check (`event_type`, `event_source`, `predicates[0]`, `where`, `status`), or fail with
    one error; why, and one of the events."""

    check: str
    count: int
    reason: str
    event_id: EventId


class EventExamples(msgspec.Struct, frozen=True):
    """How many events, and the ids of the newest of them."""

    count: int
    event_ids: list[EventId]


class TriggerForecast(msgspec.Struct, frozen=True, kw_only=True):
    """What a trigger would have done with the events received at `from` or later and before `to`: `cut` says why there
    are fewer than asked for. `newly_matched` and `no_longer_matched` compare it with the current version, or, if no
    change was given, with the deliveries that it made. `deliveries` are those deliveries, by status."""

    trigger_id: TriggerId
    workflow: str
    trigger: str
    version: int
    is_edited: bool
    received_from: datetime = msgspec.field(name="from")
    received_to: datetime = msgspec.field(name="to")
    events: int
    cut: Cut
    would_launch: int
    would_skip: int
    would_fail: int
    filtered: int
    filters: list[CheckCount]
    errors: list[CheckCount]
    compared_with: Literal["current_version", "deliveries"]
    newly_matched: EventExamples
    no_longer_matched: EventExamples
    deliveries: dict[str, int]
    throttle: LimitWaits | None
    not_predicted: list[str]


class _Seen(NamedTuple):
    arrival: Arrival
    found: Evaluation
    fired_before: bool


async def predict(
    database: Database, current: CompiledTrigger, edited: CompiledTrigger | None, span: ReceiptSpan, limit: int,
    *, most_seconds: float = MOST_SECONDS,
) -> TriggerForecast:  # fmt: skip
    """The newest `limit` events of the span that are of the type and source of either version, and what became of
    them."""
    began = monotonic()
    versions = [current] if edited is None else [edited, current]
    async with database.connection() as connection:
        read, is_cut = await _arrivals(connection, versions, span)
    taken = await _taken(read, versions)
    wanted = taken[:limit]
    cut: Cut = "limit" if is_cut or len(taken) > limit else None
    seen: list[_Seen] = []
    time_slice = TimeSlice()
    for start in range(0, len(wanted), PAGE):
        page = wanted[start : start + PAGE]
        async with database.connection() as connection:
            found = await events.get_many(connection, (one.event_id for one in page))
            deliveries = {} if edited is not None else await _fired(connection, current, page)
        for arrival in page:
            event = found.get(arrival.event_id)
            if event is not None:  # not deleted meanwhile
                seen.append(_see(versions, arrival, event, deliveries))
            if time_slice.is_over:
                await time_slice.next()
                if monotonic() - began > most_seconds:
                    break
        if monotonic() - began > most_seconds and len(seen) < len(wanted):
            cut = "time"
            break
    async with database.connection() as connection:
        statuses = await _statuses(connection, current, [one.arrival for one in seen])
    asked = ReceiptSpan(seen[-1].arrival.received_at, span.received_to) if cut and seen else span
    return await _forecast(versions, asked, cut, seen, statuses)


async def _arrivals(
    connection: Connection, versions: Sequence[CompiledTrigger], span: ReceiptSpan
) -> tuple[list[Arrival], bool]:
    """The newest events that may be of either version, newest first, and whether there are more: by their types or
    sources if these are exact, else all."""
    types = sorted({one.trigger.event_type for one in versions})
    sources = sorted({one.trigger.event_source for one in versions})
    if not any("*" in name for name in types):
        parts = [await predictions.of_type(connection, name, span, MOST_READ) for name in types]
    elif not any("*" in name for name in sources):
        parts = [await predictions.of_source(connection, name, span, MOST_READ) for name in sources]
    else:
        parts = [await predictions.of_all(connection, span, MOST_READ)]
    found = sorted((one for part in parts for one in part.found), key=lambda one: one.ingress_sequence, reverse=True)
    return found[:MOST_READ], len(found) > MOST_READ or any(part.is_cut for part in parts)


async def _taken(arrivals: Sequence[Arrival], versions: Sequence[CompiledTrigger]) -> list[Arrival]:
    """Those of the type and source of a version. A start is for one trigger, whatever that asks for: no edit changes
    it."""
    time_slice, found = TimeSlice(), list[Arrival]()
    for one in arrivals:
        if not one.is_start and any(v.takes_type(one.type) and v.takes_source(one.source) for v in versions):
            found.append(one)
        if time_slice.is_over:
            await time_slice.next()
    return found


def _see(
    versions: Sequence[CompiledTrigger], arrival: Arrival, event: Event, fired: dict[EventId, bool]
) -> _Seen:  # fmt: skip
    found = evaluate(versions[0], event)
    before = evaluate(versions[1], event).fires if len(versions) > 1 else fired.get(event.id, found.fires)
    return _Seen(arrival, found, before)


async def _fired(connection: Connection, current: CompiledTrigger, page: Sequence[Arrival]) -> dict[EventId, bool]:
    """Whether each event fired the trigger; those that wait to be decided are left out."""
    ids = {one.event_id: delivery_id(one.event_id, current.trigger.id) for one in page}
    known = await predictions.delivered(connection, list(ids.values()))
    waiting = await predictions.undecided(connection, page)
    return {event_id: own_id in known for event_id, own_id in ids.items() if event_id not in waiting}


async def _statuses(connection: Connection, current: CompiledTrigger, seen: Sequence[Arrival]) -> Counter[str]:
    statuses: Counter[str] = Counter()
    for start in range(0, len(seen), 1000):
        ids = [delivery_id(one.event_id, current.trigger.id) for one in seen[start : start + 1000]]
        statuses.update((await predictions.delivered(connection, ids)).values())
    return statuses


async def _forecast(
    versions: Sequence[CompiledTrigger], span: ReceiptSpan, cut: Cut,
    seen: Sequence[_Seen], statuses: Counter[str],
) -> TriggerForecast:  # fmt: skip
    asked, current = versions[0].trigger, versions[-1].trigger
    fit = [one for one in seen if one.found.fires and one.found.error is None]
    launched = _not_repeated(fit, asked.idempotency_window_ms)
    is_edited = len(versions) > 1
    return TriggerForecast(
        trigger_id=current.id,
        workflow=current.workflow,
        trigger=asked.name,
        version=current.version,
        is_edited=is_edited,
        received_from=span.received_from,
        received_to=span.received_to,
        events=len(seen),
        cut=cut,
        would_launch=len(launched),
        would_skip=len(fit) - len(launched),
        would_fail=sum(one.found.error is not None for one in seen),
        filtered=sum(not one.found.fires for one in seen),
        filters=_counted([(one, one.found.check, one.found.reason) for one in seen]),
        errors=_counted([(one, one.found.error, one.found.error) for one in seen]),
        compared_with="current_version" if is_edited else "deliveries",
        newly_matched=_examples([one for one in seen if one.found.fires and not one.fired_before]),
        no_longer_matched=_examples([one for one in seen if one.fired_before and not one.found.fires]),
        deliveries=dict(sorted(statuses.items())),
        throttle=await _throttled(versions[0], launched),
        not_predicted=_not_predicted(versions[0]),
    )


def _not_repeated(fit: Sequence[_Seen], window_ms: int) -> list[_Seen]:
    """Those that no earlier one with the same idempotency key excludes, in the order of their arrival."""
    kept_until: dict[str, datetime | None] = {}
    found = []
    for one in sorted(fit, key=lambda one: (one.arrival.at, one.arrival.ingress_sequence)):
        key = one.found.dedupe_key
        if key is not None:
            if key in kept_until and ((until := kept_until[key]) is None or until > one.arrival.at):
                continue
            kept_until[key] = one.arrival.at + timedelta(milliseconds=window_ms) if window_ms else None
        found.append(one)
    return found


async def _throttled(asked: CompiledTrigger, launched: Sequence[_Seen]) -> LimitWaits | None:
    limit = asked.trigger.throttle
    if limit is None:
        return None
    forecast, time_slice = LimitForecast(limit), TimeSlice()
    for one in launched:
        forecast.arrive(one.arrival.at, one.arrival.event_id)
        if time_slice.is_over:
            await time_slice.next()
    return forecast.waits()


def _counted(given: Sequence[tuple[_Seen, str | None, str | None]]) -> list[CheckCount]:
    """By check or error, the most frequent first, each with the newest event as its example."""
    counts = Counter(check for _, check, _ in given if check is not None)
    examples = {check: (reason or "", one.arrival.event_id) for one, check, reason in reversed(given) if check}
    return [CheckCount(check, count, *examples[check]) for check, count in counts.most_common(20)]


def _examples(found: Sequence[_Seen]) -> EventExamples:
    return EventExamples(len(found), [one.arrival.event_id for one in found[:EXAMPLES]])


def _not_predicted(asked: CompiledTrigger) -> list[str]:
    trigger = asked.trigger
    said = ["limits, pauses and breakers of sources, and the trigger's own pause and breaker"]
    if trigger.max_concurrency is not None:
        said.append("waits for a concurrency slot: they depend on how long runs take")
    if trigger.throttle is not None:
        said.append("deliveries that waited before the first of these events")
    return said
