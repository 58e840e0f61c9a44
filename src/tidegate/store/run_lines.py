"""Due runs by workflow: who has any, which they are, and claiming some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidegate.model.ids import DefinitionId, RunId
from tidegate.model.run import SUSPECT_CRASHES, ClaimedRun
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("run_lines")


class DueWorkflow(NamedTuple):
    """A workflow with due runs, whether concurrency keys divide them, and its weight: the highest priority of its
    triggers."""

    id: DefinitionId
    slug: str
    has_keys: bool
    weight: int = 1


class DueRun(NamedTuple):
    """A due run, not locked."""

    definition: DefinitionId
    id: RunId
    concurrency_key: str | None


async def due_workflows(
    connection: Connection, definitions: Sequence[DefinitionId], limit: int, *, worker: str, lease_ms: int
) -> list[DueWorkflow]:
    """Those of the workflows that have due runs which the worker may claim, the longest due first."""
    rows = await connection.fetch(_sql["due_workflows"], definitions, limit, worker, lease_ms, SUSPECT_CRASHES)
    return [DueWorkflow(*row) for row in rows]


async def list_due(
    connection: Connection, most: Mapping[DefinitionId, int], *, worker: str, lease_ms: int
) -> list[DueRun]:
    """The longest due runs of each workflow, at most so many of each, the longest due first; not locked."""
    given = list(most), list(most.values()), worker, lease_ms, SUSPECT_CRASHES
    return [DueRun(*row) for row in await connection.fetch(_sql["list_due"], *given)]


async def claim(
    connection: Connection,
    run_ids: Sequence[RunId],
    *,
    definitions: Sequence[DefinitionId],
    worker: str,
    lease_ms: int,
) -> list[ClaimedRun]:
    """Claim those of the runs that are still due and that no other worker is claiming."""
    if not run_ids:
        return []
    given = definitions, len(run_ids), worker, lease_ms, SUSPECT_CRASHES, run_ids, min(run_ids), max(run_ids)
    rows = await connection.fetch(_sql["claim"], *given)
    return sorted((msgspec.convert(dict(row), ClaimedRun) for row in rows), key=lambda r: r.id)
