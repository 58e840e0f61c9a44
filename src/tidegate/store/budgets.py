"""Budgets: what they are, what was spent of their keys, who holds their slots and who waits for them.

All of it changes under the lock on the budget's row (`lock`), which comes after those of the triggers (`locks`).
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.allowance import Allowance
from tidegate.model.budget import SPEC_FIELDS, BudgetSpec, ClosedKey, Reserved
from tidegate.model.ids import DeliveryId, RunId, StepId, TriggerId
from tidegate.store import budget_steps
from tidegate.store.db import Connection, Row, take_time
from tidegate.store.slot_lines import Nudged
from tidegate.store.sql import load

_sql = load("budgets")
_CLOSED = ("closed_until", "closed_reason", "probe_run_id", "probe_until")

# A budget and one of its keys.
Line = tuple[str, str]


class LockedBudget(NamedTuple):
    """A budget whose row this transaction holds."""

    spec: BudgetSpec
    paused_at: datetime | None = None
    paused_until: datetime | None = None
    pause_reason: str | None = None
    paused_by: str | None = None

    def is_paused(self, now: datetime) -> bool:
        """Whether nothing of it may be spent now."""
        return self.paused_at is not None and (self.paused_until is None or self.paused_until > now)

    @property
    def pause(self) -> str:
        """Who paused it, and why."""
        by = f" by {self.paused_by}" if self.paused_by else ""
        return f"paused{by}: {self.pause_reason or 'no reason given'}"


class KeyRow(NamedTuple):
    """A key of a budget: what was spent, the slots in use, the arrival of the first that waits for it, and since when
    runs that resume wait for a slot."""

    allowance: Allowance
    in_use: int
    first_waiting: int | None
    reserved: Reserved | None = None
    closed: ClosedKey | None = None
    resuming: Sequence[datetime] = ()


class Head(NamedTuple):
    """A delivery at the front of a line, or a step (of `run_id`, without a trigger); `place` is its arrival."""

    id: DeliveryId
    trigger_id: TriggerId
    source: str | None
    budget: str
    key: str
    cost: int
    came_at: datetime
    place: int = 0
    run_id: RunId | None = None


class Holder(NamedTuple):
    """A run that holds a slot of a budget's key; or one of its steps (its id, its name, and the claim by which it is
    called, None before that)."""

    run_id: RunId
    budget: str
    key: str
    step_id: StepId | None = None
    step: str | None = None
    claim_generation: int | None = None


class BudgetRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A budget as operators see it: what is `waiting`, deliveries and steps (`waiting_steps`), those of it that cannot
    be evaluated (`unread`), slots `in_use`, runs that wait for one to go on (`resuming`), keys that were used within
    the interval, and the triggers that use it."""

    name: str
    limit: int | None
    interval_ms: int | None
    concurrency: int | None
    key: str | None
    cost: str | None
    paused_at: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None
    version: int
    created_by: str
    updated_by: str
    created_at: datetime
    updated_at: datetime
    waiting: int
    waiting_steps: int
    unread: int
    oldest_at: datetime | None
    next_attempt_at: datetime | None
    in_use: int
    keys: int
    used_by: list[str]
    resuming: int = 0

    @property
    def spec(self) -> BudgetSpec:
        return BudgetSpec(**{name: getattr(self, name) for name in SPEC_FIELDS})


async def list_specs(connection: Connection) -> list[BudgetSpec]:
    """Every budget."""
    return [_spec(row) for row in await connection.fetch(_sql["list_specs"])]


async def lock(connection: Connection, names: Iterable[str]) -> dict[str, LockedBudget]:
    """Budgets, locked until the commit. The caller holds the locks of the triggers it needs, and of no run."""
    wanted = sorted(set(names))
    rows = await connection.fetch(_sql["lock"], wanted) if wanted else []
    return {row["name"]: locked_of(row) for row in rows}


async def keys(
    connection: Connection, locked: Mapping[str, LockedBudget], wanted: Iterable[Line], ids: Sequence[uuid.UUID]
) -> dict[Line, KeyRow]:
    """The state of keys of locked budgets. `ids` are deliveries and steps that are being decided, and do not count as
    waiting."""
    pairs = sorted(set(wanted))
    if not pairs:
        return {}
    rows = await connection.fetch(_sql["keys"], [b for b, _ in pairs], [k for _, k in pairs], ids)
    return {
        (row["budget"], row["key"]): KeyRow(
            allowance_of(locked[row["budget"]].spec, row),
            row["in_use"],
            row["first_waiting"],
            reserved_of(row),
            closed_of(row),
            row["resuming"],
        )
        for row in rows
    }


class ChangedKey(NamedTuple):
    """A key to be written back."""

    line: Line
    allowance: Allowance
    reserved: Reserved | None
    closed: ClosedKey | None


async def save(connection: Connection, changed: Sequence[ChangedKey]) -> None:
    """Write back what a transaction spent and reserved, and how far it planned."""
    if changed:
        lines, allowances, reserved, closed = zip(*changed, strict=True)
        await connection.execute(
            _sql["save"],
            [line[0] for line in lines],
            [line[1] for line in lines],
            ["{" + ",".join(map(str, one.ring)) + "}" for one in allowances],
            [one.ring_at for one in allowances],
            [one.ring_width_us for one in allowances],
            [one.spent_at for one in allowances],
            [one.drain_at for one in allowances],
            [one and one.delivery_id for one in reserved],
            [one and one.cost for one in reserved],
            [one and one.until for one in reserved],
            [one and one.until for one in closed],
            [one and one.reason for one in closed],
            [one and one.probe_run_id for one in closed],
            [one and one.probe_until for one in closed],
        )


async def close(connection: Connection, line: Line, delay_ms: int, reason: str) -> None:
    """Nothing of a key is spent for a while. The caller holds the budget."""
    await connection.execute(_sql["close"], *line, delay_ms, reason)


async def end_probes(
    connection: Connection, run_ids: Collection[RunId], names: Collection[str] | None = None
) -> list[Line]:
    """Keys (of these budgets) for which one of the runs was tried first are open again; which."""
    of = None if names is None else list(names)
    return [(row[0], row[1]) for row in await connection.fetch(_sql["end_probes"], list(run_ids), of)]


async def hold(connection: Connection, holders: Sequence[Holder]) -> None:
    """Note the runs and steps that hold a slot."""
    if holders:
        of = [one if one.step_id is not None else one._replace(step_id=StepId(one.run_id)) for one in holders]
        await connection.execute(_sql["hold"], *(list(column) for column in zip(*of, strict=True)))


async def release(connection: Connection, run_ids: Collection[RunId], *, without_steps: bool = False) -> list[Line]:
    """Give back the slots of runs that have ended, and of their steps; of which budgets and keys."""
    if not run_ids:
        return []
    return [(row[0], row[1]) for row in await connection.fetch(_sql["release"], list(run_ids), without_steps)]


async def release_steps(connection: Connection, steps: Collection[tuple[RunId, StepId]]) -> list[Line]:
    """Give back the slots of steps that have ended; of which budgets and keys."""
    if not steps:
        return []
    rows = await connection.fetch(_sql["release_steps"], *(list(column) for column in zip(*steps, strict=True)))
    return [(row[0], row[1]) for row in rows]


async def heads(connection: Connection, lines: Iterable[Line], of_each: int) -> list[Head]:
    """The first in each line, in the order of arrival; not locked."""
    pairs = sorted(set(lines))
    if not pairs:
        return []
    return [Head(*row) for row in await connection.fetch(_sql["heads"], *zip(*pairs, strict=True), of_each)]


async def nudge(connection: Connection, due: dict[Line, datetime]) -> Nudged:
    """The first in each line is due no later than at that time; how many were due later."""
    if not due:
        return Nudged()
    pairs = sorted(due)
    found = await connection.fetchrow(
        _sql["nudge"], [b for b, _ in pairs], [k for _, k in pairs], [due[pair] for pair in pairs]
    )
    if found is None:
        return Nudged()
    await budget_steps.show(connection, found["steps"])
    return Nudged(found["deliveries"] + len(found["steps"]), found["runs"])


async def lines_of(connection: Connection, name: str) -> list[Line]:
    """The keys of a budget for which deliveries or steps wait."""
    return [(name, row[0]) for row in await connection.fetch(_sql["lines_of"], name)]


async def decide_again(connection: Connection, name: str, *, unread: bool = False) -> None:
    """Everything that waits for the budget is decided again, or what is in no line of it. That may take a while."""
    connection = await take_time(connection)
    await connection.execute(_sql["decide_unread_again" if unread else "decide_again"], name)
    await budget_steps.decide_again(connection, name, unread=unread)


async def decide_these_again(connection: Connection, ids: Sequence[DeliveryId], plan_version: int) -> None:
    """Those of the deliveries that wait for a budget are decided again."""
    if ids:
        await connection.execute(_sql["decide_these_again"], ids, plan_version)


async def upsert(connection: Connection, spec: BudgetSpec, actor: str) -> bool:
    """Make a budget as code says; whether that changed it. What an operator changed stays while the code says the
    same."""
    said = {name: value for name in SPEC_FIELDS if (value := getattr(spec, name)) is not None}
    text = msgspec.json.encode(said).decode()
    return bool(await connection.fetchval(_sql["upsert"], *_columns(spec), actor, text))


async def put(connection: Connection, spec: BudgetSpec, actor: str) -> None:
    """Create a budget, or make it as given."""
    await connection.execute(_sql["put"], *_columns(spec), actor)


async def delete(connection: Connection, name: str) -> None:
    """Delete a budget with what was spent of it."""
    await connection.execute(_sql["delete"], name)


async def pause(
    connection: Connection,
    name: str,
    *,
    until: datetime | None,
    duration_ms: int | None,
    reason: str | None,
    actor: str,
) -> None:
    """Pause a budget until a time, for a duration, or until it is resumed."""
    await connection.execute(_sql["pause"], name, until, duration_ms, reason, actor)


async def resume(connection: Connection, name: str, actor: str) -> None:
    """End the pause of a budget, and open its keys."""
    await connection.execute(_sql["resume"], name, actor)
    await connection.execute(_sql["open"], name)


async def get(connection: Connection, name: str) -> BudgetRecord | None:
    """One budget."""
    row = await connection.fetchrow(_sql["get"], name)
    return BudgetRecord(**dict(row)) if row else None


async def list_page(connection: Connection, *, after: str | None = None, limit: int) -> list[BudgetRecord]:
    """Budgets, by name."""
    return [BudgetRecord(**dict(row)) for row in await connection.fetch(_sql["list_page"], after, limit)]


async def unknown(connection: Connection, names: Sequence[str]) -> list[str]:
    """Those of the names that are no budgets."""
    return [row[0] for row in await connection.fetch(_sql["unknown"], list(names))] if names else []


async def triggers_of(connection: Connection, name: str) -> list[TriggerId]:
    """The triggers that use a budget."""
    return [row[0] for row in await connection.fetch(_sql["triggers_of"], name)]


async def forget_idle(connection: Connection, after: str, limit: int) -> tuple[str, int] | None:
    """Remove keys of the next budget after a name that has some of which nothing is left: its name and how many; None
    when there is none."""
    name: str | None = await connection.fetchval(_sql["idle"], after)
    if name is None:
        return None
    status = await connection.execute(_sql["forget"], name, limit)
    return name, int(status.split()[-1])


class EndedHolder(NamedTuple):
    """A note about a slot that does not count any more."""

    run_id: RunId
    budget: str
    step_id: StepId


async def ended_holders(connection: Connection, limit: int) -> list[EndedHolder]:
    """Notes about runs that have ended, and about steps whose workers died."""
    return [EndedHolder(*row) for row in await connection.fetch(_sql["ended_holders"], limit)]


async def sweep(connection: Connection, ended: Sequence[EndedHolder]) -> list[Line]:
    """Remove notes that still do not count; of which budgets and keys. The caller holds the budgets."""
    rows = await connection.fetch(_sql["sweep"], *zip(*ended, strict=True)) if ended else []
    return [(row[0], row[1]) for row in rows]


def _columns(spec: BudgetSpec) -> tuple[object, ...]:
    return spec.name, spec.limit, spec.interval_ms, spec.concurrency, spec.key, spec.cost


def _spec(row: Row) -> BudgetSpec:
    return BudgetSpec(**{name: row[name] for name in SPEC_FIELDS})


def locked_of(row: Row) -> LockedBudget:
    return LockedBudget(_spec(row), row["paused_at"], row["paused_until"], row["pause_reason"], row["paused_by"])


def reserved_of(row: Row) -> Reserved | None:
    return Reserved(row["reserved_for"], row["reserved_cost"], row["reserved_until"]) if row["reserved_for"] else None


def closed_of(row: Row) -> ClosedKey | None:
    return ClosedKey(*(row[name] for name in _CLOSED)) if row["closed_until"] else None


def allowance_of(spec: BudgetSpec, row: Row) -> Allowance:
    return Allowance(
        limit=spec.rate,
        ring=row["ring"],
        ring_at=row["ring_at"] or 0,
        ring_width_us=row["ring_width_us"] or 0,
        spent_at=row["spent_at"],
        drain_at=row["drain_at"],
    )
