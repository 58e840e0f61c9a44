"""A trigger as a user creates or changes it: the given fields, validated, on top of the current ones."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.errors import FieldError, InvalidInput
from tidegate.model.backlog import BacklogPolicy
from tidegate.model.conversion import convert
from tidegate.model.predicate import Predicate
from tidegate.model.retry import RetryPolicy
from tidegate.model.source import BreakerPolicy
from tidegate.model.trigger import TriggerHolds, TriggerOverlap, TriggerSpec, TriggerStatus, check_spec
from tidegate.model.window import CollectPolicy

MAX_DEPTH = 16
MAX_NUMBER = 2**63

SPEC_FIELDS = TriggerSpec.__struct_fields__
_DEFAULTS: dict[str, Any] = {
    field.name: field.default_factory() if field.default_factory is not msgspec.NODEFAULT else field.default
    for field in msgspec.structs.fields(TriggerSpec)
    if not field.required
}


class TriggerBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields of a trigger. An omitted field keeps its value, or has its default; null clears it."""

    name: str | UnsetType = UNSET
    event_type: str | UnsetType = UNSET
    event_source: str | UnsetType | None = UNSET
    predicates: list[Predicate] | UnsetType | None = UNSET
    where: str | UnsetType | None = UNSET
    parameter_template: dict[str, Any] | UnsetType | None = UNSET
    idempotency_key: str | UnsetType | None = UNSET
    idempotency_window_ms: int | UnsetType | None = UNSET
    concurrency_key: str | UnsetType | None = UNSET
    throttle_count: int | UnsetType | None = UNSET
    throttle_window_ms: int | UnsetType | None = UNSET
    max_concurrency: int | UnsetType | None = UNSET
    retry: RetryPolicy | UnsetType | None = UNSET
    breaker: BreakerPolicy | UnsetType | None = UNSET
    overlap: TriggerOverlap | UnsetType | None = UNSET
    key: str | UnsetType | None = UNSET
    collect: CollectPolicy | UnsetType | None = UNSET
    priority: int | UnsetType | None = UNSET
    skip_over_count: int | UnsetType | None = UNSET
    skip_over_window_ms: int | UnsetType | None = UNSET
    cancel_running: bool | UnsetType | None = UNSET
    budgets: list[str] | UnsetType | None = UNSET
    backlog: BacklogPolicy | UnsetType | None = UNSET
    holds: TriggerHolds | UnsetType | None = UNSET
    status: TriggerStatus | UnsetType = UNSET


class TriggerPatch(TriggerBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change. With `version`, it fails if the trigger has a newer version than that."""

    version: int | UnsetType = UNSET


class NewTrigger(msgspec.Struct, frozen=True):
    """A validated trigger that is not stored yet."""

    spec: TriggerSpec
    status: TriggerStatus


def created(given: object, workflow: str, parameter_names: list[str]) -> NewTrigger:
    """The trigger that `given` (decoded JSON) describes. InvalidInput names each invalid field."""
    body = _body(given, TriggerBody)
    missing = [FieldError(name, "is required") for name in ("name", "event_type") if getattr(body, name) is UNSET]
    if missing:
        raise InvalidInput("the trigger is not valid", missing)
    return _checked({}, "active", body, workflow, parameter_names)


def changed(
    spec: TriggerSpec, status: TriggerStatus, given: object, workflow: str, parameter_names: list[str]
) -> NewTrigger:
    """The trigger with the fields in `given` (decoded JSON) changed. InvalidInput names each invalid field."""
    known = {name: getattr(spec, name) for name in SPEC_FIELDS}
    return _checked(known, status, _body(given, TriggerPatch), workflow, parameter_names)


def known_version(given: object) -> int | None:
    """The version that a change is based on, if given."""
    version = _body(given, TriggerPatch).version
    return None if version is UNSET else version


def declared(spec: TriggerSpec) -> dict[str, Any]:
    """The fields that code declares. Defaults are omitted, so that a field added later changes nothing."""
    said = {name: getattr(spec, name) for name in SPEC_FIELDS}
    return {name: value for name, value in said.items() if name not in _DEFAULTS or value != _DEFAULTS[name]}


def _body(given: object, kind: type[TriggerBody]) -> Any:
    errors: list[FieldError] = []
    check_plain(given, errors)
    if errors:
        raise InvalidInput("the trigger is not valid", errors)
    return convert(given, kind, "the trigger is not valid")


def _checked(
    known: dict[str, Any], status: TriggerStatus, body: TriggerBody, workflow: str, parameter_names: list[str]
) -> NewTrigger:
    said = {name: value for name in SPEC_FIELDS if (value := getattr(body, name)) is not UNSET}
    cleared = {name: _DEFAULTS[name] for name, value in said.items() if value is None}
    spec = TriggerSpec(**known | said | cleared)
    check_spec(spec, workflow, parameter_names)
    return NewTrigger(spec, status if body.status is UNSET else body.status)


def check_plain(given: object, errors: list[FieldError]) -> None:
    """Reject what the database cannot store: U+0000, integers beyond 64 bits, too deep nesting."""
    places: list[tuple[str, object, int]] = [("", given, 0)]
    while places:
        place, value, depth = places.pop()
        if isinstance(value, dict | list):
            if depth > MAX_DEPTH + 1:  # the trigger itself is one level
                errors.append(FieldError(place, f"is nested deeper than {MAX_DEPTH} levels"))
                continue
            places += _members(place, value, depth + 1, errors)
        elif isinstance(value, str) and "\x00" in value:
            errors.append(FieldError(place or "body", "contains the character U+0000"))
        elif isinstance(value, int | float) and not -MAX_NUMBER <= value < MAX_NUMBER:
            errors.append(FieldError(place or "body", "is a number beyond 64 bits"))


def _members(
    place: str, value: dict[Any, Any] | list[Any], depth: int, errors: list[FieldError]
) -> list[tuple[str, object, int]]:
    if isinstance(value, list):
        return [(f"{place}[{i}]", inner, depth) for i, inner in enumerate(value)]
    names = [name for name in value if isinstance(name, str) and "\x00" not in name]
    if len(names) < len(value):
        errors.append(FieldError(place or "body", "has a key that is not text, or contains the character U+0000"))
    return [(f"{place}.{name[:60]}" if place else name[:60], value[name], depth) for name in names]
