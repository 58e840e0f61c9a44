"""Near misses: triggers that almost took an event: switched off, or with almost its type and source. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from typing import Literal, NamedTuple

from tidegate.errors import InvalidInput
from tidegate.flow.look.why import moment
from tidegate.model.event import Event
from tidegate.model.trigger import CompiledTrigger, Trigger
from tidegate.model.work_limit import TooMuchWork
from tidegate.store.circumstances import EarlierVersion, KnownTrigger

# How many near misses are named, the nearest first.
MOST = 5
# One character of a shorter name is no small difference.
MIN_LENGTH = 4

MissKind = Literal["deleted", "disabled", "changed", "created", "case", "pattern", "edit"]
_ORDER: tuple[MissKind, ...] = ("changed", "created", "disabled", "deleted", "case", "pattern", "edit")


class NearMiss(NamedTuple):
    """A trigger that almost took the event, and why it did not."""

    trigger: Trigger
    kind: MissKind
    reason: str


def nearest(misses: list[NearMiss]) -> list[NearMiss]:
    """The nearest of them."""
    return sorted(misses, key=lambda miss: (_ORDER.index(miss.kind), miss.trigger.workflow, miss.trigger.name))[:MOST]


def off_or_alike(event: Event, known: KnownTrigger) -> NearMiss | None:
    """Whether a trigger is switched off that would take the event, or has almost its type and source."""
    trigger = known.trigger
    if known.deleted_at is not None or trigger.status != "active":
        return _off(event, known)
    differences = [
        difference("type", trigger.event_type, event.type),
        difference("source", trigger.event_source, event.source),
    ]
    if None in differences or not any(differences):
        return None
    found = [one for one in differences if one]
    kind = max((one[0] for one in found), key=_ORDER.index)
    return NearMiss(trigger, kind, "; ".join(text for _, text in found))


def changed_since(trigger: Trigger, decided_at: datetime, earlier: EarlierVersion | None) -> NearMiss | None:
    """A trigger that would take the event now, and was not so when the event was decided."""
    if earlier is None:
        made = f" by {trigger.created_by} at {moment(trigger.created_at)}" if trigger.created_at else ""
        return NearMiss(trigger, "created", f"it would match now: it was created{made}, after the event was decided")
    if earlier.version == trigger.version or trigger.updated_at is None or trigger.updated_at <= decided_at:
        return None
    then = earlier.definition
    was = [
        f"{name} was {then.get(name)!r}" if then.get(name) is not None else f"{name} was not set"
        for name in ("status", "event_type", "event_source", "where", "predicates")
        if then.get(name) != _as_stored(getattr(trigger, name))
    ]
    by = f"changed by {trigger.updated_by} at {moment(trigger.updated_at)}, after the event was decided"
    text = f"it would match now: it was {by}" + (f" (in version {earlier.version} {', '.join(was)})" if was else "")
    return NearMiss(trigger, "changed", text)


def _as_stored(value: object) -> object:
    return [] if isinstance(value, list) and not value else value


def _off(event: Event, known: KnownTrigger) -> NearMiss | None:
    trigger = known.trigger
    try:
        if CompiledTrigger(trigger, known.parameter_names).why_not(event, event.envelope()) is not None:
            return None
    except (InvalidInput, TooMuchWork):
        return None
    if known.deleted_at is not None:
        text = f"it would match, and was deleted by {trigger.updated_by} at {moment(known.deleted_at)}"
        return NearMiss(trigger, "deleted", text)
    since = f" since {moment(trigger.updated_at)}" if trigger.updated_at else ""
    return NearMiss(trigger, "disabled", f"it would match, and is disabled by {trigger.updated_by}{since}")


def difference(what: str, pattern: str, value: str) -> tuple[MissKind, str] | tuple[()] | None:
    """How the value differs from a pattern: () if it matches, None if it is too different to be a mistake."""
    if is_taken(pattern, value):
        return ()
    told = f"its {what} is {pattern}, and the event's is {value}"
    if is_taken(pattern.casefold(), value.casefold()):
        return "case", f"{told}: they differ only in upper and lower case"
    if value.startswith(f"{pattern}."):
        return "pattern", f"{told}: {pattern}.* would take it"
    if pattern.endswith("*") and pattern.rstrip("*").rstrip(".").casefold() == value.casefold():
        return "pattern", f"{told}: the pattern needs a further part"
    if is_one_edit_apart(pattern, value):
        return "edit", f"{told}: they differ by one character"
    return None


def is_taken(pattern: str, value: str) -> bool:
    """Whether a pattern, in which * stands for any characters, takes a value."""
    first, *rest = pattern.split("*")
    if not rest:
        return pattern == value
    if not value.startswith(first):
        return False
    place = len(first)
    for part in rest[:-1]:
        found = value.find(part, place)
        if found < 0:
            return False
        place = found + len(part)
    return len(value) - place >= len(rest[-1]) and value.endswith(rest[-1])


def is_one_edit_apart(pattern: str, value: str) -> bool:
    """Whether one character inserted, removed or replaced, or two neighbours swapped, make the pattern take the
    value."""
    fixed = pattern.replace("*", "")
    missing = Counter(fixed) - Counter(value)
    if len(fixed) < MIN_LENGTH or missing.total() > 1 or ("*" not in pattern and abs(len(pattern) - len(value)) > 1):
        return False
    return any(is_taken(pattern, edited) for edited in _edits(value, pattern))


def _edits(value: str, pattern: str) -> Iterator[str]:
    letters = sorted(set(pattern) - {"*"})
    for place in range(len(value) + 1):
        head, tail = value[:place], value[place:]
        if tail:
            yield head + tail[1:]
            yield from (head + letter + tail[1:] for letter in letters)
        if len(tail) > 1:
            yield head + tail[1] + tail[0] + tail[2:]
        yield from (head + letter + tail for letter in letters)
