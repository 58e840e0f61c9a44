"""The event in a signed request: its id, type, time and payload, depending on the scheme. No I/O.

Call these functions only after the signature has been verified.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from tidegate.errors import FieldError
from tidegate.model.event import EventLimits, is_name, is_text_id
from tidegate.model.webhook import NAME_RULE, Scheme, WebhookConfig, signed_at

FORM = "application/x-www-form-urlencoded"
ID_FIELDS: dict[Scheme, str] = {"standard": "webhook-id", "github": "x-github-delivery", "stripe": "id"}

_TEXT_RULE = "must be text of 1 to 200 characters without control characters"


class NotReadable(Exception):
    """The body cannot be decoded; the text says why, and contains nothing of the body but a key."""


def decode(body: bytes, media: str) -> Any:
    """The JSON in a body, which may be in a form's field `payload`. NotReadable if it is not JSON, or ambiguous.

    An object with the same key twice is ambiguous: the sender may have meant either value.
    """
    text = _form_payload(body) if media == FORM else body
    try:
        found = msgspec.json.decode(text)
        json.loads(text, object_pairs_hook=_refuse_twins)
    except RecursionError as exc:
        raise NotReadable("is nested too deeply") from exc
    except UnicodeDecodeError as exc:
        raise NotReadable("is not valid UTF-8") from exc
    except (msgspec.DecodeError, ValueError) as exc:
        raise NotReadable(f"is not JSON: {exc}") from exc
    return found


def event_fields(
    config: WebhookConfig,
    source: str,
    headers: Mapping[str, str],
    found: object,
    *,
    now: datetime,
    limits: EventLimits,
    errors: list[FieldError],
) -> dict[str, Any]:
    """An event as a producer would send it; missing fields are added to `errors`, by the names that the sender uses."""
    inside: dict[str, Any] = found if isinstance(found, dict) else {}
    external_id = inside.get("id") if config.scheme == "stripe" else headers.get(ID_FIELDS[config.scheme])
    if not isinstance(external_id, str) or not is_text_id(external_id):
        errors.append(FieldError(ID_FIELDS[config.scheme], f"{_given(external_id)}; {_TEXT_RULE}"))
    metadata: dict[str, Any] = {"webhook": config.scheme}
    if config.scheme == "github":
        metadata["github_event"] = headers.get("x-github-event")
    return {
        "id": external_id,
        "type": config.event_type or _type(config.scheme, headers, inside, errors),
        "source": source,
        "occurred_at": _occurred_at(config.scheme, headers, inside, now, limits),
        "payload": found if isinstance(found, dict) else {"data": found},
        "metadata": metadata,
    }


def _type(scheme: Scheme, headers: Mapping[str, str], inside: dict[str, Any], errors: list[FieldError]) -> str:
    """GitHub: `github.`, the event's name and, if the body has one, the action. Others: the body's `type`."""
    if scheme == "github":
        field, given = "x-github-event", headers.get("x-github-event")
        action = inside.get("action")
        name = f"github.{given}.{action}" if isinstance(action, str) else f"github.{given}"
    else:
        field, given = "type", inside.get("type")
        name = given if isinstance(given, str) else ""
    if given is None or not is_name(name):
        errors.append(FieldError(field, f"{_given(given)}; {NAME_RULE}, or set event_type on the webhook"))
    return name


def _occurred_at(
    scheme: Scheme, headers: Mapping[str, str], inside: dict[str, Any], now: datetime, limits: EventLimits
) -> str | None:
    """The time in the body if it is valid, else the signed time, else None: then the time of receipt is used."""
    said: datetime | None = None
    given = inside.get({"standard": "timestamp", "stripe": "created"}.get(scheme, ""))
    # An invalid time is ignored: it is no reason to refuse the event.
    with contextlib.suppress(ValueError, OverflowError, OSError, msgspec.ValidationError):
        if isinstance(given, str):
            said = msgspec.convert(given, datetime)
        elif isinstance(given, int):
            said = datetime.fromtimestamp(given, UTC)
    if said is not None and said.tzinfo is not None and -limits.max_past <= said - now <= limits.max_future:
        return said.isoformat()
    stamp = signed_at(scheme, headers)
    return None if stamp is None else datetime.fromtimestamp(stamp, UTC).isoformat()


def _form_payload(body: bytes) -> bytes:
    try:
        fields = parse_qsl(body.decode(), strict_parsing=True, errors="strict", max_num_fields=20)
    except ValueError as exc:
        raise NotReadable("is not a form") from exc
    found = [value for name, value in fields if name == "payload"]
    if len(found) != 1:
        raise NotReadable(f"is a form with {len(found)} `payload` fields instead of one")
    return found[0].encode()


def _refuse_twins(pairs: list[tuple[str, object]]) -> None:
    seen = set()
    for key, _ in pairs:
        if key in seen:
            shown = key[:60] if key.isprintable() else "?"
            raise NotReadable(f"has the key {shown!r} twice in one object")
        seen.add(key)


def _given(value: object) -> str:
    return "is required" if value is None else "is not valid"
