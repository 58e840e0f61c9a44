"""`event_replays`: events that are to be decided again, each at its time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from tidegate.model.ids import DeadLetterId, DeliveryId, EventId
from tidegate.store.db import Connection, take_time
from tidegate.store.dead_letters import Scheduled
from tidegate.store.sql import load

_sql = load("event_replays")


class EventRange(NamedTuple):
    """Which events; None does not filter."""

    type: str | None = None
    source: str | None = None
    received_from: datetime | None = None
    received_to: datetime | None = None


class ReplayableEvent(NamedTuple):
    """An event that is to be decided again."""

    id: EventId
    retry_state: str | None
    is_undecided: bool
    is_leaving: bool


class DueReplay(NamedTuple):
    """A replay whose time has come, and who asked for it."""

    event_id: EventId
    actor: str


async def open_letter(connection: Connection, event_id: EventId) -> DeadLetterId | None:
    """The dead letter of an event that was not replayed."""
    found: DeadLetterId | None = await connection.fetchval(_sql["open_letter"], event_id)
    return found


async def lock(connection: Connection, event_id: EventId) -> ReplayableEvent | None:
    """Lock an event that is to be decided again, and keep its day from being dropped meanwhile. A statement of its own
    takes the lock: one that waited for it would see the other tables as before it waited."""
    await connection.execute(_sql["keep_days"])
    if await connection.fetchval(_sql["lock"], event_id) is None:
        return None
    row = await connection.fetchrow(_sql["state"], event_id)
    return ReplayableEvent(*row) if row else None


class Replayable(NamedTuple):
    """How many of the oldest events can be replayed, how many of them were taken back, and whether there are more."""

    total: int
    taken_back: int
    is_cut: bool


async def count(connection: Connection, wanted: EventRange, most: int) -> Replayable:
    """How many events there are, among the oldest `most`."""
    row = await connection.fetchrow(_sql["count"], *wanted, most)
    assert row is not None
    return Replayable(*row)


async def taken_back(connection: Connection, ids: Sequence[EventId]) -> set[EventId]:
    """Those of the events that were taken back before they were decided."""
    return {row[0] for row in await connection.fetch(_sql["taken_back"], list(ids))} if ids else set()


async def schedule(connection: Connection, wanted: EventRange, *, limit: int, apart_ms: float, actor: str) -> Scheduled:
    """Events are to be decided again one after the other, of the oldest `limit` those that were not taken back."""
    connection = await take_time(connection)
    row = await connection.fetchrow(_sql["schedule"], *wanted, limit, apart_ms, actor)
    return Scheduled(*row) if row else Scheduled(0, None, None)


async def stop(connection: Connection) -> int:
    """Cancel the scheduled replays; how many."""
    found: int = await connection.fetchval(_sql["stop"])
    return found


async def postpone(connection: Connection, *, late_ms: int) -> int:
    """Keep the distances between replays whose time has passed by more than that; how many are later now."""
    found: int = await connection.fetchval(_sql["postpone"], late_ms)
    return found


async def take_due(connection: Connection, limit: int) -> list[DueReplay]:
    """Take due replays off the list, in the transaction that performs them."""
    return [DueReplay(*row) for row in await connection.fetch(_sql["take_due"], limit)]


async def next_due_seconds(connection: Connection) -> float | None:
    """Seconds until the next replay is due."""
    found: float | None = await connection.fetchval(_sql["next_due"])
    return found


async def delivered(connection: Connection, ids: Sequence[DeliveryId]) -> set[DeliveryId]:
    """Those of the deliveries that exist."""
    return {row[0] for row in await connection.fetch(_sql["delivered"], list(ids))} if ids else set()
