"""Steps that wait as operators see them, and what they do to those."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime

import msgspec

from tidegate.model.ids import EventId, RunId, StepId, TriggerId
from tidegate.model.retry import RetryState
from tidegate.store.db import Connection
from tidegate.store.retry_rows import RetryFilters
from tidegate.store.sql import load

_sql = load("held_steps")


class HeldStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step, or timer (its reason is `sleep`), with its run, trigger and event; `budget` is the one it waits for."""

    id: StepId
    step: str
    workflow_run_id: RunId
    workflow: str
    trigger_id: TriggerId | None
    trigger: str | None
    event_id: EventId | None
    external_id: str | None
    type: str | None
    source: str | None
    correlation_id: str | None
    retry_state: RetryState
    reason: str | None
    attempts: int
    next_attempt_at: datetime | None
    last_error: str | None
    created_at: datetime
    updated_at: datetime
    eta_seconds: float | None
    budget: str | None = None
    budget_key: str | None = None


class StepOfRun(msgspec.Struct, frozen=True, kw_only=True):
    """A step and the state of its run, at the moment of asking."""

    id: StepId
    name: str
    kind: str
    status: str
    retry_state: RetryState
    reason: str | None
    retry_attempts: int
    next_attempt_at: datetime | None
    is_due: bool | None
    workflow_run_id: RunId
    run_status: str
    trigger_id: TriggerId | None
    event_id: EventId | None
    workflow: str

    @property
    def is_retry(self) -> bool:
        """Whether it is a step that is to be tried again."""
        return self.kind == "step" and self.retry_state == "scheduled"

    @property
    def is_suspended(self) -> bool:
        """Whether it waits for a retry, and no worker holds its run."""
        return self.is_retry and self.run_status == "pending"

    @property
    def waits_beside_others(self) -> bool:
        """Whether it waits for a retry while a worker does other steps of its run."""
        return self.is_retry and self.run_status == "running" and not self.is_due


async def list_waiting(
    connection: Connection,
    filters: RetryFilters = RetryFilters(),  # noqa: B008 - it is immutable
    *,
    after: tuple[datetime, uuid.UUID] | None = None,
    limit: int,
) -> list[HeldStep]:
    """Waiting steps and timers in due order, after `(next_attempt_at, id)`."""
    rows = await connection.fetch(_sql["list_waiting"], *filters, *(after or (None, None)), limit)
    return [HeldStep(**dict(row)) for row in rows]


async def list_settled(
    connection: Connection,
    state: RetryState,
    filters: RetryFilters = RetryFilters(),  # noqa: B008 - it is immutable
    *,
    before_id: uuid.UUID | None = None,
    limit: int,
) -> list[HeldStep]:
    """Steps in another retry state, newest first."""
    rows = await connection.fetch(_sql["list_settled"], state, *filters, before_id, limit)
    return [HeldStep(**dict(row)) for row in rows]


async def get(connection: Connection, step_ids: Sequence[StepId]) -> list[StepOfRun]:
    """Steps with the state of their runs, in the order of their ids."""
    return [StepOfRun(**dict(row)) for row in await connection.fetch(_sql["get"], step_ids)]


async def force(connection: Connection, step_ids: Sequence[StepId]) -> set[StepId]:
    """Make steps of suspended runs due now, with their runs; those forced. The caller holds the runs."""
    return {row[0] for row in await connection.fetch(_sql["force"], step_ids)}
