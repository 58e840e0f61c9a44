"""Backlog: what a source's cap on waiting events says about those that are published now.

Whoever publishes for a source with a cap holds its lock until the commit, so that the count is exact across all
processes. A source without one costs nothing: which sources have one is known in each process (`SourceCaps`).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from tidegate.clock import monotonic, utc_now
from tidegate.errors import BacklogFull, FieldError, InvalidInput, Unavailable
from tidegate.flow.shared_read import SharedRead
from tidegate.model.backlog import MAX_LEAVING, SourceBacklog
from tidegate.model.event import NewEvent
from tidegate.model.ids import EventId
from tidegate.store import events as stored_events
from tidegate.store import source_backlogs as store
from tidegate.store.db import Connection, Database
from tidegate.store.source_backlogs import LockedBacklog
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

# A change of a cap is known everywhere after KNOWN_SECONDS; after READ_SECONDS the caps are read in the background.
READ_SECONDS = 1.0
KNOWN_SECONDS = 2.0

_log = logger("ingest")

NO_CAPS: Mapping[str, SourceBacklog] = {}


class SourceCaps:
    """The sources that have a cap, as this process knows them."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._read_at = 0.0
        self._shared = SharedRead(self._read)
        self._reading: asyncio.Task[Mapping[str, SourceBacklog]] | None = None

    async def of(self, events: Iterable[NewEvent]) -> frozenset[str]:
        """Those of the events' sources that have a cap."""
        caps = await self.known()
        return frozenset(event.source for event in events if event.source in caps) if caps else frozenset()

    async def known(self) -> Mapping[str, SourceBacklog]:
        """The caps, by source."""
        age = monotonic() - self._read_at
        if self._shared.value is None or age >= KNOWN_SECONDS:
            caps = await self._shared.get(KNOWN_SECONDS)
        else:
            caps = self._shared.value
            if age >= READ_SECONDS and (self._reading is None or self._reading.done()):
                self._reading = asyncio.create_task(self._shared.get(READ_SECONDS), name="source caps")
                self._reading.add_done_callback(_retrieve_error)
        return caps

    async def refresh(self) -> None:
        """A cap was changed: what is published here from now on is counted by it."""
        await self._shared.get(0)

    async def close(self) -> None:
        """Wait for a read in the background."""
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self, _: Mapping[str, SourceBacklog] | None) -> Mapping[str, SourceBacklog]:
        began = monotonic()
        async with self._database.connection() as connection:
            found = await store.list_all(connection)
        self._read_at = began
        return found


class Applied(NamedTuple):
    """What became of new events by the policies of their sources, to be reported after the commit."""

    dropped: Counter[str]
    dead_lettered: Counter[str]


async def lock(connection: Connection, sources: Iterable[str], events: Sequence[NewEvent]) -> dict[str, LockedBacklog]:
    """The backlogs that these events are added to, until the commit."""
    return await store.lock(connection, sources, len(events) + MAX_LEAVING)


async def refused(
    connection: Connection, backlogs: Mapping[str, LockedBacklog], requests: Sequence[Sequence[NewEvent]]
) -> dict[int, BacklogFull | InvalidInput]:
    """The requests, by position, that do not fit the backlog of a source that refuses what is over: for now
    (BacklogFull), or never, since one has more new events than may wait (InvalidInput). Events that were published
    before are not counted."""
    strict = {name: one for name, one in backlogs.items() if one.when_full == "refuse"}
    added = Counter(event.source for request in requests for event in request if _counts(event, strict))
    over = [name for name, number in added.items() if strict[name].waiting + number > strict[name].max_waiting]
    if not over:
        return {}
    known = await store.known(connection, (event for request in requests for event in request if event.source in over))
    room = {name: strict[name].max_waiting - strict[name].waiting for name in over}
    found: dict[int, BacklogFull | InvalidInput] = {}
    for position, request in enumerate(requests):
        places = _newcomers(request, room, known)
        wanted = {name: len(mine) for name, mine in places.items()}
        never = next((name for name, number in wanted.items() if number > strict[name].max_waiting), None)
        full = next((name for name, number in wanted.items() if number > room[name]), None)
        if never is not None:
            found[position] = _never_error(strict[never], wanted[never], places[never][0])
        elif full is not None:
            fields = [f"[{i}].source" for i in places[full]] if len(request) > 1 else ["source"]
            found[position] = _full_error(strict[full], room[full], fields)
        else:
            for name, number in wanted.items():
                room[name] -= number
    return found


def _newcomers(
    request: Sequence[NewEvent], sources: Container[str], known: Container[tuple[str | None, str]]
) -> dict[str, list[int]]:
    """The positions in a request of its new events of these sources, by source; of those with the same id the first."""
    places: dict[str, list[int]] = {}
    seen: set[tuple[str, str]] = set()
    for i, event in enumerate(request):
        if event.source not in sources or not _is_now(event) or (event.external_id, event.source) in known:
            continue
        if event.external_id is not None:
            if (event.external_id, event.source) in seen:
                continue
            seen.add((event.external_id, event.source))
        places.setdefault(event.source, []).append(i)
    return places


def _never_error(backlog: LockedBacklog, number: int, place: int) -> InvalidInput:
    """That a request has more new events of a source than may ever wait."""
    text = (
        f"{number} events of source {backlog.source} in one request, and at most {backlog.max_waiting} of it may wait"
    )
    return InvalidInput(
        "the batch is too large",
        [FieldError(f"[{place}].source", f"{text} (max_waiting): split the batch")],
    )


def _full_error(backlog: LockedBacklog, room: int, fields: Sequence[str]) -> BacklogFull:
    """That a source has no room for so many more events for now."""
    most = f"at most {backlog.max_waiting} may wait (max_waiting)"
    waiting = backlog.max_waiting - room
    if room > 0:
        said = f"has room for {room} of these {len(fields)} events: {waiting} wait"
    else:
        said = f"is full: {waiting} of its events wait"
    return BacklogFull(
        f"source {backlog.source} {said}, {most}; nothing was stored",
        errors=[FieldError(field, most) for field in fields[:100]],
    )


async def insert(
    connection: Connection, capped: Iterable[str], events: Sequence[NewEvent]
) -> tuple[set[EventId], Applied]:
    """Store events of which some are of sources with a cap, all or none; the ids of those that are new. BacklogFull
    when they do not fit: the caller may try again with fewer."""
    backlogs = await lock(connection, capped, events)
    if full := (await refused(connection, backlogs, [events])).get(0):
        raise full if isinstance(full, BacklogFull) else BacklogFull(str(full), errors=full.errors)
    new = await stored_events.insert(connection, events)
    return new, await apply(connection, backlogs, [event for event in events if event.id in new])


async def apply(connection: Connection, backlogs: Mapping[str, LockedBacklog], new: Sequence[NewEvent]) -> Applied:
    """After new events were stored: as many of the oldest leave as are over, or the newest become dead letters."""
    done = Applied(Counter(), Counter())
    for name, one in sorted(backlogs.items()):
        mine = [event for event in new if event.source == name and _is_now(event)]
        number = min(one.waiting + len(mine) - one.max_waiting, MAX_LEAVING + len(mine))
        if not mine or number <= 0:
            continue
        said = f"source {name} is full: at most {one.max_waiting} of its events may wait (max_waiting)"
        if one.when_full == "drop_oldest":
            text = f"{said}, and the oldest leaves for event {mine[-1].id}"
            done.dropped[name] += await store.drop_oldest(connection, name, number, text)
        elif one.when_full == "dead_letter":
            over: list[EventId] = [event.id for event in mine[-number:]]
            text = f"{said}, and what is over becomes a dead letter"
            done.dead_lettered[name] += await store.dead_letter(connection, over, text)
    return done


def report(done: Applied) -> None:
    """Count and log, after the commit, what became of events by the policies of their sources."""
    for outcome, counts in (("dropped", done.dropped), ("dead_lettered", done.dead_lettered)):
        for source, count in counts.items():
            if count:
                metrics.left_backlog("source", source, outcome, count)
                _log.warning(f"source.backlog_{outcome}", source=source, count=count)


def report_refused(sources: Iterable[str]) -> None:
    """Count events that were refused."""
    for source, count in Counter(sources).items():
        metrics.left_backlog("source", source, "refused", count)


def _counts(event: NewEvent, backlogs: Mapping[str, LockedBacklog]) -> bool:
    return event.source in backlogs and _is_now(event)


def _is_now(event: NewEvent) -> bool:
    """Whether an event is to be decided now. One for a later time is not in the backlog before its time."""
    if not event.is_later:
        return True
    return event.delay_ms == 0 if event.deliver_at is None else event.deliver_at <= utc_now()


def _retrieve_error(task: asyncio.Task[Mapping[str, SourceBacklog]]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, Unavailable):
        _log.warning("ingest.caps_not_read", error=error)
