"""`workflow_runs`: claims with leases, fenced by a generation."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headgate.model.run import ClaimedRun, FinishedRun, Run, RunStatus
from headgate.store.db import Connection, Row
from headgate.store.sql import load

_sql = load("runs")


async def claim_due(
    connection: Connection, *, definitions: Sequence[uuid.UUID], limit: int, worker: str, lease_ms: int
) -> list[ClaimedRun]:
    """Claim due runs of the given workflows until the lease ends."""
    rows = await connection.fetch(_sql["claim_due"], definitions, limit, worker, lease_ms)
    return sorted((msgspec.convert(dict(row), ClaimedRun) for row in rows), key=lambda r: r.id)


async def renew(connection: Connection, held: Sequence[ClaimedRun], lease_ms: int) -> set[uuid.UUID]:
    """Extend leases. The ids still held; the others belong to someone else now."""
    rows = await connection.fetch(_sql["renew"], [r.id for r in held], [r.claim_generation for r in held], lease_ms)
    return {row[0] for row in rows}


class EndedRun(NamedTuple):
    """A run that has just ended, as its row says: the limits of its trigger may have changed while it was running."""

    id: uuid.UUID
    status: RunStatus
    trigger_id: uuid.UUID | None
    concurrency_key: str | None
    is_probe: bool


async def finish(connection: Connection, finished: Sequence[FinishedRun]) -> list[EndedRun]:
    """End runs that are still held; those ended."""
    rows = await connection.fetch(
        _sql["finish"],
        [f.id for f in finished],
        [f.claim_generation for f in finished],
        [f.status for f in finished],
        [f.output for f in finished],
        [f.error for f in finished],
    )
    return [EndedRun(*row) for row in rows]


async def hand_back(connection: Connection, held: Sequence[ClaimedRun]) -> set[uuid.UUID]:
    """Make runs due again at once. The ids handed back."""
    rows = await connection.fetch(_sql["hand_back"], [r.id for r in held], [r.claim_generation for r in held])
    return {row[0] for row in rows}


async def release_expired(connection: Connection, limit: int) -> list[uuid.UUID]:
    """Make runs whose lease has run out due again."""
    return [row[0] for row in await connection.fetch(_sql["release_expired"], limit)]


async def next_due_seconds(connection: Connection, definitions: Sequence[uuid.UUID]) -> float | None:
    """Seconds until the next pending run is due (negative when overdue), or None."""
    seconds: float | None = await connection.fetchval(_sql["next_due"], definitions)
    return seconds


async def list_unfinished(
    connection: Connection, trigger_id: uuid.UUID, *, after: uuid.UUID, limit: int
) -> list[tuple[uuid.UUID, uuid.UUID | None]]:
    """A trigger's unfinished runs with their events, in the order of their ids."""
    return [(row[0], row[1]) for row in await connection.fetch(_sql["list_unfinished"], trigger_id, after, limit)]


async def set_concurrency_keys(
    connection: Connection, run_ids: Sequence[uuid.UUID], keys: Sequence[str | None]
) -> None:
    """Say whose concurrency slots unfinished runs hold; None: nobody's."""
    await connection.execute(_sql["set_concurrency_keys"], run_ids, keys)


async def get(connection: Connection, run_id: uuid.UUID) -> Run | None:
    """One run."""
    row = await connection.fetchrow(_sql["get"], run_id)
    return _run(row) if row else None


async def list_page(
    connection: Connection,
    *,
    workflow: str | None = None,
    status: RunStatus | None = None,
    event_id: uuid.UUID | None = None,
    before_id: uuid.UUID | None = None,
    limit: int = 50,
) -> list[Run]:
    """Runs, newest first."""
    rows = await connection.fetch(_sql["list"], workflow, status, event_id, before_id, limit)
    return [_run(row) for row in rows]


def _run(row: Row) -> Run:
    return msgspec.convert(dict(row), Run)
