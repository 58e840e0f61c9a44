"""Webhooks of a source: their configuration, and the verification of signatures. No I/O; the time is passed in.

What is signed: Standard Webhooks `id.timestamp.body`, Stripe `timestamp.body`, GitHub the body alone. Signatures are
compared as text, since base64 has several texts for the same bytes.
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
# Why a request is refused: for logs only, never sent to the client.
Refusal = Literal["unknown_source", "missing_signature", "bad_timestamp", "too_old", "too_new", "no_match"]
SIGNATURE_HEADERS: dict[Scheme, str] = {
    "standard": "webhook-signature",
    "github": "x-hub-signature-256",
    "stripe": "stripe-signature",
}
# Svix, where the standard comes from, uses its own names for the same three headers.
SVIX_HEADERS = {f"svix-{part}": f"webhook-{part}" for part in ("id", "timestamp", "signature")}
SECRET_PREFIX = "whsec_"  # noqa: S105 - a prefix, not a secret
DEFAULT_TOLERANCE_SECONDS, MAX_TOLERANCE_SECONDS = 300, 3600
# How long a replaced secret stays valid beside the new one, and the maximum number of secrets.
DEFAULT_KEEP_MS, MAX_KEEP_MS = 86_400_000, 30 * 86_400_000
MAX_SECRETS = 5
# The fingerprint of a secret that cannot be decrypted.
UNREADABLE = "unreadable"
# More than any signer sends, even while it rotates secrets.
MAX_SIGNATURES = 20

NAME_RULE = "must be 1 to 200 letters, digits or . _ ~ : / ? # @ & = + % -"

_TIMESTAMP = re.compile(r"\d{1,11}", re.ASCII)
_SECRET_TEXT = re.compile(r"[!-~][ -~]{14,254}[!-~]", re.ASCII)
# The key that requests for unknown sources are compared with.
_UNKNOWN_SOURCE_KEY = b"no source has this key"


class _Claim(NamedTuple):
    prefix: bytes
    timestamp: int | None
    signatures: list[str]


class WebhookSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret that is valid until a time, or (null) until it is replaced or removed."""

    secret: str
    added_at: datetime
    until: datetime | None = None


class WebhookConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are verified; the first secret is the current one."""

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
    """The whole configuration. A `secret` replaces all secrets; without it they stay, or the first one is generated."""

    scheme: Scheme
    secret: str | None = None
    event_type: str | None = None
    tolerance_seconds: int | None = None


class WebhookRotation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A new secret, given or generated. The old one stays valid for `keep_ms`; 0 expires all old ones."""

    secret: str | None = None
    keep_ms: int | None = None


class ShownSecret(msgspec.Struct, frozen=True):
    """A secret as it is shown: the first digits of its SHA-256, and when it became valid and expires."""

    fingerprint: str
    added_at: datetime
    until: datetime | None


class ShownWebhook(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook as it is shown; the first secret is the current one."""

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
    """The webhook for clients, with the valid secrets, but not their text."""
    fields = msgspec.structs.asdict(webhook)
    return ShownWebhook(**described(fields.pop("config"), now), **fields)


def described(config: WebhookConfig, now: datetime) -> dict[str, Any]:
    """The configuration for clients: secrets by their fingerprints."""
    kept = [ShownSecret(fingerprint(s.secret), s.added_at, s.until) for s in holding(config.secrets, now)]
    return msgspec.structs.asdict(config) | {"secrets": kept}


def fingerprint(secret: str) -> str:
    """Identifies a secret: `printf %s "$SECRET" | sha256sum | cut -c1-8`; `unreadable` if it cannot be decrypted."""
    return UNREADABLE if is_sealed(secret) else hashlib.sha256(secret.encode()).hexdigest()[:8]


def no_webhook(source: str) -> str:
    """The error for a source without a webhook."""
    return f"source {source[:200]!r} has no webhook; `tidegate webhooks list` lists all webhooks"


def with_secrets(secrets: Sequence[WebhookSecret], change: Callable[[str], str]) -> list[WebhookSecret]:
    """The same secrets, with `change` (encrypt or decrypt) applied to each text."""
    return [msgspec.structs.replace(secret, secret=change(secret.secret)) for secret in secrets]


def holding(secrets: Sequence[WebhookSecret], now: datetime) -> list[WebhookSecret]:
    """The secrets that have not expired."""
    return [secret for secret in secrets if secret.until is None or secret.until > now]


def rotated(secrets: Sequence[WebhookSecret], secret: str, keep_ms: int, now: datetime) -> list[WebhookSecret]:
    """`secrets` with a new current one, if it differs.

    The previous one stays valid for `keep_ms`; 0 expires all previous ones.
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
    """What is invalid in a configuration, by field."""
    errors = []
    if body.event_type is not None and not is_name(body.event_type):
        errors.append(FieldError("event_type", NAME_RULE))
    if body.tolerance_seconds is not None:
        if body.scheme == "github":
            errors.append(FieldError("tolerance_seconds", "does not apply to github, which does not sign a time"))
        elif not 1 <= body.tolerance_seconds <= MAX_TOLERANCE_SECONDS:
            errors.append(FieldError("tolerance_seconds", f"must lie between 1 and {MAX_TOLERANCE_SECONDS}"))
    if body.secret is not None:
        errors += secret_errors(body.scheme, body.secret)
    return errors


def secret_errors(scheme: Scheme, secret: str) -> list[FieldError]:
    """What is invalid in a secret; the message does not contain it."""
    if scheme == "standard":
        if _standard_key(secret) is None:
            return [FieldError("secret", f"must be {SECRET_PREFIX} followed by the base64 of 24 to 64 bytes")]
    elif not _SECRET_TEXT.fullmatch(secret):
        return [
            FieldError("secret", "must be 16 to 256 printable ASCII characters, not beginning or ending with a space")
        ]
    elif scheme == "stripe" and not secret.startswith(SECRET_PREFIX):
        return [FieldError("secret", f"must begin with {SECRET_PREFIX}, as Stripe shows it")]
    return []


def refusal(config: WebhookConfig | None, headers: Mapping[str, str], body: bytes, now: datetime) -> Refusal | None:
    """Why the request's signature is not valid; None if it is. Header names are in lower case.

    The body is always signed and compared, so that the time it takes does not reveal which sources exist.
    """
    scheme = config.scheme if config is not None else "github"
    secrets = holding(config.secrets, now) if config is not None else []
    keys = [_key(scheme, secret.secret) for secret in secrets]
    claim = _claim(scheme, headers)
    is_signed = _is_signed(keys or [_UNKNOWN_SOURCE_KEY], claim.prefix + body, claim.signatures, scheme)
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
    """The headers with Svix's names replaced by the standard's, if the standard's signature is missing. All three come
    from the same set: they are signed together."""
    if "webhook-signature" in headers or "svix-signature" not in headers:
        return headers
    kept = {name: value for name, value in headers.items() if name not in SVIX_HEADERS.values()}
    return kept | {SVIX_HEADERS[name]: value for name, value in headers.items() if name in SVIX_HEADERS}


def signed_at(scheme: Scheme, headers: Mapping[str, str]) -> int | None:
    """The signed time of a verified request, in seconds since 1970; None if its scheme signs no time."""
    return _claim(scheme, headers).timestamp


def _claim(scheme: Scheme, headers: Mapping[str, str]) -> _Claim:
    """The unverified content of the headers. Signatures of unsupported versions are ignored."""
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
    """Whether one of the signatures was created with one of the keys. Every pair is compared, in constant time."""
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
    if not key:  # with an empty key anyone could sign
        raise ValueError("a stored secret is not valid")
    return key


def _standard_key(secret: str) -> bytes | None:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        return None
    return key if secret.startswith(SECRET_PREFIX) and 24 <= len(key) <= 64 else None
