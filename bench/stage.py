"""What the figures run on: one Postgres, a database for each measurement, and Tidegate's own processes.

Everything lives in a temporary folder and ends with the benchmark, however that ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import asyncpg
import msgspec

from bench.app import app
from bench.client import Enqueue, Job, Report
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.store import migrate
from tidegate.store.db import Database

ROOT = Path(__file__).parent.parent
APP = Path(__file__).parent / "app.py"
# Checkpoints in the middle would measure the disk's luck; fsync and the rest stay as the server has them.
POSTGRES_OPTIONS = {"max_connections": "300", "max_wal_size": "8GB", "checkpoint_timeout": "1h"}

_START_SECONDS = 60
_STOP_SECONDS = 30
_TEMPLATE = "bench_template"
_LISTENING = re.compile(r"API on http://127\.0\.0\.1:(\d+)")


class Stage:
    """A running Postgres with a migrated template in which `bench.app` is registered."""

    def __init__(self, folder: Path, postgres: EmbeddedPostgres, child_environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._postgres = postgres
        self._numbers = itertools.count(1)
        self._kept: set[str] = set()
        self._child_environment = dict(child_environment)

    async def prepare(self) -> None:
        await self._admin(f"create database {_TEMPLATE} owner {ROLE}")
        database = Database(self._postgres.url(_TEMPLATE), "bench", size=1)
        try:
            await migrate.migrate(database)
            await database.run(app.register)
        finally:
            await database.close()

    async def version(self) -> str:
        connection = await asyncpg.connect(self._postgres.url())
        try:
            return str(await connection.fetchval("show server_version"))
        finally:
            await connection.close()

    @contextlib.asynccontextmanager
    async def database(self) -> AsyncIterator[str]:
        """The address of a fresh database; dropped at the end. The last figure's writes are flushed before."""
        name = f"bench_{next(self._numbers)}"
        await self._admin(f"create database {name} template {_TEMPLATE} owner {ROLE}")
        await self.flush()
        try:
            yield self._postgres.url(name)
        finally:
            await self._admin(f"drop database {name} with (force)")

    async def kept(self, name: str) -> tuple[str, bool]:
        """The address of a database that stays until the end, and whether it is new."""
        is_new = name not in self._kept
        if is_new:
            await self._admin(f"create database {name} template {_TEMPLATE} owner {ROLE}")
            self._kept.add(name)
        return self._postgres.url(name), is_new

    async def flush(self) -> None:
        """Write out what was changed, so that the next figure does not pay for it."""
        await self._admin("checkpoint")

    @contextlib.asynccontextmanager
    async def api(self, database_url: str, environment: Mapping[str, str] | None = None) -> AsyncIterator[int]:
        """`tidegate serve` on that database; its port."""
        async with self.server(database_url, environment) as (port, _):
            yield port

    @contextlib.asynccontextmanager
    async def server(
        self, database_url: str, environment: Mapping[str, str] | None = None
    ) -> AsyncIterator[tuple[int, subprocess.Popen[bytes]]]:
        """The same with its process."""
        with self._tidegate("serve", database_url, "serve", environment=environment) as (process, log):
            yield await _wait_for_port(process, log), process

    @contextlib.contextmanager
    def worker(
        self,
        database_url: str,
        application: str,
        name: str = "worker",
        environment: Mapping[str, str] | None = None,
    ) -> Iterator[subprocess.Popen[bytes]]:
        """`tidegate worker` with the named object of `bench/app.py`. It is ready when it has done something.

        `environment` is added to its own. It may be killed; to end otherwise is an error.
        """
        command = ("worker", f"{APP}:{application}")
        with self._tidegate(name, database_url, *command, environment=environment) as (process, _):
            yield process

    @contextlib.asynccontextmanager
    async def running(
        self,
        database_url: str,
        application: str,
        workers: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> AsyncIterator[int]:
        """So many workers and an API, started at the same time; the API's port. The workers may not be ready yet."""
        with contextlib.ExitStack() as stack:
            for number in range(workers):
                stack.enter_context(self.worker(database_url, application, f"worker-{number}", environment))
            async with self.api(database_url, environment) as port:
                yield port

    @contextlib.contextmanager
    def program(
        self, name: str, command: list[str], folder: Path, environment: Mapping[str, str]
    ) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        """A program that runs meanwhile, and its log."""
        path = self.folder / f"{name}-{next(self._numbers)}.log"
        with path.open("wb") as log:
            process = _start(command, folder, environment, stdout=log.fileno(), stderr=log)
        try:
            yield process, path
            if process.poll() not in (None, -signal.SIGKILL):
                raise RuntimeError(f"{name} ended with status {process.returncode}: {_tail(path)}")
        finally:
            _stop(process)

    async def _admin(self, statement: str) -> None:
        await execute(self._postgres.admin_url(), statement=statement)

    @contextlib.contextmanager
    def _tidegate(
        self, name: str, database_url: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TIDEGATE_")} | self._child_environment
        own = {
            "TIDEGATE_DATABASE_URL": database_url,
            "TIDEGATE_PORT": "0",
            "TIDEGATE_AUTH": "off",
            "TIDEGATE_LOG_LEVEL": "warning",
        }
        program = Path(sys.executable).parent / "tidegate"
        command = [str(program), *arguments]
        given = inherited | own | dict(environment or {})
        given["PYTHONPATH"] = os.pathsep.join(filter(None, (given.get("PYTHONPATH"), str(ROOT))))  # for `bench.app`
        with self.program(f"tidegate {name}", command, self.folder, given) as it:
            yield it


@contextlib.asynccontextmanager
async def opened(
    child_environment: Mapping[str, str] | None = None, options: Mapping[str, str] = POSTGRES_OPTIONS
) -> AsyncIterator[Stage]:
    """A stage, taken down at the end. `child_environment` is added to that of Tidegate's processes; `options` are the
    server's."""
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-", ignore_cleanup_errors=True) as folder:
        postgres = EmbeddedPostgres(Path(folder) / "postgres", options)
        postgres.start()
        try:
            stage = Stage(Path(folder), postgres, child_environment or {})
            await stage.prepare()
            yield stage
        finally:
            postgres.stop()


async def without_triggers(url: str) -> None:
    """Disable the trigger that every database starts with, so that it does not take another application's events."""
    await execute(url, statement="update tidegate.workflow_event_triggers set status = 'disabled'")


async def execute(url: str, *, statement: str, arguments: Sequence[object] = ()) -> None:
    """One statement on a database."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement, *arguments)
    finally:
        await connection.close()


def publish(job: Job) -> Report:
    """Send the job's events from a process of their own; returns when all are answered."""
    with prepared(job) as go:
        return go()


@contextlib.contextmanager
def prepared(
    job: Job | Enqueue, command: Sequence[str] = (sys.executable, "-m", "bench.client")
) -> Iterator[Callable[[], Report]]:
    """A process that is connected and has everything ready to send; what is yielded makes it send, and returns when all
    is answered."""
    process = _start(list(command), ROOT, os.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        stdin.write(msgspec.json.encode(job) + b"\n")
        stdin.flush()
        if stdout.readline() != b"ready\n":
            raise RuntimeError("the client could not connect; its error is above")

        def go() -> Report:
            stdin.write(b"go\n")
            stdin.flush()
            line = stdout.readline()
            if not line:
                raise RuntimeError("the client failed; its error is above")
            return msgspec.json.decode(line, type=Report)

        yield go
    finally:
        _stop(process)


def _start(
    command: list[str],
    folder: Path,
    environment: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=dict(environment),
        preexec_fn=_end_with_parent,  # noqa: PLW1509 - the benchmark has no threads
    )


def _stop(process: subprocess.Popen[Any]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(how)
        try:
            process.wait(_STOP_SECONDS)
            break
        except subprocess.TimeoutExpired:
            continue
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def _end_with_parent() -> None:
    """In the child: have the kernel end it with the benchmark, even when that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))


async def _wait_for_port(process: subprocess.Popen[bytes], log: Path) -> int:
    for _ in range(_START_SECONDS * 50):
        found = _LISTENING.search(log.read_text(errors="replace"))
        if found:
            return int(found[1])
        if process.poll() is not None:
            break
        await asyncio.sleep(0.02)
    raise RuntimeError(f"tidegate serve did not start: {_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace").strip()[-2000:] or "nothing in its log"
