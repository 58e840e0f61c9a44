"""What triggers take and replace by key: `trigger_rates` (what is over a rate is skipped), and the deliveries and runs
that a later delivery takes the place of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import NamedTuple

from tidegate.model.ids import DeliveryId, EventId, RunId, TriggerId
from tidegate.model.source import Gate, RateLimit
from tidegate.store import runs
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("trigger_rates")

TriggerKey = tuple[TriggerId, str]


class Superseding(NamedTuple):
    """A delivery that takes the place of what waits and runs."""

    id: DeliveryId
    event_id: EventId


class Superseded(NamedTuple):
    """What a later delivery took the place of: deliveries, with their triggers, and runs that are to be cancelled."""

    skipped: list[tuple[DeliveryId, TriggerId]]
    cancelled: set[RunId]


async def taken(connection: Connection, limits: Mapping[TriggerKey, RateLimit]) -> dict[TriggerKey, Gate]:
    """What was taken of triggers and keys. The caller holds the triggers' locks."""
    pairs = sorted(limits)
    rows = await connection.fetch(_sql["load"], [t for t, _ in pairs], [k for _, k in pairs])
    known = {(row["trigger_id"], row["key"]): dict(row) for row in rows}
    found = {}
    for pair, limit in limits.items():
        ring = {name: value for name, value in known.get(pair, {}).items() if name not in ("trigger_id", "key")}
        found[pair] = Gate(pair[1], limit=limit, **ring)
    return found


async def save(connection: Connection, rates: Mapping[TriggerKey, Gate]) -> None:
    """Write back what was taken."""
    changed = [(pair, gate) for pair, gate in sorted(rates.items()) if gate.is_changed and gate.limit is not None]
    if not changed:
        return
    await connection.execute(
        _sql["save"],
        [pair[0] for pair, _ in changed],
        [pair[1] for pair, _ in changed],
        ["{" + ",".join(map(str, gate.ring)) + "}" for _, gate in changed],
        [gate.ring_at for _, gate in changed],
        [gate.ring_width_us for _, gate in changed],
        [gate.spent_at for _, gate in changed],
        [2 * gate.limit.interval_ms if gate.limit else 0 for _, gate in changed],
    )


async def forget(connection: Connection, limit: int) -> None:
    """Delete what no longer counts."""
    await connection.execute(_sql["forget"], limit)


async def supersede(connection: Connection, by: Mapping[TriggerKey, Superseding], now: datetime) -> Superseded:
    """Skip the deliveries that wait for a slot of each trigger and key before the one that takes their place, and ask
    for the cancellation of the unfinished runs. The caller holds the triggers' locks; after the commit, hint the
    queue."""
    pairs = sorted(by)
    ids, keys = [trigger_id for trigger_id, _ in pairs], [key for _, key in pairs]
    skipped = await connection.fetch(_sql["supersede"], ids, keys, [by[pair].id for pair in pairs], now)
    running = await connection.fetch(_sql["running"], ids, keys, [by[pair].event_id for pair in pairs])
    cancelled: set[RunId] = set()
    if running:
        await runs.lock(connection, [row[0] for row in running])
        asked = await connection.fetch(_sql["cancel_running"], [row[0] for row in running], [row[1] for row in running])
        cancelled = {row[0] for row in asked}
        await runs.wake(connection, sorted(cancelled))
    return Superseded([(row[0], row[1]) for row in skipped], cancelled)


def limits_of(limits: Iterable[tuple[TriggerKey | None, RateLimit | None]]) -> dict[TriggerKey, RateLimit]:
    """The limits by trigger and key, of those that have one."""
    return {pair: limit for pair, limit in limits if pair is not None and limit is not None}
