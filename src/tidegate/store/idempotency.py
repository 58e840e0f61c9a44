"""`trigger_idempotency_keys`: one launch for each trigger and key, until the key expires."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from tidegate.model.ids import DeliveryId, RunId, TriggerId
from tidegate.store.db import Connection, TransientConflict
from tidegate.store.sql import load

_sql = load("idempotency")

Key = tuple[TriggerId, str]


class Kept(NamedTuple):
    """Which launch holds a key, and for how long."""

    trigger_id: TriggerId
    dedupe_key: str
    delivery_id: DeliveryId
    run_id: RunId
    window_ms: int


async def claim(connection: Connection, wanted: Iterable[Key]) -> dict[Key, RunId | None]:
    """Each key with the run that holds it; None: it was free and is ours until the commit.

    Waits for other transactions that have taken one of the keys. Afterwards each key of ours is kept or released.
    """
    keys = sorted(set(wanted))
    if not keys:
        return {}
    columns = [trigger_id for trigger_id, _ in keys], [key for _, key in keys]
    ours = {(row[0], row[1]) for row in await connection.fetch(_sql["claim"], *columns)}
    if len(ours) == len(keys):
        return dict.fromkeys(keys)
    holders = {(row[0], row[1]): row[2] for row in await connection.fetch(_sql["holders"], *columns)}
    if any(holders.get(key) is None for key in keys if key not in ours):
        raise TransientConflict("a key was released a moment ago")
    return {key: None if key in ours else holders[key] for key in keys}


async def keep(connection: Connection, kept: Iterable[Kept], now: datetime) -> None:
    """The launches keep their keys until their windows end."""
    columns = [list(column) for column in zip(*kept, strict=True)]
    if columns:
        await connection.execute(_sql["keep"], *columns, now)


async def release(connection: Connection, unused: Iterable[Key]) -> None:
    """Give back keys that were taken and not used."""
    keys = sorted(unused)
    if keys:
        await connection.execute(_sql["release"], [t for t, _ in keys], [k for _, k in keys])


async def forget_expired(connection: Connection, limit: int) -> None:
    """Remove keys that have expired."""
    await connection.execute(_sql["forget"], limit)
