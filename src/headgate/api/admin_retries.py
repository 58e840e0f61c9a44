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
from headgate.api.routes import Query, Route, Services, json_response, parameters
from headgate.errors import FieldError, InvalidInput
from headgate.flow import control
from headgate.flow.explain import find_event
from headgate.model.delivery import Delivery
from headgate.model.retry import RETRY_STATES, RetryState
from headgate.model.run import Step
from headgate.store import deliveries, ingress_retries, sources, steps
from headgate.store.db import Connection
from headgate.store.ingress_retries import HeldEvent

Kind = Literal["events", "deliveries", "steps"]

LIST_QUERY = (
    Query("kind", "string", "what waits; events unless told", ("events", "deliveries", "steps")),
    Query("source", "string", "only events of this source"),
    Query("reason", "string", "only events that wait for this: rate_limit, paused, breaker_open"),
    Query("state", "string", "only events in this retry state; scheduled unless told", RETRY_STATES),
    Query("limit", "integer", "at most so many; 50 unless told"),
    Query("cursor", "string", "`next_cursor` of the page before"),
)


class Retry(msgspec.Struct, frozen=True, kw_only=True):
    """Something that waits. `eta_seconds` is null when it waits no more, or until someone resumes its source."""

    kind: Kind
    id: uuid.UUID
    event_id: uuid.UUID | None = None
    external_id: str | None = None
    type: str | None = None
    source: str | None = None
    correlation_id: str | None = None
    trigger_id: uuid.UUID | None = None
    workflow_run_id: uuid.UUID | None = None
    retry_state: RetryState
    reason: str | None
    attempts: int
    next_attempt_at: datetime | None
    eta_seconds: float | None
    last_error: str | None
    created_at: datetime | None
    updated_at: datetime | None


class RetryPage(msgspec.Struct, frozen=True):
    """Waiting ones in due order, others newest first; `next_cursor` is null on the last page."""

    retries: list[Retry]
    next_cursor: str | None


class RetryChanged(msgspec.Struct, frozen=True):
    """What was done to an event that waited."""

    id: uuid.UUID
    status: Literal["cancelled", "forced"]


async def list_retries(request: Request, services: Services) -> RetryPage:
    given = parameters(request, LIST_QUERY)
    kind: Kind = given.get("kind", "events")
    limit = given.get("limit", 50)
    after = _from_cursor(given.get("cursor"))
    async with services.database.connection() as connection:
        if kind == "events":
            found = await _events(connection, given, after, limit + 1)
        else:
            found = await _others(connection, kind, given, after, limit + 1)
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


async def _others(
    connection: Connection,
    kind: Kind,
    given: dict[str, Any],
    after: tuple[datetime | None, uuid.UUID] | None,
    limit: int,
) -> list[Retry]:
    wrong = [FieldError(name, f"does not go with kind {kind}") for name in ("source", "reason") if name in given]
    if given.get("state", "scheduled") != "scheduled":
        wrong.append(FieldError("state", f"only scheduled goes with kind {kind}"))
    if wrong:
        raise InvalidInput("a query parameter is not valid", wrong)
    now, place = await sources.now(connection), _due_place(after)
    found: list[Delivery] | list[Step]
    if kind == "deliveries":
        found = await deliveries.list_scheduled(connection, after=place, limit=limit)
    else:
        found = await steps.list_scheduled(connection, after=place, limit=limit)
    return [_other(kind, row, now) for row in found]


def _held(event: HeldEvent) -> Retry:
    shared = {name: getattr(event, name) for name in HeldEvent.__struct_fields__ if name != "metadata"}
    return Retry(kind="events", id=event.event_id, **shared)


def _other(kind: Kind, row: Delivery | Step, now: datetime) -> Retry:
    at = row.next_attempt_at
    return Retry(
        kind=kind,
        id=row.id,
        event_id=row.event_id if isinstance(row, Delivery) else None,
        trigger_id=row.trigger_id if isinstance(row, Delivery) else None,
        workflow_run_id=row.workflow_run_id,
        retry_state=row.retry_state,
        reason=row.retry_metadata.get("reason"),
        attempts=row.retry_attempts,
        next_attempt_at=at,
        eta_seconds=max(0.0, (at - now).total_seconds()) if at else None,
        last_error=row.last_error if isinstance(row, Delivery) else row.error,
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
    Route("GET", "/admin/retries", list_retries, "What waits, why, and until when", (RetryPage,), query=LIST_QUERY,
          errors=(422,)),
    Route("POST", "/admin/retries/events/{id:path}/cancel", cancel_event,
          "Cancel an event that waits, by our id or the producer's", (RetryChanged,), errors=(404, 409, 422)),
    Route("POST", "/admin/retries/events/{id:path}/force", force_event,
          "Make an event that waits due now; the gate is still asked", (RetryChanged,), status=202,
          errors=(404, 409, 422)),
)  # fmt: skip
