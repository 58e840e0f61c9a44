"""Gate: may an event of this source go on now? Every source is open until it has a limit or a pause."""

from __future__ import annotations

from collections.abc import Sequence

from headgate.model.event import Event


def decide(events: Sequence[Event]) -> list[Event]:
    """The events that may go on, in order."""
    return list(events)
