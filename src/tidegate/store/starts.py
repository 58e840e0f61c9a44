"""Starts of workflows: what became of those that have launched no run."""

from __future__ import annotations

from collections.abc import Mapping

from tidegate.model.ids import EventId, RunId, delivery_id
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("starts")


async def event_of(connection: Connection, run_id: RunId) -> EventId | None:
    """The start that launches this run, or will."""
    rows = await connection.fetch(_sql["list_of_story"], run_id)
    return next((row[0] for row in rows if delivery_id(row[0], row[1]) == run_id), None)


async def unlaunched(connection: Connection, starts: Mapping[RunId, EventId]) -> dict[RunId, str]:
    """Those of the starts that are decided and will launch nothing, with the reason."""
    if not starts:
        return {}
    rows = await connection.fetch(_sql["unlaunched"], list(starts.values()), list(starts))
    return {row[0]: row[1] for row in rows}
