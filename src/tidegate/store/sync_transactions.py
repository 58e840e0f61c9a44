"""The transactions of synchronous functions: on a connection of psycopg 3, or of the user's own SQLAlchemy engine.

Called in the thread of the function. The statements are those of `transactions`, so that a function's writes and its
step are one commit here, too. Both libraries are optional.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

from tidegate.errors import NonRetryable, Unavailable
from tidegate.model.step import StepWrite
from tidegate.store.connect import CONNECT_SECONDS
from tidegate.store.sql import load
from tidegate.store.transactions import Bounds, CommitVerdict, Transactions, parameters, verdict

_sql = load("transactions")

# Drivers of SQLAlchemy whose parameters are written in the way of `_of_driver`.
DRIVERS = ("psycopg", "psycopg2")
# A server that is gone is noticed.
_KEEP_ALIVE: dict[str, Any] = {
    "keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000,
}  # fmt: skip

# The engines that lead to Tidegate's own database.
_proven: weakref.WeakSet[Any] = weakref.WeakSet()


class _Cursor(Protocol):
    def fetchone(self) -> Sequence[bool] | None: ...


class BlockingTransaction:
    """The transaction of a synchronous function, which is given `connection`."""

    def __init__(self, connection: Any, bounds: Bounds, *, is_engine: bool) -> None:
        self.connection = connection
        self._bounds = bounds
        self._is_engine = is_engine
        self._execute("begin", bounds.settings)

    def write(self, step: StepWrite) -> CommitVerdict:
        """Write that the step succeeded."""
        if self.is_closed:
            return CommitVerdict(True, is_whole=False)
        row = self._execute("write", parameters(step, self._bounds)).fetchone()
        return verdict(None if row is None else tuple(row))

    def probe(self, number: int) -> tuple[bool, ...]:
        """Whether this is the database in which the lock is held, whether its schema can be used, and whether this is
        a transaction."""
        return tuple(self._execute("probe", (number, self._bounds.mark)).fetchone() or (False, False, False))

    @property
    def is_closed(self) -> bool:
        """Whether the function has closed the connection, which may have committed."""
        is_lost = self.connection.invalidated if self._is_engine else self.connection.broken
        return bool(self.connection.closed and not is_lost)

    def commit(self) -> None:
        """After an exception it is not known whether it was committed."""
        self.connection.commit()

    def _execute(self, name: str, values: Sequence[object]) -> _Cursor:
        named = {f"p{i}": value for i, value in enumerate(values, 1)}
        run = self.connection.exec_driver_sql if self._is_engine else self.connection.execute
        found: _Cursor = run(_of_driver(name), named)
        return found


@contextmanager
def begin(transactions: Transactions, engine: Any, bounds: Bounds) -> Iterator[BlockingTransaction]:
    """A transaction on the engine, or else on a connection of our own; rolled back at the end of the block, unless it
    was committed. Unavailable when there is no connection."""
    connection = _connected(transactions.url) if engine is None else engine.connect()
    try:
        yield BlockingTransaction(connection, bounds, is_engine=engine is not None)
    finally:
        connection.close()  # rolls back


def check_engine(engine: Any) -> None:
    """NonRetryable when it is no engine that a synchronous function can use."""
    dialect = getattr(engine, "dialect", None)
    if dialect is None or not hasattr(engine, "connect") or getattr(dialect, "is_async", False):
        kind = type(engine).__name__
        raise NonRetryable(f"engine must be an Engine of SQLAlchemy (create_engine), not {kind}: async functions get "
                           "a connection of asyncpg, without engine")  # fmt: skip
    if dialect.name != "postgresql" or dialect.driver not in DRIVERS:
        raise NonRetryable(f"engine uses {dialect.name}+{dialect.driver}; a transaction needs postgresql+psycopg or "
                           "postgresql+psycopg2")  # fmt: skip


def is_proven(engine: Any) -> bool:
    """Whether `prove` has accepted the engine before."""
    return engine in _proven


def prove(transactions: Transactions, engine: Any, number: int, bounds: Bounds) -> None:
    """NonRetryable unless the engine leads to the database that holds the lock (`Transactions.probe`) and may use
    Tidegate's schema there."""
    with begin(transactions, engine, bounds) as begun:
        is_same, is_allowed, is_transaction = begun.probe(number)
    if not is_same:
        raise NonRetryable(
            f"engine leads to another database ({engine.url.render_as_string()}) than TIDEGATE_DATABASE_URL: its "
            "writes and the step could not be one commit. Use an engine for the same database"
        )
    if not is_allowed:
        raise NonRetryable(
            f"the role of engine ({engine.url.username}) may not use Tidegate's tables, in which the step is written: "
            f"run `tidegate migrate --grant-to {engine.url.username}`"
        )
    if not is_transaction:
        raise NonRetryable("engine is in autocommit mode (isolation_level), in which nothing is one commit")
    _proven.add(engine)


def _connected(url: str) -> Any:
    try:
        import psycopg
    except ImportError as exc:
        raise NonRetryable(
            "ctx.transaction with a synchronous function needs psycopg 3: install it, or the extra `psycopg` of "
            f"Tidegate (docs/installing.md), or make the function async def, which gets a connection of asyncpg ({exc})"
        ) from exc
    try:
        # Behind a pooler a prepared statement may be in another session than the transaction.
        return psycopg.connect(
            url, autocommit=False, prepare_threshold=None, connect_timeout=round(CONNECT_SECONDS),
            application_name="tidegate-transaction", **_KEEP_ALIVE,
        )  # fmt: skip
    except psycopg.OperationalError as exc:
        raise Unavailable(f"the database cannot be reached: {exc}") from exc


@cache
def _of_driver(name: str) -> str:
    """A statement with parameters as psycopg writes them."""
    return re.sub(r"\$(\d+)", r"%(p\1)s", _sql[name].replace("%", "%%"))
