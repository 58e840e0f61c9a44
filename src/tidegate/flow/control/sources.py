"""The operator's verbs for sources.

Each waits for the batches that may be launching for the source and excludes new ones until it commits: after `pause`
has returned, no event of that source is launched until the pause ends.
"""

from __future__ import annotations

from datetime import datetime

from tidegate.errors import FieldError, InvalidInput, NotFound
from tidegate.model.backlog import SourceBacklog
from tidegate.model.event import RESERVED, is_name
from tidegate.model.pauses import check_length, check_until
from tidegate.model.schedule import SOURCE as SCHEDULES
from tidegate.model.source import RateLimit, SourceBreakerPolicy
from tidegate.store import audit, locks, source_backlogs
from tidegate.store import sources as store
from tidegate.store.db import Connection, Database
from tidegate.store.locks import DEFAULT
from tidegate.store.sources import SourceRecord
from tidegate.telemetry.logs import logger

_log = logger("control")


async def seed_limits(database: Database, limits: dict[str, RateLimit]) -> list[str]:
    """Store the limits of the settings; a limit that an operator set is kept. Returns the sources that changed."""

    async def seed(connection: Connection) -> list[str]:
        # The default's lock excludes every batch, whatever its sources: rows may be changed in any order.
        await locks.exclude_source(connection, DEFAULT)
        changed = []
        for source, limit in sorted(limits.items()):
            if await store.seed_limit(connection, source, limit):
                await store.end_throttle(connection, source)
                await store.replan(connection, source)
                changed.append(source)
        return changed

    async with database.connection() as connection:  # without a change, the lock is not taken
        is_done = not await store.unseeded(connection, limits)
    changed = [] if is_done else await database.run(seed)
    for source in changed:
        _log.info("source.limit_seeded", source=source)
    return changed


async def seed_breakers(database: Database, policies: dict[str, SourceBreakerPolicy]) -> list[str]:
    """Store the breaker policies of the settings; a policy that an operator set is kept."""

    async def seed(connection: Connection) -> list[str]:
        return [source for source, policy in sorted(policies.items())
                if await store.seed_breaker(connection, source, policy)]  # fmt: skip

    changed = await database.run(seed) if policies else []
    for source in changed:
        _log.info("source.breaker_seeded", source=source)
    return changed


async def set_breaker(database: Database, source: str, policy: SourceBreakerPolicy | None, actor: str) -> SourceRecord:
    """Give a source's breaker its own policy, or (None) the one of the settings. Its counts are kept."""
    _check_source(source, allow_default=False)

    async def change(connection: Connection) -> SourceRecord:
        await locks.exclude_source(connection, source)
        before = await store.get(connection, source)
        await store.set_breaker(connection, source, policy, actor)
        after = await _required(connection, source)
        audited = [{"breaker": record.breaker} if record else None for record in (before, after)]
        await audit.insert(
            connection, actor=actor, action="source.breaker", subject=source, before=audited[0], after=audited[1]
        )
        return after

    changed = await database.run(change)
    _log.info("source.breaker_changed", source=source, actor=actor)
    return changed


async def set_weight(database: Database, source: str, weight: int, actor: str) -> SourceRecord:
    """Set a source's weight: its share of a batch while several sources wait to be decided."""
    _check_source(source, allow_default=False)

    async def change(connection: Connection) -> SourceRecord:
        await locks.exclude_source(connection, source)
        before = await store.get(connection, source)
        await store.set_weight(connection, source, weight, actor)
        after = await _required(connection, source)
        audited = [{"weight": record.weight} if record else None for record in (before, after)]
        await audit.insert(
            connection, actor=actor, action="source.weight", subject=source, before=audited[0], after=audited[1]
        )
        return after

    changed = await database.run(change)
    _log.info("source.weight_changed", source=source, weight=weight, actor=actor)
    return changed


async def set_backlog(database: Database, source: str, backlog: SourceBacklog | None, actor: str) -> SourceRecord:
    """Cap what may wait of a source, or (None) remove the cap. Nothing that waits leaves by itself; processes that
    publish know it within two seconds."""
    _check_source(source, allow_default=False)
    if source.startswith(RESERVED) and source != SCHEDULES:
        message = "is Tidegate's own: its events are starts, ends and decisions, which must not be refused"
        raise InvalidInput("the source is not valid", [FieldError("source", message)])

    async def change(connection: Connection) -> SourceRecord:
        await locks.exclude_source(connection, source)
        before = await store.get(connection, source)
        await source_backlogs.set_backlog(connection, source, backlog, actor)
        after = await _required(connection, source)
        audited = [
            {"max_waiting": record.max_waiting, "when_full": record.when_full} if record else None
            for record in (before, after)
        ]
        await audit.insert(
            connection, actor=actor, action="source.backlog", subject=source, before=audited[0], after=audited[1]
        )
        return after

    changed = await database.run(change)
    _log.info("source.backlog_changed", source=source, limit=changed.max_waiting, actor=actor)
    return changed


async def set_limit(database: Database, source: str, limit: RateLimit | None, actor: str) -> SourceRecord:
    """Set, change or (None) remove a source's limit; `*` is the default for sources without their own."""
    _check_source(source, allow_default=True)

    async def change(connection: Connection) -> SourceRecord:
        await locks.exclude_source(connection, source)
        before = await store.get(connection, source)
        await store.set_limit(connection, source, limit, actor)
        await store.end_throttle(connection, source)
        await store.replan(connection, source)
        after = await _required(connection, source)
        await audit.insert(
            connection, actor=actor, action="source.limit", subject=source, before=_limits(before), after=_limits(after)
        )
        return after

    changed = await database.run(change)
    _log.info("source.limit_changed", source=source, limit=changed.rate_limit, actor=actor)
    return changed


async def pause(
    database: Database,
    source: str,
    *,
    until: datetime | None = None,
    duration_ms: int | None = None,
    reason: str | None = None,
    actor: str,
) -> SourceRecord:
    """Pause a source until a time, for a duration, or (neither) until it is resumed."""
    _check_source(source, allow_default=False)
    check_length(until, duration_ms)

    async def change(connection: Connection) -> SourceRecord:
        await locks.exclude_source(connection, source)
        if until is not None:
            check_until(until, await locks.now(connection))
        before = await store.get(connection, source)
        await store.pause(connection, source, until=until, duration_ms=duration_ms, reason=reason, actor=actor)
        await store.replan(connection, source)
        after = await _required(connection, source)
        await audit.insert(
            connection, actor=actor, action="source.pause", subject=source, before=_pauses(before), after=_pauses(after)
        )
        return after

    paused = await database.run(change)
    _log.warning("source.paused", source=source, until=paused.paused_until, reason=reason, actor=actor)
    return paused


async def resume(database: Database, source: str, actor: str) -> SourceRecord:
    """End a source's pause and close its breaker; its waiting events get new slots at once."""
    _check_source(source, allow_default=False)

    async def change(connection: Connection) -> SourceRecord:
        await locks.exclude_source(connection, source)
        before = await store.get(connection, source)
        if before is None:
            raise NotFound(f"no source {source!r}: it has no limit, pause or waiting events")
        await store.resume(connection, source, actor)
        await store.end_throttle(connection, source)
        await store.replan(connection, source)
        after = await _required(connection, source)
        await audit.insert(
            connection, actor=actor, action="source.resume", subject=source, before=_pauses(before),
            after=_pauses(after),
        )  # fmt: skip
        return after

    resumed = await database.run(change)
    _log.info("source.resumed", source=source, actor=actor)
    return resumed


async def _required(connection: Connection, source: str) -> SourceRecord:
    found = await store.get(connection, source)
    assert found is not None, f"{source} was just written"
    return found


def _check_source(source: str, *, allow_default: bool) -> None:
    if not is_name(source) and not (allow_default and source == DEFAULT):
        raise InvalidInput("the source is not valid", [FieldError("source", "is not the name of a source")])


def _limits(record: SourceRecord | None) -> dict[str, int | None] | None:
    if record is None:
        return None
    return {"limit": record.rate_limit, "interval_ms": record.interval_ms, "pause_ms": record.pause_ms}


def _pauses(record: SourceRecord | None) -> dict[str, object] | None:
    if record is None:
        return None
    return {"paused_until": record.paused_until, "reason": record.pause_reason, "paused_by": record.paused_by,
            "is_paused": record.paused_at is not None, "breaker_state": record.breaker_state}  # fmt: skip
