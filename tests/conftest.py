"""One real Postgres for the test session; each test gets its own database, cloned from a migrated template.

Databases belong to an ordinary role, and tests log in as it. Whatever needs more (making databases and roles) asks for
`postgres.admin_url()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import ClassVar

import asyncpg
import pytest

from tidegate import failpoints
from tidegate.embedded import ROLE, EmbeddedPostgres
from tidegate.store import migrate
from tidegate.store.db import Connection, Database
from tidegate.telemetry import logs

logs.quieten("debug")  # every line, into what pytest captures

_numbers = itertools.count(1)
_SLOW = ("acceptance", "flow")
# Files that take the longest, in whichever folder.
_LONGEST = ("test_bench.py", "test_chaos.py", "test_restore.py", "test_wait_processes.py", "test_template_bounds.py",
            "test_workflow_docs.py")  # fmt: skip


if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job; our children must hear Ctrl-C


def _fast_folder() -> Path | None:
    """Memory, where there is plenty: on a busy disk each test's database takes a second. Postgres is the same."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 6 * 1024**3 else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Tests that must not run beside others have a session of their own, for which the other files need not be read."""
    if config.option.markexpr != "alone" or not collection_path.match("test_*.py"):
        return None
    return True if "mark.alone" not in collection_path.read_text() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long comes first: at the end, quick files keep all processes of a session busy."""

    def place(item: pytest.Item) -> int:
        if item.path.name in _LONGEST:
            return -1
        return next((n for n, name in enumerate(_SLOW) if name in item.path.parts), len(_SLOW))

    items.sort(key=place)


@pytest.fixture(scope="session")
def postgres() -> Iterator[EmbeddedPostgres]:
    with tempfile.TemporaryDirectory(prefix="tidegate-test-", dir=_fast_folder(), ignore_cleanup_errors=True) as folder:
        server = EmbeddedPostgres(Path(folder), {"max_connections": "300", "max_wal_size": "1GB"})
        server.start()
        try:
            yield server
        finally:
            server.stop()


async def _admin(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@contextlib.contextmanager
def cloned(postgres: EmbeddedPostgres, template: str, name: str) -> Iterator[str]:
    """A migrated database for several tests; its URL."""
    asyncio.run(_admin(postgres.admin_url(), f"create database {name} template {template} owner {ROLE}"))
    yield postgres.url(name)
    asyncio.run(_admin(postgres.admin_url(), f"drop database {name} with (force)"))


class _Template:
    """A migrated database that others are cloned from, as it is on the day of its making."""

    name = "tidegate_template"
    made: ClassVar[_Template | None] = None

    def __init__(self, server: EmbeddedPostgres) -> None:
        self.server = server
        self.day = _today()
        asyncio.run(self._make())

    async def _make(self) -> None:
        await _admin(self.server.admin_url(), f"drop database if exists {self.name}")
        await _admin(self.server.admin_url(), f"create database {self.name} owner {ROLE}")
        database = Database(self.server.url(self.name), "test", size=1)
        await migrate.migrate(database)
        await database.close()


def _today() -> date:
    return datetime.now(UTC).date()


@pytest.fixture(scope="session")
def template(postgres: EmbeddedPostgres) -> Iterator[str]:
    """The name of a migrated database that others are cloned from."""
    _Template.made = _Template(postgres)
    yield _Template.name
    _Template.made = None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A new database has partitions for its first day and the next. After midnight, clones of the old template would be
    databases that no worker has looked after."""
    made = _Template.made
    if made is not None and made.day != _today():
        _Template.made = _Template(made.server)


@pytest.fixture
async def empty_database_url(postgres: EmbeddedPostgres) -> AsyncIterator[str]:
    """A database without Tidegate's schema."""
    name = f"empty_{next(_numbers)}"
    await _admin(postgres.admin_url(), f"create database {name} owner {ROLE}")
    yield postgres.url(name)
    await _admin(postgres.admin_url(), f"drop database {name} with (force)")


@pytest.fixture
async def database_url(postgres: EmbeddedPostgres, template: str) -> AsyncIterator[str]:
    """A migrated database of this test's own."""
    name = f"test_{next(_numbers)}"
    await _admin(postgres.admin_url(), f"create database {name} template {template} owner {ROLE} strategy file_copy")
    yield postgres.url(name)
    await _admin(postgres.admin_url(), f"drop database {name} with (force)")


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    opened = Database(database_url, "test", size=10)
    yield opened
    await opened.close()


@pytest.fixture
async def connection(database: Database) -> AsyncIterator[Connection]:
    async with database.connection() as opened:
        yield opened


@pytest.fixture(autouse=True)
def _no_failpoints() -> Iterator[None]:
    yield
    failpoints.disarm()


class Clock:
    """The database's clock in the test's hands: `tidegate.now()` reads it, in every process."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.now = datetime(2026, 6, 1, 12, tzinfo=UTC)

    async def install(self) -> None:
        async with self._database.connection() as connection:
            await connection.execute("create table public.test_clock (now timestamptz not null)")
            await connection.execute("insert into public.test_clock values ($1)", self.now)
            await connection.execute(
                "create or replace function tidegate.now() returns timestamptz language sql stable parallel safe "
                "as $$ select now from public.test_clock $$"
            )

    async def advance(self, ms: float) -> datetime:
        """Move the clock; a negative step is a clock set back."""
        self.now += timedelta(milliseconds=ms)
        async with self._database.connection() as connection:
            await connection.execute("update public.test_clock set now = $1", self.now)
        return self.now


@pytest.fixture
async def clock(database: Database) -> Clock:
    made = Clock(database)
    await made.install()
    return made
