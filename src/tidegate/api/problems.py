"""RFC 9457 problem+json: what went wrong, and which fields."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from tidegate.errors import (
    BacklogFull,
    Conflict,
    FieldError,
    Forbidden,
    InvalidInput,
    NotFound,
    Overloaded,
    TidegateError,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from tidegate.telemetry.logs import logger

TITLES = {
    400: "Bad request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Request timed out",
    409: "Conflict",
    410: "Gone",
    413: "Too large",
    415: "Unsupported media type",
    422: "Invalid input",
    429: "Too many requests",
    431: "Request header fields too large",
    500: "Internal error",
    503: "Unavailable",
}

# On every answer: it is meant for this caller only, and a browser must not render it as a page.
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

_CHALLENGE = 'Bearer realm="tidegate"'

_log = logger("api")


class Problem(TidegateError):
    """An answer with a status and a text, raised by handlers for errors that have no exception of their own."""

    def __init__(self, status: int, detail: str, errors: list[FieldError] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.errors = errors or []


class ProblemBody(msgspec.Struct, omit_defaults=True):
    """The body of every error."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] = []


def response(exc: Exception) -> Response:
    """The answer to an exception. An unexpected one is logged, and its answer reveals no internals."""
    headers = dict(HEADERS)
    errors: list[FieldError] = getattr(exc, "errors", [])
    match exc:
        case Problem():
            status = exc.status
        case InvalidInput():
            status = 413 if errors and all(e.too_large for e in errors) else 422
        case Conflict():
            status = 409
        case Unauthorized():
            status = 401
            headers["www-authenticate"] = _CHALLENGE + (', error="invalid_token"' if exc.is_given else "")
        case Forbidden():
            status = 403
            headers["www-authenticate"] = f'{_CHALLENGE}, error="insufficient_scope", scope="{exc.needed}"'
        case NotFound():
            status = 404
        case Unavailable():
            status = 429 if isinstance(exc, TooManyRequests) else 503
            headers["retry-after"] = str(exc.retry_after_seconds)
        case _:
            _log.error("api.unexpected", error=exc, exc_info=exc)
            status, exc = (
                500,
                TidegateError("the request failed because of an internal error; the server's log has the cause"),
            )
    detail = str(exc.args[0]) if exc.args else TITLES[status]
    shown: list[dict[str, Any]] = [{"field": e.field, "message": e.message} for e in errors[:100]]
    kind = exc.PROBLEM_TYPE if isinstance(exc, Overloaded | BacklogFull) else "about:blank"
    body = ProblemBody(kind, TITLES.get(status, "Error"), status, detail, shown)
    return Response(msgspec.json.encode(body), status, headers, media_type="application/problem+json")
