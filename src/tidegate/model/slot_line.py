"""Who may take a concurrency slot: runs that resume, and deliveries and steps that wait for one, by how long they have
waited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

# free: take it; turn: it is free, and a delivery or step that has waited longer is about to take it; full: all are in
# use, or runs that have waited longer are about to take them.
SlotAnswer = Literal["free", "turn", "full"]


@dataclass(slots=True)
class SlotLine:
    """The slots of one trigger or budget and key, while resuming runs ask for them in the order in which they became
    due. `waiting`: since when other runs wait; `called`: when the deliveries and steps came that are due in this
    line."""

    most: int | None
    in_use: int = 0
    waiting: list[datetime] = field(default_factory=list)
    called: Sequence[datetime] = ()

    def ask(self, since: datetime) -> SlotAnswer:
        """May a run that is due since then take a slot?"""
        if self.most is None:
            return "free"
        taken = self.in_use + sum(other < since for other in self.waiting)
        if taken >= self.most:
            return "full"
        # The deliveries and steps of a line are served in their order: the first stands for those behind it.
        is_older = bool(self.called) and self.called[0] < since
        return "turn" if is_older and taken + len(self.called) >= self.most else "free"

    def take(self) -> None:
        """A run has taken a slot."""
        self.in_use += 1

    def wait(self, since: datetime) -> None:
        """A run waits for one."""
        self.waiting.append(since)
