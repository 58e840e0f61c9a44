"""A lean HTTP/1.1 client: a connection for each request, so that a dead server leaves nothing behind in a pool."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec


class Response(NamedTuple):
    """An answer; `status` 0: none came in time."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The decoded body; None when it is not JSON."""
        try:
            return msgspec.json.decode(self.body)
        except msgspec.DecodeError:
            return None


NOTHING = Response(0, {}, b"")


async def request(
    url: str,
    method: str,
    path: str,
    body: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    seconds: float = 5.0,
) -> Response:
    """The answer, or NOTHING when the server is away, dies, or says nothing within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            return await _request(url, method, path, body, headers or {})
    except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        return NOTHING


async def _request(url: str, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> Response:
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        given = {"host": f"{host}:{port}", "connection": "close", "content-length": str(len(body or b""))}
        if body is not None:
            given["content-type"] = "application/json"
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (given | dict(headers)).items())]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b""))
        with contextlib.suppress(ConnectionError):  # a server may answer and close before it has read everything
            await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
        length = fields.get("content-length")
        content = await reader.readexactly(int(length)) if length is not None else await reader.read()
        return Response(int(head[0].split(" ")[1]), fields, content)
    finally:
        writer.close()
