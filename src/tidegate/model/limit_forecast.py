"""A limit applied to arrivals of the past: how many events would have waited, and how long. Pure, by the gate's rules.

The gate is that of `model/source.py`, which sources and throttles of triggers share: an event passes if nothing waits
before it and the limit has room, else it gets a slot. At its slot it passes as soon as there is room.
"""

from __future__ import annotations

from collections import deque
from datetime import datetime, timedelta

import msgspec

from tidegate.model.ids import EventId
from tidegate.model.source import Gate, RateLimit


class LimitWaits(msgspec.Struct, frozen=True, kw_only=True):
    """How many events a limit would have held, the longest wait and the event that had it, the most that would have
    waited at once, and when the last of them would have passed."""

    held: int
    longest_wait_ms: int
    longest_wait_event_id: EventId | None
    most_waiting: int
    last_passed_at: datetime | None


class LimitForecast:
    """One limit (None: no limit) that begins empty. `arrive` takes the events in the order of their times."""

    def __init__(self, limit: RateLimit | None) -> None:
        self._gate = Gate("", limit=limit)
        self._line: deque[tuple[datetime, datetime, EventId]] = deque()  # slot, arrival, event
        self._passed_at: datetime | None = None
        self._held = 0
        self._longest = timedelta(0)
        self._longest_of: EventId | None = None
        self._most = 0

    def arrive(self, at: datetime, event_id: EventId) -> None:
        """An event arrives at this time."""
        gate = self._gate
        if gate.limit is None:
            return
        self._pass_until(at)
        if not self._line:
            gate.forget_backlog()
            if gate.room(at) != 0:
                gate.spend(at, 1)
                self._passed_at = at
                return
        [slot] = gate.slots(at, 1)
        self._line.append((slot, at, event_id))
        self._held += 1
        self._most = max(self._most, len(self._line))

    def waits(self) -> LimitWaits:
        """What came of all events; those that wait still pass at their slots."""
        self._pass_until(None)
        return LimitWaits(
            held=self._held, longest_wait_ms=self._longest // timedelta(milliseconds=1),
            longest_wait_event_id=self._longest_of, most_waiting=self._most,
            last_passed_at=self._passed_at if self._held else None,
        )  # fmt: skip

    def _pass_until(self, now: datetime | None) -> None:
        """Those in line pass at their slots, up to `now`; None: all."""
        gate = self._gate
        while self._line:
            slot, arrived_at, event_id = self._line[0]
            at = max(slot, self._passed_at or slot)
            at = max(at, gate.room_at(at))
            if now is not None and at > now:
                return
            self._line.popleft()
            gate.spend(at, 1)
            self._passed_at = at
            if at - arrived_at > self._longest:
                self._longest, self._longest_of = at - arrived_at, event_id
