"""Replay: what a replay of events would launch, by the triggers as they are now."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tidegate.flow.decide.match import Matcher
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.flow.predict.evaluation import evaluate
from tidegate.model.event import Event
from tidegate.model.ids import DeliveryId, TriggerId, delivery_id
from tidegate.model.trigger import CompiledTrigger
from tidegate.store import event_replays, triggers
from tidegate.store.db import Connection


class TriggerPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What one trigger would do: how many events it would take, does not take (with the first reason), has decided
    about before (which it does not do again), and would fail on (with the first error)."""

    trigger_id: TriggerId
    workflow: str
    trigger: str
    would_launch: int
    filtered: int
    already_decided: int
    would_fail: int
    reason: str | None
    error: str | None


async def predict(connection: Connection, events: Sequence[Event]) -> list[TriggerPrediction]:
    """The triggers of the events' types and sources, and what each would do. Limits are not predicted: they decide
    when, not whether."""
    index = await Matcher().at(connection, await triggers.registry_version(connection))
    wanted: dict[TriggerId, list[Event]] = {}
    compiled: dict[TriggerId, CompiledTrigger] = {}
    for event in events:
        for one in index.candidates(event.type, event.source):
            wanted.setdefault(one.trigger.id, []).append(event)
            compiled[one.trigger.id] = one
    ids = [delivery_id(event.id, trigger_id) for trigger_id, mine in wanted.items() for event in mine]
    known = await event_replays.delivered(connection, ids)
    time_slice = TimeSlice()
    return [await _predicted(compiled[trigger_id], mine, known, time_slice) for trigger_id, mine in wanted.items()]


async def _predicted(
    compiled: CompiledTrigger, events: Sequence[Event], known: set[DeliveryId], time_slice: TimeSlice
) -> TriggerPrediction:
    trigger = compiled.trigger
    counts = {"would_launch": 0, "filtered": 0, "already_decided": 0, "would_fail": 0}
    reason: str | None = None
    error: str | None = None
    for event in events:
        own_id = delivery_id(event.id, trigger.id)
        if own_id in known:
            counts["already_decided"] += 1
            continue
        found = evaluate(compiled, event)
        failed = found.error is not None
        counts["filtered" if not found.fires else "would_fail" if failed else "would_launch"] += 1
        reason, error = reason or found.reason, error or found.error
        if time_slice.is_over:
            await time_slice.next()
    return TriggerPrediction(
        trigger_id=trigger.id, workflow=trigger.workflow, trigger=trigger.name, reason=reason, error=error, **counts
    )
