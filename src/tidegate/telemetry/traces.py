"""Traces with OpenTelemetry, if it is installed and configured. Only this module imports it, and only then.

When tracing is off, callers check `is_on` and create no span. A span is recorded when it ends; a span begun in a
transaction that was rolled back is never ended and so never recorded. Times are this machine's.

Samplers and processors may come from the program. What they raise is logged once and otherwise ignored: a problem with
tracing must not dead-letter an event or abort a run.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import wraps
from importlib.metadata import entry_points
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

from tidegate import settings
from tidegate.clock import epoch_ns, monotonic
from tidegate.model.event import trace_id

FLUSH_SECONDS = 5.0
MAX_LINKS = 100
MAX_FRAMES = 30

# Whether spans are created; checked wherever one could be, set only by `use` and `switch_off`.
is_on = False
_provider: Any = None
_tracer: Any = None

# Whether a failure of the tracer has been logged; it is logged once.
_is_told = False

Kind = Literal["INTERNAL", "SERVER", "CONSUMER"]
P = ParamSpec("P")
R = TypeVar("R")


def _harmless(call: Callable[P, R]) -> Callable[P, R | None]:
    """Return None instead of raising an exception of the tracer."""

    @wraps(call)
    def called(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return call(*args, **kwargs)
        except Exception as exc:  # noqa: BLE001 - tracing must not break what it observes
            _tell_failure(exc)
            return None

    return called


def _tell_failure(exc: Exception) -> None:
    global _is_told
    if not _is_told:
        _is_told = True
        from tidegate.telemetry.logs import logger

        _log = logger("traces")
        _log.error("traces.failed", error=exc, exc_info=exc, reason="some spans are missing; nothing else is affected")


def switch_on() -> None:
    """Start tracing if the program has a tracer provider, or the environment names an exporter."""
    if is_on or settings.is_tracing_disabled():
        return
    found = _programs_provider()
    names = settings.trace_exporters()
    if found is None and names:
        try:
            found = _new_provider(names)
        except Exception as exc:  # noqa: BLE001 - a problem with tracing must not keep a worker from starting
            from tidegate.telemetry.logs import logger

            _log = logger("traces")
            _log.warning("traces.off", exporters=names, error=exc, reason="is tidegate[otel] installed?")
    if found is not None:
        use(found)


def use(provider: Any) -> None:
    """Start tracing with this tracer provider."""
    global is_on, _provider, _tracer, _is_told
    _provider, _tracer = provider, provider.get_tracer("tidegate")
    is_on, _is_told = True, False


def switch_off() -> None:
    """Stop tracing."""
    global is_on, _provider, _tracer
    is_on, _provider, _tracer = False, None, None


async def flush() -> None:
    """Send buffered spans, with a time limit in case the collector does not answer."""
    send = getattr(_provider, "force_flush", None)
    if send is None:
        return
    thread = threading.Thread(target=send, name="flush-traces", daemon=True)
    thread.start()
    deadline = monotonic() + FLUSH_SECONDS
    while thread.is_alive() and monotonic() < deadline:  # noqa: ASYNC110 - waits for a thread that may never end
        await asyncio.sleep(0.01)


@_harmless
def current() -> str | None:
    """The `traceparent` of the current span, the caller's own or one of ours; None if there is none."""
    api = sys.modules.get("opentelemetry.trace")  # without OpenTelemetry there is no current span
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    return _traceparent(context) if context.is_valid else None


class Span:
    """A span in progress. `traceparent` continues the trace in another process."""

    __slots__ = ("_has_failed", "_span", "_token", "traceparent")

    def __init__(self, span: Any) -> None:
        self._span = span
        self._token: Any = None
        self._has_failed = False
        self.traceparent = _traceparent(span.get_span_context())

    @property
    def trace_id(self) -> str | None:
        return trace_id(self.traceparent)

    def child(self, name: str, **fields: Any) -> Span:
        """A child of this span, or of the caller's current span if that is in the same trace."""
        inner = current()
        is_inside = inner is not None and trace_id(inner) == self.trace_id
        return begin(name, inner if is_inside else self.traceparent, **fields)

    def enter(self) -> None:
        """Make this the current span of the task or thread."""
        self._token = attach(self)

    @_harmless
    def leave(self) -> None:
        """Undo `enter`."""
        from opentelemetry import context

        token, self._token = self._token, None
        if token is not None:
            context.detach(token)

    @_harmless
    def set_attributes(self, **fields: object) -> None:
        """Add attributes; None values are skipped."""
        if self._span.is_recording():
            self._span.set_attributes(_attributes(fields))

    @_harmless
    def fail(self, what: str | BaseException) -> None:
        """Mark the span as failed; only the first error is kept. Of an exception, only the type and the stack are kept:
        its text may contain anything."""
        from opentelemetry.trace import Status, StatusCode

        if self._has_failed or not self._span.is_recording():
            return
        self._has_failed = True
        if isinstance(what, BaseException):
            frames = traceback.extract_tb(what.__traceback__, -MAX_FRAMES)
            places = "\n".join(f'File "{one.filename}", line {one.lineno}, in {one.name}' for one in frames)
            what = type(what).__qualname__
            self._span.add_event("exception", {"exception.type": what, "exception.stacktrace": places})
        self._span.set_status(Status(StatusCode.ERROR, what))

    @_harmless
    def end(self, ended_ns: int | None = None) -> None:
        """End and record the span. Later calls do nothing."""
        self._span.end(ended_ns)


def begin(
    name: str,
    parent: str | None,
    *,
    kind: Kind = "INTERNAL",
    began_ns: int | None = None,
    links: Iterable[str] = (),
    **fields: object,
) -> Span:
    """A new span with the parent `parent` (a `traceparent`), or the root of a new trace. Requires `is_on`."""
    from opentelemetry import trace

    made = _started(
        name,
        _remote(parent),
        kind=trace.SpanKind[kind],
        start_time=began_ns,
        links=[trace.Link(found) for one in links if (found := _span_context(one)) is not None],
    )
    if made is None:  # its children become children of its parent, if it has one
        made = Span(trace.NonRecordingSpan(_span_context(parent) or trace.INVALID_SPAN_CONTEXT))
    made.set_attributes(**fields)
    return made


@_harmless
def _started(name: str, context: Any, **options: Any) -> Span:
    return Span(_tracer.start_span(name, context, **options))


@_harmless
def attach(span: Span | None) -> Any:
    """Make this the current span of the task; None: no span, even if the task was started inside one."""
    from opentelemetry import context, trace

    return context.attach(_empty() if span is None else trace.set_span_in_context(span._span, _empty()))


class Request:
    """The span of one HTTP request: `with` around it, `begin` once its trace is known, `status` before the end."""

    def __init__(self, method: str, route: str) -> None:
        self.status: int | None = None
        self._method, self._route = method, route.replace(":path}", "}")
        self._began_ns = epoch_ns()
        self._span: Span | None = None

    def begin(self, parent: str | None, links: Sequence[str] = ()) -> Span:
        """Continue the trace of `parent`, or of the span that the program has started for this request."""
        self._span = begin(
            f"{self._method} {self._route}",
            current() or parent,
            kind="SERVER",
            began_ns=self._began_ns,
            links=links[:MAX_LINKS],
            **{"http.request.method": self._method, "http.route": self._route},
        )
        return self._span

    def __enter__(self) -> Request:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        span = self._span or self.begin(None)
        span.leave()
        span.set_attributes(**{"http.response.status_code": self.status})
        if exc is not None:
            span.fail(exc)
        elif self.status is not None and self.status >= 500:
            span.fail(str(self.status))
        span.end()


def _attributes(fields: dict[str, object]) -> dict[str, object]:
    """Attributes with our prefix; values of types that OpenTelemetry does not support become text."""
    named = {name if "." in name else f"tidegate.{name}": value for name, value in fields.items() if value is not None}
    return {name: value if isinstance(value, str | int | float) else _text(value) for name, value in named.items()}


def _text(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _traceparent(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def _span_context(traceparent: str | None) -> Any:
    """The span context of a `traceparent`; None if it is invalid."""
    from opentelemetry.trace import SpanContext, TraceFlags

    if traceparent is None or trace_id(traceparent) is None:
        return None
    _, trace, span, flags = traceparent.split("-")
    return SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16) & 1))


def _remote(traceparent: str | None) -> Any:
    from opentelemetry import trace

    found = _span_context(traceparent)
    return _empty() if found is None else trace.set_span_in_context(trace.NonRecordingSpan(found), _empty())


def _empty() -> Any:
    from opentelemetry.context import Context

    return Context()


def _programs_provider() -> Any:
    """The provider that the program has set globally."""
    api = sys.modules.get("opentelemetry.trace")
    found = api.get_tracer_provider() if api is not None else None
    return None if api is None or isinstance(found, api.ProxyTracerProvider | api.NoOpTracerProvider) else found


def _new_provider(exporters: Sequence[str]) -> Any:
    """A provider configured from the environment, also used for spans created by workflow code."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "tidegate"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # `flush` is called instead, with a time limit
    queue_size = settings.trace_queue_size()
    for name in exporters:
        found = tuple(entry_points(group="opentelemetry_traces_exporter", name=name))
        if not found:
            raise LookupError(f"no exporter named {name} is installed")
        provider.add_span_processor(BatchSpanProcessor(found[0].load()(), max_queue_size=queue_size))
    trace.set_tracer_provider(provider)
    return provider
