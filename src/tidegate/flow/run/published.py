"""Published: store the events that runs publish, in the transaction that stores the steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from tidegate.errors import BacklogFull
from tidegate.flow.accept import backlog
from tidegate.model.event import Accepted, NewEvent
from tidegate.model.ids import EventId, StepId
from tidegate.model.step import RunOutcome, StepWrite
from tidegate.store import events
from tidegate.store.db import Connection, TransientConflict
from tidegate.store.events import Resolved


class SourceFull(Exception):
    """A source takes no more events for now: the outcomes are not written, and the run is told."""

    def __init__(self, refusal: BacklogFull) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Replaced(Exception):
    """Events repeat an id of their source: their steps have other outcomes, to be written in a new transaction."""

    def __init__(self, writes: Mapping[StepId, StepWrite]) -> None:
        super().__init__(f"{len(writes)} events repeat an id")
        self.writes = writes


async def store(connection: Connection, writes: Sequence[StepWrite]) -> list[str]:
    """Store the events of steps that this transaction has written; the sources of those that are new.

    Raises Replaced when an event's own id was used before: the step then has the first event as its result, or has
    failed, if the bodies differ. Raises SourceFull when a source refuses what is over its cap.
    """
    given = {write.event.id: (write, write.event) for write in writes if write.event is not None}
    if not given:
        return []
    new = await _insert(connection, [write for write, _ in given.values()])
    rest = [event for _, event in given.values() if event.id not in new]
    resolved = await events.resolve(connection, rest) if rest else {}
    replaced: dict[StepId, StepWrite] = {}
    for event in rest:
        write, first = given[event.id][0], resolved.get(event.id)
        if first is None:
            raise TransientConflict("an event with the same id is changing right now")
        if first.id != event.id:  # otherwise it was stored before, by a commit whose answer was lost
            replaced[write.id] = _instead(write, event, first)
    if replaced:
        raise Replaced(replaced)
    return [given[event_id][1].source for event_id in new]


async def _insert(connection: Connection, writes: Sequence[StepWrite]) -> set[EventId]:
    published = [write.event for write in writes if write.event is not None]
    capped = {write.event.source for write in writes if write.has_cap and write.event is not None}
    if not capped:
        return await events.insert(connection, published)
    try:
        new, applied = await backlog.insert(connection, capped, published)
    except BacklogFull as exc:
        raise SourceFull(exc) from exc
    backlog.report(applied)
    return new


def with_replaced(items: Sequence[RunOutcome], replaced: Mapping[StepId, StepWrite]) -> list[RunOutcome]:
    """The outcomes with other writes for some steps."""
    return [RunOutcome([replaced.get(w.id, w) for w in item.steps], item.end, item.notes) for item in items]


def _instead(write: StepWrite, event: NewEvent, first: Resolved) -> StepWrite:
    if first.same_body:
        result = msgspec.json.encode(Accepted(first.id, event.external_id, "duplicate")).decode()
        return msgspec.structs.replace(write, event=None, result=result)
    error = f"id: {event.external_id!r} was published before by {event.source}, with another body, as event {first.id}"
    return msgspec.structs.replace(
        write, event=None, result=None, status="failed", retry_state="exhausted", error=error,
        retry_metadata={"reason": "failed"},
    )  # fmt: skip
