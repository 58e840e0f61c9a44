"""Source limit: what another limit of a source would have held in the past, and when what waits now would be drained.

Exact by the gate's rules (`model/source.py`), for events that meet the gate as soon as they are received.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.model.limit_forecast import LimitForecast, LimitWaits
from tidegate.model.source import HORIZON, Gate, RateLimit
from tidegate.store import predictions, sources
from tidegate.store.db import Database
from tidegate.store.predictions import Arrival, ReceiptSpan
from tidegate.store.sources import SourceState

# The newest of the past.
MOST_ARRIVALS = 50_000
PAST = timedelta(days=7)


class LimitPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What a limit (`limit` null: none) would have done with the events of a source that were received at `from` or
    later and before `to` (`is_cut`: with the newest of them), compared with the limit in force now (`current`).
    `drained_at`: when the events that wait now would have passed; null if none waits, or until an operator resumes
    the source."""

    source: str
    limit: int | None
    interval_ms: int | None
    pause_ms: int | None
    received_from: datetime = msgspec.field(name="from")
    received_to: datetime = msgspec.field(name="to")
    events: int
    is_cut: bool
    predicted: LimitWaits
    current: LimitWaits
    waiting: int
    drained_at: datetime | None
    not_predicted: list[str]


async def predict(
    database: Database, source: str, limit: RateLimit | None, *, most: int = MOST_ARRIVALS
) -> LimitPrediction:
    """What the limit, or (None) its removal, would have done with the last week's events and would do with what
    waits."""
    async with database.connection() as connection:
        state = await sources.peek(connection, source)
        span = ReceiptSpan(state.now - PAST, state.now)
        found, is_cut = await predictions.of_source(connection, source, span, most)
    asked = limit or state.default
    arrivals = sorted(found, key=lambda one: (one.at, one.ingress_sequence))
    return LimitPrediction(
        source=source,
        limit=asked.limit if asked else None,
        interval_ms=asked.interval_ms if asked else None,
        pause_ms=asked.pause_ms if asked else None,
        received_from=min((one.received_at for one in found), default=span.received_from)
        if is_cut
        else span.received_from,
        received_to=span.received_to,
        events=len(found),
        is_cut=is_cut,
        predicted=await _waits(asked, arrivals),
        current=await _waits(state.limit, arrivals),
        waiting=state.waiting,
        drained_at=drained_at(state, asked),
        not_predicted=[
            "pauses, breakers and limits that held these events in the past",
            "events whose ttl_ms would have passed while they waited",
            "events that waited before the first of these",
        ],
    )


async def _waits(limit: RateLimit | None, arrivals: Sequence[Arrival]) -> LimitWaits:
    forecast, time_slice = LimitForecast(limit), TimeSlice()
    for one in arrivals:
        forecast.arrive(one.at, one.event_id)
        if time_slice.is_over:
            await time_slice.next()
    return forecast.waits()


def drained_at(state: SourceState, limit: RateLimit | None) -> datetime | None:
    """The last slot that a new plan would give to what waits now, as the edit of the limit makes it: the pause after an
    exceeded limit ends, and what passed before still counts."""
    known, now = state.gate, state.now
    hold = known.hold(now)
    if not state.waiting or (hold is not None and hold.until is None):
        return None
    gate = Gate(
        known.source, limit=limit, ring=known.ring, ring_at=known.ring_at, ring_width_us=known.ring_width_us,
        spent_at=known.spent_at, paused_at=known.paused_at, paused_until=known.paused_until,
        breaker_state=known.breaker_state, breaker_until=known.breaker_until,
    )  # fmt: skip
    [first] = gate.slots(now, 1, is_refusal=False)
    pace = limit.pace if limit is not None else timedelta(0)
    last = now + HORIZON
    return last if pace and state.waiting - 1 > (last - first) // pace else first + pace * (state.waiting - 1)
