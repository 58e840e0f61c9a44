"""The pool, transactions, and the translation of driver errors. The driver is imported here and nowhere above.

All that waits for the server has a deadline, since a connection may fall silent without being closed (a failover,
a firewall that forgot it). What does not answer in time is cut off, not closed: closing would wait for an answer too. A
statement whose answer did not come may have been committed all the same; a caller that repeats it must be safe then.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

import asyncpg
from asyncpg.pgproto.pgproto import UUID

from tidegate import clock
from tidegate.errors import SettingsError, Unavailable
from tidegate.model.secrets import NO_KEYS, SecretKeys
from tidegate.store import tls
from tidegate.store.connect import OTHER_DATABASE, Connector, Pooling, Session, echoes, session_settings
from tidegate.telemetry.logs import logger

T = TypeVar("T")

# A `uuid.UUID` that is created, hashed and encoded several times as fast.
clock.use_uuid_class(UUID)

# How long the server may work on one statement, and how long we wait longer than that for its answer.
STATEMENT_SECONDS = 10.0
GRACE_SECONDS = 1.0
# The same for what reads or changes whole tables (`take_time`).
LONG_SECONDS = 120
# How long a connection that is released after a failure may take to become idle.
RELEASE_SECONDS = 2.0
_log = logger("store")

Row = Any  # a driver's record: read by name

# Errors after which the same transaction, run again from its start, may well succeed.
_TRANSIENT = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
)
# Errors that say: the database cannot be used right now.
_DOWN = (
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InsufficientResourcesError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.QueryCanceledError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.TransactionTimeoutError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
# Errors that a wrong address or wrong rights make; waiting does not help.
_MISCONFIGURED = (
    asyncpg.InvalidCatalogNameError,
    asyncpg.InvalidPasswordError,
    asyncpg.InvalidAuthorizationSpecificationError,
)
_CAUSES: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (asyncpg.DiskFullError, "its disk is full: events cannot be stored"),
    (asyncpg.TooManyConnectionsError, "it has no connection left for this process: events cannot be stored"),
    (asyncpg.TargetServerAttributeNotMatched, "none of its hosts accepts writes: events cannot be stored"),
    (asyncpg.ReadOnlySQLTransactionError, "it is read-only, as a standby is: events cannot be stored"),
    (asyncpg.InsufficientPrivilegeError, "this role may not do what is needed: see `tidegate migrate --grant-to`"),
    ((SettingsError, *_MISCONFIGURED), "it refuses the login, or is not there: see TIDEGATE_DATABASE_URL and the log"),
    (ssl.SSLCertVerificationError, "its certificate is not accepted: see sslrootcert in TIDEGATE_DATABASE_URL"),
    (TimeoutError, "it does not answer in time"),
)


class TransientConflict(Unavailable):
    """Another transaction was in the way; running the whole transaction again may succeed."""


class Connection(Protocol):
    """What callers use of a database connection inside a transaction."""

    async def execute(self, query: str, *args: Any) -> str: ...
    async def fetch(self, query: str, *args: Any) -> Sequence[Row]: ...
    async def fetchrow(self, query: str, *args: Any) -> Row | None: ...
    async def fetchval(self, query: str, *args: Any) -> Any: ...


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Turn the driver's errors into ours; errors in the SQL or the data itself pass unchanged, they are bugs."""
    try:
        yield
    except _TRANSIENT as exc:
        raise TransientConflict(f"the database refused for now: {exc}") from exc
    except asyncpg.CheckViolationError as exc:
        if exc.constraint_name is not None:
            raise
        # No CHECK of a table, but the bounds of the default partition: the row's day was added while this waited for
        # a lock on it. The next try finds the day.
        raise TransientConflict(f"a day of history was added just now: {exc.message}") from exc
    except asyncpg.ClientConfigurationError as exc:
        raise SettingsError(f"TIDEGATE_DATABASE_URL cannot be understood: {exc}") from exc
    except _MISCONFIGURED as exc:
        raise SettingsError(f"TIDEGATE_DATABASE_URL does not work: {exc}") from exc
    except ssl.SSLCertVerificationError as exc:
        why = f"{exc.verify_message.rstrip('.')} (sslmode and sslrootcert in TIDEGATE_DATABASE_URL)"
        raise Unavailable(f"the database's certificate is not accepted: {why}") from exc
    except _DOWN as exc:
        if isinstance(exc, asyncpg.InterfaceError) and not _is_lost_connection(exc):
            raise
        raise Unavailable(f"the database cannot be reached: {exc or type(exc).__name__}") from exc


def why_down(exc: BaseException) -> str:
    """What keeps the database from being used, in words that hold no address and no text of the driver."""
    causes: list[BaseException] = [exc]
    while causes[-1].__cause__ is not None:
        causes.append(causes[-1].__cause__)
    for kinds, text in _CAUSES:
        if any(isinstance(cause, kinds) for cause in causes):
            return text
    return "it cannot be reached, or refuses to work; the log says why"


def is_data_error(exc: BaseException) -> bool:
    """Whether the database or driver refused the data itself: the same rows will fail again."""
    return isinstance(
        exc, asyncpg.DataError | asyncpg.IntegrityConstraintViolationError | asyncpg.ProgramLimitExceededError
    )


class Database:
    """A pool of connections for one role of the process (`ingest`, `worker`, `api`); `keys` are for stored secrets."""

    def __init__(
        self,
        url: str,
        role: str,
        size: int,
        lock_timeout_ms: int = 2000,
        statement_seconds: float = STATEMENT_SECONDS,
        keys: SecretKeys = NO_KEYS,
        direct_url: str | None = None,
    ) -> None:
        """`direct_url` is the same database without a pooler, for what needs a session (`dedicated`)."""
        tls.check_files(url)
        self.url = url
        self.role = role
        self.keys = keys
        self._size = size
        self._answer_seconds = statement_seconds + GRACE_SECONDS
        settings = session_settings(role, lock_timeout_ms, statement_seconds)
        self._connector = _connector(url, settings, self._answer_seconds)
        self._direct = self._connector
        if direct_url not in (None, url):
            self._direct = _connector(direct_url, settings, self._answer_seconds)
        self._pool: Any = None
        self._opening = asyncio.Lock()
        self._retiring: set[asyncio.Task[None]] = set()

    async def open(self) -> Database:
        await self._opened()
        return self

    async def _opened(self) -> Any:
        async with self._opening:
            if self._pool is None:
                async with translated():
                    self._pool = await asyncpg.create_pool(
                        min_size=0,
                        max_size=self._size,
                        max_inactive_connection_lifetime=300,
                        connect=self._connect,
                        connection_class=Session,
                        reset=_keep_session,
                    )
            return self._pool

    async def close(self) -> None:
        for task in self._retiring:
            task.cancel()
        if self._pool is not None:
            pool, self._pool = self._pool, None
            await _close(pool, 5)

    async def _connect(self, *_: object, **__: object) -> Session:
        return await self._connector.connect()

    @asynccontextmanager
    async def connection(self, wait_seconds: float = 5) -> AsyncIterator[Connection]:
        """A connection outside any transaction: each statement is one of its own. Behind a pooler they are one
        transaction, since only a transaction has settings there."""
        async with translated(), self._acquired(wait_seconds) as connection:
            if not connection.is_pooled:
                yield connection
                return
            async with _in_transaction(connection):
                yield connection

    @asynccontextmanager
    async def transaction(self, wait_seconds: float = 5) -> AsyncIterator[Connection]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        async with translated(), self._acquired(wait_seconds) as connection, _in_transaction(connection):
            yield connection

    @asynccontextmanager
    async def _acquired(self, wait_seconds: float) -> AsyncIterator[Any]:
        pool = self._pool or await self._opened()  # which `close` takes away while connections are still out
        async with asyncio.timeout(wait_seconds):  # the pool's own time limit costs a task each time
            connection = await pool.acquire()
        try:
            yield connection
        except asyncpg.InternalClientError:
            # A dying server left it in the middle of something: it must not go back to the pool.
            _cut_off(connection)
            raise
        except TimeoutError as exc:
            _cut_off(connection)
            self._abandon(pool)
            raise TimeoutError(f"no answer within {self._answer_seconds:g} s") from exc
        finally:
            try:
                await pool.release(connection, timeout=RELEASE_SECONDS)
            except TimeoutError:  # an abandoned statement is still in progress: the driver has cut it off
                self._abandon(pool)
            except _DOWN:
                pass  # what was done on it is done; the next one gets another

    def _abandon(self, pool: Any) -> None:
        """Use none of this pool's connections again: one of them did not answer, and the others may be as silent. Those
        that are in use are left to their own deadlines."""
        if self._pool is not pool:
            return
        self._pool = None
        _log.warning("store.connections_replaced", role=self.role)
        task = asyncio.create_task(_close(pool, self._answer_seconds))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)

    async def run(self, work: Callable[[Connection], Awaitable[T]], attempts: int = 5) -> T:
        """`work` in a transaction, again from the start while other transactions are in its way."""
        for attempt in range(1, attempts + 1):
            try:
                async with self.transaction() as connection:
                    return await work(connection)
            except TransientConflict:
                if attempt == attempts:
                    raise
                await asyncio.sleep(random.uniform(0, 0.02 * 2**attempt))  # noqa: S311 - spreading, not secrecy
        raise AssertionError("unreachable")

    async def dedicated(self, answer_seconds: float | None = None) -> Session:
        """A connection of its own, outside the pool, that keeps its session (LISTEN, migrations); the caller closes it.
        NoSession behind a pooler that keeps none."""
        async with translated():
            return await self._direct.session(answer_seconds)

    async def hears(self, listening: Session) -> bool:
        """Whether what this pool notifies of arrives at a dedicated connection: not if that is to another database."""
        if self._direct is self._connector:
            return True

        async def notify(statement: str) -> None:
            async with self.connection() as connection:
                await connection.execute(statement)

        async with translated():
            return await echoes(listening, notify)

    async def pooling(self) -> Pooling:
        """What is between this process and the database, and whether sessions can be had."""
        async with self.connection():
            pass
        connector, lacking = self._connector, None
        if connector.is_pooled or self._direct is not connector:
            try:
                connection = await self.dedicated()
                try:
                    lacking = None if await self.hears(connection) else OTHER_DATABASE
                finally:
                    connection.terminate()
            except (SettingsError, Unavailable) as exc:
                lacking = str(exc)
        return Pooling(bool(connector.is_pooled), connector.is_tracked, self._direct is not connector, lacking)


class _Patient:
    """A connection whose statements may take longer than others."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def execute(self, query: str, *args: Any) -> str:
        return str(await self._connection.execute(query, *args, timeout=LONG_SECONDS + GRACE_SECONDS))

    async def fetch(self, query: str, *args: Any) -> Sequence[Row]:
        rows: Sequence[Row] = await self._connection.fetch(query, *args, timeout=LONG_SECONDS + GRACE_SECONDS)
        return rows

    async def fetchrow(self, query: str, *args: Any) -> Row | None:
        return await self._connection.fetchrow(query, *args, timeout=LONG_SECONDS + GRACE_SECONDS)

    async def fetchval(self, query: str, *args: Any) -> Any:
        return await self._connection.fetchval(query, *args, timeout=LONG_SECONDS + GRACE_SECONDS)


def without_end(*, is_local: bool) -> str:
    """The statement that lets a session's transactions, or only this one, take as long as they like."""
    return (
        f"select set_config('transaction_timeout', '0', {is_local}) "
        "where current_setting('transaction_timeout', true) is not null"
    )


async def take_time(connection: Connection) -> Connection:
    """For what reads or changes a whole table: from now on, statements of this transaction may take longer, if they are
    sent by what is returned."""
    await connection.execute(f"set local statement_timeout = '{LONG_SECONDS}s'; {without_end(is_local=True)}")
    return _Patient(connection)


@asynccontextmanager
async def _in_transaction(connection: Session) -> AsyncIterator[None]:
    transaction = connection.transaction()
    await transaction.start()
    try:
        if connection.is_pooled:
            await connection.execute(connection.local_settings)
        yield
    except BaseException as exc:
        if not isinstance(exc, TimeoutError):  # else it does not answer, and is cut off
            await _roll_back(connection, transaction)
        raise
    await transaction.commit()


async def _roll_back(connection: Any, transaction: Any) -> None:
    """Never fails: to be cut off rolls back, too."""
    try:
        async with asyncio.timeout(RELEASE_SECONDS):
            await transaction.rollback()
    except Exception:  # noqa: BLE001 - a connection that cannot roll back is closed, which rolls back too
        _cut_off(connection)


def _connector(url: str, settings: dict[str, str], answer_seconds: float) -> Connector:
    try:
        return Connector(url, settings, answer_seconds)
    except (asyncpg.ClientConfigurationError, ValueError) as exc:
        raise SettingsError(f"the address of the database cannot be understood: {exc}") from exc


def _cut_off(connection: Any) -> None:
    with suppress(asyncpg.InterfaceError):  # the driver has done it already
        connection.terminate()


async def _close(pool: Any, seconds: float) -> None:
    """Close once every connection is released; after the timeout, or when cancelled, cut off what is left."""
    try:
        async with asyncio.timeout(seconds):
            await pool.close()
    except _DOWN:
        pass
    finally:
        pool.terminate()


async def _keep_session(_: Any) -> None:
    """Our sessions change no session state, so a connection goes back to the pool without a round trip."""


def _is_lost_connection(exc: BaseException) -> bool:
    return any(word in str(exc) for word in ("closed", "closing", "released", "terminated", "not acquired"))
