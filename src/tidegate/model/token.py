"""API tokens: what one may do, and the form of its secret.

A secret is `tg_`, 43 random characters (256 bits) and 6 of checksum, so that a scanner for leaked secrets recognises it
and a mistyped one is refused without a query. Only its SHA-256 is stored: a random secret needs no slow hash.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from datetime import datetime
from typing import Annotated, Literal, get_args

import msgspec

from tidegate.errors import FieldError
from tidegate.model import units
from tidegate.model.client_address import parse_network
from tidegate.model.ids import TokenId
from tidegate.model.trigger import compile_pattern

Scope = Literal["publish", "read", "operate", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
PREFIX = "tg_"
SECRET_CHARACTERS = 43
MAX_SOURCES = 50
MAX_NETWORKS = 50
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"

_NAME = re.compile(r"[A-Za-z0-9._@+-]{1,64}", re.ASCII)
_SECRET = re.compile(rf"{PREFIX}([0-9A-Za-z]{{{SECRET_CHARACTERS}}})([0-9A-Za-z]{{6}})", re.ASCII)


class Token(msgspec.Struct, frozen=True, kw_only=True):
    """A token as it is shown. `sources` restricts it to sources, `networks` to client addresses, `rate` its number of
    requests; null: not restricted."""

    id: TokenId
    name: str
    scopes: list[Scope]
    sources: list[str] | None
    rate: str | None
    networks: list[str] | None
    created_by: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    last_used_at: datetime | None


class TokenBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new token; it expires at `expires_at` or after `expires_in_ms`; with neither, it is valid until revoked."""

    name: str
    scopes: list[Scope]
    sources: list[str] | None = None
    rate: str | None = None
    networks: list[str] | None = None
    expires_at: Annotated[datetime, msgspec.Meta(tz=True)] | None = None
    expires_in_ms: int | None = None


def allows(scopes: list[Scope], needed: Scope) -> bool:
    """Whether one of the scopes is sufficient. `admin` includes all others; the others include only themselves."""
    return needed in scopes or "admin" in scopes


def is_token_name(text: str) -> bool:
    """Whether the text is a valid token name; the audit log shows it for each change."""
    return _NAME.fullmatch(text) is not None


def token_errors(body: TokenBody) -> list[FieldError]:
    """What is invalid in a new token, by field."""
    errors = []
    if not is_token_name(body.name):
        errors.append(FieldError("name", "must be 1 to 64 letters, digits or . _ @ + -"))
    elif body.name.startswith(PREFIX):
        errors.append(FieldError("name", f"must not begin with {PREFIX}, the prefix of secrets"))
    if not body.scopes or len(set(body.scopes)) != len(body.scopes):
        errors.append(FieldError("scopes", f"must be one or more of {', '.join(SCOPES)}, each once"))
    if body.expires_at is not None and body.expires_in_ms is not None:
        errors.append(FieldError("expires_in_ms", "cannot be combined with expires_at"))
    return errors + _use_errors(body) + _source_errors(body)


def _use_errors(body: TokenBody) -> list[FieldError]:
    errors = []
    if body.rate is not None:
        try:
            units.rate(body.rate)
        except ValueError as exc:
            errors.append(FieldError("rate", str(exc)))
    if body.networks is not None and not 0 < len(body.networks) <= MAX_NETWORKS:
        errors.append(FieldError("networks", f"must be 1 to {MAX_NETWORKS} networks such as 10.0.0.0/8"))
    for i, text in enumerate((body.networks or [])[:MAX_NETWORKS]):
        try:
            parse_network(text)
        except ValueError as exc:
            errors.append(FieldError(f"networks[{i}]", str(exc)))
    return errors


def _source_errors(body: TokenBody) -> list[FieldError]:
    errors: list[FieldError] = []
    if body.sources is None:
        return errors
    if "admin" in body.scopes:
        errors.append(FieldError("sources", "cannot be combined with the scope admin, which may do everything"))
    if not 0 < len(body.sources) <= MAX_SOURCES:
        errors.append(FieldError("sources", f"must be 1 to {MAX_SOURCES} names, exact or with *"))
    for i, pattern in enumerate(body.sources[:MAX_SOURCES]):
        if not pattern.isprintable():
            errors.append(FieldError(f"sources[{i}]", "must be printable"))
        compile_pattern(pattern, f"sources[{i}]", errors)
    return errors


def secret_of(characters: str) -> str:
    """The secret with these random characters."""
    return f"{PREFIX}{characters}{_checksum(characters)}"


def secret_hash(secret: str) -> bytes | None:
    """The stored hash of a secret; None if the text is not a valid secret."""
    found = _SECRET.fullmatch(secret)
    if found is None or _checksum(found[1]) != found[2]:
        return None
    return hashlib.sha256(secret.encode()).digest()


def _checksum(characters: str) -> str:
    left, digits = zlib.crc32(characters.encode()), ""
    for _ in range(6):
        left, digit = divmod(left, len(ALPHABET))
        digits = ALPHABET[digit] + digits
    return digits
