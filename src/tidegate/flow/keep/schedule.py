"""Schedule: publish the event of a due tick and advance the schedule, in one transaction.

The row lock makes it exactly once per tick, for any number of workers; the event's id (`<workflow>:<tick>`) would
reject a second one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from tidegate import failpoints
from tidegate.clock import uuid7
from tidegate.errors import BacklogFull
from tidegate.flow.accept import backlog
from tidegate.flow.accept.backlog import Applied, SourceCaps
from tidegate.model.event import NewEvent
from tidegate.model.ids import DefinitionId, EventId
from tidegate.model.schedule import SOURCE, DueTicks, ScheduleSpec, due_ticks, next_after, tick_event, tick_text
from tidegate.store import events, locks
from tidegate.store import schedules as store
from tidegate.store.db import Connection, Database
from tidegate.store.schedules import Advanced, DueSchedule
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("schedule")


class ScheduleTurn(NamedTuple):
    """How many ticks one pass published, and the seconds until the next tick (None: there is none)."""

    published: int = 0
    next_seconds: float | None = None


class _Tick(NamedTuple):
    due: DueSchedule
    at: datetime
    event: NewEvent
    found: DueTicks


class _Published(NamedTuple):
    """What one transaction did: ticks with the ids of new events, schedules that only moved on because of a pause,
    those that were reset, and unreadable ones."""

    ticks: list[_Tick]
    new: set[EventId]
    paused: list[tuple[DueSchedule, DueTicks]]
    reset: list[tuple[DueSchedule, Advanced]]
    invalid: list[tuple[DueSchedule, ValueError]]
    applied: Applied | None = None


class Scheduler:
    """Publishes the ticks of the given workflows: a worker serves the schedules of workflows that it can run."""

    def __init__(
        self,
        database: Database,
        definitions: Iterable[DefinitionId],
        *,
        batch_size: int,
        after_publish: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._definitions = set(definitions)
        self._batch_size = batch_size
        self._after_publish = after_publish
        self._caps = SourceCaps(database)

    async def run_once(self) -> ScheduleTurn:
        """Publish a batch of due ticks."""
        async with self._database.connection() as connection:
            seconds = await store.next_due_seconds(connection, self._definitions)
        if seconds is None or seconds > 0:
            return ScheduleTurn(0, seconds)
        capped = [SOURCE] if SOURCE in await self._caps.known() else []
        try:
            done = await self._published(capped)
        except BacklogFull as exc:
            _log.warning("schedule.source_full", source=SOURCE, reason=exc)
            return ScheduleTurn(0, float(exc.retry_after_seconds))
        if done.applied is not None:
            backlog.report(done.applied)
        if done.new:
            self._after_publish()
            metrics.received(Counter({SOURCE: len(done.new)}))
        for tick in done.ticks:
            _log_tick(tick, is_new=tick.event.id in done.new)
            metrics.ticked("published" if tick.event.id in done.new else "repeated", 1)
            metrics.ticked("missed", tick.found.missed)
            metrics.ticked("paused", tick.found.in_pause)
        for due, found in done.paused:
            metrics.ticked("paused", found.in_pause)
            _log.info(
                "schedule.paused_tick", workflow=due.schedule.workflow, count=found.in_pause,
                next_at=tick_text(found.next_at),
            )  # fmt: skip
        for due, moved in done.reset:
            _log.warning("schedule.reset", workflow=due.schedule.workflow, next_at=tick_text(moved.next_at))
        for due, error in done.invalid:
            # Written by another version, or in a time zone that this machine lacks: other workers may understand it.
            self._definitions.discard(due.definition_id)
            _log.error("schedule.invalid", workflow=due.schedule.workflow, error=error)
        return ScheduleTurn(len(done.ticks), seconds)

    async def _published(self, capped: Sequence[str]) -> _Published:
        """Publish what is due; if the source has no room for all of it, one tick."""
        try:
            return await self._database.run(partial(self._publish, capped=capped, limit=self._batch_size))
        except BacklogFull:
            return await self._database.run(partial(self._publish, capped=capped, limit=1))

    async def _publish(self, connection: Connection, capped: Sequence[str], limit: int) -> _Published:
        done = _Published([], set(), [], [], [])
        for due in await store.lock_due(connection, self._definitions, limit):
            if due.schedule.last_at is not None and due.schedule.last_at > due.now:
                # Its last tick is in the future: the clock was wrong then. It continues from now; no tick has two
                # events.
                done.reset.append((due, Advanced(due.definition_id, None, next_after(due.schedule, due.now))))
                continue
            try:
                found = due_ticks(due.schedule, due.schedule.next_at, due.now, due.paused_at, due.paused_until)
            except ValueError as exc:
                done.invalid.append((due, exc))
                continue
            if found.at is None:
                done.paused.append((due, found))
            else:
                done.ticks.append(_Tick(due, found.at, tick_event(due.schedule.workflow, found.at, uuid7()), found))
        if done.ticks and capped:
            new, applied = await backlog.insert(connection, capped, [tick.event for tick in done.ticks])
            done.new.update(new)
            done = done._replace(applied=applied)
        elif done.ticks:
            done.new.update(await events.insert(connection, [tick.event for tick in done.ticks]))
        moved = [_advanced(tick.due, tick.found) for tick in done.ticks]
        moved += [_advanced(due, found) for due, found in done.paused] + [reset for _, reset in done.reset]
        if moved:
            await store.advance(connection, moved)
            failpoints.hit("schedule.before_commit")
        return done


class DeclaredSchedule(NamedTuple):
    """A schedule that was stored, and its next tick; or removed (None)."""

    workflow: str
    next_at: datetime | None


async def declare(
    connection: Connection, workflow: str, definition_id: DefinitionId, spec: ScheduleSpec | None
) -> DeclaredSchedule | None:
    """Store a workflow's schedule as declared in code, in the caller's transaction; None when it was stored before. A
    changed one starts from now."""
    if spec is None:
        return DeclaredSchedule(workflow, None) if await store.delete(connection, definition_id) else None
    next_at = next_after(spec, await locks.now(connection))
    is_changed = await store.upsert(connection, definition_id, spec, next_at)
    return DeclaredSchedule(workflow, next_at) if is_changed else None


def log_declared(declared: Iterable[DeclaredSchedule]) -> None:
    """Log, after the commit, the schedules that were stored or removed."""
    for one in declared:
        if one.next_at is None:
            _log.info("schedule.removed", workflow=one.workflow)
        else:
            _log.info("schedule.declared", workflow=one.workflow, next_at=tick_text(one.next_at))


def _advanced(due: DueSchedule, found: DueTicks) -> Advanced:
    last_at = due.schedule.last_at if found.at is None else found.at
    return Advanced(due.definition_id, last_at, *found[1:])


def _log_tick(tick: _Tick, *, is_new: bool) -> None:
    line = _log.bind(
        workflow=tick.due.schedule.workflow, event_id=tick.event.id, source=SOURCE,
        correlation_id=tick.event.correlation_id or tick.event.id,
        scheduled_at=tick_text(tick.at), next_at=tick_text(tick.found.next_at),
    )  # fmt: skip
    if not is_new:
        line.warning("schedule.repeated", reason="an event with this tick's id already exists")
    elif tick.found.missed_from is not None:
        line.warning("schedule.caught_up", missed_since=tick_text(tick.found.missed_from), count=tick.found.missed)
    else:
        line.info("schedule.published")
