"""The ids of different things are different types, so that a type checker refuses one in place of another.

All are UUIDs when the program runs. A function that takes `uuid.UUID` takes any of them.
"""

from __future__ import annotations

import uuid
from typing import NewType

EventId = NewType("EventId", uuid.UUID)
DefinitionId = NewType("DefinitionId", uuid.UUID)
TriggerId = NewType("TriggerId", uuid.UUID)
DeliveryId = NewType("DeliveryId", uuid.UUID)
RunId = NewType("RunId", uuid.UUID)
StepId = NewType("StepId", uuid.UUID)
DeadLetterId = NewType("DeadLetterId", uuid.UUID)
TokenId = NewType("TokenId", uuid.UUID)
