"""An API that has taken on all it can: it refuses at the head of a request, and the connection stays usable."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator

import pytest

from tidegate.api import connections
from tidegate.api.server import Api, Server

EVENT = json.dumps({"type": "a.b", "source": "overload"}).encode()
# As a body: whoever mistook it for the next request would answer 404.
TRAP = b"GET /v1/no-such-thing HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Running:
    """An API in this process, on a real socket; `full` makes it as busy as can be."""

    def __init__(self, api: Api, port: int) -> None:
        self._api = api
        self.port = port

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        with self._api.services.admission.request() as place:
            place.hold_events(1_000_000)
            yield

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Caller]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Caller(reader, writer)
        finally:
            writer.close()


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.write = writer.write

    @property
    def is_cut_off(self) -> bool:
        return self._reader.exception() is not None or self._writer.is_closing()

    def head(self, length: int, path: str = "/v1/events", *, close: bool = False) -> None:
        connection = "connection: close\r\n" if close else ""
        self.write(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n{connection}"
            f"content-length: {length}\r\n\r\n".encode()
        )

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        return int(head[0].split()[1]), fields, await self._reader.readexactly(int(fields["content-length"]))

    async def rest(self) -> bytes:
        return await self._reader.read()


@pytest.fixture
def running(served: tuple[Api, Server]) -> Running:
    api, server = served
    return Running(api, server.port)


async def test_the_head_is_enough_to_be_refused_and_the_body_is_skipped(running: Running) -> None:
    async with running.connection() as caller:
        with running.full():
            caller.head(len(TRAP))
            status, headers, body = await caller.answer()  # nothing of the body was sent
            assert (status, headers["retry-after"]) == (503, "1")
            assert headers["content-type"] == "application/problem+json"
            assert json.loads(body)["title"] == "Unavailable"
            caller.write(TRAP)
            caller.head(len(EVENT))
            caller.write(EVENT)
            assert (await caller.answer())[0] == 503
        caller.head(len(EVENT))
        caller.write(EVENT)
        status, _, body = await caller.answer()  # the same connection, as if nothing had been
        assert (status, json.loads(body)["status"]) == (202, "accepted")


async def test_whoever_closes_afterwards_gets_the_refusal_though_he_is_still_sending(running: Running) -> None:
    with running.full():
        for _ in range(20):
            async with running.connection() as caller:
                caller.head(2_000_000, close=True)
                for _ in range(10):
                    caller.write(b" " * 200_000)
                status, headers, _ = await caller.answer()
                assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
                assert await caller.rest() == b""


async def test_who_sends_on_and_on_after_the_refusal_is_cut_off(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_LINGER_BYTES", 1_000_000)
    monkeypatch.setattr(connections, "LINGER_SECONDS", 1000)
    async with running.connection() as caller:
        with running.full():
            caller.head(1_000_000_000, close=True)
            assert (await caller.answer())[0] == 503
        while not caller.is_cut_off:
            caller.write(b" " * 100_000)
            await asyncio.sleep(0.001)


async def test_who_waits_after_the_refusal_is_left_after_a_while(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.1)
    async with running.connection() as caller:
        with running.full():
            caller.head(100, close=True)
            assert (await caller.answer())[0] == 503
        while not caller.is_cut_off:  # a write to a connection that was closed is answered with a reset
            caller.write(b" ")
            await asyncio.sleep(0.01)


async def test_requests_in_a_row_are_refused_in_order(running: Running) -> None:
    async with running.connection() as caller:
        with running.full():
            for _ in range(5):
                caller.head(len(EVENT))
                caller.write(EVENT)
            assert [(await caller.answer())[0] for _ in range(5)] == [503] * 5


async def test_webhooks_are_refused_too_and_what_is_not_publishing_is_answered(running: Running) -> None:
    with running.full():
        async with running.connection() as caller:
            caller.head(10, "/v1/webhooks/shop")
            status, headers, _ = await caller.answer()
            assert (status, headers["retry-after"]) == (503, "1")
        async with running.connection() as caller:
            caller.head(2, "/admin/sources/shop/pause")
            caller.write(b"{}")
            assert (await caller.answer())[0] == 200
            caller.write(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (await caller.answer())[0] == 200


async def test_a_body_that_is_complete_too_late_is_refused_unread(running: Running) -> None:
    async with running.connection() as caller:
        caller.head(len(b"not JSON"))
        await asyncio.sleep(0)
        caller.write(b"not")
        async with running.connection() as other:  # answered: the head of the first has been seen, too
            other.head(len(EVENT))
            other.write(EVENT)
            assert (await other.answer())[0] == 202
        with running.full():
            caller.write(b" JSON")
            assert (await caller.answer())[0] == 503  # 400 if it had been parsed
