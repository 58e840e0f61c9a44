"""A pooler in front of a Postgres that does not wait for the disk by itself: what is answered 202 survives a crash.

`python -m chaos.pooler` shows it with a proxy that drops startup parameters, and with pgbouncer where it is installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import httpx

from chaos.members import served
from chaos.proxy import Proxy
from chaos.redis_server import free_port
from tidegate.embedded import EmbeddedPostgres

# Unasked, nothing is flushed for ten seconds.
LAZY = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
START_SECONDS = 30
KINDS = ("proxy", "pgbouncer")


@contextlib.contextmanager
def pooled(kind: str, url: str, folder: Path) -> Iterator[str]:
    """The address of the database by way of a pooler."""
    if kind == "proxy":
        with Proxy(url, strips=True) as proxy:
            yield proxy.url
    else:
        with _pgbouncer(url, folder) as address:
            yield address


def is_installed(kind: str) -> bool:
    return kind == "proxy" or shutil.which("pgbouncer") is not None


@contextlib.contextmanager
def _pgbouncer(url: str, folder: Path) -> Iterator[str]:
    parts, port = urlsplit(url), free_port()
    database = parts.path[1:]
    sockets = Path(parse_qs(parts.query)["host"][0]).resolve()  # where `nobody` can go, too
    lines = [
        "[databases]",
        f"{database} = host={sockets} dbname={database} user={parts.username}",
        "[pgbouncer]",
        "listen_addr = 127.0.0.1",
        f"listen_port = {port}",
        "unix_socket_dir =",
        "auth_type = any",
        "pool_mode = session",
        "default_pool_size = 50",
        "ignore_startup_parameters = extra_float_digits",
    ]
    settings = folder / "pgbouncer.ini"
    settings.write_text("\n".join(lines) + "\n")
    settings.chmod(0o644)
    owner = {}
    if os.geteuid() == 0:  # as whom it refuses to run
        nobody = pwd.getpwnam("nobody")
        owner = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
    with (folder / "pgbouncer.log").open("wb") as log, settings.open("rb") as given:
        process = subprocess.Popen(
            ["pgbouncer", "/dev/stdin"],
            stdin=given,
            stdout=log,
            stderr=log,
            cwd="/",
            **owner,  # type: ignore[call-overload]
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while b"listening on" not in (folder / "pgbouncer.log").read_bytes():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"pgbouncer does not start: {(folder / 'pgbouncer.log').read_text()[-500:]}")
            time.sleep(0.02)
        yield f"postgresql://{parts.username}@127.0.0.1:{port}/{database}"
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def lost(kind: str, folder: Path, count: int = 50) -> tuple[int, list[str]]:
    """Publish through the pooler, crash the server, start it again; how many were accepted, and which are gone."""
    server = EmbeddedPostgres(folder / "postgres", LAZY)
    url = server.start()
    try:
        with pooled(kind, url, folder) as through, served(through, folder) as address:
            accepted = []
            for n in range(count):
                event = {"type": "work.done", "source": "chaos", "id": f"e-{n}", "payload": {"n": n}}
                if httpx.post(f"{address}/v1/events", json=event, timeout=30).status_code == 202:
                    accepted.append(f"e-{n}")
            server.stop(immediate=True)
        server.start()
        stored = asyncio.run(_stored(url))
        return len(accepted), [key for key in accepted if key not in stored]
    finally:
        server.stop()


async def _stored(url: str) -> set[str]:
    connection = await asyncpg.connect(url)
    try:
        return {row[0] for row in await connection.fetch("select external_id from tidegate.workflow_events")}
    finally:
        await connection.close()


def main() -> None:
    status = 0
    for kind in KINDS:
        if not is_installed(kind):
            print(f"pooler: {kind} is not installed, left out")
            continue
        with tempfile.TemporaryDirectory(prefix="tidegate-pooler-", ignore_cleanup_errors=True) as name:
            accepted, gone = lost(kind, Path(name), 500)
        print(f"pooler: {kind}: {accepted} accepted, {len(gone)} of them lost in a crash{': BROKEN' if gone else ''}")
        status |= bool(gone) or accepted == 0
    sys.exit(status)


if __name__ == "__main__":
    main()
