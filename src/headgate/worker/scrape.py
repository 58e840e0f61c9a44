"""A worker's own `/metrics`: the smallest HTTP server that a scraper can talk to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headgate.errors import Forbidden, HeadgateError, SettingsError, Unauthorized
from headgate.flow.access import Access
from headgate.flow.health import Exposition
from headgate.settings import Settings
from headgate.store.db import Database
from headgate.telemetry import metrics
from headgate.telemetry.logs import logger

HEAD_BYTES = 16 * 1024
HEAD_SECONDS = 5

_log = logger("worker")


@asynccontextmanager
async def scrapable(settings: Settings) -> AsyncIterator[None]:
    """`/metrics` on `metrics_port` while this is entered; nothing when no port is set."""
    if not settings.metrics_port:
        yield
        return
    database = Database(settings.require_database_url(), "metrics", size=1)
    server = _Server(Exposition(database, settings.health), Access(settings, database))
    try:
        listening = await asyncio.start_server(server.answer, settings.host, settings.metrics_port, limit=HEAD_BYTES)
    except OSError as exc:
        raise SettingsError(
            f"HEADGATE_METRICS_PORT {settings.metrics_port} on {settings.host} cannot be used: {exc.strerror or exc}; "
            "stop what uses it, or choose another"
        ) from exc
    _log.info("worker.metrics_served", host=settings.host, port=settings.metrics_port)
    try:
        yield
    finally:
        listening.close()
        await database.close()


class _Server:
    def __init__(self, exposition: Exposition, access: Access) -> None:
        self._exposition = exposition
        self._access = access

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            method, _, rest = head.partition(b" ")
            path = rest.partition(b" ")[0].partition(b"?")[0]
            if path != b"/metrics":
                status, body = "404 Not Found", b"only /metrics is here\n"
            elif method != b"GET":
                status, body = "405 Method Not Allowed", b"only GET is possible here\n"
            else:
                status, body = await self._metrics(head)
            media = metrics.CONTENT_TYPE if status == "200 OK" else "text/plain"
            challenge = 'www-authenticate: Bearer realm="headgate"\r\n' if status.startswith("401") else ""
            writer.write(
                f"HTTP/1.1 {status}\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n"
                f"{challenge}connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a scraper that says nothing, too much, or went away gets no answer
        finally:
            writer.close()

    async def _metrics(self, head: bytes) -> tuple[str, bytes]:
        """The metrics, for whoever may read them: the same tokens as at the API."""
        lines = (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
        headers = {name.strip().lower(): value.strip() for name, _, value in lines}
        try:
            await self._access.check(headers.get("authorization"), "read")
        except Unauthorized as exc:
            return "401 Unauthorized", f"{exc}\n".encode()
        except Forbidden as exc:
            return "403 Forbidden", f"{exc}\n".encode()
        except HeadgateError:
            return "503 Service Unavailable", b"the database cannot be asked\n"
        return "200 OK", await self._exposition.text()
