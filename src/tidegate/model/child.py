"""Children: runs that a run starts in its steps."""

from __future__ import annotations

from typing import Literal

import msgspec

from tidegate.model.ids import EventId, RunId, StepId

ChildStatus = Literal["waiting", "started", "succeeded", "failed", "cancelled"]
# `not_started`: one that waited to be started when its step or its parent ended.
ShownStatus = Literal[ChildStatus, "not_started"]


class ChildOf(msgspec.Struct, frozen=True):
    """Whose child a run is: the parent, its step, and the position among the children of that step."""

    run_id: RunId
    step_id: StepId
    position: int = 0


class ChildBatch(msgspec.Struct, frozen=True):
    """Children that a step starts: their workflow, and the parameters of each (JSON text), from a position on."""

    workflow: str
    first: int
    parameters: list[str]


class ChildEnd(msgspec.Struct, frozen=True):
    """How a child ended; `result` is JSON text."""

    child_of: ChildOf
    run_id: RunId
    status: ChildStatus
    result: str | None = None
    error: str | None = None


class ChildRun(msgspec.Struct, frozen=True, kw_only=True):
    """A child as the API shows it; `run_id` is known once it is started. `is_launched` is whether that run exists: it
    does not while a limit or a pause of its workflow holds the start."""

    step: str
    position: int
    workflow: str
    status: ShownStatus
    run_id: RunId | None
    event_id: EventId | None
    is_launched: bool
    error: str | None
