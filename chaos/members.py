"""Single processes of Tidegate, for scenarios that need no whole cluster."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from chaos.redis_server import free_port

TIDEGATE = str(Path(sys.executable).parent / "tidegate")
START_SECONDS = 60


def run(database_url: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A `tidegate` command, to its end."""
    return subprocess.run(
        [TIDEGATE, *arguments],
        env=_environment(database_url, more),
        capture_output=True,
        text=True,
        check=False,
        timeout=START_SECONDS,
    )


@contextlib.contextmanager
def started(
    name: str, database_url: str, folder: Path, *arguments: str, **more: str
) -> Iterator[subprocess.Popen[bytes]]:
    """A `tidegate` process that runs meanwhile, its log in the folder."""
    with (folder / f"{name}.log").open("ab") as log:
        process = subprocess.Popen(
            [TIDEGATE, *arguments],
            env=_environment(database_url, more),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(START_SECONDS)


@contextlib.contextmanager
def served(database_url: str, folder: Path, *, migrates: bool = True, **more: str) -> Iterator[str]:
    """An API that is ready, on a database that is migrated if need be; its address."""
    done = run(database_url, "migrate", **more) if migrates else None
    if done is not None and done.returncode != 0:
        raise RuntimeError(f"migrate failed: {done.stderr}")
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with started("api", database_url, folder, "serve", "--port", str(port), TIDEGATE_AUTH="off", **more) as process:
        deadline = time.monotonic() + START_SECONDS
        while not is_ready(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the API does not start; see {folder / 'api.log'}")
            time.sleep(0.1)
        yield address


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/readyz", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def _environment(database_url: str, more: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
    return inherited | {"TIDEGATE_DATABASE_URL": database_url} | dict(more)
