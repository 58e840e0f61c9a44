"""Match: which triggers does an event fire? Triggers are compiled once and kept until the registry changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headgate.errors import InvalidInput
from headgate.model.event import Event
from headgate.model.trigger import CompiledTrigger, Trigger, TriggerIndex
from headgate.store import triggers as store
from headgate.store.db import Connection
from headgate.telemetry.logs import logger

_log = logger("match")


class Match(NamedTuple):
    """An event that fires a trigger."""

    event: Event
    envelope: dict[str, Any]
    trigger: CompiledTrigger


class Matcher:
    """The compiled triggers of one registry version."""

    def __init__(self) -> None:
        self._version = -1
        self._index = TriggerIndex([])

    async def refresh(self, connection: Connection, registry_version: int) -> None:
        """Compile the triggers anew when the registry has changed since."""
        if registry_version == self._version:
            return
        compiled = []
        for trigger, parameter_names in await store.list_active(connection):
            try:
                compiled.append(CompiledTrigger(trigger, parameter_names))
            except InvalidInput as exc:  # written past our checks; the others go on
                _log.error("match.trigger_invalid", trigger_id=str(trigger.id), workflow=trigger.workflow, error=exc)
        self._index = TriggerIndex(compiled)
        self._version = registry_version

    def match(self, events: Sequence[Event]) -> list[Match]:
        """Every trigger that every event fires, in order."""
        found = []
        for event in events:
            candidates = list(self._index.candidates(event.type, event.source))
            if candidates:
                envelope = event.envelope()
                found += [Match(event, envelope, trigger) for trigger in candidates if trigger.reason(envelope) is None]
        return found

    def explain(self, event: Event) -> list[tuple[Trigger, str | None]]:
        """The triggers of the event's type and source, each with why it does not fire (None: it does)."""
        envelope = event.envelope()
        candidates = self._index.candidates(event.type, event.source)
        return [(compiled.trigger, compiled.reason(envelope)) for compiled in candidates]
