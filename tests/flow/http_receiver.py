"""Receivers for the tests of http workflows: HTTP servers in threads, on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tidegate.flow.code.http import Outgoing
from tidegate.model.addresses import parse_allowed

# Where receivers of tests are.
LOOPBACK = Outgoing(parse_allowed("127.0.0.0/8, ::1"))


class Receiver:
    """An HTTP server in a thread. `answer` decides what it says: (status, headers, body)."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.seen: list[tuple[dict[str, str], bytes]] = []
        self.answer: Callable[[], tuple[int, dict[str, str], bytes]] = lambda: (200, {}, b"")
        self.delay = 0.0
        self.held: threading.Event | None = None
        self.paths: list[str] = []
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                held = receiver.held
                with receiver._changed:
                    receiver.seen.append(({k.lower(): v for k, v in self.headers.items()}, body))
                    receiver.paths.append(self.path)
                    receiver._changed.notify_all()
                time.sleep(receiver.delay)
                if held is not None:
                    held.wait(60)
                status, headers, content = receiver.answer()
                try:
                    self.send_response(status)
                    for name, value in ({"content-length": str(len(content))} | headers).items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(content)
                except OSError:
                    pass  # the client has gone

            def log_message(self, *_: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None: ...

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook?x=1"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def says(self, status: int, body: Any = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.answer = lambda: (status, {k.replace("_", "-"): v for k, v in headers.items()}, content)

    async def arrived(self, count: int) -> None:
        """Wait until so many requests have come."""

        def wait() -> bool:
            with self._changed:
                return self._changed.wait_for(lambda: len(self.seen) >= count, 60)

        assert await asyncio.to_thread(wait), f"{len(self.seen)} of {count} requests came"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@contextlib.contextmanager
def dripping(start: bytes, drop: bytes, seconds: float) -> Iterator[tuple[str, Callable[[], int]]]:
    """A server that sends `start` and then `drop` for ever, every so often; its URL, and how many bytes were taken."""
    taken = 0
    done = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        nonlocal taken
        with contextlib.suppress(OSError):
            client, _ = listener.accept()
            with client:
                client.recv(65536)
                client.sendall(start)
                while not done.wait(seconds):
                    client.sendall(drop)
                    taken += len(drop)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/", lambda: taken
    finally:
        done.set()
        listener.close()
        thread.join(5)
