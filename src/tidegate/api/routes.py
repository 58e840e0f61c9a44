"""The route table: one entry per operation. The router and the OpenAPI document are built from it."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidegate.api.admission import Admission
from tidegate.api.problems import HEADERS, Problem
from tidegate.clock import has_utc
from tidegate.errors import FieldError, InvalidInput
from tidegate.flow.accept.access import Access
from tidegate.flow.accept.approvals import ApprovalLinks
from tidegate.flow.accept.ingest import Ingest
from tidegate.flow.accept.refusals import PublishRefusals
from tidegate.flow.accept.starts import Starts
from tidegate.flow.accept.webhooks import Webhooks
from tidegate.flow.look.ends import RunEnds
from tidegate.flow.look.health import Exposition, Snapshots
from tidegate.flow.look.ready import Readiness
from tidegate.flow.predict.turn import PredictionTurn
from tidegate.model.ids import DeadLetterId, DeliveryId, RunId, StepId, TriggerId
from tidegate.model.times import parse_time
from tidegate.model.token import Scope
from tidegate.queue.port import Queue
from tidegate.settings import Settings
from tidegate.store.db import Database

MAX_PAGE = 500


@dataclass(frozen=True, slots=True)
class Services:
    """What handlers use."""

    settings: Settings
    database: Database
    ingest: Ingest
    queue: Queue
    exposition: Exposition
    snapshots: Snapshots
    readiness: Readiness
    access: Access
    webhooks: Webhooks
    admission: Admission
    refusals: PublishRefusals
    starts: Starts
    ends: RunEnds
    prediction_turn: PredictionTurn
    links: ApprovalLinks


Handler = Callable[[Request, Services], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class Query:
    """A query parameter: its name, its type and what it means. One that `repeats` has a list of values."""

    name: str
    type: Literal["string", "integer", "boolean", "date-time", "uuid"]
    description: str
    choices: tuple[str, ...] = ()
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """One operation. `returns` are the types of its answer; a handler may also return a complete Response.

    `scope` is what a token must have; `public` needs no token: it reveals nothing about events, or is signed.
    `also` are other statuses with the same type of answer, such as 200 when there was nothing to do.
    """

    method: str
    path: str
    handler: Handler
    summary: str
    returns: tuple[Any, ...]
    scope: Scope | Literal["public"] = field(kw_only=True)
    status: int = 200
    also: tuple[int, ...] = ()
    query: tuple[Query, ...] = ()
    body: dict[str, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    media: str = "application/json"


def parameters(request: Request, route_query: tuple[Query, ...]) -> dict[str, Any]:
    """The query parameters, checked and typed. InvalidInput names each one that is unknown, malformed or given twice:
    a proxy and this server may not agree which one counts."""
    errors: list[FieldError] = []
    values: dict[str, Any] = {}
    known = {query.name: query for query in route_query}
    for name, text in request.query_params.multi_items():
        query = known.get(name)
        if query is None:
            choices = f"supported: {', '.join(known)}" if known else "this route has none"
            errors.append(FieldError(name[:60], f"unknown parameter; {choices}"))
            continue
        try:
            value = _typed(query, text)
        except ValueError as exc:
            errors.append(FieldError(name, str(exc)))
            continue
        if query.repeats:
            values.setdefault(name, []).append(value)
        elif name in values:
            errors.append(FieldError(name, "is given more than once"))
        else:
            values[name] = value
    if errors:
        raise InvalidInput("a query parameter is not valid", errors)
    return values


def _typed(query: Query, text: str) -> Any:
    if "\x00" in text:
        raise ValueError("contains the character U+0000")
    if query.choices and text not in query.choices:
        raise ValueError(f"must be one of {', '.join(query.choices)}")
    if query.type == "integer":
        if len(text) > 20 or not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_PAGE:
            raise ValueError(f"must be a whole number from 1 to {MAX_PAGE}")
        return int(text)
    if query.type == "boolean":
        if text not in ("true", "false"):
            raise ValueError("must be true or false")
        return text == "true"
    if query.type == "uuid":
        try:
            return uuid.UUID(text)
        except ValueError as exc:
            raise ValueError("must be a UUID") from exc
    if query.type == "date-time":
        parsed = parse_time(text)
        if not has_utc(parsed):
            raise ValueError("must be in the years 1 to 9999")
        return parsed
    return text


def path_run_id(request: Request) -> RunId:
    return RunId(_path_uuid(request, "run_id"))


def path_trigger_id(request: Request) -> TriggerId:
    return TriggerId(_path_uuid(request, "trigger_id"))


def path_delivery_id(request: Request) -> DeliveryId:
    return DeliveryId(_path_uuid(request, "delivery_id"))


def path_step_id(request: Request) -> StepId:
    return StepId(_path_uuid(request, "step_id"))


def path_approval_id(request: Request) -> StepId:
    return StepId(_path_uuid(request, "approval_id"))


def path_dead_letter_id(request: Request) -> DeadLetterId:
    return DeadLetterId(_path_uuid(request, "dead_letter_id"))


def _path_uuid(request: Request, name: str) -> uuid.UUID:
    """A UUID in the path. Problem 404 for anything else, which no row can have."""
    try:
        return uuid.UUID(request.path_params[name])
    except ValueError as exc:
        what = name.removesuffix("_id").replace("_", " ")
        raise Problem(404, f"no {what} {request.path_params[name][:60]!r}") from exc


def json_response(value: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, HEADERS, media_type="application/json")
