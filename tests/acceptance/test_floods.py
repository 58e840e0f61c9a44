"""Strangers who send much, read nothing or say nothing: they delay themselves, and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import re
import resource
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from chaos import wire

from tests.processes import Process, api
from tidegate.api import admission, connections
from tidegate.api.server import Api, Server

EVENT = {"type": "a.b", "source": "floods"}


def connected(stack: contextlib.ExitStack, address: str) -> socket.socket:
    target = urlsplit(address)
    return stack.enter_context(socket.create_connection((target.hostname, target.port), timeout=30))


def most_memory_mb(process: Process) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1024


async def test_unsigned_webhooks_take_no_room_from_publishers(served: tuple[Api, Server]) -> None:
    """So many that their bodies together are more than those of publishers may be."""
    api, server = served
    head = b"POST /v1/webhooks/nobody HTTP/1.1\r\nhost: localhost\r\nwebhook-signature: v1,x\r\ncontent-length: 1000000"
    size, count, room = 900_000, 84, api.services.admission.unauthenticated
    assert size * count > admission.MAX_HELD_BYTES
    writers, answered = [], []
    try:
        for _ in range(count):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writers.append(writer)
            answered.append(asyncio.create_task(reader.read(1)))
            writer.write(head + b"\r\n\r\n" + b" " * size)
        while room.held_bytes != size * sum(not one.done() for one in answered):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert any(one.done() for one in answered)  # they have no more room themselves
        # More than is left of all the room that there is for publishers, if it were shared.
        batch = [EVENT | {"payload": {"x": "y" * 200_000}}] * 4
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            published = await client.post(f"http://127.0.0.1:{server.port}/v1/events", json=batch)
        assert published.status_code == 202, published.text
        assert room.held_bytes > admission.MAX_UNAUTHENTICATED_BYTES - size
    finally:
        for writer in writers:
            writer.close()
        await asyncio.gather(*answered, return_exceptions=True)


def test_requests_that_do_not_wait_are_not_piled_up(database_url: str) -> None:
    """Whoever sends requests and reads no answer is not read."""
    requests = b"GET /nowhere HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000
    with (
        api(database_url, TIDEGATE_LOG_LEVEL="warning") as (process, address),
        contextlib.ExitStack() as stack,
        httpx.Client(trust_env=False, timeout=30) as client,
    ):
        client.get(f"{address}/nowhere")
        calm = most_memory_mb(process)
        sockets = [connected(stack, address) for _ in range(20)]
        for one in sockets:
            one.setblocking(False)
        sent = dict.fromkeys(sockets, 0)
        while True:
            taken = 0
            for one in sockets:
                with contextlib.suppress(OSError):  # full, or closed by now
                    if sent[one] < 2_000_000:
                        taken += (now := one.send(requests))
                        sent[one] += now
            assert client.get(f"{address}/livez").status_code == 200
            if not taken:
                break
        assert most_memory_mb(process) < calm + 100


def test_two_thousand_silent_connections_shut_nobody_out(database_url: str) -> None:
    """Also where the shell allows a process fewer files than that: it takes what it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 5000:
        pytest.skip("this machine allows a process fewer than 5,000 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with contextlib.ExitStack() as stack:
            process, address = stack.enter_context(api(database_url))
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            for _ in range(2000):
                connected(stack, address)
            with httpx.Client(trust_env=False, timeout=30) as client:
                assert client.post(f"{address}/v1/events", json=EVENT).status_code == 202
            assert len(list(Path(f"/proc/{process.pid}/fd").iterdir())) > 2000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_quiet_make_room(database_url: str) -> None:
    """Who has been quiet for longest first; whoever comes is answered."""
    with api(database_url, TIDEGATE_MAX_CONNECTIONS="20") as (_, address), contextlib.ExitStack() as stack:
        quiet = [connected(stack, address) for _ in range(100)]
        with httpx.Client(trust_env=False, timeout=30) as client:
            for _ in range(3):
                assert client.post(f"{address}/v1/events", json=EVENT).status_code == 202
        assert quiet[0].recv(1) == b""  # closed


async def test_who_does_not_read_is_ended(served: tuple[Api, Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READING_SECONDS", 0.3)
    monkeypatch.setattr(connections, "LINGER_SECONDS", 0.3)
    _, server = served
    here = server._uvicorn.server_state.connections
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
    try:
        writer.write(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * connections.MAX_PIPELINED)
        await reader.readline()
        assert here
        while here:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    finally:
        writer.close()


def test_who_is_answered_so_many_is_closed(address: str) -> None:
    """The first are answered, in order, and the last of them says that it is over."""
    with contextlib.ExitStack() as stack:
        one = connected(stack, address)
        one.sendall(b"".join(b"GET /nowhere/%d HTTP/1.1\r\nhost: localhost\r\n\r\n" % n for n in range(1000)))
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := one.recv(65536):
                answer += part
    found = [int(n) for n in re.findall(rb"no resource at /nowhere/(\d+)", answer)]
    assert found == list(range(len(found)))
    assert 0 < len(found) < 1000 and answer.count(b"connection: close") == 1


async def test_what_cannot_be_read_is_not_logged(database_url: str) -> None:
    """Unauthenticated clients cannot fill the log, neither with lines nor with tracebacks."""
    with api(database_url) as (process, address):
        port = int(address.rpartition(":")[2])
        before = len(process.lines)
        for target in ("publish", "webhook", "read", "alive"):
            for framing in wire.BROKEN:
                for upgrade in ("none", "h2c"):
                    sent = wire.request(b"x", target, framing, upgrade)
                    await wire.answers(port, [sent.raw[:-8], sent.raw[-8:], b"\x00garbage\r\n\r\n"], gap_seconds=0.003)
        for garbage in (b"\x16\x03\x01\x02\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\n\r\n"):
            answers = await wire.answers(port, [garbage])
            assert [400 <= answer.status < 500 for answer in answers] == [True]
        told = [line for line in process.lines[before:] if "webhook.refused" not in line]
    assert not told


@pytest.mark.parametrize("header", [b"authorization: Bearer x", b"host: elsewhere", b"content-type: text/plain"])
async def test_doubled_headers_are_refused(address: str, header: bytes) -> None:
    raw = (
        b"POST /v1/events HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nauthorization: Bearer y\r\n"
    )
    [answer] = await wire.answers(int(address.rpartition(":")[2]), [raw + header + b"\r\ncontent-length: 0\r\n\r\n"])
    assert (answer.status, answer.closes) == (400, True)
    assert b"more than once" in answer.body
