"""Runs that hold their slots while they execute: taking them when a run resumes, and the lines of those that wait."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from tidegate.model.ids import RunId, TriggerId
from tidegate.model.slot_line import SlotLine
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("slot_lines")

TriggerKey = tuple[TriggerId, str]
BudgetKey = tuple[str, str]


class ResumingRun(NamedTuple):
    """A claimed run that was without slots: of which key it needs one, if it still does, since when it is due, and
    when it times out."""

    id: RunId
    claim_generation: int
    trigger_id: TriggerId
    needs_slot: bool
    key: str
    since: datetime
    deadline_at: datetime | None


class Lines(NamedTuple):
    """The slots of keys of triggers and budgets, and until when the triggers or keys are closed."""

    triggers: dict[TriggerKey, SlotLine]
    budgets: dict[BudgetKey, SlotLine]
    closed: dict[TriggerKey, datetime]


class Nudged(NamedTuple):
    """How many deliveries and steps, and how many runs that resume, are due because of what has become free."""

    deliveries: int = 0
    runs: int = 0


class SlotBacklog(NamedTuple):
    """Runs of a workflow that wait for a slot to go on: how many, since when, and the one that waits longest."""

    workflow: str
    waiting: int
    since: datetime
    example: RunId


class QueuedRun(NamedTuple):
    """A claimed run that waits in the line of a trigger or of a budget, and when it is looked at again."""

    id: RunId
    claim_generation: int
    trigger_id: TriggerId | None
    budget: str | None
    key: str
    since: datetime
    look_at: datetime

    @property
    def warning(self) -> str:
        of = "its trigger" if self.budget is None else f"budget {self.budget}"
        return f"waits for a slot of {of}{f' for key {self.key}' if self.key else ''} to go on"


async def asking(connection: Connection, run_ids: Collection[RunId]) -> list[ResumingRun]:
    """Those of the runs that are claimed, the longest due first."""
    rows = await connection.fetch(_sql["asking"], list(run_ids))
    return sorted((ResumingRun(*row) for row in rows), key=lambda one: (one.since, one.id))


async def lines(
    connection: Connection,
    of_triggers: Iterable[TriggerKey],
    of_budgets: Iterable[BudgetKey],
    asking: Collection[RunId],
) -> Lines:
    """The slots of these keys; `asking` are the runs that ask, and do not count as waiting. The caller holds the locks
    of the triggers and budgets."""
    ids, found = list(asking), Lines({}, {}, {})
    if pairs := sorted(set(of_triggers)):
        for row in await connection.fetch(_sql["trigger_lines"], [t for t, _ in pairs], [k for _, k in pairs], ids):
            line = row["trigger_id"], row["key"]
            found.triggers[line] = SlotLine(row["most"], row["in_use"], row["waiting"], row["called"])
            if row["closed_until"] is not None:
                found.closed[line] = row["closed_until"]
    if keys := sorted(set(of_budgets)):
        for row in await connection.fetch(_sql["budget_lines"], [b for b, _ in keys], [k for _, k in keys], ids):
            one = SlotLine(row["most"], row["in_use"], row["waiting"], row["called"])
            found.budgets[row["budget"], row["key"]] = one
    return found


async def take(connection: Connection, granted: Sequence[tuple[ResumingRun, bool]]) -> set[RunId]:
    """Runs take their slots, and give them back when they are suspended, or not; those that are still held."""
    if not granted:
        return set()
    columns = zip(*((one.id, one.claim_generation, gives_back) for one, gives_back in granted), strict=True)
    return {row[0] for row in await connection.fetch(_sql["take"], *map(list, columns))}


async def wait(connection: Connection, waiting: Sequence[QueuedRun]) -> None:
    """Runs are handed back, and wait in their lines."""
    if waiting:
        columns = map(list, zip(*waiting, strict=True))
        await connection.fetch(_sql["wait"], *columns, [one.warning for one in waiting])


async def leave(connection: Connection, run_ids: Collection[RunId]) -> list[BudgetKey]:
    """Runs that have ended wait for no slot; the lines of budgets that they leave."""
    return [(row[0], row[1]) for row in await connection.fetch(_sql["leave"], list(run_ids)) if row[0] is not None]


async def call(connection: Connection, freed: Iterable[TriggerKey]) -> int:
    """The runs that wait longest for a slot of these triggers and keys are due now, as many as are free; how many."""
    pairs = sorted(set(freed))
    found: int = await connection.fetchval(_sql["call"], [t for t, _ in pairs], [k for _, k in pairs])
    return found


async def look_again(connection: Connection, trigger_id: TriggerId) -> None:
    """The rules of a trigger have changed: its runs that wait for a slot are due, and decided by them."""
    await connection.execute(_sql["look_again"], trigger_id)
    await connection.execute(_sql["note_lent"], trigger_id)


async def look_again_at(connection: Connection, budget: str) -> None:
    """A budget has changed: the runs that wait for it are due, and decided by its new rules."""
    await connection.execute(_sql["look_again_at"], budget)


async def backlog(connection: Connection, before: datetime, limit: int) -> list[SlotBacklog]:
    """Workflows of which runs wait for a slot since that time."""
    return [SlotBacklog(*row) for row in await connection.fetch(_sql["backlog"], before, limit)]


async def count(connection: Connection) -> dict[str, int]:
    """How many runs wait for a slot of their trigger (`concurrency`), and of a budget."""
    row = await connection.fetchrow(_sql["count"])
    return dict(row) if row else {}
