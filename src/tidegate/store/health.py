"""What all processes share, read for operators: depths, what waits, dead letters. Nothing here decides."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

import msgspec

from tidegate.model.ids import RunId, TriggerId
from tidegate.model.source import BreakerState
from tidegate.store.db import Connection
from tidegate.store.sources import SourceMetrics
from tidegate.store.sql import load

_sql = load("health")

# How many undecided events are counted one by one.
INBOX_COUNTED = 50_000


class QueueDepth(msgspec.Struct, frozen=True, kw_only=True):
    """One queue: due now, due later, claimed, and for how long the oldest due one has been due."""

    ready: int
    delayed: int
    active: int
    oldest_due_age_seconds: float


class RetrySummary(msgspec.Struct, frozen=True, kw_only=True):
    """What waits of one kind; `overdue` ones should have resumed by now."""

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
    """Dead letters that are not replayed."""

    total: int = 0
    last_24h: int = 0


class DeadLetters(DeadLetterCount, frozen=True, kw_only=True):
    """Dead letters of one kind; `recent` ones were created within the window asked for."""

    recent: int = 0
    recent_since: datetime | None = None


class Alive(msgspec.Struct, frozen=True, kw_only=True):
    """How many workers are alive, and when one of them last took back what dead workers held."""

    alive: int
    reconciled_at: datetime | None


class ExpiredClaims(msgspec.Struct, frozen=True, kw_only=True):
    """Claims of one kind whose lease has expired and that have not been released."""

    kind: str
    total: int
    since: datetime


class PausedTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that is paused; `until` null means until it is resumed."""

    trigger_id: TriggerId
    workflow: str
    name: str
    until: datetime | None
    reason: str | None
    paused_by: str | None
    since: datetime


class PausedSource(msgspec.Struct, frozen=True, kw_only=True):
    """A source that is paused; `until` null means until it is resumed."""

    source: str
    until: datetime | None
    reason: str | None
    paused_by: str | None
    since: datetime
    waiting: int = 0


class SourceBreaker(msgspec.Struct, frozen=True, kw_only=True):
    """A source whose breaker is open; after `until` the next event is the probe."""

    source: str
    state: BreakerState
    until: datetime | None
    reason: str | None
    since: datetime | None = None


class TriggerBreaker(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger whose breaker is open (after `until` the next delivery is the probe), or half open while the probe
    `probe_run_id` lasts."""

    trigger_id: TriggerId
    workflow: str
    name: str
    state: BreakerState
    until: datetime | None
    reason: str | None
    probe_run_id: RunId | None
    since: datetime | None = None


class LimitHealth(msgspec.Struct, frozen=True, kw_only=True):
    """A source's limit, and how many wait for it; `updated_at` is when its row last changed."""

    source: str
    limit: int
    interval_ms: int
    pause_ms: int
    set_by: str | None
    throttled_until: datetime | None
    updated_at: datetime
    waiting: int = 0
    next_attempt_at: datetime | None = None


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """How many there are of what is listed in part."""

    sources: int
    triggers: int
    rate_limits: int
    paused_sources: int
    paused_triggers: int
    source_breakers: int
    trigger_breakers: int


class TriggerCounts(msgspec.Struct, frozen=True, kw_only=True):
    """How often a trigger decided what."""

    filtered: int
    matched: int
    launched: int
    throttled: int
    skipped: int
    failed: int
    paused: int
    collected: int


class TriggerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The totals of one trigger."""

    trigger_id: TriggerId
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


class Group(Waiting, frozen=True, kw_only=True):
    """Rows of one kind that wait for the same reason, and whether something holds them back on purpose."""

    kind: str
    reason: str
    is_held: bool


class Depths(msgspec.Struct, frozen=True, kw_only=True):
    """What is undecided, to be run and claimed. A very long inbox is estimated."""

    inbox: int
    inbox_since: datetime | None
    runs_due: int
    runs_total: int
    runs_since: datetime | None
    active_runs: int


async def waiting(
    connection: Connection, now: datetime, late: datetime, of_sources: Iterable[str] = ()
) -> tuple[list[Group], dict[str, Group]]:
    """Everything that waits; what was due before `late` is overdue. And what waits of each of the given sources."""
    rows = await connection.fetch(_sql["waiting"], now, late, list(of_sources))
    found = [Group(**dict(row)) for row in rows]
    by_source = {group.reason: group for group in found if group.kind == "source"}
    return [group for group in found if group.kind != "source"], by_source


async def depths(connection: Connection, now: datetime, alive_ms: int) -> Depths:
    """What is undecided, to be run and claimed; a worker is alive that was seen within `alive_ms`."""
    return Depths(**dict(await connection.fetchrow(_sql["depths"], now, INBOX_COUNTED, alive_ms) or {}))


async def limits(connection: Connection, most: int) -> list[LimitHealth]:
    """Sources that have a limit, the last changed first."""
    return [LimitHealth(**dict(row)) for row in await connection.fetch(_sql["limits"], most)]


async def paused_sources(connection: Connection, now: datetime, most: int) -> list[PausedSource]:
    """Sources whose pause is not over, the longest paused first."""
    return [PausedSource(**dict(row)) for row in await connection.fetch(_sql["paused_sources"], now, most)]


async def source_breakers(connection: Connection, most: int) -> list[SourceBreaker]:
    """Sources whose breaker is not closed."""
    return [SourceBreaker(**dict(row)) for row in await connection.fetch(_sql["source_breakers"], most)]


async def counts(connection: Connection, now: datetime) -> Counts:
    """How many there are of what is listed in part."""
    return Counts(**dict(await connection.fetchrow(_sql["counts"], now) or {}))


async def source_metrics(connection: Connection, most: int) -> list[SourceMetrics]:
    """The totals of sources, the last seen first."""
    return [SourceMetrics(**dict(row)) for row in await connection.fetch(_sql["source_metrics"], most)]


async def dead_letters(connection: Connection, now: datetime, since: datetime) -> dict[str, DeadLetters]:
    """Dead letters by kind; `recent` ones were created after `since`."""
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


async def paused_triggers(connection: Connection, most: int) -> list[PausedTrigger]:
    """Triggers whose pause is not over, the longest paused first."""
    return [PausedTrigger(**dict(row)) for row in await connection.fetch(_sql["paused_triggers"], most)]


async def trigger_breakers(connection: Connection, most: int) -> list[TriggerBreaker]:
    """Triggers whose breaker is not closed."""
    return [TriggerBreaker(**dict(row)) for row in await connection.fetch(_sql["trigger_breakers"], most)]


async def trigger_metrics(connection: Connection, most: int) -> list[TriggerMetrics]:
    """The totals of triggers, the last changed first."""
    found = []
    for row in await connection.fetch(_sql["trigger_metrics"], most):
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
