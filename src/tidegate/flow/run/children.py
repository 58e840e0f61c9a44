"""Children: the transaction that ends a child writes its parent's step, starts the next child, and wakes the parent.

The caller has locked the parents (`lock_parents`) before it ends a child: runs are locked in the order of their ids,
and a parent is older than its children.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from tidegate.clock import uuid7
from tidegate.errors import first_line
from tidegate.model.child import ChildEnd, ChildOf, ChildStatus
from tidegate.model.event import OF_END, NewEvent
from tidegate.model.ids import EventId, RunId, StepId
from tidegate.model.run import FinishedRun
from tidegate.model.start import START, run_id_of, source_of_starts
from tidegate.model.step import StepWrite
from tidegate.store import children as store
from tidegate.store import events, runs
from tidegate.store.children import NextChild
from tidegate.store.db import Connection

MAX_ERROR = 1000


class ChildrenMoved(NamedTuple):
    """The runs that were woken, and the sources of the starts that were stored."""

    woken: frozenset[RunId] = frozenset()
    published: Sequence[str] = ()


async def lock_parents(connection: Connection, parents: Iterable[RunId], ending: Iterable[RunId]) -> None:
    """Lock the parents of runs that are to end, and these; nothing when there are no parents."""
    if parents := set(parents):
        await runs.lock(connection, sorted(parents | set(ending)))


async def start(connection: Connection, writes: Sequence[StepWrite]) -> ChildrenMoved:
    """Start the children of steps that this transaction has written, as many as may run at once."""
    await store.add(connection, writes)
    return await _go_on(connection, {write.id: True for write in writes if write.children is not None})


async def end(connection: Connection, ends: Sequence[ChildEnd]) -> ChildrenMoved:
    """Children have ended."""
    return await _go_on(connection, await store.finish(connection, ends))


async def end_finished(
    connection: Connection, finished: Sequence[FinishedRun], written: Collection[RunId]
) -> ChildrenMoved:
    """The end of runs by their workers: of those that are children, and those whose children are to be cancelled."""
    ended = [run for run in finished if run.id in written]
    stopped = {r.id: _stopped(r) for r in ended if r.status == "cancelled" or r.is_timed_out}
    await store.pass_down(connection, stopped)
    return await end(
        connection, [_end(r.child_of, r.id, r.status, r.output, r.error) for r in ended if r.child_of is not None]
    )


async def end_waiting(
    connection: Connection,
    ended: Mapping[RunId, str],
    known: Mapping[RunId, ChildOf],
) -> ChildrenMoved:
    """The end of runs that no worker held: how each ended."""
    found = {run.id: run for run in await runs.list_ended(connection, ended)} if ended else {}
    stopped = {
        r.id: f"its parent was {first_line(r.error or r.status)}" for r in found.values() if r.status == "cancelled"
    }
    await store.pass_down(connection, stopped)
    return await end(
        connection, [_end(known[r.id], r.id, r.status, None, r.error) for r in found.values() if r.id in known]
    )


async def _go_on(connection: Connection, moved: Mapping[StepId, bool]) -> ChildrenMoved:
    """Of steps, each with whether it has children that wait to be started: start these, write the results of those
    whose children have all ended, and wake their runs."""
    published: list[str] = []
    if not moved:
        return ChildrenMoved()
    waiting = await store.next_children(connection, [step_id for step_id, has_next in moved.items() if has_next])
    lost = [child for child in waiting if child.trigger_id is None]
    await store.finish(connection, [_unstarted(child) for child in lost], are_started=False)
    started = [(child, _start_event(child, EventId(uuid7()))) for child in waiting if child.trigger_id is not None]
    if started:
        await events.insert(connection, [event for _, event in started])
        await store.begin(
            connection,
            [(c, event.id, run_id_of(event.id, c.trigger_id)) for c, event in started if c.trigger_id is not None],
        )
        published = [event.source for _, event in started]
    woken = await store.settle(connection, moved.keys())
    return ChildrenMoved(frozenset(await runs.wake(connection, sorted(woken))), published)


def _start_event(child: NextChild, event_id: EventId) -> NewEvent:
    origin: dict[str, object] = {
        "run_id": child.run_id, "event_id": child.event_id, "trigger_id": child.trigger_id, "step_id": child.step_id,
        "position": child.position,
    }  # fmt: skip
    if child.is_of_end:
        origin[OF_END] = True
    return NewEvent(
        id=event_id, external_id=None, type=START, source=source_of_starts(child.workflow), occurred_at=None,
        payload=child.parameters, correlation_id=child.correlation_id, ttl_ms=None, metadata="{}",
        traceparent=child.traceparent, origin=msgspec.json.encode(origin).decode(),
    )  # fmt: skip


def _unstarted(child: NextChild) -> ChildEnd:
    error = f"workflow {child.workflow} does not exist, or its trigger is disabled"
    return ChildEnd(child.child_of, child.run_id, "failed", error=error)


def _end(child_of: ChildOf, run_id: RunId, status: str, output: str | None, error: str | None) -> ChildEnd:
    known: dict[str, ChildStatus] = {"succeeded": "succeeded", "failed": "failed", "cancelled": "cancelled"}
    text = None if error is None else first_line(error)[:MAX_ERROR]
    return ChildEnd(child_of, run_id, known[status], output, text)


def _stopped(run: FinishedRun) -> str:
    return "its parent was cancelled" if run.status == "cancelled" else f"its parent {first_line(run.error or '')}"
