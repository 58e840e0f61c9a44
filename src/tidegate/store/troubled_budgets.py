"""Budgets that let nothing pass, or too little: closed for everyone, paused, not evaluated, with an old backlog."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

import msgspec

from tidegate.model.ids import RunId
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("troubled_budgets")


class ClosedBudgetKey(msgspec.Struct, frozen=True, kw_only=True):
    """A key of a budget that a run has closed for everyone. `closed`: nothing of it is spent until the time.
    `half_open`: the run is tried first, and the others wait for its end, at most until the time; without a run, the
    next that is launched."""

    key: str
    state: Literal["closed", "half_open"]
    until: datetime
    reason: str | None
    run_id: RunId | None


class ClosedBudgetKeys(msgspec.Struct, frozen=True):
    """The keys of a budget that are not open: those that are closed longest, and how many there are."""

    keys: list[ClosedBudgetKey] = []
    total: int = 0


class LongClosed(msgspec.Struct, frozen=True, kw_only=True):
    """A budget of which keys are closed for long: the one that is closed longest, and how many."""

    name: str
    key: str
    until: datetime
    reason: str | None
    total: int


class TroubledBudget(msgspec.Struct, frozen=True, kw_only=True):
    """A budget that is paused, cannot be evaluated for what waits, or has an old backlog."""

    name: str
    paused_at: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None
    waiting: int
    waiting_steps: int
    unread: int
    oldest_at: datetime | None

    def is_paused(self, now: datetime) -> bool:
        return self.paused_at is not None and (self.paused_until is None or self.paused_until > now)


async def closed_keys(connection: Connection, names: Iterable[str], limit: int) -> dict[str, ClosedBudgetKeys]:
    """Of the budgets that have any, the keys that are closed or half open, up to a number for each."""
    found: dict[str, ClosedBudgetKeys] = {}
    for row in await connection.fetch(_sql["closed_keys"], sorted(names), limit):
        of_budget = found.setdefault(row["budget"], ClosedBudgetKeys([], row["total"]))
        of_budget.keys.append(ClosedBudgetKey(**{name: row[name] for name in ClosedBudgetKey.__struct_fields__}))
    return found


async def closed_long(connection: Connection, until: datetime, limit: int) -> list[LongClosed]:
    """Budgets with keys that are closed until after a time."""
    return [LongClosed(**dict(row)) for row in await connection.fetch(_sql["closed_long"], until, limit)]


async def troubled(connection: Connection, before: datetime, limit: int) -> list[TroubledBudget]:
    """Budgets that are paused, that cannot be evaluated for what waits, or for which one waits since that
    time."""
    return [TroubledBudget(**dict(row)) for row in await connection.fetch(_sql["troubled"], before, limit)]
