"""Budget edit: for how many of those that wait can the key and cost of a budget not be evaluated? Reads only."""

from __future__ import annotations

import msgspec

from tidegate.errors import InvalidInput
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.model.budget import BudgetSpec, CannotSpend, CompiledBudget, budget_errors
from tidegate.model.ids import EventId
from tidegate.model.work_limit import WorkLeft
from tidegate.store import events, predictions
from tidegate.store.db import Database

# Of those that wait, the first.
MOST_WAITING = 2000
EXAMPLES = 5


class UnreadEvent(msgspec.Struct, frozen=True):
    """An event of which it cannot be evaluated what it needs of a budget, and why."""

    event_id: EventId
    error: str


class BudgetCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What a budget would be for those that wait at triggers that use it (`waiting`; `is_cut`: the first of them):
    `unread` is for how many its key or cost cannot be evaluated, or is more than it ever allows. Those would wait until
    it is corrected."""

    name: str
    waiting: int
    is_cut: bool
    unread: int
    examples: list[UnreadEvent]


async def check(database: Database, spec: BudgetSpec, *, most: int = MOST_WAITING) -> BudgetCheck:
    """Evaluate a budget for what waits now. InvalidInput names each field that is wrong for any event."""
    errors = budget_errors(spec)
    if errors:
        raise InvalidInput("the budget is not valid", errors)
    compiled = CompiledBudget(spec)
    async with database.connection() as connection:
        ids = await predictions.waiting_for(connection, spec.name, most + 1)
        found = await events.get_many(connection, ids[:most])
    unread: list[UnreadEvent] = []
    time_slice = TimeSlice()
    for event in found.values():
        if event.starts is None:  # a start that does not give them costs 1 of no key
            try:
                compiled.need(event.envelope(), WorkLeft())
            except CannotSpend as exc:
                unread.append(UnreadEvent(event.id, str(exc)))
        if time_slice.is_over:
            await time_slice.next()
    return BudgetCheck(
        name=spec.name, waiting=len(ids[:most]), is_cut=len(ids) > most, unread=len(unread), examples=unread[:EXAMPLES]
    )
