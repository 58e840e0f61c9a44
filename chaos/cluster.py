"""The cluster that is broken: one Postgres with fsync on, perhaps a Redis, API and worker processes.

Everything is started here and ended here, by its own process id, however the run ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import asyncpg
import msgspec

from chaos import redis_server
from chaos.http import request
from chaos.publisher import Job
from chaos.redis_server import RedisServer, free_port
from tidegate.embedded import EmbeddedPostgres
from tidegate.store import migrate
from tidegate.store.db import Database

ROOT = Path(__file__).parent.parent
APP = Path(__file__).parent / "app.py"
PATCHED = Path(__file__).parent / "patched"
TIDEGATE = str(Path(sys.executable).parent / "tidegate")
LEASE_MS = 3000
LIMITS = {"limited": (10, 1000)}
READY_SECONDS = 120
POSTGRES_OPTIONS = {"max_connections": "200", "fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}


class Postgres(EmbeddedPostgres):
    """Starts without waiting: other faults go on meanwhile. `answers` tells when it is there."""

    def _wait_until_ready(self) -> None:
        pass

    async def answers(self) -> None:
        """Returns when it takes connections."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            try:
                connection = await asyncpg.connect(self.url(), timeout=5)
            except (OSError, TimeoutError, asyncpg.PostgresError) as exc:
                if time.monotonic() > deadline or (self._process is not None and self._process.poll() is not None):
                    raise RuntimeError(
                        f"Postgres is not ready after {READY_SECONDS} s, or has ended; see {self.log}"
                    ) from exc
                await asyncio.sleep(0.05)
            else:
                await connection.close()
                return


class Member:
    """One process of the cluster: started again after each end, until the cluster stops."""

    def __init__(self, name: str, command: list[str], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command = command
        self._environment = dict(environment)
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_pid = 0

    @property
    def is_ready(self) -> bool:
        """Whether it was seen at work since it was started."""
        return self.is_alive and self._ready_pid == self.pid

    def was_seen(self) -> None:
        self._ready_pid = self.pid

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def use(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Be this from the next start on."""
        self._command, self._environment = command, dict(environment)

    def start(self, **more: str) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment | more,
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - the run has no threads
            )

    def send(self, signum: signal.Signals) -> None:
        if self.is_alive and self._process is not None:
            self._process.send_signal(signum)

    async def ended(self, seconds: float = 60) -> int | None:
        """The exit status, or None when it is still there after so long."""
        deadline = time.monotonic() + seconds
        while self.is_alive:
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(0.02)
        return self._process.returncode if self._process else 0

    def kill(self) -> None:
        if self._process is not None:
            self.send(signal.SIGKILL)
            self._process.wait(30)


class Cluster:
    """Two APIs, three workers (or what is asked for), and what they stand on."""

    def __init__(
        self,
        folder: Path,
        *,
        queue: str,
        apis: int,
        workers: int,
        without: Sequence[str] = (),
        app: Path = APP,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._app = app
        self._settings = dict(settings or {})
        self.queue = queue
        self._without = without
        for inside in ("sink", "logs"):
            (folder / inside).mkdir(parents=True, exist_ok=True)
        self.postgres = Postgres(folder / "postgres", POSTGRES_OPTIONS)
        self.redis = _redis(folder) if queue == "bullmq" else None
        self.urls = [f"http://127.0.0.1:{free_port()}" for _ in range(apis)]
        self._counts = (apis, workers)
        self.apis: list[Member] = []
        self.workers: list[Member] = []
        self.publisher: subprocess.Popen[bytes] | None = None

    @property
    def database_url(self) -> str:
        return self.postgres.url()

    @property
    def members(self) -> list[Member]:
        return [*self.apis, *self.workers]

    async def start(self) -> None:
        """Everything, in order; returns when the APIs answer."""
        await self._start_stores()
        database = Database(self.database_url, "migrate", size=1)
        try:
            await migrate.migrate(database)
        finally:
            await database.close()
        self._make_members()
        for member in self.members:
            member.start()
        await self.until_ready()

    async def start_with(self, migrates: Callable[[], object], starts: Callable[[Member], None]) -> None:
        """The same, with members of another version: its own command migrates, and `starts` starts each."""
        await self._start_stores()
        await asyncio.to_thread(migrates)
        self._make_members()
        for member in self.members:
            starts(member)
        await self.until_ready()

    async def _start_stores(self) -> None:
        self.postgres.start()
        await self.postgres.answers()
        if self.redis is not None:
            self.redis.start()

    def _make_members(self) -> None:
        apis, workers = self._counts
        environment = self.environment()
        for n, url in enumerate(self.urls[:apis], 1):
            command = [TIDEGATE, "serve", "--port", url.rpartition(":")[2]]
            self.apis.append(Member(f"api-{n}", command, environment, self.folder / "logs" / f"api-{n}.log"))
        for n in range(1, workers + 1):
            log = self.folder / "logs" / f"worker-{n}.log"
            self.workers.append(Member(f"worker-{n}", [TIDEGATE, "worker", f"{self._app}:app"], environment, log))

    def environment(self) -> dict[str, str]:
        """What every process of the cluster is given."""
        limits = [{"source": s, "limit": n, "interval_ms": ms, "pause_ms": 0} for s, (n, ms) in LIMITS.items()]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")}
        own = {
            "CHAOS_SINK": str(self.folder / "sink"),
            "TIDEGATE_DATABASE_URL": self.database_url,
            "TIDEGATE_QUEUE": self.queue,
            "TIDEGATE_AUTH": "off",  # all who ask are here, on this machine
            "TIDEGATE_LEASE_MS": str(LEASE_MS),
            "TIDEGATE_POLL_MS": "200",
            "TIDEGATE_SHUTDOWN_MS": "5000",
            # Runs whose workers died again and again fail by the rule, and open breakers: not for longer than a drain.
            "TIDEGATE_TRIGGER_ERROR_PAUSE_MS": "3000",
            "TIDEGATE_LOG_LEVEL": "warning",
            "TIDEGATE_SOURCE_RATE_LIMITS": msgspec.json.encode(limits).decode(),
            "PYTHONPATH": str(ROOT),
        }
        if self.redis is not None:
            own["TIDEGATE_REDIS_URL"] = self.redis.url
        if self._without:
            own |= {"CHAOS_WITHOUT": ",".join(self._without), "PYTHONPATH": f"{PATCHED}:{ROOT}"}
        return inherited | own | self._settings

    async def until_ready(self) -> None:
        """Every API answers that it is ready."""
        deadline = time.monotonic() + READY_SECONDS
        for url in self.urls:
            while (await request(url, "GET", "/readyz")).status != 200:
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{url} is not ready after {READY_SECONDS} s; see {self.folder / 'logs'}")
                await asyncio.sleep(0.1)

    async def until_at_work(self) -> None:
        """Every worker was seen by the database."""
        deadline = time.monotonic() + READY_SECONDS
        while not all(worker.is_ready for worker in self.workers):
            if time.monotonic() > deadline:
                raise RuntimeError(f"not every worker is at work after {READY_SECONDS} s; see {self.folder / 'logs'}")
            await self.look()
            await asyncio.sleep(0.1)

    def publish(self, job: Job) -> None:
        """Start the client."""
        with (self.folder / "logs" / "publisher.log").open("ab") as log:
            self.publisher = subprocess.Popen(
                [sys.executable, "-m", "chaos.publisher"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=ROOT,
                preexec_fn=_end_with_parent,  # noqa: PLW1509
            )
        assert self.publisher.stdin is not None
        self.publisher.stdin.write(msgspec.json.encode(job) + b"\n")
        self.publisher.stdin.close()

    async def stop_publishing(self, patience_seconds: float) -> None:
        """No new events; returns when what was begun is answered."""
        assert self.publisher is not None
        self.publisher.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + patience_seconds
        while self.publisher.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the publisher is not answered after {patience_seconds} s")
            await asyncio.sleep(0.05)
        if self.publisher.returncode != 0:
            raise RuntimeError(f"the publisher failed; see {self.folder / 'logs' / 'publisher.log'}")

    async def look(self) -> None:
        """See who is at work: an API that takes connections, a worker that the database knows."""
        for api, url in zip(self.apis, self.urls, strict=True):
            if api.is_alive and not api.is_ready and _listens(url):
                api.was_seen()
        if all(worker.is_ready or not worker.is_alive for worker in self.workers):
            return
        with contextlib.suppress(OSError, TimeoutError, asyncpg.PostgresError):
            connection = await asyncpg.connect(self.database_url, timeout=2)
            try:
                rows = await connection.fetch("select name from tidegate.workers")
            finally:
                await connection.close()
            seen = {int(row["name"].rpartition(":")[2]) for row in rows}
            for worker in self.workers:
                if worker.is_alive and worker.pid in seen:
                    worker.was_seen()

    def keep_up(self) -> None:
        """Start again whoever is not there."""
        for member in self.members:
            if not member.is_alive:
                member.start()

    def stop(self) -> None:
        """End everything that is still there."""
        if self.publisher is not None and self.publisher.poll() is None:
            self.publisher.kill()
            self.publisher.wait(30)
        for member in self.members:
            member.send(signal.SIGCONT)
            member.kill()
        if self.redis is not None:
            self.redis.stop()
        self.postgres.stop()


def fake_time() -> Path | None:
    """libfaketime, where it is installed."""
    spec = importlib.util.find_spec("libfaketime")
    candidates = [Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")]
    if spec is not None and spec.origin is not None:
        candidates.insert(0, Path(spec.origin).parent / "vendor" / "libfaketime" / "src" / "libfaketime.so.1")
    return next((path for path in candidates if path.exists()), None)


def skewed(seconds: int) -> dict[str, str]:
    """The environment of a process whose wall clock is off by so much: by libfaketime, or in `chaos.app` without it."""
    library = fake_time()
    if library is None:
        return {"CHAOS_CLOCK_OFFSET": str(seconds)}
    return {"LD_PRELOAD": str(library), "FAKETIME": f"{seconds:+d}s", "DONT_FAKE_MONOTONIC": "1"}


def _listens(url: str) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 0.5):
            return True
    except OSError:
        return False


def _redis(folder: Path) -> RedisServer:
    program = redis_server.binary()
    if program is None:
        raise SystemExit("no redis-server: put one on the PATH, or leave out --queue bullmq")
    return RedisServer(program, str(folder))


def _end_with_parent() -> None:
    """In the child: have the kernel end it with the run, even when that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
