"""Starts `tidegate` processes by forking one that has loaded its modules: that takes most of the CPU time of a start,
and the tests start more than a thousand.

A process that was forked is one of its own: its session, signals, environment, directory and files are those that it
would have been started with, and it ends as the command does. Started as a program, this is the server: a request comes
as a message on its standard input, a socket, with the files of the process and a pipe for its exit status. It ends with
the process that started it, and everything that it started ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

_MOST_BYTES = 1 << 20
# What a Python or one of its libraries reads as it starts, so before a fork.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "OTEL_", "TZ", "SSL_", "OPENSSL_")


class Forked:
    """A process of the server, as `subprocess.Popen` shows its own."""

    def __init__(self, command: str, arguments: list[str], env: dict[str, str], cwd: Path | None, out: int, err: int):
        self._status_end, theirs = os.pipe()
        self.returncode: int | None = None
        request = {"argv": [command, *arguments], "env": env, "cwd": str(cwd or Path.cwd())}
        try:
            self.pid = _client().ask(request, [out, err, theirs])
        except BaseException:
            os.close(self._status_end)
            raise
        finally:
            os.close(theirs)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status_end], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("tidegate", timeout or 0)
            self.returncode = int(os.read(self._status_end, 16) or b"1")
            os.close(self._status_end)
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def is_for(arguments: tuple[str, ...], env: dict[str, str]) -> bool:
    """Whether a fork is the same as a start: `dev` starts itself again, and some variables are read before a fork."""
    if not hasattr(os, "pidfd_open") or not arguments or arguments[0] in ("dev", "init", "top"):
        return False
    return all(os.environ.get(name) == env.get(name) for name in os.environ.keys() | env.keys()
               if name.startswith(_READ_AT_START) and name != "PYTHONUNBUFFERED")  # fmt: skip


class _Client:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _MOST_BYTES)
        with theirs:
            self._server = subprocess.Popen(
                [sys.executable, __file__], stdin=theirs, stdout=subprocess.DEVNULL, start_new_session=True,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
            )  # fmt: skip

    def ask(self, request: dict[str, Any], files: list[int]) -> int:
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], files)
            return int(self._socket.recv(32))

    def close(self) -> None:
        self._socket.close()
        self._server.wait()


@functools.cache
def _client() -> _Client:
    """Started with the first request."""
    client = _Client()
    atexit.register(client.close)
    return client


# The server -----------------------------------------------------------------------------------------------------------


class _Start(NamedTuple):
    argv: list[str]
    env: dict[str, str]
    cwd: str
    files: list[int]


def _serve() -> _Start:
    """Returns in each process that is to be started, never in the server."""
    control = socket.socket(fileno=os.dup(0))
    status_ends: dict[int, tuple[int, int]] = {}  # by the file of a process: its id, and where its status goes
    while True:
        ready, _, _ = select.select([control, *status_ends], [], [])
        for one in ready:
            if one in status_ends:
                pid, end = status_ends.pop(one)
                with contextlib.suppress(BrokenPipeError):
                    os.write(end, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
                os.close(end)
                os.close(one)
                continue
            message, files, _, _ = socket.recv_fds(control, _MOST_BYTES, 3)
            if not message:
                for pid, _ in status_ends.values():
                    os.kill(pid, signal.SIGKILL)
                os._exit(0)
            start = _Start(**json.loads(message), files=list(files))
            pid = os.fork()
            if pid == 0:
                control.detach()
                return start
            status_ends[os.pidfd_open(pid)] = pid, files[2]
            for file in files[:2]:
                os.close(file)
            control.send(str(pid).encode())


def _become(start: _Start) -> None:
    """What a start would have done before the first line of the program."""
    os.setsid()
    os.dup2(start.files[0], 1)
    os.dup2(start.files[1], 2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(start.env)
    os.chdir(start.cwd)
    sys.argv = start.argv
    sys.path[0] = str(Path(start.argv[0]).parent)


def _main() -> None:
    from tidegate.cli import _LazyGroup, main

    for home in sorted(set(_LazyGroup._homes.values())):
        importlib.import_module(f"tidegate.cli.{home}")
    for used_late in ("path", "template"):
        importlib.import_module(f"tidegate.model.{used_late}")
    gc.collect()
    gc.freeze()
    _become(_serve())
    main()


if __name__ == "__main__":
    _main()
