"""`workflow_run_steps`: the durable steps of a run. Batch-first, compare-and-set, fenced."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.ids import RunId
from tidegate.model.run import Step
from tidegate.model.step import StepWrite
from tidegate.store.columns import column
from tidegate.store.db import Connection, Row
from tidegate.store.retry_rows import json_texts
from tidegate.store.sql import load

_sql = load("steps")


class RecordedStep(NamedTuple):
    """A step's row after a write."""

    is_cancel_requested: bool
    next_attempt_at: datetime | None


async def write(
    connection: Connection, writes: Sequence[StepWrite], ended: Collection[RunId] = ()
) -> dict[tuple[RunId, str], RecordedStep]:
    """Record the outcome of steps of runs that are still held, or `ended` in this transaction. By run and name; the
    others were discarded."""
    if not writes:
        return {}
    rows = await connection.fetch(
        _sql["write"],
        [w.id for w in writes],
        [w.workflow_run_id for w in writes],
        [w.claim_generation for w in writes],
        [w.name for w in writes],
        column([w.status for w in writes], "succeeded"),
        column([w.kind for w in writes], "step"),
        column([w.result for w in writes]),
        column([w.error for w in writes]),
        column([w.retry_state for w in writes], "none"),
        column([w.delay_ms for w in writes]),
        column([w.retry_attempts for w in writes], 0),
        column(json_texts(w.retry_metadata for w in writes), "{}"),
        column([w.workflow_run_id in ended for w in writes], True),
    )
    kept = {(row[0], row[1]): RecordedStep(row[2], row[3]) for row in rows}
    missing = [w for w in writes if (w.workflow_run_id, w.name) not in kept and w.workflow_run_id not in ended]
    if missing:
        kept |= await _done_before(connection, missing)
    return kept


async def _done_before(connection: Connection, writes: Sequence[StepWrite]) -> dict[tuple[RunId, str], RecordedStep]:
    """Those of the steps that need no write: they are done, and their runs are still held."""
    rows = await connection.fetch(
        _sql["done_before"],
        [w.id for w in writes],
        [w.workflow_run_id for w in writes],
        [w.claim_generation for w in writes],
        [w.status for w in writes],
        [w.kind for w in writes],
    )
    return {(row[0], row[1]): RecordedStep(row[2], row[3]) for row in rows}


async def end_waiting(connection: Connection, run_ids: Sequence[RunId]) -> int:
    """The runs have ended: their waiting steps are not tried again; how many."""
    return await connection.fetchval(_sql["end_waiting"], run_ids, min(run_ids), max(run_ids)) if run_ids else 0


async def list_of_runs(connection: Connection, run_ids: Sequence[RunId]) -> list[Step]:
    """The steps of several runs."""
    return [_step(row) for row in await connection.fetch(_sql["list_of_runs"], run_ids)] if run_ids else []


async def list_scheduled(
    connection: Connection,
    *,
    after: tuple[datetime, uuid.UUID] | None = None,
    limit: int = 500,
) -> list[Step]:
    """Waiting rows in due order, after `(next_attempt_at, id)`."""
    at, last = after or (None, None)
    return [_step(row) for row in await connection.fetch(_sql["list_scheduled"], at, last, limit)]


async def list_of_run(connection: Connection, run_id: RunId) -> list[Step]:
    """The steps of one run, in order."""
    return [_step(row) for row in await connection.fetch(_sql["list_of_run"], run_id)]


def _step(row: Row) -> Step:
    return msgspec.convert(dict(row) | {"is_timed_out": row["retry_metadata"].get("timed_out", False)}, Step)
