"""Presence: a process says that it is alive and which schema its code knows, and learns that the schema still fits.

Both happen in one transaction, which waits while a contraction is being applied: either the contraction sees the
process and is not applied, or the process sees the contraction and does not work.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

from tidegate.clock import monotonic
from tidegate.errors import SchemaError, TidegateError
from tidegate.model.retention import Retention
from tidegate.store import migrate, processes
from tidegate.store.db import Connection, Database
from tidegate.store.processes import ProcessKind
from tidegate.telemetry.logs import logger

_log = logger("process")


class Presence:
    """One process among those that use the database, from `join` to `leave`.

    `on_unfit` is called once, when the schema has changed so that this process can no longer use it. `retention` is
    what its settings say.
    """

    def __init__(
        self,
        kind: ProcessKind,
        on_unfit: Callable[[SchemaError], None] = lambda _: None,
        retention: Retention | None = None,
    ) -> None:
        self._process = processes.this_process(kind, migrate.latest(), retention)
        self._on_unfit = on_unfit
        self._has_left = False
        self._is_unfit = False
        self._renewing = asyncio.Lock()
        self._joined_at = -math.inf

    async def join(self, database: Database) -> None:
        """Say that this process is alive. SchemaError if it cannot use the schema; then nobody needs to wait for it."""
        await migrate.require_current(database)
        await database.run(self._beat)

    async def keep(self, database: Database) -> None:
        """Say so again and again, until cancelled."""
        is_heard = True
        while True:
            await asyncio.sleep(processes.BEAT_SECONDS)
            try:
                async with database.transaction() as connection:
                    await self._beat(connection)
            except SchemaError as exc:
                self._unfit(exc)
            except TidegateError as exc:  # the database cannot be reached: the next round tries again
                if is_heard:
                    _log.warning("process.beat_waits", error=exc)
                is_heard = False
            except Exception as exc:  # noqa: BLE001 - the work of the process does not depend on it
                _log.error("process.beat_failed", error=exc, exc_info=exc)
            else:
                is_heard = True

    async def renew(self, database: Database) -> None:
        """Join, unless that was done within BEAT_SECONDS: for a process that says so whenever it does something."""
        async with self._renewing:
            if monotonic() - self._joined_at > processes.BEAT_SECONDS:
                await self.join(database)
                self._joined_at = monotonic()

    async def leave(self, database: Database) -> None:
        """This process has stopped. If that cannot be said, others notice after a while."""
        self._has_left = True
        try:
            async with database.transaction() as connection:
                await processes.leave(connection, self._process)
        except TidegateError as exc:
            _log.warning("process.beat_waits", error=exc)

    async def _beat(self, connection: Connection) -> None:
        if self._has_left:
            return
        await processes.beat(connection, self._process)
        await migrate.status_on(connection)  # after it: raises SchemaError when the schema is not for this program
        await processes.forget(connection)

    def _unfit(self, exc: SchemaError) -> None:
        if not self._is_unfit:
            self._is_unfit = True
            _log.error("process.unfit", error=exc)
            self._on_unfit(exc)
