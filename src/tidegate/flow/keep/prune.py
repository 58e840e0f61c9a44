"""Prune: remove history that is finished and old; never what is unfinished, nor what that needs.

History is dropped by whole days: the events that were received on a day, with all that came of them, however much it
is. What must be kept of such a day moves to the default partition: what is unfinished, needed by a dead letter, or
ended too recently. A day with more than `MOST_MOVED` of these stories is kept as it is.

What is in the default partition is deleted row by row, in small transactions: an event with its deliveries, runs,
steps, retries and decisions, once all of it has been unchanged for long enough. So is everything, if it is kept for
less than `DAYS_FROM_SECONDS`. An event is locked before it is deleted, and whoever makes a finished one unfinished (a
replay, a resumed or repeated run) locks it, too; an event with a dead letter is kept. Any number of workers may prune
at once.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from datetime import date
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.model.retention import Retention, longest
from tidegate.store import processes, retention
from tidegate.store.db import Connection, Database, TransientConflict
from tidegate.store.events import ReceiptPlace
from tidegate.telemetry.logs import logger

_log = logger("prune")

BATCH = 200
# Producers' ids have no partitions: a day's are deleted in batches of this size before it is dropped.
EXTERNAL_IDS_BATCH = 10_000
# Refused publish requests are kept for a week, or as long as events if that is less.
REFUSALS_SECONDS = 7 * 86_400
# A shorter retention cannot wait for a day to end: it goes row by row.
DAYS_FROM_SECONDS = 2 * 86_400
# More than this many stories are not moved, while everyone waits for the lock; their day is kept until there are fewer.
MOST_MOVED = 2_000
# A day that is kept is counted again after this time.
KEPT_SECONDS = 3_600.0
# How often, and how soon again, a day's table is tried to be dropped while other transactions use it.
_TRIES, _REST_SECONDS = 40, 0.25


class Pruned(NamedTuple):
    """What one step removed, by table (and `days` of history); whether the pass is complete."""

    deleted: Mapping[str, int]
    is_done: bool


class Prune:
    """Removes old history step by step: dead letters, days, events one by one, refused requests, the audit log."""

    def __init__(
        self, database: Database, retention: Retention, *, batch_size: int = BATCH, is_agreed: bool = False
    ) -> None:
        """`is_agreed`: nothing goes that a living process would keep for longer (`agreed`)."""
        self._database = database
        self._own = self._retention = retention
        self._is_agreed = is_agreed
        self._batch_size = batch_size
        self._after = ReceiptPlace()  # how far the pass over the events has come
        self._kept: dict[date, float] = {}  # days with too much to move, and when they are counted again
        self._stage = 0

    @property
    def is_on(self) -> bool:
        """Whether any retention is set."""
        return any(self._own)

    async def run_once(self) -> Pruned:
        """One step. The caller repeats it until the pass is done; the next call then begins a new pass."""
        if self._is_agreed and self._stage == 0:
            async with self._database.connection() as connection:
                self._retention = await agreed(connection, self._own)
        kept = self._retention
        stages = (
            (self._dead_letters, kept.dead_letters_seconds),
            (self._days, kept.events_seconds),
            (self._events, kept.events_seconds),
            (self._refusals, min(kept.events_seconds, REFUSALS_SECONDS)),
            (self._audit, kept.audit_seconds),
        )
        while self._stage < len(stages) and stages[self._stage][1] == 0:
            self._stage += 1
        if self._stage == len(stages):
            self._stage, self._after = 0, ReceiptPlace()
            return Pruned({}, is_done=True)
        stage, older_seconds = stages[self._stage]
        pruned = await stage(older_seconds)
        if pruned.is_done:
            self._stage += 1
        return Pruned({table: count for table, count in pruned.deleted.items() if count}, is_done=False)

    async def run(self, batches: int | None = None) -> Counter[str]:
        """A whole pass, or `batches` of it; how many rows of each table were deleted."""
        total: Counter[str] = Counter()
        while batches is None or batches > 0:
            pruned = await self.run_once()
            total.update(pruned.deleted)
            if pruned.is_done:
                break
            batches = None if batches is None else batches - 1
        return total

    async def _dead_letters(self, older_seconds: int) -> Pruned:
        async def delete(connection: Connection) -> int:
            count = await retention.delete_dead_letters(connection, older_seconds=older_seconds, limit=self._batch_size)
            failpoints.hit("prune.before_commit")
            return count

        count = await self._database.run(delete)
        return Pruned({"dead_letters": count}, is_done=count < self._batch_size)

    async def _days(self, older_seconds: int) -> Pruned:
        """The oldest day that is old enough: a batch of its producers' ids; when none is left, the day."""
        day = await self._next_day(older_seconds) if older_seconds >= DAYS_FROM_SECONDS else None
        if day is None:
            return Pruned({}, is_done=True)
        delete = partial(retention.delete_external_ids, day=day, older_seconds=older_seconds, limit=EXTERNAL_IDS_BATCH)
        if deleted := await self._database.run(delete):
            return Pruned({"external_ids": deleted}, is_done=False)
        return Pruned({"days": await self._drop(day, older_seconds)}, is_done=False)

    async def _next_day(self, older_seconds: int) -> date | None:
        now = monotonic()
        self._kept = {day: until for day, until in self._kept.items() if until > now}
        async with self._database.connection() as connection:
            found = await retention.list_days(connection, older_seconds=older_seconds, most_needed=MOST_MOVED)
        for day, needed in (one for one in found if one.day not in self._kept):
            if needed <= MOST_MOVED:
                return day
            self._kept[day] = now + KEPT_SECONDS
            _log.warning("prune.day_kept", day=str(day), needed=needed)
        return None

    async def _drop(self, day: date, older_seconds: int) -> int:
        """Drop a day of each table, each by a statement of its own; 1 if the day is gone by that."""
        rows = moved = 0
        found: int | None = None
        async with self._database.connection() as connection:
            tables = await retention.day_tables(connection)
        for table in tables:
            async with self._database.connection() as connection:
                rows += await retention.count_rows(connection, table, day)
            try:
                found = await self._drop_table(table, day, older_seconds)
            except TransientConflict:
                self._kept[day] = monotonic() + KEPT_SECONDS
                _log.warning("prune.day_busy", day=str(day), table=table)
                return 0
            moved += found or 0
        if found is None:  # another worker was first
            return 0
        _log.info("prune.day_dropped", day=str(day), rows=rows, moved=moved)
        return 1

    async def _drop_table(self, table: str, day: date, older_seconds: int) -> int | None:
        async def drop() -> int | None:
            failpoints.hit("prune.before_commit")
            async with self._database.connection() as connection:
                return await retention.drop_day(connection, table, day, older_seconds=older_seconds)

        for _ in range(_TRIES - 1):
            try:
                return await drop()
            except TransientConflict:
                await asyncio.sleep(_REST_SECONDS)
        return await drop()

    async def _events(self, older_seconds: int) -> Pruned:
        is_default_only = older_seconds >= DAYS_FROM_SECONDS

        async def delete(connection: Connection) -> tuple[dict[str, int], retention.Page]:
            page = await retention.page(
                connection, after=self._after, limit=self._batch_size, older_seconds=older_seconds,
                is_default_only=is_default_only,
            )  # fmt: skip
            ids = await retention.lock_finished_events(connection, page.ids, older_seconds=older_seconds)
            # Once more, now that they are locked: a run of theirs may have been resumed while the first look was taken.
            ids = await retention.lock_finished_events(connection, ids, older_seconds=older_seconds)
            deleted = await retention.delete_events(connection, ids) if ids else {}
            failpoints.hit("prune.before_commit")
            return deleted, page

        deleted, page = await self._database.run(delete)
        self._after = page.end
        return Pruned(deleted, is_done=len(page.ids) < self._batch_size)

    async def _refusals(self, older_seconds: int) -> Pruned:
        async def delete(connection: Connection) -> int:
            return await retention.delete_refusals(connection, older_seconds=older_seconds, limit=self._batch_size)

        count = await self._database.run(delete)
        return Pruned({"publish_refusals": count}, is_done=count < self._batch_size)

    async def _audit(self, older_seconds: int) -> Pruned:
        async def delete(connection: Connection) -> int:
            count = await retention.delete_audit(connection, older_seconds=older_seconds, limit=self._batch_size)
            failpoints.hit("prune.before_commit")
            return count

        count = await self._database.run(delete)
        return Pruned({"audit_log": count}, is_done=count < self._batch_size)


async def agreed(connection: Connection, own: Retention) -> Retention:
    """How long rows are kept, by the settings of all living processes: one with other settings than the rest removes
    nothing that they want to keep."""
    return longest([own, *(one.retention for one in await processes.retentions(connection))])
