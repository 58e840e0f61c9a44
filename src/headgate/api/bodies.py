"""Request bodies of the operator's verbs: small, strict, and every refusal names its field."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from headgate.api.problems import Problem
from headgate.errors import FieldError, InvalidInput

MAX_BYTES = 64 * 1024
BODY_SECONDS = 10
DEFAULT_ACTOR = "api"

T = TypeVar("T", bound=msgspec.Struct)

_ACTOR = re.compile(r"[A-Za-z0-9._@+-]{1,64}", re.ASCII)
_AT_FIELD = re.compile(r"(?P<text>.*) - at `\$\.(?P<field>[^`]+)`", re.DOTALL)
_FIELD_NAMED = re.compile(r"Object (?:missing required|contains unknown) field `(?P<field>[^`]*)`", re.DOTALL)
_EXPECTED = re.compile(r"Expected `(?P<expected>[^`]+)`(?:, got `(?P<got>[^`]+)`| (?P<more>.+))", re.DOTALL)
_WORDS = {"int": "a whole number", "str": "text", "datetime": "a time such as 2026-01-31T09:30:00Z", "null": "null"}


class Nothing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A verb that takes no body (an empty object is one)."""


def actor(request: Request) -> str:
    """Who acts, for the audit log: the header `x-headgate-actor` if it is a plain name."""
    given = request.headers.get("x-headgate-actor", "")
    return given if _ACTOR.fullmatch(given) else DEFAULT_ACTOR


async def read(request: Request, kind: type[T]) -> T:
    """The body as `kind`; no body at all is an empty object. Problem 400, 413, 415; InvalidInput names the field."""
    raw = await _bytes(request)
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if raw and media not in ("", "application/json"):
        raise Problem(415, f"the content type {media[:60]!r} is not taken; send application/json (curl --json does)")
    return decode(raw or b"{}", kind)


def decode(raw: bytes, kind: type[T]) -> T:
    """JSON as `kind`, strictly: no unknown fields, no conversion between types."""
    try:
        plain = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        errors = [FieldError(name, "must be a finite number") for name in _not_finite(raw)]
        if errors:
            raise InvalidInput("the body is not valid", errors) from exc
        reason = "is nested too deeply" if isinstance(exc, RecursionError) else str(exc)
        raise Problem(400, f"the body is not JSON: {reason}", [FieldError("body", reason)]) from exc
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as exc:
        raise InvalidInput("the body is not valid", [_field_error(str(exc), kind)]) from exc


async def _bytes(request: Request) -> bytes:
    if request.headers.get("content-encoding", "identity") != "identity":
        raise Problem(415, "compressed bodies are not accepted; send without Content-Encoding")
    raw = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                raw += part
                if len(raw) > MAX_BYTES:
                    raise Problem(413, f"the body is larger than {MAX_BYTES} bytes")
    except TimeoutError as exc:
        raise Problem(408, f"the body did not arrive within {BODY_SECONDS} s") from exc
    except ClientDisconnect as exc:
        raise Problem(400, "the client went away before the body was complete") from exc
    return raw


def _field_error(message: str, kind: type[msgspec.Struct]) -> FieldError:
    """The decoder's sentence in our words, with the field it is about."""
    named = _FIELD_NAMED.match(message)
    if named and message.startswith("Object missing"):
        return FieldError(named["field"], "is required")
    if named:
        known = ", ".join(kind.__struct_fields__) or "none is taken here"
        return FieldError(named["field"][:60], f"unknown field; known are {known}")
    at = _AT_FIELD.match(message)
    field, text = (at["field"], at["text"]) if at else ("body", message)
    expected = _EXPECTED.match(text)
    if expected:
        what = " or ".join(_WORDS.get(word, word) for word in expected["expected"].split(" | "))
        got = f", not {expected['got']}" if expected["got"] else f" {expected['more']}"
        return FieldError(field, f"must be {what}{got}")
    return FieldError(field, text[:1].lower() + text[1:])


def _not_finite(raw: bytes) -> list[str]:
    """Fields whose value is NaN or infinite: not JSON, but what Python writes for them, so they are named."""
    try:
        found: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return []
    values = found.items() if isinstance(found, dict) else []
    return [name[:60] for name, value in values if isinstance(value, float) and not math.isfinite(value)]
