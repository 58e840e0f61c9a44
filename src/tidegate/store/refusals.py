"""`publish_refusals`: publish requests that were refused, kept for a while, found by the producer's id."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("refusals")

# The newest so many are kept, whatever their age.
MAX_KEPT = 100_000


class NewRefusal(NamedTuple):
    """A refused request: how long ago, the status of the answer, and the event as far as it could be read."""

    age_ms: int
    status: int
    external_id: str | None
    type: str | None
    source: str | None
    reason: str


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A refused request."""

    at: datetime
    status: int
    external_id: str | None
    type: str | None
    source: str | None
    reason: str


async def insert(connection: Connection, refused: Sequence[NewRefusal]) -> None:
    """Keep refused requests."""
    if refused:
        columns = [list(column) for column in zip(*refused, strict=True)]
        await connection.execute(_sql["insert"], *columns, MAX_KEPT)


async def find(connection: Connection, external_id: str, limit: int = 20) -> list[Refusal]:
    """The newest refused requests with a producer's id, oldest first."""
    return [Refusal(**dict(row)) for row in await connection.fetch(_sql["find"], external_id, limit)]
