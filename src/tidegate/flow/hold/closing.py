"""Closing: the time of a window has come. Its events are checked again if the trigger has changed since they were
collected, or one of them has expired; those that no longer stand leave the window. The arguments of its run are those
of the last event.

The delivery that opened the window leads it: what is decided about this one is decided about all (`store/windows.py`,
`follow`). If the leader's own event no longer stands, the next member leads the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tidegate import failpoints
from tidegate.flow.decide import deliver, gate
from tidegate.flow.decide.deliver import Candidate
from tidegate.flow.hold.delivery_check import DeliveryFacts, recheck
from tidegate.model.event import Event
from tidegate.model.ids import DeliveryId, EventId
from tidegate.model.window import Window
from tidegate.store import decisions, deliveries, events, windows
from tidegate.store.db import Connection
from tidegate.store.decisions import NewDecision
from tidegate.store.deliveries import Decided, Taken
from tidegate.store.windows import Left, Member


class Closed(NamedTuple):
    """A window that is to be launched: its last event. `is_handed_on`: the leader is decided on its own."""

    last: Event
    is_handed_on: bool = False


async def close(
    connection: Connection, facts: DeliveryFacts, leaders: Sequence[Taken], known: Mapping[EventId, Event]
) -> dict[DeliveryId, Closed]:
    """Check the windows of due leaders, under the triggers' locks; each by the id of its leader."""
    found = await windows.get(connection, [row.id for row in leaders])
    found = {row.id: found[row.id] for row in leaders if row.id in found and row.window_id == row.id}
    unsure = [row for row in leaders if row.id in found and _is_unsure(facts, row, found[row.id])]
    members: dict[DeliveryId, list[Member]] = {}
    for member in await windows.members(connection, [row.id for row in unsure]):
        members.setdefault(member.window_id, []).append(member)
    wanted = {one.event_id for mine in members.values() for one in mine}
    wanted |= {w.last_event_id for w in found.values() if w.last_event_id is not None}
    read = {**known, **await events.get_many(connection, wanted - known.keys())}
    closed = {}
    for row in leaders:
        if (mine := members.get(row.id)) is not None:
            closed[row.id] = await _check(connection, facts, row, mine, read)
        elif row.id in found:
            last = found[row.id].last_event_id
            closed[row.id] = Closed(read[last] if last is not None else read[row.event_id])
    failpoints.hit("window.closing")
    return closed


def with_arguments(judged: Candidate | Decided, closed: Closed | None) -> Candidate | Decided:
    """The leader as it was judged, with the arguments of the window's last event; of a window that was handed on, the
    leader's decision is its own."""
    if closed is None or not isinstance(judged, Candidate) or judged.error is not None:
        return judged
    last = deliver.render(judged.id, closed.last, judged.trigger, closed.last.envelope())
    return judged._replace(
        parameters=last.parameters, error=last.error, is_too_much_work=last.is_too_much_work,
        unread_budget=last.unread_budget,
    )  # fmt: skip


def _is_unsure(facts: DeliveryFacts, row: Taken, window: Window) -> bool:
    """Whether events of the window may no longer stand, or its last one is not known."""
    compiled = facts.index.get(row.trigger_id)
    if compiled is None:  # the window waits, or is cancelled, as a whole
        return False
    is_edited = compiled.trigger.version != window.trigger_version
    is_expired = window.expires_at is not None and window.expires_at <= facts.now
    return is_edited or is_expired or window.last_event_id is None


async def _check(
    connection: Connection, facts: DeliveryFacts, row: Taken, mine: Sequence[Member], read: Mapping[EventId, Event]
) -> Closed:
    """Take the members out of the window that no longer stand. If the leader is among them, the next one leads."""
    standing: list[Member] = []
    left: list[Left] = []
    is_leader_gone = False
    for member in mine:
        judged = recheck(facts, row._replace(id=member.id, event_id=member.event_id), read[member.event_id])
        if not isinstance(judged, Decided) or judged.reason not in ("filtered", gate.EXPIRED):
            standing.append(member)
        elif member.id == row.id:
            is_leader_gone = True
        else:
            left.append(Left(member.id, judged.status, judged.last_error or "", judged.reason))
    gone = {one.id: one for one in left}
    for changed in await windows.leave(connection, left):
        one = gone[changed.id]
        line = NewDecision(changed.event_id, facts.now, "deliver", one.status, one.text, trigger_id=changed.trigger_id)
        await decisions.insert(connection, [line])
        if one.status == "exhausted":
            await deliveries.dead_letter(connection, [(changed.id, changed.event_id, one.text, {"attempts": 0})])
    if is_leader_gone and standing:
        await windows.hand_on(connection, row.id, standing[0].id, facts.now)
    last = max(standing, key=lambda one: one.ingress_sequence, default=None)
    return Closed(read[last.event_id] if last else read[row.event_id], is_handed_on=is_leader_gone)
