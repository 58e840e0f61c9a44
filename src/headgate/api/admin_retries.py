"""What waits, why, and until when; and the operator's verbs about it."""

from __future__ import annotations

import base64
import binascii
import uuid
from datetime import datetime
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headgate.api import bodies
from headgate.api.routes import Query, Route, Services, json_response, parameters, path_uuid
from headgate.api.triggers import hint
from headgate.errors import FieldError, InvalidInput
from headgate.flow import control
from headgate.flow.explain import find_event
from headgate.model.retry import RETRY_STATES, RetryState
from headgate.model.run import Step
from headgate.store import held_deliveries, ingress_retries, sources, steps
from headgate.store.db import Connection
from headgate.store.held_deliveries import Filters, HeldDelivery
from headgate.store.ingress_retries import HeldEvent

Kind = Literal["events", "deliveries", "steps"]

LIST_QUERY = (
    Query("kind", "string", "what waits; events unless told", ("events", "deliveries", "steps")),
    Query("source", "string", "only of this source"),
    Query("reason", "string", "only what waits for this: rate_limit (events), throttle, concurrency, source_paused "
          "(deliveries), paused, breaker_open"),
    Query("state", "string", "only in this retry state; scheduled unless told", RETRY_STATES),
    Query("trigger_id", "uuid", "only deliveries of this trigger"),
    Query("workflow", "string", "only deliveries of this workflow's triggers"),
    Query("limit", "integer", "at most so many; 50 unless told"),
    Query("cursor", "string", "`next_cursor` of the page before"),
)  # fmt: skip
# The filters that a kind does not have.
_WITHOUT: dict[Kind, tuple[str, ...]] = {
    "events": ("trigger_id", "workflow"),
    "deliveries": (),
    "steps": ("source", "reason", "trigger_id", "workflow"),
}


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that waits. `eta_seconds` is null when it waits no more, or nobody can say how long: for someone to
    resume a source or trigger, for a slot, for a trial run to end."""

    kind: Kind
    id: uuid.UUID
    event_id: uuid.UUID | None = None
    external_id: str | None = None
    type: str | None = None
    source: str | None = None
    correlation_id: str | None = None
    trigger_id: uuid.UUID | None = None
    trigger: str | None = None
    workflow: str | None = None
    workflow_run_id: uuid.UUID | None = None
    retry_state: RetryState
    reason: str | None
    attempts: int
    next_attempt_at: datetime | None
    eta_seconds: float | None
    last_error: str | None
    created_at: datetime | None
    updated_at: datetime | None


_DELIVERY_FIELDS = [n for n in Retry.__struct_fields__ if n in HeldDelivery.__struct_fields__ and n != "attempts"]


class RetryPage(msgspec.Struct, frozen=True):
    """Waiting ones in due order, others newest first; `next_cursor` is null on the last page."""

    retries: list[Retry]
    next_cursor: str | None


class RetryChanged(msgspec.Struct, frozen=True):
    """What was done to an event or delivery that waited."""

    id: uuid.UUID
    status: Literal["cancelled", "forced"]


async def list_retries(request: Request, services: Services) -> RetryPage:
    given = parameters(request, LIST_QUERY)
    kind: Kind = given.get("kind", "events")
    limit = given.get("limit", 50)
    wrong = [FieldError(name, f"does not go with kind {kind}") for name in _WITHOUT[kind] if name in given]
    if wrong:
        raise InvalidInput("a query parameter is not valid", wrong)
    after = _from_cursor(given.get("cursor"))
    async with services.database.connection() as connection:
        if kind == "events":
            found = await _events(connection, given, after, limit + 1)
        elif kind == "deliveries":
            found = await _deliveries(connection, given, after, limit + 1)
        else:
            found = await _steps(connection, given, after, limit + 1)
    more = len(found) > limit
    return RetryPage(found[:limit], _to_cursor(found[limit - 1]) if more else None)


async def cancel_event(request: Request, services: Services) -> RetryChanged:
    event_id = await _event_id(request, services)
    await control.cancel_event(services.database, event_id, bodies.actor(request))
    _hint(services)
    return RetryChanged(event_id, "cancelled")


async def force_event(request: Request, services: Services) -> Response:
    event_id = await _event_id(request, services)
    await control.force_event(services.database, event_id, bodies.actor(request))
    _hint(services)
    return json_response(RetryChanged(event_id, "forced"), 202)


async def cancel_delivery(request: Request, services: Services) -> RetryChanged:
    await bodies.read(request, bodies.Nothing)
    delivery_id = path_uuid(request, "delivery_id")
    await control.cancel_delivery(services.database, delivery_id, bodies.actor(request))
    hint(services)
    return RetryChanged(delivery_id, "cancelled")


async def force_delivery(request: Request, services: Services) -> Response:
    await bodies.read(request, bodies.Nothing)
    delivery_id = path_uuid(request, "delivery_id")
    await control.force_delivery(services.database, delivery_id, bodies.actor(request))
    hint(services)
    return json_response(RetryChanged(delivery_id, "forced"), 202)


async def _event_id(request: Request, services: Services) -> uuid.UUID:
    """Ours, from ours or the producer's."""
    await bodies.read(request, bodies.Nothing)
    async with services.database.connection() as connection:
        return (await find_event(connection, request.path_params["id"])).id


def _hint(services: Services) -> None:
    services.queue.hint("plans")
    services.queue.hint("retries")


async def _events(
    connection: Connection, given: dict[str, Any], after: tuple[datetime | None, uuid.UUID] | None, limit: int
) -> list[Retry]:
    state: RetryState = given.get("state", "scheduled")
    source, reason = given.get("source"), given.get("reason")
    if state != "scheduled":
        before = after[1] if after else None
        held = await ingress_retries.list_settled(
            connection, state, source=source, reason=reason, before_id=before, limit=limit
        )
    else:
        held = await ingress_retries.list_waiting(
            connection, source=source, reason=reason, after=_due_place(after), limit=limit
        )
    return [_held(event) for event in held]


async def _deliveries(
    connection: Connection, given: dict[str, Any], after: tuple[datetime | None, uuid.UUID] | None, limit: int
) -> list[Retry]:
    state: RetryState = given.get("state", "scheduled")
    filters = Filters(*(given.get(name) for name in Filters._fields))
    if state != "scheduled":
        before = after[1] if after else None
        found = await held_deliveries.list_settled(connection, state, filters, before_id=before, limit=limit)
    else:
        found = await held_deliveries.list_waiting(connection, filters, after=_due_place(after), limit=limit)
    return [_held_delivery(delivery) for delivery in found]


async def _steps(
    connection: Connection, given: dict[str, Any], after: tuple[datetime | None, uuid.UUID] | None, limit: int
) -> list[Retry]:
    if given.get("state", "scheduled") != "scheduled":
        problem = FieldError("state", "only scheduled goes with kind steps")
        raise InvalidInput("a query parameter is not valid", [problem])
    now = await sources.now(connection)
    return [_step(row, now) for row in await steps.list_scheduled(connection, after=_due_place(after), limit=limit)]


def _held(event: HeldEvent) -> Retry:
    shared = {name: getattr(event, name) for name in HeldEvent.__struct_fields__ if name != "metadata"}
    return Retry(kind="events", id=event.event_id, **shared)


def _held_delivery(delivery: HeldDelivery) -> Retry:
    shared = {name: getattr(delivery, name) for name in _DELIVERY_FIELDS}
    return Retry(kind="deliveries", attempts=delivery.retry_attempts, **shared)


def _step(row: Step, now: datetime) -> Retry:
    at = row.next_attempt_at
    return Retry(
        kind="steps",
        id=row.id,
        workflow_run_id=row.workflow_run_id,
        retry_state=row.retry_state,
        reason=row.retry_metadata.get("reason"),
        attempts=row.retry_attempts,
        next_attempt_at=at,
        eta_seconds=max(0.0, (at - now).total_seconds()) if at else None,
        last_error=row.error,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )


def _to_cursor(row: Retry) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((row.next_attempt_at, row.id))).decode().rstrip("=")


def _from_cursor(cursor: str | None) -> tuple[datetime | None, uuid.UUID] | None:
    if cursor is None:
        return None
    try:
        text = base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4))
        at, row_id = msgspec.json.decode(text, type=tuple[datetime | None, uuid.UUID])
        if at is not None and at.tzinfo is None:
            raise ValueError("tampered")
    except (ValueError, binascii.Error) as exc:
        raise InvalidInput("a query parameter is not valid", [FieldError("cursor", "is not one of ours")]) from exc
    return at, row_id


def _due_place(after: tuple[datetime | None, uuid.UUID] | None) -> tuple[datetime, uuid.UUID] | None:
    if after is None:
        return None
    if after[0] is None:
        raise InvalidInput("a query parameter is not valid", [FieldError("cursor", "belongs to another list")])
    return after[0], after[1]


ROUTES = (
    Route("GET", "/admin/retries", list_retries, "What waits, why, and until when", (RetryPage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
    Route("POST", "/admin/retries/events/{id:path}/cancel", cancel_event,
          "Cancel an event that waits, by our id or the producer's", (RetryChanged,),
          scope="operate", errors=(404, 409, 422)),
    Route("POST", "/admin/retries/events/{id:path}/force", force_event,
          "Make an event that waits due now; the gate is still asked", (RetryChanged,), scope="operate", status=202,
          errors=(404, 409, 422)),
    Route("POST", "/admin/retries/deliveries/{delivery_id}/cancel", cancel_delivery, "Cancel a delivery that waits",
          (RetryChanged,), scope="operate", errors=(404, 409, 422)),
    Route("POST", "/admin/retries/deliveries/{delivery_id}/force", force_delivery,
          "Make a delivery that waits due now; its trigger's gate is still asked", (RetryChanged,),
          scope="operate", status=202,
          errors=(404, 409, 422)),
)  # fmt: skip
