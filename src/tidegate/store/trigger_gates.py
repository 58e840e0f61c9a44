"""`event_scheduler_triggers` and its metrics: the shared state that every worker launches by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

import msgspec

from tidegate.model.ids import RunId, TriggerId
from tidegate.model.outcome_window import width_ms
from tidegate.model.retry import RetryPolicy
from tidegate.model.source import BreakerPolicy, BreakerState, Hold, RateLimit
from tidegate.model.trigger_gate import TriggerGate
from tidegate.store.db import Connection, Row, TransientConflict
from tidegate.store.deliveries import Taken
from tidegate.store.sources import source_hold
from tidegate.store.sql import load

_sql = load("trigger_gates")

# The most deliveries of a key that are launched in the transaction that ends runs; it should be short.
MAX_IN_LINE = 100
# With the first failure in a window, how many of the last deliveries are searched for runs that succeeded within it.
MAX_SEARCHED = 1000

# Triggers whose row exists, as far as this process has seen; rows are not removed.
_known: set[TriggerId] = set()
MAX_KNOWN = 100_000


class LockedTrigger(NamedTuple):
    """A trigger whose row this transaction holds. `has_backlog`: a policy says what may wait. `gives_back`: its runs
    hold their slots while they execute; `lends_slots`: some may hold none now."""

    gate: TriggerGate
    plan_version: int
    is_replanning: bool
    refused_at: datetime | None
    max_concurrency: int | None
    retry: RetryPolicy | None
    breaker: BreakerPolicy | None
    budgets: Sequence[str] = ()
    has_backlog: bool = False
    gives_back: bool = False
    lends_slots: bool = False


class Slots(NamedTuple):
    """The concurrency slots of one trigger and key; of a trigger that skips what overlaps also its oldest run. `ahead`
    are the resuming runs that wait for one since the first delivery in line came, or before."""

    in_use: int
    waiting: int
    closed_until: datetime | None = None
    closed_reason: str | None = None
    oldest: RunId | None = None
    ahead: int = 0

    def in_the_way(self, most: int, holds: str) -> str:
        """What prevents another run: runs that were unfinished, or executing."""
        if most == 1:
            return f"run {self.oldest} was {holds}" if self.oldest else f"an earlier run was {holds}"
        which = f", the oldest run {self.oldest}" if self.oldest else ""
        return f"{self.in_use} of {most} runs were {holds}{which}"


class NextInLine(NamedTuple):
    """Deliveries for which a slot has become free, locked, with all that decides about them."""

    now: datetime
    registry_version: int
    taken: list[Taken]
    slots: dict[tuple[TriggerId, str], Slots]
    paused_sources: dict[str, Hold]


class TriggerState(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger's pause, breaker and waiting deliveries as operators see them; `resuming` runs wait for a slot to go
    on."""

    trigger_id: TriggerId
    paused_at: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None
    breaker_state: BreakerState
    breaker_until: datetime | None
    breaker_reason: str | None
    probe_run_id: RunId | None
    waiting: int
    next_attempt_at: datetime | None
    resuming: int = 0


async def lock(
    connection: Connection, *, always: Iterable[TriggerId], others: Iterable[TriggerId] = ()
) -> dict[TriggerId, LockedTrigger]:
    """The state of triggers, locked until the commit: of all in `always`, of the others where it matters."""
    wanted, rest = sorted(set(always)), sorted(set(others))
    if not wanted and not rest:
        return {}
    # Rows are created before any is locked: created in between, they would be locked out of order.
    if unknown := [trigger_id for trigger_id in wanted if trigger_id not in _known]:
        await connection.execute(_sql["ensure"], unknown)
    rows = await connection.fetch(_sql["lock"], wanted, rest)
    found = {row["trigger_id"]: _locked(row) for row in rows}
    if missing := set(wanted) - found.keys():  # created here before, by a transaction that was rolled back
        _known.difference_update(missing)
        raise TransientConflict("the state of a trigger must be created again")
    if len(_known) > MAX_KNOWN:
        _known.clear()
    _known.update(found)
    return found


async def lines(connection: Connection, trigger_ids: Iterable[TriggerId]) -> dict[TriggerId, int]:
    """The last in line of each of the triggers that has deliveries waiting for a throttle, a pause or a breaker."""
    return {row[0]: row[1] for row in await connection.fetch(_sql["lines"], list(trigger_ids))}


async def slots(connection: Connection, wanted: Iterable[tuple[TriggerId, str]]) -> dict[tuple[TriggerId, str], Slots]:
    """The concurrency slots of each trigger and key."""
    pairs = sorted(set(wanted))
    rows = await connection.fetch(_sql["slots"], [t for t, _ in pairs], [k for _, k in pairs])
    return {(row[0], row[1]): Slots(*row[2:]) for row in rows}


async def next_in_line(connection: Connection, freed: Iterable[tuple[TriggerId, str]]) -> NextInLine | None:
    """Lock the oldest deliveries that wait for a slot of these triggers and keys, as many as are free; None when nobody
    waits."""
    keys = sorted(set(freed))
    rows = await connection.fetch(_sql["next_in_line"], [t for t, _ in keys], [k for _, k in keys], MAX_IN_LINE)
    if not rows:
        return None
    return NextInLine(
        now=rows[0]["now"],
        registry_version=rows[0]["registry_version"],
        taken=[Taken(*(row[field] for field in Taken._fields)) for row in rows],
        slots={
            (row["trigger_id"], row["concurrency_key"]): Slots(row["in_use"], 0, ahead=row["ahead"]) for row in rows
        },
        paused_sources={row["source"]: source_hold(row) for row in rows if row["is_source_paused"]},
    )


async def wake(connection: Connection, freed: Iterable[tuple[TriggerId, str]]) -> int:
    """Make the oldest deliveries that wait for a slot of these triggers and keys due now, as many as are free; how
    many."""
    keys = sorted(set(freed))
    if not keys:
        return 0
    rows = await connection.fetch(_sql["wake"], [t for t, _ in keys], [k for _, k in keys])
    return len(rows)


async def save(connection: Connection, gates: Iterable[TriggerGate]) -> None:
    """Write back what a transaction changed in the triggers it holds."""
    changed = [gate for gate in gates if gate.is_changed]
    if not changed:
        return
    await connection.execute(
        _sql["save"],
        [g.trigger_id for g in changed],
        ["{" + ",".join(map(str, g.ring)) + "}" for g in changed],
        [g.ring_at for g in changed],
        [g.ring_width_us for g in changed],
        [g.drain_at for g in changed],
        [g.breaker_state for g in changed],
        [g.breaker_until for g in changed],
        [g.breaker_reason for g in changed],
        [msgspec.json.encode(g.outcomes.buckets).decode() for g in changed],
        [g.probe_run_id for g in changed],
        [g.spent_at for g in changed],
        [g.breaker_at for g in changed],
        [g.failed_trials for g in changed],
        [g.counting_until for g in changed],
    )


async def gather_outcomes(connection: Connection, gate: TriggerGate, now: datetime, policy: BreakerPolicy) -> None:
    """Add to a locked trigger's window what succeeded within it: what was counted since its first failure, or, when
    the next failure is the first, the runs of its last deliveries."""
    # Also when it does not count: what is left of the window before this one is among the last deliveries, too.
    rows = await connection.fetch(_sql["take_successes"], gate.trigger_id, width_ms(policy.window_ms))
    if gate.has_no_failures(now, policy):
        since = now - timedelta(milliseconds=policy.window_ms)
        arguments = gate.trigger_id, since, width_ms(policy.window_ms), MAX_SEARCHED
        rows = await connection.fetch(_sql["recent_successes"], *arguments)
    for row in rows:
        gate.outcomes.add(row["at"], policy.window_ms, succeeded=row["succeeded"])


async def forget_successes(connection: Connection) -> None:
    """Delete the counts of triggers that no longer count."""
    await connection.execute(_sql["forget_successes"])


async def fold_successes(connection: Connection) -> None:
    """Keep few rows of what was counted a while ago, however often runs end."""
    await connection.execute(_sql["fold_successes"])


async def begin_plan(connection: Connection, trigger_id: TriggerId, refused_at: datetime | None) -> None:
    """Every waiting delivery of the trigger is to get a new slot, in order of arrival."""
    await connection.execute(_sql["set_plan"], trigger_id, 1, True, None, refused_at)


async def end_plan(connection: Connection, trigger_id: TriggerId, drain_at: datetime | None) -> None:
    """Every waiting delivery has its slot."""
    await connection.execute(_sql["set_plan"], trigger_id, 0, False, drain_at, None)


async def replan(connection: Connection, trigger_id: TriggerId) -> None:
    """Every waiting delivery of the trigger gets a new slot."""
    await connection.execute(_sql["ensure"], [trigger_id])
    await connection.execute(_sql["replan"], trigger_id)


async def list_replanning(connection: Connection) -> list[TriggerId]:
    """Triggers whose waiting deliveries are to get new slots."""
    return [row[0] for row in await connection.fetch(_sql["list_replanning"])]


async def get(connection: Connection, trigger_id: TriggerId) -> TriggerState | None:
    """One trigger's pause, breaker and waiting deliveries; deleted ones too."""
    row = await connection.fetchrow(_sql["get"], trigger_id)
    return msgspec.convert(dict(row), TriggerState) if row else None


async def pause(
    connection: Connection,
    trigger_id: TriggerId,
    *,
    until: datetime | None,
    duration_ms: int | None,
    reason: str | None,
    actor: str,
) -> datetime | None:
    """Pause a trigger until a time, for a duration, or until it is resumed; the time, if there is one."""
    found: datetime | None = await connection.fetchval(_sql["pause"], trigger_id, until, duration_ms, reason, actor)
    return found


async def close(connection: Connection, trigger_id: TriggerId, *, key: str | None, delay_ms: int, reason: str) -> None:
    """Nothing of a trigger, or of one of its keys, is launched or begun for a while. The caller holds the trigger."""
    if key is None:
        await connection.execute(_sql["close"], trigger_id, delay_ms, reason)
    else:
        await connection.execute(_sql["close_key"], trigger_id, delay_ms, reason, key)
    await connection.execute(_sql["hold_runs"], trigger_id, delay_ms, reason, key)


async def resume(connection: Connection, trigger_id: TriggerId) -> None:
    """Lift the pause and close the breaker."""
    await connection.execute(_sql["resume"], trigger_id)


def _locked(row: Row) -> LockedTrigger:
    fields: dict[str, Any] = dict(row)
    count, window_ms = fields.pop("throttle_count"), fields.pop("throttle_window_ms")
    own = ("plan_version", "is_replanning", "refused_at", "max_concurrency", "budgets", "has_backlog", "gives_back",
           "lends_slots")  # fmt: skip
    rest = {name: fields.pop(name) for name in own}
    retry, breaker = fields.pop("retry"), fields.pop("breaker")
    limit = RateLimit(limit=count, interval_ms=window_ms) if count is not None else None
    return LockedTrigger(
        TriggerGate(limit=limit, **fields),
        retry=msgspec.convert(retry, RetryPolicy) if retry else None,
        breaker=msgspec.convert(breaker, BreakerPolicy) if breaker else None,
        **rest,
    )
