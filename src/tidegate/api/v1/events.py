"""Events: list, show, explain, take back, replay one. (Publishing is in `publish`, replaying many in
`admin/event_replays`.)"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Query, Route, Services, json_response
from tidegate.flow import control
from tidegate.flow.look import explain as explaining
from tidegate.flow.look.explain import Explanation
from tidegate.flow.look.near.look_up import MaySee
from tidegate.flow.predict import replay
from tidegate.flow.predict.replay import TriggerPrediction
from tidegate.model.event import Event
from tidegate.model.ids import EventId
from tidegate.store import event_replays, events
from tidegate.store.events import ReceiptPlace

LIST_QUERY = (
    Query("type", "string", "Only events of this type."),
    Query("source", "string", "Only events of this source."),
    Query("correlation_id", "string", "Only events with this correlation id."),
    Query("from", "date-time", "Only events received at or after this time."),
    Query("to", "date-time", "Only events received before this time."),
    *page_query(),
)
_EPOCH, _US = datetime(1970, 1, 1, tzinfo=UTC), timedelta(microseconds=1)


class EventPage(msgspec.Struct, frozen=True):
    """Events, newest first; `next_cursor` is null on the last page."""

    events: list[Event]
    next_cursor: str | None


async def list_events(request: Request, services: Services) -> EventPage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        found = await events.list_page(
            connection,
            event_type=page.get("type"),
            source=page.get("source"),
            correlation_id=page.get("correlation_id"),
            received_from=page.get("from"),
            received_to=page.get("to"),
            before=_from_cursor(page.cursor),
            limit=page.fetch_limit,
        )
    return EventPage(
        *page.cut(found, lambda event: _to_cursor(ReceiptPlace(event.received_at, event.ingress_sequence)))
    )


async def show_event(request: Request, services: Services) -> Event:
    async with services.database.connection() as connection:
        return await explaining.find_event(connection, request.path_params["id"])


async def explain_event(request: Request, services: Services) -> Explanation:
    await services.refusals.write()
    async with services.database.connection() as connection:
        return await explaining.explain(connection, request.path_params["id"], _may_see(request))


async def explain_any(request: Request, services: Services) -> Explanation:
    await services.refusals.write()
    async with services.database.connection() as connection:
        return await explaining.explain_any(connection, request.path_params["id"], _may_see(request))


def _may_see(request: Request) -> MaySee:
    """Whether whoever asks may see what belongs to a source."""
    asking = bodies.principal(request)

    def may_see(source: str | None) -> bool:
        if asking is None or asking.sources is None:
            return True
        return source is not None and asking.may_use(source)

    return may_see


class EventCancelled(msgspec.Struct, frozen=True):
    """The event was taken back before it was decided; it launches nothing."""

    id: EventId
    status: Literal["cancelled"] = "cancelled"


async def take_back_event(request: Request, services: Services) -> EventCancelled:
    await bodies.read(request, bodies.Nothing)
    async with services.database.connection() as connection:
        event = await explaining.find_event(connection, request.path_params["id"])
    await control.cancel_event(services.database, event.id, bodies.actor(request))
    services.queue.hint("retries")
    return EventCancelled(event.id)


class ReplayEvent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`dry_run`: only predict what would be launched."""

    dry_run: bool = False


class EventReplay(msgspec.Struct, frozen=True):
    """`replayed`: the event is decided again. In a `preview`, `triggers` says what each trigger would do.
    `was_taken_back`: before it was decided; its replay overrules that."""

    event_id: EventId
    status: Literal["preview", "replayed"]
    triggers: list[TriggerPrediction]
    was_taken_back: bool


async def replay_event(request: Request, services: Services) -> Response:
    body = await bodies.read(request, ReplayEvent)
    async with services.database.connection() as connection:
        event = await explaining.find_event(connection, request.path_params["id"])
        if body.dry_run:
            found = await replay.predict(connection, [event])
            is_taken_back = bool(await event_replays.taken_back(connection, [event.id]))
            return json_response(EventReplay(event.id, "preview", found, is_taken_back))
    was_taken_back = await control.replay_event(services.database, event.id, bodies.actor(request))
    services.queue.hint("retries")
    return json_response(EventReplay(event.id, "replayed", [], was_taken_back), 202)


ROUTES = (
    Route("GET", "/v1/explain/{id:path}", explain_any,
          "Explain why an event, a run or a delivery is where it is, by its id or a producer's id", (Explanation,),
          scope="read", errors=(404, 409)),
    Route("GET", "/v1/events", list_events, "List events, newest first", (EventPage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
    Route("GET", "/v1/events/{id:path}/explain", explain_event,
          "Explain why an event is where it is: every decision about it, in order", (Explanation,), scope="read",
          errors=(404, 409)),
    Route("GET", "/v1/events/{id:path}", show_event, "Show one event, by its id or the producer's id", (Event,),
          scope="read", errors=(404, 409)),
    Route("POST", "/v1/events/{id:path}/cancel", take_back_event,
          "Take back an event that waits for its time, or that its source holds, by its id or the producer's id",
          (EventCancelled,), scope="publish", errors=(404, 409)),
    Route("POST", "/v1/events/{id:path}/replay", replay_event,
          "Decide an event again, by the triggers that have not decided about it", (EventReplay,), scope="operate",
          status=202, also=(200,), body=bodies.schema(ReplayEvent), errors=(404, 409, 422)),
)  # fmt: skip


def _to_cursor(place: ReceiptPlace) -> str:
    text = f"{place.ingress_sequence}.{(place.received_at - _EPOCH) // _US}"
    return pages.encode(text.encode())


def _from_cursor(cursor: str | None) -> ReceiptPlace | None:
    if cursor is None:
        return None
    try:
        text = pages.decode(cursor).decode()
        sequence, _, received_us = text.partition(".")
        place = ReceiptPlace(_EPOCH + int(received_us) * _US, int(sequence))
        if not 0 <= int(sequence) < 2**63 or _to_cursor(place) != cursor:
            raise ValueError("tampered")
        return place
    except (ValueError, OverflowError) as exc:
        raise pages.invalid_cursor() from exc
