"""`event_scheduler_sources` and its metrics: the shared state that every worker decides by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tidegate.model.backlog import SourceWhenFull
from tidegate.model.ids import RunId
from tidegate.model.outcome_window import width_ms
from tidegate.model.source import BreakerPolicy, BreakerState, Gate, Hold, RateLimit, SourceBreakerPolicy
from tidegate.store.db import Connection, Row, TransientConflict
from tidegate.store.locks import DEFAULT
from tidegate.store.sql import load

_sql = load("sources")

# With the first failure in a window, how many of the last events are searched for ones delivered within the window.
MAX_SEARCHED = 1000


class LockedSource(NamedTuple):
    """A source whose row this transaction holds."""

    gate: Gate
    plan_version: int
    is_replanning: bool
    last_waiting: int | None
    refused_at: datetime | None = None
    breaker: SourceBreakerPolicy | None = None

    @property
    def has_backlog(self) -> bool:
        """Whether any of its events wait."""
        return self.last_waiting is not None


class LockedSources(NamedTuple):
    """Those of a batch's sources that have a state, locked until the commit; the time at which they were, and the
    version of the registry of triggers."""

    now: datetime
    registry_version: int
    sources: dict[str, LockedSource]
    has_waits: bool


class SourceState(NamedTuple):
    """A source as it is, not locked: the time, its gate as stored, without a limit; the limit in force, the one that
    applies if it has none of its own, and how many of its events wait."""

    now: datetime
    gate: Gate
    limit: RateLimit | None
    default: RateLimit | None
    waiting: int


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A source as operators see it."""

    source: str
    rate_limit: int | None
    interval_ms: int | None
    pause_ms: int | None
    limit_set_by: str | None
    paused_at: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None
    breaker: SourceBreakerPolicy | None
    breaker_set_by: str | None
    breaker_state: BreakerState
    breaker_until: datetime | None
    breaker_reason: str | None
    throttled_until: datetime | None
    waiting: int
    next_attempt_at: datetime | None
    version: int
    updated_by: str
    created_at: datetime
    updated_at: datetime
    weight: int
    max_waiting: int | None
    when_full: SourceWhenFull | None
    undecided: int


class SourceMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """The running totals of a source."""

    source: str
    total: int = 0
    passed: int = 0
    throttled: int = 0
    dropped: int = 0
    failures: int = 0
    total_lag_ms: int = 0
    last_lag_ms: int = 0
    max_lag_ms: int = 0
    last_event_at: datetime | None = None
    updated_at: datetime | None = None


async def paused(connection: Connection, sources: Sequence[str]) -> dict[str, Hold]:
    """Those of the sources that are paused by an operator; stable once this transaction shares their locks."""
    rows = await connection.fetch(_sql["paused"], list(sources))
    return {row["source"]: source_hold(row) for row in rows}


def source_hold(row: Row) -> Hold:
    """The pause of a source, from its row."""
    reason = row["pause_reason"] or "no reason given"
    return Hold("paused", row["paused_until"], f"source {row['source']} is paused by {row['paused_by']}: {reason}")


async def lock(connection: Connection, sources: Sequence[str]) -> LockedSources:
    """The state of those sources that have any, locked until the commit; after `locks.share`. Sources without a row are
    unlimited: while there is a default limit, each has one."""
    rows = await connection.fetch(_sql["lock"], list(sources))
    default = _default_limit(rows[0])
    if default is not None and {*sources} - {row["source"] for row in rows} - {DEFAULT}:
        await connection.fetch(_sql["ensure"], sorted(set(sources)))
        rows = await connection.fetch(_sql["lock"], list(sources))
    now, registry_version, names = rows[0]["now"], rows[0]["registry_version"], [row["source"] for row in rows]
    has_waits = rows[0]["has_waits"]
    if names == [None]:
        return LockedSources(now, registry_version, {}, has_waits)
    waiting = {row["source"]: row for row in await connection.fetch(_sql["backlogs"], names)}
    locked = {row["source"]: _locked(row, default, waiting[row["source"]]["ingress_sequence"]) for row in rows}
    return LockedSources(waiting[names[0]]["now"], registry_version, locked, has_waits)


async def peek(connection: Connection, source: str) -> SourceState:
    """The state of a source without a lock; nothing may be decided by it."""
    row = await connection.fetchrow(_sql["peek"], source)
    assert row is not None, "it has one row also for an unknown source"
    default = _default_limit(row)
    gate = _locked({**row, "rate_limit": None}, None, None).gate
    return SourceState(row["now"], gate, _limit(row) or default, default, row["waiting"])


async def create(connection: Connection, sources: Sequence[str]) -> dict[str, LockedSource]:
    """Rows, locked until the commit, for sources that had none when this transaction locked its sources.

    A row that another transaction created meanwhile would be locked out of order: this transaction is retried and finds
    it.
    """
    made = {row["source"] for row in await connection.fetch(_sql["ensure"], sorted(set(sources)))}
    if made != set(sources):
        raise TransientConflict(f"another worker has just created {', '.join(sorted(set(sources) - made))}")
    return (await lock(connection, sources)).sources


async def save(connection: Connection, gates: Sequence[Gate]) -> None:
    """Write back what a batch changed in the sources it holds."""
    changed = [gate for gate in gates if gate.is_changed]
    if not changed:
        return
    await connection.execute(
        _sql["save"],
        [g.source for g in changed],
        ["{" + ",".join(map(str, g.ring)) + "}" for g in changed],
        [g.ring_at for g in changed],
        [g.ring_width_us for g in changed],
        [g.drain_at for g in changed],
        [g.throttled_until for g in changed],
        [g.breaker_state for g in changed],
        [g.breaker_until for g in changed],
        [g.breaker_reason for g in changed],
        [msgspec.json.encode(g.outcomes.buckets).decode() for g in changed],
        [g.spent_at for g in changed],
        [g.breaker_at for g in changed],
        [g.failed_trials for g in changed],
    )


async def gather_outcomes(connection: Connection, gate: Gate, now: datetime, policy: BreakerPolicy) -> None:
    """Add to a locked source's window what succeeded within it before its first failure, which is next."""
    if not gate.has_no_failures(now, policy):
        return
    since = now - timedelta(milliseconds=policy.window_ms)
    arguments = gate.source, since, width_ms(policy.window_ms), MAX_SEARCHED
    for row in await connection.fetch(_sql["recent_successes"], *arguments):
        gate.outcomes.add(row["at"], policy.window_ms, succeeded=row["succeeded"])


async def counting_runs(
    connection: Connection, run_ids: Sequence[RunId], default: SourceBreakerPolicy
) -> dict[RunId, str]:
    """The sources of those runs that count for their source's breaker when they fail."""
    rows = await connection.fetch(_sql["counting_runs"], list(run_ids))
    return {
        row["id"]: row["source"]
        for row in rows
        if (msgspec.convert(row["breaker"], SourceBreakerPolicy) if row["breaker"] else default).runs
    }


async def seed_breaker(connection: Connection, source: str, policy: SourceBreakerPolicy) -> bool:
    """A policy from the settings; False when it is there already or an operator's is in force."""
    return await connection.fetchval(_sql["seed_breaker"], source, msgspec.json.encode(policy).decode()) is not None


async def set_breaker(connection: Connection, source: str, policy: SourceBreakerPolicy | None, actor: str) -> None:
    """An operator's policy, or none; it wins over the settings from now on."""
    text = msgspec.json.encode(policy).decode() if policy else None
    await connection.execute(_sql["set_breaker"], source, text, actor)


async def set_weight(connection: Connection, source: str, weight: int, actor: str) -> None:
    """The weight of a source among those that wait at the inbox."""
    await connection.execute(_sql["set_weight"], source, weight, actor)


async def begin_plan(connection: Connection, source: str, refused_at: datetime | None) -> None:
    """Every waiting event of the source is to get a new slot, in order of arrival."""
    await connection.execute(_sql["set_plan"], source, 1, True, None, refused_at)


async def end_plan(connection: Connection, source: str, drain_at: datetime | None) -> None:
    """Every waiting event has its slot."""
    await connection.execute(_sql["set_plan"], source, 0, False, drain_at, None)


async def list_replanning(connection: Connection) -> list[str]:
    """Sources whose waiting events are to get new slots."""
    return [row[0] for row in await connection.fetch(_sql["list_replanning"])]


async def replan(connection: Connection, source: str) -> None:
    """Every waiting event gets a new slot; `*` means the events of every source."""
    await connection.execute(_sql["replan"], source)


async def end_throttle(connection: Connection, source: str) -> None:
    """The pause after an exceeded limit is over; `*` means for every source that has no limit of its own."""
    await connection.execute(_sql["end_throttle"], source)


async def list_page(connection: Connection, *, after: str | None = None, limit: int) -> list[SourceRecord]:
    """Sources that have a limit, a pause, a breaker or waiting events, by name."""
    rows = await connection.fetch(_sql["list"], None, after, limit)
    return [msgspec.convert(dict(row), SourceRecord) for row in rows]


async def get(connection: Connection, source: str) -> SourceRecord | None:
    """One source."""
    row = await connection.fetchrow(_sql["list"], source, None, 1)
    return msgspec.convert(dict(row), SourceRecord) if row else None


async def unseeded(connection: Connection, limits: Mapping[str, RateLimit]) -> list[str]:
    """The sources that `seed_limit` would change."""
    given = list(limits.values())
    columns = [one.limit for one in given], [one.interval_ms for one in given], [one.pause_ms for one in given]
    return [row[0] for row in await connection.fetch(_sql["unseeded"], list(limits), *columns)]


async def seed_limit(connection: Connection, source: str, limit: RateLimit) -> bool:
    """A limit from the settings; False when it is there already or an operator's is in force."""
    found = await connection.fetchval(_sql["seed_limit"], source, limit.limit, limit.interval_ms, limit.pause_ms)
    return found is not None


async def set_limit(connection: Connection, source: str, limit: RateLimit | None, actor: str) -> None:
    """An operator's limit, or none; it wins over the settings from now on."""
    values = (limit.limit, limit.interval_ms, limit.pause_ms) if limit else (None, None, None)
    await connection.execute(_sql["set_limit"], source, *values, actor)


async def pause(
    connection: Connection,
    source: str,
    *,
    until: datetime | None,
    duration_ms: int | None,
    reason: str | None,
    actor: str,
) -> datetime | None:
    """Pause a source until a time, for a duration, or until it is resumed; the time, if there is one."""
    found: datetime | None = await connection.fetchval(_sql["pause"], source, until, duration_ms, reason, actor)
    return found


async def resume(connection: Connection, source: str, actor: str) -> bool:
    """Lift the pause and close the breaker; False when the source is not known."""
    return await connection.fetchval(_sql["resume"], source, actor) is not None


def _limit(row: Row) -> RateLimit | None:
    if row["rate_limit"] is None:
        return None
    return RateLimit(limit=row["rate_limit"], interval_ms=row["interval_ms"], pause_ms=row["pause_ms"])


def _default_limit(row: Row) -> RateLimit | None:
    limit = row["default_rate_limit"]
    if limit is None:
        return None
    return RateLimit(limit=limit, interval_ms=row["default_interval_ms"], pause_ms=row["default_pause_ms"])


# What the statement returns with each source and is not of its own state.
_NOT_ITS_STATE = (
    "now", "registry_version", "has_waits", "default_rate_limit", "default_interval_ms", "default_pause_ms",
    "rate_limit", "interval_ms", "pause_ms", "waiting",
)  # fmt: skip


def _locked(row: Row, default: RateLimit | None, last_waiting: int | None) -> LockedSource:
    fields: dict[str, Any] = dict(row)
    for name in _NOT_ITS_STATE:
        fields.pop(name, None)
    plan_version, is_replanning = fields.pop("plan_version"), fields.pop("is_replanning")
    refused_at = fields.pop("refused_at")
    breaker = fields.pop("breaker")
    gate = Gate(limit=_limit(row) or default, **fields)
    policy = msgspec.convert(breaker, SourceBreakerPolicy) if breaker else None
    return LockedSource(gate, plan_version, is_replanning, last_waiting, refused_at, policy)
