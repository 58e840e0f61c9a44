"""Claims: those that this worker has taken up. None is taken up twice, whoever hands it over."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable

from tidegate.model.run import ClaimedRun

# At least so many of the last claims are remembered, beside those that are held.
RECENT = 10_000


class Claims:
    """A run's generation rises with every claim: one that is not above the last that was taken up here was taken up
    already, or is older. `held` are the claims that are not over."""

    def __init__(self, held: Callable[[], Iterable[ClaimedRun]]) -> None:
        self._held = held
        self._now: dict[uuid.UUID, int] = {}
        self._before: dict[uuid.UUID, int] = {}

    def take(self, run: ClaimedRun) -> bool:
        """Take a claim up; False when it was before."""
        last = self._now.get(run.id) or self._before.get(run.id, 0)
        if run.claim_generation <= last:
            return False
        if len(self._now) >= RECENT:
            self._before, self._now = self._now, {one.id: one.claim_generation for one in self._held()}
        self._now[run.id] = run.claim_generation
        return True
