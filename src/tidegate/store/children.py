"""`run_children`: the runs that a run starts in its steps."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidegate.model.child import ChildEnd, ChildOf, ChildRun, ChildStatus
from tidegate.model.ids import EventId, RunId, StepId, TriggerId
from tidegate.model.run import FinishedRun, RunStatus
from tidegate.model.step import StepWrite
from tidegate.store.db import Connection
from tidegate.store.runs import EndedRun, finish_columns
from tidegate.store.sql import load

_sql = load("children")


class NextChild(NamedTuple):
    """A child that may start now, and what its start needs; without a trigger it cannot start. `known_…` is the run
    that resumes instead, if there is one."""

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
    known_run_id: RunId | None = None
    known_event_id: EventId | None = None
    known_status: RunStatus | None = None
    known_output: str | None = None

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


class EndedChild(NamedTuple):
    """What the end of a child leaves of its step: whether other children wait to be started; the step's run, if the
    step has its result."""

    has_next: bool
    settled: RunId | None = None


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
    """The starts of these children are stored in this transaction, or these runs of theirs are to resume."""
    if started:
        columns = zip(*((c.step_id, c.position, event_id, run_id) for c, event_id, run_id in started), strict=True)
        await connection.execute(_sql["begin"], *map(list, columns))


async def finish(
    connection: Connection, ends: Sequence[ChildEnd], *, are_started: bool = True
) -> dict[StepId, EndedChild]:
    """Children have ended; the steps of those that had not before. A step with one child has its result then."""
    if not ends:
        return {}
    step_ids = [e.child_of.step_id for e in ends]
    rows = await connection.fetch(
        _sql["finish"],
        step_ids,
        [e.child_of.position for e in ends],
        [e.run_id if are_started else None for e in ends],
        [e.status for e in ends],
        [e.result for e in ends],
        [e.error for e in ends],
        min(step_ids),
        max(step_ids),
    )
    return {row[0]: EndedChild(*row[1:]) for row in rows}


async def lose_waiting(connection: Connection, errors: Mapping[StepId, str]) -> None:
    """Of steps that go on when a child fails, the children that wait cannot be started, and why."""
    if errors:
        await connection.execute(_sql["lose_waiting"], list(errors), list(errors.values()))


async def finish_runs(
    connection: Connection, finished: Sequence[FinishedRun], errors: Sequence[str | None]
) -> tuple[list[EndedRun], dict[StepId, EndedChild]]:
    """End runs that are still held, some of which are children; their errors as their parents are told. Those ended,
    and the steps of children."""
    step_ids = [f.child_of.step_id if f.child_of else None for f in finished]
    known = [step_id for step_id in step_ids if step_id is not None]
    positions = [f.child_of.position if f.child_of else None for f in finished]
    rows = await connection.fetch(
        _sql["finish_runs"], *finish_columns(finished), step_ids, min(known), max(known), positions, errors
    )
    count = len(EndedRun._fields)
    left = {row[count]: EndedChild(*row[count + 1 :]) for row in rows if row[count] is not None}
    return [EndedRun(*row[:count]) for row in rows], left


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


async def list_stopped(connection: Connection, children: Mapping[RunId, StepId]) -> dict[RunId, str]:
    """Those of the children, of these steps, that are to be cancelled with their parents, and why."""
    rows = await connection.fetch(_sql["list_stopped"], list({*children.values()}), list(children))
    return {row[0]: row[1] for row in rows}


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


async def count_of_run(connection: Connection, run_id: RunId) -> int:
    """How many children the steps of a run have."""
    count: int = await connection.fetchval(_sql["count_of_run"], run_id)
    return count


class UnresumedChild(NamedTuple):
    """How the run of a child has ended that does not resume, and why not."""

    status: ChildStatus
    output: str | None
    error: str | None
    refusal: str | None


async def is_stopping(connection: Connection, run_id: RunId) -> RunId | None:
    """A child of a run that was asked to stop and has not ended yet, if there is one."""
    found: RunId | None = await connection.fetchval(_sql["is_stopping"], run_id)
    return found


async def list_unresumed(connection: Connection, started: Sequence[StartedChild]) -> dict[RunId, UnresumedChild]:
    """Those of the started children whose runs have ended and do not resume."""
    if not started:
        return {}
    rows = await connection.fetch(
        _sql["list_unresumed"], [one.step_id for one in started], [one.position for one in started]
    )
    return {row[0]: UnresumedChild(*row[1:]) for row in rows}


async def list_of_run(connection: Connection, run_id: RunId, limit: int) -> list[ChildRun]:
    """The children of a run, in order."""
    return [msgspec.convert(dict(r), ChildRun) for r in await connection.fetch(_sql["list_of_run"], run_id, limit)]
