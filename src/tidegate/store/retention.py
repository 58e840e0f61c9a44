"""What is finished and old, across the tables: found, locked and deleted in small parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tidegate.model.ids import EventId
from tidegate.store.db import Connection
from tidegate.store.events import ReceiptPlace
from tidegate.store.sql import load

_sql = load("retention")

# In this order, so that nothing refers to what is gone.
_TABLES = ("steps", "runs", "deliveries", "retries", "decisions", "events")


class Page(NamedTuple):
    """The next events that are old enough, and where they end."""

    ids: list[EventId]
    end: ReceiptPlace


async def page(connection: Connection, *, after: ReceiptPlace, limit: int, older_seconds: int) -> Page:
    """The next events after a place that are older."""
    rows = await connection.fetch(_sql["page"], *after, limit, older_seconds)
    return Page([row[0] for row in rows], ReceiptPlace(*rows[-1][1:]) if rows else after)


async def lock_finished_events(connection: Connection, ids: Sequence[EventId], *, older_seconds: int) -> list[EventId]:
    """Lock those of the given events that are finished and unchanged for that long."""
    rows = await connection.fetch(_sql["lock_finished_events"], ids, older_seconds)
    return [row[0] for row in rows]


async def delete_events(connection: Connection, ids: Sequence[EventId]) -> dict[str, int]:
    """Delete locked events with all that came of them; how many rows of each."""
    return {table: _count(await connection.execute(_sql[f"delete_{table}"], list(ids))) for table in _TABLES}


async def delete_dead_letters(connection: Connection, *, older_seconds: int, limit: int) -> int:
    """Delete old dead letters; how many."""
    return _count(await connection.execute(_sql["delete_dead_letters"], older_seconds, limit))


async def delete_audit(connection: Connection, *, older_seconds: int, limit: int) -> int:
    """Delete old rows of the audit log; how many."""
    count: int = await connection.fetchval(_sql["delete_audit"], older_seconds, limit)
    return count


def _count(answer: str) -> int:
    return int(answer.rpartition(" ")[2])
