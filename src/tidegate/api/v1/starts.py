"""Start workflows by name, and wait for their runs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import bodies, problems
from tidegate.api.routes import Query, Route, Services, json_response, parameters
from tidegate.errors import FieldError, InvalidInput, TidegateError
from tidegate.flow.accept.refusals import GivenEvent
from tidegate.flow.look.ends import MAX_WAIT_SECONDS, Ended
from tidegate.model.event import is_text_id
from tidegate.model.ids import EventId, RunId
from tidegate.model.run import RunStatus
from tidegate.model.start import START, StartedRun, source_of_starts
from tidegate.model.units import duration_ms

T = TypeVar("T")

WAIT = Query("wait", "string", f"How long to wait for the run's end, such as 30s; at most {MAX_WAIT_SECONDS:g}s.")


class StartBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The parameters of the run by name. The same `id` again is the same run."""

    parameters: dict[str, Any] = {}
    id: str | None = None
    correlation_id: str | None = None


class RunStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The run of a start. `status` is that of the run once it has ended (200); until then (202) `accepted`, or
    `duplicate` if the id was started before; `not_launched` if the start was decided and launches no run: `error` says
    why."""

    run_id: RunId
    event_id: EventId
    status: RunStatus | Literal["accepted", "duplicate", "not_launched"]
    output: Any = None
    error: str | None = None


async def start_run(request: Request, services: Services) -> Response:
    seconds = wait_seconds(parameters(request, (WAIT,)))
    body = await bodies.read(request, StartBody, services.settings.limits.max_payload_bytes + bodies.MAX_BYTES)
    correlation = body.correlation_id or request.headers.get("x-request-id")
    slug = request.path_params["slug"]
    try:
        started = await services.starts.start(
            slug, body.parameters, id=body.id,
            correlation_id=correlation if body.correlation_id or is_text_id(correlation or "") else None,
        )  # fmt: skip
    except TidegateError as exc:
        given = GivenEvent(body.id, START, source_of_starts(slug))
        services.refusals.keep(problems.response(exc).status_code, exc, lambda: [given])
        raise
    ended = None
    if seconds:
        ended = await unless_gone(request, services.ends.wait(started.run_id, seconds, started.event_id))
    return json_response(_answer(started, ended), 200 if ended is not None else 202)


def wait_seconds(values: Mapping[str, str]) -> float:
    """The time to wait, 0 without one. InvalidInput when it is not a duration, or too long."""
    if "wait" not in values:
        return 0.0
    try:
        seconds = duration_ms(values["wait"]) / 1000
        if seconds > MAX_WAIT_SECONDS:
            raise ValueError(f"must be at most {MAX_WAIT_SECONDS:g}s")
    except ValueError as exc:
        raise InvalidInput("a query parameter is not valid", [FieldError("wait", str(exc))]) from exc
    return seconds


async def unless_gone(request: Request, waiting: Coroutine[None, None, T]) -> T | None:
    """What is waited for; None as soon as the client has disconnected."""
    work, gone = asyncio.ensure_future(waiting), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        work.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _answer(started: StartedRun, ended: Ended | None) -> RunStarted:
    answer = RunStarted(run_id=started.run_id, event_id=started.event_id, status=started.status)
    if ended is None:
        return answer
    if (run := ended.run) is None:
        return msgspec.structs.replace(answer, status="not_launched", error=ended.not_launched)
    return msgspec.structs.replace(answer, status=run.status, output=run.output, error=run.error)


ROUTES = (
    Route("POST", "/v1/workflows/{slug}/runs", start_run,
          "Start a workflow; the same id again is the same run. With `wait`, 200 when the run ended meanwhile",
          (RunStarted,), scope="publish", status=202, also=(200,), query=(WAIT,), body=bodies.schema(StartBody),
          errors=(400, 404, 408, 409, 413, 415, 422)),
)  # fmt: skip
