"""The operator's verbs about what waits: cancel it or make it due now, one or all that a filter describes."""

from __future__ import annotations

import base64
import binascii
import uuid
from typing import Any, Literal, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies
from tidegate.api.admin.retries import check_filters
from tidegate.api.problems import Problem
from tidegate.api.routes import Route, Services, json_response, path_uuid
from tidegate.errors import FieldError, InvalidInput
from tidegate.flow import control
from tidegate.flow.control import MAX_PER_CALL, RetryDone, RetryVerb
from tidegate.flow.look.explain import find_event
from tidegate.queue.port import Topic
from tidegate.store.bulk_retries import FILTERS_OF, IdRange, RetryKind
from tidegate.store.retry_rows import RetryFilters

# Who is to look when something of a kind was cancelled (what it held may be free) or forced.
_HINTS: dict[RetryKind, tuple[Topic, ...]] = {
    "events": ("plans", "retries"),
    "deliveries": ("plans", "deliveries"),
    "steps": ("runs", "deliveries"),
}


class RetryChanged(msgspec.Struct, frozen=True):
    """What was done to an event, delivery or step that waited. `cancelling`: a worker is doing other steps of its run,
    and stops at the next."""

    id: uuid.UUID
    status: Literal["cancelled", "cancelling", "forced"]


class ChangeMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which of those that wait; without any filter, `all` must be true. `dry_run` only counts them. A call does at most
    `limit`; the next one goes on with its `cursor`."""

    source: str | None = None
    reason: str | None = None
    trigger_id: uuid.UUID | None = None
    workflow: str | None = None
    workflow_run_id: uuid.UUID | None = None
    all: bool = False
    dry_run: bool = False
    limit: int = MAX_PER_CALL
    cursor: str | None = None


class RetriesChanged(msgspec.Struct, frozen=True):
    """What a call has done: so many, so many that waited no longer when their turn came, and how many remain. `cursor`
    is null when that is all."""

    kind: RetryKind
    status: Literal["preview", "cancelled", "forced"]
    done: int
    no_longer_waiting: int
    remaining: int
    cursor: str | None


async def cancel_event(request: Request, services: Services) -> RetryChanged:
    event_id = await _event_id(request, services)
    await control.cancel_event(services.database, event_id, bodies.actor(request))
    _hint(services, "events")
    return RetryChanged(event_id, "cancelled")


async def force_event(request: Request, services: Services) -> Response:
    event_id = await _event_id(request, services)
    await control.force_event(services.database, event_id, bodies.actor(request))
    _hint(services, "events")
    return json_response(RetryChanged(event_id, "forced"), 202)


async def cancel_delivery(request: Request, services: Services) -> RetryChanged:
    await bodies.read(request, bodies.Nothing)
    delivery_id = path_uuid(request, "delivery_id")
    await control.cancel_delivery(services.database, delivery_id, bodies.actor(request))
    _hint(services, "deliveries")
    return RetryChanged(delivery_id, "cancelled")


async def force_delivery(request: Request, services: Services) -> Response:
    await bodies.read(request, bodies.Nothing)
    delivery_id = path_uuid(request, "delivery_id")
    await control.force_delivery(services.database, delivery_id, bodies.actor(request))
    _hint(services, "deliveries")
    return json_response(RetryChanged(delivery_id, "forced"), 202)


async def cancel_step(request: Request, services: Services) -> Response:
    await bodies.read(request, bodies.Nothing)
    step_id = path_uuid(request, "step_id")
    breaker = services.settings.trigger_error
    done = await control.cancel_step(services.database, step_id, bodies.actor(request), breaker)
    _hint(services, "steps")
    return json_response(RetryChanged(step_id, done), 200 if done == "cancelled" else 202)


async def force_step(request: Request, services: Services) -> Response:
    await bodies.read(request, bodies.Nothing)
    step_id = path_uuid(request, "step_id")
    await control.force_step(services.database, step_id, bodies.actor(request), services.settings.trigger_error)
    _hint(services, "steps")
    return json_response(RetryChanged(step_id, "forced"), 202)


async def cancel_many(request: Request, services: Services) -> RetriesChanged:
    return await _change_many(request, services, "cancel")


async def force_many(request: Request, services: Services) -> Response:
    done = await _change_many(request, services, "force")
    return json_response(done, 200 if done.status == "preview" else 202)


async def _change_many(request: Request, services: Services, verb: RetryVerb) -> RetriesChanged:
    kind = _kind(request)
    body = await bodies.read(request, ChangeMany)
    filters = _filters(kind, body)
    if body.dry_run:
        count = await control.preview_retries(services.database, kind, filters)
        return RetriesChanged(kind, "preview", 0, 0, count, None)
    done = await control.change_retries(
        services.database, kind, verb, filters, bodies.actor(request), services.settings.trigger_error,
        span=_from_cursor(body.cursor), limit=body.limit,
    )  # fmt: skip
    if done.done:
        _hint(services, kind)
    status: RetryDone = control.DONE[verb]
    return RetriesChanged(kind, status, done.done, done.no_longer_waiting, done.remaining, _to_cursor(done.rest))


def _kind(request: Request) -> RetryKind:
    kind = request.path_params["kind"]
    if kind not in FILTERS_OF:
        raise Problem(404, f"no kind {kind[:60]!r}; there are {', '.join(FILTERS_OF)}")
    return cast(RetryKind, kind)


def _filters(kind: RetryKind, body: ChangeMany) -> RetryFilters:
    message = "the body is not valid"
    given: dict[str, Any] = {name: value for name in RetryFilters._fields if (value := getattr(body, name)) is not None}
    check_filters(kind, given, message)
    wrong = [
        FieldError(name, "holds the character U+0000")
        for name, value in given.items()
        if isinstance(value, str) and "\x00" in value
    ]
    if not given and not body.all:
        wrong.append(FieldError("all", f"must be true when no filter is given ({', '.join(FILTERS_OF[kind])})"))
    if given and body.all:
        wrong.append(FieldError("all", "does not go with a filter"))
    if not 1 <= body.limit <= MAX_PER_CALL:
        wrong.append(FieldError("limit", f"must be a whole number from 1 to {MAX_PER_CALL}"))
    if wrong:
        raise InvalidInput(message, wrong)
    return RetryFilters(**given)


def _to_cursor(rest: IdRange | None) -> str | None:
    if rest is None:
        return None
    return base64.urlsafe_b64encode(msgspec.json.encode(rest)).decode().rstrip("=")


def _from_cursor(cursor: str | None) -> IdRange | None:
    if cursor is None:
        return None
    try:
        text = base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4))
        return IdRange(*msgspec.json.decode(text, type=tuple[uuid.UUID, uuid.UUID]))
    except (ValueError, binascii.Error) as exc:
        raise InvalidInput("the body is not valid", [FieldError("cursor", "is not one of ours")]) from exc


async def _event_id(request: Request, services: Services) -> uuid.UUID:
    """Ours, from ours or the producer's."""
    await bodies.read(request, bodies.Nothing)
    async with services.database.connection() as connection:
        return (await find_event(connection, request.path_params["id"])).id


def _hint(services: Services, kind: RetryKind) -> None:
    for topic in _HINTS[kind]:
        services.queue.hint(topic)


ROUTES = (
    Route("POST", "/admin/retries/{kind}/cancel", cancel_many,
          "Cancel all of a kind that wait and that the filters describe, a bounded part per call; or only count them",
          (RetriesChanged,), scope="operate", body=bodies.schema(ChangeMany), errors=(400, 404, 413, 415, 422)),
    Route("POST", "/admin/retries/{kind}/force", force_many,
          "Make all of a kind due now that wait and that the filters describe, a bounded part per call; or only count "
          "them", (RetriesChanged,), scope="operate", status=202, body=bodies.schema(ChangeMany),
          errors=(400, 404, 413, 415, 422)),
    Route("POST", "/admin/retries/events/{id:path}/cancel", cancel_event,
          "Cancel an event that waits, by our id or the producer's", (RetryChanged,),
          scope="operate", errors=(404, 409, 422)),
    Route("POST", "/admin/retries/events/{id:path}/force", force_event,
          "Make an event that waits due now; the gate is still asked", (RetryChanged,), scope="operate", status=202,
          errors=(404, 409, 422)),
    Route("POST", "/admin/retries/deliveries/{delivery_id}/cancel", cancel_delivery, "Cancel a delivery that waits",
          (RetryChanged,), scope="operate", errors=(404, 409, 422)),
    Route("POST", "/admin/retries/deliveries/{delivery_id}/force", force_delivery,
          "Make a delivery that waits due now; its trigger's gate is still asked", (RetryChanged,), scope="operate",
          status=202, errors=(404, 409, 422)),
    Route("POST", "/admin/retries/steps/{step_id}/cancel", cancel_step,
          "Cancel the retry of a step, and with it the run: at once, or (202) at its next step", (RetryChanged,),
          scope="operate", errors=(404, 409, 422)),
    Route("POST", "/admin/retries/steps/{step_id}/force", force_step,
          "Make a step that waits to be tried again due now", (RetryChanged,), scope="operate", status=202,
          errors=(404, 409, 422)),
)  # fmt: skip
