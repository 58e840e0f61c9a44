"""An event that the source gate holds."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec

from tidegate.model.ids import EventId
from tidegate.model.retry import RetryState


class IngressRetry(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `event_ingress_retries`."""

    event_id: EventId
    source: str
    retry_state: RetryState = "scheduled"
    attempts: int = 0
    next_attempt_at: datetime | None = None
    reason: str | None = None
    last_error: str | None = None
    metadata: dict[str, Any] = {}
    ingress_sequence: int = 0
    plan_version: int = 0
    claim_generation: int = 0
    claimed_by: str | None = None
    claim_expires_at: datetime | None = None
    created_at: datetime | None = None
    updated_at: datetime | None = None
