"""Prune: delete finished, old rows in small transactions; never unfinished rows, nor rows that those need.

An event is deleted with its deliveries, runs, steps, retries and decisions. A finished event cannot become unfinished
(only a replayed dead letter could do that, and an event with a dead letter is kept), so deleting it later is safe.
Any number of workers may prune at once: each skips rows that another has locked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.store import retention
from tidegate.store.db import Connection, Database
from tidegate.store.events import ReceiptPlace

BATCH = 200


class Retention(NamedTuple):
    """How long finished rows are kept, in seconds; 0: for ever."""

    events_seconds: int = 0
    dead_letters_seconds: int = 0
    audit_seconds: int = 0


class Pruned(NamedTuple):
    """What one transaction deleted, by table; whether the pass is complete; how far it has come in the events."""

    deleted: Mapping[str, int]
    is_done: bool
    after: ReceiptPlace = ReceiptPlace()


class Prune:
    """Deletes old rows batch by batch: dead letters first, then events, then the audit log."""

    def __init__(self, database: Database, retention: Retention, *, batch_size: int = BATCH) -> None:
        self._database = database
        self._retention = retention
        self._batch_size = batch_size
        self._after = ReceiptPlace()  # how far the pass over the events has come
        self._stage = 0

    @property
    def is_on(self) -> bool:
        """Whether any retention is set."""
        return any(self._retention)

    async def run_once(self) -> Pruned:
        """One batch. The caller repeats it until the pass is done; the next call then begins a new pass."""
        kept, stages = self._retention, (self._dead_letters, self._events, self._audit)
        order = (kept.dead_letters_seconds, kept.events_seconds, kept.audit_seconds)
        while self._stage < len(stages) and order[self._stage] == 0:
            self._stage += 1
        if self._stage == len(stages):
            self._stage, self._after = 0, ReceiptPlace()
            return Pruned({}, is_done=True)
        pruned = await self._database.run(partial(stages[self._stage], older_seconds=order[self._stage]))
        self._after = pruned.after
        if pruned.is_done:
            self._stage += 1
        found = {table: count for table, count in pruned.deleted.items() if count}
        return Pruned(found, is_done=False)

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

    async def _dead_letters(self, connection: Connection, older_seconds: int) -> Pruned:
        count = await retention.delete_dead_letters(connection, older_seconds=older_seconds, limit=self._batch_size)
        failpoints.hit("prune.before_commit")
        return Pruned({"dead_letters": count}, is_done=count < self._batch_size)

    async def _events(self, connection: Connection, older_seconds: int) -> Pruned:
        page = await retention.page(connection, after=self._after, limit=self._batch_size, older_seconds=older_seconds)
        ids = await retention.lock_finished_events(connection, page.ids, older_seconds=older_seconds)
        deleted = await retention.delete_events(connection, ids) if ids else {}
        failpoints.hit("prune.before_commit")
        return Pruned(deleted, is_done=len(page.ids) < self._batch_size, after=page.end)

    async def _audit(self, connection: Connection, older_seconds: int) -> Pruned:
        count = await retention.delete_audit(connection, older_seconds=older_seconds, limit=self._batch_size)
        failpoints.hit("prune.before_commit")
        return Pruned({"audit_log": count}, is_done=count < self._batch_size)
