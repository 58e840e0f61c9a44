"""The ids of different things are different types, so that a type checker refuses one in place of another.

All are UUIDs when the program runs. A function that takes `uuid.UUID` takes any of them.

The ids of what comes of an event begin with the same 8 bytes as the event's id, which are its time: everything of one
event is stored in the same day, and is found by a range of ids. They are computed from what they belong to, so the
primary key refuses a second delivery for an event and trigger, or a second step of that name in a run.
"""

from __future__ import annotations

import uuid
from typing import NewType

from tidegate.clock import derived_uuid

EventId = NewType("EventId", uuid.UUID)
DefinitionId = NewType("DefinitionId", uuid.UUID)
TriggerId = NewType("TriggerId", uuid.UUID)
DeliveryId = NewType("DeliveryId", uuid.UUID)
RunId = NewType("RunId", uuid.UUID)
StepId = NewType("StepId", uuid.UUID)
WaitId = NewType("WaitId", uuid.UUID)
DeadLetterId = NewType("DeadLetterId", uuid.UUID)
TokenId = NewType("TokenId", uuid.UUID)


def delivery_id(event_id: EventId, trigger_id: TriggerId) -> DeliveryId:
    """The id of the delivery of an event to a trigger."""
    return DeliveryId(derived_uuid(event_id, trigger_id.bytes))


def step_id(run_id: RunId, name: str) -> StepId:
    """The id of a run's step."""
    return StepId(derived_uuid(run_id, name.encode()))


def wait_id(step: StepId, number: int) -> WaitId:
    """The id of one of the patterns that a step waits for."""
    return WaitId(derived_uuid(step, b"wait %d" % number))
