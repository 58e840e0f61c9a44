"""Workflows of kind `http`: their configuration, its validation, and the secrets that sign requests. No I/O."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tidegate.errors import FieldError
from tidegate.model.addresses import url_problem

KIND = "http"
DEFAULT_TIMEOUT_MS, MIN_TIMEOUT_MS, MAX_TIMEOUT_MS = 30_000, 100, 600_000
MAX_HEADERS, MAX_HEADER_VALUE = 20, 4000
SECRET_PREFIX = "whsec_"  # noqa: S105 - a prefix, not a secret
# How long a replaced secret continues to sign beside the new one, and the maximum number of old secrets.
DEFAULT_KEEP_MS, MAX_KEEP_MS = 86_400_000, 30 * 86_400_000
MAX_OLD_SECRETS = 4

_SLUG = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,100}", re.ASCII)  # `.` and `..` have a meaning in URL paths
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_|~-]{1,100}", re.ASCII)
_HEADER_VALUE = re.compile(rf"[!-~](?:[ -~]{{0,{MAX_HEADER_VALUE - 2}}}[!-~])?", re.ASCII)
# Headers that Tidegate or the HTTP connection sets.
_OUR_HEADERS = (
    "accept-encoding", "connection", "content-encoding", "content-length", "content-type", "expect", "host",
    "idempotency-key", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "user-agent",
)  # fmt: skip
_OUR_PREFIXES = ("webhook-", "proxy-")


class OldSecret(msgspec.Struct, frozen=True):
    """A replaced secret, and until when it signs."""

    secret: str
    until: datetime


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The `config` of an http workflow's definition."""

    url: str
    secret: str
    timeout_ms: int = DEFAULT_TIMEOUT_MS
    headers: dict[str, str] = {}
    allow_private: bool = False
    old_secrets: list[OldSecret] = []


class HttpWorkflowPatch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that can be changed. Null restores the default; for `secret`, null generates a new one."""

    url: str | UnsetType = UNSET
    secret: str | UnsetType | None = UNSET
    timeout_ms: int | UnsetType | None = UNSET
    headers: dict[str, str] | UnsetType | None = UNSET
    allow_private: bool | UnsetType | None = UNSET


class HttpWorkflowBody(HttpWorkflowPatch, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new workflow that posts its runs to `url`. Without a `secret`, one is generated and shown once."""

    slug: str
    kind: str
    url: str


class SecretRotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new secret, given or generated. The old one continues to sign for `keep_ms`; 0 expires all old ones."""

    secret: str | None = None
    keep_ms: int | None = None


def changed(old: HttpConfig, body: HttpWorkflowPatch) -> HttpConfig:
    """`old` with the fields of `body`, except for the secret."""
    defaults = {"timeout_ms": DEFAULT_TIMEOUT_MS, "headers": {}, "allow_private": False}
    names = ("url", *defaults)
    said = {name: value for name in names if (value := getattr(body, name)) is not UNSET}
    return msgspec.structs.replace(old, **{n: defaults[n] if v is None else v for n, v in said.items()})


def rotated(old: HttpConfig, secret: str, keep_ms: int, now: datetime) -> HttpConfig:
    """`old` with a new secret. The previous one signs for `keep_ms` more; 0 expires all previous ones."""
    replaced = OldSecret(old.secret, now + timedelta(milliseconds=keep_ms))
    former = [replaced, *old.old_secrets] if keep_ms else []
    kept = [o for o in former if o.until > now and o.secret != secret][:MAX_OLD_SECRETS]
    return msgspec.structs.replace(old, secret=secret, old_secrets=kept)


def signing_secrets(config: HttpConfig, now: datetime) -> list[str]:
    """The secrets that sign a request: the current one, then replaced ones that have not expired."""
    return [config.secret, *(old.secret for old in config.old_secrets if old.until > now)]


def with_secrets(config: HttpConfig, change: Callable[[str], str]) -> HttpConfig:
    """The config with `change` (encrypt or decrypt) applied to each secret; header values are secrets too."""
    return msgspec.structs.replace(
        config,
        secret=change(config.secret),
        old_secrets=[msgspec.structs.replace(old, secret=change(old.secret)) for old in config.old_secrets],
        headers={name: change(value) for name, value in config.headers.items()},
    )


def is_same(one: HttpConfig, other: HttpConfig) -> bool:
    """Whether two configs are equal, apart from their old secrets."""
    return msgspec.structs.replace(one, old_secrets=[]) == msgspec.structs.replace(other, old_secrets=[])


def described(config: HttpConfig) -> dict[str, Any]:
    """The config for clients: without secrets and without header values, which often are secrets too."""
    return {
        "url": config.url,
        "timeout_ms": config.timeout_ms,
        "header_names": sorted(config.headers),
        "allow_private": config.allow_private,
        "has_secret": True,
        "old_secrets_until": [old.until for old in config.old_secrets],
    }


def slug_errors(slug: str) -> list[FieldError]:
    """What is invalid in a slug."""
    message = "must be 1 to 100 of A-Z a-z 0-9 . _ - and not `.` or `..`"
    return [] if _SLUG.fullmatch(slug) else [FieldError("slug", message)]


def config_errors(config: HttpConfig) -> list[FieldError]:
    """What is invalid in a config, by field."""
    errors = []
    problem = url_problem(config.url, allow_private=config.allow_private)
    if problem is not None:
        errors.append(FieldError("url", problem))
    if not _is_secret(config.secret):
        errors.append(FieldError("secret", f"must be {SECRET_PREFIX} followed by the base64 of 24 to 64 bytes"))
    if not MIN_TIMEOUT_MS <= config.timeout_ms <= MAX_TIMEOUT_MS:
        errors.append(FieldError("timeout_ms", f"must lie between {MIN_TIMEOUT_MS} and {MAX_TIMEOUT_MS}"))
    return errors + _header_errors(config.headers)


def _header_errors(headers: dict[str, str]) -> list[FieldError]:
    errors = []
    if len(headers) > MAX_HEADERS or len({name.lower() for name in headers}) < len(headers):
        errors.append(FieldError("headers", f"must be at most {MAX_HEADERS}, each with a different name"))
    for name, value in headers.items():
        place = f"headers.{name[:60]}"
        if not _HEADER_NAME.fullmatch(name):
            errors.append(FieldError(place, "is not a valid header name"))
        elif name.lower() in _OUR_HEADERS or name.lower().startswith(_OUR_PREFIXES):
            errors.append(FieldError(place, "is set by Tidegate and cannot be overridden"))
        if not _HEADER_VALUE.fullmatch(value):
            errors.append(FieldError(place, f"must have a value of 1 to {MAX_HEADER_VALUE} printable ASCII characters"))
    return errors


def _is_secret(text: str) -> bool:
    try:
        key = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
        return text.startswith(SECRET_PREFIX) and 24 <= len(key) <= 64
    except ValueError:
        return False
