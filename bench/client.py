"""A lean HTTP/1.1 client in a process of its own, so that it shares no interpreter with what it measures.

`python -m bench.client` reads a Job as one line of JSON, prepares the bodies, writes `ready`, waits for another line,
sends, and writes a Report. The times are of the system-wide monotonic clock.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import cast

import msgspec
import uvloop

from bench import workload


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What to send: events from number `first`, `batch` to a request, over keep-alive connections; as fast as they are
    answered, or so many requests a second at even times."""

    port: int
    first: int
    events: int
    batch: int
    connections: int
    per_second: float | None = None
    path: str = "/v1/events"
    type: str = workload.TYPE
    source: str = workload.SOURCE


class Enqueue(msgspec.Struct, frozen=True, kw_only=True):
    """The same for a queue in a database (`bench.pgqueuer_side`): jobs from number `first`, `batch` to a call."""

    url: str
    first: int
    events: int
    batch: int
    connections: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """When the first request went out and the last answer came in; when each request was sent, and how long after
    that it was answered, in order."""

    started_at: float
    ended_at: float
    sent_at: list[float]
    latencies_ms: list[float]


class Shared:
    """What the connections share: the requests left, when each is due, and what was measured."""

    def __init__(self, requests: list[bytes], per_second: float | None) -> None:
        self.requests: Iterator[tuple[int, bytes]] = iter(enumerate(requests))
        self.gap_seconds = 1 / per_second if per_second else 0.0
        self.started_at = 0.0
        self.sent_at = [0.0] * len(requests)
        self.latencies_ms = [0.0] * len(requests)


class Sender(asyncio.Protocol):
    """One connection: a request, its answer, the next request, until there are no more."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._received = b""
        self._sent_at, self._number = 0.0, 0
        self._transport: asyncio.WriteTransport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the server closed the connection"))

    def send_next(self) -> None:
        assert self._transport is not None
        number, request = next(self._shared.requests, (0, None))
        if request is None:
            self.done.set_result(None)
            self._transport.close()
            return
        wait = self._shared.started_at + number * self._shared.gap_seconds - time.monotonic()
        if wait > 0:
            asyncio.get_running_loop().call_later(wait, self._send, number, request)
        else:
            self._send(number, request)

    def _send(self, number: int, request: bytes) -> None:
        assert self._transport is not None
        self._number = number
        self._sent_at = self._shared.sent_at[number] = time.monotonic()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 or len(self._received) < end + 4 + _content_length(self._received[:end]):
            return
        answer, self._received = self._received, b""
        if not answer.startswith(b"HTTP/1.1 202 "):
            self.done.set_exception(RuntimeError(f"refused: {answer.decode(errors='replace')[:500]}"))
            return
        self._shared.latencies_ms[self._number] = (time.monotonic() - self._sent_at) * 1000
        self.send_next()


def _content_length(head: bytes) -> int:
    _, _, rest = head.lower().partition(b"content-length:")
    return int(rest.partition(b"\r\n")[0])


def _requests(job: Job) -> list[bytes]:
    head = f"POST {job.path} HTTP/1.1\r\nhost: 127.0.0.1:{job.port}\r\ncontent-type: application/json\r\n"
    return [
        f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        for body in workload.bodies(job.first, job.events, job.batch, job.type, job.source)
    ]


async def send(job: Job, requests: list[bytes]) -> Report:
    """Connect, wait for the word, send every request; raises when one is not answered with 202."""
    loop = asyncio.get_running_loop()
    shared = Shared(requests, job.per_second)
    senders = []
    for _ in range(job.connections):
        _, sender = await loop.create_connection(lambda: Sender(shared), "127.0.0.1", job.port)
        senders.append(sender)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    shared.started_at = time.monotonic()
    for sender in senders:
        sender.send_next()
    await asyncio.gather(*(sender.done for sender in senders))
    return Report(
        started_at=shared.started_at,
        ended_at=time.monotonic(),
        sent_at=shared.sent_at,
        latencies_ms=shared.latencies_ms,
    )


def write_report(report: Report) -> None:
    """As one line on standard output. With PYTHONUNBUFFERED, sys.stdout loses what a single write() does not take; a
    buffered file writes it all."""
    with open(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(msgspec.json.encode(report) + b"\n")


def main() -> None:
    job = msgspec.json.decode(sys.stdin.readline(), type=Job)
    requests = _requests(job)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(send(job, requests))
    write_report(report)


if __name__ == "__main__":
    main()
