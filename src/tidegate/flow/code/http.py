"""Workflows of kind `http`: a run is posted to a URL, signed by Standard Webhooks, and the answer is its output.

Their definitions are rows that operators write (`flow/control/workflows.py`); any worker runs them, as a workflow with
one step. Requests are bounded: a name is resolved once, every address is checked, and the connection goes to one of the
checked addresses, so a name that resolves elsewhere the next time gains nothing. Host header and certificate are the
name's.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, NamedTuple

import httpx
import msgspec

from tidegate import __version__
from tidegate.clock import utc_now
from tidegate.errors import NonRetryable, RetryAfter, SettingsError
from tidegate.flow.code.context import Context
from tidegate.flow.code.user_calls import encode_output
from tidegate.flow.code.workflow import Workflow
from tidegate.model.addresses import Allowed, is_allowed, parse_address, parse_allowed, private_kind
from tidegate.model.http_workflow import KIND, SECRET_PREFIX, HttpConfig, signing_secrets, with_secrets
from tidegate.model.ids import DefinitionId
from tidegate.model.secrets import require_readable
from tidegate.model.worker_share import ALL, WorkerShare
from tidegate.settings import Settings
from tidegate.store import locks, triggers
from tidegate.store.db import Database
from tidegate.telemetry import traces

CONNECT_SECONDS = 10.0
MAX_ANSWER_BYTES = 1024 * 1024
MAX_EXCERPT = 500
MAX_REFUSAL_BYTES = 16 * 1024
MIN_HIDDEN = 8
MAX_RETRY_AFTER_SECONDS = 86_400.0
PASSING_STATUSES = (408, 425, 429)

Resolve = Callable[[str, int], Awaitable[list[str]]]


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, in the system's order. ConnectionError when it has none."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as exc:
        raise ConnectionError(f"the name {host} cannot be resolved: {getattr(exc, 'strerror', None) or exc}") from None
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


class Outgoing(NamedTuple):
    """What the operator says about requests that go out: where to beside public addresses, and whom to trust."""

    allowed: tuple[Allowed, ...] = ()
    ca_file: str | None = None


def outgoing(settings: Settings) -> Outgoing:
    """As the settings say. SettingsError when certificates cannot be read."""
    found = Outgoing(parse_allowed(settings.http_allow), settings.http_ca_file)
    try:
        _ssl_context(found.ca_file)
    except (OSError, ssl.SSLError) as exc:
        reason = exc.strerror or exc
        raise SettingsError(
            f"TIDEGATE_HTTP_CA_FILE is {settings.http_ca_file!r}, which must be a file of certificates (PEM): {reason}"
        ) from exc
    return found


class GuardedTransport(httpx.AsyncBaseTransport):
    """Sends requests to public addresses, and to what `by` allows. NonRetryable when a name leads elsewhere."""

    def __init__(self, by: Outgoing, resolve: Resolve = resolve) -> None:
        self._allowed = by.allowed
        self._resolve = resolve
        # One connection for one request: an idle one may be dead, and a POST on it would be lost.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._inner = httpx.AsyncHTTPTransport(verify=_ssl_context(by.ca_file), trust_env=False, limits=limits)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url, host = request.url, request.url.host
        port = url.port or (443 if url.scheme == "https" else 80)
        addresses = await self._resolve(host, port)
        check(host, port, addresses, self._allowed)
        failure: Exception = ConnectionError(f"the name {host} has no address")
        for address in addresses:
            pinned = httpx.Request(
                request.method,
                url.copy_with(host=address),
                headers=request.headers,  # with the Host of the name
                stream=request.stream,
                extensions=request.extensions | {"sni_hostname": host.removesuffix(".")},
            )
            try:
                return await self._inner.handle_async_request(pinned)
            except (httpx.ConnectError, httpx.ConnectTimeout) as exc:  # nothing was sent yet
                failure = exc
        raise failure

    async def aclose(self) -> None:
        await self._inner.aclose()


def check(host: str, port: int, addresses: list[str], allowed: Sequence[Allowed]) -> None:
    """NonRetryable when one of a name's addresses is neither public nor allowed. Which one is not told: it is nobody's
    business."""
    for text in addresses:
        address = parse_address(text)
        kind = private_kind(address)
        if kind is not None and not is_allowed(allowed, host, address, port):
            raise NonRetryable(
                f"{host} is {kind}; requests go to public addresses only, unless the workflow's allow_private is true "
                f"and the worker's TIDEGATE_HTTP_ALLOW names it with port {port} (docs/http-workflows.md)"
            )


async def post(config: HttpConfig, secrets: Sequence[str], message_id: str, body: bytes, by: Outgoing) -> Any:
    """Post a run, signed with each of `secrets`; the output in the answer.

    NonRetryable and RetryAfter as the answer says; ConnectionError and TimeoutError when another try may help.
    """
    host = httpx.URL(config.url).host
    seconds = config.timeout_ms / 1000
    timeout = httpx.Timeout(seconds, connect=min(seconds, CONNECT_SECONDS))
    headers = config.headers | signed_headers(secrets, message_id, body)
    if traces.is_on and (traceparent := traces.current()) is not None:
        headers["traceparent"] = traceparent
    transport = GuardedTransport(by if config.allow_private else by._replace(allowed=()))
    try:
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(transport=transport, timeout=timeout, trust_env=False) as client,
            client.stream("POST", config.url, content=body, headers=headers) as answer,
        ):
            content = await _content(answer, MAX_ANSWER_BYTES if answer.is_success else MAX_REFUSAL_BYTES)
            return _output(answer, host, content, config)
    except (TimeoutError, httpx.TimeoutException):
        raise TimeoutError(f"{host} did not answer within {config.timeout_ms} ms") from None
    except httpx.TransportError as exc:
        reason = _one_line(str(exc), config) or type(exc).__name__
        raise ConnectionError(f"the request to {host} failed: {reason}") from None


def signed_headers(secrets: Sequence[str], message_id: str, body: bytes) -> dict[str, str]:
    """The headers of a request, with its signatures by Standard Webhooks: one for each secret."""
    timestamp = str(int(utc_now().timestamp()))
    signed = f"{message_id}.{timestamp}.".encode() + body
    keys = (base64.b64decode(secret.removeprefix(SECRET_PREFIX)) for secret in secrets)
    signatures = (base64.b64encode(hmac.new(key, signed, hashlib.sha256).digest()).decode() for key in keys)
    return {
        "content-type": "application/json",
        "accept-encoding": "identity",  # so that the answer's cap is on what arrives
        "user-agent": f"tidegate/{__version__}",
        "idempotency-key": message_id,
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


async def _content(answer: httpx.Response, limit: int) -> bytes | None:
    """The answer's body up to the limit; None for a success that is larger, or packed."""
    if answer.headers.get("content-encoding", "identity").lower() != "identity":
        return None
    content = b""
    async for part in answer.aiter_raw():
        content += part
        if len(content) > limit:
            return None if answer.is_success else content[:limit]
    return content


def _output(answer: httpx.Response, host: str, content: bytes | None, config: HttpConfig) -> Any:
    status = answer.status_code
    if answer.is_success:
        return _kept(content)
    if 300 <= status < 400:
        raise NonRetryable(f"{host} answered {status}, a redirect; they are not followed: give the final URL")
    excerpt = _one_line((content or b"").decode(errors="replace"), config)[:MAX_EXCERPT]
    message = f"{host} answered {status}" + (f": {excerpt}" if excerpt else "")
    if status in (429, 503) and (after := _retry_after(answer.headers.get("retry-after", ""))):
        raise RetryAfter(after, message, everyone=answer.headers.get("tidegate-everyone", "").strip()[:100] or None)
    if status in PASSING_STATUSES or status >= 500:
        raise ConnectionError(message)
    raise NonRetryable(message)


def _kept(content: bytes | None) -> Any:
    """JSON as it is, other text as text; null for nothing and for what cannot be kept."""
    if not content or content.isspace():
        return None
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        try:
            found = content.decode()
        except UnicodeDecodeError:
            return None
    try:
        encode_output(found, "the answer")
    except NonRetryable:
        return None
    return found


def _retry_after(text: str) -> float | None:
    """The seconds that a Retry-After asks for, given as such or as a date; None when it says neither.

    Zero, or a time that is over (a clock may be wrong), says no more than the status: the policy decides.
    """
    text = text.strip()
    if text.isascii() and text.isdigit():
        return min(float(text), MAX_RETRY_AFTER_SECONDS)
    try:
        at = parsedate_to_datetime(text)
        seconds = ((at if at.tzinfo else at.replace(tzinfo=UTC)) - utc_now()).total_seconds()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, seconds), MAX_RETRY_AFTER_SECONDS)


def _one_line(text: str, config: HttpConfig) -> str:
    """Foreign text for an error: one line, printable, and without what we sent in confidence."""
    values = {config.secret, *(old.secret for old in config.old_secrets), *config.headers.values()}
    values |= {word for value in values for word in value.split()}  # a token without the `Bearer` before it
    values |= {value.removeprefix(SECRET_PREFIX) for value in values}
    values |= {value.replace("/", "\\/") for value in values}  # as some write JSON
    for hidden in sorted(values, key=len, reverse=True):
        text = text.replace(hidden, "[hidden]") if len(hidden) >= MIN_HIDDEN else text
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


@cache
def _ssl_context(ca_file: str | None) -> ssl.SSLContext:
    """Those that everybody trusts, and those of the file."""
    context = httpx.create_ssl_context(trust_env=False)
    if ca_file is not None:
        context.load_verify_locations(cafile=ca_file)
    return context


class HttpWorkflow(Workflow):
    """Runs as a workflow with the step `request`; so it is retried, fenced, cancelled and dead-lettered like any
    other."""

    def __init__(self, slug: str, database: Database, by: Outgoing) -> None:
        async def request(message_id: str, body: bytes) -> Any:
            async with database.connection() as connection:  # as it is now, not as it was when the run was launched
                found = await triggers.get_definition(connection, slug)
                if found is None or found.kind != KIND:
                    raise NonRetryable(f"workflow {slug} of kind {KIND} no longer exists")
                config = with_secrets(msgspec.convert(found.config, HttpConfig), database.keys.open)
                secrets = signing_secrets(config, await locks.now(connection))
            require_readable([*secrets, *config.headers.values()], f"workflow {slug}")
            return await post(config, secrets, message_id, body, by)

        async def call(ctx: Context, parameters: dict[str, Any]) -> Any:
            body = {
                "run_id": ctx.run_id,
                "workflow": slug,
                "attempt": ctx.attempt,
                "event": ctx.event.envelope() if ctx.event else None,
                "parameters": parameters,
            }
            if len(events := ctx.events) > 1:  # of a window
                body["events"] = [event.envelope() for event in events]
            return await ctx.step("request", request, ctx.idempotency_key, msgspec.json.encode(body))

        super().__init__(slug, call, [])

    def bind(self, given: dict[str, Any]) -> dict[str, Any]:
        """The trigger's parameters, unchanged."""
        return {"parameters": given}


class HttpWorkflows:
    """The http definitions for a worker, which needs no code for them."""

    def __init__(self, database: Database, by: Outgoing, share: WorkerShare = ALL) -> None:
        self._database = database
        self._by = by
        self._share = share
        self._version = -1

    async def refresh(self, workflows: dict[str, Workflow]) -> list[DefinitionId] | None:
        """Add new definitions to `workflows`. Returns the ids of all that the worker takes, or None when the registry
        has not changed."""
        async with self._database.connection() as connection:
            version = await triggers.registry_version(connection)
            if version == self._version:
                return None
            listed = await triggers.list_of_kind(connection, KIND)
        found = {definition: slug for definition, slug in listed.items() if self._share.takes(slug)}
        for slug in found.values():
            if not isinstance(workflows.get(slug), HttpWorkflow):
                workflows[slug] = HttpWorkflow(slug, self._database, self._by)
        self._version = version
        return list(found)
