"""Replay events: decide many of them again, at a rate, by the triggers that have not decided about them. (One is
replayed in `v1/events`.)"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies
from tidegate.api.admin.dead_letters import DEFAULT_RATE, ReplaysStopped
from tidegate.api.routes import Route, Services, json_response
from tidegate.errors import FieldError, InvalidInput
from tidegate.flow import control
from tidegate.flow.control import MAX_REPLAYED
from tidegate.flow.predict import replay
from tidegate.flow.predict.replay import TriggerPrediction
from tidegate.model.times import TIME_RULE
from tidegate.store import event_replays, events
from tidegate.store.event_replays import EventRange

# A preview evaluates the triggers on at most this many events, the newest.
MOST_EVALUATED = 500


class ReplayEvents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which events to replay, `rate` of them per second, oldest first: those that match the filters, or `all`.
    `dry_run` only counts them and predicts what would be launched."""

    type: str | None = None
    source: str | None = None
    received_from: datetime | None = msgspec.field(default=None, name="from")
    received_to: datetime | None = msgspec.field(default=None, name="to")
    all: bool = False
    rate: float = DEFAULT_RATE
    limit: int = MAX_REPLAYED
    dry_run: bool = False


class EventReplayPlan(msgspec.Struct, frozen=True):
    """How many events will be replayed (in a `preview`: would be), and when the first and the last. `is_cut`: more
    match. `taken_back`: so many match and are left out, since they were taken back; only a replay by id decides these
    again. In a preview, `triggers` says what each trigger would do with the `evaluated` newest of them."""

    status: Literal["preview", "scheduled"]
    count: int
    is_cut: bool
    rate: float
    first_at: datetime | None
    last_at: datetime | None
    evaluated: int
    triggers: list[TriggerPrediction]
    taken_back: int


async def replay_events(request: Request, services: Services) -> Response:
    body = await bodies.read(request, ReplayEvents)
    wanted = _wanted(body)
    async with services.database.connection() as connection:
        count, left_out, is_cut = await event_replays.count(connection, wanted, body.limit)
        if body.dry_run:
            newest = await events.list_page(
                connection, event_type=wanted.type, source=wanted.source, received_from=wanted.received_from,
                received_to=wanted.received_to, limit=min(MOST_EVALUATED, body.limit),
            )  # fmt: skip
            taken_back = await event_replays.taken_back(connection, [event.id for event in newest])
            newest = [event for event in newest if event.id not in taken_back]
            found = await replay.predict(connection, newest)
            evaluated = len(newest)
            plan = EventReplayPlan("preview", count, is_cut, body.rate, None, None, evaluated, found, left_out)
            return json_response(plan)
    done = await control.replay_events(
        services.database, wanted, bodies.actor(request), rate=body.rate, limit=body.limit
    )
    plan = EventReplayPlan("scheduled", done.total, is_cut, body.rate, done.first_at, done.last_at, 0, [], left_out)
    return json_response(plan, 202)


async def stop_event_replays(request: Request, services: Services) -> ReplaysStopped:
    await bodies.read(request, bodies.Nothing)
    return ReplaysStopped(await control.stop_event_replays(services.database, bodies.actor(request)))


def _wanted(body: ReplayEvents) -> EventRange:
    """Which events. InvalidInput names each field that is wrong."""
    errors = [
        FieldError(name, TIME_RULE)
        for name, at in (("from", body.received_from), ("to", body.received_to))
        if at is not None and at.tzinfo is None
    ]
    if any("\x00" in (text or "") for text in (body.type, body.source)):
        errors.append(FieldError("body", "contains the character U+0000"))
    if not 1 <= body.limit <= MAX_REPLAYED:
        errors.append(FieldError("limit", f"must be a whole number from 1 to {MAX_REPLAYED}"))
    wanted = EventRange(body.type, body.source, body.received_from, body.received_to)
    is_given = any(one is not None for one in wanted)
    if is_given == body.all and not (body.dry_run and not is_given):
        message = "excludes filters" if body.all else "give filters such as source and from, or all: true"
        errors.append(FieldError("all", message))
    if errors:
        raise InvalidInput("the replay is not valid", errors)
    control.check_rate(body.rate)
    return wanted


ROUTES = (
    Route("POST", "/admin/event-replays", replay_events,
          "Replay the events that match the filters, at a rate; or only predict what would be launched",
          (EventReplayPlan,), scope="operate", status=202, also=(200,), body=bodies.schema(ReplayEvents),
          errors=(422,)),
    Route("POST", "/admin/event-replays/stop", stop_event_replays,
          "Cancel the scheduled replays of events that have not started", (ReplaysStopped,), scope="operate",
          errors=(422,)),
)  # fmt: skip
