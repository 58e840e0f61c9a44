"""Ingest: store events. Accepted means committed; concurrent requests share commits; repeating an event is harmless."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tidegate import failpoints
from tidegate.clock import monotonic
from tidegate.errors import Conflict, FieldError, InvalidInput, Unavailable
from tidegate.flow.accept import backlog
from tidegate.flow.accept.backlog import SourceCaps
from tidegate.model.event import Accepted, NewEvent, trace_id
from tidegate.model.ids import EventId
from tidegate.store import durability
from tidegate.store import events as store
from tidegate.store.db import Connection, Database, TransientConflict, is_data_error
from tidegate.store.group_commit import GroupCommit
from tidegate.telemetry import metrics, traces
from tidegate.telemetry.logs import logger

# While the database is down, requests are refused; the first of them waits this long for it to come back.
PATIENCE_SECONDS = 0.5
# How long one commit may take, and how long a request may wait for a connection.
STATEMENT_SECONDS = 5.0
WAIT_SECONDS = 3.0
GROUP_EVENTS = 1000
# A producer's id may be locked by another open transaction: how long a shared commit waits for it.
LOCK_TIMEOUT_MS = 300
# Events are inserted on the assumption that all are new. After a repeated one, each is checked first for this long.
REPEATS_SECONDS = 10

_log = logger("ingest")

Request = Sequence[NewEvent]


class _Refused(Exception):
    """Some requests of a group repeat an id with another body, or find their source full. The others are written again
    without them; events that are already stored are then found as such."""

    def __init__(self, answers: Mapping[int, Exception]) -> None:
        self.answers = answers


class Ingest:
    """Stores events. `after_commit` is called once for each commit with new events, `after_later` for each with new
    events for a later time."""

    def __init__(
        self,
        database: Database,
        *,
        max_waiting: int,
        after_commit: Callable[[], None],
        after_later: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._after_commit = after_commit
        self._after_later = after_later
        self._down = False
        self._repeats_until = 0.0
        self._caps = SourceCaps(database)
        self._group: GroupCommit[Request, list[Accepted]] = GroupCommit(
            self._write, weight=len, max_weight=GROUP_EVENTS, max_waiting=max_waiting
        )

    async def accept(self, events: Request) -> list[Accepted]:
        """Store the events of one request, all or none; returns when they are committed. Events without a trace,
        or in the caller's trace, continue the caller's current span.

        Raises Conflict (an id repeated with another body), Unavailable (the database), Overloaded, BacklogFull, and
        InvalidInput when there are more events than may ever wait.
        """
        if not events:
            return []
        failpoints.hit("ingest.before_begin")
        if (traceparent := traces.current()) is not None:
            events = [_continued(event, traceparent) for event in events]
        accepted = await self._group.submit(events)
        failpoints.hit("ingest.after_commit")
        return accepted

    async def caps_changed(self) -> None:
        """The cap of a source was changed by this process: it applies to what is published here from now on."""
        await self._caps.refresh()

    async def close(self) -> None:
        await self._group.close()
        await self._caps.close()

    async def _write(self, requests: list[Request], *, is_apart: bool = False) -> list[list[Accepted] | Exception]:
        results: list[list[Accepted] | Exception | None] = [None] * len(requests)
        left = list(range(len(requests)))
        while left:
            try:
                stored = await self._store([requests[i] for i in left])
            except _Refused as refused:
                for position, answer in refused.answers.items():
                    results[left[position]] = answer
                left = [i for i in left if results[i] is None]
                continue
            except Exception as exc:  # noqa: BLE001 - whatever one request fails with, the others are stored
                # One request makes the shared commit fail, or a migration has just locked the table: each gets a
                # transaction of its own.
                may_help = not _is_down(exc) and (len(left) > 1 or isinstance(exc, TransientConflict))
                if may_help and not is_apart:
                    apart = await asyncio.gather(*(self._write([requests[i]], is_apart=True) for i in left))
                    for i, [result] in zip(left, apart, strict=True):
                        results[i] = result
                else:
                    for i in left:
                        results[i] = _as_answer(exc)
                break
            for i, accepted in zip(left, stored, strict=True):
                results[i] = accepted
            break
        return [result if result is not None else [] for result in results]

    async def _store(self, requests: list[Request]) -> list[list[Accepted]]:
        """The requests in one commit, retried for PATIENCE_SECONDS when the database goes down.

        A retry is safe even if the answer to a commit was lost: the event ids are ours and were created before.
        """
        deadline: float | None = None
        while True:
            try:
                answers = await self._write_once(requests)
            except TransientConflict:
                raise
            except Unavailable as exc:
                deadline = deadline or monotonic() + (0 if self._down else PATIENCE_SECONDS)
                if monotonic() >= deadline:
                    if not self._down:
                        _log.error("ingest.database_down", error=exc)
                    self._down = True
                    raise
                await asyncio.sleep(0.05)
                continue
            if self._down:
                self._down = False
                _log.info("ingest.database_back")
            return answers

    async def _write_once(self, requests: list[Request]) -> list[list[Accepted]]:
        events = [event for request in requests for event in request]
        if capped := await self._caps.of(events):
            return await self._write_capped(requests, events, capped)
        has_later = any(event.is_later for event in events)
        if monotonic() >= self._repeats_until and not has_later:
            async with self._database.connection(wait_seconds=WAIT_SECONDS) as connection:
                failpoints.hit("ingest.before_commit")
                are_new = await store.insert_new(connection, events)
            if are_new:
                self._committed(requests, requests)
                return [[Accepted(event.id, event.external_id, "accepted") for event in one] for one in requests]
            self._repeats_until = monotonic() + REPEATS_SECONDS
        return await self._write_repeats(requests, events)

    async def _write_repeats(self, requests: list[Request], events: Request) -> list[list[Accepted]]:
        """Write events of which some may already be stored."""
        if len(requests) == len(events):
            # Each request is a single event, so none is rolled back because of another: one statement is the
            # transaction. What is read about repeated ids afterwards changes only their answers.
            async with self._database.connection(wait_seconds=WAIT_SECONDS) as connection:
                failpoints.hit("ingest.before_commit")
                new = await store.insert(connection, events)
            self._committed(requests, _only(new, requests))
            resolved = {}
            if len(new) < len(events):
                async with self._database.connection(wait_seconds=WAIT_SECONDS) as connection:
                    resolved = await _resolve(connection, requests, events, new)
        else:
            async with self._database.transaction(wait_seconds=WAIT_SECONDS) as connection:
                new = await store.insert(connection, events)
                resolved = await _resolve(connection, requests, events, new)
                failpoints.hit("ingest.before_commit")
            self._committed(requests, _only(new, requests))
        return [[_answer(event, new, resolved) for event in request] for request in requests]

    async def _write_capped(
        self, requests: list[Request], events: Request, capped: frozenset[str]
    ) -> list[list[Accepted]]:
        """Write events of which some are of a source that has a cap on what waits."""
        async with self._database.transaction(wait_seconds=WAIT_SECONDS) as connection:
            backlogs = await backlog.lock(connection, capped, events)
            if refused := await backlog.refused(connection, backlogs, requests):
                backlog.report_refused(e.source for i in refused for e in requests[i] if e.source in backlogs)
                raise _Refused(refused)
            new = await store.insert(connection, events)
            resolved = await _resolve(connection, requests, events, new)
            applied = await backlog.apply(connection, backlogs, [event for event in events if event.id in new])
            failpoints.hit("ingest.before_commit")
        self._committed(requests, _only(new, requests))
        backlog.report(applied)
        return [[_answer(event, new, resolved) for event in request] for request in requests]

    def _committed(self, requests: list[Request], accepted: list[Request]) -> None:
        """Count, log and announce the new events of each request."""
        by_source = Counter(event.source for new in accepted for event in new)
        if not by_source:
            return
        self._after_commit()
        if any(event.is_later for new in accepted for event in new):
            self._after_later()
        metrics.received(by_source)
        if _log.is_info:
            for request, new in zip(requests, accepted, strict=True):
                _log_accepted(new, is_batch=len(request) > 1)


def _only(new: set[EventId], requests: list[Request]) -> list[Request]:
    return [[event for event in request if event.id in new] for request in requests]


def _log_accepted(accepted: Request, *, is_batch: bool) -> None:
    """One line per request: a line costs as much as storing an event of a batch."""
    if is_batch and accepted:
        shared = {event.correlation_id for event in accepted}
        correlation_id = shared.pop() if len(shared) == 1 else None
        _log.info("batch.accepted", count=len(accepted), correlation_id=correlation_id, source=accepted[0].source)
    if is_batch and not _log.is_debug:
        return
    log = _log.debug if is_batch else _log.info
    for event in accepted:
        log(
            "event.accepted", event_id=event.id, correlation_id=event.correlation_id or event.id, source=event.source,
            type=event.type,
        )  # fmt: skip


async def _resolve(
    connection: Connection, requests: list[Request], events: Sequence[NewEvent], new: set[EventId]
) -> dict[EventId, store.Resolved]:
    """What the events that are not new repeat; _Refused when some repeat an id with another body."""
    if len(new) == len(events):
        return {}
    resolved = await store.resolve(connection, [event for event in events if event.id not in new])
    conflicts = _conflicts(requests, new, resolved)
    if conflicts:
        raise _Refused(conflicts)
    await durability.confirm(connection)  # a duplicate is acknowledged, too
    return resolved


def _conflicts(
    requests: list[Request], new: set[EventId], resolved: dict[EventId, store.Resolved]
) -> dict[int, Conflict]:
    """The refused requests by position. A request that repeats only an id of a refused one is left for the next
    attempt: the event it repeats will not be stored."""
    conflicts: dict[int, Conflict] = {}
    refused: set[EventId] = set()
    for position, request in enumerate(requests):
        errors = []
        indexes = {event.id: index for index, event in enumerate(request)}
        for index, event in enumerate(request):
            if event.id in new:
                continue
            first = resolved.get(event.id)
            if first is None:  # the first one was deleted in between
                raise TransientConflict("an event with the same id is changing right now")
            if not first.same_body and first.id not in refused:
                errors.append(_conflict(event, index, first.id, indexes))
        if errors:
            conflicts[position] = Conflict("an event with the same id and another body exists", errors)
            refused.update(indexes)
    return conflicts


def _conflict(event: NewEvent, index: int, first: EventId, indexes: dict[EventId, int]) -> FieldError:
    """What an event conflicts with: a stored event, or another of its own batch (of which nothing is stored)."""
    if first in indexes:
        return FieldError(
            f"[{index}].id",
            f"{event.external_id!r} is also the id of [{indexes[first]}] in this batch, with another body; "
            "give each its own id",
        )
    field = f"[{index}].id" if len(indexes) > 1 else "id"
    return FieldError(
        field, f"{event.external_id!r} was published before by {event.source}, with another body, as event {first}"
    )


def _continued(event: NewEvent, traceparent: str) -> NewEvent:
    is_elsewhere = trace_id(event.traceparent) not in (None, trace_id(traceparent))
    return event if is_elsewhere else msgspec.structs.replace(event, traceparent=traceparent)


def _answer(event: NewEvent, new: set[EventId], resolved: dict[EventId, store.Resolved]) -> Accepted:
    if event.id in new or resolved[event.id].id == event.id:
        return Accepted(event.id, event.external_id, "accepted")
    return Accepted(resolved[event.id].id, event.external_id, "duplicate")


def _is_down(exc: Exception) -> bool:
    return isinstance(exc, Unavailable) and not isinstance(exc, TransientConflict)


def _as_answer(exc: Exception) -> Exception:
    if is_data_error(exc):
        _log.warning("ingest.refused_by_database", error=exc)
        return InvalidInput("the database cannot store this event", [FieldError("event", str(exc))])
    return exc
