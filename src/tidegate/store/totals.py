"""What batches saw of sources and triggers, on its way to their totals: written by `deliveries.launch_calm`."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

from tidegate.store.sources import SourceMetrics

_OF_SOURCE = SourceMetrics.__struct_fields__[:-1]


class TriggerTotals(NamedTuple):
    """What a batch saw of one trigger."""

    trigger_id: uuid.UUID
    filtered: int = 0
    matched: int = 0
    launched: int = 0
    throttled: int = 0
    skipped: int = 0
    failed: int = 0
    paused: int = 0
    last_status: str | None = None
    last_error: str | None = None


class BatchTotals(NamedTuple):
    """What one transaction adds to the totals."""

    triggers: Sequence[TriggerTotals] = ()
    sources: Sequence[SourceMetrics] = ()

    def columns(self) -> list[list[object]]:
        """As the statement takes them: each field of all triggers, then each field of all sources."""
        of_triggers: list[list[object]] = [[one[i] for one in self.triggers] for i in range(len(TriggerTotals._fields))]
        return of_triggers + [[getattr(one, field) for one in self.sources] for field in _OF_SOURCE]
