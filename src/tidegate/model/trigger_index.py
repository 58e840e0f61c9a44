"""The active triggers, indexed by event type."""

from __future__ import annotations

from tidegate.model.ids import TriggerId
from tidegate.model.trigger import CompiledTrigger

# Maximum number of event types whose triggers are cached: a producer of ever new types must not grow the memory.
MAX_CACHED_TYPES = 10_000


class TriggerIndex:
    """All active triggers, indexed by event type. `invalid` are the ids of those that this version cannot compile."""

    def __init__(self, triggers: list[CompiledTrigger], invalid: frozenset[TriggerId] = frozenset()) -> None:
        self.invalid = invalid
        self._exact: dict[str, list[CompiledTrigger]] = {}
        self._patterns: list[CompiledTrigger] = []
        self._of_type: dict[str, list[CompiledTrigger]] = {}
        self._by_id = {compiled.trigger.id: compiled for compiled in triggers}
        for compiled in triggers:
            event_type = compiled.trigger.event_type
            if "*" in event_type:
                self._patterns.append(compiled)
            else:
                self._exact.setdefault(event_type, []).append(compiled)

    def get(self, trigger_id: TriggerId) -> CompiledTrigger | None:
        """One trigger, if it is active."""
        return self._by_id.get(trigger_id)

    def candidates(self, event_type: str, source: str) -> list[CompiledTrigger]:
        """The triggers whose type and source match the event, in a stable order."""
        return [compiled for compiled in self._taking(event_type) if compiled.takes_source(source)]

    def _taking(self, event_type: str) -> list[CompiledTrigger]:
        found = self._of_type.get(event_type)
        if found is None:
            if len(self._of_type) >= MAX_CACHED_TYPES:
                self._of_type.clear()
            found = [*self._exact.get(event_type, ()), *(c for c in self._patterns if c.takes_type(event_type))]
            self._of_type[event_type] = found
        return found
