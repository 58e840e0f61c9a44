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
from tidegate.store import dead_letters, events, runs, triggers
from tidegate.store.children import EndedChild, NextChild
from tidegate.store.db import Connection
from tidegate.store.runs import EndedRun, WokenRun

MAX_ERROR = 1000
# Who resumes a child: this, and the id of its parent.
OF_RUN = "run "


class ChildrenMoved(NamedTuple):
    """The runs that were woken, and the sources of the starts that were stored."""

    woken: Sequence[WokenRun] = ()
    published: Sequence[str] = ()

    @property
    def due(self) -> list[RunId]:
        """Those of the runs that are due at once. The others are held by a worker, and due when it suspends them."""
        return [run.id for run in self.woken if not run.is_held]


async def lock_parents(connection: Connection, parents: Iterable[RunId], ending: Iterable[RunId]) -> None:
    """Lock the parents of runs that are to end, and these; nothing when there are no parents."""
    if parents := set(parents):
        await runs.lock(connection, sorted(parents | set(ending)))


async def start(connection: Connection, writes: Sequence[StepWrite]) -> ChildrenMoved:
    """Start the children of steps that this transaction has written, as many as may run at once."""
    await store.add(connection, writes)
    return await _go_on(connection, {write.id: EndedChild(True) for write in writes if write.children is not None})


async def end(connection: Connection, ends: Sequence[ChildEnd]) -> ChildrenMoved:
    """Children have ended."""
    return await _go_on(connection, await store.finish(connection, ends))


async def end_finished(
    connection: Connection, finished: Sequence[FinishedRun]
) -> tuple[list[EndedRun], Mapping[StepId, EndedChild]]:
    """End runs by their workers, and the children that they are; those ended, for `go_on` the steps of children."""
    if all(run.child_of is None for run in finished):
        return await runs.finish(connection, finished), {}
    return await store.finish_runs(connection, finished, [_told(run.error) for run in finished])


async def go_on(
    connection: Connection,
    finished: Sequence[FinishedRun],
    written: Collection[RunId],
    left: Mapping[StepId, EndedChild],
) -> ChildrenMoved:
    """After `end_finished`: what their parents do next; and the children of those that were cancelled or timed out are
    to be cancelled."""
    ended = [run for run in finished if run.id in written]
    await store.pass_down(connection, {r.id: _stopped(r) for r in ended if r.status == "cancelled" or r.is_timed_out})
    return await _go_on(connection, left)


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


async def _go_on(connection: Connection, moved: Mapping[StepId, EndedChild]) -> ChildrenMoved:
    """Of steps with children: start or resume those that wait for it, write the results of steps whose children have
    all ended, and wake their runs."""
    published: list[str] = []
    if not moved:
        return ChildrenMoved()
    waiting = await store.next_children(connection, [step_id for step_id, one in moved.items() if one.has_next])
    resumed = [child for child in waiting if child.known_run_id is not None]
    lost = [child for child in waiting if child.known_run_id is None and child.trigger_id is None]
    known = {child.workflow: await triggers.get_definition(connection, child.workflow) for child in lost}
    ends = [_unstarted(child, exists=known[child.workflow] is not None) for child in lost]
    found = {**moved, **await store.finish(connection, ends, are_started=False)}
    await store.lose_waiting(connection, {end.child_of.step_id: end.error or "" for end in ends})
    started = [
        (child, _start_event(child, EventId(uuid7())), child.trigger_id)
        for child in waiting
        if child.known_run_id is None and child.trigger_id is not None
    ]
    if started:
        await events.insert(connection, [event for _, event, _ in started])
        await store.begin(connection, [(c, event.id, run_id_of(event.id, trigger)) for c, event, trigger in started])
        published = [event.source for _, event, _ in started]
    adopted = await _resume(connection, resumed) if resumed else {}
    settled = {one.settled for one in [*found.values(), *adopted.values()] if one.settled is not None}
    # A step that has just started a child is not at its end; one that has adopted some goes on with the next.
    rest = {step_id for step_id, one in found.items() if one.settled is None} - adopted.keys()
    rest -= {child.step_id for child in resumed} | {child.step_id for child, _, _ in started}
    woken = settled | await store.settle(connection, rest)
    then = await _go_on(connection, {step_id: one for step_id, one in adopted.items() if one.settled is None})
    return ChildrenMoved([*await runs.wake(connection, sorted(woken)), *then.woken], [*published, *then.published])


async def _resume(connection: Connection, resumed: Sequence[NextChild]) -> Mapping[StepId, EndedChild]:
    """Children of steps that were reset go on with the runs that they had. One that has succeeded since is adopted;
    one that has failed, or was cancelled, resumes in a transaction of its own; the others are under way. What the
    adopted ones leave of their steps."""
    pairs = [(c, c.known_run_id, c.known_event_id) for c in resumed]
    await store.begin(connection, [(c, event, run) for c, run, event in pairs if event is not None and run is not None])
    await dead_letters.schedule_runs(
        connection,
        {run: f"{OF_RUN}{c.run_id}" for c, run, _ in pairs if run and c.known_status in ("failed", "cancelled")},
    )
    return await store.finish(
        connection,
        [_end(c.child_of, run, "succeeded", c.known_output, None) for c, run, _ in pairs
         if run is not None and c.known_status == "succeeded"],
    )  # fmt: skip


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


def _unstarted(child: NextChild, *, exists: bool) -> ChildEnd:
    why = "has no active trigger: it is disabled or deleted" if exists else "does not exist"
    error = f"workflow {child.workflow} {why}; no run was started"
    return ChildEnd(child.child_of, child.run_id, "failed", error=error)


def _end(child_of: ChildOf, run_id: RunId, status: str, output: str | None, error: str | None) -> ChildEnd:
    known: dict[str, ChildStatus] = {"succeeded": "succeeded", "failed": "failed", "cancelled": "cancelled"}
    return ChildEnd(child_of, run_id, known[status], output, _told(error))


def _told(error: str | None) -> str | None:
    """A child's error as its parent is told."""
    return None if error is None else first_line(error)[:MAX_ERROR]


def _stopped(run: FinishedRun) -> str:
    return "its parent was cancelled" if run.status == "cancelled" else f"its parent {first_line(run.error or '')}"
