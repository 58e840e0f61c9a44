"""Fair claims: which due runs a worker claims while more are due than it has room for.

Workflows take turns, and within a workflow its concurrency keys (`model/shares.py`). While one workflow without keys is
due, or no more may be due than there is room for, the longest due are claimed as they come, in one statement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tidegate.clock import monotonic
from tidegate.model.ids import DefinitionId, RunId
from tidegate.model.run import ClaimedRun
from tidegate.model.shares import Line, Turns
from tidegate.model.worker_share import ReservedSlots
from tidegate.store import run_lines, runs
from tidegate.store.db import Connection
from tidegate.store.run_lines import DueRun, DueWorkflow

# Of the workflows that are due at most MAX_WORKFLOWS take part in one claim, the longest due; the keys of a workflow
# take turns among its KEY_WINDOW longest due runs.
MAX_WORKFLOWS, KEY_WINDOW = 200, 500
# When one workflow without keys was due alone, whether another is due is asked again after this time.
ALONE_SECONDS = 0.02
# With room for more runs than this, they are short ones that are claimed ahead.
SHORT_ROOM = 50


class ClaimedDue(NamedTuple):
    """Runs that were claimed, and whether more may be due."""

    runs: list[ClaimedRun]
    has_more: bool


class FairClaims:
    """Claims due runs for one worker. `held` returns the runs that it holds; `slots` are given if some are reserved."""

    def __init__(
        self,
        worker: str,
        lease_ms: int,
        held: Callable[[], Sequence[ClaimedRun]],
        slots: ReservedSlots | None = None,
    ) -> None:
        self._slots = slots
        self._worker = worker
        self._lease_ms = lease_ms
        self._held = held
        self._alone_until = 0.0
        self._turns = Turns()
        self._key_turns: dict[DefinitionId, Turns] = {}
        self.weights: Mapping[str, int] = {}  # of the workflows that took part in the last claim

    async def claim(
        self, connection: Connection, definitions: Sequence[DefinitionId], room: int, *, is_behind: bool
    ) -> ClaimedDue:
        """Claim due runs of the workflows, suspects aside. `is_behind`: more may be due than there is room for."""
        claimed = await self._fairly(connection, definitions, room) if is_behind or self._slots else None
        if claimed is not None:
            return claimed
        found = await runs.claim_due(
            connection, definitions=definitions, limit=room, worker=self._worker, lease_ms=self._lease_ms
        )
        return ClaimedDue(found, len(found) == room)

    async def _fairly(
        self, connection: Connection, definitions: Sequence[DefinitionId], room: int
    ) -> ClaimedDue | None:
        """None when nobody is there to share with."""
        if monotonic() < self._alone_until:
            return None
        worker, lease_ms = self._worker, self._lease_ms
        due = await run_lines.due_workflows(connection, definitions, MAX_WORKFLOWS, worker=worker, lease_ms=lease_ms)
        if self._slots is None and (not due or (len(due) == 1 and not due[0].has_keys)):
            # While short runs are claimed in batches, the question would take a part of each.
            self._alone_until = monotonic() + ALONE_SECONDS * (room > SHORT_ROOM)
            return None
        most = {one.id: max(room, KEY_WINDOW) if one.has_keys else room for one in due}
        found = await run_lines.list_due(connection, most, worker=worker, lease_ms=lease_ms)
        chosen = self._choose(due, found, room)
        claimed = await run_lines.claim(connection, chosen, definitions=definitions, worker=worker, lease_ms=lease_ms)
        return ClaimedDue(claimed, len(found) > len(claimed) > 0 or len(claimed) == room)

    def _choose(self, due: Sequence[DueWorkflow], found: Sequence[DueRun], room: int) -> list[RunId]:
        held = self._held()
        by_workflow: dict[DefinitionId, list[DueRun]] = {}
        for run in found:
            by_workflow.setdefault(run.definition, []).append(run)
        busy = Counter(mine.workflow for mine in held)
        lines = [Line(one.slug, len(by_workflow.get(one.id, ())), busy[one.slug], one.weight) for one in due]
        self.weights = {one.slug: one.weight for one in due}
        given = self._give(room, lines, busy)
        self._key_turns = {one.id: self._key_turns.get(one.id) or Turns() for one in due if one.has_keys}
        chosen: list[RunId] = []
        for one in due:
            runs_of_it, count = by_workflow.get(one.id, []), given.get(one.slug, 0)
            if count and one.has_keys:
                keys = Counter(mine.concurrency_key or "" for mine in held if mine.workflow == one.slug)
                chosen += by_key(self._key_turns[one.id], runs_of_it, keys, count)
            else:
                chosen += [due_run.id for due_run in runs_of_it[:count]]
        return chosen

    def _give(self, room: int, lines: Sequence[Line], busy: Mapping[str, int]) -> dict[str, int]:
        """The free slots by workflow: those that are reserved first, and the others in turns."""
        if self._slots is None:
            return self._turns.give(room, lines)
        own = {line.name: min(line.waiting, self._slots.own_free(line.name, busy)) for line in lines}
        others = [
            line._replace(waiting=line.waiting - own[line.name], held=line.held + own[line.name]) for line in lines
        ]
        shared = self._turns.give(self._slots.shared_free(busy), others)
        return {name: count + shared.get(name, 0) for name, count in own.items()}


def by_key(turns: Turns, due: Sequence[DueRun], held: Mapping[str, int], count: int) -> list[RunId]:
    """So many of the due runs of one workflow: its keys take turns, each with its longest due."""
    by_key: dict[str, list[RunId]] = {}
    for run in due:
        by_key.setdefault(run.concurrency_key or "", []).append(run.id)
    given = turns.give(count, [Line(key, len(ids), held.get(key, 0)) for key, ids in by_key.items()])
    return [run_id for key, most in given.items() for run_id in by_key[key][:most]]
