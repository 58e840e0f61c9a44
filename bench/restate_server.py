"""A real Restate, as it is from its package (its log is flushed to disk), with the service of `bench.restate_side`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from chaos.redis_server import free_port

from bench import marks, yardstick
from bench.stage import ROOT, Stage

PATIENCE_SECONDS = 60
BINARY = yardstick.OTHERS.parents[1] / "node_modules" / ".bin" / "restate-server"
# Where an event is handed over without waiting for its handler; answered with 202.
SEND = "/bench/start/send"


def is_there() -> bool:
    """Whether `make bench` could install it: it needs npm."""
    return BINARY.exists()


def version() -> str:
    """Which Restate it is."""
    text = subprocess.run([BINARY, "--version"], capture_output=True, text=True, check=True).stdout
    return text.split()[1]


@contextlib.contextmanager
def started(stage: Stage, path: Path) -> Iterator[int]:
    """The port to publish to."""
    folder = stage.folder / "restate"
    ingress, admin, node, service = (free_port() for _ in range(4))
    environment = os.environ | {
        "RESTATE_BASE_DIR": str(folder),
        "RESTATE_BIND_IP": "127.0.0.1",
        "RESTATE_BIND_PORT": str(node),
        "RESTATE_INGRESS__BIND_PORT": str(ingress),
        "RESTATE_ADMIN__BIND_PORT": str(admin),
        "RESTATE_LISTEN_MODE": "tcp",
        "RESTATE_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "1",
    }
    side = [str(yardstick.OTHERS), "-m", "bench.restate_side", str(service)]
    with (
        stage.program("restate side", side, ROOT, os.environ | {marks.MARKS: str(path)}),
        stage.program("restate", [str(BINARY), "--no-logo"], stage.folder, environment),
    ):
        _until_it_listens(service)
        _register(admin, service)
        yield ingress


def _until_it_listens(port: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _register(admin: int, service: int) -> None:
    """Tell the server where the service is; it answers only when it is ready."""
    body = json.dumps({"uri": f"http://127.0.0.1:{service}"}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{admin}/deployments", body, {"content-type": "application/json"}
    )
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            urllib.request.urlopen(request, timeout=PATIENCE_SECONDS).close()
            return
        except (urllib.error.URLError, ConnectionError) as exc:
            if time.monotonic() > deadline:
                raise RuntimeError(f"Restate did not take its service: {exc}") from exc
            time.sleep(0.1)
