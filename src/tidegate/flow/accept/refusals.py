"""Refusals: keeps refused publish requests and starts for a while, so that a producer's id can be asked for although
nothing was stored.

A flood of refusals costs next to nothing: at most MAX_PER_SECOND are kept per second and process, those of a second are
written together, and what cannot be written is dropped. The first is written at once, and whoever asks this process for
an id has what was kept before written first (`write`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from tidegate.clock import monotonic
from tidegate.errors import FieldError, TidegateError
from tidegate.store import refusals
from tidegate.store.db import Database
from tidegate.store.refusals import NewRefusal
from tidegate.telemetry.logs import logger

STATUSES = frozenset({409, 422, 429})
MAX_PER_SECOND = 20
# Of a batch that was refused as a whole, at most this many of its events are kept.
MAX_OF_BATCH = 20
# A larger body is not read once more for the ids of its events.
MAX_BODY_BYTES = 65_536
WRITE_SECONDS = 1.0
_MAX_TEXT = 200
_MAX_REASON = 1000
# How many of the problems of a request are kept.
_MAX_PROBLEMS = 3

_log = logger("ingest")


class GivenEvent(NamedTuple):
    """What a refused event is found by, as far as it could be read."""

    id: str | None = None
    type: str | None = None
    source: str | None = None


class PublishRefusals:
    """Collects refused requests and writes them in the background. The writer runs only while there is something to
    write."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._kept: list[tuple[float, NewRefusal]] = []
        self._second, self._in_second = 0, 0
        self._writing: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # held while rows are written: who has it knows that none are under way
        self._is_closed = False

    def keep(self, status: int, exc: Exception, events: Callable[[], Iterable[GivenEvent]]) -> None:
        """Keep a refused request, unless there were too many within this second: then `events` is not called."""
        if status not in STATUSES or self._is_closed or not self._has_room():
            return
        reason, now = _reason(exc), monotonic()
        for given in [*islice(events(), MAX_OF_BATCH)] or [GivenEvent()]:
            own_id, event_type, source = (text and _clean(text)[:_MAX_TEXT] for text in given)
            self._kept.append((now, NewRefusal(0, status, own_id, event_type, source, reason)))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write_soon(), name="refusals")

    async def close(self) -> None:
        """Write what is left."""
        self._is_closed = True
        if self._writing is not None:
            async with self._lock:
                self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await self.write()

    async def write(self) -> None:
        """Write what was kept so far; afterwards it can be read."""
        async with self._lock:
            kept, self._kept = self._kept, []
            if not kept:
                return
            rows = [row._replace(age_ms=round((monotonic() - at) * 1000)) for at, row in kept]
            try:
                async with self._database.connection() as connection:
                    await refusals.insert(connection, rows)
            except TidegateError as exc:  # they are for information only
                _log.warning("ingest.refusals_dropped", count=len(rows), error=exc)

    async def _write_soon(self) -> None:
        while self._kept:
            await self.write()
            await asyncio.sleep(WRITE_SECONDS)

    def _has_room(self) -> bool:
        second = int(monotonic())
        if second != self._second:
            self._second, self._in_second = second, 0
        self._in_second += 1
        return self._in_second <= MAX_PER_SECOND


def given_events(raw: object) -> Iterator[GivenEvent]:
    """The events of a JSON body, as far as they can be read."""
    for one in raw if isinstance(raw, list) else [raw]:
        fields = one if isinstance(one, dict) else {}
        found = (fields.get(name) for name in GivenEvent._fields)
        yield GivenEvent(*(text if isinstance(text, str) else None for text in found))


def _reason(exc: Exception) -> str:
    """What the answer said, with the first of its problems that it does not say itself."""
    said = str(exc.args[0]) if exc.args else type(exc).__name__
    given: Sequence[FieldError] = getattr(exc, "errors", ())
    errors = [error for error in given if error.message not in said]
    told = "; ".join(f"{error.field}: {error.message}" for error in errors[:_MAX_PROBLEMS])
    more = len(errors) - _MAX_PROBLEMS
    also = f"; and {more} more problem{'s' * (more > 1)}, which the answer to the request named" if more > 0 else ""
    return f"{_clean(f'{said}: {told}' if told else said)[:_MAX_REASON]}{also}"


def _clean(text: str) -> str:
    """Text that the database can store."""
    return text.replace("\x00", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()
