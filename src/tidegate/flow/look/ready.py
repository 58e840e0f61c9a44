"""Readiness: can this process do its work? Each dependency is named, with what is wrong with it.

The endpoint needs no token, so the answer contains no address and no driver message; those go to the log.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import msgspec

from tidegate.errors import SchemaError
from tidegate.flow.look.notices import notices
from tidegate.flow.shared_read import SharedRead
from tidegate.model.health import Notice
from tidegate.queue.port import Queue
from tidegate.settings import Settings
from tidegate.store import durability, events, migrate
from tidegate.store.db import Database, TransientConflict, why_down
from tidegate.telemetry.logs import logger

OK: Final = "ok"
UNKNOWN = "unknown: the database does not answer"
FRESH_SECONDS = 1.0
ASK_SECONDS = 3.0

_log = logger("ready")


class Ready(msgspec.Struct, frozen=True):
    """What the process depends on: `ok`, or what is wrong. `degraded`: the process works nevertheless."""

    status: Literal["ok", "degraded", "unavailable"]
    checks: dict[str, str]
    warnings: list[Notice] = []


class Readiness:
    """Checks at most once every FRESH_SECONDS, for any number of callers."""

    def __init__(self, settings: Settings, database: Database, queue: Queue, publishing: Database) -> None:
        """`publishing` is the pool that stores events."""
        self._settings = settings
        self._database = database
        self._publishing = publishing
        self._queue = queue
        self._notices = notices(settings)
        self._shared = SharedRead(self._read, joins_slow_reads=True)

    async def check(self) -> Ready:
        """The state, at most FRESH_SECONDS old; never fails."""
        return await self._shared.get(FRESH_SECONDS)

    async def _read(self, before: Ready | None) -> Ready:
        found = await self._check()
        if found.status not in (before.status if before else "unavailable", OK):
            _log.warning("ready.not_ok", status=found.status, **found.checks)
        return found

    async def _check(self) -> Ready:
        checks, is_allowed = await self._database_checks()
        status: Literal["ok", "degraded", "unavailable"] = OK if set(checks.values()) == {OK} else "unavailable"
        if status != OK and is_allowed and {checks["database"], checks["schema"]} == {OK}:
            status = "degraded"
        trouble = await self._queue.trouble() if checks["database"] == OK or self._settings.queue == "bullmq" else None
        if self._settings.queue == "bullmq":
            checks["redis"] = trouble or OK
        elif trouble:
            checks["hints"] = trouble
        if trouble and status == OK:  # workers poll anyway: a lost hint costs latency, never work
            status = "degraded"
        return Ready(status, checks, self._notices)

    async def _database_checks(self) -> tuple[dict[str, str], bool]:
        """What is wrong with the database, and whether unsafe durability settings are allowed."""
        checks = {"database": OK, "schema": UNKNOWN, "durability": UNKNOWN}
        is_allowed = self._settings.allow_unsafe_durability
        try:
            async with asyncio.timeout(ASK_SECONDS), self._database.connection(wait_seconds=2) as connection:
                if await durability.is_read_only(connection):
                    checks["database"] = "it is read-only, as a standby is: events cannot be stored"
                elif trouble := await durability.standby_trouble(connection):
                    checks["database"] = trouble
                unsafe = durability.unsafe(await durability.settings(connection))
                checks["durability"] = unsafe or OK
                if unsafe and is_allowed:
                    checks["durability"] = f"{unsafe}; TIDEGATE_ALLOW_UNSAFE_DURABILITY allows it"
                migrate.refuse_pending(await migrate.status_on(connection))
                checks["schema"] = OK
            if checks["database"] == OK:
                checks["database"] = await self._storing()
        except SchemaError as exc:
            checks["schema"] = str(exc)
        except Exception as exc:  # noqa: BLE001 - readiness reports what is wrong and never fails
            _log.warning("ready.database_unavailable", error=exc)
            checks = {"database": why_down(exc), "schema": UNKNOWN, "durability": UNKNOWN}
        return checks, is_allowed

    async def _storing(self) -> str:
        """What prevents events from being stored. It is tried: a database may answer and still be unable to write."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await events.probe(self._publishing)
        except TransientConflict:
            return OK  # another transaction locks a table for a moment
        except Exception as exc:  # noqa: BLE001 - readiness reports what is wrong and never fails
            _log.warning("ready.cannot_store", error=exc)
            return why_down(exc)
        return OK
