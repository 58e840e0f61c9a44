"""Match: which triggers does an event fire? Triggers are compiled once and cached until the registry changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from tidegate.errors import InvalidInput
from tidegate.flow.decide.time_slice import TimeSlice
from tidegate.model.budget import BudgetSpec, CompiledBudget
from tidegate.model.event import Event
from tidegate.model.ids import TriggerId
from tidegate.model.trigger import CompiledTrigger
from tidegate.model.trigger_index import TriggerIndex
from tidegate.model.work_limit import TooMuchWork, WorkLeft
from tidegate.store import budgets
from tidegate.store import triggers as store
from tidegate.store.db import Connection
from tidegate.telemetry.logs import logger

_log = logger("match")


class Match(NamedTuple):
    """An event that fires a trigger, with its envelope or the part of it that the trigger needs. `error`: evaluating
    the trigger failed. `is_too_much_work`: it exceeded its work limit, which is the trigger's fault, not the
    source's."""

    event: Event
    envelope: dict[str, Any]
    trigger: CompiledTrigger
    error: str | None = None
    is_too_much_work: bool = False


class Filtered(NamedTuple):
    """A trigger of the event's type and source that does not fire, and the predicate that failed."""

    event: Event
    trigger: CompiledTrigger
    reason: str


class Matcher:
    """The compiled triggers of the registry; only changed triggers are compiled again."""

    def __init__(self) -> None:
        self._version = -1
        self._index = TriggerIndex([])
        self._compiled: dict[TriggerId, tuple[int, list[str], list[CompiledBudget], CompiledTrigger | None]] = {}
        self._budgets: dict[str, CompiledBudget] = {}

    @property
    def known(self) -> tuple[TriggerIndex, int]:
        """The active triggers as of the last `at` call, and the registry version they belong to."""
        return self._index, self._version

    async def at(self, connection: Connection, registry_version: int) -> TriggerIndex:
        """The active triggers of that version; the caller's transaction keeps it current."""
        if registry_version != self._version:
            listed = await store.list_active(connection)
            if any(trigger.budgets for trigger, _ in listed):
                self._budgets = _compile_budgets(await budgets.list_specs(connection), self._budgets)
            found: dict[TriggerId, tuple[int, list[str], list[CompiledBudget], CompiledTrigger | None]] = {}
            time_slice = TimeSlice()
            for trigger, names in listed:
                version, old_names, old_budgets, compiled = self._compiled.get(trigger.id, (0, [], [], None))
                used = [self._budgets[name] for name in trigger.budgets if name in self._budgets]
                if version != trigger.version or old_names != names or old_budgets != used:
                    compiled = _compile(trigger, names, used)
                    if time_slice.is_over:
                        await time_slice.next()
                found[trigger.id] = (trigger.version, names, used, compiled)
            sound = [one for _, _, _, one in found.values() if one is not None]
            invalid = frozenset(i for i, (_, _, _, one) in found.items() if one is None)
            index = TriggerIndex(sound, invalid)
            self._compiled, self._index, self._version = found, index, registry_version
            return index
        return self._index

    def forget(self) -> None:
        """Load the triggers again at the next `at`: a batch failed with the cached ones."""
        self._version = -1


async def match(
    index: TriggerIndex, events: Sequence[Event], time_slice: TimeSlice
) -> tuple[list[Match], list[Filtered]]:
    """Every trigger that each event fires, in order, and those of its type and source that it does not. A start fires
    the trigger that it names, whatever that asks for, unless it is gone. A trigger that
    fails on an event, or exceeds its work limit, is a Match with an error. Raises TooLong."""
    fired: list[Match] = []
    filtered: list[Filtered] = []
    work_left = WorkLeft()
    for number, event in enumerate(events):
        if event.origin is not None and (trigger_id := event.starts) is not None:
            started = index.get(trigger_id)
            if started is not None:
                fired.append(Match(event, event.envelope(), started))
            continue
        candidates = index.candidates(event.type, event.source)
        if not candidates:
            continue
        payload = {"payload": event.payload}
        whole = payload if all(trigger.of_payload for trigger in candidates) else event.envelope()
        for trigger in candidates:
            envelope = payload if trigger.of_payload else whole
            try:
                reason = trigger.reason(envelope, work_left)
            except TooMuchWork as exc:
                fired.append(Match(event, envelope, trigger, str(exc), is_too_much_work=True))
            except Exception as exc:  # noqa: BLE001 - that trigger's failure; the others continue
                fired.append(Match(event, envelope, trigger, f"{type(exc).__name__}: {exc}"[:1000]))
            else:
                if reason is None:
                    fired.append(Match(event, envelope, trigger))
                else:
                    filtered.append(Filtered(event, trigger, reason))
            if not trigger.is_light and time_slice.is_over:
                await time_slice.next()
        if time_slice.is_over:
            await time_slice.next()
            time_slice.check(number + 1, len(events))
    return fired, filtered


def _compile_budgets(specs: Sequence[BudgetSpec], known: dict[str, CompiledBudget]) -> dict[str, CompiledBudget]:
    """The budgets by name; those that have not changed are the same objects as before."""
    found: dict[str, CompiledBudget] = {}
    for spec in specs:
        old = known.get(spec.name)
        try:
            found[spec.name] = old if old is not None and old.spec == spec else CompiledBudget(spec)
        except InvalidInput as exc:  # stored without passing our validation: its rate and slots hold without a key
            _log.error("match.budget_invalid", budget=spec.name, error=exc)
            found[spec.name] = CompiledBudget(msgspec.structs.replace(spec, key=None, cost=None))
    return found


def _compile(trigger: Any, parameter_names: list[str], used: Sequence[CompiledBudget]) -> CompiledTrigger | None:
    try:
        return CompiledTrigger(trigger, parameter_names, used)
    except InvalidInput as exc:  # stored without passing our validation; the others continue
        _log.error("match.trigger_invalid", trigger_id=str(trigger.id), workflow=trigger.workflow, error=exc)
        return None
