"""Shares: who is next when several lines wait for the same slots, in proportion to their weights.

Pure. `Turns` divides slots that are held for a while (the slots of a worker among workflows and keys); `InboxRing` the
places of a batch among the lanes of the inbox.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

# A line that nobody asked about for this many turns is forgotten; it then begins like a new one.
MAX_LINES = 10_000
# The greatest weight of a source, and the greatest priority of an event or trigger; both are 1 unless set.
MAX_WEIGHT, MAX_PRIORITY = 100, 10
# Multiples of the golden ratio are spread evenly over a unit, however many there are.
GOLDEN = 0.6180339887498949


class Line(NamedTuple):
    """Something that waits for slots: how many slots it could use, how many it holds already, and its weight."""

    name: str
    waiting: int
    held: int = 0
    weight: int = 1


class Turns:
    """Gives free slots to lines, so that the slots that each holds are in proportion to the weights, as far as each
    has something waiting; no slot stays free while any line waits.

    The next slot goes to the line that holds the fewest for its weight. Of several, to the one whose turn it is: a
    turn costs a line 1/weight of virtual time, so that even a single slot goes round in proportion to the weights. A
    line that has been away begins at the present: it has saved up no turns.
    """

    def __init__(self) -> None:
        self._turns: dict[str, float] = {}
        self._present = 0.0

    def give(self, slots: int, lines: Iterable[Line]) -> dict[str, int]:
        """How many of the slots each line gets; lines that get none are not named."""
        waiting = {line.name: line for line in lines if line.waiting > 0}
        given: dict[str, int] = {}
        if len(waiting) == 1:
            [only] = waiting.values()
            return {only.name: min(slots, only.waiting)} if slots > 0 else given
        heap = [
            (line.held / line.weight, max(self._turns.get(line.name, 0.0), self._present), line.name)
            for line in waiting.values()
        ]
        heapq.heapify(heap)
        while slots > 0 and heap:
            _, turn, name = heap[0]
            line = waiting[name]
            slots -= 1
            given[name] = count = given.get(name, 0) + 1
            self._present = turn
            self._turns[name] = turn = turn + 1 / line.weight
            if count < line.waiting:
                heapq.heapreplace(heap, ((line.held + count) / line.weight, turn, name))
            else:
                heapq.heappop(heap)
        if len(self._turns) > MAX_LINES:
            self._turns = {name: turn for name, turn in self._turns.items() if turn > self._present}
        return given


class Lane(NamedTuple):
    """The events of one source with one priority."""

    source: str
    priority: int = 1


class WaitingLane(NamedTuple):
    """A lane that has undecided events: the weight of its source, and how many events at least."""

    lane: Lane
    weight: int
    waiting: int


class InboxRing:
    """Divides batches among the sources that wait, in proportion to their weights, and the share of each among its
    priorities, in proportion to these.

    The sources stand in a ring, by name. A batch goes round as often as it can, and takes as many events of each as
    its weight says; where it ends, the next batch goes on, also in the middle of a source. So the proportions hold
    over several batches when there are more sources than a batch has places.
    """

    def __init__(self) -> None:
        self.after = ""  # the last source that has had its share
        self._begun: tuple[str, int] | None = None  # the source after it, and what it has had of its share
        self._batches = 0

    def divide(self, places: int, waiting: Sequence[WaitingLane]) -> dict[Lane, int]:
        """How many events of each lane a batch takes; `waiting` begins with the source after `after`, and has as many
        sources as there are places, or else all."""
        lanes: dict[str, list[WaitingLane]] = {}
        for one in waiting:
            lanes.setdefault(one.lane.source, []).append(one)
        weights = {source: of_it[0].weight for source, of_it in lanes.items()}
        left = {source: sum(one.waiting for one in of_it) for source, of_it in lanes.items()}
        given, ring, most = dict.fromkeys(lanes, 0), list(lanes), places
        while places > 0 and weights:
            # Of a ring of which only a part is known, nothing is a whole round.
            rounds, rest = divmod(places, sum(weights.values())) if len(ring) < most else (0, places)
            shares = {source: rounds * weight for source, weight in weights.items()}
            self._go_round(rest, weights, shares, ring)
            for source, share in shares.items():
                taken = min(share, left[source])
                given[source] += taken
                left[source] -= taken
                places -= taken
            weights = {source: weight for source, weight in weights.items() if left[source] > 0}
        self._batches += 1
        offset = self._batches * GOLDEN % 1
        return {
            lane: count
            for source, share in given.items()
            for lane, count in _by_priority(share, lanes[source], offset).items()
            if count > 0
        }

    def _go_round(self, places: int, weights: Mapping[str, int], shares: dict[str, int], ring: Sequence[str]) -> None:
        """Adds what is less than a whole round to the shares, from where the last batch ended."""
        at = ring.index(self.after) + 1 if self.after in ring else 0
        while places > 0:
            source, at = ring[at % len(ring)], at + 1
            if source not in weights:
                continue
            had = self._begun[1] if self._begun is not None and self._begun[0] == source else 0
            taken = min(places, max(0, weights[source] - had))
            shares[source] += taken
            places -= taken
            if had + taken < weights[source]:
                self._begun = (source, had + taken)
            else:
                self.after, self._begun = source, None


def _by_priority(share: int, lanes: Sequence[WaitingLane], offset: float) -> dict[Lane, int]:
    """A source's share among its priorities. An offset that differs from batch to batch gives each priority its part
    also of shares that are too small for all."""
    left = {one.lane: one.waiting for one in lanes}
    given = dict.fromkeys(left, 0)
    while share > 0 and left:
        total, passed, before, places = sum(lane.priority for lane in left), 0, 0, share
        for lane, waiting in left.items():
            passed += lane.priority
            upto = places if passed == total else min(places, int(places * passed / total + offset))
            taken, before = min(upto - before, waiting), upto
            given[lane] += taken
            share -= taken
        left = {one.lane: one.waiting - given[one.lane] for one in lanes if one.waiting > given[one.lane]}
    return given
