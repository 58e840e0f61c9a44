"""What the three tables with retry state share: the filters of lists, and metadata as JSON text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from tidegate.model.ids import RunId, TriggerId


class RetryFilters(NamedTuple):
    """Which waiting rows are wanted; None: all."""

    source: str | None = None
    reason: str | None = None
    trigger_id: TriggerId | None = None
    workflow: str | None = None
    workflow_run_id: RunId | None = None


def json_texts(values: Iterable[Any]) -> list[object]:
    """Each value as JSON text, for a text[] parameter that the statement casts to jsonb."""
    return [msgspec.json.encode(value).decode() for value in values]
