"""A worker's own `/metrics`, `/livez` and `/readyz`: a minimal HTTP server for scrapers and probes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tidegate.errors import Forbidden, SettingsError, TidegateError, TooManyRequests, Unauthorized
from tidegate.flow.accept.access import Access
from tidegate.flow.look import notices
from tidegate.flow.look.health import Exposition
from tidegate.flow.look.ready import Readiness
from tidegate.queue.choose import open_queue
from tidegate.settings import Settings
from tidegate.store.db import Database
from tidegate.telemetry import metrics
from tidegate.telemetry.logs import logger

HEAD_BYTES = 16 * 1024
HEAD_SECONDS = 5

_log = logger("worker")


@asynccontextmanager
async def scrapable(settings: Settings) -> AsyncIterator[None]:
    """Serve `/metrics` and the probes on `metrics_port` inside this context; nothing if no port is set."""
    if not settings.metrics_port:
        yield
        return
    url, direct_url = settings.require_database_url(), settings.database_direct_url
    database = Database(url, "metrics", size=1, direct_url=direct_url)
    queue = open_queue(settings, database)  # used for readiness only
    readiness = Readiness(settings, database, queue, database)
    server = _Server(Exposition(database, settings.health), Access(settings, database), readiness)
    try:
        listening = await asyncio.start_server(server.answer, settings.host, settings.metrics_port, limit=HEAD_BYTES)
    except OSError as exc:
        raise SettingsError(
            f"TIDEGATE_METRICS_PORT {settings.metrics_port} on {settings.host} cannot be used: {exc.strerror or exc}; "
            "stop what uses it, or choose another"
        ) from exc
    _log.info("worker.metrics_served", host=settings.host, port=settings.metrics_port)
    notices.log_notices(settings)
    try:
        yield
    finally:
        listening.close()
        await queue.close()
        await database.close()


class _Server:
    def __init__(self, exposition: Exposition, access: Access, readiness: Readiness) -> None:
        self._exposition = exposition
        self._access = access
        self._readiness = readiness

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        try:
            async with asyncio.timeout(HEAD_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
            method, _, rest = head.partition(b" ")
            path = rest.partition(b" ")[0].partition(b"?")[0]
            if path not in (b"/metrics", b"/livez", b"/readyz"):
                status, media, body = "404 Not Found", "text/plain", b"only /metrics, /livez and /readyz are here\n"
            elif method != b"GET":
                status, media, body = "405 Method Not Allowed", "text/plain", b"only GET is possible here\n"
            elif path == b"/livez":
                status, media, body = "200 OK", "application/json", b'{"status":"ok"}'
            elif path == b"/readyz":
                status, media, body = await self._ready()
            else:
                peer = writer.get_extra_info("peername")
                status, body = await self._metrics(head, peer[0] if isinstance(peer, tuple) else None)
                media = metrics.CONTENT_TYPE if status == "200 OK" else "text/plain"
            challenge = 'www-authenticate: Bearer realm="tidegate"\r\n' if status.startswith("401") else ""
            writer.write(
                f"HTTP/1.1 {status}\r\ncontent-type: {media}\r\ncontent-length: {len(body)}\r\n"
                f"{challenge}x-content-type-options: nosniff\r\nconnection: close\r\n\r\n".encode()
                + body
            )
            async with asyncio.timeout(HEAD_SECONDS):
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # no response to a client that sends nothing or too much, or has disconnected
        finally:
            writer.close()

    async def _ready(self) -> tuple[str, str, bytes]:
        """Whether this worker is ready; needs no token."""
        found = await self._readiness.check()
        status = "503 Service Unavailable" if found.status == "unavailable" else "200 OK"
        return status, "application/json", msgspec.json.encode(found)

    async def _metrics(self, head: bytes, peer: str | None) -> tuple[str, bytes]:
        """The metrics, for clients with a token as for the API."""
        lines = (line.partition(b":") for line in head.split(b"\r\n")[1:])
        headers = [(name.strip().lower(), value.strip()) for name, _, value in lines]
        authorization = dict(headers).get(b"authorization", b"").decode("latin-1")
        try:
            principal = await self._access.check(authorization, "read", headers, peer)
            if principal is not None and principal.sources is not None:
                raise Forbidden("the metrics cover all sources, and the token is restricted to some", "read")
        except Unauthorized as exc:
            return "401 Unauthorized", f"{exc}\n".encode()
        except Forbidden as exc:
            return "403 Forbidden", f"{exc}\n".encode()
        except TooManyRequests as exc:
            return "429 Too Many Requests", f"{exc}\n".encode()
        except TidegateError:
            return "503 Service Unavailable", b"the database cannot be asked\n"
        return "200 OK", await self._exposition.text()
