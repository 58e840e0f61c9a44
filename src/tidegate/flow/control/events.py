"""The operator's verbs for events: replay one, schedule the replay of many at a rate, stop scheduled replays."""

from __future__ import annotations

from functools import partial

import msgspec

from tidegate.flow.control.dead_letters import check_rate
from tidegate.flow.keep import event_replay
from tidegate.model.ids import EventId
from tidegate.store import audit, event_replays
from tidegate.store.db import Connection, Database
from tidegate.store.dead_letters import Scheduled
from tidegate.store.event_replays import EventRange
from tidegate.telemetry.logs import logger

# At most this many events are scheduled by one call.
MAX_REPLAYED = 10_000

_log = logger("control")


async def replay_event(database: Database, event_id: EventId, actor: str) -> bool:
    """Decide an event again, by the triggers that have not decided about it; whether it had been taken back. Conflict
    when it waits to be decided."""
    is_taken_back = await database.run(partial(event_replay.perform, event_id=event_id, actor=actor))
    _log.info("event.replayed", event_id=event_id, actor=actor)
    return is_taken_back


async def replay_events(
    database: Database, wanted: EventRange, actor: str, *, rate: float, limit: int = MAX_REPLAYED
) -> Scheduled:
    """Schedule the replay of up to `limit` events, `rate` of them per second, oldest first; not of those that were
    taken back."""
    check_rate(rate)

    async def change(connection: Connection) -> Scheduled:
        done = await event_replays.schedule(connection, wanted, limit=limit, apart_ms=1000 / rate, actor=actor)
        asked = {name: value for name, value in wanted._asdict().items() if value is not None}
        after = {"filters": msgspec.to_builtins(asked), "rate": rate, "count": done.total}
        await audit.insert(connection, actor=actor, action="events.replay", subject="*", after=after)
        return done

    scheduled = await database.run(change)
    _log.info("events.replay_scheduled", count=scheduled.total, rate=rate, actor=actor)
    return scheduled


async def stop_event_replays(database: Database, actor: str) -> int:
    """Cancel every scheduled replay of an event that is not done yet; how many."""

    async def change(connection: Connection) -> int:
        count = await event_replays.stop(connection)
        await audit.insert(connection, actor=actor, action="events.stop", subject="*", after={"count": count})
        return count

    count = await database.run(change)
    _log.info("events.replay_stopped", count=count, actor=actor)
    return count
