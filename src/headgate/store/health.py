"""What all processes share, read for operators: depths, what waits, what was given up. Nothing here decides."""

from __future__ import annotations

import uuid
from datetime import datetime

import msgspec

from headgate.store.db import Connection
from headgate.store.sql import load

_sql = load("health")

KINDS = ("events", "deliveries", "steps")


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """One queue: due now, due later, claimed, and for how long the oldest due one has been due."""

    ready: int
    delayed: int
    active: int
    oldest_due_age_seconds: float


class RetrySummary(msgspec.Struct, frozen=True, kw_only=True):
    """What waits of one kind; `overdue` ones should have gone on by now."""

    total: int = 0
    overdue: int = 0
    overdue_since: datetime | None = None
    next_attempt_at: datetime | None = None
    by_reason: dict[str, int] = {}


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Running totals of events received and decided, of runs launched and ended; a replayed run ends twice, and makes
    the last one smaller meanwhile."""

    received: int
    decided: int
    launched: int
    ended: int


class DeadLetterCount(msgspec.Struct, frozen=True, kw_only=True):
    """What was given up and not replayed."""

    total: int = 0
    last_24h: int = 0


class DeadLetters(DeadLetterCount, frozen=True, kw_only=True):
    """The same of one kind; `recent` ones were given up within the window that was asked about."""

    recent: int = 0
    recent_since: datetime | None = None


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers are alive, and when any was seen last (one that stopped in order is forgotten)."""

    alive: int
    seen_at: datetime | None


class ExpiredClaims(msgspec.Struct, frozen=True, kw_only=True):
    """Claims of one kind whose lease is over and that nobody has released."""

    kind: str
    total: int
    since: datetime


class PausedTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that is paused; `until` null means until it is resumed."""

    trigger_id: uuid.UUID
    workflow: str
    until: datetime | None
    reason: str | None
    paused_by: str | None
    since: datetime


class OpenBreaker(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger whose breaker is open, or half open while its trial run lasts."""

    trigger_id: uuid.UUID
    workflow: str
    name: str
    breaker_state: str
    until: datetime | None
    reason: str | None
    probe_run_id: uuid.UUID | None
    since: datetime | None = None


class TriggerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How often a trigger decided what."""

    filtered: int
    matched: int
    launched: int
    throttled: int
    skipped: int
    failed: int
    paused: int


class TriggerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of one trigger."""

    trigger_id: uuid.UUID
    workflow: str
    counts: TriggerCounts
    last_status: str | None
    last_error: str | None
    updated_at: datetime


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """How many are paused, and when the gate last decided an event."""

    paused_sources: int
    paused_triggers: int
    last_processed_event_at: datetime | None


async def queues(connection: Connection) -> dict[str, QueueDepth]:
    """The depths of `ingress`, `triggers` and `runs`."""
    found = {}
    for row in await connection.fetch(_sql["queues"]):
        fields = dict(row)
        queue = fields.pop("queue")
        found[queue] = QueueDepth(**fields)
    return found


async def retries(connection: Connection, overdue_after_ms: int) -> dict[str, RetrySummary]:
    """What waits, by kind."""
    rows = await connection.fetch(_sql["retries"], overdue_after_ms)
    return {
        kind: RetrySummary(
            total=sum(row["total"] for row in rows if row["kind"] == kind),
            overdue=sum(row["overdue"] for row in rows if row["kind"] == kind),
            overdue_since=min(
                (row["overdue_since"] for row in rows if row["kind"] == kind and row["overdue"]), default=None
            ),
            next_attempt_at=min((row["next_attempt_at"] for row in rows if row["kind"] == kind), default=None),
            by_reason={row["reason"]: row["total"] for row in rows if row["kind"] == kind},
        )
        for kind in KINDS
    }


async def dead_letters(connection: Connection, window_ms: int) -> dict[str, DeadLetters]:
    """What was given up, by kind."""
    found = {}
    for row in await connection.fetch(_sql["dead_letters"], window_ms):
        fields = dict(row)
        kind = fields.pop("kind")
        found[kind] = DeadLetters(**fields)
    return found


async def source_breakers(connection: Connection) -> dict[str, datetime | None]:
    """Sources whose breaker is not closed, and since when."""
    return {row["source"]: row["since"] for row in await connection.fetch(_sql["source_breakers"])}


async def workers(connection: Connection, alive_ms: int) -> Alive:
    """How many workers are alive."""
    return Alive(**dict(await connection.fetchrow(_sql["workers"], alive_ms) or {}))


async def expired_claims(connection: Connection) -> list[ExpiredClaims]:
    """Claims that should have been released by now, by kind."""
    return [ExpiredClaims(**dict(row)) for row in await connection.fetch(_sql["expired_claims"])]


async def paused_triggers(connection: Connection) -> list[PausedTrigger]:
    """Triggers whose pause is not over."""
    return [PausedTrigger(**dict(row)) for row in await connection.fetch(_sql["paused_triggers"])]


async def open_breakers(connection: Connection) -> list[OpenBreaker]:
    """Triggers whose breaker is not closed."""
    return [OpenBreaker(**dict(row)) for row in await connection.fetch(_sql["open_breakers"])]


async def trigger_metrics(connection: Connection) -> list[TriggerMetrics]:
    """The totals of every trigger that has any."""
    found = []
    for row in await connection.fetch(_sql["trigger_metrics"]):
        fields = dict(row)
        counts = TriggerCounts(**{name: fields.pop(name) for name in TriggerCounts.__struct_fields__})
        found.append(TriggerMetrics(counts=counts, **fields))
    return found


async def overview(connection: Connection) -> Overview:
    """How many are paused, and when the gate last decided an event."""
    return Overview(**dict(await connection.fetchrow(_sql["overview"]) or {}))


async def totals(connection: Connection) -> Totals:
    """Running totals over the whole cluster."""
    return Totals(**dict(await connection.fetchrow(_sql["totals"]) or {}))
