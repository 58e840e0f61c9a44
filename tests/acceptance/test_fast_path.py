"""The fast path for requests that publish: its answers are those of the slow path, however a request arrives."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
from collections.abc import AsyncIterator

import pytest

from tidegate.api import connections
from tidegate.api.server import Api, Server
from tidegate.store.db import Connection

EVENT = b'{"type": "order.created", "source": "shop.api", "payload": {"n": 1}}'


def request(body: bytes = EVENT, *headers: str, length: int | None = None, version: str = "1.1") -> bytes:
    given = [f"POST /v1/events HTTP/{version}", *headers]
    if not any(line.lower().startswith("host") for line in headers):
        given.append("host: localhost")
    if not any(line.lower().startswith("content-type") for line in headers):
        given.append("content-type: application/json")
    if not any(line.lower().startswith("transfer-encoding") for line in headers):
        given.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join(given).encode() + b"\r\n\r\n" + body


# A request, and the status that it gets.
REQUESTS = {
    "one event": (request(), 202),
    "a batch": (request(b"[" + EVENT + b"," + EVENT + b"]"), 202),
    "a correlation": (request(EVENT, "x-request-id: mine"), 202),
    "in chunks": (request(b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT), "transfer-encoding: chunked"), 202),
    "binary CloudEvent": (request(b'{"n": 1}', "ce-specversion: 1.0", "ce-id: 0", "ce-type: a", "ce-source: b"), 202),
    "the last of its connection": (request(EVENT, "connection: close"), 202),
    "of the version before": (request(version="1.0"), 202),
    "waits to be asked for": (request(EVENT, "expect: 100-continue"), 202),
    "no body": (request(b""), 400),
    "not JSON": (request(b"{"), 400),
    "not an event": (request(b'{"type": 5}'), 422),
    "an unknown field": (request(b'{"type": "a", "source": "b", "x": 1}'), 422),
    "of another site": (request(EVENT, "sec-fetch-site: cross-site"), 403),
    "a token that is none": (request(EVENT, "host: elsewhere.example", "authorization: Bearer x"), 401),
    "compressed": (request(EVENT, "content-encoding: gzip"), 415),
    "a type that is not taken": (request(EVENT, "content-type: text/plain"), 415),
    "much": (request(b'{"type": "a", "source": "b", "payload": {"t": "%b"}}' % (b"x" * 200_000)), 202),
    "too much": (request(b'{"type": "a", "source": "b", "payload": {"t": "%b"}}' % (b"x" * 300_000)), 413),
}


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *parts: bytes, gap_seconds: float = 0) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()
            await asyncio.sleep(gap_seconds)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """The status, the headers and the body; without what says go on."""
        while True:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            if " 100 " not in head[0]:
                break
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        return int(head[0].split()[1]), fields, await self.reader.readexactly(int(fields["content-length"]))


class Running:
    def __init__(self, api: Api, server: Server) -> None:
        self.api, self.server = api, server

    @contextlib.asynccontextmanager
    async def caller(self) -> AsyncIterator[Caller]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        try:
            yield Caller(reader, writer)
        finally:
            writer.close()


@pytest.fixture
def running(served: tuple[Api, Server]) -> Running:
    return Running(*served)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which path each request took that could have taken the fast one."""
    taken: list[str] = []
    for way in ("fast", "slow"):
        real = getattr(connections.HttpConnection, f"_take_{way}_path")

        def take(self: connections.HttpConnection, way: str = way, real: object = real) -> None:
            taken.append(way)
            real(self)  # type: ignore[operator]

        monkeypatch.setattr(connections.HttpConnection, f"_take_{way}_path", take)
    return taken


def same_for_all(answer: tuple[int, dict[str, str], bytes]) -> tuple[int, dict[str, str], bytes]:
    """Without what is another for each event."""
    status, headers, body = answer
    return status, headers, re.sub(rb'[0-9a-f]{8}-[0-9a-f-]{27}|(?<="external_id":)"[0-9]"', b"ID", body)


@pytest.mark.parametrize("name", REQUESTS)
async def test_the_answer_is_the_same_however_a_request_arrives(
    running: Running, connection: Connection, ways: list[str], name: str
) -> None:
    given, expected = REQUESTS[name]
    head, _, body = given.partition(b"\r\n\r\n")
    head, again, late = (head.replace(b"ce-id: 0", b"ce-id: %d" % n) + b"\r\n\r\n" for n in range(3))
    answers = []
    async with running.caller() as caller:  # all at once
        await caller.send(head + body)
        answers.append(await caller.answer())
    async with running.caller() as caller:  # as many clients do
        await caller.send(again, body)
        answers.append(await caller.answer())
    async with running.caller() as caller:  # bit by bit
        middle = len(body) // 2
        pause = 3 * connections.FAST_PATH_SECONDS
        await caller.send(late[:9], late[9:], body[:middle], body[middle:], gap_seconds=pause)
        answers.append(await caller.answer())
    first, *others = map(same_for_all, answers)
    assert first[0] == expected
    assert others == [first, first]
    stored = await connection.fetchval("select count(*) from tidegate.workflow_events")
    assert stored == 3 * (0 if expected != 202 else 2 if name == "a batch" else 1)
    if name in ("one event", "a batch", "not an event", "of another site"):
        assert ways[0] == "fast"
        assert ways[-1] == "slow"


async def test_one_connection_many_requests(running: Running, connection: Connection, ways: list[str]) -> None:
    async with running.caller() as caller:
        for n in range(50):
            await caller.send(request(b'{"type": "a", "source": "b", "id": "%d"}' % (n % 40)))
            status, _, body = await caller.answer()
            assert (status, json.loads(body)["status"]) == (202, "accepted" if n < 40 else "duplicate")
    assert ways == ["fast"] * 50
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 40


async def test_requests_that_do_not_wait_are_answered_in_order(running: Running, connection: Connection) -> None:
    """Also when the first takes longest: an event is committed, the others are refused at once."""
    async with running.caller() as caller:
        health = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"
        await caller.send(request() + request(b"{") + health + request() + request(EVENT, "content-encoding: x"))
        assert [(await caller.answer())[0] for _ in range(5)] == [202, 400, 200, 202, 415]
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 2


@pytest.mark.parametrize(
    "garbage", [b"\x00\x01\x02", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/events HTTP/1.1\r\nx y: z\r\n\r\n"]
)
async def test_what_is_no_request_does_not_take_the_answer_of_the_one_before(
    running: Running, connection: Connection, garbage: bytes
) -> None:
    async with running.caller() as caller:
        await caller.send(request() + request(b"{") + garbage)
        assert (await caller.answer())[0] == 202
        status, headers, _ = await caller.answer()
        assert (status, headers["connection"]) == (400, "close")
        assert await caller.reader.read() == b""
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 1


async def test_a_body_in_many_small_chunks_takes_no_longer_than_its_size(running: Running, ways: list[str]) -> None:
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in b'{"type": "a", "source": "b", "x": "' + b"y" * 5000 + b'"}')
    async with running.caller() as caller:
        await caller.send(request(chunks + b"0\r\n\r\n", "transfer-encoding: chunked"))
        assert (await caller.answer())[0] == 422
    assert ways == ["slow"]


async def test_who_does_not_read_is_not_read(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that nobody reads are not piled up: with the buffers full, the next request waits."""
    large, answered = b"x" * 300_000, 0

    async def answer(headers: object, body: bytes, peer: str | None) -> bytes:
        nonlocal answered
        answered += 1
        return large

    async with running.caller() as caller:
        await caller.send(request())
        await caller.answer()
        [connected] = running.server._uvicorn.server_state.connections
        monkeypatch.setattr(connected, "_publish", answer)
        for _ in range(connections.MAX_PIPELINED):
            await caller.send(request(), gap_seconds=0.001)
        await asyncio.sleep(0.1)
        assert connected.transport.get_write_buffer_size() < 3 * len(large)
        assert 0 < answered < connections.MAX_PIPELINED
        for _ in range(connections.MAX_PIPELINED):
            assert (await caller.answer())[0] == 202  # those that came while another waited took the slow path


async def test_a_fault_of_ours_ends_the_connection(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(headers: object, body: bytes, peer: str | None) -> bytes:
        raise RuntimeError("a fault")

    async with running.caller() as caller:
        await caller.send(request())
        assert (await caller.answer())[0] == 202
        [connected] = running.server._uvicorn.server_state.connections
        monkeypatch.setattr(connected, "_publish", fail)
        await caller.send(request())
        async with asyncio.timeout(5):
            assert await caller.reader.read() == b""


async def test_what_was_refused_is_not_begun_afterwards(running: Running, ways: list[str]) -> None:
    async with running.caller() as caller:
        await caller.send(request(b"5\r\n{abcd\r\n", "transfer-encoding: chunked"))
        await caller.send(b"not a length\r\n")
        assert (await caller.reader.readuntil(b"\r\n"))[9:12] == b"400"
        await asyncio.sleep(3 * connections.FAST_PATH_SECONDS)
        assert ways in ([], ["slow"])  # unless the second part came late
        caller.writer.write_eof()
        async with asyncio.timeout(5):
            await caller.reader.read()


async def test_whoever_goes_away_meanwhile_is_not_missed(running: Running, connection: Connection) -> None:
    for sent in (request(), request()[:-5], request(EVENT, length=len(EVENT) + 1)):
        async with running.caller() as caller:
            await caller.send(sent)
    async with running.caller() as caller:
        await caller.send(request())
        assert (await caller.answer())[0] == 202
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") in (1, 2)


async def test_what_is_under_way_is_answered_before_the_server_ends(
    running: Running, connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, may_go = running.api.services.ingest.accept, asyncio.Event()

    async def slowly(events: list[object]) -> object:
        await may_go.wait()
        return await accept(events)  # type: ignore[arg-type]

    monkeypatch.setattr(running.api.services.ingest, "accept", slowly)
    async with running.caller() as whole, running.caller() as halved:
        await whole.send(request())
        await halved.send(request()[:-5])
        await asyncio.sleep(0.002)  # less than the fast path waits
        stopping = asyncio.create_task(running.server.stop())
        await asyncio.sleep(0.3)
        await halved.send(request()[-5:])
        may_go.set()
        for caller in (whole, halved):
            status, headers, _ = await caller.answer()
            assert (status, headers["connection"]) == (202, "close")
            assert await caller.reader.read() == b""
            caller.writer.close()
        await stopping
    assert await connection.fetchval("select count(*) from tidegate.workflow_events") == 2


async def test_a_process_that_has_too_much_to_do_refuses_both_ways(running: Running) -> None:
    running.api.services.admission.limit_events = 0
    async with running.caller() as caller:
        for parts in ((request(),), (request()[:-5],)):
            await caller.send(*parts)
            status, headers, _ = await caller.answer()
            assert (status, headers["retry-after"]) == (503, "1")


async def test_a_connection_that_is_over_leaves_nothing_to_the_garbage_collector(running: Running) -> None:
    """Under overload thousands come and go: collecting them held up everybody for a tenth of a second and more."""
    get = b"GET /v1/workflows HTTP/1.1\r\nhost: localhost\r\n\r\n"
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for sent, is_answered in (
            (request(), True), (get, True), (request(b"{"), True), (b"no request\r\n\r\n", True),
            (request()[:-5], False), (request()[:20], False), (b"", False),
        ):  # fmt: skip
            async with running.caller() as caller:
                await caller.send(sent)
                if is_answered:
                    assert (await caller.reader.readline()).startswith(b"HTTP/1.1 ")
        running.api.services.admission.limit_events = 0
        for _ in range(3):
            async with running.caller() as caller:
                await caller.send(request())
                assert (await caller.answer())[0] == 503
        for _ in range(100):  # the server hears of the end a moment later
            if not (left := sum(isinstance(one, connections.HttpConnection) for one in gc.get_objects())):
                break
            await asyncio.sleep(0.1)
        assert left == 0
    finally:
        if was_on:
            gc.enable()
