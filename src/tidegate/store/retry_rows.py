"""What the three tables with retry state share: the columns of a compare-and-set, the filters of lists."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from tidegate.model.retry import RetryChange


class RetryFilters(NamedTuple):
    """Which of those that wait are wanted; None: all."""

    source: str | None = None
    reason: str | None = None
    trigger_id: uuid.UUID | None = None
    workflow: str | None = None
    workflow_run_id: uuid.UUID | None = None


def change_columns(changes: Sequence[RetryChange]) -> tuple[list[object], ...]:
    """The arrays that every `update` block takes, in its order."""
    return (
        [c.id for c in changes],
        [c.expected_state for c in changes],
        [c.claim_generation for c in changes],
        [c.retry_state for c in changes],
        [c.attempts for c in changes],
        [c.next_attempt_at for c in changes],
        [c.last_error for c in changes],
        json_texts(c.metadata for c in changes),
    )


def json_texts(values: Iterable[Any]) -> list[object]:
    """Each value as JSON text, for a text[] parameter that the statement casts to jsonb."""
    return [msgspec.json.encode(value).decode() for value in values]
