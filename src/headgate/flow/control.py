"""Control: the operator's verbs, shared by API and CLI. Each is one transaction with its audit row.

A verb about a source waits for the batches that may be launching for it and keeps new ones out until it commits: when
`pause` has returned, no launch of that source follows until it is lifted.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from functools import partial
from typing import Literal

from headgate.errors import Conflict, FieldError, InvalidInput, NotFound
from headgate.model.event import is_name
from headgate.model.source import RateLimit
from headgate.model.units import MAX_DURATION_MS
from headgate.store import audit, decisions, ingress_retries
from headgate.store import sources as store
from headgate.store.db import Connection, Database
from headgate.store.decisions import Recorded
from headgate.store.sources import DEFAULT, SourceRecord
from headgate.telemetry import metrics
from headgate.telemetry.logs import logger

_log = logger("control")


async def seed_limits(database: Database, limits: dict[str, RateLimit]) -> list[str]:
    """The settings' limits into the shared table; what an operator set stays. The sources that changed."""

    async def seed(connection: Connection) -> list[str]:
        # The default's lock keeps every batch out, whatever its sources: rows may be changed in any order.
        await store.exclude(connection, DEFAULT)
        changed = []
        for source, limit in sorted(limits.items()):
            if await store.seed_limit(connection, source, limit):
                await store.end_throttle(connection, source)
                await store.replan(connection, source)
                changed.append(source)
        return changed

    changed = await database.run(seed) if limits else []
    for source in changed:
        _log.info("source.limit_seeded", source=source)
    return changed


async def set_limit(database: Database, source: str, limit: RateLimit | None, actor: str) -> SourceRecord:
    """Set, change or (None) remove a source's limit; `*` is the default for sources without their own."""
    _check_source(source, allow_default=True)

    async def change(connection: Connection) -> SourceRecord:
        await store.exclude(connection, source)
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
    if until is not None and duration_ms is not None:
        raise InvalidInput("the pause is not valid", [FieldError("until", "give `until` or `duration_ms`, not both")])
    if duration_ms is not None and not 1 <= duration_ms <= MAX_DURATION_MS:
        raise InvalidInput("the pause is not valid", [FieldError("duration_ms", f"must be 1 to {MAX_DURATION_MS}")])

    async def change(connection: Connection) -> SourceRecord:
        await store.exclude(connection, source)
        if until is not None:
            _check_until(until, await store.now(connection))
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
    """Lift a source's pause and close its breaker; its waiting events get new slots at once."""
    _check_source(source, allow_default=False)

    async def change(connection: Connection) -> SourceRecord:
        await store.exclude(connection, source)
        before = await store.get(connection, source)
        if before is None:
            raise NotFound(f"no source {source!r} is known: it has no limit, pause or waiting events")
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


async def cancel_event(database: Database, event_id: uuid.UUID, actor: str) -> None:
    """Cancel an event that waits: it will not be launched, whatever was in flight. Conflict when it does not wait."""
    await database.run(partial(_change_waiting, event_id=event_id, actor=actor, verb="cancel"))
    metrics.EVENT_RETRIES.labels("cancelled").inc()
    _log.info("event.retry_cancelled", event_id=str(event_id), actor=actor)


async def force_event(database: Database, event_id: uuid.UUID, actor: str) -> None:
    """Make an event that waits due now; the gate is still asked. Conflict when it does not wait."""
    await database.run(partial(_change_waiting, event_id=event_id, actor=actor, verb="force"))
    _log.info("event.retry_forced", event_id=str(event_id), actor=actor)


async def _change_waiting(
    connection: Connection, *, event_id: uuid.UUID, actor: str, verb: Literal["cancel", "force"]
) -> None:
    if verb == "cancel":
        found = await ingress_retries.cancel(connection, event_id, f"cancelled by {actor}")
    else:
        found = await ingress_retries.force(connection, event_id)
    if found is None:
        row = await ingress_retries.get(connection, event_id)
        if row is None:
            raise NotFound(f"event {event_id} is not held: it has no retry")
        raise Conflict(f"event {event_id} is no longer waiting: its retry is {row.retry_state}")
    done = "cancelled" if verb == "cancel" else "forced"
    await decisions.insert(connection, [Recorded(event_id, None, "gate", done, None, None, found[1], actor)])
    await audit.insert(connection, actor=actor, action=f"event.{verb}", subject=str(event_id))


async def _required(connection: Connection, source: str) -> SourceRecord:
    found = await store.get(connection, source)
    assert found is not None, f"{source} was just written"
    return found


def _check_source(source: str, *, allow_default: bool) -> None:
    if not is_name(source) and not (allow_default and source == DEFAULT):
        raise InvalidInput("the source is not valid", [FieldError("source", "is not the name of a source")])


def _check_until(until: datetime, now: datetime) -> None:
    if until <= now:
        raise InvalidInput("the pause is not valid", [FieldError("until", "lies in the past")])
    if until - now > timedelta(milliseconds=MAX_DURATION_MS):
        raise InvalidInput("the pause is not valid", [FieldError("until", "is more than 366 days away")])


def _limits(record: SourceRecord | None) -> dict[str, int | None] | None:
    if record is None:
        return None
    return {"limit": record.rate_limit, "interval_ms": record.interval_ms, "pause_ms": record.pause_ms}


def _pauses(record: SourceRecord | None) -> dict[str, object] | None:
    if record is None:
        return None
    return {"paused_until": record.paused_until, "reason": record.pause_reason, "paused_by": record.paused_by,
            "is_paused": record.paused_at is not None, "breaker_state": record.breaker_state}  # fmt: skip
