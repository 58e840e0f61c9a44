"""Days of history: added ahead of time, dropped as a whole when they are old. What has no day of its own is found,
locked and deleted in small parts."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from typing import NamedTuple

from tidegate.model.ids import EventId
from tidegate.store.db import Connection
from tidegate.store.events import ReceiptPlace
from tidegate.store.sql import load

_sql = load("retention")

# In this order, so that nothing refers to what is gone.
_TABLES = ("steps", "runs", "deliveries", "retries", "decisions", "external_ids", "events")


class Page(NamedTuple):
    """The next events that are old enough, and where they end."""

    ids: list[EventId]
    end: ReceiptPlace


class HistorySpan(NamedTuple):
    """The days that have partitions, and about how many events are in none of them."""

    oldest_day: date | None
    newest_day: date | None
    events_without_a_day: int


class OldDay(NamedTuple):
    """A day that is old enough, and how many of its stories must be kept."""

    day: date
    needed: int


async def add_days(connection: Connection, ahead: int) -> list[date]:
    """Add the partitions of today and of `ahead` days after it; those that are new. Not in a transaction: see the
    functions of the schema."""
    return [row[0] for row in await connection.fetch(_sql["add_days"], ahead)]


async def span(connection: Connection) -> HistorySpan:
    """Which days have partitions."""
    return HistorySpan(*await connection.fetchrow(_sql["span"]))  # type: ignore[misc]  # one row always


async def list_days(connection: Connection, *, older_seconds: int, most_needed: int) -> list[OldDay]:
    """The days that ended that long ago, oldest first; what must be kept is counted up to `most_needed` + 1."""
    return [OldDay(*row) for row in await connection.fetch(_sql["list_days"], older_seconds, most_needed + 1)]


async def delete_external_ids(connection: Connection, day: date, *, older_seconds: int, limit: int) -> int:
    """Delete producers' ids of a day's events that are not kept; how many."""
    return _count(await connection.execute(_sql["delete_external_ids_of_day"], day, limit, older_seconds))


async def day_tables(connection: Connection) -> list[str]:
    """The tables that have days, in the order in which a day is dropped."""
    return [row[0] for row in await connection.fetch(_sql["day_tables"])]


async def count_rows(connection: Connection, table: str, day: date) -> int:
    """About how many rows a day of a table has."""
    return await connection.fetchval(_sql["count_rows"], table, day) or 0


async def drop_day(connection: Connection, table: str, day: date, *, older_seconds: int) -> int | None:
    """Drop a day of a table; how many rows were kept and have moved. None when it was not there. Not in a transaction:
    see the functions of the schema."""
    moved: int | None = await connection.fetchval(_sql["drop_day"], table, day, older_seconds)
    return moved


async def count_events(connection: Connection, *, older_seconds: int, are_all: bool) -> int:
    """How many events are that old: all of them, or those without a day."""
    return int(await connection.fetchval(_sql["count_events"], older_seconds, are_all))


async def count_dead_letters(connection: Connection, *, older_seconds: int) -> int:
    """How many dead letters are that old and not to be replayed."""
    return int(await connection.fetchval(_sql["count_dead_letters"], older_seconds))


async def count_audit(connection: Connection, *, older_seconds: int) -> int:
    """How many rows of the audit log are that old."""
    return int(await connection.fetchval(_sql["count_audit"], older_seconds))


async def page(
    connection: Connection, *, after: ReceiptPlace, limit: int, older_seconds: int, is_default_only: bool
) -> Page:
    """The next events after a place that are older: of all, or of those whose day has no partition."""
    rows = await connection.fetch(_sql["page_of_default" if is_default_only else "page"], *after, limit, older_seconds)
    return Page([row[0] for row in rows], ReceiptPlace(*rows[-1][1:]) if rows else after)


async def lock_finished_events(connection: Connection, ids: Sequence[EventId], *, older_seconds: int) -> list[EventId]:
    """Lock those of the given events that are finished and unchanged for that long."""
    if not ids:
        return []
    rows = await connection.fetch(_sql["lock_finished_events"], ids, older_seconds, min(ids), max(ids))
    return [row[0] for row in rows]


async def delete_events(connection: Connection, ids: Sequence[EventId]) -> dict[str, int]:
    """Delete locked events with all that came of them; how many rows of each."""
    given = (list(ids), min(ids), max(ids))
    return {table: _count(await connection.execute(_sql[f"delete_{table}"], *given)) for table in _TABLES}


async def delete_dead_letters(connection: Connection, *, older_seconds: int, limit: int) -> int:
    """Delete old dead letters; how many."""
    return _count(await connection.execute(_sql["delete_dead_letters"], older_seconds, limit))


async def delete_refusals(connection: Connection, *, older_seconds: int, limit: int) -> int:
    """Delete old refused publish requests; how many."""
    return _count(await connection.execute(_sql["delete_refusals"], older_seconds, limit))


async def delete_audit(connection: Connection, *, older_seconds: int, limit: int) -> int:
    """Delete old rows of the audit log; how many."""
    count: int = await connection.fetchval(_sql["delete_audit"], older_seconds, limit)
    return count


def _count(answer: str) -> int:
    return int(answer.rpartition(" ")[2])
