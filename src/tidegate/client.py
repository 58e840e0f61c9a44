"""Publish events and read the API from other programs, over HTTP: a blocking and an async client."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from tidegate import client_tls, settings
from tidegate.client_runs import MAX_WAIT_SECONDS, Answer, AsyncClientRun, ClientRun, Ending, runs_of, start_body
from tidegate.errors import (
    BacklogFull,
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
from tidegate.model import typed
from tidegate.model.event import as_delay_ms
from tidegate.model.masking import masked
from tidegate.model.not_finite import not_finite
from tidegate.model.not_json import not_encodable, set_or_bytes
from tidegate.model.typed import Payload
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
    payload: Payload | None = None,
    id: str | None = None,
    occurred_at: datetime | None = None,
    correlation_id: str | None = None,
    ttl_ms: int | None = None,
    metadata: dict[str, Any] | None = None,
    deliver_at: datetime | None = None,
    delay: str | int | float | None = None,
    priority: int | None = None,
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
        "deliver_at": deliver_at,
        "delay_ms": None if delay is None else as_delay_ms(delay),
        "priority": priority,
    }
    return {name: value for name, value in given.items() if value is not None}


def _body(value: object) -> bytes:
    try:
        value = _plain_payloads(value)
        body = typed.encode(value)
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInput("the request cannot be sent", [not_encodable(value, exc)]) from exc
    if b"null" in body and (path := not_finite(value)) is not None:
        raise InvalidInput("the request cannot be sent", [FieldError(path, "is not a finite number")])
    if (refused := set_or_bytes(value)) is not None:
        raise InvalidInput("the request cannot be sent", [refused])
    return body


def _plain_payloads(body: object) -> object:
    """The body with payloads that are dataclasses, Structs or pydantic models as objects in JSON."""
    if isinstance(body, list):
        return [_plain_payloads(one) for one in body]
    if isinstance(body, dict) and typed.has_fields(type(body.get("payload"))):
        return body | {"payload": typed.payload_of(body["payload"])}
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
        return BacklogFull if problem.get("type") == BacklogFull.PROBLEM_TYPE else TooManyRequests
    return Overloaded if problem.get("type") == Overloaded.PROBLEM_TYPE else Unavailable


def _options(
    url: str, token: str | None, timeout: float, actor: str | None, ca_file: str | Path | None
) -> dict[str, Any]:
    headers = {"content-type": "application/json"}
    if actor:
        headers["x-tidegate-actor"] = actor
    token = (token or settings.client_token() or "").strip()
    if token:
        if not (token.isascii() and token.isprintable()):
            raise InvalidInput("the token cannot be sent", [FieldError("token", "must be printable ASCII")])
        headers["authorization"] = f"Bearer {token}"
    try:
        httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise InvalidInput("the address of the API is not valid", [FieldError("url", str(exc))]) from exc
    verify = client_tls.verify(url, ca_file)
    return {"base_url": url, "headers": headers, "timeout": timeout, "trust_env": False, "verify": verify}


def _trace() -> dict[str, str]:
    """The header that continues the caller's trace, if there is one."""
    found = traces.current()
    return {} if found is None else {"traceparent": found}


def _unreachable(url: str, exc: httpx.TransportError) -> Unavailable:
    if refused := client_tls.refused_certificate(exc):
        return Unavailable(f"no connection to Tidegate at {masked(url)}: {refused}")
    return Unavailable(f"no answer from Tidegate at {masked(url)} ({exc or type(exc).__name__}); is it running?")


def _receipts(answer: Any) -> list[Receipt]:
    return msgspec.convert(answer["events"], list[Receipt])


class Client:
    """A blocking client. `publish` returns when the server has committed the event.

    `token` defaults to `TIDEGATE_TOKEN`. `actor` is the name in the audit log for what this client changes, where the
    API needs no token; otherwise the log has the token's name. `ca_file` is a PEM file with the authorities to trust
    for https, by default that of `TIDEGATE_CA_FILE` or `SSL_CERT_FILE`, else the public ones. Raises the exceptions
    that the app object raises (`tidegate.errors`): InvalidInput, NotFound, Conflict, Unauthorized, Forbidden, each a
    RequestRefused with `status` and `problem`; and Unavailable, Overloaded or TooManyRequests, after which the same
    call may succeed.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        timeout: float = 10,
        *,
        actor: str | None = None,
        ca_file: str | Path | None = None,
    ) -> None:
        self._url = url
        self._timeout = timeout
        self._http = httpx.Client(**_options(url, token, timeout, actor, ca_file))

    def publish(self, type: str, **fields: Any) -> Receipt:
        """Publish one event: `publish("order.created", source="shop.api", payload={…}, id="o-7")`. The payload is a
        dict, a dataclass, a msgspec Struct or a pydantic model."""
        return msgspec.convert(self.request("POST", "/v1/events", _event(type, **fields)), Receipt)

    def publish_many(self, events: Sequence[dict[str, Any]]) -> list[Receipt]:
        """Publish a batch, all or nothing; the receipts are in the order of the events."""
        return _receipts(self.request("POST", "/v1/events", list(events)))

    def cancel_event(self, event_id: str) -> None:
        """Take back an event that waits for its time, or that its source holds, by our id or the producer's. Conflict
        when it has been decided."""
        self.request("POST", f"/v1/events/{quote(event_id, safe='')}/cancel")

    def start(
        self,
        workflow: str,
        parameters: Mapping[str, object] | None = None,
        *,
        id: str | None = None,
        correlation_id: str | None = None,
    ) -> ClientRun:
        """Start a run of a workflow: `start("fulfil", {"order_id": 7}, id="o-7").result(timeout="30s")`. The same `id`
        again is the same run; with other parameters it is a Conflict."""
        answer = self.request("POST", runs_of(workflow), start_body(parameters, id, correlation_id))
        return ClientRun(self.waiting, answer)

    def run(
        self,
        workflow: str,
        parameters: Mapping[str, object] | None = None,
        *,
        id: str | None = None,
        timeout: str | int | float | None = None,
    ) -> Any:
        """Start a run and wait for its end; its output. RunFailed or TimeoutError as for `ClientRun.result`."""
        ending = Ending(timeout)
        answer = self.waiting("POST", runs_of(workflow), ending.wait, start_body(parameters, id))
        return ending.output(answer) if ending.is_over(answer) else ClientRun(self.waiting, answer).result(ending.left)

    def waiting(self, method: str, path: str, wait: str | None, body: object = None) -> Answer:
        """Send a request that the server answers after `wait` at the latest."""
        timeout = httpx.Timeout(self._timeout, read=self._timeout + MAX_WAIT_SECONDS)
        answer: Answer = self._send(method, path, body, {"wait": wait}, timeout)
        return answer

    def request(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        """Send any request to the API and return the decoded answer."""
        return self._send(method, path, body, params, self._timeout)

    def _send(
        self, method: str, path: str, body: object, params: dict[str, Any], timeout: float | httpx.Timeout
    ) -> Any:
        given = {name: value for name, value in params.items() if value is not None}
        content, headers = None if body is None else _body(body), _trace()
        try:
            return _result(
                self._http.request(method, path, content=content, params=given, headers=headers, timeout=timeout)
            )
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
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        timeout: float = 10,
        *,
        actor: str | None = None,
        ca_file: str | Path | None = None,
    ) -> None:
        self._url = url
        self._timeout = timeout
        self._http = httpx.AsyncClient(**_options(url, token, timeout, actor, ca_file))

    async def publish(self, type: str, **fields: Any) -> Receipt:
        """Publish one event; returns when the server has committed it."""
        return msgspec.convert(await self.request("POST", "/v1/events", _event(type, **fields)), Receipt)

    async def publish_many(self, events: Sequence[dict[str, Any]]) -> list[Receipt]:
        """Publish a batch, all or nothing; the receipts are in the order of the events."""
        return _receipts(await self.request("POST", "/v1/events", list(events)))

    async def cancel_event(self, event_id: str) -> None:
        """Take back an event that waits for its time, or that its source holds, by our id or the producer's. Conflict
        when it has been decided."""
        await self.request("POST", f"/v1/events/{quote(event_id, safe='')}/cancel")

    async def start(
        self,
        workflow: str,
        parameters: Mapping[str, object] | None = None,
        *,
        id: str | None = None,
        correlation_id: str | None = None,
    ) -> AsyncClientRun:
        """Start a run of a workflow; see `Client.start`."""
        answer = await self.request("POST", runs_of(workflow), start_body(parameters, id, correlation_id))
        return AsyncClientRun(self.waiting, answer)

    async def run(
        self,
        workflow: str,
        parameters: Mapping[str, object] | None = None,
        *,
        id: str | None = None,
        timeout: str | int | float | None = None,
    ) -> Any:
        """Start a run and wait for its end; its output. See `Client.run`."""
        ending = Ending(timeout)
        answer = await self.waiting("POST", runs_of(workflow), ending.wait, start_body(parameters, id))
        if ending.is_over(answer):
            return ending.output(answer)
        return await AsyncClientRun(self.waiting, answer).result(ending.left)

    async def waiting(self, method: str, path: str, wait: str | None, body: object = None) -> Answer:
        """Send a request that the server answers after `wait` at the latest."""
        timeout = httpx.Timeout(self._timeout, read=self._timeout + MAX_WAIT_SECONDS)
        answer: Answer = await self._send(method, path, body, {"wait": wait}, timeout)
        return answer

    async def request(self, method: str, path: str, body: Any = None, **params: Any) -> Any:
        """Send any request to the API and return the decoded answer."""
        return await self._send(method, path, body, params, self._timeout)

    async def _send(
        self, method: str, path: str, body: object, params: dict[str, Any], timeout: float | httpx.Timeout
    ) -> Any:
        given = {name: value for name, value in params.items() if value is not None}
        content, headers = None if body is None else _body(body), _trace()
        try:
            return _result(
                await self._http.request(method, path, content=content, params=given, headers=headers, timeout=timeout)
            )
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
