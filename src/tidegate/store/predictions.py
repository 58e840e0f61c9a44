"""What predictions read: events of the past without their payloads, and what was decided about them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from tidegate.model.ids import DeliveryId, EventId
from tidegate.store.db import Connection, Row
from tidegate.store.sql import load

_sql = load("predictions")


class Arrival(NamedTuple):
    """An event of the past; `at` is when it met its source's gate first. A start is for one trigger only."""

    event_id: EventId
    type: str
    source: str
    ingress_sequence: int
    received_at: datetime
    at: datetime
    is_start: bool


class ReceiptSpan(NamedTuple):
    """Events that were received at the first time or later, and before the second."""

    received_from: datetime
    received_to: datetime


class NewestArrivals(NamedTuple):
    """The newest events of a span; `is_cut` if it has more."""

    found: list[Arrival]
    is_cut: bool


async def of_type(connection: Connection, event_type: str, span: ReceiptSpan, limit: int) -> NewestArrivals:
    """The newest events of a type."""
    return _newest(await connection.fetch(_sql["of_type"], event_type, span.received_to, limit + 1), span, limit)


async def of_source(connection: Connection, source: str, span: ReceiptSpan, limit: int) -> NewestArrivals:
    """The newest events of a source."""
    return _newest(await connection.fetch(_sql["of_source"], source, span.received_to, limit + 1), span, limit)


async def of_all(connection: Connection, span: ReceiptSpan, limit: int) -> NewestArrivals:
    """The newest events."""
    return _newest(await connection.fetch(_sql["of_all"], *span, limit + 1), span, limit)


async def delivered(connection: Connection, ids: Sequence[DeliveryId]) -> dict[DeliveryId, str]:
    """The statuses of those of the deliveries that exist."""
    if not ids:
        return {}
    return dict(await connection.fetch(_sql["delivered"], list(ids), min(ids), max(ids)))


async def undecided(connection: Connection, arrivals: Sequence[Arrival]) -> set[EventId]:
    """Those of the events that wait to be decided."""
    ids, sequences = [one.event_id for one in arrivals], [one.ingress_sequence for one in arrivals]
    return {row[0] for row in await connection.fetch(_sql["undecided"], ids, sequences)}


def _newest(rows: Sequence[Row], span: ReceiptSpan, limit: int) -> NewestArrivals:
    found = [Arrival(*row) for row in rows[:limit]]
    within = [one for one in found if span.received_from <= one.received_at < span.received_to]
    return NewestArrivals(within, len(rows) > limit and rows[limit]["received_at"] >= span.received_from)


async def waiting_for(connection: Connection, budget: str, limit: int) -> list[EventId]:
    """The events of deliveries that wait, for whatever reason, at triggers that use a budget, and of steps that
    wait for it; the first of each."""
    return [row[0] for row in await connection.fetch(_sql["waiting_for"], budget, limit)]
