"""Publish events and read the API from other programs, over HTTP: a blocking and an async client."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from types import TracebackType
from typing import Any

import httpx
import msgspec

from tidegate import settings
from tidegate.errors import (
    Conflict,
    FieldError,
    Forbidden,
    InvalidInput,
    NotFound,
    Overloaded,
    RequestRefused,
    TidegateError,
    TooManyRequests,
    Unauthorized,
    Unavailable,
)
from tidegate.model.masking import masked
from tidegate.model.not_finite import not_finite
from tidegate.telemetry import traces

DEFAULT_URL = "http://127.0.0.1:8700"


class Receipt(msgspec.Struct, frozen=True):
    """The server's answer to one event: `accepted`, or `duplicate` with the id of the event stored first."""

    id: str
    external_id: str | None
    status: str


def _event(
    type: str,
    *,
    source: str,
    payload: dict[str, Any] | None = None,
    id: str | None = None,
    occurred_at: datetime | None = None,
    correlation_id: str | None = None,
    ttl_ms: int | None = None,
    metadata: dict[str, Any] | None = None,
) -> dict[str, Any]:
    given = {
        "type": type,
        "source": source,
        "payload": payload,
        "id": id,
        "occurred_at": occurred_at,
        "correlation_id": correlation_id,
        "ttl_ms": ttl_ms,
        "metadata": metadata,
    }
    return {name: value for name, value in given.items() if value is not None}


def _body(value: object) -> bytes:
    try:
        body = msgspec.json.encode(value)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInput("the event cannot be sent", [FieldError("payload", f"is not JSON: {exc}")]) from exc
    if b"null" in body and (path := not_finite(value)) is not None:
        raise InvalidInput("the event cannot be sent", [FieldError(path, "is not a finite number")])
    return body


def _result(response: httpx.Response) -> Any:
    if response.is_success:
        return msgspec.json.decode(response.content)
    raise _refusal(response)


class RefusedInput(RequestRefused, InvalidInput):
    """The server answered 400, 413, 415 or 422."""


class RefusedNotFound(RequestRefused, NotFound):
    """The server answered 404."""


class RefusedConflict(RequestRefused, Conflict):
    """The server answered 409."""


class RefusedUnauthorized(RequestRefused, Unauthorized):
    """The server answered 401; `is_given` says that it was sent a token."""

    def __init__(self, status: int, problem: dict[str, object], *, is_given: bool = False) -> None:
        super().__init__(status, problem)
        self.is_given = is_given
        self.token = None


class RefusedForbidden(RequestRefused, Forbidden):
    """The server answered 403; `needed` is empty when the answer names no scope."""

    def __init__(self, status: int, problem: dict[str, object], needed: str = "") -> None:
        super().__init__(status, problem)
        self.needed = needed


_REFUSALS: dict[int, type[RequestRefused]] = {
    400: RefusedInput, 404: RefusedNotFound, 409: RefusedConflict, 413: RefusedInput, 415: RefusedInput,
    422: RefusedInput,
}  # fmt: skip


def _refusal(response: httpx.Response) -> TidegateError:
    """The exception for an answer that is an error: the class that the app object raises for the same reason."""
    status = response.status_code
    try:
        problem = msgspec.json.decode(response.content, type=dict[str, object])
    except msgspec.MsgspecError:
        problem = {"title": f"HTTP {status}", "detail": response.text[:200]}
    if status in (429, 503):
        after = response.headers.get("retry-after", "")
        text = problem.get("detail") or problem.get("title") or f"HTTP {status}"
        return _unavailable(status, problem)(str(text), int(after) if re.fullmatch("[0-9]{1,9}", after) else 1)
    challenge = response.headers.get("www-authenticate", "")
    if status == 401:
        return RefusedUnauthorized(status, problem, is_given='error="invalid_token"' in challenge)
    if status == 403:
        scope = re.search('error="insufficient_scope", scope="([^"]*)"', challenge)
        return RefusedForbidden(status, problem, scope[1] if scope else "")
    return _REFUSALS.get(status, RequestRefused)(status, problem)


def _unavailable(status: int, problem: dict[str, object]) -> type[Unavailable]:
    if status == 429:
        return TooManyRequests
    return Overloaded if problem.get("type") == Overloaded.PROBLEM_TYPE else Unavailable


def _options(url: str, token: str | None, timeout: float, actor: str | None) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    if actor:
        headers["x-tidegate-actor"] = actor
    token = (token or settings.client_token() or "").strip()
    if token:
        if not (token.isascii() and token.isprintable()):
            raise InvalidInput("the token cannot be sent", [FieldError("token", "must be printable ASCII")])
        headers["authorization"] = f"Bearer {token}"
    return {"base_url": url, "headers": headers, "timeout": timeout, "trust_env": False}


def _trace() -> dict[str, str]:
    """The header that continues the caller's trace, if there is one."""
    found = traces.current()
    return {} if found is None else {"traceparent": found}


def _unreachable(url: str, exc: httpx.TransportError) -> Unavailable:
    return Unavailable(f"no answer from Tidegate at {masked(url)} ({exc or type(exc).__name__}); is it running?")


def _receipts(answer: Any) -> list[Receipt]:
    return msgspec.convert(answer["events"], list[Receipt])


class Client:
    """A blocking client. `publish` returns when the server has committed the event.

    `token` defaults to `TIDEGATE_TOKEN`. `actor` is the name in the audit log for what this client changes, where the
    API needs no token; otherwise the log has the token's name. Raises the exceptions that the app object raises
    (`tidegate.errors`): InvalidInput, NotFound, Conflict, Unauthorized, Forbidden, each a RequestRefused with `status`
    and `problem`; and Unavailable, Overloaded or TooManyRequests, after which the same call may succeed.
    """

    def __init__(
        self, url: str = DEFAULT_URL, token: str | None = None, timeout: float = 10, *, actor: str | None = None
    ) -> None:
        self._url = url
        self._http = httpx.Client(**_options(url, token, timeout, actor))

    def publish(self, type: str, **fields: Any) -> Receipt:
        """Publish one event: `publish("order.created", source="shop.api", payload={…}, id="o-7")`."""
        return msgspec.convert(self.request("POST", "/v1/events", _event(type, **fields)), Receipt)

    def publish_many(self, events: Sequence[dict[str, Any]]) -> list[Receipt]:
        """Publish a batch, all or nothing; the receipts are in the order of the events."""
        return _receipts(self.request("POST", "/v1/events", list(events)))

    def request(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        """Send any request to the API and return the decoded answer."""
        given = {name: value for name, value in params.items() if value is not None}
        content = None if body is None else _body(body)
        try:
            return _result(self._http.request(method, path, content=content, params=given, headers=_trace()))
        except httpx.TransportError as exc:
            raise _unreachable(self._url, exc) from exc

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient:
    """`Client` for asyncio: the same methods, arguments and exceptions."""

    def __init__(
        self, url: str = DEFAULT_URL, token: str | None = None, timeout: float = 10, *, actor: str | None = None
    ) -> None:
        self._url = url
        self._http = httpx.AsyncClient(**_options(url, token, timeout, actor))

    async def publish(self, type: str, **fields: Any) -> Receipt:
        """Publish one event; returns when the server has committed it."""
        return msgspec.convert(await self.request("POST", "/v1/events", _event(type, **fields)), Receipt)

    async def publish_many(self, events: Sequence[dict[str, Any]]) -> list[Receipt]:
        """Publish a batch, all or nothing; the receipts are in the order of the events."""
        return _receipts(await self.request("POST", "/v1/events", list(events)))

    async def request(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        """Send any request to the API and return the decoded answer."""
        given = {name: value for name, value in params.items() if value is not None}
        content = None if body is None else _body(body)
        try:
            return _result(await self._http.request(method, path, content=content, params=given, headers=_trace()))
        except httpx.TransportError as exc:
            raise _unreachable(self._url, exc) from exc

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
