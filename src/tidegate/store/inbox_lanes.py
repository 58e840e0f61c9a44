"""The lanes of the inbox: who has undecided events, and taking some of each."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.model.shares import Lane, WaitingLane
from tidegate.store import events
from tidegate.store.db import Connection
from tidegate.store.events import Claimed
from tidegate.store.sql import load

_sql = load("inbox_lanes")

Shares = Mapping[Lane, int]


async def has_others(connection: Connection, lane: Lane) -> bool:
    """Whether any other lane has undecided events."""
    found: bool = await connection.fetchval(_sql["has_others"], lane.source, lane.priority)
    return found


async def claim_alone(connection: Connection, lane: Lane, limit: int) -> Claimed:
    """The oldest events, as `events.claim_inbox` takes them, while no other lane has any; otherwise nothing."""
    return events.claimed(await connection.fetch(_sql["claim_alone"], lane.source, lane.priority, limit))


async def claim_others(connection: Connection, lane: Lane, limit: int) -> Claimed:
    """Events of the other lanes, as `events.claim_inbox` takes them."""
    return events.claimed(await connection.fetch(_sql["claim_others"], lane.source, lane.priority, limit))


async def waiting(connection: Connection, after: str, limit: int) -> list[WaitingLane]:
    """The lanes that have undecided events, of at most `limit` sources, beginning after the given one."""
    rows = await connection.fetch(_sql["waiting"], after, limit)
    return [WaitingLane(Lane(row[0], row[1]), row[2], row[3]) for row in rows]


async def lock(connection: Connection, shares: Shares) -> None:
    """Wait for the transactions that have claimed any of these events, and lock those that are left."""
    await connection.fetchval(_sql["lock"], *_columns(shares))


async def claim(connection: Connection, shares: Shares, limit: int) -> Claimed:
    """Take so many events of each lane, and up to the limit of the oldest of all, as `events.claim_inbox` does."""
    return events.claimed(await connection.fetch(_sql["claim"], *_columns(shares), limit))


async def list_sequences(connection: Connection, shares: Shares, limit: int) -> list[int]:
    """The sequence numbers of the events that `claim` would take."""
    return [row[0] for row in await connection.fetch(_sql["list"], *_columns(shares), limit)]


async def are_in_turn(connection: Connection, last: Mapping[Lane, int]) -> bool:
    """Whether all that came before these events in their lanes is decided, or claimed by this transaction."""
    found: bool = await connection.fetchval(_sql["are_in_turn"], *_columns(last))
    return found


def _columns(by_lane: Mapping[Lane, int]) -> tuple[list[str], list[int], list[int]]:
    return [lane.source for lane in by_lane], [lane.priority for lane in by_lane], list(by_lane.values())
