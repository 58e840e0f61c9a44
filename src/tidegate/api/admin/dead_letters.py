"""Dead letters: list and show them, replay one, or many at a rate."""

from __future__ import annotations

import uuid
from datetime import datetime
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Query, Route, Services, json_response, path_dead_letter_id
from tidegate.errors import FieldError, InvalidInput, NotFound
from tidegate.flow import control
from tidegate.flow.keep.replay import TOPICS
from tidegate.model.ids import DeadLetterId, TriggerId
from tidegate.model.times import TIME_RULE
from tidegate.store import dead_letters
from tidegate.store.dead_letters import LETTER_KINDS, LETTER_STATES, DeadLetter, DeadLetterFilters, LetterKind

DEFAULT_RATE = 10.0

LIST_QUERY = (
    Query("kind", "string", "Only dead letters of this kind.", LETTER_KINDS),
    Query("source", "string", "Only of this source's events."),
    Query("trigger_id", "uuid", "Only of this trigger's deliveries and runs."),
    Query("workflow", "string", "Only of this workflow's deliveries and runs."),
    Query("reason", "string", "Only with this text in the reason (case-insensitive)."),
    Query("since", "date-time", "Only dead-lettered at this time or later."),
    Query("until", "date-time", "Only dead-lettered before this time."),
    Query(
        "state",
        "string",
        "Only in this state (default `open`: neither replayed nor scheduled for replay).",
        LETTER_STATES,
    ),
    *page_query("uuid"),
)


class DeadLetterPage(msgspec.Struct, frozen=True):
    """Dead letters, newest first; `next_cursor` is null on the last page."""

    dead_letters: list[DeadLetter]
    next_cursor: str | None


class ReplayOne(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`force`: replay it even if it was replayed before."""

    force: bool = False


class ReplayMany(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which open dead letters to replay, `rate` of them per second: those that match the filters, or `all`. `dry_run`
    only counts them."""

    kind: LetterKind | None = None
    source: str | None = None
    trigger_id: TriggerId | None = None
    workflow: str | None = None
    reason: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    all: bool = False
    rate: float = DEFAULT_RATE
    dry_run: bool = False


class LetterReplay(msgspec.Struct, frozen=True):
    """`replayed`: as the event, delivery or run `replayed_into`. `scheduled`: its run waits for a trigger slot."""

    id: DeadLetterId
    kind: LetterKind
    status: Literal["replayed", "scheduled"]
    replayed_into: uuid.UUID | None


class ReplayPlan(msgspec.Struct, frozen=True):
    """How many dead letters will be replayed (in a `preview`: would be), and when the first and the last of them."""

    status: Literal["preview", "scheduled"]
    count: int
    rate: float
    first_at: datetime | None
    last_at: datetime | None


class ReplaysStopped(msgspec.Struct, frozen=True):
    """How many scheduled replays were cancelled."""

    count: int


async def list_letters(request: Request, services: Services) -> DeadLetterPage:
    page = pages.read(request, LIST_QUERY)
    filters = DeadLetterFilters(*(page.get(name) for name in DeadLetterFilters._fields))
    async with services.database.connection() as connection:
        found = await dead_letters.list_page(
            connection, filters, state=page.get("state") or "open", before_id=page.cursor, limit=page.fetch_limit
        )
    return DeadLetterPage(*page.cut(found, lambda letter: letter.id))


async def show_letter(request: Request, services: Services) -> DeadLetter:
    letter_id = path_dead_letter_id(request)
    async with services.database.connection() as connection:
        found = await dead_letters.get(connection, letter_id)
    if found is None:
        raise NotFound(f"no dead letter {letter_id}")
    return found


async def replay_letter(request: Request, services: Services) -> Response:
    letter_id = path_dead_letter_id(request)
    body = await bodies.read(request, ReplayOne)
    done = await control.replay_letter(services.database, letter_id, bodies.actor(request), force=body.force)
    services.queue.hint(TOPICS[done.kind])
    status: Literal["replayed", "scheduled"] = "replayed" if done.into is not None else "scheduled"
    return json_response(LetterReplay(letter_id, done.kind, status, done.into), 202)


async def replay_letters(request: Request, services: Services) -> Response:
    body = await bodies.read(request, ReplayMany)
    wrong = [
        FieldError(name, TIME_RULE)
        for name in ("since", "until")
        if (at := getattr(body, name)) is not None and at.tzinfo is None
    ]
    texts = (body.source, body.workflow, body.reason)
    wrong += (
        [FieldError("body", "contains the character U+0000")] if any("\x00" in (text or "") for text in texts) else []
    )
    filters = DeadLetterFilters(*(getattr(body, name) for name in DeadLetterFilters._fields))
    is_filtered = any(one is not None for one in filters)
    if is_filtered == body.all and not (body.dry_run and not is_filtered):
        text = "excludes filters" if body.all else "give filters such as kind and source, or all: true"
        wrong.append(FieldError("all", text))
    if wrong:
        raise InvalidInput("the replay is not valid", wrong)
    if body.dry_run:
        count = await control.preview_replay(services.database, filters, rate=body.rate)
        return json_response(ReplayPlan("preview", count, body.rate, None, None))
    done = await control.replay_letters(services.database, filters, bodies.actor(request), rate=body.rate)
    return json_response(ReplayPlan("scheduled", done.total, body.rate, done.first_at, done.last_at), 202)


async def stop_replays(request: Request, services: Services) -> ReplaysStopped:
    await bodies.read(request, bodies.Nothing)
    return ReplaysStopped(await control.stop_replays(services.database, bodies.actor(request)))


ROUTES = (
    Route("GET", "/admin/dead-letters", list_letters, "List dead letters, newest first", (DeadLetterPage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
    Route("POST", "/admin/dead-letters/replay", replay_letters,
          "Replay the open dead letters that match the filters, at a rate; or only count them", (ReplayPlan,),
          scope="operate", status=202, also=(200,), body=bodies.schema(ReplayMany), errors=(422,)),
    Route("POST", "/admin/dead-letters/stop", stop_replays, "Cancel the scheduled replays that have not started",
          (ReplaysStopped,), scope="operate", errors=(422,)),
    Route("GET", "/admin/dead-letters/{dead_letter_id}", show_letter, "Show one dead letter", (DeadLetter,),
          scope="read", errors=(404,)),
    Route("POST", "/admin/dead-letters/{dead_letter_id}/replay", replay_letter,
          "Replay one dead letter; one that was replayed before needs `force`", (LetterReplay,), scope="operate",
          status=202, body=bodies.schema(ReplayOne), errors=(404, 409, 422)),
)  # fmt: skip
