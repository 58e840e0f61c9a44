"""Cancel waiting rows or make them due now: one, or all that a filter selects."""

from __future__ import annotations

import base64
import binascii
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Literal, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies
from tidegate.api.admin.retries import check_filters
from tidegate.api.problems import Problem
from tidegate.api.routes import Handler, Route, Services, json_response, path_delivery_id, path_step_id
from tidegate.errors import FieldError, InvalidInput
from tidegate.flow import control
from tidegate.flow.control import MAX_PER_CALL, RetryDone, RetryOutcome, RetryVerb
from tidegate.flow.look.explain import find_event
from tidegate.model.ids import DeliveryId, EventId, RunId, StepId, TriggerId
from tidegate.queue.port import Topic
from tidegate.store.bulk_retries import FILTERS_OF, IdRange, RetryKind
from tidegate.store.retry_rows import RetryFilters

# Which loops of the workers to wake when rows of a kind were forced, or cancelled (what they held may be free).
_HINTS: dict[RetryKind, tuple[Topic, ...]] = {
    "events": ("plans", "retries"),
    "deliveries": ("plans", "deliveries"),
    "steps": ("runs", "deliveries"),
}


class RetryChanged(msgspec.Struct, frozen=True):
    """What was done to a waiting event, delivery or step. `cancelling`: a worker is executing other steps of its run,
    and stops at the next."""

    id: uuid.UUID
    status: RetryOutcome


class ChangeMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which waiting rows to change; without a filter, `all` must be true. `dry_run` only counts them. A call changes at
    most `limit` rows; the next call continues with its `cursor`."""

    source: str | None = None
    reason: str | None = None
    trigger_id: TriggerId | None = None
    workflow: str | None = None
    workflow_run_id: RunId | None = None
    all: bool = False
    dry_run: bool = False
    limit: int = MAX_PER_CALL
    cursor: str | None = None


class RetriesChanged(msgspec.Struct, frozen=True):
    """What a call did: how many rows it changed, how many were no longer waiting when it reached them, and how many
    remain. `cursor` is null when none remain."""

    kind: RetryKind
    status: Literal["preview", "cancelled", "forced"]
    done: int
    no_longer_waiting: int
    remaining: int
    cursor: str | None


def _change_one(kind: RetryKind, verb: RetryVerb) -> Handler:
    """The handler for one row of the kind; its name is the operation's id in the OpenAPI document."""

    async def change(request: Request, services: Services) -> Response:
        row_id = await _ROW_ID[kind](request, services)
        actor, breaker = bodies.actor(request), services.settings.trigger_error
        done = await control.change_retry(services.database, kind, row_id, verb, actor, breaker)
        _hint(services, kind)
        return json_response(RetryChanged(row_id, done), 200 if done == "cancelled" else 202)

    change.__name__ = f"{verb}_{_NOUNS[kind]}"
    return change


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
        raise Problem(404, f"no kind {kind[:60]!r}; the kinds are {', '.join(FILTERS_OF)}")
    return cast(RetryKind, kind)


def _filters(kind: RetryKind, body: ChangeMany) -> RetryFilters:
    message = "the body is not valid"
    given: dict[str, Any] = {name: value for name in RetryFilters._fields if (value := getattr(body, name)) is not None}
    check_filters(kind, given, message)
    wrong = [
        FieldError(name, "contains the character U+0000")
        for name, value in given.items()
        if isinstance(value, str) and "\x00" in value
    ]
    if not given and not body.all:
        wrong.append(FieldError("all", f"must be true when no filter is given ({', '.join(FILTERS_OF[kind])})"))
    if given and body.all:
        wrong.append(FieldError("all", "cannot be combined with a filter"))
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
        raise InvalidInput("the body is not valid", [FieldError("cursor", "is not a cursor of this API")]) from exc


async def _event_id(request: Request, services: Services) -> EventId:
    """Our event id, from ours or the producer's."""
    await bodies.read(request, bodies.Nothing)
    async with services.database.connection() as connection:
        return (await find_event(connection, request.path_params["id"])).id


async def _delivery_id(request: Request, _: Services) -> DeliveryId:
    await bodies.read(request, bodies.Nothing)
    return path_delivery_id(request)


async def _step_id(request: Request, _: Services) -> StepId:
    await bodies.read(request, bodies.Nothing)
    return path_step_id(request)


_NOUNS: dict[RetryKind, str] = {"events": "event", "deliveries": "delivery", "steps": "step"}
_ROW_ID: dict[RetryKind, Callable[[Request, Services], Awaitable[uuid.UUID]]] = {
    "events": _event_id,
    "deliveries": _delivery_id,
    "steps": _step_id,
}


def _hint(services: Services, kind: RetryKind) -> None:
    for topic in _HINTS[kind]:
        services.queue.hint(topic)


ROUTES = (
    Route("POST", "/admin/retries/{kind}/cancel", cancel_many,
          "Cancel all waiting rows of a kind that match the filters, a bounded number per call; or only count them",
          (RetriesChanged,), scope="operate", body=bodies.schema(ChangeMany), errors=(400, 404, 413, 415, 422)),
    Route("POST", "/admin/retries/{kind}/force", force_many,
          "Make all waiting rows of a kind that match the filters due now, a bounded number per call; or only count "
          "them", (RetriesChanged,), scope="operate", status=202, body=bodies.schema(ChangeMany),
          errors=(400, 404, 413, 415, 422)),
    Route("POST", "/admin/retries/events/{id:path}/cancel", _change_one("events", "cancel"),
          "Cancel a waiting event, by our id or the producer's", (RetryChanged,),
          scope="operate", errors=(404, 409, 422)),
    Route("POST", "/admin/retries/events/{id:path}/force", _change_one("events", "force"),
          "Make a waiting event due now; it still has to pass its source's gate", (RetryChanged,), scope="operate",
          status=202, errors=(404, 409, 422)),
    Route("POST", "/admin/retries/deliveries/{delivery_id}/cancel", _change_one("deliveries", "cancel"),
          "Cancel a waiting delivery", (RetryChanged,), scope="operate", errors=(404, 409, 422)),
    Route("POST", "/admin/retries/deliveries/{delivery_id}/force", _change_one("deliveries", "force"),
          "Make a waiting delivery due now; it still has to pass its trigger's gate", (RetryChanged,), scope="operate",
          status=202, errors=(404, 409, 422)),
    Route("POST", "/admin/retries/steps/{step_id}/cancel", _change_one("steps", "cancel"),
          "Cancel the retry of a step, and with it the run: at once, or (202) at its next step", (RetryChanged,),
          scope="operate", errors=(404, 409, 422)),
    Route("POST", "/admin/retries/steps/{step_id}/force", _change_one("steps", "force"),
          "Make a step that waits for a retry due now", (RetryChanged,), scope="operate", status=202,
          errors=(404, 409, 422)),
)  # fmt: skip
