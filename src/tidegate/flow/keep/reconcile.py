"""Reconcile: find due work that does not move. Claims whose lease has expired are made due again and their holders are
fenced; wake-ups that the queue has lost are sent again."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.flow.decide.reporting import log_source_moves, log_trigger_moves
from tidegate.flow.keep.budgets import BudgetKeeper
from tidegate.flow.keep.children import ChildKeeper
from tidegate.flow.run import finish
from tidegate.flow.run.finish import Freed
from tidegate.model.ids import RunId, TriggerId
from tidegate.model.run import MAX_TRIALS, FinishedRun, Run
from tidegate.model.source import SOURCE_BREAKER, TRIGGER_BREAKER, BreakerPolicy, SourceBreakerPolicy
from tidegate.queue.port import Queue, Wakeup
from tidegate.queue.wakeups import HORIZON, Spacing, delivery_wakeups, event_wakeups, step_wakeups
from tidegate.store import (
    deliveries,
    idempotency,
    ingress_retries,
    locks,
    runs,
    steps,
    trigger_gates,
    trigger_rates,
    windows,
    workers,
)
from tidegate.store.db import Connection, Database
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

# Rows due sooner are found by the workers' own polling before a wake-up could matter.
NEAR = timedelta(seconds=1)
# How often the success counts of triggers are compacted.
TIDY_SECONDS = 30.0
# The wake-up of a row written more recently than this may not have arrived in the queue yet.
SETTLING = timedelta(seconds=2)
KILLS_WORKERS = (
    f"stopped retrying: {MAX_TRIALS} times in a row its worker died, or did not renew its lease in time, "
    "while this run was the only one executing there"
)

_log = logger("reconcile")


class Reconcile:
    """Finds work that a dead or frozen worker left behind, of any process."""

    def __init__(
        self,
        database: Database,
        *,
        batch_size: int,
        breaker: BreakerPolicy = TRIGGER_BREAKER,
        source_breaker: SourceBreakerPolicy = SOURCE_BREAKER,
        worker: str | None = None,
    ) -> None:
        self._database = database
        self._worker = worker
        self._batch_size = batch_size
        self._breaker = breaker
        self._source_breaker = source_breaker
        self._tidy_at = 0.0
        self._budgets = BudgetKeeper(database)
        self._children = ChildKeeper(database, batch_size=batch_size, breaker=breaker)

    async def run_once(self) -> dict[str, int]:
        """Release expired claims; how many of each kind, and how many children were cancelled or found lost."""
        released = await self._database.run(self._release)
        await self._fail_killers()
        children = await self._children.run_once()
        if released["runs"]:  # their steps held slots of budgets
            await self._budgets.sweep()
        if monotonic() >= self._tidy_at:
            await self._database.run(_tidy)
            await self._budgets.run_once()
            self._tidy_at = monotonic() + TIDY_SECONDS
        for kind, count in released.items():
            if count:
                metrics.RECONCILE_REQUEUED.labels(kind).inc(count)
                _log.warning("reconcile.released", kind=kind, count=count, reason="the lease has expired")
        if self._worker is not None:
            async with self._database.connection() as connection:
                await workers.reconciled(connection, self._worker)
        return released | {"children": children}

    async def _release(self, connection: Connection) -> dict[str, int]:
        released = {"runs": len(await runs.release_expired(connection, self._batch_size))}
        failpoints.hit("reconcile.mid_batch")
        await idempotency.forget_expired(connection, self._batch_size)
        await windows.forget(connection, self._batch_size)
        await trigger_rates.forget(connection, self._batch_size)
        return released

    async def _fail_killers(self) -> None:
        """Fail the runs whose worker died each of the MAX_TRIALS times they were executed alone: the next worker to
        claim such a run would die too."""
        async with self._database.connection() as connection:
            killers = await runs.list_killers(connection, MAX_TRIALS, self._batch_size)
        for run_id, trigger_id in killers:  # one by one, so that each can keep the order of locks
            done = await self._database.run(partial(self._fail_killer, run_id=run_id, trigger_id=trigger_id))
            if done is None:
                continue
            run, freed = done
            metrics.ran(run.workflow, "failed")
            _log.error(
                "run.kills_workers", run_id=run_id, workflow=run.workflow, event_id=run.event_id,
                correlation_id=run.correlation_id, attempt=run.attempts, reason=KILLS_WORKERS,
            )  # fmt: skip
            log_trigger_moves(freed.moves)
            log_source_moves(freed.source_moves)

    async def _fail_killer(
        self, connection: Connection, *, run_id: RunId, trigger_id: TriggerId | None
    ) -> tuple[Run, Freed] | None:
        end = partial(runs.fail_killer, connection, run_id, KILLS_WORKERS, MAX_TRIALS)
        freed = await finish.fail_waiting(connection, run_id, trigger_id, end, self._breaker, self._source_breaker)
        if freed is None:
            return None
        await runs.dead_letter(
            connection, [FinishedRun(id=RunId(run_id), claim_generation=0, status="failed", error=KILLS_WORKERS)]
        )
        known = await runs.get(connection, run_id)
        assert known is not None, f"{run_id} was just written"
        return known, freed


async def _tidy(connection: Connection) -> None:
    await trigger_gates.forget_successes(connection)
    await trigger_gates.fold_successes(connection)


Place = tuple[datetime, uuid.UUID]


class WaitingRow(NamedTuple):
    """A waiting row: the wake-up that it should have, and when it was last written. `is_first`: none was sent then."""

    wakeup: Wakeup
    updated_at: datetime | None
    is_first: bool = False

    @property
    def place(self) -> Place:
        """Its position in due order."""
        return self.wakeup.due_at, self.wakeup.row_id

    def is_settled(self, now: datetime) -> bool:
        """Whether its wake-up has had time to arrive in the queue."""
        return self.updated_at is None or now - self.updated_at >= SETTLING

    def had_wakeup(self) -> bool:
        """Whether a wake-up was sent when it was last written; a row further away than HORIZON gets its first only
        now, and so does an event that was published for a later time: whoever stores it sends none."""
        return not self.is_first and (self.updated_at is None or self.wakeup.due_at - self.updated_at <= HORIZON)


async def _events(connection: Connection, after: Place, limit: int) -> list[WaitingRow]:
    rows = await ingress_retries.list_scheduled(connection, after=after, limit=limit)
    found = zip(event_wakeups(rows), rows, strict=True)
    return [WaitingRow(wakeup, row.updated_at, is_first=row.reason == "scheduled") for wakeup, row in found]


async def _deliveries(connection: Connection, after: Place, limit: int) -> list[WaitingRow]:
    rows = await deliveries.list_scheduled(connection, after=after, limit=limit)
    return [WaitingRow(wakeup, row.updated_at) for wakeup, row in zip(delivery_wakeups(rows), rows, strict=True)]


async def _steps(connection: Connection, after: Place, limit: int) -> list[WaitingRow]:
    rows = await steps.list_scheduled(connection, after=after, limit=limit)
    return [WaitingRow(wakeup, row.updated_at) for wakeup, row in zip(step_wakeups(rows), rows, strict=True)]


# Waiting rows by kind, each in due order from a given position on.
_LINES: dict[str, Callable[[Connection, Place, int], Awaitable[list[WaitingRow]]]] = {
    "events": _events,
    "deliveries": _deliveries,
    "steps": _steps,
}


class Requeue:
    """Compares waiting rows with the queue's wake-ups, page by page, in repeated passes."""

    def __init__(self, database: Database, queue: Queue, *, batch_size: int) -> None:
        self._database = database
        self._queue = queue
        self._batch_size = batch_size
        # The kinds with further pages in this pass, and how far each has come.
        self._places: dict[str, Place | None] = {}
        self._spacing = Spacing()

    @property
    def is_between_pages(self) -> bool:
        """Whether the current pass has further pages."""
        return bool(self._places)

    async def run_once(self) -> int:
        """One page of each kind; how many lost wake-ups were sent again."""
        if not self._queue.holds_wakeups:
            return 0
        if not self._places:
            self._places, self._spacing = dict.fromkeys(_LINES), Spacing()
        return sum([await self._page(kind) for kind in list(self._places)])

    async def _page(self, kind: str) -> int:
        async with self._database.connection() as connection:
            now = await locks.now(connection)
            # Start at a whole second: wake-ups are spaced per second, so a partial second cannot be compared.
            near = ((now + NEAR).replace(microsecond=0) + timedelta(seconds=1), uuid.UUID(int=0))
            rows = await _LINES[kind](connection, max(self._places[kind] or near, near), self._batch_size)
        within = [row for row in rows if row.wakeup.due_at - now <= HORIZON]
        requeued = await self._compare(kind, within, now)
        if len(within) == self._batch_size:
            self._places[kind] = within[-1].place
        else:
            del self._places[kind]
        return requeued

    async def _compare(self, kind: str, rows: Sequence[WaitingRow], now: datetime) -> int:
        absent = set(await self._queue.missing([row.wakeup for row in rows]))
        for row in rows:
            if row.wakeup not in absent:
                self._spacing.count(row.wakeup)
        wanted = [
            row for row in rows if row.wakeup in absent and row.is_settled(now) and self._spacing.admit(row.wakeup)
        ]
        if not wanted:
            return 0
        self._queue.schedule([row.wakeup for row in wanted])
        lost = sum(row.had_wakeup() for row in wanted)
        if lost:
            metrics.RECONCILE_REQUEUED.labels(kind).inc(lost)
            _log.warning("reconcile.requeued", kind=kind, count=lost, reason="the queue had lost their wake-ups")
        return lost
