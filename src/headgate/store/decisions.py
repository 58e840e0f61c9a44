"""`event_decisions`: what was decided about events beyond the plain way, for `explain`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from headgate.store.db import Connection
from headgate.store.sql import load

_sql = load("decisions")


class Recorded(NamedTuple):
    """One decision; `at` None means now."""

    event_id: uuid.UUID
    at: datetime | None
    stage: str
    decision: str
    reason: str | None = None
    until: datetime | None = None
    attempt: int | None = None
    actor: str | None = None


async def insert(connection: Connection, decisions: Sequence[Recorded]) -> None:
    """Record decisions, in the transaction that took them."""
    if decisions:
        await connection.execute(_sql["insert"], *(list(column) for column in zip(*decisions, strict=True)))


async def list_of_event(connection: Connection, event_id: uuid.UUID) -> list[Recorded]:
    """What was decided about one event, in order."""
    return [Recorded(*row) for row in await connection.fetch(_sql["list_of_event"], event_id)]
