"""Leases: kept alive from a thread of their own: a workflow that keeps the event loop busy does not lose its run.

When renewals fail until a lease is about to end, another worker may have the run soon, and nobody can tell us so: its
function is told to leave by this worker's own clock, in good time, since leaving takes a while.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterable

from tidegate.clock import monotonic
from tidegate.errors import Unavailable
from tidegate.model.run import ClaimedRun
from tidegate.store import runs, workers
from tidegate.store.db import STATEMENT_SECONDS, Database
from tidegate.telemetry.logs import logger

# A worker that has not been seen for an hour is forgotten.
GONE_MS = 3_600_000
# The share of a lease after which it is given up, and how often that is asked in the length of one.
GIVEN_UP_AFTER, LOOKS = 0.9, 50

_log = logger("run")


class LeaseKeeper:
    """Renews what `held` shows (runs, and since when this worker has them), every third of a lease, until stopped.

    `lost`, `overdue` and `cancelled` are called in the worker's loop, with runs that belong to someone else now, that
    may do so soon, or that are to be cancelled.
    """

    def __init__(
        self,
        url: str,
        worker: str,
        definitions: Callable[[], list[uuid.UUID]],
        lease_ms: int,
        held: Callable[[], Iterable[tuple[ClaimedRun, float]]],
        *,
        lost: Callable[[ClaimedRun], None],
        overdue: Callable[[ClaimedRun], None],
        cancelled: Callable[[uuid.UUID], None],
    ) -> None:
        self._url = url
        self._worker = worker
        self._definitions = definitions
        self._lease_ms = lease_ms
        self._held = held
        self._lost = lost
        self._overdue = overdue
        self._renewed_at: dict[_Claim, float] = {}
        self._cancelled = cancelled
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; `lost`, `overdue` and `cancelled` are called in the loop that runs now."""
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
        # An answer that does not come costs a third of a lease: time enough to renew on another connection.
        database = Database(
            self._url, "leases", size=1, statement_seconds=min(STATEMENT_SECONDS, self._lease_ms / 5000)
        )
        watching = asyncio.create_task(self._watch(worker))
        try:
            seconds = 0.0  # the first beat at once; it may fail like any other
            while not await asyncio.to_thread(self._stopping.wait, seconds):
                seconds = self._lease_ms / 3000
                try:
                    await self._renew(database, worker)
                    await self._beat(database)
                except Unavailable as exc:
                    seconds = self._lease_ms / 15_000
                    _log.warning("run.renewal_waits", error=exc)
                except Exception as exc:  # noqa: BLE001 - the next round tries again; leases end by themselves if it goes on
                    _log.error("run.renewal_failed", error=exc, exc_info=exc)
            async with database.transaction() as connection:
                await workers.leave(connection, self._worker)
        except Unavailable as exc:
            _log.warning("run.renewal_ends", error=exc)
        finally:
            watching.cancel()
            await database.close()

    async def _watch(self, worker: asyncio.AbstractEventLoop) -> None:
        """Give up, once each, what was not renewed for too long; a renewal that waits for its answer does not hold this
        up."""
        given_up: set[_Claim] = set()
        while True:
            await asyncio.sleep(self._lease_ms / 1000 / LOOKS)
            too_old = monotonic() - self._lease_ms / 1000 * GIVEN_UP_AFTER
            late = {_claim(run): run for run, at in self._leases() if at < too_old}
            for claim in late.keys() - given_up:
                worker.call_soon_threadsafe(self._overdue, late[claim])
            given_up = set(late)

    def _leases(self) -> list[tuple[ClaimedRun, float]]:
        """What is held, and when its lease began, or a little earlier."""
        return [(run, self._renewed_at.get(_claim(run), claimed_at)) for run, claimed_at in self._held()]

    async def _beat(self, database: Database) -> None:
        """Say that this worker is alive, and what it can run."""
        async with database.transaction() as connection:
            await workers.beat(connection, self._worker, self._definitions())
            await workers.forget(connection, GONE_MS)

    async def _renew(self, database: Database, worker: asyncio.AbstractEventLoop) -> None:
        held = {run.id: run for run, _ in self._held()}
        if not held:
            return
        sent_at = monotonic()  # the new leases begin later than this, whenever their answer comes
        async with database.transaction() as connection:
            kept = await runs.renew(connection, list(held.values()), self._lease_ms)
        renewed = {_claim(held[one.id]): sent_at for one in kept.values() if one.is_renewed}
        self._renewed_at = {_claim(run): at for run, at in self._leases()} | renewed
        for run_id, run in held.items():
            if run_id not in kept:
                worker.call_soon_threadsafe(self._lost, run)
            elif kept[run_id].cancel_requested:
                worker.call_soon_threadsafe(self._cancelled, run_id)


_Claim = tuple[uuid.UUID, int]


def _claim(run: ClaimedRun) -> _Claim:
    return run.id, run.claim_generation
