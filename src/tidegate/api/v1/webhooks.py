"""`POST /v1/webhooks/{source}`: signed requests of other services become events. The signature is checked first.

A client without a valid signature learns nothing: a source without a webhook, an expired timestamp and a wrong
signature get the same answer. The log says why.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from tidegate.api import problems
from tidegate.api.problems import Problem
from tidegate.api.routes import Route, Services, json_response
from tidegate.api.v1 import publish
from tidegate.clock import utc_now, uuid7
from tidegate.errors import FieldError, InvalidInput, TidegateError, Unavailable
from tidegate.model import webhook_event
from tidegate.model.event import Accepted, NewEvent, check_event, is_text_id, trace_id
from tidegate.model.webhook import SIGNATURE_HEADERS, SVIX_HEADERS, Webhook, refusal, standard_names

_UNSIGNED = "the request is not accepted by a webhook: its signature is not valid; the server's log says why"

# Headers that may occur once: of two, the signed one and the one used could differ, as a proxy may have added one.
_ONCE = [
    name.encode()
    for name in (
        *SIGNATURE_HEADERS.values(),
        *SVIX_HEADERS,
        "webhook-id",
        "webhook-timestamp",
        "x-github-delivery",
        "x-github-event",
    )
]
# The log's reason for a request that cannot be stored. The answer says more; the log never has what was sent.
_REASONS = {
    400: "not_readable", 408: "too_slow", 413: "too_large", 415: "content_type", 422: "not_an_event",
    503: "unavailable",
}  # fmt: skip


async def receive_webhook(request: Request, services: Services) -> Response:
    source: str = request.path_params["source"]
    headers = standard_names({n.decode("latin-1"): value.decode("latin-1") for n, value in request.scope["headers"]})
    webhook: Webhook | None = None
    if services.admission.is_full_for_unauthenticated:
        return publish.OVERLOADED
    try:
        webhook = await services.webhooks.find(source)
        if any(sum(name == given for given, _ in request.scope["headers"]) > 1 for name in _ONCE):
            return _unsigned(services, source, webhook, "repeated_header")
        if not any(name in headers for name in SIGNATURE_HEADERS.values()):  # no body is read without one
            return _unsigned(services, source, webhook, "missing_signature")
        with services.admission.request(is_authenticated=False) as admitted:
            body = await publish.read_body(request.receive, headers, services.settings.max_body_bytes, admitted)
            await admitted.parse_turn()
            reason = refusal(webhook.config if webhook else None, headers, body, utc_now())
            if reason is not None or webhook is None:
                return _unsigned(services, source, webhook, reason or "unknown_source")
            admitted.mark_authenticated()
            if "traceparent" in headers and publish.has_several_traces(request.scope["headers"]):
                del headers["traceparent"]
            event = _event(services, webhook, headers, body)
            admitted.hold_events(1)
            accepted = await services.webhooks.accept(event)
    except TidegateError as exc:
        answer = problems.response(exc)
        outcome = "unavailable" if isinstance(exc, Unavailable) else "invalid"
        services.webhooks.refused(source, webhook, outcome, _REASONS.get(answer.status_code, "invalid"))
        return answer
    return json_response(accepted, 202)


def _unsigned(services: Services, source: str, webhook: Webhook | None, reason: str) -> Response:
    services.webhooks.refused(source, webhook, "unsigned", reason)
    answer = problems.response(Problem(401, _UNSIGNED))
    answer.headers["www-authenticate"] = 'Signature realm="tidegate"'
    return answer


def _event(services: Services, webhook: Webhook, headers: dict[str, str], body: bytes) -> NewEvent:
    """The event in a request whose signature is valid. Problem 400, 415; InvalidInput names the field."""
    media = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_form = media == webhook_event.FORM and webhook.config.scheme == "github"
    if not (is_form or media in ("", "application/json") or media.endswith("+json")):
        raise Problem(415, f"the content type {media[:60]!r} is not supported; choose application/json at the sender")
    try:
        found = webhook_event.decode(body, media)
    except webhook_event.NotReadable as exc:
        raise Problem(400, f"the body {exc}", [FieldError("body", str(exc))]) from exc
    now, limits, errors = utc_now(), services.settings.limits, list[FieldError]()
    given = webhook_event.event_fields(
        webhook.config, webhook.source, headers, found, now=now, limits=limits, errors=errors
    )
    if errors:
        raise InvalidInput("the request is not an event", errors)
    trace = headers.get("traceparent")
    correlation = trace_id(trace) or headers.get("x-request-id")
    event = check_event(
        given,
        new_id=uuid7(),
        now=now,
        limits=limits,
        errors=errors,
        traceparent=trace if trace_id(trace) else None,
        correlation_id=correlation if correlation is not None and is_text_id(correlation) else None,
    )
    if event is None:
        raise InvalidInput("the request cannot be stored as an event", errors)
    return event


ROUTES = (
    Route("POST", "/v1/webhooks/{source:path}", receive_webhook,
          "Receive a signed request (Standard Webhooks, GitHub, Stripe) as an event of a source; no token is needed",
          (Accepted,), scope="public", status=202,
          body={"application/json": {"schema": {}}, webhook_event.FORM: {"schema": {"type": "object"}}},
          errors=(400, 401, 408, 413, 415, 422, 429)),
)  # fmt: skip
