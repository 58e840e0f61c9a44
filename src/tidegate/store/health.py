"""What all processes share, read for operators: depths, what waits, what was given up. Nothing here decides."""

from __future__ import annotations

import uuid
from datetime import datetime

import msgspec

from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("health")

# So many undecided events are counted one by one.
INBOX_COUNTED = 50_000


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
    """How many workers are alive, when any was seen last (one that stopped in order is forgotten), and when one of the
    living last took back what dead workers held."""

    alive: int
    seen_at: datetime | None
    reconciled_at: datetime | None


class ExpiredClaims(msgspec.Struct, frozen=True, kw_only=True):
    """Claims of one kind whose lease is over and that nobody has released."""

    kind: str
    total: int
    since: datetime


class PausedTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that is paused; `until` null means until it is resumed."""

    trigger_id: uuid.UUID
    workflow: str
    name: str
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


class Waiting(msgspec.Struct, frozen=True, kw_only=True):
    """Rows that wait for one and the same thing: the first of them, how many are due, and how many for too long."""

    total: int
    due: int
    overdue: int
    next_attempt_at: datetime


class HeldEvents(Waiting, frozen=True, kw_only=True):
    """Events of one source."""

    source: str
    reason: str | None


class HeldDeliveries(Waiting, frozen=True, kw_only=True):
    """Deliveries of one trigger; `source` is the one that they wait for, if that is paused."""

    trigger_id: uuid.UUID
    reason: str | None
    source: str | None


class WaitingSteps(Waiting, frozen=True, kw_only=True):
    """Steps of one kind."""

    kind: str


class Depths(msgspec.Struct, frozen=True, kw_only=True):
    """What is undecided, to be run and claimed. A very long inbox is estimated."""

    inbox: int
    inbox_since: datetime | None
    runs_due: int
    runs_total: int
    runs_since: datetime | None
    active_events: int
    active_deliveries: int
    active_runs: int


class SourceState(msgspec.Struct, frozen=True, kw_only=True):
    """A source that has a limit, a pause or an open breaker; `failed_at` is its last failure."""

    source: str
    rate_limit: int | None
    interval_ms: int | None
    pause_ms: int | None
    limit_set_by: str | None
    paused_at: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None
    breaker_state: str
    breaker_until: datetime | None
    breaker_reason: str | None
    throttled_until: datetime | None
    failed_at: datetime | None


async def held_events(connection: Connection, now: datetime, late: datetime) -> list[HeldEvents]:
    """Held events by source and reason; what was to go on by `late` is overdue."""
    return [HeldEvents(**dict(row)) for row in await connection.fetch(_sql["held_events"], now, late)]


async def held_deliveries(connection: Connection, now: datetime, late: datetime) -> list[HeldDeliveries]:
    """Held deliveries by trigger and reason."""
    return [HeldDeliveries(**dict(row)) for row in await connection.fetch(_sql["held_deliveries"], now, late)]


async def waiting_steps(connection: Connection, now: datetime, late: datetime) -> list[WaitingSteps]:
    """Waiting steps by kind."""
    return [WaitingSteps(**dict(row)) for row in await connection.fetch(_sql["waiting_steps"], now, late)]


async def held_sources(connection: Connection, now: datetime) -> dict[str, str]:
    """Sources of which nothing may go on now, and what holds them."""
    return {row["source"]: row["holds"] for row in await connection.fetch(_sql["held_sources"], now)}


async def held_triggers(connection: Connection, now: datetime) -> dict[uuid.UUID, str]:
    """Triggers of which nothing may go on now, and what holds them."""
    return {row["trigger_id"]: row["holds"] for row in await connection.fetch(_sql["held_triggers"], now)}


async def depths(connection: Connection, now: datetime) -> Depths:
    """What is undecided, to be run and claimed."""
    return Depths(**dict(await connection.fetchrow(_sql["depths"], now, INBOX_COUNTED) or {}))


async def sources(connection: Connection) -> list[SourceState]:
    """Every source that has a limit, a pause or an open breaker."""
    return [SourceState(**dict(row)) for row in await connection.fetch(_sql["sources"])]


async def dead_letters(connection: Connection, now: datetime, since: datetime) -> dict[str, DeadLetters]:
    """What was given up, by kind; `recent` is what was given up after `since`."""
    found = {}
    for row in await connection.fetch(_sql["dead_letters"], now, since):
        fields = dict(row)
        kind = fields.pop("kind")
        found[kind] = DeadLetters(**fields)
    return found


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


async def last_processed(connection: Connection) -> datetime | None:
    """When the gate last decided an event."""
    found: datetime | None = await connection.fetchval(_sql["last_processed"])
    return found


async def totals(connection: Connection, depths: Depths) -> Totals:
    """Running totals over the whole cluster. What was received is what was decided and what is undecided; what ended is
    what was launched and is not unfinished: no finished run has to be read."""
    decided, launched = await connection.fetchrow(_sql["totals"]) or (0, 0)
    ended = max(0, launched - depths.runs_total - depths.active_runs)
    return Totals(received=decided + depths.inbox, decided=decided, launched=launched, ended=ended)
