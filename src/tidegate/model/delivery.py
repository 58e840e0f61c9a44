"""A delivery: the record of one decision about one trigger and one event."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, get_args

import msgspec

from tidegate.model.ids import DeliveryId, EventId, RunId, TriggerId
from tidegate.model.retry import RetryState

DeliveryStatus = Literal[
    "matched", "launched", "throttled", "paused", "skipped", "failed", "exhausted", "cancelled", "collected"
]  # fmt: skip
DELIVERY_STATUSES: tuple[DeliveryStatus, ...] = get_args(DeliveryStatus)


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `workflow_trigger_deliveries`."""

    id: DeliveryId
    trigger_id: TriggerId
    event_id: EventId
    workflow_run_id: RunId | None = None
    trigger_version: int = 1
    status: DeliveryStatus
    attempts: int = 0
    dedupe_key: str | None = None
    launched_at: datetime | None = None
    last_error: str | None = None
    throttled_until: datetime | None = None
    retry_state: RetryState = "none"
    next_attempt_at: datetime | None = None
    retry_attempts: int = 0
    retry_metadata: dict[str, Any] = {}
    claim_generation: int = 0
    claimed_by: str | None = None
    claim_expires_at: datetime | None = None
    reason: str | None = None
    source: str | None = None
    concurrency_key: str | None = None
    ingress_sequence: int = 0
    plan_version: int = 0
    window_id: DeliveryId | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
