"""Webhooks of a source: how they are configured, and whether a signature holds. No I/O; the time is passed in.

What is signed: Standard Webhooks `id.timestamp.body`, Stripe `timestamp.body`, GitHub the body alone. Signatures are
compared as the text that a signer writes, since base64 has several texts for the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from tidegate.errors import FieldError
from tidegate.model.event import is_name
from tidegate.model.secrets import is_sealed

Scheme = Literal["standard", "github", "stripe"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
# Why a request is refused, for logs; the sender is told none of it.
Refusal = Literal["unknown_source", "missing_signature", "bad_timestamp", "too_old", "too_new", "no_match"]
SIGNATURE_HEADERS: dict[Scheme, str] = {
    "standard": "webhook-signature",
    "github": "x-hub-signature-256",
    "stripe": "stripe-signature",
}
# Svix, from which the standard comes, sends its own names for the same three headers.
SVIX_HEADERS = {f"svix-{part}": f"webhook-{part}" for part in ("id", "timestamp", "signature")}
SECRET_PREFIX = "whsec_"  # noqa: S105 - a prefix, not a secret
DEFAULT_TOLERANCE_SECONDS, MAX_TOLERANCE_SECONDS = 300, 3600
# How long a replaced secret goes on to hold beside the new one; and how many of them.
DEFAULT_KEEP_MS, MAX_KEEP_MS = 86_400_000, 30 * 86_400_000
MAX_SECRETS = 5
# Instead of a secret's fingerprint, when the key that encrypted it is missing.
UNREADABLE = "unreadable"
# More than any signer sends, whatever secrets it is changing.
MAX_SIGNATURES = 20

NAME_RULE = "must be 1 to 200 letters, digits or . _ ~ : / ? # @ & = + % -"

_TIMESTAMP = re.compile(r"\d{1,11}", re.ASCII)
_SECRET_TEXT = re.compile(r"[!-~][ -~]{14,254}[!-~]", re.ASCII)
# What requests for unknown sources are compared with.
_NOBODYS_KEY = b"no source has this key"


class _Claim(NamedTuple):
    prefix: bytes
    timestamp: int | None
    signatures: list[str]


class WebhookSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret that holds until a time, or (null) until it is replaced or removed."""

    secret: str
    added_at: datetime
    until: datetime | None = None


class WebhookConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are checked; the first secret is the current one."""

    scheme: Scheme
    event_type: str | None
    tolerance_seconds: int | None
    secrets: list[WebhookSecret]


class Webhook(msgspec.Struct, frozen=True, kw_only=True):
    """The webhook of a source."""

    source: str
    config: WebhookConfig
    version: int
    created_by: str
    created_at: datetime
    updated_by: str
    updated_at: datetime


class WebhookBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole configuration. A `secret` replaces all; without one those there are stay, or a first one is made."""

    scheme: Scheme
    secret: str | None = None
    event_type: str | None = None
    tolerance_seconds: int | None = None


class WebhookRotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new secret: the one given, or one that is made. The old one holds too for `keep_ms`; 0 ends all old ones."""

    secret: str | None = None
    keep_ms: int | None = None


class ShownSecret(msgspec.Struct, frozen=True):
    """A secret as it may be shown: the beginning of its SHA-256, since when, and until when."""

    fingerprint: str
    added_at: datetime
    until: datetime | None


class ShownWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook as it may be shown; the first secret is the current one."""

    source: str
    scheme: Scheme
    event_type: str | None
    tolerance_seconds: int | None
    secrets: list[ShownSecret]
    version: int
    created_by: str
    created_at: datetime
    updated_by: str
    updated_at: datetime


def shown(webhook: Webhook, now: datetime) -> ShownWebhook:
    """The webhook for others to see, with the secrets that hold, but not their text."""
    fields = msgspec.structs.asdict(webhook)
    return ShownWebhook(**described(fields.pop("config"), now), **fields)


def described(config: WebhookConfig, now: datetime) -> dict[str, Any]:
    """The configuration for others to see: secrets by their fingerprints."""
    kept = [ShownSecret(fingerprint(s.secret), s.added_at, s.until) for s in holding(config.secrets, now)]
    return msgspec.structs.asdict(config) | {"secrets": kept}


def fingerprint(secret: str) -> str:
    """What tells secrets apart: `printf %s "$SECRET" | sha256sum | cut -c1-8`; of one that cannot be read, that."""
    return UNREADABLE if is_sealed(secret) else hashlib.sha256(secret.encode()).hexdigest()[:8]


def no_webhook(source: str) -> str:
    """What an operator is told about a source without one."""
    return f"source {source[:200]!r} has no webhook; tidegate webhooks list has those that there are"


def with_secrets(secrets: Sequence[WebhookSecret], change: Callable[[str], str]) -> list[WebhookSecret]:
    """The same, the text of each as `change` makes it: encrypted, or read."""
    return [msgspec.structs.replace(secret, secret=change(secret.secret)) for secret in secrets]


def holding(secrets: Sequence[WebhookSecret], now: datetime) -> list[WebhookSecret]:
    """Those that have not ended."""
    return [secret for secret in secrets if secret.until is None or secret.until > now]


def rotated(secrets: Sequence[WebhookSecret], secret: str, keep_ms: int, now: datetime) -> list[WebhookSecret]:
    """`secrets` with another current one, if it is another.

    The one before it holds for `keep_ms` more; 0 ends all that were before.
    """
    if keep_ms and secrets and secrets[0].secret == secret:
        return list(secrets)
    end = now + timedelta(milliseconds=keep_ms)
    former = [
        msgspec.structs.replace(old, until=end if old.until is None else min(old.until, end))
        for old in holding(secrets, now)
        if old.secret != secret
    ]
    return [WebhookSecret(secret=secret, added_at=now), *(former if keep_ms else [])][:MAX_SECRETS]


def body_errors(body: WebhookBody) -> list[FieldError]:
    """The rules that a configuration breaks."""
    errors = []
    if body.event_type is not None and not is_name(body.event_type):
        errors.append(FieldError("event_type", NAME_RULE))
    if body.tolerance_seconds is not None:
        if body.scheme == "github":
            errors.append(FieldError("tolerance_seconds", "goes without github, which signs no time"))
        elif not 1 <= body.tolerance_seconds <= MAX_TOLERANCE_SECONDS:
            errors.append(FieldError("tolerance_seconds", f"must lie between 1 and {MAX_TOLERANCE_SECONDS}"))
    if body.secret is not None:
        errors += secret_errors(body.scheme, body.secret)
    return errors


def secret_errors(scheme: Scheme, secret: str) -> list[FieldError]:
    """What is wrong with a secret; the message does not hold it."""
    if scheme == "standard":
        if _standard_key(secret) is None:
            return [FieldError("secret", f"must be {SECRET_PREFIX} and the base64 of 24 to 64 bytes")]
    elif not _SECRET_TEXT.fullmatch(secret):
        return [FieldError("secret", "must be 16 to 256 printable ASCII characters, no space first or last")]
    elif scheme == "stripe" and not secret.startswith(SECRET_PREFIX):
        return [FieldError("secret", f"must begin with {SECRET_PREFIX}, as Stripe shows it")]
    return []


def refusal(config: WebhookConfig | None, headers: Mapping[str, str], body: bytes, now: datetime) -> Refusal | None:
    """Why the request's signature does not hold; None when it does. Header names are in lower case.

    Whatever is wrong, the body is signed and compared, so that the time it takes does not tell which sources there are.
    """
    scheme = config.scheme if config is not None else "github"
    secrets = holding(config.secrets, now) if config is not None else []
    keys = [_key(scheme, secret.secret) for secret in secrets]
    claim = _claim(scheme, headers)
    is_signed = _is_signed(keys or [_NOBODYS_KEY], claim.prefix + body, claim.signatures, scheme)
    if config is None or not keys:
        return "unknown_source"
    if SIGNATURE_HEADERS[scheme] not in headers:
        return "missing_signature"
    if scheme != "github" and claim.timestamp is None:
        return "bad_timestamp"
    if not is_signed:
        return "no_match"
    if claim.timestamp is None:
        return None
    age = now.timestamp() - claim.timestamp
    tolerance = config.tolerance_seconds or DEFAULT_TOLERANCE_SECONDS
    return "too_old" if age > tolerance else "too_new" if age < -tolerance else None


def standard_names(headers: dict[str, str]) -> dict[str, str]:
    """The headers with Svix's names as the standard's, when the standard's signature is not there. All three are taken
    from one of them: what is signed belongs together."""
    if "webhook-signature" in headers or "svix-signature" not in headers:
        return headers
    kept = {name: value for name, value in headers.items() if name not in SVIX_HEADERS.values()}
    return kept | {SVIX_HEADERS[name]: value for name, value in headers.items() if name in SVIX_HEADERS}


def signed_at(scheme: Scheme, headers: Mapping[str, str]) -> int | None:
    """The signed time of a request whose signature holds, in seconds since 1970; None when its scheme signs none."""
    return _claim(scheme, headers).timestamp


def _claim(scheme: Scheme, headers: Mapping[str, str]) -> _Claim:
    """What the headers say, not yet believed. Signatures of other versions than ours are left out."""
    given = headers.get(SIGNATURE_HEADERS[scheme], "")
    if scheme == "github":
        return _Claim(b"", None, [given.removeprefix("sha256=")] if given.startswith("sha256=") else [])
    if scheme == "stripe":
        pairs = [part.strip().partition("=") for part in given.split(",")]
        stamps = [value for name, _, value in pairs if name == "t"]
        stamp, prefix = (stamps[0] if len(stamps) == 1 else ""), ""
        signatures = [value for name, _, value in pairs if name == "v1"]
    else:
        stamp, prefix = headers.get("webhook-timestamp", ""), headers.get("webhook-id", "") + "."
        signatures = [part.removeprefix("v1,") for part in given.split(" ") if part.startswith("v1,")]
    timestamp = int(stamp) if _TIMESTAMP.fullmatch(stamp) else None
    return _Claim(f"{prefix}{stamp}.".encode("latin-1"), timestamp, signatures)


def _is_signed(keys: Sequence[bytes], content: bytes, signatures: Sequence[str], scheme: Scheme) -> bool:
    """Whether one of the signatures was made with one of the keys. Every pair is compared, in constant time."""
    given = [signature.encode("latin-1") for signature in signatures[:MAX_SIGNATURES]]
    found = False
    for key in keys:
        digest = hmac.digest(key, content, "sha256")
        expected = base64.b64encode(digest) if scheme == "standard" else digest.hex().encode()
        for signature in given:
            found |= hmac.compare_digest(expected, signature)
    return found


def _key(scheme: Scheme, secret: str) -> bytes:
    key = _standard_key(secret) if scheme == "standard" else secret.encode()
    if not key:  # an empty key would let everyone sign
        raise ValueError("a stored secret is not one")
    return key


def _standard_key(secret: str) -> bytes | None:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        return None
    return key if secret.startswith(SECRET_PREFIX) and 24 <= len(key) <= 64 else None
