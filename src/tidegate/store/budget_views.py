"""Budgets as operators see them: who waits for their keys, where a delivery or step stands, and who holds the slots."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.allowance import Allowance
from tidegate.model.budget import ClosedKey, Reserved
from tidegate.store.budgets import LockedBudget, allowance_of, closed_of, locked_of, reserved_of
from tidegate.store.circumstances import SlotHolder
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("budget_views")


class KeyLine(msgspec.Struct, frozen=True, kw_only=True):
    """A key for which deliveries and steps wait: how many, how many of these are steps, what they will spend, and the
    slots in use; `resuming` runs wait for one, too."""

    key: str
    waiting: int
    waiting_steps: int
    cost: int
    oldest_at: datetime
    next_attempt_at: datetime
    in_use: int
    resuming: int = 0


class Place(NamedTuple):
    """Where a delivery or step stands in the line of the budget that holds it; without a key, in none."""

    budget: LockedBudget
    key: str | None
    cost: int
    allowance: Allowance
    in_use: int
    ahead: int
    ahead_cost: int
    now: datetime
    next_attempt_at: datetime
    closed: ClosedKey | None = None
    reserved: Reserved | None = None


class BudgetHolder(SlotHolder, frozen=True, kw_only=True):
    """A run that holds a slot of a budget's key, itself or by a `step`; `total` is how many slots are held."""

    key: str
    next_attempt_at: datetime | None
    step: str | None = None


async def key_lines(connection: Connection, name: str, key: str | None, limit: int) -> list[KeyLine]:
    """The keys of a budget for which most wait; or one key."""
    return [KeyLine(**dict(row)) for row in await connection.fetch(_sql["key_lines"], name, key, limit)]


async def places(connection: Connection, ids: Iterable[uuid.UUID]) -> dict[uuid.UUID, Place]:
    """Where deliveries and steps stand in the lines of the budgets that hold them; those that wait for none are left
    out."""
    wanted = list(ids)
    rows = await connection.fetch(_sql["places"], wanted) if wanted else []
    found = {}
    for row in rows:
        budget = locked_of(row)
        found[row["id"]] = Place(
            budget, row["budget_key"], row["budget_cost"] or 0, allowance_of(budget.spec, row), row["in_use"],
            row["ahead"], row["ahead_cost"], row["now"], row["next_attempt_at"], closed_of(row), reserved_of(row),
        )  # fmt: skip
    return found


async def holders(connection: Connection, name: str, key: str | None, limit: int) -> list[BudgetHolder]:
    """The runs that hold a key of a budget (None: any), the oldest first."""
    return [BudgetHolder(**dict(row)) for row in await connection.fetch(_sql["holders"], name, key, limit)]
