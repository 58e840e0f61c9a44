"""Structured logs: one line per decision that matters, with a stable `action`. Payloads and secrets never appear.

Fields with a fixed meaning: `event_id`, `correlation_id`, `source`, `attempt`, `next_attempt_at`, `reason`, `run_id`,
`workflow`, `trigger_id`; `trace_id` inside of a span. Every action is listed in docs/operations/logs.md.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import MutableMapping
from datetime import datetime
from typing import Any
from uuid import UUID

import msgspec
import structlog

from headgate.model.event import trace_id
from headgate.model.masking import masked
from headgate.telemetry import traces

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_MAX_TEXT = 2000


def configure(level: str, log_format: str) -> None:
    """Send log lines to standard error, as JSON or for people."""
    renderers: list[Any]
    factory: Any
    if log_format == "console":
        console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), event_key="action")
        renderers, factory = [_as_text, console], structlog.WriteLoggerFactory(sys.stderr)
    else:
        renderers = [structlog.processors.JSONRenderer(serializer=_json)]
        factory = structlog.BytesLoggerFactory(sys.stderr.buffer)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            _add_trace,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.EventRenamer("action"),
            _format_error,
            structlog.processors.format_exc_info,
            _mask,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=factory,
        cache_logger_on_first_use=True,
    )
    # Libraries that log through the standard module: only what is wrong, in our form.
    logging.basicConfig(level=logging.WARNING, handlers=[_Forward()], force=True)


def logger(component: str) -> Any:
    """A logger; its first argument is the `action`, everything else a field."""
    return structlog.get_logger(component=component)


class _Forward(logging.Handler):
    """Standard-library records as our lines."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        structlog.get_logger(component=record.name).log(
            max(record.levelno, 10), "library.log", message=record.getMessage(), **({"error": error} if error else {})
        )


def _add_trace(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if traces.is_on and (found := trace_id(traces.current())) is not None:
        fields.setdefault("trace_id", found)
    return fields


def _format_error(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    error = fields.get("error")
    if isinstance(error, BaseException):
        fields["error"] = f"{type(error).__name__}: {error}"
    return fields


def _mask(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """No secret of an address, and nothing without end."""
    for key, value in fields.items():
        if isinstance(value, str):
            most = _MAX_TEXT if key != "exception" else 4 * _MAX_TEXT
            fields[key] = masked(value if len(value) <= most else f"{value[:most]}…")
    return fields


def _as_text(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Ids and times as people write them."""
    for key, value in fields.items():
        if isinstance(value, UUID | datetime):
            fields[key] = str(value)
    return fields


def _json(fields: Any, **_: Any) -> bytes:
    return msgspec.json.encode(fields, enc_hook=str)
