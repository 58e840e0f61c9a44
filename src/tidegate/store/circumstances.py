"""What keeps events, deliveries and runs: the facts that `explain` answers by. Read only."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from tidegate.model.ids import DeadLetterId, DeliveryId, EventId, RunId, StepId, TriggerId
from tidegate.model.source import BreakerState
from tidegate.model.trigger import Trigger
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("circumstances")

# At most this many triggers are compared with an event that launched nothing.
MAX_TRIGGERS = 2000
# Due runs before a run are counted up to this number.
MAX_AHEAD = 1000
# Children of a step that have ended are counted up to this number.
MAX_ENDED = 10_000


class RunSlotWait(msgspec.Struct, frozen=True, kw_only=True):
    """The slot for which a run waits that is due: in the line of which budget, if it is one, and who holds it."""

    text: str
    since: datetime
    budget: str | None = None


class RunCircumstances(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a run and until when, and what is in its way. `has_no_slot`: it waits and has given its slots back;
    `slot` is the one that it waits for when it is due. `updated_at` is when it was claimed, while it is
    held; `ahead` counts the due runs of its workflow before it, up to MAX_AHEAD. `priority` is the weight of its
    workflow."""

    id: RunId
    trigger_id: TriggerId | None = None
    trigger: str | None = None
    concurrency_key: str | None = None
    claimed_by: str | None = None
    claim_expires_at: datetime | None = None
    updated_at: datetime
    deadline_at: datetime | None = None
    retry_attempts: int = 0
    closed_until: datetime | None = None
    closed_reason: str | None = None
    ahead: int = 0
    priority: int = 1
    has_no_slot: bool = False
    slot: RunSlotWait | None = None


class BudgetWait(msgspec.Struct, frozen=True, kw_only=True):
    """Where a delivery stands in the line of the budget that holds it, what it waits for, and until when. `pause` is
    that of the budget: by whom, until when, and why."""

    text: str
    waits_for: str
    until: datetime | None = None
    pause: str | None = None


class DeliveryCircumstances(msgspec.Struct, frozen=True, kw_only=True):
    """The trigger that a waiting delivery waits for; `ahead` counts the deliveries before it, up to 10,000. At
    `stale_at` it leaves (`max_wait`)."""

    id: DeliveryId
    stale_at: datetime | None = None
    max_concurrency: int | None = None
    throttle_count: int | None = None
    throttle_window_ms: int | None = None
    concurrency_key: str | None = None
    paused_at: datetime | None = None
    paused_until: datetime | None = None
    pause_reason: str | None = None
    paused_by: str | None = None
    breaker_state: BreakerState | None = None
    breaker_until: datetime | None = None
    breaker_reason: str | None = None
    probe_run_id: RunId | None = None
    source_paused_at: datetime | None = None
    source_paused_until: datetime | None = None
    ahead: int = 0
    budget: BudgetWait | None = None


class SlotHolder(msgspec.Struct, frozen=True, kw_only=True):
    """A run that holds a concurrency slot: when it resumes, or until when its worker's lease lasts; `total` is how many
    there are."""

    id: RunId
    workflow: str
    status: str
    created_at: datetime
    resumes_at: datetime | None = None
    lease_until: datetime | None = None
    total: int
    source: str | None = None


class SlotWait(msgspec.Struct, frozen=True, kw_only=True):
    """A run that is due and waits for a slot of its trigger, or of a budget; `ahead` runs wait longer, up to
    10,000."""

    run_id: RunId
    since: datetime
    trigger_id: TriggerId | None
    budget: str | None
    key: str
    most: int | None
    ahead: int


class StepChildren(msgspec.Struct, frozen=True, kw_only=True):
    """How many children of a step have ended, up to MAX_ENDED, and the first that was started and has not; its
    `event_id` and `run_id` are null if there is none."""

    ended: int
    workflow: str | None = None
    position: int | None = None
    event_id: EventId | None = None
    run_id: RunId | None = None


class EventCircumstances(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an event is undecided, its place in line, its priority and the weight of its source, its source's pause,
    and its scheduled replay."""

    now: datetime
    is_undecided: bool = False
    priority: int = 1
    weight: int = 1
    undecided_ahead: int = 0
    held_ahead: int = 0
    source_paused_at: datetime | None = None
    source_paused_until: datetime | None = None
    replay_at: datetime | None = None
    replay_by: str | None = None


class StoryLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A dead letter of a story, and what became of it."""

    id: DeadLetterId
    kind: str
    subject_id: uuid.UUID
    workflow_run_id: RunId | None = None
    reason: str
    created_at: datetime
    replay_at: datetime | None = None
    replay_by: str | None = None
    replay_error: str | None = None
    replayed_at: datetime | None = None
    replayed_by: str | None = None


class KnownTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger in any state, with the argument names of its workflow."""

    trigger: Trigger
    deleted_at: datetime | None
    parameter_names: list[str]


class EarlierVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger as it was at some time."""

    version: int
    definition: dict[str, object]
    changed_by: str
    changed_at: datetime


async def of_runs(connection: Connection, run_ids: Sequence[RunId]) -> dict[RunId, RunCircumstances]:
    """What keeps each of the runs."""
    rows = await connection.fetch(_sql["runs"], list(run_ids), MAX_AHEAD) if run_ids else []
    return {row["id"]: RunCircumstances(**dict(row)) for row in rows}


async def of_deliveries(
    connection: Connection, delivery_ids: Iterable[DeliveryId]
) -> dict[DeliveryId, DeliveryCircumstances]:
    """What keeps each of the deliveries that wait."""
    wanted = list(delivery_ids)
    rows = await connection.fetch(_sql["deliveries"], wanted) if wanted else []
    return {row["id"]: DeliveryCircumstances(**dict(row)) for row in rows}


async def slot_holders(connection: Connection, delivery_id: DeliveryId, limit: int) -> list[SlotHolder]:
    """The runs that hold the slots that a delivery waits for, the oldest first."""
    return [SlotHolder(**dict(row)) for row in await connection.fetch(_sql["slot_holders"], delivery_id, limit)]


async def trigger_slot_holders(connection: Connection, trigger_id: TriggerId, key: str, limit: int) -> list[SlotHolder]:
    """The runs that hold the slots of a trigger's key, the oldest first."""
    rows = await connection.fetch(_sql["trigger_slot_holders"], trigger_id, key, limit)
    return [SlotHolder(**dict(row)) for row in rows]


async def slot_waits(connection: Connection, run_ids: Sequence[RunId]) -> list[SlotWait]:
    """What runs wait for that are due and have no slot."""
    rows = await connection.fetch(_sql["slot_waits"], list(run_ids)) if run_ids else []
    return [SlotWait(**dict(row)) for row in rows]


async def children_of(connection: Connection, step_id: StepId) -> StepChildren:
    """The children of a step."""
    row = await connection.fetchrow(_sql["children"], step_id, MAX_ENDED)
    return StepChildren(**dict(row)) if row else StepChildren(ended=0)


async def of_event(connection: Connection, event_id: EventId) -> EventCircumstances:
    """What keeps an event."""
    row = await connection.fetchrow(_sql["event"], event_id)
    return EventCircumstances(**dict(row)) if row else EventCircumstances(now=await now(connection))


async def now(connection: Connection) -> datetime:
    """The time by the clock that schedules."""
    at: datetime = await connection.fetchval(_sql["now"])
    return at


async def letters(
    connection: Connection, event_id: EventId | None, subjects: Iterable[uuid.UUID] = ()
) -> list[StoryLetter]:
    """The dead letters of an event and of these subjects, oldest first."""
    return [StoryLetter(**dict(row)) for row in await connection.fetch(_sql["letters"], event_id, list(subjects))]


async def known_triggers(connection: Connection) -> list[KnownTrigger]:
    """Triggers in all states, deleted ones last; at most MAX_TRIGGERS."""
    found = []
    for row in await connection.fetch(_sql["known_triggers"], MAX_TRIGGERS):
        fields = dict(row)
        deleted_at, names = fields.pop("deleted_at"), fields.pop("parameter_names")
        found.append(
            KnownTrigger(trigger=msgspec.convert(fields, Trigger), deleted_at=deleted_at, parameter_names=names)
        )
    return found


async def version_at(connection: Connection, trigger_id: TriggerId, at: datetime) -> EarlierVersion | None:
    """A trigger as it was at a time; None if it did not exist yet."""
    row = await connection.fetchrow(_sql["version_at"], trigger_id, at)
    return EarlierVersion(**dict(row)) if row else None


async def event_of_delivery(connection: Connection, delivery_id: uuid.UUID) -> EventId | None:
    """The event of a delivery."""
    found: EventId | None = await connection.fetchval(_sql["delivery"], delivery_id)
    return found
