"""A real Redis for what needs one, empty at first, as BullMQ recommends it for production: every write goes to a file,
which is flushed once a second. So a crash of the machine loses up to a second of what was accepted; Postgres loses
nothing."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import time
from collections.abc import Iterator

from chaos import redis_server

from bench.stage import Stage

PATIENCE_SECONDS = 30
SETTINGS = {"appendonly": "yes", "appendfsync": "everysec", "maxmemory-policy": "noeviction", "save": ""}

_numbers = itertools.count(1)


def is_there() -> bool:
    """Whether there is a redis-server on this machine."""
    return redis_server.binary() is not None


def version() -> str:
    """Which Redis it is."""
    text = subprocess.run([_binary(), "--version"], capture_output=True, text=True, check=True).stdout
    return text.partition("v=")[2].partition(" ")[0]


@contextlib.contextmanager
def started(stage: Stage) -> Iterator[str]:
    """Its address."""
    folder, port = stage.folder / f"redis-{next(_numbers)}", redis_server.free_port()
    folder.mkdir()
    settings = SETTINGS | {"bind": "127.0.0.1", "port": str(port), "dir": str(folder)}
    command = [_binary(), *(word for name, value in settings.items() for word in (f"--{name}", value))]
    with stage.program("redis", command, folder, os.environ) as (process, _):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}/0"


def _binary() -> str:
    found = redis_server.binary()
    if found is None:
        raise RuntimeError("there is no redis-server on this machine")
    return found


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False
