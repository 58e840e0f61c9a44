"""`budget_steps`: steps that wait in the lines of budgets, and those whose turn has come.

All of it changes under the lock on the budget's row, and on the run of the step.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.budget import StepSpend
from tidegate.model.ids import EventId, RunId, StepId
from tidegate.model.run import ClaimedRun
from tidegate.store.db import Connection
from tidegate.store.retry_rows import json_texts
from tidegate.store.sql import load

_sql = load("budget_steps")


class StepInLine(NamedTuple):
    """A step that waits for a budget: in the line of a key, or in none; or (`is_granted`) whose turn has come."""

    step_id: StepId
    run_id: RunId
    name: str
    budget: str
    key: str | None
    cost: int | None
    place: int
    moves: int
    spend: StepSpend
    is_granted: bool
    created_at: datetime
    event_id: EventId | None
    is_unfinished: bool


class NewPlace(NamedTuple):
    """Where a step waits from now on, and until when it is expected to; what an operator reads about it."""

    step_id: StepId
    run_id: RunId
    name: str
    budget: str
    key: str | None
    cost: int | None
    place: int
    moves: int
    at: datetime
    spend: StepSpend
    attempts: int
    metadata: Mapping[str, object]


async def arrival(connection: Connection) -> int:
    """A place in line after all events that have come."""
    found: int = await connection.fetchval(_sql["arrival"])
    return found


async def of_steps(connection: Connection, step_ids: Collection[uuid.UUID]) -> dict[StepId, StepInLine]:
    """Those of the steps that wait for a budget, or whose turn has come."""
    found = {}
    for row in await connection.fetch(_sql["of_steps"], list(step_ids)) if step_ids else []:
        fields = dict(row)
        fields["spend"] = msgspec.convert(fields.pop("asked"), StepSpend)
        found[row["step_id"]] = StepInLine(**fields)
    return found


async def own_slots(
    connection: Connection, run_ids: Collection[RunId], names: Collection[str]
) -> set[tuple[RunId, str]]:
    """Of which of the budgets the runs hold slots themselves."""
    rows = await connection.fetch(_sql["own_slots"], list(run_ids), list(names)) if names else []
    return {(row[0], row[1]) for row in rows}


async def wait(connection: Connection, places: Sequence[NewPlace]) -> None:
    """Steps wait for budgets."""
    if places:
        await connection.execute(
            _sql["wait"],
            [one.step_id for one in places],
            [one.run_id for one in places],
            [one.name for one in places],
            [one.budget for one in places],
            [one.key for one in places],
            [one.cost for one in places],
            [one.place for one in places],
            [one.moves for one in places],
            [one.at for one in places],
            [msgspec.json.encode(one.spend).decode() for one in places],
            [one.attempts for one in places],
            json_texts(dict(one.metadata) for one in places),
        )


async def move(connection: Connection, places: Sequence[NewPlace]) -> None:
    """Steps that wait already wait for something else, or until another time."""
    if places:
        ids = [one.step_id for one in places]
        await connection.execute(
            _sql["move"],
            ids,
            [one.budget for one in places],
            [one.key for one in places],
            [one.cost for one in places],
            [one.moves for one in places],
            [one.at for one in places],
            json_texts(dict(one.metadata) for one in places),
            min(ids),
            max(ids),
        )


async def grant(connection: Connection, step_ids: Sequence[StepId]) -> None:
    """The turn of steps has come."""
    if step_ids:
        await connection.execute(_sql["grant"], step_ids, min(step_ids), max(step_ids))


async def take(connection: Connection, claims: Mapping[StepId, ClaimedRun]) -> list[tuple[str, str]]:
    """Steps that waited begin, by the claims of their runs; the lines in which those stood whose turn had not come
    before."""
    if not claims:
        return []
    ids = sorted(claims)
    rows = await connection.fetch(_sql["take"], ids, [claims[one].claim_generation for one in ids], ids[0], ids[-1])
    return [(row[0], row[1]) for row in rows]


async def to_release(connection: Connection, claims: Mapping[StepId, ClaimedRun]) -> dict[StepId, tuple[str, ...]]:
    """The budgets that have to know when the steps have ended, by step: they hold slots of them, or are tried first."""
    found: dict[StepId, tuple[str, ...]] = dict.fromkeys(claims, ())
    if claims:
        ids = list(claims)
        for row in await connection.fetch(_sql["to_release"], ids, [claims[one].id for one in ids]):
            found[row[0]] += (row[1],)
    return found


async def leave(connection: Connection, step_ids: Collection[StepId]) -> list[tuple[str, str]]:
    """Steps wait no longer for a budget; the lines in which they stood."""
    return [(row[0], row[1]) for row in await connection.fetch(_sql["leave"], list(step_ids))] if step_ids else []


async def names_of_runs(connection: Connection, run_ids: Collection[RunId]) -> set[str]:
    """The budgets that steps of the runs wait for, or whose turn has come."""
    return {row[0] for row in await connection.fetch(_sql["of_runs"], list(run_ids))} if run_ids else set()


async def lines_of_runs(connection: Connection, run_ids: Collection[RunId]) -> list[tuple[str, str]]:
    """The lines in which steps of the runs stand."""
    return [(row[0], row[1]) for row in await connection.fetch(_sql["lines_of_runs"], list(run_ids))] if run_ids else []


class DueStep(NamedTuple):
    """A step that is due to be decided."""

    id: StepId
    budget: str
    key: str | None


async def due(connection: Connection, limit: int) -> list[DueStep]:
    """Steps that are due to be decided, the first due first."""
    return [DueStep(*row) for row in await connection.fetch(_sql["due"], limit)]


async def next_due_seconds(connection: Connection) -> float | None:
    """Seconds until the next step is due to be decided, or None when none waits."""
    found: float | None = await connection.fetchval(_sql["next_due"])
    return found


async def show(connection: Connection, step_ids: Sequence[uuid.UUID]) -> None:
    """The rows of the steps have the times of their places."""
    if step_ids:
        await connection.execute(_sql["show"], step_ids, min(step_ids), max(step_ids))


async def decide_again(connection: Connection, budget: str, *, unread: bool) -> None:
    """Every step that waits for the budget is due now, or those that are in no line of it."""
    await connection.execute(_sql["decide_again"], budget, unread)


async def ended(connection: Connection, limit: int) -> list[tuple[StepId, str]]:
    """Places of steps whose runs have ended, and their budgets."""
    return [(row[0], row[1]) for row in await connection.fetch(_sql["ended"], limit)]
