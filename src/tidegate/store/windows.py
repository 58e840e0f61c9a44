"""`trigger_windows` and the deliveries in them: many events, one run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.ids import DeliveryId, EventId, RunId, TriggerId
from tidegate.model.window import Window, Windows, WindowState
from tidegate.store.db import Connection
from tidegate.store.deliveries import Decided
from tidegate.store.held_deliveries import ChangedDelivery
from tidegate.store.retry_rows import json_texts
from tidegate.store.sql import load

_sql = load("windows")

# How long a window is known after its run was launched, and how long until the next look at one whose run goes on.
FORGET_MS = 3_600_000
_COLUMNS = tuple(Window.__dataclass_fields__)[:13]
_COLLECTED = ("id", "trigger_id", "event_id", "trigger_version", "dedupe_key", "last_error", "retry_state",
              "next_attempt_at", "source", "concurrency_key", "ingress_sequence", "window_id")  # fmt: skip


class Member(NamedTuple):
    """A delivery in a window that no run has taken."""

    window_id: DeliveryId
    id: DeliveryId
    event_id: EventId
    ingress_sequence: int


class Left(NamedTuple):
    """A delivery that is taken out of its window, and why."""

    id: DeliveryId
    status: str
    text: str
    reason: str | None


class WindowFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The window that a delivery is in, as operators see it."""

    delivery_id: DeliveryId
    id: DeliveryId
    size: int
    state: WindowState
    closes_at: datetime


async def open_windows(connection: Connection, wanted: Iterable[tuple[TriggerId, str]]) -> Windows:
    """The windows of triggers and keys that take events. The caller holds the triggers' locks."""
    pairs = sorted(set(wanted))
    rows = await connection.fetch(_sql["load"], [t for t, _ in pairs], [k for _, k in pairs])
    return Windows([Window(*row) for row in rows])


async def get(connection: Connection, ids: Sequence[DeliveryId]) -> dict[DeliveryId, Window]:
    """Windows by their ids."""
    return {row["id"]: Window(*row) for row in await connection.fetch(_sql["get"], ids)} if ids else {}


async def collect(
    connection: Connection, collected: Sequence[Decided], windows: Windows | None, now: datetime
) -> list[Window]:
    """Record collected deliveries, and the windows that they are in. Returns the windows of earlier transactions that
    are full now: their leaders are due."""
    if windows is None or not (changed := windows.changed):
        return []
    await connection.execute(_sql["save"], *_columns(changed, _COLUMNS), now, FORGET_MS)
    if collected:
        await connection.execute(
            _sql["collect"], *_columns(collected, _COLLECTED), now, json_texts(dict(d.metadata) for d in collected)
        )
    earlier = [window for window in changed if window.was_there and window.state in ("open", "closed")]
    if earlier:
        await connection.execute(_sql["move_leaders"], [w.id for w in earlier], [w.closes_at for w in earlier])
    return [window for window in earlier if window.closes_at <= now]


async def members(connection: Connection, ids: Sequence[DeliveryId]) -> list[Member]:
    """The members of windows that no run has taken, leaders among them, in the order of arrival."""
    return [Member(*row) for row in await connection.fetch(_sql["members"], ids)] if ids else []


async def follow(connection: Connection, leaders: Sequence[DeliveryId], now: datetime) -> set[DeliveryId]:
    """Bring windows in line with what was decided about their leaders, in the same transaction; other deliveries may be
    among the ids. Returns those whose run was launched."""
    if not leaders:
        return set()
    return {row[0] for row in await connection.fetch(_sql["follow"], leaders, now, FORGET_MS) if row[1]}


async def close(connection: Connection, ids: Sequence[DeliveryId]) -> None:
    """These windows take no more events."""
    await connection.execute(_sql["close"], ids)


async def of_trigger(connection: Connection, trigger_id: TriggerId) -> list[DeliveryId]:
    """The windows of a trigger that no run has taken."""
    return [row[0] for row in await connection.fetch(_sql["close_of_trigger"], trigger_id)]


async def leaders_of(connection: Connection, ids: Sequence[DeliveryId]) -> dict[DeliveryId, DeliveryId]:
    """The windows of those of the deliveries that are members, but no leaders, of one that no run has taken."""
    return {row[0]: row[1] for row in await connection.fetch(_sql["leaders_of"], ids)} if ids else {}


async def leave(connection: Connection, left: Sequence[Left]) -> list[ChangedDelivery]:
    """Take members out of their windows; leaders stay. The caller holds the triggers' locks."""
    if not left:
        return []
    rows = await connection.fetch(_sql["leave"], *_columns(left, Left._fields))
    return [ChangedDelivery(*row) for row in rows]


async def hand_on(connection: Connection, leader: DeliveryId, successor: DeliveryId, now: datetime) -> None:
    """Another member leads the window from now on, and is due; the leader is in no window."""
    await connection.execute(_sql["hand_on"], leader, successor, now)


async def event_ids(connection: Connection, ids: Sequence[RunId]) -> Mapping[RunId, list[EventId]]:
    """The events of windows that their runs have taken, in the order of arrival."""
    found: dict[RunId, list[EventId]] = {}
    for window_id, event_id in await connection.fetch(_sql["events"], ids):
        found.setdefault(window_id, []).append(event_id)
    return found


async def keep(connection: Connection, window_id: RunId) -> None:
    """Keep the events of a window for a run that resumes, or repeats the one that took it."""
    await connection.execute(_sql["keep"], window_id, FORGET_MS)


async def forget(connection: Connection, limit: int) -> int:
    """Delete windows whose events nothing needs any more; how many were looked at."""
    found: int = await connection.fetchval(_sql["forget"], limit, FORGET_MS)
    return found


async def of_deliveries(connection: Connection, ids: Sequence[DeliveryId]) -> dict[DeliveryId, WindowFacts]:
    """The windows that deliveries are in."""
    rows = await connection.fetch(_sql["of_deliveries"], ids) if ids else []
    return {row["delivery_id"]: WindowFacts(**dict(row)) for row in rows}


def _columns(rows: Sequence[object], fields: Sequence[str]) -> list[list[object]]:
    return [[getattr(row, field) for row in rows] for field in fields]
