"""The pool, transactions, and the translation of driver errors. The driver is imported here and nowhere above."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import asyncpg
import msgspec

from tidegate.errors import SettingsError, Unavailable

T = TypeVar("T")

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
    except asyncpg.ClientConfigurationError as exc:
        raise SettingsError(f"TIDEGATE_DATABASE_URL cannot be understood: {exc}") from exc
    except _MISCONFIGURED as exc:
        raise SettingsError(f"TIDEGATE_DATABASE_URL does not work: {exc}") from exc
    except _DOWN as exc:
        if isinstance(exc, asyncpg.InterfaceError) and not _is_lost_connection(exc):
            raise
        raise Unavailable(f"the database cannot be reached: {exc or type(exc).__name__}") from exc


def is_data_error(exc: BaseException) -> bool:
    """Whether the database or driver refused the data itself: the same rows will fail again."""
    return isinstance(
        exc, asyncpg.DataError | asyncpg.IntegrityConstraintViolationError | asyncpg.ProgramLimitExceededError
    )


class Database:
    """A pool of connections for one role of the process (`ingest`, `worker`, `api`)."""

    def __init__(self, url: str, role: str, size: int, lock_timeout_ms: int = 2000) -> None:
        self.url = url
        self.role = role
        self._size = size
        self._session = _session_settings(role, lock_timeout_ms)
        self._pool: Any = None
        self._opening = asyncio.Lock()

    async def open(self) -> Database:
        async with self._opening:
            if self._pool is None:
                async with translated():
                    self._pool = await asyncpg.create_pool(
                        self.url,
                        min_size=0,
                        max_size=self._size,
                        max_inactive_connection_lifetime=300,
                        init=_prepare_connection,
                        reset=_keep_session,
                        timeout=5,
                        server_settings=self._session,
                    )
        return self

    async def close(self) -> None:
        if self._pool is not None:
            pool, self._pool = self._pool, None
            try:
                await asyncio.wait_for(pool.close(), 5)
            except (TimeoutError, *_DOWN):
                pool.terminate()

    @asynccontextmanager
    async def connection(self, wait_seconds: float = 5) -> AsyncIterator[Connection]:
        """A connection outside any transaction: each statement is one of its own."""
        async with translated(), self._acquired(wait_seconds) as connection:
            yield connection

    @asynccontextmanager
    async def transaction(self, wait_seconds: float = 5) -> AsyncIterator[Connection]:
        """One transaction: committed when the block ends, rolled back when it raises."""
        async with translated(), self._acquired(wait_seconds) as connection, connection.transaction():
            yield connection

    @asynccontextmanager
    async def _acquired(self, wait_seconds: float) -> AsyncIterator[Any]:
        if self._pool is None:
            await self.open()
        pool = self._pool  # which `close` takes away while connections are still out
        async with asyncio.timeout(wait_seconds):  # the pool's own time limit costs a task each time
            connection = await pool.acquire()
        try:
            yield connection
        except asyncpg.InternalClientError:
            # A dying server left it in the middle of something: it must not go back to the pool.
            connection.terminate()
            raise
        finally:
            await pool.release(connection)

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

    async def dedicated(self) -> Any:
        """A connection of its own, outside the pool (LISTEN); the caller closes it."""
        async with translated():
            connection = await asyncpg.connect(self.url, timeout=5, server_settings=self._session)
            await _prepare_connection(connection)
            return connection


def _session_settings(role: str, lock_timeout_ms: int) -> dict[str, str]:
    return {
        "application_name": f"tidegate-{role}",
        "timezone": "UTC",
        # An acknowledged event is on disk: whatever the server's default is, our commits wait for the flush.
        "synchronous_commit": "on",
        "statement_timeout": "15s",
        "lock_timeout": f"{lock_timeout_ms}ms",
        "idle_in_transaction_session_timeout": "60s",
        "jit": "off",
        # Statements are prepared once; planning one anew costs more than running it. Only lists, whose filters may be
        # null, are better off with a plan of their own.
        "plan_cache_mode": "auto" if role == "api" else "force_generic_plan",
    }


async def _prepare_connection(connection: Any) -> None:
    for kind in ("jsonb", "json"):
        await connection.set_type_codec(
            kind, schema="pg_catalog", encoder=_encode_json, decoder=msgspec.json.decode, format="text"
        )


async def _keep_session(_: Any) -> None:
    """Our sessions change no session state, so a connection goes back to the pool without a round trip."""


def _encode_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _is_lost_connection(exc: BaseException) -> bool:
    return any(word in str(exc) for word in ("closed", "closing", "released", "terminated", "not acquired"))
