"""Schedule: when a tick has come, its event is published and the schedule moves on, in one transaction.

The row's lock makes it once for each tick, whoever looks; the event's id (`<workflow>:<tick>`) would refuse a second.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import NamedTuple

from tidegate import failpoints
from tidegate.clock import uuid7
from tidegate.model.event import NewEvent
from tidegate.model.schedule import SOURCE, ScheduleSpec, latest, next_after, tick_event, tick_text
from tidegate.store import events, locks
from tidegate.store import schedules as store
from tidegate.store.db import Connection, Database
from tidegate.store.schedules import Advanced, DueSchedule
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

_log = logger("schedule")


class ScheduleTurn(NamedTuple):
    """What one look did, and how many seconds the next tick is away (None: there is none)."""

    published: int = 0
    next_seconds: float | None = None


class _Tick(NamedTuple):
    due: DueSchedule
    at: datetime
    event: NewEvent
    moved: Advanced


class Scheduler:
    """Publishes the ticks of the given workflows: a worker cares for those that it can run."""

    def __init__(
        self,
        database: Database,
        definitions: Iterable[uuid.UUID],
        *,
        batch_size: int,
        after_publish: Callable[[], None] = lambda: None,
    ) -> None:
        self._database = database
        self._definitions = set(definitions)
        self._batch_size = batch_size
        self._after_publish = after_publish

    async def run_once(self) -> ScheduleTurn:
        """Publish a batch of ticks that have come."""
        async with self._database.connection() as connection:
            seconds = await store.next_due_seconds(connection, self._definitions)
        if seconds is None or seconds > 0:
            return ScheduleTurn(0, seconds)
        ticks, new = await self._database.run(self._publish)
        if new:
            self._after_publish()
            metrics.received(Counter({SOURCE: len(new)}))
        for tick in ticks:
            _log_line(tick, is_new=tick.event.id in new)
        return ScheduleTurn(len(ticks), seconds)

    async def _publish(self, connection: Connection) -> tuple[list[_Tick], set[uuid.UUID]]:
        due = await store.lock_due(connection, self._definitions, self._batch_size)
        ahead = [one for one in due if one.schedule.last_at is not None and one.schedule.last_at > one.now]
        ticks = [tick for tick in map(self._decide, (one for one in due if one not in ahead)) if tick is not None]
        if not ticks and not ahead:
            return [], set()
        new = await events.insert(connection, [tick.event for tick in ticks]) if ticks else set()
        await store.advance(connection, [tick.moved for tick in ticks] + [self._set_right(one) for one in ahead])
        failpoints.hit("schedule.before_commit")
        return ticks, new

    def _set_right(self, due: DueSchedule) -> Advanced:
        """Its last tick lies ahead: the clock was wrong then. It counts from now; no tick has two events."""
        next_at = next_after(due.schedule, due.now)
        _log.warning("schedule.set_right", workflow=due.schedule.workflow, next_at=tick_text(next_at))
        return Advanced(due.definition_id, None, next_at)

    def _decide(self, due: DueSchedule) -> _Tick | None:
        """The latest tick that has come; those before it, missed while nobody looked, are not made up for."""
        try:
            tick = latest(due.schedule, due.schedule.next_at, due.now)
            moved = Advanced(due.definition_id, tick, next_after(due.schedule, tick))
        except ValueError as exc:
            # Another version's expression, or a time zone that this machine lacks: others may know better.
            self._definitions.discard(due.definition_id)
            _log.error("schedule.not_understood", workflow=due.schedule.workflow, error=exc)
            return None
        return _Tick(due, tick, tick_event(due.schedule.workflow, tick, uuid7()), moved)


async def declare(connection: Connection, workflow: str, definition_id: uuid.UUID, spec: ScheduleSpec | None) -> None:
    """A workflow's schedule as code says it, in the caller's transaction. A changed one counts from now."""
    if spec is None:
        if await store.delete(connection, definition_id):
            _log.info("schedule.removed", workflow=workflow)
        return
    next_at = next_after(spec, await locks.now(connection))
    if await store.upsert(connection, definition_id, spec, next_at):
        _log.info("schedule.declared", workflow=workflow, next_at=tick_text(next_at))


def _log_line(tick: _Tick, *, is_new: bool) -> None:
    line = _log.bind(
        workflow=tick.due.schedule.workflow, event_id=tick.event.id, source=SOURCE,
        correlation_id=tick.event.correlation_id or tick.event.id,
        scheduled_at=tick_text(tick.at), next_at=tick_text(tick.moved.next_at),
    )  # fmt: skip
    if not is_new:
        line.warning("schedule.repeated", reason="an event with this tick's id exists already")
    elif tick.at > tick.due.schedule.next_at:
        line.warning("schedule.caught_up", missed_since=tick_text(tick.due.schedule.next_at))
    else:
        line.info("schedule.published")
