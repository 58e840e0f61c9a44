"""Reconcile: what is due and has not moved? Claims whose lease ran out are made due again and their holders fenced."""

from __future__ import annotations

from headgate import failpoints
from headgate.store import deliveries, ingress_retries, runs, steps
from headgate.store.db import Connection, Database
from headgate.telemetry.logs import logger

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
                _log.warning("reconcile.released", kind=kind, count=count, reason="the lease ran out")
        return released

    async def _release(self, connection: Connection) -> dict[str, int]:
        released = {"runs": len(await runs.release_expired(connection, self._batch_size))}
        failpoints.hit("reconcile.mid_batch")
        released["steps"] = len(await steps.release_expired(connection, self._batch_size))
        released["deliveries"] = len(await deliveries.release_expired(connection, self._batch_size))
        released["events"] = len(await ingress_retries.release_expired(connection, self._batch_size))
        return released
