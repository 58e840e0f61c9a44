"""Runs and their steps: list, show, cancel, retry, rerun; one, or all that filters describe."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies, pages
from tidegate.api.pages import page_query
from tidegate.api.routes import Query, Route, Services, json_response, path_run_id
from tidegate.api.routes import parameters as query_parameters
from tidegate.api.v1.starts import WAIT, RunStarted, unless_gone, wait_seconds
from tidegate.errors import FieldError, InvalidInput, NotFound
from tidegate.flow import control
from tidegate.flow.control import MAX_PER_CALL, RunResumed, RunsChanged, RunVerb
from tidegate.model.child import ChildRun
from tidegate.model.ids import EventId, RunId
from tidegate.model.run import RUN_STATUSES, Run, RunStatus, Step
from tidegate.model.times import TIME_RULE
from tidegate.store import children, run_search, runs, starts, steps
from tidegate.store.db import Connection
from tidegate.store.run_search import RunFilters

MAX_CHILDREN = 500

LIST_QUERY = (
    Query("workflow", "string", "Only runs of this workflow."),
    Query("status", "string", "Only runs in this status.", RUN_STATUSES),
    Query("event_id", "uuid", "Only runs that this event launched."),
    Query("correlation_id", "string", "Only runs with this correlation id."),
    Query("from", "date-time", "Only runs created at or after this time."),
    Query("to", "date-time", "Only runs created before this time."),
    Query("error", "string", "Only runs with this text in their error or warning (case-insensitive)."),
    Query("parameters", "string", 'Only runs whose parameters contain this JSON object, e.g. {"order_id": 7}.'),
    Query(
        "tag", "string", "Only runs with this tag: `customer:c-7`; given several times, with all of them.", repeats=True
    ),
    *page_query("uuid"),
)


class RunPage(msgspec.Struct, frozen=True):
    """Runs, newest first; `next_cursor` is null on the last page."""

    runs: list[Run]
    next_cursor: str | None


class RunDetail(msgspec.Struct, frozen=True):
    """A run with its steps; the run that it is a child of, if it is one, and the children of its steps in order: the
    first 500, and how many there are."""

    run: Run
    steps: list[Step]
    parent_run_id: RunId | None = None
    children: list[ChildRun] = []
    children_total: int = 0


class RunCancelled(msgspec.Struct, frozen=True):
    """`cancelled`: the run was waiting and has ended, or its start was held and launches none (`is_launched` is false).
    `cancelling`: it is running, and stops at its next step; if it has begun its last one, it ends as if nobody had
    asked."""

    id: RunId
    status: Literal["cancelled", "cancelling"]
    is_launched: bool = True


class RunRetried(msgspec.Struct, frozen=True):
    """`resumed`: the run continues after its completed steps. `scheduled`: it waits for a free slot of its trigger."""

    id: RunId
    status: RunResumed


class RunRepeated(msgspec.Struct, frozen=True):
    """The new run, and the run that it repeats from the start."""

    id: RunId
    rerun_of: RunId


class ResumeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`on_current_code` must be true: the run's recorded steps do not fit the code that it resumes on."""

    on_current_code: bool


class RunOnCurrentCode(msgspec.Struct, frozen=True):
    """The run is due now."""

    id: RunId
    status: Literal["resumed"]


class ChangeRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which runs to change: those that match the filters, or `all`. `dry_run` only counts them; `cursor` continues
    where the call before ended."""

    workflow: str | None = None
    status: RunStatus | None = None
    event_id: EventId | None = None
    correlation_id: str | None = None
    created_from: datetime | None = msgspec.field(default=None, name="from")
    created_to: datetime | None = msgspec.field(default=None, name="to")
    error: str | None = None
    parameters: dict[str, Any] | None = None
    tag: str | None = None
    all: bool = False
    dry_run: bool = False
    limit: int = MAX_PER_CALL
    cursor: str | None = None


class RunsChange(msgspec.Struct, frozen=True):
    """What was done: how many runs were changed, how many refused and why, and how many remain. `next_cursor` is null
    when none remain; in a `preview`, `remaining` is how many would be changed. A call that is repeated with its cursor,
    as after a lost answer, changes no run twice; a `preview` gives the cursor of the first call."""

    verb: RunVerb
    status: Literal["preview", "done"]
    done: int
    refused: int
    reasons: dict[str, int]
    remaining: int
    next_cursor: str | None


async def list_runs(request: Request, services: Services) -> RunPage:
    page = pages.read(request, LIST_QUERY)
    filters = _filters(page.given, page.get("parameters"))
    async with services.database.connection() as connection:
        found = await run_search.list_page(connection, filters, before_id=page.cursor, limit=page.fetch_limit)
    return RunPage(*page.cut(found, lambda run: run.id))


def _filters(given: Mapping[str, Any], parameters: str | None) -> RunFilters:
    status: RunStatus | None = given.get("status")
    return RunFilters(
        workflow=given.get("workflow"),
        statuses=None if status is None else (status,),
        event_id=given.get("event_id"),
        correlation_id=given.get("correlation_id"),
        created_from=given.get("from"),
        created_to=given.get("to"),
        error=given.get("error"),
        parameters=None if parameters is None else _object(parameters),
        tags=_tags(given.get("tag") or []),
    )


def _object(text: str) -> str:
    """A JSON object as the database reads it. InvalidInput when it is not one."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        value = None
    if not isinstance(value, dict) or "\\u0000" in text:
        error = FieldError("parameters", 'must be a JSON object, such as {"order_id": 7}')
        raise InvalidInput("a query parameter is not valid", [error])
    return msgspec.json.encode(value).decode()


def _tags(texts: Sequence[str]) -> str | None:
    """Tags as the database reads them. InvalidInput when one is none, or two contradict each other."""
    found: dict[str, str] = {}
    for text in texts:
        name, colon, value = text.partition(":")
        why = "must be a name and a value, such as customer:c-7"
        if found.get(name, value) != value:
            why = f"asks for two values of {name[:60]!r}, and a run has one"
        elif name and colon and value and "\x00" not in text:
            found[name] = value
            continue
        raise InvalidInput("a query parameter is not valid", [FieldError("tag", why)])
    return msgspec.json.encode(found).decode() if found else None


async def show_run(request: Request, services: Services) -> RunDetail | Response:
    run_id, seconds = path_run_id(request), wait_seconds(query_parameters(request, (WAIT,)))
    async with services.database.connection() as connection:
        event_id = await starts.event_of(connection, run_id) if seconds else None
    if seconds:
        await unless_gone(request, services.ends.wait(run_id, seconds, event_id))
    async with services.database.connection() as connection:
        run = await runs.get(connection, run_id)
        if run is None:
            return json_response(await _not_launched(connection, run_id), 202)
        parents = await children.of_runs(connection, [run_id])
        listed = await children.list_of_run(connection, run_id, MAX_CHILDREN)
        is_cut = len(listed) == MAX_CHILDREN
        return RunDetail(
            run,
            await steps.list_of_run(connection, run_id),
            parents[run_id].run_id if run_id in parents else None,
            listed,
            await children.count_of_run(connection, run_id) if is_cut else len(listed),
        )


async def _not_launched(connection: Connection, run_id: RunId) -> RunStarted:
    """The start that will launch the run, or has not. NotFound when there is none."""
    event_id = await starts.event_of(connection, run_id)
    if event_id is None:
        raise NotFound(f"no run {run_id}")
    why = (await starts.unlaunched(connection, {run_id: event_id})).get(run_id)
    status: Literal["accepted", "not_launched"] = "accepted" if why is None else "not_launched"
    return RunStarted(run_id=run_id, event_id=event_id, status=status, error=why)


async def cancel_run(request: Request, services: Services) -> Response:
    run_id = path_run_id(request)
    await bodies.read(request, bodies.Nothing)
    done = await control.cancel_run(services.database, run_id, bodies.actor(request), services.settings.trigger_error)
    services.queue.hint("deliveries")  # a slot may have become free
    services.queue.hint("runs")
    services.queue.hint("inbox")  # its end may be published
    async with services.database.connection() as connection:
        is_launched = done == "cancelling" or await runs.get(connection, run_id) is not None
    return json_response(RunCancelled(run_id, done, is_launched), 200 if done == "cancelled" else 202)


async def retry_run(request: Request, services: Services) -> Response:
    run_id = path_run_id(request)
    await bodies.read(request, bodies.Nothing)
    done = await control.retry_run(services.database, run_id, bodies.actor(request))
    services.queue.hint("runs")
    return json_response(RunRetried(run_id, done), 202)


async def rerun_run(request: Request, services: Services) -> Response:
    run_id = path_run_id(request)
    body = await bodies.read(request, bodies.CallBody)
    new_id = await control.rerun_run(services.database, run_id, bodies.actor(request), body.id)
    services.queue.hint("runs")
    return json_response(RunRepeated(new_id, run_id), 202)


async def cancel_runs(request: Request, services: Services) -> RunsChange:
    return await _change(request, services, "cancel")


async def retry_runs(request: Request, services: Services) -> RunsChange:
    return await _change(request, services, "retry")


async def rerun_runs(request: Request, services: Services) -> RunsChange:
    return await _change(request, services, "rerun")


async def _change(request: Request, services: Services, verb: RunVerb) -> RunsChange:
    body = await bodies.read(request, ChangeRuns)
    filters = _asked(body, verb)
    if body.dry_run:
        found = await control.preview_runs(services.database, verb, filters)
        return RunsChange(verb, "preview", 0, 0, {}, found.remaining, _to_cursor(found))
    after_id, before, call_id = _from_cursor(body.cursor)
    done = await control.change_runs(
        services.database, verb, filters, bodies.actor(request), services.settings.trigger_error, after_id=after_id,
        before=before, call_id=call_id, limit=body.limit,
    )  # fmt: skip
    services.queue.hint("runs")
    if verb == "cancel":
        services.queue.hint("deliveries")
    return RunsChange(verb, "done", done.done, done.refused, done.reasons, done.remaining, _to_cursor(done))


def _asked(body: ChangeRuns, verb: RunVerb) -> RunFilters:
    """The filters of a bulk request. InvalidInput names each field that is wrong."""
    errors = [
        FieldError(name, TIME_RULE)
        for name, at in (("from", body.created_from), ("to", body.created_to))
        if at is not None and at.tzinfo is None
    ]
    texts = (body.workflow, body.correlation_id, body.error, body.tag)
    if any("\x00" in (text or "") for text in texts):
        errors.append(FieldError("body", "contains the character U+0000"))
    if not 1 <= body.limit <= MAX_PER_CALL:
        errors.append(FieldError("limit", f"must be a whole number from 1 to {MAX_PER_CALL}"))
    if body.status is not None and body.status not in control.RUN_VERBS[verb]:
        errors.append(FieldError("status", f"{verb} applies to runs that are {' or '.join(control.RUN_VERBS[verb])}"))
    given = {
        "workflow": body.workflow, "status": body.status, "event_id": body.event_id, "error": body.error,
        "correlation_id": body.correlation_id, "from": body.created_from, "to": body.created_to,
        "tag": None if body.tag is None else [body.tag],
    }  # fmt: skip
    parameters = None if body.parameters is None else msgspec.json.encode(body.parameters).decode()
    if errors:
        raise InvalidInput(f"the {verb} is not valid", errors)
    filters = _filters(given, parameters)
    if filters.is_given == body.all and not (body.dry_run and not filters.is_given):
        message = "give filters such as workflow and status, or all: true" if not body.all else "excludes filters"
        raise InvalidInput(f"the {verb} is not valid", [FieldError("all", message)])
    return filters


def _to_cursor(done: RunsChanged) -> str | None:
    if done.after_id is None:
        return None
    return pages.encode(msgspec.json.encode((done.after_id, done.before, done.call_id)))


def _from_cursor(cursor: str | None) -> tuple[uuid.UUID | None, datetime | None, uuid.UUID | None]:
    if cursor is None:
        return None, None, None
    try:
        place = msgspec.json.decode(pages.decode(cursor), type=tuple[uuid.UUID, datetime, uuid.UUID])
    except (ValueError, msgspec.MsgspecError) as exc:
        raise pages.invalid_cursor() from exc
    if place[1].tzinfo is None:
        raise pages.invalid_cursor()
    return place


async def resume_run(request: Request, services: Services) -> RunOnCurrentCode:
    run_id = path_run_id(request)
    body = await bodies.read(request, ResumeBody)
    if not body.on_current_code:
        raise InvalidInput("the run cannot be resumed", [FieldError("on_current_code", "must be true")])
    await control.resume_run(services.database, run_id, bodies.actor(request))
    services.queue.hint("runs")
    return RunOnCurrentCode(run_id, "resumed")


ROUTES = (
    Route("GET", "/v1/runs", list_runs, "List runs, newest first", (RunPage,), scope="read", query=LIST_QUERY,
          errors=(422,)),
    Route("POST", "/v1/runs/cancel", cancel_runs,
          "Cancel the unfinished runs that match the filters; or only count them", (RunsChange,), scope="operate",
          body=bodies.schema(ChangeRuns), errors=(422,)),
    Route("POST", "/v1/runs/retry", retry_runs,
          "Resume the failed or cancelled runs that match the filters; or only count them", (RunsChange,),
          scope="operate", body=bodies.schema(ChangeRuns), errors=(422,)),
    Route("POST", "/v1/runs/rerun", rerun_runs,
          "Execute the finished runs that match the filters again from the start; or only count them", (RunsChange,),
          scope="operate", body=bodies.schema(ChangeRuns), errors=(422,)),
    Route("GET", "/v1/runs/{run_id}", show_run,
          "Show one run with its steps; with `wait`, when it has ended; 202 if its start has not launched it",
          (RunDetail, RunStarted), scope="read", also=(202,), query=(WAIT,), errors=(404, 422)),
    Route("POST", "/v1/runs/{run_id}/cancel", cancel_run,
          "Cancel a run: a waiting one at once, a running one (202) at its next step", (RunCancelled,), scope="operate",
          also=(202,), errors=(404, 409)),
    Route("POST", "/v1/runs/{run_id}/retry", retry_run,
          "Resume a failed or cancelled run after its completed steps", (RunRetried,), scope="operate", status=202,
          errors=(404, 409)),
    Route("POST", "/v1/runs/{run_id}/rerun", rerun_run,
          "Execute a finished run again from the start, as a new run", (RunRepeated,), scope="operate", status=202,
          body=bodies.schema(bodies.CallBody), errors=(400, 404, 408, 409, 413, 415, 422)),
    Route("POST", "/v1/runs/{run_id}/resume", resume_run,
          "Resume a run that waits for a version of its code, on the code that workers have now", (RunOnCurrentCode,),
          scope="operate", body=bodies.schema(ResumeBody, ("on_current_code",)),
          errors=(400, 404, 408, 409, 413, 415, 422)),
)  # fmt: skip
