"""Whoever sends on behind the last request of a connection gets the answer, and cannot hold anything by it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from chaos import wire

from tests.acceptance.test_floods import EVENT, connected
from tests.processes import Process, api
from tidegate.api import connections
from tidegate.api.server import Api, Server, bind
from tidegate.settings import Settings

# States of a TCP socket: the other side has ended the connection; it is none.
CLOSE_WAIT, LISTEN = 8, 10
BODY = b'{"type": "a", "source": "closing"}'
PUBLISH = b"POST /v1/events HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
GET = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n"
# What ends a connection, and the answer to it.
CLOSING = {
    "asked for": (GET + b"connection: close\r\n\r\n", 404),
    "asked for by a publisher": (PUBLISH % len(BODY) + b"connection: close\r\n\r\n" + BODY, 202),
    "the version before": (b"GET /nowhere HTTP/1.0\r\n\r\n", 404),
    "not to be read": (GET + b"x y: z\r\n\r\n", 400),
    "doubled": (GET + b"host: elsewhere\r\n\r\n", 400),
    "too large a head": (GET + b"x: " + b"y" * connections.MAX_HEAD_BYTES + b"\r\n\r\n", 431),
    "too large a body": (PUBLISH % 50_000_000 + b"connection: close\r\n\r\n", 413),
    "a body that it was not asked for": (GET + b"expect: 100-continue\r\ncontent-length: 9\r\n\r\n", 404),
}


@pytest.mark.parametrize("name", CLOSING)
def test_what_follows_does_not_cost_the_answer(address: str, name: str) -> None:
    """Nothing is read until the server has ended its side, and much was sent after that: it comes, then the end."""
    raw, status = CLOSING[name]
    with contextlib.ExitStack() as stack:
        one = connected(stack, address)
        one.sendall(raw)
        while one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != CLOSE_WAIT:
            one.recv(1, socket.MSG_PEEK)
        for _ in range(50):
            one.sendall(GET + b"\r\n" + b" " * 8192)
        answer = b""
        while part := one.recv(65536):  # a reset would be an error
            answer += part
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert answer.count(b"HTTP/1.1 ") == 1 and b"connection: close" in answer


@pytest.mark.parametrize("way", ["long", "short"])
async def test_requests_before_one_that_cannot_be_read_are_answered(served: tuple[Api, Server], way: str) -> None:
    """Each in its turn; also where the fault is in a body, while others still wait for theirs."""
    first = GET + b"\r\n" if way == "long" else PUBLISH % len(BODY) + b"\r\n" + BODY
    broken = (
        b"POST /v1/workflows HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\nno length\r\n"
    )
    _, server = served
    for others in range(3):
        found = await wire.answers(server.port, [first + (GET + b"\r\n") * others + broken])
        assert [one.status for one in found] == [404 if way == "long" else 202] + [404] * others + [400]
        assert [one.closes for one in found] == [False] * (others + 1) + [True]


@contextlib.asynccontextmanager
async def answering(body: bytes) -> AsyncIterator[Server]:
    async def application(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    server = Server(application, bind(Settings(port=0)))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def test_whoever_reads_slowly_gets_all_of_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time to leave is not the time to read."""
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.1)
    async with answering(b"x" * 30_000_000) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(GET + b"connection: close\r\n\r\n")
        got, loop = 0, asyncio.get_running_loop()
        began = loop.time()
        while loop.time() < began + 1:
            got += len(await reader.read(1024))
            await asyncio.sleep(0.01)
        got += len(await reader.read())
        writer.close()
    assert got > 30_000_000


def held(process: Process, address: str) -> int:
    """How many connections of clients the process has open."""
    port = f":{urlsplit(address).port:04X}"
    rows = [line.split() for line in Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]]
    inodes = {row[9] for row in rows if row[1].endswith(port) and int(row[3], 16) != LISTEN}
    found = 0
    for file in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found += str(file.readlink()).removeprefix("socket:[").rstrip("]") in inodes
    return found


@pytest.mark.parametrize(
    "raw", [CLOSING["asked for"][0], CLOSING["too large a body"][0], GET], ids=["all", "no body", "half a head"]
)
def test_who_does_not_go_takes_no_room(database_url: str, raw: bytes) -> None:
    """Answered, and still there: such connections count as any other, and make room for whoever comes."""
    most = 20
    with api(database_url, TIDEGATE_MAX_CONNECTIONS=str(most)) as (process, address), contextlib.ExitStack() as stack:
        for _ in range(5 * most):
            one = connected(stack, address)
            one.sendall(raw)
            if raw.endswith(b"\r\n\r\n"):
                assert one.recv(9) == b"HTTP/1.1 "
        with httpx.Client(trust_env=False, timeout=30) as client:
            assert client.post(f"{address}/v1/events", json=EVENT).status_code == 202
            assert 0 < held(process, address) <= most
