"""A connection: bounds on the memory and time it may use before its client is authenticated; the fast path for events.

Without these bounds uvicorn buffers a request's head of any size (64 MB of headers take 700 MB of memory), waits for it
without a deadline, keeps reading a body after its request was answered, and closes while a body is arriving, so that
the client may lose the answer. Its parser reads the body of a request with `Upgrade` as the next request.

Most requests publish an event and arrive complete. For these, the work of uvicorn and the framework takes several times
as long as handling the event, so they are answered here: the fast path. All others take the slow path.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tidegate.api import problems, request_head
from tidegate.api.connection_limits import ConnectionLimits
from tidegate.api.problems import Problem
from tidegate.api.request_head import MAX_HEAD_BYTES
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

# Deadline for a head to be complete, and for the rest of a body whose request was answered.
HEAD_SECONDS = 20
# Lingering close: how long, and how many bytes, we read and discard after the last answer, so that it arrives.
LINGER_SECONDS = 5
MAX_LINGER_BYTES = 64 * 1024 * 1024
# A client with unsent answers must read at least MIN_READ_BYTES of them in each READING_SECONDS.
READING_SECONDS, MIN_READ_BYTES = 20, 16 * 1024
# Pipelined requests that may wait for the one before them. Those beyond are not answered, and the connection closes.
MAX_PIPELINED = 64

PUBLISH_URL = b"/v1/events"
# Many clients send the head and then the body: how long the fast path waits for the rest, and its bounds on the body.
FAST_PATH_SECONDS, FAST_PATH_BYTES, FAST_PATH_PARTS = 0.005, 64 * 1024, 64
# Takes the headers, the body and the client's address of a publish request; returns the body of the answer 202, or
# another answer.
Publish = Callable[[list[tuple[bytes, bytes]], bytes, str | None], Awaitable[bytes | Response]]
_log = logger("api")
_ACCEPTED = (
    STATUS_LINE[202]
    + b"content-type: application/json\r\n"
    + b"".join(b"%b: %b\r\n" % (name.encode(), value.encode()) for name, value in problems.HEADERS.items())
)


class HttpConnection(HttpToolsProtocol):
    """One connection. A head that is too large gets 431; one that is not complete in time closes the connection."""

    def __init__(self, *arguments: Any, limits: ConnectionLimits, publish: Publish | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._limits = limits
        self._publish = publish
        self.idle_since = self.loop.time()
        # The parts of the body of a publish request, while it may still take the fast path.
        self._parts: list[bytes] | None = None
        self._parts_bytes = 0
        self._rest: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._is_in_message = False
        self._asks_for_upgrade = False
        self._discards_input = False
        # Bytes received since the parser last completed anything: the beginning of a head, a chunk header or a trailer.
        self._unparsed_bytes = 0
        self._is_read = False
        self._timer: asyncio.TimerHandle | None = None
        self._unsent_bytes = 0
        self._reading_timer: asyncio.TimerHandle | None = None
        self.is_lingering = False
        self._discarded_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        self.end = transport.abort
        self._lingering = _LingeringTransport(transport, self)
        super().connection_made(self._lingering)  # type: ignore[arg-type]
        self.flow = _Flow(self._lingering, self.pipeline)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=False)
        self._start_timer()
        if not self._limits.add(self, self.client[0] if self.client else ""):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.remove(self)
        self._stop_timer()
        self.resume_writing()
        self._pop_parts()
        super().connection_lost(exc)
        # Break the reference cycles: thousands of them, as under overload, would occupy the garbage collector for a
        # tenth of a second and more, in which no request is answered.
        self.cycle = None  # type: ignore[assignment]
        self._lingering.forget()

    def linger(self) -> None:
        """Close the connection so that its last answer arrives, whatever the client still sends.

        The kernel answers data that arrives after a close with a reset, and a client that gets one while it sends may
        never read the answer. So we first close our sending side only, and discard what still arrives, up to a bound.
        """
        if self.is_lingering or self._socket.is_closing():
            return
        self._pop_parts()
        if self.cycle is not None and not self.cycle.response_complete:  # its answer can no longer be sent
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.is_lingering = True
        self.pipeline.clear()
        self.flow.resume_reading()
        self._socket.write_eof()
        self._stop_timer()
        self._timer = self.loop.call_later(LINGER_SECONDS, self._end_linger)

    def _end_linger(self) -> None:
        """Keep waiting only for a client that still reads, as fast as `_check_reading` requires."""
        if self._reading_timer is None:
            self._socket.abort()
        else:
            self._timer = self.loop.call_later(LINGER_SECONDS, self._end_linger)

    @property
    def is_idle(self) -> bool:
        """Whether it has sent no more than the head of a request, and no answer is due."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return self.is_lingering or (is_answered and (self._is_in_head or not self._is_in_message))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent_bytes = self._socket.get_write_buffer_size()
        self._reading_timer = self.loop.call_later(READING_SECONDS, self._check_reading)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None

    def _check_reading(self) -> None:
        """Close the connection of a client that sends requests and does not read the answers."""
        left = self._socket.get_write_buffer_size()
        if left > self._unsent_bytes - MIN_READ_BYTES:
            self._socket.abort()
        else:
            self._unsent_bytes = left
            self._reading_timer = self.loop.call_later(READING_SECONDS, self._check_reading)

    def data_received(self, data: bytes) -> None:
        if self.is_lingering or self._discards_input:
            self._discarded_bytes += len(data)
            if self._discarded_bytes > MAX_LINGER_BYTES:
                self._socket.close()
            return
        self._is_read = False
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError as exc:
            self._refuse(request_head.unreadable(exc, data))
            return
        if self.transport.is_closing():
            return
        if self._parts is not None and self._rest is None:
            self._rest = self.loop.call_later(FAST_PATH_SECONDS, self._take_slow_path)
        self._unparsed_bytes = 0 if self._is_read else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > MAX_HEAD_BYTES:
            self._refuse(request_head.too_large())
        elif self._is_in_head and self._timer is None:
            self._start_timer()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. No other protocol is supported: a request with `Upgrade` is parsed again without it.

        The parser ends such a request after its head and reports where; it would read the body as the next request.
        """
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                end: int = upgrade.args[0]
            rest = memoryview(rest)[end:]
            head = request_head.without_upgrade(*self._head())
            self._asks_for_upgrade = False
            self.parser = httptools.HttpRequestParser(self)
            self.parser.feed_data(head)

    def _head(self) -> tuple[bytes, str, bytes, request_head.Headers]:
        return self.parser.get_method(), self.parser.get_http_version(), self.url, self.headers

    def on_message_begin(self) -> None:
        self._is_read = self._is_in_head = self._is_in_message = True
        if len(self.pipeline) >= MAX_PIPELINED:
            raise Problem(400, "too many requests were sent without waiting for an answer")
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_in_head:
            raise Problem(400, "trailers are not supported")  # they would be added to headers that were checked already
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_read = True
        self._stop_timer()
        if (problem := request_head.refusal(*self._head())) is not None:
            raise problem
        if self.parser.should_upgrade():
            self._asks_for_upgrade = True
            return
        if self._may_take_fast_path():
            self._parts = []
        else:
            super().on_headers_complete()
        self._is_in_head = False

    def on_body(self, body: bytes) -> None:
        self._is_read = True
        if self._parts is None:
            super().on_body(body)
            return
        self._parts.append(body)
        self._parts_bytes += len(body)
        if self._parts_bytes > FAST_PATH_BYTES or len(self._parts) > FAST_PATH_PARTS:
            self._take_slow_path()

    def on_message_complete(self) -> None:
        if self._asks_for_upgrade:
            return
        self._is_read, self._is_in_message = True, False
        self._stop_timer()
        if self._parts is not None:
            self._take_fast_path()
        else:
            super().on_message_complete()

    def shutdown(self) -> None:
        if self._parts is not None:
            self._take_slow_path()  # which sends the answer before it closes
        if self.is_idle and not self.is_lingering:
            self._socket.close()
        else:
            super().shutdown()

    def _may_take_fast_path(self) -> bool:
        """Whether this is a publish request of the common form, with no other one in progress before it."""
        return (
            self._publish is not None
            and self.url == PUBLISH_URL
            and self.parser.get_method() == b"POST"
            and (self.cycle is None or self.cycle.response_complete)
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.expect_100_continue
        )

    def _pop_parts(self) -> list[bytes]:
        parts, self._parts, self._parts_bytes = self._parts or [], None, 0
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        return parts

    def _take_slow_path(self) -> None:
        """Hand over to uvicorn: the rest of the body has not arrived yet, or is large."""
        parts = self._pop_parts()
        super().on_headers_complete()
        for part in parts:
            super().on_body(part)

    def _take_fast_path(self) -> None:
        body, exchange = b"".join(self._pop_parts()), _FastPathCycle()
        self.cycle = exchange  # type: ignore[assignment]
        task = self.loop.create_task(self._answer_fast(exchange, self.headers, body))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    async def _answer_fast(self, exchange: _FastPathCycle, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        assert self._publish is not None
        try:
            answer = await self._publish(headers, body, self.client[0] if self.client else None)
            if self.flow.write_paused:
                await self.flow.drain()  # while its answers are not read, nothing more is read from it
        except BaseException as exc:  # cancellation too: the client must not wait for ever
            exchange.response_complete = True
            self.transport.close()
            if isinstance(exc, Exception):
                _log.error("api.unexpected", error=exc, exc_info=exc)
                return
            raise
        exchange.response_complete = True
        if exchange.disconnected or self.transport.is_closing():
            return
        closing = b"" if exchange.keep_alive else b"connection: close\r\n"
        if isinstance(answer, bytes):
            self.transport.write(b"%bcontent-length: %d\r\n%b\r\n%b" % (_ACCEPTED, len(answer), closing, answer))
        else:
            self.transport.write(b"%b%b\r\n%b" % (_head(answer), closing, bytes(answer.body)))
        if not exchange.keep_alive:
            self.transport.close()
        self.on_response_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.idle_since = self.loop.time()
        if self._is_in_message and self._timer is None:
            self._start_timer()

    def _refuse(self, problem: Problem) -> None:
        """Refuse input that cannot be parsed, and with it all that follows. A request before it is answered first, as
        the last one. The refusal is sent only where a client cannot mistake it for the answer to another request."""
        cycle, answer = self.cycle, problems.response(problem)
        is_in_progress = cycle is not None and not cycle.response_complete
        has_own_cycle = self._is_in_message and not self._is_in_head and self._parts is None
        if is_in_progress and (self.pipeline or not has_own_cycle):
            cycle.keep_alive = False
            self._discards_input = True
            if has_own_cycle:
                self.pipeline[0] = (cycle, answer)  # type: ignore[assignment]  # after the answers before it
                metrics.answered(metrics.OTHER, answer.status_code)
        elif has_own_cycle and cycle.response_started:
            self.transport.close()
        else:
            metrics.answered(metrics.OTHER, answer.status_code)
            self.transport.write(b"%bconnection: close\r\n\r\n%b" % (_head(answer), bytes(answer.body)))
            self.transport.close()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(HEAD_SECONDS, self._socket.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _FastPathCycle:
    """A request on the fast path, in place of uvicorn's record (`cycle`) of the request in progress."""

    __slots__ = ("disconnected", "keep_alive", "response_complete", "response_started")

    def __init__(self) -> None:
        self.disconnected = False
        self.keep_alive = True
        self.response_started = False
        self.response_complete = False

    @property
    def message_event(self) -> _FastPathCycle:
        return self

    def set(self) -> None:
        """The event that uvicorn sets when more of a body arrives; the fast path has all of it."""


class _LingeringTransport:
    """The transport that uvicorn writes to; closing it starts `HttpConnection.linger`."""

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection) -> None:
        self._transport = transport
        self.write = transport.write
        self.close = connection.linger
        self._connection: HttpConnection | None = connection

    def is_closing(self) -> bool:
        return self._connection is None or self._connection.is_lingering or self._transport.is_closing()

    def forget(self) -> None:
        """The connection has ended: drop the reference to it."""
        self.close = self._transport.close
        self._connection = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Flow(FlowControl):
    """Flow control that does not resume reading while pipelined requests wait."""

    def __init__(self, transport: Any, pipeline: Collection[Any]) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


def _head(answer: Response) -> bytes:
    lines = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
    return STATUS_LINE[answer.status_code] + lines
