"""A pooler in front of a Postgres that does not wait for the disk by itself: what is answered 202 survives a crash.

`python -m chaos.pooler` shows it with a proxy that drops startup parameters, and with pgbouncer where it is installed,
which gives each connection a session of its own, or each transaction; then it also counts the effects of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import asyncpg
import httpx

from chaos.members import run, served, started
from chaos.proxy import Proxy
from chaos.redis_server import free_port
from tidegate.embedded import EmbeddedPostgres

# Unasked, nothing is flushed for ten seconds.
LAZY = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
START_SECONDS = 30
TRANSACTIONS = "pgbouncer, a session for each transaction"
KINDS = ("proxy", "pgbouncer", TRANSACTIONS)
# Of the sessions that all connections share.
SHARED = 4
PATIENCE_SECONDS = 120
APP = Path(__file__).parent / "effects_app.py"


@contextlib.contextmanager
def pooled(kind: str, url: str, folder: Path) -> Iterator[str]:
    """The address of the database by way of a pooler."""
    if kind == "proxy":
        with Proxy(url, strips=True) as proxy:
            yield proxy.url
    else:
        with _pgbouncer(url, folder, "transaction" if kind == TRANSACTIONS else "session") as address:
            yield address


def is_installed(kind: str) -> bool:
    return kind == "proxy" or _program() is not None


def _program() -> str | None:
    return shutil.which("pgbouncer", path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin")


@contextlib.contextmanager
def _pgbouncer(url: str, folder: Path, mode: str) -> Iterator[str]:
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
        f"pool_mode = {mode}",
        f"default_pool_size = {SHARED if mode == 'transaction' else 50}",
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
            [_program() or "pgbouncer", "/dev/stdin"],
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
    direct = {"TIDEGATE_DATABASE_DIRECT_URL": url} if kind == TRANSACTIONS else {}
    try:
        with pooled(kind, url, folder) as through, served(through, folder, migrates=True, **direct) as address:
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


class Worked(NamedTuple):
    """What happened behind a pooler: events accepted, those without effect, with several, and what was explained."""

    accepted: int
    missing: list[str]
    repeated: list[str]
    explained: str
    readiness: dict[str, str]
    doctor: dict[str, str]


def worked(folder: Path, count: int = 300, *, is_direct: bool = True) -> Worked:
    """Publish, run and explain behind a pooler that keeps no sessions; without a direct address, without LISTEN."""
    server, effects = EmbeddedPostgres(folder / "postgres", LAZY), folder / "effects"
    url = server.start()
    more = {"TIDEGATE_DATABASE_DIRECT_URL": url} if is_direct else {}
    try:
        run(url, "migrate")
        with contextlib.ExitStack() as running:
            through = running.enter_context(pooled(TRANSACTIONS, url, folder))
            address = running.enter_context(served(through, folder, migrates=is_direct, **more))
            for n in range(2):
                sink = {"CHAOS_EFFECTS": str(effects)}
                running.enter_context(started(f"worker-{n}", through, folder, "worker", str(APP), **sink, **more))
            keys = [f"e-{n}" for n in range(count)]
            with ThreadPoolExecutor(8) as pool:
                answers = zip(keys, pool.map(partial(_publish, address), keys), strict=True)
                accepted = [key for key, is_accepted in answers if is_accepted]
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not set(accepted) <= set(_lines(effects)) and time.monotonic() < deadline:
                time.sleep(0.05)
            while (explained := httpx.get(f"{address}/v1/events/e-0/explain", timeout=30).text).count("succeeded") == 0:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            ready = httpx.get(f"{address}/readyz", timeout=30).json()["checks"]
            checks = json.loads(run(through, "doctor", "--json", **more).stdout)["checks"]
        seen = Counter(_lines(effects))
        missing = [key for key in accepted if key not in seen]
        bad = {check["name"]: check["detail"] for check in checks if not check["is_ok"]}
        return Worked(len(accepted), missing, [key for key, n in seen.items() if n > 1], explained, ready, bad)
    finally:
        server.stop()


def _publish(address: str, key: str) -> bool:
    event = {"type": "chaos.effect", "source": "chaos", "id": key, "payload": {"key": key}}
    return httpx.post(f"{address}/v1/events", json=event, timeout=30).status_code == 202


def _lines(effects: Path) -> list[str]:
    return effects.read_text().split() if effects.exists() else []


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
    for is_direct in (True, False) if is_installed(TRANSACTIONS) else ():
        with tempfile.TemporaryDirectory(prefix="tidegate-pooler-", ignore_cleanup_errors=True) as name:
            found = worked(Path(name), 1000, is_direct=is_direct)
        is_broken = bool(found.missing or found.repeated) or found.accepted < 1000
        print(
            f"pooler: {TRANSACTIONS}, {'with' if is_direct else 'without'} a direct URL: {found.accepted} accepted, "
            f"{len(found.missing)} without effect, {len(found.repeated)} repeated{': BROKEN' if is_broken else ''}"
        )
        status |= is_broken
    sys.exit(status)


if __name__ == "__main__":
    main()
