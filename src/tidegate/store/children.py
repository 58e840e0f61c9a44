"""`run_children`: the runs that a run starts in its steps."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidegate.model.child import ChildEnd, ChildOf, ChildRun
from tidegate.model.ids import EventId, RunId, StepId, TriggerId
from tidegate.model.step import StepWrite
from tidegate.store.db import Connection
from tidegate.store.sql import load

_sql = load("children")


class NextChild(NamedTuple):
    """A child that may start now, and what its start needs; without a trigger it cannot start."""

    step_id: StepId
    position: int
    run_id: RunId
    workflow: str
    parameters: str
    trigger_id: TriggerId | None
    event_id: EventId | None
    correlation_id: str | None
    traceparent: str | None
    is_of_end: bool

    @property
    def child_of(self) -> ChildOf:
        return ChildOf(self.run_id, self.step_id, self.position)


class StartedChild(NamedTuple):
    """A child that has been started and has not ended."""

    parent_run_id: RunId
    step_id: StepId
    position: int
    event_id: EventId
    run_id: RunId

    @property
    def child_of(self) -> ChildOf:
        return ChildOf(self.parent_run_id, self.step_id, self.position)


class PassedDown(NamedTuple):
    """A run that was cancelled or timed out, why, and a child of it that is to be cancelled (None: none is left)."""

    run_id: RunId
    reason: str
    child: StartedChild | None


async def add(connection: Connection, writes: Sequence[StepWrite]) -> None:
    """Add the children of steps that this transaction has written."""
    rows = [
        (write.id, write.children.first + n, write.workflow_run_id, write.children.workflow, parameters)
        for write in writes
        if write.children is not None
        for n, parameters in enumerate(write.children.parameters)
    ]
    if rows:
        await connection.execute(_sql["add"], *map(list, zip(*rows, strict=True)))


async def next_children(connection: Connection, step_ids: Collection[StepId]) -> list[NextChild]:
    """The children that may start now; the caller has locked their parents."""
    return [NextChild(*row) for row in await connection.fetch(_sql["next"], list(step_ids))] if step_ids else []


async def begin(connection: Connection, started: Sequence[tuple[NextChild, EventId, RunId]]) -> None:
    """The starts of these children are stored in this transaction."""
    if started:
        columns = zip(*((c.step_id, c.position, event_id, run_id) for c, event_id, run_id in started), strict=True)
        await connection.execute(_sql["begin"], *map(list, columns))


async def finish(connection: Connection, ends: Sequence[ChildEnd], *, are_started: bool = True) -> dict[StepId, bool]:
    """Children have ended; the steps of those that had not before, each with whether it has others that wait to be
    started."""
    if not ends:
        return {}
    rows = await connection.fetch(
        _sql["finish"],
        [e.child_of.step_id for e in ends],
        [e.child_of.position for e in ends],
        [e.run_id if are_started else None for e in ends],
        [e.status for e in ends],
        [e.result for e in ends],
        [e.error for e in ends],
    )
    return {row[0]: row[1] for row in rows}


async def settle(connection: Connection, step_ids: Collection[StepId]) -> set[RunId]:
    """Write the results of steps whose children have ended; their runs."""
    if not step_ids:
        return set()
    rows = await connection.fetch(_sql["settle"], list(step_ids), min(step_ids), max(step_ids))
    return {row[0] for row in rows}


async def of_runs(connection: Connection, run_ids: Collection[RunId]) -> dict[RunId, ChildOf]:
    """Whose children the runs are, of those that are."""
    if not run_ids:
        return {}
    return {row[0]: ChildOf(row[1], row[2], row[3]) for row in await connection.fetch(_sql["of_runs"], list(run_ids))}


async def pass_down(connection: Connection, reasons: Mapping[RunId, str]) -> None:
    """Note that the unfinished children of these runs are to be cancelled."""
    if reasons:
        await connection.execute(_sql["pass_down"], list(reasons), list(reasons.values()))


async def list_passed_down(connection: Connection, parents: int, of_each: int) -> list[PassedDown]:
    """Children that are to be cancelled with their parents."""
    rows = await connection.fetch(_sql["list_passed_down"], parents, of_each)
    return [PassedDown(r[0], r[1], None if r[2] is None else StartedChild(r[0], r[2], r[3], r[4], r[5])) for r in rows]


async def is_passed_down(connection: Connection, run_id: RunId) -> bool:
    """Whether the children of a run, which this transaction has locked, are still to be cancelled."""
    found: bool = await connection.fetchval(_sql["is_passed_down"], run_id)
    return found


async def passed_down(connection: Connection, run_ids: Collection[RunId]) -> None:
    """Those of these runs with which nothing is left to be cancelled are done."""
    await connection.execute(_sql["passed_down"], list(run_ids))


async def list_started(connection: Connection, after: tuple[uuid.UUID, int], limit: int) -> list[StartedChild]:
    """Children that have been started and have not ended, after a step and position."""
    return [StartedChild(*row) for row in await connection.fetch(_sql["list_started"], *after, limit)]


async def list_of_run(connection: Connection, run_id: RunId, limit: int) -> list[ChildRun]:
    """The children of a run, in order."""
    return [msgspec.convert(dict(r), ChildRun) for r in await connection.fetch(_sql["list_of_run"], run_id, limit)]
