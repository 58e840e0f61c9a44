"""Transactions in which users' functions run: what a function writes and the result of its step are one commit.

The step is written last, in the same transaction, and only if the worker still holds the run (`write`): what a worker
that has lost its claim has written is rolled back. The run is locked for those two statements only, so a function may
take longer than a lease. A commit that was not answered is settled by the step's row (`Transactions.settled`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import asyncpg

from tidegate.model.step import StepWrite
from tidegate.store.connect import Connector, Session, session_settings
from tidegate.store.db import GRACE_SECONDS, RELEASE_SECONDS, STATEMENT_SECONDS, Row, translated
from tidegate.store.sql import load

_sql = load("transactions")

# How long a transaction may take if nothing else is said; below the shortest usual lease.
DEFAULT_SECONDS = 10.0
MAX_SECONDS = 3600.0
IDLE_SECONDS = 300
# What a function may have left in its session; DISCARD ALL would also forget the driver's prepared statements.
_RESET = (
    "set session authorization default; select pg_advisory_unlock_all(); close all; unlisten *; discard temp; "
    "discard sequences; reset all"
)


class CommitVerdict(NamedTuple):
    """Whether a step was written; if not, why: the claim is lost, the run is to be cancelled, the function has ended
    the transaction itself, or the step was done before."""

    is_held: bool
    is_cancel_requested: bool = False
    is_whole: bool = True
    is_written: bool = False


class StoredStep(NamedTuple):
    """A step's row."""

    status: str
    result: Any


class Bounds(NamedTuple):
    """How long a transaction may take, and the mark by which it is recognised."""

    seconds: float
    mark: str

    @property
    def settings(self) -> tuple[str, str, str]:
        """The parameters of the statement `begin`. The server ends a transaction slightly later than the worker."""
        ms = max(1, round(self.seconds * 1000))
        return f"{ms}ms", f"{ms + round(GRACE_SECONDS * 1000)}ms", self.mark


def parameters(write: StepWrite, bounds: Bounds) -> tuple[str, str, int, str, str | None, int, str]:
    """The parameters of the statement `write`, in types that every driver has."""
    return (
        str(write.id), str(write.workflow_run_id), write.claim_generation, write.name, write.result,
        write.retry_attempts, bounds.mark,
    )  # fmt: skip


def verdict(row: Row | Sequence[bool] | None) -> CommitVerdict:
    """What the statement `write` returned."""
    return CommitVerdict(False) if row is None else CommitVerdict(True, *row)


class FunctionTransaction:
    """The transaction of an `async def` function, which is given `connection`."""

    def __init__(self, connection: Any, transaction: Any, bounds: Bounds) -> None:
        self.connection = connection
        self._transaction = transaction
        self._bounds = bounds
        self.is_over = False

    async def write(self, step: StepWrite) -> CommitVerdict:
        """Write that the step succeeded."""
        async with translated():
            return verdict(await self.connection.fetchrow(_sql["write"], *parameters(step, self._bounds)))

    async def commit(self) -> None:
        """After an exception it is not known whether it was committed (see `settled`)."""
        async with translated(), asyncio.timeout(STATEMENT_SECONDS + GRACE_SECONDS):
            await self._transaction.commit()
        self.is_over = True

    async def leave(self) -> None:
        """Roll back, unless it was committed. Never fails: to be cut off rolls back, too."""
        if self.is_over:
            return
        self.is_over = True
        try:
            async with asyncio.timeout(RELEASE_SECONDS):
                await self._transaction.rollback()
        except BaseException as exc:
            with suppress(asyncpg.InterfaceError):
                self.connection.terminate()
            if not isinstance(exc, Exception):
                raise


class Transactions:
    """At most `size` connections at a time for the transactions of users' functions, apart from the worker's own."""

    def __init__(self, url: str, size: int) -> None:
        self.url = url
        self._size = size
        self._pool: Any = None
        self._connector: Connector | None = None
        self._slots = asyncio.Semaphore(size)

    async def take_slot(self) -> None:
        """Wait until fewer than `size` transactions are in progress; `free_slot` when this one is over."""
        await self._slots.acquire()

    def free_slot(self) -> None:
        """A transaction is over."""
        self._slots.release()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """A slot while the block lasts."""
        async with self._slots:
            yield

    @asynccontextmanager
    async def begin(self, bounds: Bounds) -> AsyncIterator[FunctionTransaction]:
        """A transaction; rolled back at the end of the block, unless it was committed. Unavailable when there is no
        connection. Called inside `slot`."""
        async with self._begun(bounds) as begun:
            try:
                yield begun
            finally:
                await begun.leave()

    async def settled(self, step: StepWrite) -> StoredStep | None:
        """The step's row, once no transaction can be writing it; None: nothing was committed. Called inside `slot`."""
        async with self._begun(Bounds(STATEMENT_SECONDS, "")) as begun:
            try:
                async with translated():
                    await begun.connection.execute(_sql["lock_run"], step.workflow_run_id)
                    row = await begun.connection.fetchrow(_sql["stored"], step.id)
            finally:
                await begun.leave()
        return StoredStep(*row) if row else None

    @asynccontextmanager
    async def probe(self) -> AsyncIterator[int]:
        """Hold a lock that only sessions of this database see, while the block lasts; its number."""
        number = random.getrandbits(62)
        async with self.begin(Bounds(STATEMENT_SECONDS, "")) as begun:
            async with translated():
                await begun.connection.execute(_sql["begin_probe"], number)
            yield number

    async def close(self) -> None:
        """Close the connections; those in use are cut off, which rolls back."""
        if self._pool is not None:
            pool, self._pool = self._pool, None
            pool.terminate()

    @asynccontextmanager
    async def _begun(self, bounds: Bounds) -> AsyncIterator[FunctionTransaction]:
        pool = await self._opened()
        while True:
            async with translated(), asyncio.timeout(STATEMENT_SECONDS):
                connection = await pool.acquire()
            try:
                begun = await self._start(connection, bounds)
                if begun is None:
                    continue
                yield begun
                return
            finally:
                with suppress(Exception):  # then it is closed, and what was committed is committed
                    await pool.release(connection, timeout=RELEASE_SECONDS)

    async def _start(self, connection: Any, bounds: Bounds) -> FunctionTransaction | None:
        """Begin; None when an idle connection turns out to be dead, and another is to be tried."""
        try:
            async with translated(), asyncio.timeout(STATEMENT_SECONDS + GRACE_SECONDS):
                transaction = connection.transaction()
                await transaction.start()
                if connection.is_pooled:
                    await connection.execute(connection.local_settings)
                await connection.execute(_sql["begin"], *bounds.settings)
        except BaseException as exc:
            with suppress(asyncpg.InterfaceError):
                connection.terminate()
            if not connection.is_used or not isinstance(exc, Exception):
                raise
            return None
        return FunctionTransaction(connection, transaction, bounds)

    async def _opened(self) -> Any:
        if self._pool is None:
            async with translated():
                settings = session_settings("transaction", round(DEFAULT_SECONDS * 1000), DEFAULT_SECONDS)
                # Statements of functions are bounded by the transaction's own time, on both sides.
                self._connector = Connector(self.url, settings, MAX_SECONDS + GRACE_SECONDS)
                self._pool = await asyncpg.create_pool(
                    min_size=0, max_size=self._size, max_inactive_connection_lifetime=IDLE_SECONDS,
                    connect=self._connect, connection_class=Session, reset=_reset,
                )  # fmt: skip
        return self._pool

    async def _connect(self, *_: object, **__: object) -> Session:
        assert self._connector is not None
        return await self._connector.connect()


async def _reset(connection: Session) -> None:
    """Nothing that a function has set in its session reaches the next one. A pooler has its own way to do so."""
    connection.is_used = True
    if not connection.is_pooled:
        await connection.execute(_RESET)
        await connection.set_up_again()
