"""A dry run of a trigger: what it would do with an event, check by check. Nothing is stored or launched."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from tidegate.errors import FieldError, InvalidInput
from tidegate.model.event import Event, EventLimits, check_event
from tidegate.model.ids import TriggerId
from tidegate.model.predicate import Operator
from tidegate.model.trigger import CompiledTrigger, Trigger
from tidegate.model.trigger_terms import TemplateError
from tidegate.model.work_limit import TooMuchWork

T = TypeVar("T")

# The limit of a real delivery.
MAX_PARAMETER_BYTES = 256 * 1024


class PatternCheck(msgspec.Struct, frozen=True):
    """Whether the event's type or source matches the trigger."""

    pattern: str
    value: str
    holds: bool
    reason: str | None


class PredicateCheck(msgspec.Struct, frozen=True):
    """The result of one predicate; `reason` says why it does not hold."""

    path: str
    operator: Operator
    holds: bool
    reason: str | None


class WhereCheck(msgspec.Struct, frozen=True):
    """The result of the CEL expression."""

    expression: str
    holds: bool
    reason: str | None


class DryRun(msgspec.Struct, frozen=True, kw_only=True):
    """`matches` if every check holds. Even then, any of `errors` would make the delivery fail. `collects` says how long
    it would wait in a window, of `key`, before a run takes it."""

    trigger_id: TriggerId
    version: int
    matches: bool
    reason: str | None
    event_type: PatternCheck
    event_source: PatternCheck
    predicates: list[PredicateCheck]
    where: WhereCheck | None
    parameters: dict[str, Any] | None
    idempotency_key: str | None
    concurrency_key: str | None
    key: str | None
    collects: str | None
    errors: list[str]


def sample_event(raw: Any, *, new_id: uuid.UUID, now: datetime, limits: EventLimits) -> Event:
    """The event in `raw`, as if it had just been stored. InvalidInput names each invalid field."""
    errors: list[FieldError] = []
    new = check_event(raw, new_id=new_id, now=now, limits=limits, errors=errors, prefix="event.", is_sample=True)
    if new is None:
        raise InvalidInput("the sample event is not valid", errors)
    return Event(
        id=new.id,
        external_id=new.external_id,
        type=new.type,
        source=new.source,
        occurred_at=new.occurred_at or now,
        received_at=now,
        ingress_sequence=0,
        payload=msgspec.json.decode(new.payload),
        correlation_id=new.correlation_id or str(new.id),
        ttl_ms=new.ttl_ms,
        metadata=msgspec.json.decode(new.metadata),
    )


def evaluate(trigger: Trigger, parameter_names: list[str], event: Event) -> DryRun:
    """Evaluate every check and render every template, even if others fail."""
    compiled = CompiledTrigger(trigger, parameter_names)
    envelope = event.envelope()
    found = compiled.results(envelope)
    results = [str(one) if isinstance(one, TooMuchWork) else one for one in found]
    reason = compiled.not_taken(event) or next((one for one in results if one is not None), None)
    errors = [str(one) for one in found if isinstance(one, TooMuchWork)][:1]
    return DryRun(
        trigger_id=trigger.id,
        version=trigger.version,
        matches=reason is None,
        reason=reason,
        event_type=_pattern("type", trigger.event_type, event.type, compiled.takes_type(event.type)),
        event_source=_pattern("source", trigger.event_source, event.source, compiled.takes_source(event.source)),
        predicates=[
            PredicateCheck(p.path, p.operator, why is None, why)
            for p, why in zip(trigger.predicates, results, strict=False)
        ],
        where=None if trigger.where is None else WhereCheck(trigger.where, results[-1] is None, results[-1]),
        parameters=_rendered(lambda: _parameters(compiled, event, envelope), errors),
        idempotency_key=_rendered(lambda: _alone(compiled, "idempotency_key").keys(envelope).dedupe_key, errors),
        concurrency_key=_rendered(lambda: _alone(compiled, "concurrency_key").keys(envelope).concurrency_key, errors)
        if trigger.concurrency_key is not None
        else None,
        key=_rendered(lambda: _alone(compiled, "key").keys(envelope).key, errors) if trigger.key is not None else None,
        collects=None if trigger.collect is None else str(trigger.collect),
        errors=errors,
    )


def _pattern(what: str, pattern: str, value: str, holds: bool) -> PatternCheck:
    return PatternCheck(pattern, value, holds, None if holds else f"the event's {what} is {value}, not {pattern}")


def _parameters(compiled: CompiledTrigger, event: Event, envelope: dict[str, Any]) -> dict[str, Any]:
    parameters = compiled.parameters(event, envelope)
    size = len(msgspec.json.encode(parameters))
    if size > MAX_PARAMETER_BYTES:
        raise TemplateError(f"the parameters are {size} bytes; at most {MAX_PARAMETER_BYTES} are allowed")
    return parameters


def _alone(compiled: CompiledTrigger, key: str) -> CompiledTrigger:
    """The trigger with one of its keys alone, so that a failure of another one does not hide it."""
    others = dict.fromkeys({"idempotency_key", "concurrency_key", "key"} - {key})
    return CompiledTrigger(msgspec.structs.replace(compiled.trigger, **others), [])


def _rendered(render: Callable[[], T], errors: list[str]) -> T | None:
    try:
        return render()
    except (TemplateError, TooMuchWork, TypeError, ValueError, RecursionError) as exc:
        errors.append(str(exc))
        return None
