"""Budgets: forget keys of which nothing is left, so that a budget with a key for every customer stays as small as the
customers of the last interval; and notes about runs that have ended elsewhere, and steps whose workers died."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from tidegate.flow.run import budget_slots
from tidegate.store import budgets
from tidegate.store.db import Database

# The most that one transaction removes, and how many transactions one pass has.
BATCH = 1000
MOST_BATCHES = 20


class ForgottenBudgets(NamedTuple):
    """How many keys, and notes about runs that had ended, were removed."""

    keys: int = 0
    holders: int = 0


class BudgetKeeper:
    """Removes what budgets no longer need. Any number of workers may do so at once."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def run_once(self) -> ForgottenBudgets:
        """One pass over all budgets."""
        keys, name = 0, ""
        for _ in range(MOST_BATCHES):
            done = await self._database.run(partial(budgets.forget_idle, after=name, limit=BATCH))
            if done is None:
                break
            keys += done[1]
            name = name if done[1] == BATCH else done[0]
        return ForgottenBudgets(keys, await self.sweep())

    async def sweep(self) -> int:
        """Remove notes about what nobody holds or waits for any more; of how many lines."""
        return len(await self._database.run(partial(budget_slots.sweep, limit=BATCH)))
