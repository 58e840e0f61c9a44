"""What batches saw of sources and triggers, added to their totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from tidegate.model.ids import TriggerId
from tidegate.store.db import Connection
from tidegate.store.sources import SourceMetrics
from tidegate.store.sql import load

_sql = load("totals")


class TriggerTotals(NamedTuple):
    """What a batch saw of one trigger."""

    trigger_id: TriggerId
    filtered: int = 0
    matched: int = 0
    launched: int = 0
    throttled: int = 0
    skipped: int = 0
    failed: int = 0
    paused: int = 0
    collected: int = 0
    last_status: str | None = None
    last_error: str | None = None


class BatchTotals(NamedTuple):
    """What one transaction adds to the totals."""

    triggers: Sequence[TriggerTotals] = ()
    sources: Sequence[SourceMetrics] = ()

    def parameters(self) -> tuple[str, str]:
        """As the statements take them: JSON, which for a few rows costs less than an array for each column."""
        triggers = msgspec.json.encode([one._asdict() for one in self.triggers])
        return triggers.decode(), msgspec.json.encode(self.sources).decode()


async def add(connection: Connection, totals: BatchTotals) -> None:
    """Add to the totals; last in a transaction, since many transactions write these rows."""
    if totals.triggers or totals.sources:
        await connection.execute(_sql["add"], *totals.parameters())
