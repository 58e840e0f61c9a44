"""Unauthenticated clients: web pages against an API without tokens, endless heads, and what they can see."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.acceptance.conftest import DEMO
from tests.processes import api, run, worker
from tidegate.api import connections
from tidegate.api.server import Server

EVENT = {"type": "a.b", "source": "strangers"}
FOREIGN = (
    {"host": "rebound.example"},
    {"host": "0.0.0.0:8700"},
    {"origin": "http://localhost:3000"},
    {"origin": "null"},
    {"x-forwarded-for": "203.0.113.7"},
)


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=30, trust_env=False) as client:
        yield client


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/events"), ("GET", "/metrics"), ("GET", "/admin/tokens"), ("POST", "/v1/events"),
        ("POST", "/admin/tokens"), ("POST", "/admin/sources/strangers/pause"), ("DELETE", "/admin/tokens/x"),
    ],
)  # fmt: skip
def test_dns_rebinding(http: httpx.Client, address: str, method: str, path: str, headers: dict[str, str]) -> None:
    body = {"POST": EVENT if path == "/v1/events" else {}}.get(method)
    answer = http.request(method, address + path, json=body, headers=headers)
    assert answer.status_code == 401 and "since it" in answer.json()["detail"], answer.text
    assert http.get(f"{address}/v1/events?source=strangers").json()["events"] == []
    here = http.request(method, address + path, json={}, headers={"host": "app.localhost:1"})
    assert here.status_code != 401  # the same, made here


def test_what_is_public_has_any_name(http: httpx.Client, address: str) -> None:
    """Probes ask by address, and senders of webhooks come through tunnels: they are signed."""
    for path in ("/livez", "/readyz", "/", "/docs", "/openapi.json"):
        assert http.get(address + path, headers={"host": "rebound.example"}).status_code == 200
    answer = http.post(
        f"{address}/v1/webhooks/nobody", headers={"host": "rebound.example", "x-forwarded-for": "1.2.3.4"}
    )
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Signature realm="tidegate"')


def test_a_configured_name_and_a_token(http: httpx.Client, database_url: str) -> None:
    with api(database_url, TIDEGATE_AUTH="off", TIDEGATE_URL="https://gate.example") as (_, url):
        assert http.get(f"{url}/v1/runs", headers={"host": "gate.example"}).status_code == 200
        for foreign in ({"host": "gate.example", "x-forwarded-for": "203.0.113.7"}, {"host": "rebound.example"}):
            assert http.get(f"{url}/v1/runs", headers=foreign).status_code == 401
        made = run("token", "create", "ann", "--scope", "read", env={"TIDEGATE_DATABASE_URL": database_url})
        token = {"authorization": f"Bearer {made.stdout.strip()}"}
        assert http.get(f"{url}/v1/runs", headers={"host": "rebound.example"} | token).status_code == 200


def test_a_workers_metrics_are_not_for_web_pages(http: httpx.Client, database_url: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with worker(database_url, DEMO, TIDEGATE_METRICS_PORT=str(port)):
        at = f"http://127.0.0.1:{port}"
        assert http.get(f"{at}/metrics").status_code == 200
        assert http.get(f"{at}/metrics", headers={"host": "rebound.example"}).status_code == 401
        assert http.get(f"{at}/metrics", headers={"origin": "http://evil.example"}).status_code == 401
        assert http.get(f"{at}/readyz", headers={"host": "rebound.example"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/events", None), ("GET", "/metrics", None), ("GET", "/livez", None), ("GET", "/nothing", None),
        ("PATCH", "/v1/events", None), ("POST", "/v1/events", EVENT | {"source": "head"}), ("POST", "/v1/events", {}),
        ("POST", "/v1/webhooks/nobody", {}), ("GET", "/approvals/nobody", None), ("POST", "/approvals/nobody", {}),
        ("GET", "/v1/runs?limit=0", None), ("GET", "/openapi.json", None),
        ("GET", "/", None), ("GET", "/docs", None), ("GET", "/static/console.js", None),
    ],
)  # fmt: skip
def test_security_headers_on_every_answer(http: httpx.Client, address: str, method: str, path: str, body: Any) -> None:
    answer = http.request(method, address + path, json=body)
    assert answer.headers["x-content-type-options"] == "nosniff"
    if path in ("/", "/docs") or path.startswith("/static"):
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    else:
        assert answer.headers["cache-control"] == "no-store"
    assert not [name for name in answer.headers if name.startswith("access-control-")]


def exchanged(address: str, *parts: bytes) -> bytes:
    """What the server answers before it ends the connection, however little of the parts it took."""
    target = urlsplit(address)
    with socket.create_connection((target.hostname, target.port), timeout=30) as raw:
        with contextlib.suppress(OSError):
            for part in parts:
                raw.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := raw.recv(65536):
                answer += part
        return answer


BEGIN = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n"
HEADS = {
    "one value": (BEGIN + b"x: ", *[b"y" * 8192] * 20),
    "many headers": (BEGIN, *[b"x: y\r\n" * 1000] * 20),
    "the address": (b"GET /", *[b"a" * 8192] * 20),
    "complete": (BEGIN + b"x: " + b"y" * 40_000 + b"\r\n\r\n",),
    "a second request": (BEGIN + b"\r\n", BEGIN + b"x: ", *[b"y" * 8192] * 20),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_without_end(address: str, http: httpx.Client, name: str) -> None:
    answer = exchanged(address, *HEADS[name])
    assert b"HTTP/1.1 431 " in answer and b"application/problem+json" in answer, answer[:200]
    assert http.get(f"{address}/livez", headers={"x": "y" * 16_000}).status_code == 200


CHUNKED = b"POST /v1/events HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "trailer", [b"authorization: Bearer x\r\n\r\n", b"x: y\r\n" * 20_000, b"x: " + b"y" * 200_000], ids=len
)
def test_trailers_are_not_taken(address: str, trailer: bytes) -> None:
    answer = exchanged(address, CHUNKED, b"2\r\n{}\r\n0\r\n", trailer)
    assert not answer.startswith((b"HTTP/1.1 2", b"HTTP/1.1 5")), answer[:200]


async def test_nobody_waits_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence, half a head, and a body that comes on and on after its answer."""
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)

    async def application(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    listening.setblocking(False)
    server = Server(application, listening)
    await server.start()
    try:
        body = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999\r\n\r\n{"
        for begin in (b"", b"GET / HT", BEGIN + b"\r\n" + BEGIN, body):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(begin)

            async def drip(writer: asyncio.StreamWriter = writer, begin: bytes = begin) -> None:
                while begin.startswith(b"POST"):
                    writer.write(b" ")
                    await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            with contextlib.suppress(ConnectionError):
                await reader.read()  # ends when the server has closed the connection
            assert reader.at_eof() or reader.exception() is not None, begin
            dripping.cancel()
            writer.close()
    finally:
        await server.stop()


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/events?limit=00000000000000000001999999999", "limit"),
        ("/admin/decisions?cursor=00000000000000000001999999999999999", "cursor"),
        ("/v1/events?from=0001-01-01T00:00:00%2B14:00", "from"),
        ("/v1/events?to=9999-12-31T23:59:59-14:00", "to"),
        ("/admin/dead-letters?since=0001-01-01T00:00:00%2B14:00", "since"),
        ("/admin/retries?cursor=WyIwMDAxLTAxLTAxVDAwOjAwOjAwKzE0OjAwIiwiMDAwMDAwMDAtMDAwMC0wMDAwLTAwMDAtMDAwMDAwMDAwMDAwIl0",
         "cursor"),
    ],
)  # fmt: skip
def test_tampered_cursors_and_limits(http: httpx.Client, address: str, path: str, field: str) -> None:
    answer = http.get(address + path)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field), answer.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/admin/dead-letters/replay", {"since": "0001-01-01T00:00:00+14:00", "dry_run": True}, "since"),
        ("/admin/tokens", {"name": "x", "scopes": ["read"], "expires_at": "9999-12-31T23:59:59-14:00"}, "expires_at"),
    ],
)
def test_times_that_utc_does_not_have(http: httpx.Client, address: str, path: str, body: Any, field: str) -> None:
    answer = http.post(address + path, json=body)
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, field), answer.text
