"""Backlogs of triggers: how many deliveries wait, and those that leave for a newcomer or because they are too old."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from tidegate.model.backlog import Newest
from tidegate.model.ids import DeliveryId, EventId, TriggerId
from tidegate.store import budgets, trigger_gates, windows
from tidegate.store.db import Connection
from tidegate.store.sql import load
from tidegate.store.trigger_gates import LockedTrigger

_sql = load("backlogs")

TriggerKey = tuple[TriggerId, str]
# A longer line is planned anew when some leave it, in place of moving up.
MAX_MOVED = 10_000


class LeftDelivery(NamedTuple):
    """A delivery that has left; the reason it waited for, and its time in the line of its trigger, if it had one."""

    id: DeliveryId
    event_id: EventId
    retry_attempts: int
    trigger_id: TriggerId
    concurrency_key: str | None
    reason: str
    budget: str | None
    budget_key: str | None
    freed_at: datetime | None

    @property
    def line(self) -> tuple[str, str] | None:
        """The budget and key that it waited for."""
        return (self.budget, self.budget_key or "") if self.reason == "budget" and self.budget is not None else None


class StaleDelivery(NamedTuple):
    """A delivery that has waited too long; its trigger, as `workflow/name`."""

    id: DeliveryId
    trigger_id: TriggerId
    trigger: str


class FillingTrigger(NamedTuple):
    """A trigger of which nearly as much waits as may; of one with keys, the fullest."""

    trigger_id: TriggerId
    workflow: str
    name: str
    key: str
    waiting: int
    max_waiting: int
    when_full: str | None


async def waiting(connection: Connection, most: Mapping[TriggerKey, int]) -> dict[TriggerKey, int]:
    """How many deliveries wait of each trigger and key, counted no further than `most`."""
    pairs = sorted(most)
    columns = [t for t, _ in pairs], [k for _, k in pairs], [most[pair] for pair in pairs]
    return {(row[0], row[1]): row[2] for row in await connection.fetch(_sql["waiting"], *columns)}


async def leave_oldest(
    connection: Connection, leaving: Mapping[TriggerKey, tuple[int, str]], now: datetime
) -> list[LeftDelivery]:
    """Skip the oldest of each trigger and key, so many, with a text."""
    pairs = sorted(leaving)
    numbers, texts = [leaving[pair][0] for pair in pairs], [leaving[pair][1] for pair in pairs]
    ids, keys = [t for t, _ in pairs], [k for _, k in pairs]
    return [LeftDelivery(*row) for row in await connection.fetch(_sql["leave_oldest"], now, ids, keys, numbers, texts)]


async def supersede(connection: Connection, newest: Mapping[TriggerKey, Newest], now: datetime) -> list[LeftDelivery]:
    """Skip what waits of each trigger and key before the latest."""
    pairs = sorted(newest)
    events, places = [newest[pair].event_id for pair in pairs], [newest[pair].ingress_sequence for pair in pairs]
    ids, keys = [t for t, _ in pairs], [k for _, k in pairs]
    return [LeftDelivery(*row) for row in await connection.fetch(_sql["supersede"], now, ids, keys, events, places)]


async def list_stale(connection: Connection, limit: int) -> list[StaleDelivery]:
    """Deliveries that have waited too long, not locked."""
    return [StaleDelivery(*row) for row in await connection.fetch(_sql["list_stale"], limit)]


async def leave_stale(
    connection: Connection, ids: Sequence[DeliveryId], text: str, now: datetime
) -> list[LeftDelivery]:
    """Skip those of the deliveries that have waited too long."""
    return [LeftDelivery(*row) for row in await connection.fetch(_sql["leave_stale"], now, list(ids), text)]


async def next_stale_seconds(connection: Connection) -> float | None:
    """Seconds until the next delivery has waited too long, or None."""
    seconds: float | None = await connection.fetchval(_sql["next_stale"])
    return seconds


async def filling(connection: Connection, share: float, limit: int) -> list[FillingTrigger]:
    """Triggers of which at least that share of what may wait does, the fullest first."""
    return [FillingTrigger(*row) for row in await connection.fetch(_sql["filling"], share, limit)]


async def follow(
    connection: Connection,
    left: Sequence[LeftDelivery],
    gates: Mapping[TriggerId, LockedTrigger],
    locked_budgets: Iterable[str],
    now: datetime,
) -> None:
    """After deliveries have left: their windows end with them, and whoever is next takes the slot, the time or the
    place in line that was theirs. The caller writes the gates."""
    if not left:
        return
    await windows.follow(connection, [one.id for one in left], now)
    freed: dict[TriggerId, list[datetime]] = {}
    for one in left:
        if one.freed_at is not None:
            freed.setdefault(one.trigger_id, []).append(one.freed_at)
    for trigger_id, times in sorted(freed.items()):
        if trigger_id in gates and not gates[trigger_id].is_replanning:
            await _close_up(connection, gates[trigger_id], times)
    slots = [(one.trigger_id, one.concurrency_key) for one in left if one.concurrency_key is not None]
    await trigger_gates.wake(connection, slots)
    held = set(locked_budgets)
    lines = [one.line for one in left if one.line is not None and one.line[0] in held]
    await budgets.nudge(connection, dict.fromkeys(lines, now) if lines else {})


async def _close_up(connection: Connection, locked: LockedTrigger, times: Sequence[datetime]) -> None:
    """The line of a trigger moves up: otherwise none would be launched at the times of those that have left, and each
    newcomer would get a later one."""
    gate = locked.gate
    row = await connection.fetchrow(_sql["close_up"], gate.trigger_id, list(times), MAX_MOVED)
    assert row is not None, "there are times"
    if row["number"] > MAX_MOVED:
        await trigger_gates.begin_plan(connection, gate.trigger_id, None)
        gate.forget_plan()
    elif gate.drain_at is not None:
        gate.drain_at = None if row["after"] is None else gate.drain_at - (row["before"] - row["after"])
        gate.is_changed = True
