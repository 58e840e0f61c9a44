"""Two Postgres servers of the bundled version: a primary and a streaming standby that can be promoted."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg

from chaos.redis_server import free_port
from tidegate.embedded import ROLE, EmbeddedPostgres, binaries_folder

PATIENCE_SECONDS = 120


class Node:
    """One server, reached by TCP."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.place = f"127.0.0.1:{self.port}"
        self.server = EmbeddedPostgres(folder, {"listen_addresses": "127.0.0.1", "port": str(self.port)})

    def ask(self, question: str, *arguments: Any) -> Any:
        """The first value of the answer, as the superuser."""
        return asyncio.run(self._ask(question, arguments))

    async def _ask(self, question: str, arguments: tuple[Any, ...]) -> Any:
        connection = await asyncpg.connect(f"postgresql://postgres@{self.place}/{ROLE}")
        try:
            return await connection.fetchval(question, *arguments)
        finally:
            await connection.close()

    def set(self, name: str, value: str) -> None:
        self.ask(f"alter system set {name} = '{value}'")
        self.ask("select pg_reload_conf()")
        until(lambda: self.ask("select current_setting($1)", name) == value)

    def kill(self) -> None:
        """As when the machine loses its power: at once, and with all its processes."""
        pid = self.server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)  # so that it starts no more
        for child in _children(pid):
            os.kill(child, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        self.server.stop(immediate=True)


class Pair:
    """A primary and its standby. With `is_synchronous` the primary's commits wait for the standby."""

    def __init__(self, folder: Path, *, is_synchronous: bool) -> None:
        self._folder = folder
        self._is_synchronous = is_synchronous
        self._made = 1
        self.primary = Node(folder / "node-0")
        self.primary.server.start()
        self.standby = Node(folder / "node-1")
        self._start_standby()

    @property
    def url(self) -> str:
        """Both hosts, of which clients find the primary."""
        places = f"{self.primary.place},{self.standby.place}"
        return f"postgresql://{ROLE}@{places}/{ROLE}?target_session_attrs=read-write"

    def hold_back(self) -> None:
        """Let the standby receive nothing from now on."""
        os.kill(self.standby.ask("select pid from pg_stat_wal_receiver"), signal.SIGSTOP)

    def fail_over(self) -> None:
        """Kill the primary, promote the standby."""
        self.primary.kill()
        receiver = self.standby.ask("select pid from pg_stat_wal_receiver")
        if receiver is not None:
            os.kill(receiver, signal.SIGKILL)  # if held back, it has not stored anything since
        self._until_in_recovery()
        self.standby.set("synchronous_standby_names", "")  # as whatever promotes has to, or nothing is committed
        assert self.standby.ask("select pg_promote()")
        self.primary, self.standby = self.standby, self.primary

    def make_standby(self) -> None:
        """A new standby in the place of the server that was killed."""
        shutil.rmtree(self.standby.server.data)
        self._start_standby()

    def stop(self) -> None:
        for node in (self.standby, self.primary):
            node.server.stop(immediate=True)

    def _until_in_recovery(self) -> None:
        """The standby restarts its processes when one of them is killed."""
        until(lambda: self.standby.ask("select pg_is_in_recovery()"))

    def _start_standby(self) -> None:
        pgdata = self.standby.server.pgdata
        pgdata.parent.mkdir()
        done = subprocess.run(
            [binaries_folder() / "pg_basebackup", "-D", pgdata, "-R", "-c", "fast", "-X", "stream",
             "-d", f"postgresql://postgres@{self.primary.place}/"],
            capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"pg_basebackup failed: {done.stderr}")
        hand_over(pgdata)
        self.standby.server.start()
        if self._is_synchronous:
            self.primary.set("synchronous_standby_names", "*")
            until(lambda: self.primary.ask("select exists (select from pg_stat_replication where sync_state = 'sync')"))
        else:
            until(lambda: self.primary.ask("select exists (select from pg_stat_replication where state = 'streaming')"))


def hand_over(pgdata: Path) -> None:
    """Give a data directory to the user as whom the server runs."""
    if os.geteuid() == 0:  # as whom Postgres does not run
        owner = pwd.getpwnam("nobody")
        for path in (pgdata, *pgdata.rglob("*")):
            os.chown(path, owner.pw_uid, owner.pw_gid, follow_symlinks=False)


def until(question: Callable[[], object]) -> None:
    """Ask until it is so; a server that does not answer says no."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if question():
                return
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
            pass
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]
