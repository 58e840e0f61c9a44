"""Reconcile: what is due and has not moved? Claims whose lease ran out are made due again and their holders fenced;
wake-ups that the queue has lost are sent again."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime, timedelta

from headgate import failpoints
from headgate.model.ingress_retry import IngressRetry
from headgate.queue.port import Queue
from headgate.queue.wakeups import HORIZON, Spacing, event_wakeups
from headgate.store import deliveries, ingress_retries, runs, sources, steps
from headgate.store.db import Connection, Database
from headgate.telemetry import metrics
from headgate.telemetry.logs import logger

# Rows due sooner are found by the workers' own look before a wake-up could matter.
NEAR = timedelta(seconds=1)
# A row that was written just now: its wake-up may still be on the way.
SETTLING = timedelta(seconds=2)

_log = logger("reconcile")


class Reconcile:
    """Finds work that a dead or frozen worker left behind, whichever process it was."""

    def __init__(self, database: Database, *, batch_size: int) -> None:
        self._database = database
        self._batch_size = batch_size

    async def run_once(self) -> dict[str, int]:
        """Release expired claims; how many of each kind."""
        released = await self._database.run(self._release)
        for kind, count in released.items():
            if count:
                metrics.RECONCILE_REQUEUED.labels(kind).inc(count)
                _log.warning("reconcile.released", kind=kind, count=count, reason="the lease ran out")
        return released

    async def _release(self, connection: Connection) -> dict[str, int]:
        released = {"runs": len(await runs.release_expired(connection, self._batch_size))}
        failpoints.hit("reconcile.mid_batch")
        released["steps"] = len(await steps.release_expired(connection, self._batch_size))
        released["deliveries"] = len(await deliveries.release_expired(connection, self._batch_size))
        released["events"] = len(await ingress_retries.release_expired(connection, self._batch_size))
        return released


class Requeue:
    """Compares the events that wait with the queue's wake-ups, page by page, over and over."""

    def __init__(self, database: Database, queue: Queue, *, batch_size: int) -> None:
        self._database = database
        self._queue = queue
        self._batch_size = batch_size
        self._after: tuple[datetime, uuid.UUID] | None = None
        self._spacing = Spacing()

    @property
    def is_between_pages(self) -> bool:
        """Whether the present pass has further pages."""
        return self._after is not None

    async def run_once(self) -> int:
        """One page; how many lost wake-ups were sent again."""
        if not self._queue.holds_wakeups:
            return 0
        async with self._database.connection() as connection:
            now = await sources.now(connection)
            # From a whole second on: of a part of one it could not be told whether it has enough wake-ups.
            near = ((now + NEAR).replace(microsecond=0) + timedelta(seconds=1), uuid.UUID(int=0))
            rows = await ingress_retries.list_scheduled(
                connection, after=max(self._after or near, near), limit=self._batch_size
            )
        within = [row for row in rows if row.next_attempt_at is not None and row.next_attempt_at - now <= HORIZON]
        requeued = await self._compare(within, now)
        if len(within) == self._batch_size and within[-1].next_attempt_at is not None:
            self._after = (within[-1].next_attempt_at, within[-1].event_id)
        else:
            self._after, self._spacing = None, Spacing()
        return requeued

    async def _compare(self, rows: Sequence[IngressRetry], now: datetime) -> int:
        wakeups = event_wakeups(rows)
        absent = await self._queue.missing(wakeups)
        for wakeup in set(wakeups) - set(absent):
            self._spacing.count(wakeup)
        settled = {row.event_id: row for row in rows if row.updated_at is None or now - row.updated_at >= SETTLING}
        wanted = [wakeup for wakeup in absent if wakeup.row_id in settled and self._spacing.admit(wakeup)]
        if not wanted:
            return 0
        self._queue.schedule(wanted)
        lost = sum(_had_wakeup(settled[wakeup.row_id]) for wakeup in wanted)
        if lost:
            metrics.RECONCILE_REQUEUED.labels("events").inc(lost)
            _log.warning("reconcile.requeued", kind="events", count=lost, reason="the queue had lost their wake-ups")
        return lost


def _had_wakeup(row: IngressRetry) -> bool:
    """Whether it was near enough when it was last written; a later one gets its first wake-up only now."""
    if row.next_attempt_at is None or row.updated_at is None:
        return True
    return row.next_attempt_at - row.updated_at <= HORIZON
