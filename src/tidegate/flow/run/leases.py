"""Leases are renewed from a thread of their own, so that a workflow that blocks the event loop does not lose its run.

When renewals fail until a lease is about to end, another worker may claim the run soon, and this worker cannot find
out: its function is told to stop by this worker's own clock, before the lease ends, since stopping takes a while.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence

from tidegate.clock import monotonic
from tidegate.errors import Unavailable
from tidegate.model.ids import DefinitionId, RunId
from tidegate.model.run import ClaimedRun
from tidegate.model.worker_share import ALL, WorkerShare
from tidegate.store import runs, workers
from tidegate.store.db import STATEMENT_SECONDS, Database
from tidegate.telemetry.logs import logger

HEARTBEATS_PER_LEASE = 3
# A worker without a heartbeat for this long is removed from the list of workers.
GONE_MS = 3_600_000
# A lease that was not renewed for this share of its length counts as lost; checked CHECKS_PER_LEASE times in one.
LOST_AFTER, CHECKS_PER_LEASE = 0.9, 50

_log = logger("run")


class LeaseKeeper:
    """Renews the leases of what `held` returns (runs, and when they were claimed), every third of a lease, until
    stopped.

    `lost`, `overdue` and `cancelled` are called in the worker's event loop, with runs that belong to another worker
    now, that may do so soon, or that are to be cancelled. `beside` is run in the same thread, with its connection."""

    def __init__(
        self,
        url: str,
        worker: str,
        offered: Callable[[], tuple[list[DefinitionId], Sequence[str | None]]],
        lease_ms: int,
        held: Callable[[], Iterable[tuple[ClaimedRun, float]]],
        *,
        lost: Callable[[ClaimedRun], None],
        overdue: Callable[[ClaimedRun], None],
        cancelled: Callable[[RunId], None],
        beside: Callable[[Database], Coroutine[None, None, None]] | None = None,
        slots: int,
        share: WorkerShare = ALL,
        workflows: Iterable[str] = (),
    ) -> None:
        self._url = url
        self._slots = slots
        self._share = share
        self._workflows = workflows
        self._worker = worker
        self._offered = offered
        self._lease_ms = lease_ms
        self._held = held
        self._lost = lost
        self._overdue = overdue
        self._renewed_at: dict[_Claim, float] = {}
        self._cancelled = cancelled
        self._beside = beside
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start; `lost`, `overdue` and `cancelled` are called in the event loop that runs now."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="tidegate-leases", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, 5)

    def _run(self, worker: asyncio.AbstractEventLoop) -> None:
        asyncio.run(self._keep(worker))

    async def _keep(self, worker: asyncio.AbstractEventLoop) -> None:
        # The timeout leaves enough of a lease to renew it on another connection.
        database = Database(
            self._url, "leases", size=1, statement_seconds=min(STATEMENT_SECONDS, self._lease_ms / 5000)
        )
        tasks = [asyncio.create_task(self._watch(worker))]
        if self._beside is not None:
            tasks.append(asyncio.create_task(self._beside(database)))
        try:
            seconds = 0.0  # the first heartbeat at once; it may fail like any other
            while not await asyncio.to_thread(self._stopping.wait, seconds):
                seconds = self._lease_ms / 1000 / HEARTBEATS_PER_LEASE
                try:
                    await self._renew(database, worker)
                    await self.heartbeat(database)
                except Unavailable as exc:
                    seconds = self._lease_ms / 15_000
                    _log.warning("run.renewal_waits", error=exc)
                except Exception as exc:  # noqa: BLE001 - the next round tries again; if that keeps failing, the leases end
                    _log.error("run.renewal_failed", error=exc, exc_info=exc)
            async with database.transaction() as connection:
                await workers.leave(connection, self._worker)
        except Unavailable as exc:
            _log.warning("run.renewal_ends", error=exc)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await database.close()

    async def _watch(self, worker: asyncio.AbstractEventLoop) -> None:
        """Report each lease once that was not renewed for too long. Separate from renewing, which may be waiting for an
        answer."""
        reported: set[_Claim] = set()
        while True:
            await asyncio.sleep(self._lease_ms / 1000 / CHECKS_PER_LEASE)
            too_old = monotonic() - self._lease_ms / 1000 * LOST_AFTER
            late = {_claim(run): run for run, at in self._leases() if at < too_old}
            for claim in late.keys() - reported:
                worker.call_soon_threadsafe(self._overdue, late[claim])
            reported = set(late)

    def _leases(self) -> list[tuple[ClaimedRun, float]]:
        """The runs that are held, and when their leases began (or slightly earlier)."""
        return [(run, self._renewed_at.get(_claim(run), claimed_at)) for run, claimed_at in self._held()]

    async def heartbeat(self, database: Database) -> None:
        """Send a heartbeat: this worker is alive and can run these definitions. Runs that wait for its versions are
        due."""
        async with database.transaction() as connection:
            definitions, versions = self._offered()
            every_ms = self._lease_ms // HEARTBEATS_PER_LEASE
            await workers.heartbeat(
                connection, self._worker, definitions, self._slots, every_ms, versions,
                self._share.left_out(list(self._workflows)), self._share.reserved,
            )  # fmt: skip
            await workers.forget(connection, GONE_MS)
        async with database.transaction() as connection:
            woken = await runs.offer_versions(connection, self._worker)
        for run_id in woken:
            _log.info("run.version_offered", run_id=run_id)

    async def _renew(self, database: Database, worker: asyncio.AbstractEventLoop) -> None:
        held = {run.id: run for run, _ in self._held()}
        if not held:
            return
        sent_at = monotonic()  # the new leases begin after this, however late the answer is
        async with database.transaction() as connection:
            kept = await runs.renew(connection, list(held.values()), self._lease_ms)
        renewed = {_claim(held[one.id]): sent_at for one in kept.values() if one.is_renewed}
        self._renewed_at = {_claim(run): at for run, at in self._leases()} | renewed
        for run_id, run in held.items():
            if run_id not in kept:
                worker.call_soon_threadsafe(self._lost, run)
            elif kept[run_id].cancel_requested:
                worker.call_soon_threadsafe(self._cancelled, run_id)


_Claim = tuple[RunId, int]


def _claim(run: ClaimedRun) -> _Claim:
    return run.id, run.claim_generation
