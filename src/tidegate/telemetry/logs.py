"""Structured logs: one line per decision that matters, with a stable `action`. Payloads and secrets never appear.

Fields with a fixed meaning: `event_id`, `correlation_id`, `source`, `attempt`, `next_attempt_at`, `reason`, `run_id`,
`workflow`, `trigger_id`; `trace_id` inside a span. Every action is listed in docs/operations/logs.md.

Logging never raises: most lines are written after a commit, and a caller that sees an exception then would repeat what
is already committed.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
import structlog
from structlog.typing import FilteringBoundLogger, Processor

from tidegate.model.event import trace_id
from tidegate.model.masking import masked
from tidegate.telemetry import traces

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_MAX_TEXT = 2000
# As a library, in a program that did not ask for logs, Tidegate writes warnings and errors only.
_level = 30


Observer = Callable[[str, Mapping[str, object]], bool]


def configure(level: str, log_format: str, observer: Observer | None = None) -> None:
    """Send log lines to standard error, as JSON or in a readable form. An observer is given every line, whatever the
    level; where it returns True, the line is not written."""
    global _level
    _level = _LEVELS[level] if observer is None else _LEVELS["debug"]
    renderers: list[Any]
    if log_format == "console":
        renderers, lines = _console(), _Lines(sys.stderr, "\n")
    else:
        renderers = [structlog.processors.JSONRenderer(serializer=_json)]
        lines = _Lines(sys.stderr.buffer, b"\n")
    structlog.configure(
        processors=[
            *([] if observer is None else [partial(_observe, observer, _LEVELS[level])]),
            *_fields(),
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_level),
        logger_factory=lambda *_: lines,
        cache_logger_on_first_use=True,
    )
    # Libraries that use the standard logging module: only warnings and errors, in the same format.
    logging.basicConfig(level=logging.WARNING, handlers=[_Forward()], force=True)


def _fields() -> list[Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _add_trace,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.EventRenamer("action"),
        _format_error,
        structlog.processors.format_exc_info,
        _mask,
    ]


def _console() -> list[Processor]:
    return [_as_text, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), event_key="action")]


def quieten(level: str) -> None:
    """Write lines from a level on, wherever they go: for tests, which have their own way with output."""
    global _level
    _level = _LEVELS[level]
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(_level))


class Logger:
    """The first argument is the `action`, all others are fields. A line below the log level costs very little: several
    of them are skipped for every event."""

    __slots__ = ("_component", "_lines")

    def __init__(self, component: str) -> None:
        self._component = component
        self._lines: FilteringBoundLogger = structlog.get_logger(component=component)

    def _out(self) -> FilteringBoundLogger:
        """Where lines go. Without a configuration structlog would write to standard output, which is the program's."""
        if structlog.is_configured():
            return self._lines
        to, made = _Lines(sys.stderr, "\n"), [*_fields(), *_console()]
        found: FilteringBoundLogger = structlog.wrap_logger(to, processors=made, component=self._component)
        return found

    @property
    def is_debug(self) -> bool:
        """Whether debug lines are written; check it before collecting fields in hot code."""
        return _level <= 10

    @property
    def is_info(self) -> bool:
        return _level <= 20

    def debug(self, action: str, **fields: object) -> None:
        if _level <= 10:
            self._out().debug(action, **fields)

    def info(self, action: str, **fields: object) -> None:
        if _level <= 20:
            self._out().info(action, **fields)

    def warning(self, action: str, **fields: object) -> None:
        self._out().warning(action, **fields)

    def error(self, action: str, **fields: object) -> None:
        self._out().error(action, **fields)

    def bind(self, **fields: Any) -> Any:
        """A structlog logger that adds these fields to every line."""
        return self._out().bind(**fields)


def logger(component: str) -> Logger:
    """The logger of one area of Tidegate."""
    return Logger(component)


class _Lines:
    """Writes lines. A line that cannot be written (disk full, reader gone) is dropped."""

    def __init__(self, file: Any, newline: str | bytes) -> None:
        self._file = file
        self._newline = newline
        self._lock = threading.Lock()

    def msg(self, line: Any) -> None:
        with self._lock, suppress(OSError, ValueError):  # ValueError: it is closed
            self._file.write(line + self._newline)
            self._file.flush()

    log = debug = info = warning = error = critical = exception = msg


class _Forward(logging.Handler):
    """Standard-library log records in our format."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        structlog.get_logger(component=record.name).log(
            max(record.levelno, 10), "library.log", message=record.getMessage(), **({"error": error} if error else {})
        )


def _observe(
    observer: Observer, level: int, _: Any, method: str, fields: MutableMapping[str, Any]
) -> MutableMapping[str, Any]:
    if observer(str(fields.get("event")), fields) or _LEVELS.get(method, level) < level:
        raise structlog.DropEvent
    return fields


def _add_trace(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    if traces.is_on and (found := trace_id(traces.current())) is not None:
        fields.setdefault("trace_id", found)
    return fields


def _format_error(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    error = fields.get("error")
    if isinstance(error, BaseException):
        name = type(error).__name__
        try:
            fields["error"] = f"{name}: {error}"
        except Exception:  # noqa: BLE001 - its __str__ fails
            fields["error"] = name
    return fields


def _mask(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Mask secrets, and truncate long values."""
    for key, value in fields.items():
        if isinstance(value, str):
            most = _MAX_TEXT if key != "exception" else 4 * _MAX_TEXT
            fields[key] = masked(value if len(value) <= most else f"{value[:most]}…")
    return fields


def _as_text(_: Any, __: str, fields: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Ids and times as text."""
    for key, value in fields.items():
        if isinstance(value, UUID | datetime):
            fields[key] = str(value)
    return fields


def _json(fields: Any, **_: Any) -> bytes:
    try:
        return msgspec.json.encode(fields, enc_hook=str)
    except (ValueError, OverflowError):  # half a character, or a number beyond 64 bits
        return json.dumps(fields, default=str).encode()
