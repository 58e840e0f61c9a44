"""Request bodies of operator requests: small, strictly checked; every error names its field."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Send

from tidegate.api.problems import Problem
from tidegate.api.wrong_values import wrong_values
from tidegate.errors import FieldError, InvalidInput
from tidegate.flow.accept.access import Principal
from tidegate.model.conversion import convert
from tidegate.model.token import is_token_name
from tidegate.store import audit
from tidegate.store.audit import Caller

MAX_BYTES = 64 * 1024
BODY_SECONDS = 10
DEFAULT_ACTOR = "api"
MAX_REASON = 500

T = TypeVar("T", bound=msgspec.Struct)

_PRINCIPAL, _BODY = "tidegate.principal", "tidegate.body"


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request that takes none; an empty object is accepted."""


class CallBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`id`: a name that the caller gives to this call. The same call with the same id again is not done again: the
    answer is the first one's."""

    id: Annotated[str, msgspec.Meta(pattern=r"^[!-~]{1,100}$")] | None = None


def actor(request: Request) -> str:
    """The actor for the audit log: the token's name; without a token, `x-tidegate-actor` if it is a valid name."""
    asking = principal(request)
    if asking is not None:
        return asking.name
    given = request.headers.get("x-tidegate-actor", "")
    return given if is_token_name(given) else DEFAULT_ACTOR


def principal(request: Request) -> Principal | None:
    """The authenticated caller; None where no token is needed."""
    found: Principal | None = request.scope.get(_PRINCIPAL)
    return found


def set_principal(request: Request, found: Principal | None, address: str | None) -> None:
    """Store the caller with the request, after the access check."""
    request.scope[_PRINCIPAL] = found
    audit.caller.set(Caller(found.id if found is not None else None, address))


def keep(request: Request, body: bytes) -> None:
    """The body was received by other means; `read` takes it from here."""
    request.scope[_BODY] = body


async def read(request: Request, kind: type[T], max_bytes: int = MAX_BYTES) -> T:
    """The body as `kind`; a missing body is an empty object. Problem 400, 413, 415; InvalidInput names the field."""
    return convert(await read_json(request, max_bytes), kind, "the body is not valid")


async def read_json(request: Request, max_bytes: int = MAX_BYTES) -> Any:
    """The body as decoded JSON, for handlers that check the fields themselves. A missing body is an empty object."""
    raw: bytes | None = request.scope.get(_BODY)
    if raw is None:
        raw = request.scope[_BODY] = await _bytes(request, max_bytes)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if raw and media not in ("", "application/json"):
        raise Problem(
            415, f"the content type {media[:60]!r} is not supported; send application/json (curl --json does)"
        )
    return _decode(raw or b"{}")


def check_reason(reason: str | None) -> None:
    """The reason of a pause: one line of text. InvalidInput otherwise."""
    if reason is not None and not (reason.isprintable() and 1 <= len(reason) <= MAX_REASON):
        message = f"must be 1 to {MAX_REASON} printable characters"
        raise InvalidInput("the pause is not valid", [FieldError("reason", message)])


def schema(kind: type[msgspec.Struct], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """A route's body in the OpenAPI document. Types nested in it must be part of some answer too, to have a schema."""
    _, components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    found = components[kind.__name__]
    return {"application/json": {"schema": found | {"required": list(required)} if required else found}}


def _decode(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        if errors := wrong_values(raw):
            raise InvalidInput("the body is not valid", errors) from exc
        reason = "is nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        raise Problem(400, f"the body is not JSON: {reason}", [FieldError("body", reason)]) from exc


async def _bytes(request: Request, max_bytes: int) -> bytes:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Problem(415, "compressed bodies are not accepted; send without Content-Encoding")
    raw = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > max_bytes:
                    raise Problem(413, f"the body is larger than {max_bytes} bytes")
    except TimeoutError as exc:
        raise Problem(408, f"the body did not arrive within {BODY_SECONDS} s") from exc
    except ClientDisconnect as exc:
        raise Problem(400, "the client disconnected before the body was complete") from exc
    return raw


def closing_unless_read(receive: Receive, send: Send) -> tuple[Receive, Send]:
    """For a request with `Expect: 100-continue`: close the connection if it is answered before its body was read.

    The client may or may not send the body after that answer, and its next request could be read as the body.
    """
    is_body_read = False

    async def receive_body() -> Message:
        nonlocal is_body_read
        is_body_read = True
        return await receive()

    async def answer(message: Message) -> None:
        if message["type"] == "http.response.start" and not is_body_read:
            message["headers"] = [*message["headers"], (b"connection", b"close")]
        await send(message)

    return receive_body, answer
