"""Test a trigger, as it is or edited: on one event, or on the events of the past. Nothing is stored or launched."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
from starlette.requests import Request

from tidegate.api import bodies
from tidegate.api.routes import Route, Services
from tidegate.api.v1.triggers import JsonObject, path_trigger
from tidegate.clock import has_utc, uuid7
from tidegate.errors import FieldError, InvalidInput, NotFound
from tidegate.flow.look.explain import find_event
from tidegate.flow.predict import trigger_edit
from tidegate.flow.predict.trigger_edit import DEFAULT_EVENTS, MOST_EVENTS, TriggerForecast
from tidegate.model import trigger_change, trigger_dry_run
from tidegate.model.event import Event, is_text_id
from tidegate.model.trigger import CompiledTrigger, Trigger
from tidegate.model.trigger_change import SPEC_FIELDS
from tidegate.model.trigger_dry_run import DryRun
from tidegate.store import locks, triggers
from tidegate.store.predictions import ReceiptSpan

MAX_SAMPLE_BYTES = 1024 * 1024
PAST = timedelta(days=7)

_At = Annotated[datetime, msgspec.Meta(tz=True)]


class TestBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A sample event as it would be published; or the id (Tidegate's or the producer's) of a stored event; or which
    events of the past: the newest `limit` received at `from` (default: a week ago) or later and before `to` (now).
    `change`: the fields to change, as in an update; the trigger is tested with them."""

    event: Any = msgspec.UNSET
    event_id: str | None = None
    change: JsonObject | None = None
    received_from: _At | None = msgspec.field(default=None, name="from")
    received_to: _At | None = msgspec.field(default=None, name="to")
    limit: int | None = None


async def test_trigger(request: Request, services: Services) -> DryRun | TriggerForecast:
    given = await bodies.read(request, TestBody, MAX_SAMPLE_BYTES)
    is_past = _is_about_the_past(given)
    async with services.database.connection() as connection:
        trigger = await path_trigger(connection, request)
        definition = await triggers.get_definition(connection, trigger.workflow)
        if definition is None:  # both were deleted after the line above
            raise NotFound(f"no workflow {trigger.workflow!r}")
        now = await locks.now(connection)
        edited = _edited(trigger, given.change, definition.parameters)
        event: Event | None = None
        if given.event_id is not None:
            event = await find_event(connection, given.event_id)
        elif not is_past:
            event = trigger_dry_run.sample_event(given.event, new_id=uuid7(), now=now, limits=services.settings.limits)
    if event is not None:
        return trigger_dry_run.evaluate(edited or trigger, definition.parameters, event)
    span = ReceiptSpan(given.received_from or (given.received_to or now) - PAST, given.received_to or now)
    current = CompiledTrigger(trigger, definition.parameters)
    asked = None if edited is None else CompiledTrigger(edited, definition.parameters)
    async with services.prediction_turn.take():
        return await trigger_edit.predict(services.database, current, asked, span, given.limit or DEFAULT_EVENTS)


def _is_about_the_past(given: TestBody) -> bool:
    """Whether the body asks about events of the past. InvalidInput names each field that is wrong."""
    times = {"from": given.received_from, "to": given.received_to}
    is_past = given.limit is not None or any(times.values())
    is_event = given.event is not msgspec.UNSET
    errors = []
    if is_event + (given.event_id is not None) + is_past > 1 or not (
        is_event or given.event_id is not None or is_past or given.change is not None
    ):
        message = "give a sample `event`, or the `event_id` of a stored one, or `from`, `to` and `limit` of past events"
        errors.append(FieldError("event", message))
    if given.event_id is not None and not is_text_id(given.event_id):
        errors.append(FieldError("event_id", "is not the id of an event"))
    if given.limit is not None and not 1 <= given.limit <= MOST_EVENTS:
        errors.append(FieldError("limit", f"must be a whole number from 1 to {MOST_EVENTS}"))
    errors += [
        FieldError(name, "must be in the years 1900 to 8999")
        for name, at in times.items()
        if at is not None and not (has_utc(at) and 1900 <= at.year < 9000)
    ]
    if errors:
        raise InvalidInput("the body is not valid", errors)
    return not is_event and given.event_id is None


def _edited(trigger: Trigger, change: JsonObject | None, parameter_names: list[str]) -> Trigger | None:
    """The trigger with the change; None without one. InvalidInput names each field, below `change`."""
    if change is None:
        return None
    try:
        new = trigger_change.changed(trigger, trigger.status, change, trigger.workflow, parameter_names)
    except InvalidInput as exc:
        errors = [FieldError(f"change.{error.field}", error.message, error.too_large) for error in exc.errors]
        raise InvalidInput(exc.args[0], errors) from exc
    fields = {name: getattr(new.spec, name) for name in SPEC_FIELDS}
    return msgspec.structs.replace(trigger, **fields, status=new.status)


ROUTES = (
    Route("POST", "/v1/workflows/{slug}/triggers/{trigger_id}/test", test_trigger,
          "Evaluate a trigger, or an edit of it, on an event or on past events; nothing is stored or launched",
          (DryRun, TriggerForecast), scope="read", body=bodies.schema(TestBody),
          errors=(400, 404, 408, 409, 413, 415, 422)),
)  # fmt: skip
