"""Stale: deliveries that have waited for longer than their trigger's `max_wait` leave: they are skipped.

A delivery that is decided again after its time is skipped there (`delivery_check`); this stage is for those that nobody
would decide before their next attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from tidegate import failpoints
from tidegate.model.backlog import TOO_LONG
from tidegate.store import backlogs, budgets, locks, totals, trigger_gates
from tidegate.store.backlogs import LeftDelivery, StaleDelivery
from tidegate.store.db import Connection, Database
from tidegate.store.totals import BatchTotals, TriggerTotals
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

BATCH = 500

_log = logger("deliver")


class StaleDeliveries:
    """Skips what has waited too long; `after_leave` is called after a commit in which some have left."""

    def __init__(self, database: Database, *, after_leave: Callable[[], None] = lambda: None) -> None:
        self._database = database
        self._after_leave = after_leave

    async def run_once(self) -> int:
        """Let a batch of them leave; how many did."""
        async with self._database.connection() as connection:
            found = await backlogs.list_stale(connection, BATCH)
        if not found:
            return 0
        left = await self._database.run(partial(self._leave, found=found))
        failpoints.hit("stale.after_commit")
        if left:
            self._report(found, left)
            self._after_leave()
        return len(left)

    async def next_due_seconds(self) -> float | None:
        """Seconds until the next one has waited too long, or None."""
        async with self._database.connection() as connection:
            return await backlogs.next_stale_seconds(connection)

    async def _leave(self, connection: Connection, found: Sequence[StaleDelivery]) -> list[LeftDelivery]:
        gates = await trigger_gates.lock(connection, always={one.trigger_id for one in found})
        held = await budgets.lock(connection, {name for one in gates.values() for name in one.budgets})
        now = await locks.now(connection)
        left = await backlogs.leave_stale(connection, [one.id for one in found], TOO_LONG, now)
        await backlogs.follow(connection, left, gates, held, now)
        await trigger_gates.save(connection, (one.gate for one in gates.values()))
        counts = Counter(one.trigger_id for one in left)
        seen = [TriggerTotals(t, skipped=n, last_status="skipped") for t, n in sorted(counts.items())]
        await totals.add(connection, BatchTotals(seen))
        failpoints.hit("stale.before_commit")
        return left

    def _report(self, found: Sequence[StaleDelivery], left: Sequence[LeftDelivery]) -> None:
        names = {one.trigger_id: one.trigger for one in found}
        for trigger_id, count in Counter(one.trigger_id for one in left).items():
            metrics.left_backlog("trigger", names[trigger_id], "too_old", count)
            metrics.evaluated(names[trigger_id], "skipped", count)
        metrics.DELIVERY_RETRIES.labels("skipped").inc(len(left))
        for one in left:
            _log.info("delivery.too_old", delivery_id=one.id, event_id=one.event_id, trigger_id=one.trigger_id,
                      trigger=names[one.trigger_id], attempt=one.retry_attempts, reason=one.reason)  # fmt: skip
