"""`POST /v1/events`, the hot path, which bypasses the framework. The answer is 202 only after the commit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidegate.api import admission, openapi, problems
from tidegate.api.admission import AdmittedRequest
from tidegate.api.problems import HEADERS, Problem
from tidegate.api.routes import Route, Services
from tidegate.api.v1 import cloudevents
from tidegate.api.wrong_values import wrong_values
from tidegate.clock import utc_now, uuid7
from tidegate.errors import FieldError, Forbidden, InvalidInput
from tidegate.flow.accept.access import Principal
from tidegate.flow.accept.refusals import MAX_BODY_BYTES, GivenEvent, given_events
from tidegate.model.event import Accepted, NewEvent, check_event, is_text_id, trace_id
from tidegate.telemetry import traces

BODY_SECONDS = 10
CE_STRUCTURED = "application/cloudevents+json"
CE_BATCH = "application/cloudevents-batch+json"
RawHeaders = Sequence[tuple[bytes, bytes]]
# Reads the body of a request, given its headers.
Read = Callable[[dict[str, str], AdmittedRequest], Awaitable[bytes]]
# Built once: under overload it must cost next to nothing.
OVERLOADED = problems.response(admission.overloaded())


class AcceptedBatch(msgspec.Struct, frozen=True):
    """The answer to a batch: one entry per event, in the same order."""

    events: list[Accepted]


async def handle(services: Services, scope: Scope, receive: Receive, send: Send) -> int:
    """Answer one publish request; returns the status."""
    if services.admission.is_full:
        await OVERLOADED(scope, receive, send)
        return OVERLOADED.status_code
    response = await answer(services, scope, receive)
    await response(scope, receive, send)
    return response.status_code


async def answer(services: Services, scope: Scope, receive: Receive) -> Response:
    """Publish the events in the request, reading its body as it arrives."""
    limit = services.settings.max_body_bytes

    def read(headers: dict[str, str], admitted: AdmittedRequest) -> Awaitable[bytes]:
        return read_body(receive, headers, limit, admitted)

    client = scope.get("client")
    found = await _traced(services, scope["headers"], read, client[0] if client else None)
    return Response(found, 202, HEADERS, media_type="application/json") if isinstance(found, bytes) else found


async def answer_whole(services: Services, raw_headers: RawHeaders, body: bytes, peer: str | None) -> bytes | Response:
    """The same for a request that has arrived completely: returns the body of the answer 202, or another answer."""
    if services.admission.is_full:
        return OVERLOADED

    async def read(headers: dict[str, str], admitted: AdmittedRequest) -> bytes:
        check_head(headers, services.settings.max_body_bytes, len(body))
        admitted.hold_bytes(len(body))
        return body

    return await _traced(services, raw_headers, read, peer, body)


async def _traced(
    services: Services, raw_headers: RawHeaders, read: Read, peer: str | None, whole: bytes | None = None
) -> bytes | Response:
    if not traces.is_on:
        return await _answer(services, raw_headers, read, peer, whole)
    with traces.Request("POST", "/v1/events") as traced:
        found = await _answer(services, raw_headers, read, peer, whole, traced)
        traced.status = found.status_code if isinstance(found, Response) else 202
    return found


async def _answer(
    services: Services,
    raw_headers: RawHeaders,
    read: Read,
    peer: str | None,
    whole: bytes | None,
    traced: traces.Request | None = None,
) -> bytes | Response:
    """`whole` is the body, if it has arrived completely."""
    body, events, headers = whole, list[NewEvent](), dict[str, str]()
    try:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in raw_headers}
        if "traceparent" in headers and has_several_traces(raw_headers):
            del headers["traceparent"]
        principal = await services.access.check(headers.get("authorization"), "publish", raw_headers, peer)
        with services.admission.request() as admitted:
            body = await read(headers, admitted)
            await admitted.parse_turn()
            events, is_batch = _parse(services, headers, body)
            body = whole = None
            if principal is not None:
                _check_sources(principal, events, is_batch)
            if traced is not None:
                events = _continued(traced, headers.get("traceparent"), events)
            admitted.hold_events(len(events))
            accepted = await services.ingest.accept(events) if events else []
    except Exception as exc:  # noqa: BLE001 - every error becomes an answer
        refused = problems.response(exc)
        services.refusals.keep(refused.status_code, exc, lambda: _given(headers, body, events))
        return refused
    return msgspec.json.encode(AcceptedBatch(accepted) if is_batch else accepted[0])


def _given(headers: dict[str, str], body: bytes | None, events: list[NewEvent]) -> Iterator[GivenEvent]:
    """The events of a refused request, as far as they are known."""
    if events:
        yield from (GivenEvent(event.external_id, event.type, event.source) for event in events)
    elif "ce-id" in headers:
        yield GivenEvent(*(headers.get(f"ce-{name}") for name in GivenEvent._fields))
    elif body and len(body) <= MAX_BODY_BYTES:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            yield from given_events(msgspec.json.decode(body))


def has_several_traces(raw_headers: RawHeaders) -> bool:
    """Whether there are several `traceparent` headers: then no trace is continued, as W3C Trace Context requires."""
    return sum(name == b"traceparent" for name, _ in raw_headers) > 1


def _continued(traced: traces.Request, header: str | None, events: list[NewEvent]) -> list[NewEvent]:
    """The events as part of the request's trace; events that carry a trace of their own stay in it."""
    given = {event.traceparent: None for event in events if event.traceparent is not None}  # in order, each once
    parent = header if trace_id(header) else next(iter(given)) if len(given) == 1 else None
    span = traced.begin(parent, [one for one in given if trace_id(one) != trace_id(parent)])
    return [
        msgspec.structs.replace(event, traceparent=span.traceparent)
        if event.traceparent is None or trace_id(event.traceparent) == span.trace_id
        else event
        for event in events
    ]


def _check_sources(principal: Principal, events: list[NewEvent], is_batch: bool) -> None:
    """Forbidden names the events whose source the token may not use; one such event refuses the whole batch."""
    wrong = [i for i, event in enumerate(events) if not principal.may_use(event.source)]
    if wrong:
        message = f"the token {principal.name} may not publish for this source"
        errors = [FieldError(f"[{i}].source" if is_batch else "source", message) for i in wrong[:100]]
        raise Forbidden(
            f"the token needs the scope publish for the source {events[wrong[0]].source}", "publish", errors
        )


async def read_body(receive: Receive, headers: dict[str, str], limit: int, admitted: AdmittedRequest) -> bytes:
    """The body, counted as it arrives: neither one client nor all together can make the server exceed the limits."""
    length = headers.get("content-length", "")
    check_head(headers, limit, int(length) if length.isdigit() else 0)
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Problem(400, "the client disconnected before the body was complete")
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
                admitted.hold_bytes(len(part))
                parts.append(part)
                if not message.get("more_body", False):
                    break
    except TimeoutError as exc:
        raise Problem(408, f"the body did not arrive within {BODY_SECONDS} s") from exc
    return parts[0] if len(parts) == 1 else b"".join(parts)


def check_head(headers: dict[str, str], limit: int, length: int) -> None:
    """Refuse a body that is compressed or too large, before any of it is parsed."""
    if headers.get("content-encoding", "identity") != "identity":
        raise Problem(415, "compressed bodies are not accepted; send without Content-Encoding")
    if length > limit:
        raise _too_large(limit)


def _too_large(limit: int) -> Problem:
    return Problem(
        413, f"the body is larger than {limit} bytes", [FieldError("body", f"must be at most {limit} bytes")]
    )


def _parse(services: Services, headers: dict[str, str], body: bytes) -> tuple[list[NewEvent], bool]:
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    errors: list[FieldError] = []
    is_batch = False
    traces: list[str | None] = []
    if media in (CE_STRUCTURED, CE_BATCH):
        raw = _json(body)
        is_batch = media == CE_BATCH
        items = _list(raw) if is_batch else [raw]
        given = []
        for i, item in enumerate(items):
            fields, trace = cloudevents.from_structured(item, f"[{i}]." if is_batch else "", errors)
            given.append(fields)
            traces.append(trace)
    elif "ce-specversion" in headers or "ce-id" in headers or "ce-type" in headers:
        if headers.get("ce-specversion") != "1.0":
            errors.append(FieldError("ce-specversion", "must be 1.0"))
        fields, trace = cloudevents.from_binary(headers, _data(media, body), errors)
        given, traces = [fields], [trace]
    elif media in ("application/json", ""):
        raw = _json(body)
        is_batch = isinstance(raw, list)
        given = raw if is_batch else [raw]
    else:
        raise Problem(
            415,
            f"the content type {media[:60]!r} is not supported; send application/json (curl --json does), "
            f"{CE_STRUCTURED}, {CE_BATCH}, or CloudEvents in binary mode",
        )
    if given or media != CE_BATCH:  # CloudEvents allows an empty batch
        _refuse_sizes(given, services.settings.max_batch_events)
    header_trace = headers.get("traceparent")
    correlation = trace_id(header_trace) or headers.get("x-request-id")
    if correlation is not None and not is_text_id(correlation):
        correlation = None
    events = _checked(services, given, is_batch, traces, header_trace, correlation, errors)
    return events, is_batch


def _checked(
    services: Services,
    given: list[Any],
    is_batch: bool,
    traces: list[str | None],
    header_trace: str | None,
    correlation: str | None,
    errors: list[FieldError],
) -> list[NewEvent]:
    now, limits = utc_now(), services.settings.limits
    header_trace = header_trace if trace_id(header_trace) else None
    events = []
    for i, item in enumerate(given):
        own_trace = traces[i] if traces else None
        trace = own_trace if trace_id(own_trace) else header_trace
        event = check_event(
            item,
            new_id=uuid7(),
            now=now,
            limits=limits,
            errors=errors,
            prefix=f"[{i}]." if is_batch else "",
            traceparent=trace,
            correlation_id=trace_id(own_trace) or correlation,
        )
        if event is not None:
            events.append(event)
        if len(errors) >= 100:
            break
    if errors:
        what = "the batch is not valid; none of its events was stored" if is_batch else "the event is not valid"
        raise InvalidInput(what, errors)
    return events


def _data(media: str, body: bytes) -> Any:
    """The data of an event in binary mode. Without a content type it is JSON if it parses as JSON, otherwise bytes."""
    if not body:
        return {}
    if cloudevents.is_json(media):
        return _json(body)
    if not media:
        try:
            return _json(body)
        except Problem:
            pass
    return cloudevents.binary_payload(body)


def _refuse_sizes(given: list[Any], max_events: int) -> None:
    if not given:
        raise InvalidInput("the batch is empty", [FieldError("events", "must hold at least one event")])
    if len(given) > max_events:
        message = f"holds {len(given)} events; the maximum is {max_events}"
        raise InvalidInput("the batch is too large", [FieldError("events", message, too_large=True)])


def _json(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body)
    except RecursionError as exc:
        raise Problem(400, "the body is nested too deeply", [FieldError("body", "is nested too deeply")]) from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        if wrong := wrong_values(body):
            text = "; ".join(f"{one.field}: {one.message}" for one in wrong[:3])
            text += f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise Problem(400, f"the body is not JSON: {text}", wrong) from exc
        reason = "is not valid UTF-8" if isinstance(exc, UnicodeDecodeError) else str(exc)
        raise Problem(400, f"the body is not JSON: {reason}", [FieldError("body", reason)]) from exc


def _list(raw: Any) -> list[Any]:
    if not isinstance(raw, list):
        raise InvalidInput("the batch is not valid", [FieldError("body", "must be an array of events")])
    return raw


async def _post_events(request: Request, services: Services) -> Response:
    """Reached only under another ASGI setup: ours passes such requests to `handle` directly."""
    return await answer(services, request.scope, request.receive)


ROUTES = (
    Route(
        "POST",
        "/v1/events",
        _post_events,
        "Publish one event or a batch; the answer comes after the commit",
        (Accepted, AcceptedBatch),
        scope="publish",
        status=202,
        body={
            "application/json": {
                "schema": {"oneOf": [openapi.NEW_EVENT, {"type": "array", "items": openapi.NEW_EVENT}]}
            },
            CE_STRUCTURED: {"schema": openapi.CLOUD_EVENT},
            CE_BATCH: {"schema": openapi.CLOUD_EVENT_BATCH},
        },
        errors=(400, 408, 409, 413, 415, 422, 503),
    ),
)
