"""Converts CloudEvents 1.0 over HTTP (binary, structured and batch mode) to Tidegate events.

`data` that is an object is the payload; another JSON value becomes `{"data": value}`, bytes `{"data_base64": "…"}`.
`datacontenttype`, `dataschema`, `subject` and extension attributes are kept in `metadata`.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Any
from urllib.parse import unquote_to_bytes

from tidegate.errors import FieldError

_OWN = {"id", "source", "type", "time", "specversion", "data", "data_base64", "correlationid", "traceparent",
        "tidegatepriority"}  # fmt: skip


def from_structured(raw: Any, prefix: str, errors: list[FieldError]) -> tuple[Any, str | None]:
    """An event in structured mode as the fields of a Tidegate event, and its `traceparent`."""
    if not isinstance(raw, dict):
        return raw, None
    raw = {name: value for name, value in raw.items() if value is not None}  # null means: not set
    if raw.get("specversion") != "1.0":
        errors.append(FieldError(f"{prefix}specversion", "must be 1.0"))
    payload: Any
    if "data_base64" in raw and "data" in raw:
        errors.append(FieldError(f"{prefix}data_base64", "cannot be combined with data: send one of them"))
        payload = {}
    elif "data_base64" in raw:
        payload = _from_base64(raw["data_base64"], f"{prefix}data_base64", errors)
    else:
        payload = _payload(raw.get("data"))
    return _fields(raw, payload), _text(raw.get("traceparent"))


def from_binary(headers: dict[str, str], payload: Any, errors: list[FieldError]) -> tuple[dict[str, Any], str | None]:
    """An event in binary mode (`ce-*` headers, the data as the body) as the fields of a Tidegate event."""
    attributes = {
        name[3:]: _unescaped(value, name, errors) for name, value in headers.items() if name.startswith("ce-")
    }
    if "content-type" in headers:
        attributes["datacontenttype"] = headers["content-type"]
    return _fields(attributes, _payload(payload)), attributes.get("traceparent") or headers.get("traceparent")


def is_json(media: str) -> bool:
    """Whether a media type means JSON: `*/json` or `*/*+json`."""
    return media.endswith(("/json", "+json"))


def binary_payload(body: bytes) -> dict[str, Any]:
    """The payload for a body that is not JSON."""
    return {"data_base64": base64.b64encode(body).decode()} if body else {}


def _fields(attributes: dict[str, Any], payload: Any) -> dict[str, Any]:
    metadata = {name: value for name, value in attributes.items() if name not in _OWN}
    priority = attributes.get("tidegatepriority")  # text in binary mode
    if isinstance(priority, str) and priority.isascii() and priority.isdecimal() and len(priority) < 10:
        priority = int(priority)
    return {
        # CloudEvents requires an id: a missing one becomes empty, which is refused with an error that names the field.
        "id": attributes.get("id", ""),
        "source": attributes.get("source"),
        "type": attributes.get("type"),
        "occurred_at": attributes.get("time"),
        "correlation_id": attributes.get("correlationid"),
        "priority": priority,
        "payload": payload,
        "metadata": metadata,
    }


def _payload(data: Any) -> Any:
    if data is None:
        return {}
    return data if isinstance(data, dict) else {"data": data}


def _from_base64(text: Any, field: str, errors: list[FieldError]) -> dict[str, Any]:
    try:
        base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError):
        errors.append(FieldError(field, "must be base64"))
        return {}
    return {"data_base64": text}


def _unescaped(value: str, header: str, errors: list[FieldError]) -> str:
    """An attribute decoded from its header: unquoted, percent-decoded once, UTF-8."""
    if len(value) > 1 and value[0] == value[-1] == '"':
        value = re.sub(r"\\(.)", r"\1", value[1:-1])
    try:
        return unquote_to_bytes(value.encode("latin-1")).decode()
    except UnicodeDecodeError:
        errors.append(FieldError(header, "is not valid UTF-8, neither as sent nor percent-decoded"))
        return ""


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
