"""Inbox: which undecided events a batch takes.

While everything fits into a batch, the oldest are taken, whoever they are from. When a batch was full, the next one is
divided among the sources that wait, by their weights, and within a source among its priorities (`model/shares.py`); in
order of arrival within each. So a source that floods delays itself. What others publish while a batch of its events is
decided need not wait for the end of that: `OtherLanes` takes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tidegate.model.event import Event
from tidegate.model.shares import InboxRing, Lane, WaitingLane
from tidegate.store import events, inbox_lanes, locks, waits
from tidegate.store.db import Connection
from tidegate.store.events import Claimed

# A batch that decides all of a source's waiting events has about SMALL places, or twice as many as such events.
SMALL = 100


class Inbox:
    """The inbox as one dispatcher sees it."""

    def __init__(self) -> None:
        self._ring = InboxRing()
        self._shares: dict[Lane, int] | None = None  # of the last batch; None: it took the oldest
        self._only: Lane | None = None  # the lane of all events of the last batch, or of all that it left
        self._seen = 0  # how many events waited at least, when it was divided
        self._has_more = False

    takes_turns = True  # whether a batch waits for its turn where the order matters

    @property
    def has_more(self) -> bool:
        """Whether the last batch was full, or left something."""
        return self._has_more

    @property
    def backlog(self) -> Lane | None:
        """The lane that has a backlog, if it is one."""
        return self._only

    def expect_more(self) -> None:
        """The last batch was not decided: its events are there again."""
        self._has_more = True

    async def claim(self, connection: Connection, limit: int, *, has_turn: bool) -> Claimed:
        """Take undecided events for this transaction alone. `has_turn`: what is taken is decided after all that came
        before it, of the same source and priority."""
        if self._only is not None and not has_turn:
            claimed = await inbox_lanes.claim_alone(connection, self._only, limit)
            if claimed.events:
                return self._took_oldest(claimed, limit)
        if not self._has_more or not await self._divide(connection, limit, has_turn=has_turn):
            if has_turn:
                await locks.take_turn(connection, limit)
            return self._took_oldest(await events.claim_inbox(connection, limit), limit)
        assert self._shares is not None
        if has_turn:
            await inbox_lanes.lock(connection, self._shares)
        # In turn, nothing else is taken: of the oldest of all, those that others have claimed would be passed over.
        most = 0 if has_turn else sum(self._shares.values())
        claimed = await inbox_lanes.claim(connection, self._shares, most)
        self._has_more = len(claimed.events) < self._seen or self._seen >= limit
        return claimed

    def _took_oldest(self, claimed: Claimed, limit: int) -> Claimed:
        self._shares = None
        self._has_more = len(claimed.events) == limit
        self._only = _only(claimed.events) if self._has_more else None
        return claimed

    async def _divide(self, connection: Connection, limit: int, *, has_turn: bool) -> bool:
        """Divide the next batch among those that wait; False when there is nobody to share with."""
        if has_turn:
            await locks.hold_turn(connection)
        if self._only is not None and not await inbox_lanes.has_others(connection, self._only):
            return False
        waiting = await inbox_lanes.waiting(connection, self._ring.after, limit)
        if len(waiting) < 2:
            return False
        self._seen = sum(one.waiting for one in waiting)
        self._shares = self._ring.divide(places_for(waiting, limit), waiting)
        left = [one.lane for one in waiting if one.waiting > self._shares.get(one.lane, 0)]
        self._only = left[0] if len(left) == 1 else None
        return True

    async def is_in_turn(self, connection: Connection, newcomers: Sequence[Event]) -> bool:
        """Whether all that came before the events of this batch is decided; within a source and priority, if the batch
        was divided."""
        if self._shares is None:
            return await locks.is_in_turn(connection, newcomers[-1].ingress_sequence)
        last = {Lane(event.source, event.priority or 1): event.ingress_sequence for event in newcomers}
        return await inbox_lanes.are_in_turn(connection, last)

    async def is_overtaken(self, connection: Connection, awaited: Sequence[Event]) -> bool:
        """Whether one of these events, which runs wait for, would come before an older one of its type; within its
        source and priority, if the batch was divided."""
        return await waits.is_overtaken(connection, awaited, by_lane=self._shares is not None)

    async def undecided(self, connection: Connection, limit: int) -> list[int]:
        """The events that the last batch took or would have taken, which could not be decided."""
        self.expect_more()
        if self._shares is None:
            return await events.list_inbox(connection, limit)
        return await inbox_lanes.list_sequences(connection, self._shares, sum(self._shares.values()))


class OtherLanes(Inbox):
    """The inbox without the lane that has a backlog, beside which another dispatcher takes small batches."""

    takes_turns = False  # what must wait for others is left to the dispatcher of the backlog, which has the turn

    def __init__(self, beside: Inbox) -> None:
        super().__init__()
        self._beside = beside

    async def claim(self, connection: Connection, limit: int, *, has_turn: bool) -> Claimed:
        """Take undecided events of other lanes; nothing while no lane has a backlog."""
        lane = self._beside.backlog
        if lane is None:
            return Claimed([], None)
        claimed = await inbox_lanes.claim_others(connection, lane, min(limit, SMALL))
        self._shares = Counter(Lane(event.source, event.priority or 1) for event in claimed.events)
        return claimed


def _only(newcomers: Sequence[Event]) -> Lane | None:
    """The lane of all the events, if it is one."""
    first, sources, priorities = newcomers[0], [e.source for e in newcomers], [e.priority for e in newcomers]
    is_one = sources.count(first.source) == priorities.count(first.priority) == len(newcomers)
    return Lane(first.source, first.priority or 1) if is_one else None


def places_for(waiting: Sequence[WaitingLane], limit: int) -> int:
    """How many events the next batch decides. Those of a source that waits with little start after the commit of the
    whole batch: it is small while there are any, so that they do not wait for the work of others."""
    weights, events = {one.lane.source: one.weight for one in waiting}, Counter[str]()
    for one in waiting:
        events[one.lane.source] += one.waiting
    fair = limit / sum(weights.values())
    small = sum(count for source, count in events.items() if count < fair * weights[source])
    return min(limit, max(SMALL, 2 * small)) if small else limit
