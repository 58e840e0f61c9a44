"""Real Tidegate processes for tests: started, watched, and ended by their own ids."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tests import fork_server

TIDEGATE = str(Path(sys.executable).parent / "tidegate")
PATIENCE_SECONDS = 60


def _clean() -> dict[str, str]:
    """The environment without settings of Tidegate."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TIDEGATE_")}


def _start(
    arguments: tuple[str, ...], env: dict[str, str], cwd: Path | None, out: int, err: int
) -> subprocess.Popen[bytes] | fork_server.Forked:
    if fork_server.is_for(arguments, env):
        return fork_server.Forked(TIDEGATE, list(arguments), env, cwd, out, err)
    return subprocess.Popen(
        [TIDEGATE, *arguments], stdout=out, stderr=err, stdin=subprocess.DEVNULL, env=env, cwd=cwd,
        start_new_session=True,
    )  # fmt: skip


class Process:
    """A `tidegate …` process and the lines it prints."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        printed, theirs = os.pipe()
        self._printed = os.fdopen(printed, encoding="utf-8", errors="replace")
        try:
            self._popen = _start(arguments, _clean() | {"PYTHONUNBUFFERED": "1"} | (env or {}), cwd, theirs, theirs)
        finally:
            os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, pattern: str) -> re.Match[str]:
        """The first line, past or to come, in which the pattern is found."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        seen = 0
        with self._changed:
            while True:
                for line in self.lines[seen:]:
                    found = re.search(pattern, line)
                    if found:
                        return found
                seen = len(self.lines)
                ended = self._popen.poll() is not None and not self._reader.is_alive()
                if ended or time.monotonic() > deadline:
                    raise AssertionError(f"no line matches {pattern!r} in:\n{self.output}")
                self._changed.wait(0.2)

    def signal(self, signum: signal.Signals) -> None:
        self._popen.send_signal(signum)

    def wait(self) -> int:
        """The exit status."""
        status = self._popen.wait(PATIENCE_SECONDS)
        self._reader.join(5)
        return status

    def end(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait(PATIENCE_SECONDS)
        self._reader.join(5)
        self._printed.close()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):
            for line in self._printed:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._changed.notify_all()


@contextlib.contextmanager
def tidegate(*arguments: str, cwd: Path | None = None, **env: str) -> Iterator[Process]:
    """A running `tidegate` command; settings are given as `TIDEGATE_…=value`."""
    process = Process(*arguments, env=env, cwd=cwd)
    try:
        yield process
    finally:
        process.end()


@contextlib.contextmanager
def api(database_url: str, **env: str) -> Iterator[tuple[Process, str]]:
    """An API process that is ready, and its address; an open one, unless `TIDEGATE_AUTH` says otherwise."""
    settings = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_AUTH": "off", **env}
    with tidegate("serve", "--port", "0", **settings) as process:
        yield process, process.wait_for_line(r"API on (http://\S+)")[1]


@contextlib.contextmanager
def worker(database_url: str, app: Path | str, **env: str) -> Iterator[Process]:
    """A worker process that is ready; its metrics are open, unless `TIDEGATE_AUTH` says otherwise."""
    settings = {"TIDEGATE_DATABASE_URL": database_url, "TIDEGATE_POLL_MS": "100", "TIDEGATE_AUTH": "off", **env}
    with tidegate("worker", str(app), **settings) as process:
        process.wait_for_line("worker.started")
        yield process


def run(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None, input: str = ""
) -> subprocess.CompletedProcess[str]:
    """A `tidegate` command run to its end."""
    given = _clean() | (env or {})
    if input:
        return subprocess.run(
            [TIDEGATE, *arguments], capture_output=True, text=True, env=given, cwd=cwd, input=input,
            timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = _start(arguments, given, cwd, out.fileno(), err.fileno())
        try:
            process.wait(PATIENCE_SECONDS)
        finally:
            process.kill()
            status = process.wait()
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([TIDEGATE, *arguments], status, out.read(), err.read())
