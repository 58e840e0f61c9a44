"""Leases: kept alive from a thread of their own: a workflow that keeps the event loop busy does not lose its run."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Mapping

from tidegate.errors import Unavailable
from tidegate.model.run import ClaimedRun
from tidegate.store import runs, workers
from tidegate.store.db import STATEMENT_SECONDS, Database
from tidegate.telemetry.logs import logger

# A worker that has not been seen for an hour is forgotten.
GONE_MS = 3_600_000

_log = logger("run")


class LeaseKeeper:
    """Renews what `held` shows, every third of a lease, until stopped.

    `lost` and `cancelled` are called in the worker's loop, with runs that belong to someone else now, or are to be
    cancelled.
    """

    def __init__(
        self,
        url: str,
        worker: str,
        definitions: Callable[[], list[uuid.UUID]],
        lease_ms: int,
        held: Callable[[], Mapping[uuid.UUID, ClaimedRun]],
        *,
        lost: Callable[[ClaimedRun], None],
        cancelled: Callable[[uuid.UUID], None],
    ) -> None:
        self._url = url
        self._worker = worker
        self._definitions = definitions
        self._lease_ms = lease_ms
        self._held = held
        self._lost = lost
        self._cancelled = cancelled
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin; `lost` and `cancelled` are called in the loop that runs now."""
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
                except Exception as exc:  # the next round tries again; leases end by themselves if it goes on
                    _log.error("run.renewal_failed", error=exc, exc_info=exc)
            async with database.transaction() as connection:
                await workers.leave(connection, self._worker)
        except Unavailable as exc:
            _log.warning("run.renewal_ends", error=exc)
        finally:
            await database.close()

    async def _beat(self, database: Database) -> None:
        """Say that this worker is alive, and what it can run."""
        async with database.transaction() as connection:
            await workers.beat(connection, self._worker, self._definitions())
            await workers.forget(connection, GONE_MS)

    async def _renew(self, database: Database, worker: asyncio.AbstractEventLoop) -> None:
        held = dict(self._held())
        if not held:
            return
        async with database.transaction() as connection:
            kept = await runs.renew(connection, list(held.values()), self._lease_ms)
        for run_id, run in held.items():
            if run_id not in kept:
                worker.call_soon_threadsafe(self._lost, run)
            elif kept[run_id]:
                worker.call_soon_threadsafe(self._cancelled, run_id)
