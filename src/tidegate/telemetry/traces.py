"""Traces: OpenTelemetry, where it is installed and asked for. The only module that imports it, and only then.

Off, a place that could make a span asks `is_on` and goes on. A span is recorded when it ends, so one that is begun in a
transaction and never ended, because that was rolled back, was never there. Times are this machine's.

Samplers and processors may be the program's own. What they raise is told once and changes nothing: an event must not be
given up, nor a run be left, because of its trace.
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

# Whether spans are made; read at every place that could make one, written by `use` and `switch_off` alone.
is_on = False
_provider: Any = None
_tracer: Any = None

# Whether it was told that the tracer fails; once is enough.
_is_told = False

Kind = Literal["INTERNAL", "SERVER", "CONSUMER"]
P = ParamSpec("P")
R = TypeVar("R")


def _harmless(call: Callable[P, R]) -> Callable[P, R | None]:
    """None instead of what the tracer raises."""

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
        _log.error("traces.failed", error=exc, exc_info=exc, reason="spans are missing; the work goes on")


def switch_on() -> None:
    """Make spans from now on, if the program has a tracer provider, or the environment names an exporter."""
    if is_on or settings.is_tracing_disabled():
        return
    found = _programs_provider()
    names = settings.trace_exporters()
    if found is None and names:
        try:
            found = _new_provider(names)
        except Exception as exc:  # noqa: BLE001 - traces are not worth a worker that does not start
            from tidegate.telemetry.logs import logger

            _log = logger("traces")
            _log.warning("traces.off", exporters=names, error=exc, reason="is tidegate[otel] installed?")
    if found is not None:
        use(found)


def use(provider: Any) -> None:
    """Make spans from now on, with this tracer provider."""
    global is_on, _provider, _tracer, _is_told
    _provider, _tracer = provider, provider.get_tracer("tidegate")
    is_on, _is_told = True, False


def switch_off() -> None:
    """Make no more spans."""
    global is_on, _provider, _tracer
    is_on, _provider, _tracer = False, None, None


async def flush() -> None:
    """Send what is not yet sent; a collector that does not answer keeps nobody for long."""
    send = getattr(_provider, "force_flush", None)
    if send is None:
        return
    thread = threading.Thread(target=send, name="flush-traces", daemon=True)
    thread.start()
    deadline = monotonic() + FLUSH_SECONDS
    while thread.is_alive() and monotonic() < deadline:  # noqa: ASYNC110 - it is a thread that may never end
        await asyncio.sleep(0.01)


@_harmless
def current() -> str | None:
    """The `traceparent` of the span that the caller is in, its own or one of ours; None without one."""
    api = sys.modules.get("opentelemetry.trace")  # a program without it is in no span
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    return _traceparent(context) if context.is_valid else None


class Span:
    """A span under way. `traceparent` is what continues it elsewhere."""

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
        """A span below this one, or below one of the caller's own that is in the same trace."""
        inner = current()
        is_inside = inner is not None and trace_id(inner) == self.trace_id
        return begin(name, inner if is_inside else self.traceparent, **fields)

    def enter(self) -> None:
        """What is called from now on, in this task or thread, is inside of this span."""
        self._token = attach(self)

    @_harmless
    def leave(self) -> None:
        """Undo `enter`."""
        from opentelemetry import context

        token, self._token = self._token, None
        if token is not None:
            context.detach(token)

    @_harmless
    def tell(self, **fields: object) -> None:
        """Add attributes; a None is left out."""
        if self._span.is_recording():
            self._span.set_attributes(_attributes(fields))

    @_harmless
    def fail(self, what: str | BaseException) -> None:
        """It went wrong; what is told first stays. Of an exception, the type and the places in the code: its text may
        hold anything."""
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
        """It is over: record it. Once."""
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
    """A new span, below `parent` (a `traceparent`) or, without one, as the root of a new trace. Tracing is on."""
    from opentelemetry import trace

    made = _started(
        name,
        _remote(parent),
        kind=trace.SpanKind[kind],
        start_time=began_ns,
        links=[trace.Link(found) for one in links if (found := _span_context(one)) is not None],
    )
    if made is None:  # what hangs below it hangs below its parent, if it has one
        made = Span(trace.NonRecordingSpan(_span_context(parent) or trace.INVALID_SPAN_CONTEXT))
    made.tell(**fields)
    return made


@_harmless
def _started(name: str, context: Any, **options: Any) -> Span:
    return Span(_tracer.start_span(name, context, **options))


@_harmless
def attach(span: Span | None) -> Any:
    """What is called from now on is inside of this span; None: inside of none, whoever began this task."""
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
        """Continue the trace of `parent`, or of what the program has begun for this request."""
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
        span.tell(**{"http.response.status_code": self.status})
        if exc is not None:
            span.fail(exc)
        elif self.status is not None and self.status >= 500:
            span.fail(str(self.status))
        span.end()


def _attributes(fields: dict[str, object]) -> dict[str, object]:
    """Our names get our prefix; what OpenTelemetry has no type for becomes text."""
    named = {name if "." in name else f"tidegate.{name}": value for name, value in fields.items() if value is not None}
    return {name: value if isinstance(value, str | int | float) else _text(value) for name, value in named.items()}


def _text(value: object) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _traceparent(context: Any) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"


def _span_context(traceparent: str | None) -> Any:
    """What a `traceparent` names; None when it is none."""
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
    """The provider that the program has set for itself."""
    api = sys.modules.get("opentelemetry.trace")
    found = api.get_tracer_provider() if api is not None else None
    return None if api is None or isinstance(found, api.ProxyTracerProvider | api.NoOpTracerProvider) else found


def _new_provider(exporters: Sequence[str]) -> Any:
    """A provider as the environment describes it, also for the spans of the workflows' own code."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create()
    if str(resource.attributes.get("service.name", "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "tidegate"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # we flush, with a limit
    queue_size = settings.trace_queue_size()
    for name in exporters:
        found = tuple(entry_points(group="opentelemetry_traces_exporter", name=name))
        if not found:
            raise LookupError(f"no exporter named {name} is installed")
        provider.add_span_processor(BatchSpanProcessor(found[0].load()(), max_queue_size=queue_size))
    trace.set_tracer_provider(provider)
    return provider
