"""Due: the runs that a worker claims as they are due, with what is needed to execute them."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import NamedTuple

from tidegate.model.event import Event
from tidegate.model.run import ClaimedRun, Step
from tidegate.store import events, runs, steps
from tidegate.store.db import Connection, Database


class ReadyRun(NamedTuple):
    """A claimed run, its event, and what is known of its steps."""

    run: ClaimedRun
    event: Event | None
    steps: list[Step]


class DueRuns:
    """What one worker claims."""

    def __init__(self, database: Database, worker: str, lease_ms: int) -> None:
        self._database = database
        self._worker = worker
        self._lease_ms = lease_ms

    async def claim(self, definitions: Sequence[uuid.UUID], limit: int) -> list[ReadyRun]:
        """Runs that are due, suspects aside."""
        async with self._database.transaction() as connection:
            claimed = await runs.claim_due(
                connection, definitions=definitions, limit=limit, worker=self._worker, lease_ms=self._lease_ms
            )
            return await _with_facts(connection, claimed)

    async def claim_suspect(self, definitions: Sequence[uuid.UUID], *, is_counted: bool) -> tuple[ReadyRun, int] | None:
        """One suspect, to be executed alone, and how often in a row its workers have died."""
        async with self._database.transaction() as connection:
            found = await runs.claim_suspect(
                connection, definitions=definitions, worker=self._worker, lease_ms=self._lease_ms, is_counted=is_counted
            )
            return ((await _with_facts(connection, [found.run]))[0], found.crashes) if found else None


async def _with_facts(connection: Connection, claimed: Sequence[ClaimedRun]) -> list[ReadyRun]:
    ids = {run.event_id for run in claimed if run.event_id is not None}
    found = await events.get_many(connection, ids) if ids else {}
    again = [run.id for run in claimed if run.attempts > 1]  # a fresh one has no steps yet
    known = await steps.list_of_runs(connection, again)

    def ready(run: ClaimedRun) -> ReadyRun:
        event = found.get(run.event_id) if run.event_id else None
        return ReadyRun(run, event, [step for step in known if step.workflow_run_id == run.id])

    return [ready(run) for run in claimed]
