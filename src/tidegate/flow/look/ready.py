"""Readiness: can this process do its work? Everything that it needs is named, with what is wrong with it.

Anyone may ask, so the answer holds no address and no text of a driver; those go to the log.
"""

from __future__ import annotations

import asyncio
from typing import Final, Literal

import msgspec

from tidegate.clock import monotonic
from tidegate.errors import SchemaError
from tidegate.flow.look.notices import notices
from tidegate.model.health import Notice
from tidegate.queue.port import Queue
from tidegate.settings import Settings
from tidegate.store import durability, events, migrate
from tidegate.store.db import Database, TransientConflict, why_down
from tidegate.telemetry.logs import logger

OK: Final = "ok"
UNKNOWN = "not known, since the database cannot be asked"
FRESH_SECONDS = 1.0
ASK_SECONDS = 3.0

_log = logger("ready")


class Ready(msgspec.Struct, frozen=True):
    """What the work depends on: `ok`, or what is wrong. `degraded`: the work is done all the same."""

    status: Literal["ok", "degraded", "unavailable"]
    checks: dict[str, str]
    warnings: list[Notice] = []


class Readiness:
    """Looks at most once a second, however many ask."""

    def __init__(self, settings: Settings, database: Database, queue: Queue, publishing: Database) -> None:
        """`publishing` are the connections that events are stored by."""
        self._settings = settings
        self._database = database
        self._publishing = publishing
        self._queue = queue
        self._notices = notices(settings)
        self._fresh_until = 0.0
        self._found = Ready("unavailable", {})
        self._looking = asyncio.Lock()

    async def look(self) -> Ready:
        """The state of a moment ago; never fails."""
        async with self._looking:
            if monotonic() >= self._fresh_until:
                found = await self._look()
                if found.status not in (self._found.status, OK):
                    _log.warning("ready.not_ok", status=found.status, **found.checks)
                self._found = found
                self._fresh_until = monotonic() + FRESH_SECONDS
        return self._found

    async def _look(self) -> Ready:
        checks, is_allowed = await self._database_checks()
        status: Literal["ok", "degraded", "unavailable"] = OK if set(checks.values()) == {OK} else "unavailable"
        if status != OK and is_allowed and {checks["database"], checks["schema"]} == {OK}:
            status = "degraded"
        if self._settings.queue == "bullmq":
            trouble = await self._queue.trouble()
            checks["redis"] = trouble or OK
            if trouble and status == OK:  # workers look by themselves: losing Redis costs latency, never work
                status = "degraded"
        return Ready(status, checks, self._notices)

    async def _database_checks(self) -> tuple[dict[str, str], bool]:
        """What is wrong with the database; whether unsafe settings of it are allowed."""
        checks = {"database": OK, "schema": UNKNOWN, "durability": UNKNOWN}
        is_allowed = self._settings.allow_unsafe_durability
        try:
            async with asyncio.timeout(ASK_SECONDS), self._database.connection(wait_seconds=2) as connection:
                if await durability.is_read_only(connection):
                    checks["database"] = "it is read-only, as a standby is: events cannot be stored"
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
            _log.warning("ready.database_cannot_be_asked", error=exc)
            checks = {"database": why_down(exc), "schema": UNKNOWN, "durability": UNKNOWN}
        return checks, is_allowed

    async def _storing(self) -> str:
        """What keeps events from being stored: tried, since a database may answer and yet store nothing."""
        try:
            async with asyncio.timeout(ASK_SECONDS):
                await events.probe(self._publishing)
        except TransientConflict:
            return OK  # someone has a table for a moment
        except Exception as exc:  # noqa: BLE001 - readiness reports what is wrong and never fails
            _log.warning("ready.cannot_store", error=exc)
            return why_down(exc)
        return OK
