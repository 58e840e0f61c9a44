"""Deliveries as operators see them, and what they do to those that wait."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.model.delivery import DeliveryStatus
from tidegate.model.ids import DeliveryId, EventId, RunId, TriggerId
from tidegate.model.retry import RetryState
from tidegate.store.db import Connection, take_time
from tidegate.store.sql import load

_sql = load("held_deliveries")

# Reasons for which a delivery stands in its trigger's line, with a place of its own.
IN_LINE = ("throttle", "paused", "breaker_open")
# The line is not reordered for a delivery with more than this many behind it: it came very late and stays at the end.
MAX_REORDERED = 2_000


class HeldDelivery(msgspec.Struct, frozen=True, kw_only=True):
    """A delivery with its trigger and event. `eta_seconds` is null when it is no longer waiting or the
    time is not known."""

    id: DeliveryId
    trigger_id: TriggerId
    trigger: str
    workflow: str
    trigger_version: int
    event_id: EventId
    external_id: str | None
    type: str
    source: str
    correlation_id: str
    workflow_run_id: RunId | None
    status: DeliveryStatus
    retry_state: RetryState
    reason: str | None
    attempts: int
    retry_attempts: int
    next_attempt_at: datetime | None
    dedupe_key: str | None
    concurrency_key: str | None
    window_id: DeliveryId | None
    last_error: str | None
    launched_at: datetime | None
    created_at: datetime
    updated_at: datetime
    eta_seconds: float | None = None
    expected_at: datetime | None = None
    budget: str | None = None
    budget_key: str | None = None


class DeliveryFilters(NamedTuple):
    """Which deliveries of a list are wanted; None: all."""

    trigger_id: TriggerId | None = None
    workflow: str | None = None
    source: str | None = None
    reason: str | None = None


class ChangedDelivery(NamedTuple):
    """A delivery that waited until now."""

    id: DeliveryId
    event_id: EventId
    retry_attempts: int
    trigger_id: TriggerId
    concurrency_key: str | None
    reason: str | None = None
    budget: str | None = None
    budget_key: str | None = None

    @property
    def line(self) -> tuple[str, str] | None:
        """The budget and key that it waited for."""
        return (self.budget, self.budget_key or "") if self.reason == "budget" and self.budget is not None else None


async def list_waiting(
    connection: Connection,
    filters: DeliveryFilters = DeliveryFilters(),  # noqa: B008 - it is immutable
    *,
    after: tuple[datetime, uuid.UUID] | None = None,
    limit: int,
) -> list[HeldDelivery]:
    """Waiting deliveries in due order, after `(next_attempt_at, id)`."""
    rows = await connection.fetch(_sql["list_waiting"], *filters, *(after or (None, None)), limit)
    return [HeldDelivery(**dict(row)) for row in rows]


async def list_settled(
    connection: Connection,
    state: RetryState,
    filters: DeliveryFilters = DeliveryFilters(),  # noqa: B008 - it is immutable
    *,
    before_id: uuid.UUID | None = None,
    limit: int,
) -> list[HeldDelivery]:
    """Deliveries in another retry state, newest first."""
    rows = await connection.fetch(_sql["list_settled"], state, *filters, before_id, limit)
    return [HeldDelivery(**dict(row)) for row in rows]


async def list_of_trigger(
    connection: Connection,
    trigger_id: TriggerId,
    *,
    status: DeliveryStatus | None = None,
    before_id: uuid.UUID | None = None,
    limit: int,
) -> list[HeldDelivery]:
    """The deliveries of a trigger, newest first."""
    rows = await connection.fetch(_sql["list_of_trigger"], trigger_id, status, before_id, limit)
    return [HeldDelivery(**dict(row)) for row in rows]


async def list_recent(
    connection: Connection,
    *,
    status: DeliveryStatus | None = None,
    before_id: uuid.UUID | None = None,
    limit: int,
) -> list[HeldDelivery]:
    """The deliveries of all triggers, newest first."""
    rows = await connection.fetch(_sql["list_recent"], status, before_id, limit)
    return [HeldDelivery(**dict(row)) for row in rows]


async def get(connection: Connection, delivery_id: DeliveryId) -> HeldDelivery | None:
    """One delivery."""
    row = await connection.fetchrow(_sql["get"], delivery_id)
    return HeldDelivery(**dict(row)) if row else None


async def cancel(
    connection: Connection, delivery_ids: Sequence[DeliveryId], text: str, *, reason: str | None = None
) -> list[ChangedDelivery]:
    """Cancel those of the deliveries that wait, for `reason` if one is given; those cancelled."""
    return [ChangedDelivery(*row) for row in await connection.fetch(_sql["cancel"], delivery_ids, text, reason)]


async def force(
    connection: Connection, delivery_ids: Sequence[DeliveryId], *, reason: str | None = None
) -> list[ChangedDelivery]:
    """Make those of the deliveries that wait, for `reason` if one is given, due now; those forced."""
    return [ChangedDelivery(*row) for row in await connection.fetch(_sql["force"], delivery_ids, reason)]


async def cancel_of_trigger(connection: Connection, trigger_id: TriggerId, reason: str, actor: str) -> int:
    """Cancel every delivery of a trigger that waits; how many. A long line may take a while."""
    connection = await take_time(connection)
    count: int = await connection.fetchval(_sql["cancel_of_trigger"], trigger_id, reason, actor)
    return count


async def keep_order(connection: Connection, since: Mapping[TriggerId, int]) -> None:
    """Give the deliveries in the triggers' lines, from that arrival on, their times in the order of arrival."""
    for trigger_id, sequence in sorted(since.items()):
        await connection.execute(_sql["keep_order"], trigger_id, sequence, MAX_REORDERED)
