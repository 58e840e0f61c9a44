"""Locks shared by all transactions, their order, and the clock that is read once they are held.

The order, where a transaction takes several:

1. the turn at the inbox (advisory lock 8703): batches for which the order of events matters are decided one by one
2. sources: the advisory locks (8701, one of 64 by name), then the rows of `event_scheduler_sources` by name
3. triggers: the advisory lock (8702), then the rows of `event_scheduler_triggers` by id
4. budgets: the rows of `budgets` by name; a budget's keys, holders and lines change under its lock alone
5. events or deliveries
6. runs
7. steps
8. backlogs of sources that have a cap (advisory lock 8704, by name), by who publishes. Whoever holds one waits for
   nobody, but to drop the oldest for the row of that source, which a batch may hold: if that waits for a run of the
   publisher, one of them is rolled back and begins again

Transactions that launch share the advisory locks of their sources and of the triggers; a transaction that pauses or
changes one takes its lock exclusively. So when a pause or a change returns, nothing decided before it is in progress.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime

from tidegate.model.ids import TriggerId
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("locks")

# The source that stands for all sources without a limit of their own.
DEFAULT = "*"


class Unlocked(Exception):
    """These triggers turn out to matter and are not locked. Locked now, they would be out of order: begin again."""

    def __init__(self, trigger_ids: Collection[TriggerId]) -> None:
        super().__init__(", ".join(map(str, trigger_ids)))
        self.trigger_ids = frozenset(trigger_ids)


async def take_turn(connection: Connection, limit: int) -> None:
    """Wait until all that came before the next `limit` undecided events is decided, and keep out other transactions
    that care about the order."""
    await connection.fetchval(_sql["take_turn"], limit)


async def hold_turn(connection: Connection) -> None:
    """Keep out other transactions that care about the order, until the commit."""
    await connection.fetchval(_sql["hold_turn"])


async def is_in_turn(connection: Connection, last_sequence: int) -> bool:
    """Whether all that came before that event is decided, or claimed by this transaction."""
    found: bool = await connection.fetchval(_sql["is_in_turn"], last_sequence)
    return found


async def share(connection: Connection, sources: Sequence[str]) -> None:
    """Say that this transaction may launch for the sources, by the triggers as they are: a pause, or a change of a
    trigger, waits for it, and it for them."""
    await connection.fetch(_sql["share"], [*sources, DEFAULT])


async def share_all(connection: Connection) -> None:
    """Say that this transaction may launch for any source."""
    await connection.fetch(_sql["share_all"])


async def exclude_source(connection: Connection, source: str) -> None:
    """Wait until no transaction that may launch for the source is in progress, and keep new ones out."""
    await connection.execute(_sql["exclude_source"], source)


async def exclude_triggers(connection: Connection) -> None:
    """Wait until no transaction that decides by triggers is in progress, and keep new ones out."""
    await connection.execute(_sql["exclude_triggers"])


async def now(connection: Connection) -> datetime:
    """The database's time."""
    found: datetime = await connection.fetchval(_sql["now"])
    return found


async def moment(connection: Connection) -> tuple[datetime, int]:
    """The database's time, and the version of the registry of triggers."""
    row = await connection.fetchrow(_sql["moment"])
    assert row is not None
    return row[0], row[1]
