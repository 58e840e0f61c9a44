"""`dead_letters`: what exhausted its retries or failed for good, and how it is replayed."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from tidegate.model.ids import DeadLetterId, DeliveryId, EventId, RunId, StepId, TriggerId
from tidegate.store.db import Connection, take_time
from tidegate.store.sql import load

_sql = load("dead_letters")

LetterKind = Literal["event", "delivery", "run", "step"]
LetterState = Literal["open", "scheduled", "replayed", "all"]
LETTER_KINDS: tuple[LetterKind, ...] = get_args(LetterKind)
LETTER_STATES: tuple[LetterState, ...] = get_args(LetterState)


class DeadLetterFilters(NamedTuple):
    """Which letters; None does not filter. `reason` is a part of the text, whatever its case."""

    kind: LetterKind | None = None
    source: str | None = None
    trigger_id: TriggerId | None = None
    workflow: str | None = None
    reason: str | None = None
    since: datetime | None = None
    until: datetime | None = None


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """What exhausted its retries or failed for good. `replay_at` is when it is to be replayed, `replay_error` why it
    could not be; `replayed_at`, `replayed_by` and `replayed_into` (the event, delivery or run) say what became of it.
    `last_replayed_from` is another letter of the same subject, which that was last replayed from."""

    id: DeadLetterId
    kind: LetterKind
    subject_id: uuid.UUID
    event_id: EventId | None
    source: str | None
    event_type: str | None
    trigger_id: TriggerId | None
    trigger: str | None
    workflow: str | None
    workflow_run_id: RunId | None
    step: str | None
    reason: str
    detail: dict[str, Any]
    created_at: datetime
    replay_at: datetime | None
    replay_by: str | None
    replay_error: str | None
    replayed_at: datetime | None
    replayed_by: str | None
    replayed_into: uuid.UUID | None
    last_replayed_from: DeadLetterId | None


class LockedLetter(NamedTuple):
    """A letter that this transaction has locked; `newer_id` is a later one of the same subject."""

    id: DeadLetterId
    kind: LetterKind
    subject_id: uuid.UUID
    event_id: EventId | None
    replay_at: datetime | None
    replay_by: str | None
    replayed_at: datetime | None
    replayed_by: str | None
    newer_id: DeadLetterId | None


class Scheduled(NamedTuple):
    """How many letters are to be replayed, and when the first and the last of them."""

    total: int
    first_at: datetime | None
    last_at: datetime | None


class DeadEvent(NamedTuple):
    """An event that is to be replayed."""

    id: EventId
    retry_state: str | None
    is_undecided: bool
    deliveries: int


class LostDelivery(NamedTuple):
    """A delivery that is to be replayed, and its trigger."""

    status: str
    retry_state: str
    trigger_id: TriggerId
    trigger_status: str
    is_trigger_deleted: bool


class DeadRun(NamedTuple):
    """A run that is to resume, and how it ended before."""

    id: RunId
    status: str
    trigger_id: TriggerId | None
    concurrency_key: str | None
    workflow: str
    is_workflow_deleted: bool
    event_id: EventId | None
    error: str | None
    finished_at: datetime | None
    cancelled_by: str | None
    attempts: int
    window_id: RunId | None = None


async def list_page(
    connection: Connection,
    filters: DeadLetterFilters,
    *,
    state: LetterState = "open",
    before_id: uuid.UUID | None = None,
    limit: int,
) -> list[DeadLetter]:
    """Letters, newest first."""
    rows = await connection.fetch(_sql["list"], None, *filters, state, before_id, limit)
    return [DeadLetter(**dict(row)) for row in rows]


async def get(connection: Connection, letter_id: DeadLetterId) -> DeadLetter | None:
    """One letter."""
    rows = await connection.fetch(_sql["list"], letter_id, *DeadLetterFilters(), "all", None, 1)
    return DeadLetter(**dict(rows[0])) if rows else None


async def lock_matching(connection: Connection, filters: DeadLetterFilters) -> list[DeadLetterId]:
    """Lock the letters that the filters describe and nobody has replayed or is to replay, oldest first."""
    connection = await take_time(connection)
    return [row[0] for row in await connection.fetch(_sql["lock_matching"], *filters)]


async def schedule(connection: Connection, ids: Sequence[DeadLetterId], *, apart_ms: float, actor: str) -> Scheduled:
    """The locked letters are to be replayed one after the other."""
    connection = await take_time(connection)
    row = await connection.fetchrow(_sql["schedule"], list(ids), apart_ms, actor)
    return Scheduled(*row) if row else Scheduled(0, None, None)


async def unschedule(connection: Connection) -> int:
    """Call off what is to be replayed and has not been yet; how many."""
    connection = await take_time(connection)
    count: int = await connection.fetchval(_sql["unschedule"])
    return count


async def postpone(connection: Connection, *, late_ms: int) -> int:
    """Keep the distances between letters whose time has passed by more than that; how many are later now."""
    connection = await take_time(connection)
    count: int = await connection.fetchval(_sql["postpone"], late_ms)
    return count


async def lock(connection: Connection, letter_id: DeadLetterId) -> LockedLetter | None:
    """Lock one letter."""
    row = await connection.fetchrow(_sql["lock"], letter_id)
    return LockedLetter(*row) if row else None


async def lock_due(connection: Connection, letter_id: DeadLetterId) -> LockedLetter | None:
    """Lock a letter that is due to be replayed; None when it is not any more, or another worker has it."""
    row = await connection.fetchrow(_sql["lock_due"], letter_id)
    return LockedLetter(*row) if row else None


async def list_due(connection: Connection, limit: int) -> list[DeadLetterId]:
    """Letters that are due to be replayed, the longest due first."""
    return [row[0] for row in await connection.fetch(_sql["list_due"], limit)]


async def next_due_seconds(connection: Connection) -> float | None:
    """Seconds until the next letter is to be replayed."""
    found: float | None = await connection.fetchval(_sql["next_due"])
    return found


async def mark_replayed(connection: Connection, letter_id: DeadLetterId, actor: str, into: uuid.UUID) -> None:
    """The letter was replayed."""
    await connection.execute(_sql["mark_replayed"], letter_id, actor, into)


async def mark_refused(connection: Connection, letter_id: DeadLetterId, why: str) -> None:
    """The letter cannot be replayed."""
    await connection.execute(_sql["mark_refused"], letter_id, why)


async def mark_waiting(connection: Connection, letter_id: DeadLetterId, *, delay_ms: int, actor: str, why: str) -> None:
    """The letter is to be replayed after a while."""
    await connection.execute(_sql["mark_waiting"], letter_id, delay_ms, actor, why)


async def describe_event(connection: Connection, event_id: EventId) -> DeadEvent | None:
    """An event that is to be replayed."""
    row = await connection.fetchrow(_sql["describe_event"], event_id)
    return DeadEvent(*row) if row else None


async def replay_event(connection: Connection, event_id: EventId, letter_id: DeadLetterId | None, actor: str) -> bool:
    """Make an event, of a dead letter or not, due at its source's gate; False when it cannot be."""
    await connection.execute(_sql["count_anew"], event_id)
    return await connection.fetchval(_sql["replay_event"], event_id, letter_id, actor) is not None


async def describe_delivery(connection: Connection, delivery_id: DeliveryId) -> LostDelivery | None:
    """A delivery that is to be replayed."""
    row = await connection.fetchrow(_sql["describe_delivery"], delivery_id)
    return LostDelivery(*row) if row else None


async def replay_delivery(
    connection: Connection, delivery_id: DeliveryId, event_id: EventId, letter_id: DeadLetterId, actor: str
) -> bool:
    """Make a dead-lettered delivery due; False when it cannot be."""
    await connection.execute(_sql["count_anew"], event_id)
    return await connection.fetchval(_sql["replay_delivery"], delivery_id, letter_id, actor) is not None


async def describe_run(connection: Connection, subject_id: uuid.UUID) -> DeadRun | None:
    """A run that is to resume, by its own id or that of one of its steps."""
    row = await connection.fetchrow(_sql["describe_run"], subject_id)
    return DeadRun(*row) if row else None


async def keep_story(connection: Connection, run_id: RunId) -> bool:
    """Keep a run, and all that came of its event, from being pruned until the commit; False when it is gone. A
    statement of its own takes the lock: one that waited for it would see the run as before it waited."""
    await connection.fetchval(_sql["keep_story"], run_id)
    return await describe_run(connection, run_id) is not None


async def open_of_run(connection: Connection, run_id: RunId) -> DeadLetterId | None:
    """The newest letter of a run or one of its steps that was not replayed."""
    found: DeadLetterId | None = await connection.fetchval(_sql["open_of_run"], run_id)
    return found


async def wait_for_slot(connection: Connection, run_id: RunId, *, actor: str, why: str, delay_ms: int) -> None:
    """A run without a letter is to resume after a while."""
    await connection.execute(_sql["wait_for_slot"], run_id, actor, why, delay_ms)


async def schedule_runs(connection: Connection, actors: Mapping[RunId, str]) -> None:
    """Have failed or cancelled runs resume in transactions of their own; on whose behalf."""
    if actors:
        await connection.execute(_sql["schedule_runs"], list(actors), list(actors.values()))


async def replay_run(
    connection: Connection,
    run: DeadRun,
    step_id: StepId | None,
    letter_id: DeadLetterId | None,
    concurrency_key: str | None,
    *,
    gives_back: bool = False,
) -> int | None:
    """Resume a failed or cancelled run, which this transaction has locked, after its completed steps; None when it
    cannot be. How many of its children start anew, since the run that they had does not exist."""
    gone: int = await connection.fetchval(_sql["revive_steps"], run.id, step_id)
    given = run.id, letter_id, concurrency_key, gives_back
    return None if await connection.fetchval(_sql["replay_run"], *given) is None else gone
