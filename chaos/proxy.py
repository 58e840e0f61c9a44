"""A TCP proxy in front of a Postgres, with the faults of a network and of a pooler.

`freeze` leaves the connections that are there open on both sides and passes nothing on any more, as after a failover
where nobody closes the old ones; new connections work. `block` does the same to every new one until `unblock`. With
`strips`, what a connection asks for when it begins is dropped, as by pgbouncer with `ignore_startup_parameters`.

It runs in a thread of its own, so that whoever uses it may block.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

_SSL_REQUEST = 80877103
_GSS_REQUEST = 80877104
_STARTUP = 3 << 16
_KEPT = ("user", "database", "client_encoding", "application_name")


class _Passes:
    """Whether a connection passes on what is asked, and what is answered."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.answered = asyncio.Event()
        self.set()

    def set(self) -> None:
        self.asked.set()
        self.answered.set()

    def clear(self, *, is_asked: bool) -> None:
        self.answered.clear()
        if is_asked:
            self.asked.clear()


class Proxy:
    """Passes TCP connections on to the Unix socket of the Postgres at `url`."""

    def __init__(self, url: str, *, strips: bool = False) -> None:
        self._target = f"{parse_qs(urlsplit(url).query)['host'][0]}/.s.PGSQL.5432"
        self._strips = strips
        self._url = urlsplit(url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._open: set[_Passes] = set()
        self._links: set[asyncio.Task[None]] = set()
        self._is_blocked = False
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def url(self) -> str:
        """The address of the same database by way of the proxy."""
        return f"postgresql://{self._url.username}@127.0.0.1:{self.port}{self._url.path}"

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.port = asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    def freeze(self, *, answers_only: bool = False) -> int:
        """Let every connection that is there fall silent, for good; how many. `answers_only`: what is asked is done."""
        return asyncio.run_coroutine_threadsafe(self._freeze(not answers_only), self._loop).result(30)

    def block(self) -> None:
        """Let new connections be silent from the beginning, too."""
        self._is_blocked = True

    def unblock(self) -> None:
        """New connections work again; those that were made meanwhile stay silent."""
        self._is_blocked = False

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._links:
            task.cancel()
        await asyncio.gather(*self._links, return_exceptions=True)

    async def _freeze(self, is_asked: bool) -> int:
        for passes in self._open:
            passes.clear(is_asked=is_asked)
        return len(self._open)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._links.add(task)
        passes = _Passes()
        if self._is_blocked:
            passes.clear(is_asked=True)
        self._open.add(passes)
        behind: asyncio.StreamWriter | None = None
        try:
            await passes.asked.wait()
            server, behind = await asyncio.open_unix_connection(self._target)
            if self._strips:
                await _begin_without_parameters(reader, writer, server, behind)
            ways = ((reader, behind, passes.asked), (server, writer, passes.answered))
            pumps = [asyncio.create_task(_pump(*way)) for way in ways]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                await passes.answered.wait()  # a silent one does not say that it was closed
            finally:
                for pump in pumps:
                    pump.cancel()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(passes)
            self._links.discard(task)
            for end in (writer, behind):
                if end is not None:
                    end.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            await passes.wait()
            writer.write(data)
            await writer.drain()


async def _begin_without_parameters(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    server: asyncio.StreamReader,
    behind: asyncio.StreamWriter,
) -> None:
    """Pass on the first messages, of the one that begins a session only what a pooler cannot do without."""
    while True:
        length, code = struct.unpack("!ii", await reader.readexactly(8))
        rest = await reader.readexactly(length - 8)
        if code == _STARTUP:
            fields = rest.rstrip(b"\0").split(b"\0")
            kept = [(k, v) for k, v in zip(fields[::2], fields[1::2], strict=True) if k.decode() in _KEPT]
            rest = b"".join(k + b"\0" + v + b"\0" for k, v in kept) + b"\0"
        behind.write(struct.pack("!ii", len(rest) + 8, code) + rest)
        await behind.drain()
        if code not in (_SSL_REQUEST, _GSS_REQUEST):
            return
        writer.write(await server.readexactly(1))
        await writer.drain()
