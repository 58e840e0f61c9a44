"""Starts: events of Tidegate's own type that name the trigger they are for. Their payload is the run's parameters."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import msgspec

from tidegate.clock import utc_now
from tidegate.errors import FieldError, InvalidInput
from tidegate.model import typed
from tidegate.model.event import EventLimits, NewEvent, check_event
from tidegate.model.ids import EventId, RunId, TriggerId, delivery_id
from tidegate.model.not_json import not_encodable, set_or_bytes
from tidegate.model.trigger import Trigger, TriggerSpec

START = "tidegate.start"
# The trigger of a workflow that no event launches.
TRIGGER = "start"
# A workflow's own trigger, which its starts share the limits of: the one in its code, then that of its schedule.
_OWN = ("code", "schedule", TRIGGER)


class StartedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A start that was accepted: the id that its run has, or will have, and its event."""

    run_id: RunId
    event_id: EventId
    status: Literal["accepted", "duplicate"]


def source_of_starts(workflow: str) -> str:
    """The source of the starts of a workflow."""
    return f"{START}.{workflow}"


def start_spec(workflow: str) -> dict[str, str]:
    """The name, event type and source of the trigger of a workflow that no event launches."""
    return {"name": TRIGGER, "event_type": START, "event_source": source_of_starts(workflow)}


def own_trigger(triggers: Sequence[Trigger]) -> Trigger | None:
    """The trigger that starts of a workflow use: its own, or else its oldest; `triggers` are in the order of age."""
    by_name = {trigger.name: trigger for trigger in reversed(triggers)}
    return next((by_name[name] for name in _OWN if name in by_name), triggers[0] if triggers else None)


def spec_of(workflow: str) -> TriggerSpec:
    """The trigger of a workflow that no event launches, without limits."""
    return msgspec.convert(start_spec(workflow), TriggerSpec)


def run_id_of(event_id: EventId, trigger_id: TriggerId) -> RunId:
    """The id of the run that a start launches: that of its delivery."""
    return RunId(delivery_id(event_id, trigger_id))


def unwrapped(given: Mapping[str, object], payload_argument: str | None) -> Mapping[str, object]:
    """The parameters of a workflow that takes the whole payload as one argument: its payload, given as such or by the
    argument's name. So the parameters of its runs have one form, however they are launched."""
    if payload_argument is None or given.keys() != {payload_argument}:
        return given
    inside = given[payload_argument]
    if isinstance(inside, Mapping):
        return inside
    return given if inside is None or isinstance(inside, str | int | float | list | tuple) else plain_fields(inside)


def plain_fields(value: object) -> Mapping[str, object]:
    """A typed value as the object that it is in JSON. InvalidInput if it is none."""
    try:
        found = msgspec.to_builtins(value, str_keys=True, enc_hook=typed.plain)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInput("the workflow cannot be started", [FieldError("parameters", str(exc))]) from exc
    return found if isinstance(found, dict) else {}


def wrong_names(given: Collection[str], names: Sequence[str], required: Collection[str]) -> list[FieldError]:
    """What is wrong with the names of parameters: those that are missing, and those that the workflow does not take
    (`names` is `["*"]` when it takes any)."""
    errors = [FieldError(f"parameters.{name}", "is required") for name in required if name not in given]
    if list(names) != ["*"]:
        takes = f"the workflow takes {', '.join(names)}" if names else "the workflow takes none"
        errors += [FieldError(f"parameters.{n[:60]}", f"unknown; {takes}") for n in sorted(given) if n not in names]
    return errors


def start_event(
    workflow: str,
    parameters: Mapping[str, object],
    *,
    new_id: uuid.UUID,
    limits: EventLimits,
    origin: Mapping[str, object],
    id: str | None = None,
    correlation_id: str | None = None,
    traceparent: str | None = None,
) -> NewEvent:
    """The event of a start. InvalidInput names each invalid field."""
    raw = {"id": id, "type": "start", "source": "start", "payload": parameters, "correlation_id": correlation_id}
    errors: list[FieldError] = []
    try:
        raw["payload"] = {name: typed.payload_of(value) for name, value in parameters.items()}
        plain = msgspec.to_builtins(raw, str_keys=True, enc_hook=typed.plain)
        if (refused := set_or_bytes(raw)) is not None:
            errors.append(refused)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInput("the workflow cannot be started", [_renamed(not_encodable(raw, exc))]) from exc
    event = None if errors else check_event(
        plain, new_id=new_id, now=utc_now(), limits=limits, errors=errors, traceparent=traceparent
    )  # fmt: skip
    if event is None:
        raise InvalidInput("the workflow cannot be started", [_renamed(error) for error in errors])
    written = msgspec.json.encode(origin).decode()
    return msgspec.structs.replace(event, type=START, source=source_of_starts(workflow), origin=written)


def _renamed(error: FieldError) -> FieldError:
    """Parameters are the payload of the start's event."""
    head, dot, rest = error.field.partition(".")
    field = f"parameters{dot}{rest}" if head == "payload" else error.field
    return FieldError(field, error.message, error.too_large)
