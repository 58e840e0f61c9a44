"""Caps on what waits of sources: how many of their events are undecided or held, and what happens to one more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tidegate.model.backlog import SourceBacklog, SourceWhenFull
from tidegate.model.event import NewEvent
from tidegate.model.ids import EventId
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("source_backlogs")


class LockedBacklog(NamedTuple):
    """A source with a cap, to which nobody else adds until the commit, and how many of its events wait."""

    source: str
    max_waiting: int
    when_full: SourceWhenFull
    waiting: int


class FillingSource(NamedTuple):
    """A source of which nearly as much waits as may."""

    source: str
    waiting: int
    max_waiting: int
    when_full: SourceWhenFull


async def list_all(connection: Connection) -> dict[str, SourceBacklog]:
    """The sources that have a cap."""
    return {row[0]: SourceBacklog(row[1], row[2]) for row in await connection.fetch(_sql["list"])}


async def lock(connection: Connection, sources: Iterable[str], more: int) -> dict[str, LockedBacklog]:
    """Those of the sources that have a cap, locked until the commit; what waits is counted no further than `more`
    beyond it."""
    rows = await connection.fetch(_sql["lock"], sorted(set(sources)), more)
    return {row[0]: LockedBacklog(*row) for row in rows}


async def known(connection: Connection, events: Iterable[NewEvent]) -> set[tuple[str, str]]:
    """Those of the producers' ids, with their sources, that were published before."""
    named = [(event.external_id, event.source) for event in events if event.external_id is not None]
    if not named:
        return set()
    rows = await connection.fetch(_sql["known"], [own_id for own_id, _ in named], [source for _, source in named])
    return {(row[0], row[1]) for row in rows}


async def drop_oldest(connection: Connection, source: str, number: int, text: str) -> int:
    """The oldest waiting events of a locked source leave; how many."""
    count: int = await connection.fetchval(_sql["drop_oldest"], source, number, text)
    return count


async def dead_letter(connection: Connection, ids: Sequence[EventId], text: str) -> int:
    """Events that this transaction has stored become dead letters; how many."""
    count: int = await connection.fetchval(_sql["dead_letter"], list(ids), text)
    return count


async def set_backlog(connection: Connection, source: str, backlog: SourceBacklog | None, actor: str) -> None:
    """An operator's cap on what waits of a source, or none."""
    await connection.execute(_sql["set"], source, *(backlog or (None, None)), actor)


async def filling(connection: Connection, share: float, limit: int) -> list[FillingSource]:
    """The sources of which at least that share of what may wait does, the fullest first."""
    return [FillingSource(*row) for row in await connection.fetch(_sql["filling"], share, limit)]
