"""What a client must not be able to do: make a 500, store something half, or stop the others."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.model.event import FIELDS

JSON = {"content-type": "application/json"}
GOOD = {"type": "a.b", "source": "s"}
_http = httpx.Client(timeout=30, trust_env=False)


def post(address: str, body: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return _http.post(f"{address}/v1/events", content=content, headers=JSON if headers is None else headers)


async def stored(url: str) -> int:
    connection = await asyncpg.connect(url)
    try:
        count: int = await connection.fetchval("select count(*) from tidegate.workflow_events")
        return count
    finally:
        await connection.close()


def nested(depth: int) -> bytes:
    return b'{"type":"a","source":"s","payload":{"x":' + b"[" * depth + b"]" * depth + b"}}"


MALFORMED = {
    "empty": b"",
    "cut off": b'{"type": "a"',
    "NaN": b'{"type":"a","source":"s","payload":{"x":NaN}}',
    "Infinity": b'{"type":"a","source":"s","payload":{"x":-Infinity}}',
    "1e400": b'{"type":"a","source":"s","payload":{"x":1e400}}',
    "lone surrogate": b'{"type":"a","source":"s","payload":{"x":"\\ud800"}}',
    "not UTF-8": b'{"type":"a","source":"s","payload":{"x":"\xff"}}',
    "BOM": b'\xef\xbb\xbf{"type":"a","source":"s"}',
    "nested 100,000": nested(100_000),
    "two documents": b"{}{}",
}

# Values that encoders write although JSON does not have them.
NAMED = dict.fromkeys(("NaN", "Infinity", "1e400", "lone surrogate"), "payload.x")

INVALID: dict[str, tuple[Any, str]] = {
    "not an object": (7, "event"),
    "no type": ({"source": "s"}, "type"),
    "no source": ({"type": "a"}, "source"),
    "type a number": ({"type": 1, "source": "s"}, "type"),
    "type with a space": ({"type": "a b", "source": "s"}, "type"),
    "type of 201": ({"type": "a" * 201, "source": "s"}, "type"),
    "type with a star": ({"type": "a.*", "source": "s"}, "type"),
    "source empty": ({"type": "a", "source": ""}, "source"),
    "unknown field": (GOOD | {"paylod": {}}, "paylod"),
    "payload an array": (GOOD | {"payload": []}, "payload"),
    "payload text": (GOOD | {"payload": "x"}, "payload"),
    "NUL in a value": (GOOD | {"payload": {"a": ["x", "\x00"]}}, "payload.a[1]"),
    "NUL in a key": (GOOD | {"payload": {"\x00": 1}}, "payload"),
    "NUL in metadata": (GOOD | {"metadata": {"a": "\x00"}}, "metadata.a"),
    "NUL in the id": (GOOD | {"id": "a\x00"}, "id"),
    "id empty": (GOOD | {"id": ""}, "id"),
    "id a number": (GOOD | {"id": 7}, "id"),
    "id of 201": (GOOD | {"id": "x" * 201}, "id"),
    "beyond 64 bits": (GOOD | {"payload": {"n": 2**63}}, "payload.n"),
    "time without zone": (GOOD | {"occurred_at": "2026-01-01T00:00:00"}, "occurred_at"),
    "time a date": (GOOD | {"occurred_at": "2026-01-01"}, "occurred_at"),
    "time in 1970": (GOOD | {"occurred_at": "1970-01-01T00:00:00Z"}, "occurred_at"),
    "time in 9999": (GOOD | {"occurred_at": "9999-12-31T23:59:59Z"}, "occurred_at"),
    "time a number": (GOOD | {"occurred_at": 1}, "occurred_at"),
    "leap second": (GOOD | {"occurred_at": "2016-12-31T23:59:60Z"}, "occurred_at"),
    "ttl 0": (GOOD | {"ttl_ms": 0}, "ttl_ms"),
    "ttl true": (GOOD | {"ttl_ms": True}, "ttl_ms"),
    "ttl 1.5": (GOOD | {"ttl_ms": 1.5}, "ttl_ms"),
    "correlation id a list": (GOOD | {"correlation_id": []}, "correlation_id"),
    "nested 100": (json.loads(nested(100)), "payload"),
    "10,001 keys": (GOOD | {"payload": {str(n): n for n in range(10_001)}}, "payload"),
    "batch empty": ([], "events"),
    "batch with one bad": ([GOOD, GOOD | {"type": ""}, GOOD], "[1].type"),
    "batch of numbers": ([1, 2], "[0]"),
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_bodies_are_400(address: str, shared_url: str, name: str) -> None:
    before = await stored(shared_url)
    response = post(address, MALFORMED[name])
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["errors"][0]["field"] == NAMED.get(name, "body")
    assert await stored(shared_url) == before


@pytest.mark.parametrize("name", INVALID)
async def test_invalid_events_are_422_naming_the_field(address: str, shared_url: str, name: str) -> None:
    body, field = INVALID[name]
    before = await stored(shared_url)
    response = post(address, body)
    assert response.status_code == 422, response.text
    assert field in [error["field"] for error in response.json()["errors"]]
    assert await stored(shared_url) == before


async def test_every_broken_field_is_named_at_once(address: str) -> None:
    response = post(address, {"type": "", "source": 1, "ttl_ms": -1, "nonsense": 1})
    assert {e["field"] for e in response.json()["errors"]} == {"type", "source", "ttl_ms", "nonsense"}


async def test_sizes(address: str, shared_url: str) -> None:
    before = await stored(shared_url)
    payload_too_large = post(address, GOOD | {"payload": {"x": "y" * 262_144}})
    assert (payload_too_large.status_code, payload_too_large.json()["errors"][0]["field"]) == (413, "payload")
    body_too_large = post(address, b" " * (1024 * 1024 + 1))
    assert (body_too_large.status_code, body_too_large.json()["errors"][0]["field"]) == (413, "body")
    batch_too_large = post(address, [GOOD] * 1001)
    assert (batch_too_large.status_code, batch_too_large.json()["errors"][0]["field"]) == (413, "events")
    chunked = _http.post(f"{address}/v1/events", content=(b" " * 65536 for _ in range(100)), headers=JSON)
    assert chunked.status_code == 413
    assert await stored(shared_url) == before
    fits = post(address, GOOD | {"payload": {"x": "y" * 262_000}})
    assert fits.status_code == 202


@pytest.mark.parametrize("path", ["/v1/events", "/admin/sources/s/pause", "/v1/workflows"])
@pytest.mark.parametrize("size", [1024 * 1024 + 1, 6_000_000], ids=str)
def test_whoever_sends_too_much_and_only_then_listens_is_told(address: str, path: str, size: int) -> None:
    """Nothing is to come after it, so the server closes: the answer must not go with the connection."""
    target = urlsplit(address)
    for _ in range(10):
        with socket.create_connection((target.hostname, target.port), timeout=30) as raw:
            head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {size}\r\n\r\n"
            raw.sendall(head.encode() + b" " * size)
            answer = b""
            while part := raw.recv(65536):
                answer += part
        assert answer.startswith(b"HTTP/1.1 413 ") and b"application/problem+json" in answer


async def test_compressed_bodies_and_other_media_are_415(address: str) -> None:
    bomb = gzip.compress(b" " * 10_000_000)
    assert post(address, bomb, JSON | {"content-encoding": "gzip"}).status_code == 415
    form = post(address, b"a=1", {"content-type": "application/x-www-form-urlencoded"})
    assert form.status_code == 415
    assert "application/json" in form.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/v1/events", 405),
        ("TRACE", "/v1/events", 405),
        ("GET", "/v1/events/no-such", 404),
        ("GET", "/v1/events/%00", 404),
        ("GET", "/v1/runs/not-a-uuid", 404),
        ("GET", "/v1/runs/00000000-0000-0000-0000-000000000000", 404),
        ("GET", "/v1/workflows/none/triggers", 404),
        ("GET", "/v1/runs?status=odd", 422),
        ("GET", "/v1/runs?limit=0", 422),
        ("GET", "/v1/runs?limit=501", 422),
        ("GET", "/v1/runs?cursor=x", 422),
        ("GET", "/v1/events?cursor=%C3%A9", 422),
        ("GET", "/v1/events?cursor=MTIz%20", 422),
        ("GET", "/v1/events?from=yesterday", 422),
        ("GET", "/v1/events?type=a%00b", 422),
        ("GET", "/v1/events?nonsense=1", 422),
        ("GET", "/v1/workflows/%00", 404),
        ("GET", "/v1/workflows/%FF", 404),
        ("GET", "/v1/events/%FF%FE/explain", 404),
        ("GET", "/v1/events?source=%FF", 200),
    ],
)
async def test_wrong_requests_get_a_problem(address: str, method: str, path: str, status: int) -> None:
    response = _http.request(method, f"{address}{path}")
    assert response.status_code == status, response.text
    if status != 200:
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["detail"]


async def test_a_slow_sender_does_not_block_the_others(address: str) -> None:
    target = urlsplit(address)
    with contextlib.ExitStack() as stack:
        for _ in range(50):
            slow = stack.enter_context(socket.create_connection((target.hostname, target.port)))
            slow.sendall(b"POST /v1/events HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n{")
        assert post(address, GOOD).status_code == 202


async def test_bytes_that_are_not_http(address: str) -> None:
    target = urlsplit(address)
    assert target.hostname is not None
    with socket.create_connection((target.hostname, target.port or 0)) as raw:
        raw.sendall(b"\x00\xff garbage\r\n\r\n")
        assert not raw.recv(1000).startswith(b"HTTP/1.1 5")
    both = http.client.HTTPConnection(target.hostname, target.port, timeout=10)
    both.putrequest("POST", "/v1/events")
    for name, value in (
        ("content-length", "4"),
        ("transfer-encoding", "chunked"),
        ("content-type", JSON["content-type"]),
    ):
        both.putheader(name, value)
    both.endheaders(b"{}{}")
    with contextlib.closing(both):
        assert both.getresponse().status == 400


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fields=st.dictionaries(st.sampled_from([*sorted(FIELDS), "x"]), json_values), good=st.booleans())
def test_no_json_makes_a_500(address: str, fields: dict[str, Any], good: bool) -> None:
    response = post(address, fields | (GOOD if good else {}))
    assert response.status_code in (202, 400, 409, 422)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.dictionaries(st.text(st.characters(codec="utf-8")), json_values, max_size=5))
def test_what_is_accepted_comes_back_as_sent(address: str, payload: dict[str, Any]) -> None:
    response = post(address, GOOD | {"payload": payload})
    if response.status_code == 202:
        shown = _http.get(f"{address}/v1/events/{response.json()['id']}").text
        # Postgres writes 1e16 as 10000000000000000: the same number, whichever way it is read.
        assert json.loads(shown, parse_int=float)["payload"] == json.loads(json.dumps(payload), parse_int=float)
    else:
        assert response.status_code in (400, 422)


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63), 2**53 + 1, 0.1, -0.5, 1e-300, 123456789.123456789])
async def test_numbers_are_kept_exactly(address: str, number: float) -> None:
    answer = post(address, GOOD | {"payload": {"n": number}}).json()
    assert _http.get(f"{address}/v1/events/{answer['id']}").json()["payload"] == {"n": number}


@pytest.mark.parametrize("path", ["/v1/events", "/admin/sources/s/pause", "/admin/sources/s/resume"])
async def test_a_page_of_another_site_cannot_change_anything(address: str, shared_url: str, path: str) -> None:
    before = await stored(shared_url)
    response = _http.post(f"{address}{path}", json=GOOD, headers={"sec-fetch-site": "cross-site"})
    assert response.status_code == 403
    assert await stored(shared_url) == before
    assert _http.get(f"{address}/livez", headers={"sec-fetch-site": "cross-site"}).status_code == 200
