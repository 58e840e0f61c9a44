"""Near misses of waits: an event and a run that waits, which differ in one thing only. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from tidegate.errors import InvalidInput
from tidegate.flow.look.near.triggers import difference
from tidegate.flow.look.why import moment
from tidegate.model.event import Event
from tidegate.model.type_errors import type_of
from tidegate.model.wait import CORRELATION, WaitPattern, is_source, unmet_where, value_in, written_value
from tidegate.model.work_limit import TooMuchWork

# A value in the answer is cut to this many characters.
MAX_SHOWN = 40
# How many combinations of values that are written in another way are looked up.
MAX_VARIANTS = 20
_MISSING = object()


class WaitSide(NamedTuple):
    """What a run waits for: a pattern, the place and time after which events count, the time until which they do (None:
    as long as the run is not finished), and what `where` reads of the run."""

    pattern: WaitPattern
    run: Mapping[str, object]
    after_sequence: int | None = None
    since: datetime | None = None
    until: datetime | None = None


def is_alike_type(wanted: str, given: str) -> bool:
    """Whether an event's type differs from that of a wait by a slip: letter case, a further part, one character."""
    return bool(difference("type", wanted, given))


def why_missed(side: WaitSide, event: Event) -> str | None:
    """In what an event differs from what a run waits for, if in one thing only; None if it does not differ, or in more:
    then it was not meant for the run."""
    pattern = side.pattern
    of_type = difference("type", pattern.type, event.type)
    fields = _fields(pattern.match, event)
    if of_type is None or fields is None:
        return None
    found = [of_type[1]] if of_type else []
    if not is_source(pattern.source, event.source):
        alike = difference("source", pattern.source, event.source)
        found.append(alike[1] if alike else f"its source is {pattern.source}, and the event's is {event.source}")
    found += [fields] if fields else []
    if not fields and pattern.where is not None and (where := _where(side, event)) is not None:
        found.append(where)
    if (late := _time(side, event)) is not None:
        found.append(late)
    return found[0] if len(found) == 1 else None


def of_another(side: WaitSide, event: Event) -> str | None:
    """How the correlation id differs, if that is all that a run waits for and everything else is as it waits for."""
    wanted = side.pattern.match.get(CORRELATION)
    fits = side._replace(pattern=msgspec.structs.replace(side.pattern, match={}))
    if list(side.pattern.match) != [CORRELATION] or wanted == event.correlation_id or not is_met(fits, event):
        return None
    return f"it waits for correlation_id = {_short(wanted)}, and the event has {_short(event.correlation_id)}"


def is_met(side: WaitSide, event: Event) -> bool:
    """Whether an event is one that the run waits for."""
    pattern = side.pattern
    return (
        event.type == pattern.type
        and is_source(pattern.source, event.source)
        and _fields(pattern.match, event) == ""
        and (pattern.where is None or _where(side, event) is None)
        and _time(side, event) is None
    )


def _fields(match: Mapping[str, object], event: Event) -> str | None:
    """How the fields differ that the wait is found by: "" if they do not, None if one has another value, or one is
    missing and another differs, too. Fields that are all written in another way are one difference."""
    told, missing = [], 0
    for path, wanted in sorted(match.items()):
        given = value_in(event, path, _MISSING)
        if given is _MISSING:
            missing += 1
            told.append(f"it waits for {_called(path)} = {_short(wanted)}, and the event has no such field")
        elif written_value(given) == written_value(wanted):
            continue
        elif path == CORRELATION and given == str(event.id):  # as an event has that was published without one
            told.append(f"it waits for {_called(path)} = {_short(wanted)}, and the event was published without one")
        elif (why := _alike(wanted, given)) is not None:
            told.append(why.format(path=_called(path), wanted=_short(wanted), given=_short(given)))
        else:
            return None
    return None if missing and len(told) > 1 else "; ".join(told)


def _alike(wanted: object, given: object) -> str | None:
    """How a value differs that means the same to a person; None: it means another thing."""
    if isinstance(wanted, str) and isinstance(given, str):
        if wanted.strip().casefold() != given.strip().casefold():
            return None
        how = "in upper and lower case" if wanted.strip() != given.strip() else "in white space"
        return "it waits for {path} = {wanted}, and the event has {given}: they differ only " + how
    if type_of(wanted) == type_of(given) or written_value(wanted) not in map(written_value, _variants(given)):
        return None
    return f"{{path}} is {type_of(given)} ({{given}}) in the event, and it waits for {type_of(wanted)} ({{wanted}})"


def _where(side: WaitSide, event: Event) -> str | None:
    assert side.pattern.where is not None
    try:
        return unmet_where(side.pattern.where, event, side.run)
    except (TooMuchWork, InvalidInput) as exc:
        return str(exc)


def _time(side: WaitSide, event: Event) -> str | None:
    if not side.pattern.match and side.pattern.where is None:  # any event of the type would do: none was meant
        return None
    came = f"it came at {moment(event.received_at)}"
    if side.since is not None and event.received_at < side.since:
        return f"{came}, and only events since {moment(side.since)} count: see `since=`"
    if side.after_sequence is not None and event.ingress_sequence < side.after_sequence:
        return f"{came}, before the event that launched the run: only later ones count, unless `since=` says more"
    if side.until is not None and event.received_at >= side.until:
        return f"{came}, and the wait ended at {moment(side.until)}"
    return None


def variants(values: Mapping[str, object]) -> list[dict[str, object]]:
    """The same values written in other ways: one of them changed, and all that can be; at most MAX_VARIANTS."""
    others = {path: list(_variants(value)) for path, value in sorted(values.items())}
    found = [{**values, path: other} for path, some in others.items() for other in some]
    if sum(map(bool, others.values())) > 1:
        found.insert(0, {path: next(iter(others[path]), value) for path, value in values.items()})
    return found[:MAX_VARIANTS]


def _variants(value: object) -> Iterator[object]:
    """A value as other programs would write it: text for a number, or another letter case."""
    match value:
        case bool():
            yield from (str(value).lower(), str(value))
        case int() | float():
            written = [str(value)] + ([str(int(value))] if isinstance(value, float) and value.is_integer() else [])
            yield from written
        case str():
            try:
                number = msgspec.json.decode(value.strip().lower())
            except (msgspec.DecodeError, RecursionError):
                number = None
            if isinstance(number, bool | int | float):
                yield number
            cased = [value.strip(), value.lower(), value.upper(), value.title()]
            yield from (text for text in dict.fromkeys(cased) if text != value)


def fields_of(match: Mapping[str, object]) -> Sequence[str]:
    """The names at the top of the payload that a wait is found by."""
    return sorted({path.split(".")[0] for path in match if path != CORRELATION})


def _called(path: str) -> str:
    return "correlation_id" if path == CORRELATION else f"payload.{path}"


def _short(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 1]}…"
