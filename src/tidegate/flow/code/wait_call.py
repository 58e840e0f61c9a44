"""Calls of `ctx.wait_for`, `wait_any` and `wait_all`, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from tidegate.model.event import Event
from tidegate.model.wait import On, WaitMode


class WaitCall(NamedTuple):
    """A call of `wait_for`, `wait_any` or `wait_all`, as the function made it."""

    method: str
    mode: WaitMode
    patterns: Sequence[On | str]
    timeout: str | int | float
    since: datetime | str | int | float | None
    name: str | None
    is_alone: bool = True


class FirstEvent(NamedTuple):
    """The first event of several patterns: the number of the pattern, from 0, and the event."""

    which: int
    event: Event


def first_event_of(result: Any) -> FirstEvent | None:
    """Which event was the first, from the result of a step."""
    event = None if result is None else event_of(result[1])
    return None if event is None else FirstEvent(result[0], event)


def events_of(result: Any) -> list[Event] | None:
    """The events that a step has as its result."""
    return None if result is None else [event for one in result if (event := event_of(one)) is not None]


def event_of(result: Any) -> Event | None:
    """The event that a step has as its result."""
    return None if result is None else msgspec.convert(result, Event)
