"""Event replay: decide events again, by the triggers as they are now. A trigger that has already decided about an event
does not decide again, so nothing is launched twice; a run is repeated by `rerun`.

To replay many events, each gets a time. Any worker that finds one due replays it in its own transaction, which also
takes it off the list.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tidegate import failpoints
from tidegate.errors import Conflict
from tidegate.flow.keep import replay
from tidegate.flow.keep.replay import LATE_MS, Replay
from tidegate.model.ids import EventId
from tidegate.store import audit, dead_letters, decisions, event_replays
from tidegate.store.db import Connection, Database
from tidegate.store.decisions import NewDecision
from tidegate.telemetry.logs import logger

_log = logger("replay")


async def perform(connection: Connection, event_id: EventId, actor: str, *, is_named: bool = True) -> bool:
    """Make an event due at its source's gate; whether it had been taken back, which only who has named it overrules.
    Conflict says why it cannot be replayed."""
    letter_id = await event_replays.open_letter(connection, event_id)
    letter = await dead_letters.lock(connection, letter_id) if letter_id is not None else None
    if letter is not None and letter.replayed_at is None:
        await replay.perform(connection, letter, actor)
        return False
    found = await event_replays.lock(connection, event_id)
    if found is None:
        raise Conflict(f"event {event_id} no longer exists")
    if found.is_leaving:  # what it has launched may be gone, and would be launched again
        raise Conflict(f"event {event_id} is being removed: it is older than the retention")
    if found.is_undecided or found.retry_state in ("scheduled", "running"):
        raise Conflict(f"event {event_id} is already waiting to be decided")
    is_taken_back = found.retry_state == "cancelled"
    if is_taken_back and not is_named:
        raise Conflict(f"event {event_id} was taken back")
    if not await dead_letters.replay_event(connection, event_id, None, actor):
        raise Conflict(f"event {event_id} is already waiting to be decided")
    await decisions.insert(connection, [NewDecision(event_id, None, "gate", "replayed", actor=actor)])
    await audit.insert(
        connection, actor=actor, action="event.replay", subject=str(event_id),
        before={"retry_state": found.retry_state}, after={"retry_state": "scheduled"},
    )  # fmt: skip
    return is_taken_back


class EventReplays:
    """Replays due events. `after_replay` is called after the commits, if there were any."""

    def __init__(self, database: Database, *, batch_size: int, after_replay: Callable[[], None] = lambda: None) -> None:
        self._database = database
        self._batch_size = batch_size
        self._after_replay = after_replay

    async def run_once(self) -> int:
        """One batch of due events; how many were taken off the list."""
        seconds = await self.next_due_seconds()
        if seconds is None or seconds > 0:
            return 0
        if seconds < -LATE_MS / 1000:
            moved = await self._database.run(partial(event_replays.postpone, late_ms=LATE_MS))
            _log.info("events.replay_late", count=moved, reason="no worker was running; postponed to keep the rate")
        done = 0
        while done < self._batch_size and await self._database.run(self._one):
            failpoints.hit("event_replay.after_commit")
            done += 1
        if done:
            self._after_replay()
        return done

    async def next_due_seconds(self) -> float | None:
        """Seconds until the next event is due, or None."""
        async with self._database.connection() as connection:
            return await event_replays.next_due_seconds(connection)

    async def _one(self, connection: Connection) -> bool:
        for event_id, actor in await event_replays.take_due(connection, 1):
            try:
                await perform(connection, event_id, actor, is_named=False)
            except Conflict as exc:
                _log.warning("event.replay_refused", event_id=event_id, reason=str(exc.args[0]), actor=actor)
            failpoints.hit("event_replay.before_commit")
            return True
        return False


class Replays:
    """Replays due dead letters and events. `after_replay` is called with their kinds after the commits."""

    def __init__(self, database: Database, *, batch_size: int, after_replay: Callable[[set[str]], None]) -> None:
        self._letters = Replay(database, batch_size=batch_size, after_replay=after_replay)
        self._events = EventReplays(database, batch_size=batch_size, after_replay=lambda: after_replay({"event"}))

    async def run_once(self) -> int:
        """One batch of each; how many were replayed or refused."""
        return await self._letters.run_once() + await self._events.run_once()

    async def next_due_seconds(self) -> float | None:
        """Seconds until the next of them is due, or None."""
        times = [await self._letters.next_due_seconds(), await self._events.next_due_seconds()]
        return min((seconds for seconds in times if seconds is not None), default=None)
