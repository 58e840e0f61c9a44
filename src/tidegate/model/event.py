"""An event: what a producer may send, what is stored, and the limits that keep one event from affecting others."""

from __future__ import annotations

import math
import re
import uuid
from datetime import datetime, timedelta
from functools import lru_cache
from typing import Any, Literal

import msgspec

from tidegate.errors import FieldError, InvalidInput
from tidegate.model.child import ChildOf
from tidegate.model.ids import EventId, RunId, StepId, TriggerId
from tidegate.model.priority import checked_priority
from tidegate.model.times import TIME_RULE, parse_time
from tidegate.model.units import duration_ms

FIELDS = frozenset({"id", "type", "source", "occurred_at", "payload", "correlation_id", "ttl_ms", "metadata",
                    "deliver_at", "delay_ms", "priority"})  # fmt: skip
MAX_TTL_MS = 3650 * 86_400_000
MAX_DELAY_MS = 366 * 86_400_000
# Types and sources that begin so are those of Tidegate's own events: nobody else may publish them. No `*` stands for
# such a type.
RESERVED = "tidegate."
# The types of the events that ends of runs publish: `tidegate.run.failed` and so on.
RUN_ENDS = "tidegate.run."
# In an event's `origin`: it comes of the end of a run. The ends of what it launches are not published again.
OF_END = "of_end"

# All characters of a URI (CloudEvents sources are URIs) except `*`, the wildcard of trigger patterns.
_NAME = re.compile(r"[A-Za-z0-9._~:/?#@&=+%-]{1,200}", re.ASCII)
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9._~:/?#@&=+%-]", re.ASCII)
_NAME_RULE = "1 to 200 letters, digits or . _ ~ : / ? # @ & = + % -"
# Control characters, and unpaired surrogates, which have no UTF-8 encoding.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
# Maps digits to 0 and all else to a space: finds long numbers five times as fast as a regular expression.
_DIGITS = bytes(ord("0") if chr(byte).isdigit() and byte < 128 else ord(" ") for byte in range(256))
_LONG_NUMBER = b"0" * 19
# W3C trace context: ids of zeros and the version ff are invalid.
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}", re.ASCII)


class EventLimits(msgspec.Struct, frozen=True, kw_only=True):
    """How large, how deeply nested and how far in the past or future an event may be."""

    max_payload_bytes: int = 256 * 1024
    max_metadata_bytes: int = 16 * 1024
    max_depth: int = 64
    max_keys: int = 10_000
    max_past: timedelta = timedelta(days=3650)
    max_future: timedelta = timedelta(days=1)
    max_delay: timedelta = timedelta(milliseconds=MAX_DELAY_MS)


class NewEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A validated event that is not stored yet; `payload`, `metadata` and `origin` are JSON text. An event for a later
    time has `deliver_at`, or `delay_ms` from the time at which it is stored."""

    id: EventId
    external_id: str | None
    type: str
    source: str
    occurred_at: datetime | None
    payload: str
    correlation_id: str | None
    ttl_ms: int | None
    metadata: str
    traceparent: str | None = None
    origin: str | None = None
    deliver_at: datetime | None = None
    delay_ms: int | None = None
    priority: int | None = None

    @property
    def is_later(self) -> bool:
        """Whether it was published with a time of its own; the database decides whether that has passed."""
        return self.deliver_at is not None or self.delay_ms is not None


class Accepted(msgspec.Struct, frozen=True):
    """The answer to one event: `accepted`, or `duplicate` with the id of the first."""

    id: EventId
    external_id: str | None
    status: Literal["accepted", "duplicate"]


class Event(msgspec.Struct, frozen=True):
    """A stored event, as the API, predicates and templates see it. SQL selects the columns in this order.

    `origin` says where it comes from, unless from a producer: `run_id` is the run that published it, `event_id` the
    event that launched that run; `trigger_id` is the trigger that a start is for.
    """

    id: EventId
    external_id: str | None
    type: str
    source: str
    occurred_at: datetime
    received_at: datetime
    ingress_sequence: int
    payload: dict[str, Any]
    correlation_id: str
    ttl_ms: int | None
    metadata: dict[str, Any]
    traceparent: str | None = None
    replayed_at: datetime | None = None
    deliver_at: datetime | None = None
    origin: dict[str, str | int | None] | None = None
    priority: int | None = None

    @property
    def starts(self) -> TriggerId | None:
        """The trigger that it is for, if it is a start: it fires this one, and no other."""
        found = self.origin.get("trigger_id") if self.origin is not None else None
        return None if found is None else TriggerId(uuid.UUID(str(found)))

    @property
    def child_of(self) -> ChildOf | None:
        """Whose child the run is that it launches."""
        found = self.origin or {}
        if "step_id" not in found:
            return None
        run_id, step_id = (uuid.UUID(str(found[name])) for name in ("run_id", "step_id"))
        return ChildOf(RunId(run_id), StepId(step_id), int(str(found["position"])))

    @property
    def counted_from(self) -> datetime:
        """The start of its age and of its time to live: when it was received, its `deliver_at` if that was later, or
        when it was last replayed."""
        return self.replayed_at or self.arrived_at

    @property
    def arrived_at(self) -> datetime:
        """When it was received, or its `deliver_at` if that was later."""
        return self.received_at if self.deliver_at is None else max(self.received_at, self.deliver_at)

    def envelope(self) -> dict[str, Any]:
        """The event as JSON values: the value of `$` in paths and of `event` in expressions and templates."""
        received_at = self.received_at.isoformat()
        return {
            "id": str(self.id),
            "external_id": self.external_id,
            "type": self.type,
            "source": self.source,
            "occurred_at": received_at if self.occurred_at == self.received_at else self.occurred_at.isoformat(),
            "received_at": received_at,
            "ingress_sequence": self.ingress_sequence,
            "payload": self.payload,
            "correlation_id": self.correlation_id,
            "ttl_ms": self.ttl_ms,
            "metadata": self.metadata,
        }


def check_event(
    raw: object,
    *,
    new_id: uuid.UUID,
    now: datetime,
    limits: EventLimits,
    errors: list[FieldError],
    prefix: str = "",
    traceparent: str | None = None,
    correlation_id: str | None = None,
    is_sample: bool = False,
) -> NewEvent | None:
    """The event in `raw` (decoded JSON), or None; then `errors` lists what is invalid, by field.

    `correlation_id` is the request's; the event's own takes precedence. `is_sample`: it is not stored, and may look
    like one of Tidegate's own.
    """
    if not isinstance(raw, dict):
        errors.append(FieldError(prefix.rstrip(".") or "event", f"must be an object, not {_kind(raw)}"))
        return None
    found = len(errors)
    if not raw.keys() <= FIELDS:
        unknown = f"unknown field; known fields: {', '.join(sorted(FIELDS))}"
        errors.extend(FieldError(f"{prefix}{_shown(name)}", unknown) for name in sorted(raw.keys() - FIELDS)[:20])
    event_type = _name(raw.get("type"), prefix, "type", errors)
    source = _name(raw.get("source"), prefix, "source", errors)
    for field, name in (("type", event_type), ("source", source)):
        if name.startswith(RESERVED) and not is_sample:
            errors.append(FieldError(f"{prefix}{field}", f"must not begin with {RESERVED}, which is reserved"))
    external_id = _text(raw.get("id"), prefix, "id", errors)
    correlation_id = _text(raw.get("correlation_id"), prefix, "correlation_id", errors) or correlation_id
    occurred_at = _time(raw.get("occurred_at"), prefix, "occurred_at", now, limits, errors)
    is_later = "deliver_at" in raw or "delay_ms" in raw
    deliver_at, delay_ms = _later(raw, prefix, now, limits, errors) if is_later else (None, None)
    priority = checked_priority(raw["priority"], f"{prefix}priority", errors) if "priority" in raw else None
    ttl_ms = raw.get("ttl_ms")
    if ttl_ms is not None and (type(ttl_ms) is not int or not 1 <= ttl_ms <= MAX_TTL_MS):
        given = ttl_ms if type(ttl_ms) is int and abs(ttl_ms) < 2**63 else _kind(ttl_ms)
        errors.append(FieldError(f"{prefix}ttl_ms", f"must be a whole number from 1 to {MAX_TTL_MS}, not {given}"))
    payload = _object(raw.get("payload"), prefix, "payload", limits.max_payload_bytes, limits, errors)
    metadata = _object(raw.get("metadata"), prefix, "metadata", limits.max_metadata_bytes, limits, errors)
    if len(errors) > found:
        return None
    return NewEvent(
        id=EventId(new_id),
        external_id=external_id,
        type=event_type,
        source=source,
        occurred_at=occurred_at,
        payload=payload,
        correlation_id=correlation_id,
        ttl_ms=ttl_ms,
        metadata=metadata,
        traceparent=traceparent,
        deliver_at=deliver_at,
        delay_ms=delay_ms,
        priority=priority,
    )


def as_delay_ms(delay: str | int | float) -> int:
    """Milliseconds in a `delay` as users write it. InvalidInput names the field."""
    try:
        return duration_ms(delay)
    except ValueError as exc:
        raise InvalidInput("the event cannot be published", [FieldError("delay", str(exc))]) from exc


def source_of(workflow: str) -> str:
    """The source of the events that a workflow's runs publish, unless they name another."""
    return f"workflow.{workflow}"


def trace_id(traceparent: str | None) -> str | None:
    """The trace id in a W3C `traceparent`, or None when it is absent or malformed."""
    found = _TRACEPARENT.fullmatch(traceparent) if traceparent else None
    return found[1] if found else None


def is_text_id(value: str) -> bool:
    """Whether `value` is a valid producer's id or correlation id."""
    return 0 < len(value) <= 200 and not value.isspace() and not _CONTROL.search(value)


def is_name(value: str) -> bool:
    """Whether `value` is a valid event type or source."""
    return len(value) <= 200 and _is_name(value)


@lru_cache(1000)
def _is_name(value: str) -> bool:
    return _NAME.fullmatch(value) is not None


def _name(value: object, prefix: str, field: str, errors: list[FieldError]) -> str:
    if isinstance(value, str) and is_name(value):
        return value
    errors.append(FieldError(prefix + field, f"{_wrong_name(value)}; expected {_NAME_RULE}"))
    return ""


def _wrong_name(value: object) -> str:
    if not isinstance(value, str):
        return "is required" if value is None else f"must be text, not {_kind(value)}"
    if not value:
        return "is empty"
    other = _NOT_IN_NAME.search(value)
    return f"contains {other[0]!r}" if other else f"has {len(value)} characters"


def _text(value: object, prefix: str, field: str, errors: list[FieldError]) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not is_text_id(value):
        errors.append(FieldError(prefix + field, "must be text of 1 to 200 characters without control characters"))
        return None
    return value


def _time(
    value: object, prefix: str, field: str, now: datetime, limits: EventLimits, errors: list[FieldError]
) -> datetime | None:
    if value is None:
        return None
    field = prefix + field
    try:
        if not isinstance(value, str):
            raise ValueError(f"{TIME_RULE}, not {_kind(value)}")
        parsed = parse_time(value)
        if "T" not in value.upper():
            raise ValueError(f"{TIME_RULE}, not {value!r}")
    except ValueError as exc:
        errors.append(FieldError(field, str(exc)))
        return None
    try:
        inside = now - limits.max_past <= parsed <= now + limits.max_future
    except OverflowError:
        inside = False
    if not inside:
        past, future = limits.max_past.days, limits.max_future.days
        errors.append(FieldError(field, f"must lie within the last {past} days and at most {future} day(s) ahead"))
        return None
    return parsed


def _later(
    raw: dict[str, object], prefix: str, now: datetime, limits: EventLimits, errors: list[FieldError]
) -> tuple[datetime | None, int | None]:
    """The time for which the event is published: `deliver_at`, or `delay_ms` from now."""
    delay_ms = raw.get("delay_ms")
    later = msgspec.structs.replace(limits, max_future=limits.max_delay)
    deliver_at = _time(raw.get("deliver_at"), prefix, "deliver_at", now, later, errors)
    if delay_ms is None:
        return deliver_at, None
    most = limits.max_delay // timedelta(milliseconds=1)
    if isinstance(delay_ms, bool) or not isinstance(delay_ms, int) or not 0 <= delay_ms <= most:
        given = delay_ms if type(delay_ms) is int and abs(delay_ms) < 2**63 else _kind(delay_ms)
        errors.append(FieldError(f"{prefix}delay_ms", f"must be a whole number from 0 to {most}, not {given}"))
        return deliver_at, None
    if raw.get("deliver_at") is not None:
        errors.append(FieldError(f"{prefix}delay_ms", "cannot be combined with deliver_at: give one of them"))
    return deliver_at, delay_ms if isinstance(delay_ms, int) else None


def _object(
    value: object, prefix: str, field: str, max_bytes: int, limits: EventLimits, errors: list[FieldError]
) -> str:
    if value is None:
        return "{}"
    field = prefix + field
    if not isinstance(value, dict):
        errors.append(FieldError(field, f"must be an object, not {_kind(value)}"))
        return "{}"
    try:
        text = msgspec.json.encode(value)
    except RecursionError:
        errors.append(FieldError(field, f"is nested deeper than {limits.max_depth} levels"))
        return "{}"
    except UnicodeEncodeError:
        errors.append(FieldError(field, "contains an unpaired surrogate, which is not valid text"))
        return "{}"
    if len(text) > max_bytes:
        errors.append(FieldError(field, f"is {len(text)} bytes; at most {max_bytes} are allowed", too_large=True))
        return "{}"
    if _suspicious(text, limits):
        problem = _walk(value, field, limits)
        if problem:
            errors.append(problem)
            return "{}"
    return text.decode()


def _suspicious(text: bytes, limits: EventLimits) -> bool:
    """A fast check without false negatives; only what it flags is checked value by value."""
    return (
        b"\\u0000" in text
        or b"null" in text  # NaN and infinities are encoded as null
        or text.count(b"{") + text.count(b"[") > limits.max_depth
        or text.count(b":") > limits.max_keys
        or _LONG_NUMBER in text.translate(_DIGITS)
    )


def _walk(root: object, field: str, limits: EventLimits) -> FieldError | None:
    stack: list[tuple[object, str, int]] = [(root, field, 1)]
    keys = 0
    while stack:
        value, path, depth = stack.pop()
        if isinstance(value, dict | list) and depth > limits.max_depth:
            return FieldError(field, f"is nested deeper than {limits.max_depth} levels")
        if isinstance(value, dict):
            keys += len(value)
            if keys > limits.max_keys:
                return FieldError(field, f"has more than {limits.max_keys} keys")
            for key, inner in value.items():
                if "\x00" in key:
                    return FieldError(path, "has a key with the character U+0000, which cannot be stored")
                stack.append((inner, f"{path}.{_shown(key)}", depth + 1))
        elif isinstance(value, list):
            stack.extend((inner, f"{path}[{i}]", depth + 1) for i, inner in enumerate(value))
        elif isinstance(value, str):
            if "\x00" in value:
                return FieldError(path, "contains the character U+0000, which cannot be stored")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            return FieldError(path, "is an integer beyond 64 bits; send it as text")
        elif isinstance(value, float) and not math.isfinite(value):
            return FieldError(path, "is not a finite number")
    return None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "an array", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _shown(name: str) -> str:
    """A field name sent by a client, escaped and shortened for a message."""
    return _CONTROL.sub("?", name[:60])
