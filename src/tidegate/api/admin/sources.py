"""Operator requests for sources: limits, weights, pauses, breakers."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from starlette.requests import Request

from tidegate.api import bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Query, Route, Services, parameters
from tidegate.errors import FieldError, InvalidInput
from tidegate.flow import control
from tidegate.flow.predict import source_limit
from tidegate.flow.predict.source_limit import LimitPrediction
from tidegate.model.backlog import MAX_WAITING, SourceBacklog, SourceWhenFull
from tidegate.model.event import is_name
from tidegate.model.shares import MAX_WEIGHT
from tidegate.model.source import SOURCE_BREAKER, BreakerState, RateLimit, SourceBreakerPolicy
from tidegate.store import locks, sources
from tidegate.store.sources import SourceRecord

LIST_QUERY = page_query()
# In the query, for a body has no meaning in a DELETE: a proxy may drop it, and the limit would be removed.
DRY_RUN_QUERY = (Query("dry_run", "boolean", "Only predict what the change would have done."),)


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A source with its own limit (null: none), its pause, its breaker, and how many of its events are held
    (`waiting`). With `max_waiting`, those and the `undecided` ones may be so many; otherwise these are not counted."""

    source: str
    limit: int | None
    interval_ms: int | None
    pause_ms: int | None
    set_by: str | None
    paused: bool
    paused_at: datetime | None
    paused_until: datetime | None
    pause_reason: str | None
    paused_by: str | None
    breaker: SourceBreakerPolicy | None
    breaker_set_by: str | None
    breaker_state: BreakerState
    breaker_until: datetime | None
    breaker_reason: str | None
    throttled_until: datetime | None
    waiting: int
    next_attempt_at: datetime | None
    weight: int
    max_waiting: int | None
    when_full: SourceWhenFull | None
    undecided: int
    version: int
    updated_by: str
    updated_at: datetime


class SourcePage(msgspec.Struct, frozen=True):
    """Sources that have a limit, a weight, a pause, a breaker or waiting events, by name; `*` is the default limit.
    `next_cursor` is null on the last page."""

    sources: list[Source]
    next_cursor: str | None


class LimitBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`limit` events per `interval_ms`; once it is exceeded, a pause of `pause_ms`. `dry_run` only predicts what it
    would have done with the last week's events, and when what waits now would be drained."""

    limit: int
    interval_ms: int
    pause_ms: int = 0
    dry_run: bool = False


class WeightBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The source's share of a batch while several sources wait to be decided; 1 unless set."""

    weight: Annotated[int, msgspec.Meta(ge=1, le=MAX_WEIGHT)]


class BacklogBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At most `max_waiting` events of the source may be undecided or held; one more is refused, the oldest is dropped
    for it, or it becomes a dead letter."""

    max_waiting: Annotated[int, msgspec.Meta(ge=1, le=MAX_WAITING)]
    when_full: SourceWhenFull = "refuse"


class BreakerBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The breaker opens for `pause_ms` after at least `threshold` failures within `window_ms` that are at least `ratio`
    of the outcomes. With `runs`, failed runs count too; with `non_retryable`, also those that raised NonRetryable."""

    threshold: int = SOURCE_BREAKER.threshold
    ratio: float = SOURCE_BREAKER.ratio
    window_ms: int = SOURCE_BREAKER.window_ms
    pause_ms: int = SOURCE_BREAKER.pause_ms
    non_retryable: bool = False
    runs: bool = False


class PauseBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Pause until a time, for a duration, or (with neither) until resumed."""

    until: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    duration_ms: int | None = None
    reason: str | None = None


async def list_sources(request: Request, services: Services) -> SourcePage:
    page = pages.read(request, LIST_QUERY)
    async with services.database.connection() as connection:
        now = await locks.now(connection)
        found = await sources.list_page(connection, after=page.cursor, limit=page.fetch_limit)
    rows, next_cursor = page.cut(found, lambda record: record.source)
    return SourcePage([_source(record, now) for record in rows], next_cursor)


async def set_limit(request: Request, services: Services) -> Source | LimitPrediction:
    is_dry_run = _is_dry_run(request)
    given = await bodies.read(request, LimitBody)
    try:
        limit = RateLimit(limit=given.limit, interval_ms=given.interval_ms, pause_ms=given.pause_ms)
    except ValueError as exc:
        field, _, message = str(exc).partition(" ")
        raise InvalidInput("the limit is not valid", [FieldError(field, message)]) from exc
    if is_dry_run or given.dry_run:
        return await _predict(request, services, limit)
    return await _done(services, await control.set_limit(services.database, _name(request), limit, _actor(request)))


async def remove_limit(request: Request, services: Services) -> Source | LimitPrediction:
    is_dry_run = _is_dry_run(request)
    body = await bodies.read_json(request)
    if isinstance(body, dict) and "dry_run" in body:
        message = "is not read from the body of a DELETE: give it in the query, ?dry_run=true"
        raise InvalidInput("the body is not valid", [FieldError("dry_run", message)])
    await bodies.read(request, bodies.Nothing)
    if is_dry_run:
        return await _predict(request, services, None)
    return await _done(services, await control.set_limit(services.database, _name(request), None, _actor(request)))


async def set_weight(request: Request, services: Services) -> Source:
    given = await bodies.read(request, WeightBody)
    changed = await control.set_weight(services.database, _name(request), given.weight, _actor(request))
    return await _done(services, changed)


async def set_backlog(request: Request, services: Services) -> Source:
    given = await bodies.read(request, BacklogBody)
    return await _change_backlog(request, services, SourceBacklog(given.max_waiting, given.when_full))


async def remove_backlog(request: Request, services: Services) -> Source:
    await bodies.read(request, bodies.Nothing)
    return await _change_backlog(request, services, None)


async def _change_backlog(request: Request, services: Services, backlog: SourceBacklog | None) -> Source:
    changed = await control.set_backlog(services.database, _name(request), backlog, _actor(request))
    await services.ingest.caps_changed()
    return await _done(services, changed)


def _is_dry_run(request: Request) -> bool:
    asked: bool = parameters(request, DRY_RUN_QUERY).get("dry_run", False)
    return asked


async def _predict(request: Request, services: Services, limit: RateLimit | None) -> LimitPrediction:
    source = _name(request)
    if not is_name(source):
        raise InvalidInput(
            "the source is not valid", [FieldError("source", "a dry run is for one source: give its name")]
        )
    async with services.prediction_turn.take():
        return await source_limit.predict(services.database, source, limit)


async def set_breaker(request: Request, services: Services) -> Source:
    given = await bodies.read(request, BreakerBody)
    try:
        policy = SourceBreakerPolicy(**msgspec.structs.asdict(given))
    except ValueError as exc:
        field, _, message = str(exc).partition(" ")
        raise InvalidInput("the breaker is not valid", [FieldError(field, message)]) from exc
    return await _done(services, await control.set_breaker(services.database, _name(request), policy, _actor(request)))


async def remove_breaker(request: Request, services: Services) -> Source:
    await bodies.read(request, bodies.Nothing)
    return await _done(services, await control.set_breaker(services.database, _name(request), None, _actor(request)))


async def pause_source(request: Request, services: Services) -> Source:
    given = await bodies.read(request, PauseBody)
    bodies.check_reason(given.reason)
    paused = await control.pause(
        services.database,
        _name(request),
        until=given.until,
        duration_ms=given.duration_ms,
        reason=given.reason,
        actor=_actor(request),
    )
    return await _done(services, paused)


async def resume_source(request: Request, services: Services) -> Source:
    await bodies.read(request, bodies.Nothing)
    return await _done(services, await control.resume(services.database, _name(request), _actor(request)))


async def _done(services: Services, changed: SourceRecord) -> Source:
    """The answer to a change; workers are notified to act on it at once."""
    services.queue.hint("plans")
    services.queue.hint("retries")
    async with services.database.connection() as connection:
        return _source(changed, await locks.now(connection))


def _name(request: Request) -> str:
    name: str = request.path_params["source"]
    return name


def _actor(request: Request) -> str:
    return bodies.actor(request)


def _source(record: SourceRecord, now: datetime) -> Source:
    paused = record.paused_at is not None and (record.paused_until is None or record.paused_until > now)
    return Source(
        source=record.source,
        limit=record.rate_limit,
        interval_ms=record.interval_ms,
        pause_ms=record.pause_ms,
        set_by=record.limit_set_by,
        paused=paused,
        paused_at=record.paused_at if paused else None,
        paused_until=record.paused_until if paused else None,
        pause_reason=record.pause_reason if paused else None,
        paused_by=record.paused_by if paused else None,
        breaker=record.breaker,
        breaker_set_by=record.breaker_set_by,
        breaker_state=record.breaker_state,
        breaker_until=record.breaker_until,
        breaker_reason=record.breaker_reason,
        throttled_until=record.throttled_until,
        waiting=record.waiting,
        next_attempt_at=record.next_attempt_at,
        weight=record.weight,
        max_waiting=record.max_waiting,
        when_full=record.when_full,
        undecided=record.undecided,
        version=record.version,
        updated_by=record.updated_by,
        updated_at=record.updated_at,
    )


_REFUSALS = (400, 408, 413, 415, 422)

ROUTES = (
    Route("GET", "/admin/sources", list_sources,
          "List sources with a limit, a weight, a pause, a breaker or waiting events", (SourcePage,),
          scope="read", query=LIST_QUERY, errors=(422,)),
    Route("PUT", "/admin/sources/{source:path}/limit", set_limit,
          "Set a source's rate limit (`*`: the default for all others), or predict its effect",
          (Source, LimitPrediction), scope="admin", query=DRY_RUN_QUERY, body=bodies.schema(LimitBody),
          errors=_REFUSALS),
    Route("DELETE", "/admin/sources/{source:path}/limit", remove_limit,
          "Remove a source's rate limit, or predict the effect", (Source, LimitPrediction), scope="admin",
          query=DRY_RUN_QUERY, errors=_REFUSALS),
    Route("PUT", "/admin/sources/{source:path}/weight", set_weight,
          "Set a source's weight: its share while several sources wait to be decided", (Source,), scope="admin",
          body=bodies.schema(WeightBody), errors=_REFUSALS),
    Route("PUT", "/admin/sources/{source:path}/backlog", set_backlog,
          "Cap how many of a source's events may wait, and say what happens to one more", (Source,), scope="admin",
          body=bodies.schema(BacklogBody), errors=_REFUSALS),
    Route("DELETE", "/admin/sources/{source:path}/backlog", remove_backlog,
          "Remove the cap on what waits of a source", (Source,), scope="admin", errors=_REFUSALS),
    Route("PUT", "/admin/sources/{source:path}/breaker", set_breaker, "Set a source's breaker policy", (Source,),
          scope="admin", body=bodies.schema(BreakerBody), errors=_REFUSALS),
    Route("DELETE", "/admin/sources/{source:path}/breaker", remove_breaker,
          "Remove a source's breaker policy: the settings apply again", (Source,), scope="admin", errors=_REFUSALS),
    Route("POST", "/admin/sources/{source:path}/pause", pause_source, "Pause a source", (Source,), scope="operate",
          body=bodies.schema(PauseBody), errors=_REFUSALS),
    Route("POST", "/admin/sources/{source:path}/resume", resume_source,
          "Resume a source: end its pause and close its breaker", (Source,), scope="operate", errors=(*_REFUSALS, 404)),
)  # fmt: skip
