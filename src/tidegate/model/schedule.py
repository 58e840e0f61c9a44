"""A schedule: when a workflow runs by the clock. Pure: the next tick after a time, and the event of a tick."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple, get_args
from zoneinfo import ZoneInfo

import msgspec
from cronsim import CronSim, CronSimError

from tidegate.errors import FieldError, InvalidInput
from tidegate.model.event import NewEvent
from tidegate.model.ids import EventId
from tidegate.model.units import duration_ms

SOURCE = "tidegate.schedule"
TRIGGER = "schedule"
# The fields of the payload of a tick's event.
TICK_FIELDS = ("scheduled_at", "workflow")
MIN_EVERY_MS = 1000
MAX_CRON_LENGTH = 200

# allow: runs overlap; queue: one run at a time, the others wait; skip: a tick during a run launches nothing.
Overlap = Literal["allow", "queue", "skip"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
# Of a cron expression, at most so many missed ticks are counted at once: each takes about 70 µs.
MAX_COUNTED = 2000

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
_US = timedelta(microseconds=1)
_FORM = "expected five fields: minute hour day month weekday, such as 0 3 * * *; seconds are not supported"


class ScheduleSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A period, or a cron expression with a time zone; `overlap` is about ticks while an earlier run is unfinished."""

    every_ms: int | None = None
    cron: str | None = None
    timezone: str | None = None
    overlap: Overlap = "allow"


class Schedule(ScheduleSpec, frozen=True, kw_only=True):
    """The schedule of a workflow; `last_at` is the last published tick."""

    workflow: str
    next_at: datetime
    last_at: datetime | None


def declared(
    every: str | int | float | None, cron: str | None, timezone: str | None, overlap: Overlap | None = None
) -> ScheduleSpec | None:
    """The schedule that a declaration describes, or None. InvalidInput names the invalid field."""
    spec = _declared(every, cron, timezone)
    if overlap is None:
        return spec
    if spec is None:
        raise _wrong("overlap", 'requires every or cron; other workflows have while_running="skip" or "queue"')
    if overlap not in OVERLAPS:
        raise _wrong("overlap", f"must be one of {', '.join(OVERLAPS)}, not {overlap!r:.60}")
    return msgspec.structs.replace(spec, overlap=overlap)


def _declared(every: str | int | float | None, cron: str | None, timezone: str | None) -> ScheduleSpec | None:
    if every is not None and cron is not None:
        raise _wrong("cron", "cannot be combined with every")
    if cron is not None:
        return _cron_spec(cron, "UTC" if timezone is None else timezone)
    if timezone is not None:
        raise _wrong("timezone", "requires cron; periods are counted in UTC")
    if every is None:
        return None
    try:
        every_ms = duration_ms(every)
    except ValueError as exc:
        raise _wrong("every", str(exc)) from exc
    if every_ms < MIN_EVERY_MS:
        raise _wrong("every", f"must be at least 1s, not {every!r}")
    return ScheduleSpec(every_ms=every_ms)


def next_after(spec: ScheduleSpec, after: datetime) -> datetime:
    """The first tick later than `after`, in UTC.

    Periods are counted from 1970-01-01T00:00Z, so a restart does not move them. ValueError if there is none.
    """
    if spec.every_ms is not None:
        period = spec.every_ms * _MS
        return _EPOCH + ((after - _EPOCH) // period + 1) * period
    assert spec.cron is not None and spec.timezone is not None, "a schedule has a period or an expression"
    zone = _zone(spec.timezone)
    try:
        return _next_of_cron(spec.cron, zone, after)
    except CronSimError as exc:
        raise ValueError(str(exc)) from exc


def latest(spec: ScheduleSpec, first: datetime, now: datetime) -> datetime:
    """The last tick from `first` on that is not later than `now`; found by bisection."""
    low, high = first, now
    while (following := next_after(spec, low)) <= now:
        middle = low + (high - low) / 2
        found = next_after(spec, middle)
        if found <= now:
            low = found
        else:
            low, high = max(low, following), middle
    return low


def count_ticks(spec: ScheduleSpec, first: datetime, before: datetime) -> int:
    """How many ticks there are from the tick `first` on and before `before`; of a cron expression at most
    MAX_COUNTED."""
    if spec.every_ms is not None:
        return max(0, -((first - before) // (spec.every_ms * _MS)))
    return sum(1 for _ in islice(ticks(spec, first, before), MAX_COUNTED))


def ticks(spec: ScheduleSpec, since: datetime, before: datetime) -> Iterator[datetime]:
    """The ticks from `since` on and before `before`, in order."""
    at = next_after(spec, since - _US)
    while at < before:
        yield at
        at = next_after(spec, at)


class DueTicks(NamedTuple):
    """What becomes of the ticks that are due: `at` is published (None: none is), the others are missed: because no
    worker ran (`missed`, the last of them `missed_to`), or because of a pause."""

    at: datetime | None
    next_at: datetime
    missed: int = 0
    missed_from: datetime | None = None
    missed_to: datetime | None = None
    in_pause: int = 0


def due_ticks(
    spec: ScheduleSpec, first: datetime, now: datetime, paused_at: datetime | None, paused_until: datetime | None
) -> DueTicks:
    """The ticks from `first` to `now`. Of those outside of a pause the latest is published."""
    if paused_at is not None and (paused_until is None or paused_until > now):
        return DueTicks(None, next_after(spec, now), in_pause=count_ticks(spec, first, now + _US))
    in_pause = 0
    if paused_until is not None and first < paused_until:
        in_pause = count_ticks(spec, first, paused_until)
        first = next_after(spec, paused_until - _US)
        if first > now:
            return DueTicks(None, first, in_pause=in_pause)
    at = latest(spec, first, now)
    following = next_after(spec, at)
    if at == first:
        return DueTicks(at, following, in_pause=in_pause)
    return DueTicks(at, following, count_ticks(spec, first, at), first, latest(spec, first, at - _US), in_pause)


def event_type(workflow: str) -> str:
    """The type of the events that a workflow's schedule publishes."""
    return f"schedule.{workflow}"


def tick_text(tick: datetime) -> str:
    """A tick in RFC 3339, in UTC."""
    text = tick.astimezone(UTC).isoformat(timespec="milliseconds" if tick.microsecond else "seconds")
    return text.replace("+00:00", "Z")


def tick_event(workflow: str, tick: datetime, new_id: uuid.UUID) -> NewEvent:
    """The event of one tick; its producer's id names the tick, so publishing it again is harmless."""
    text = tick_text(tick)
    return NewEvent(
        id=EventId(new_id),
        external_id=f"{workflow}:{text}",
        type=event_type(workflow),
        source=SOURCE,
        occurred_at=tick,
        payload=msgspec.json.encode({"scheduled_at": text, "workflow": workflow}).decode(),
        correlation_id=None,
        ttl_ms=None,
        metadata="{}",
    )


def manual_event(workflow: str, now: datetime, new_id: uuid.UUID, actor: str, call_id: str | None = None) -> NewEvent:
    """The event of a tick that an operator asked for, once for a `call_id`: `scheduled_at` is the time at which they
    did."""
    tick = tick_event(workflow, now, new_id)
    marked = msgspec.json.encode({"manual": True, "by": actor}).decode()
    return msgspec.structs.replace(tick, external_id=f"{workflow}:manual:{call_id or new_id}", metadata=marked)


def _cron_spec(cron: str, timezone: str) -> ScheduleSpec:
    if not isinstance(cron, str) or len(cron) > MAX_CRON_LENGTH or len(cron.split()) != 5:
        raise _wrong("cron", f"{_FORM}, not {cron!r:.220}")
    try:
        _zone(timezone)
    except ValueError as exc:
        raise _wrong("timezone", str(exc)) from exc
    spec = ScheduleSpec(cron=" ".join(cron.split()), timezone=timezone)
    try:
        next_after(spec, _EPOCH)
    except ValueError as exc:
        raise _wrong("cron", f"{exc} in {spec.cron!r}; {_FORM}") from exc
    return spec


@lru_cache(maxsize=100)
def _zone(name: str) -> ZoneInfo:
    try:
        if name == "localtime":  # it would mean a different zone on each machine
            raise ValueError(name)
        return ZoneInfo(name)
    except (LookupError, OSError, ValueError, TypeError) as exc:
        raise ValueError(f"expected an IANA time zone such as Europe/Berlin or UTC, not {name!r:.100}") from exc


def _next_of_cron(cron: str, zone: ZoneInfo, after: datetime) -> datetime:
    """The expression is evaluated in local time.

    If it names hours, each time happens once per day: a time that is skipped when clocks change happens at the end of
    the gap, a repeated time only the first time. If it covers every hour (`*`), ticks also happen in the repeated hour.
    """
    local = after.astimezone(zone)
    wall = local.replace(tzinfo=None, fold=0)
    if len(CronSim(cron, wall).hours) < 24:
        return _first(cron, wall, zone, after, fold=0, is_once=True)
    # During the first pass of a repeated hour, its second pass begins at an earlier local time.
    again = wall - max(timedelta(0), _offset(local.replace(fold=0)) - _offset(local.replace(fold=1)))
    return min(_first(cron, start, zone, after, fold=fold) for fold, start in enumerate((wall, again)))


def _first(
    cron: str, start: datetime, zone: ZoneInfo, after: datetime, *, fold: int, is_once: bool = False
) -> datetime:
    for wall in CronSim(cron, start):
        shown = wall
        while not _exists(shown, zone) and is_once:
            shown += timedelta(minutes=1)
        at = shown.replace(tzinfo=zone, fold=fold).astimezone(UTC)
        if at > after and _exists(shown, zone):
            return at
    raise ValueError("there is no such time in the next 50 years")


def _exists(wall: datetime, zone: ZoneInfo) -> bool:
    """Whether this local time exists."""
    return wall.replace(tzinfo=zone).astimezone(UTC).astimezone(zone).replace(tzinfo=None, fold=0) == wall


def _offset(at: datetime) -> timedelta:
    return at.utcoffset() or timedelta(0)


def _wrong(field: str, message: str) -> InvalidInput:
    return InvalidInput("the schedule is not valid", [FieldError(field, message)])
