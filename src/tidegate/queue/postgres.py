"""Hints by LISTEN/NOTIFY. They are sent after the commit and never in the transaction that stores an event: a NOTIFY
takes a lock that all notifying commits of the database share."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tidegate.clock import monotonic
from tidegate.errors import Unavailable
from tidegate.queue.port import TOPICS, Topic, Wakeup
from tidegate.store.connect import OTHER_DATABASE, NoSession, is_set
from tidegate.store.db import Database
from tidegate.telemetry.logs import logger

_MIN_GAP_SECONDS = 0.005
# A hint may be lost if the server crashes: it is not worth a flush to disk, which would also delay other commits.
_UNFLUSHED = "set local synchronous_commit = off"
_RECONNECT_SECONDS = 1.0
# How often a listener checks that its connection still answers.
_ALIVE_SECONDS = 10.0
# How long an answer about poolers is believed, and until it is tried again to listen behind one that keeps no sessions.
_POOLING_SECONDS = 300.0
_log = logger("queue")


class PostgresQueue:
    """Sends and receives hints on channels `tidegate_<topic>`."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._wanted: set[Topic] = set()
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._trouble: str | None = None
        self._asks_at = 0.0
        self._wakes: dict[Topic, asyncio.Event] = {topic: asyncio.Event() for topic in TOPICS}

    @property
    def holds_wakeups(self) -> bool:
        """False: the rows themselves are the wake-ups."""
        return False

    def wake(self, topic: Topic) -> asyncio.Event:
        """Set whenever there may be work on the topic; a waiter clears it before it checks for work."""
        return self._wakes[topic]

    def hint(self, topic: Topic) -> None:
        """Announce that there is work; returns immediately and never raises. Hints close together are merged."""
        self._wakes[topic].set()
        self._wanted.add(topic)
        if self._sender is None:
            self._sender = asyncio.create_task(self._send())

    def schedule(self, wakeups: Sequence[Wakeup]) -> None:
        """Workers poll for due rows; this worker recomputes when the next row is due."""
        for topic in {wakeup.topic for wakeup in wakeups}:
            self._wakes[topic].set()

    async def missing(self, wakeups: Sequence[Wakeup]) -> list[Wakeup]:
        """Always empty: this queue stores nothing."""
        return []

    async def trouble(self) -> str | None:
        """Why hints do not arrive, asked now and then: behind a pooler that keeps no sessions nobody can listen."""
        if monotonic() >= self._asks_at:
            try:
                self._trouble = (await self._database.pooling()).lacking
            except Unavailable:  # which concerns more than hints
                return self._trouble
            self._asks_at = monotonic() + _POOLING_SECONDS
        return self._trouble

    def start_listening(self) -> None:
        self._listener = asyncio.create_task(self._listen())

    async def close(self) -> None:
        for task in (self._listener, self._sender):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        self._listener = self._sender = None

    async def _send(self) -> None:
        try:
            while self._wanted:
                topics, self._wanted = self._wanted, set()
                try:
                    async with self._database.connection(wait_seconds=1) as connection:
                        await connection.execute("; ".join((_UNFLUSHED, *(f"notify tidegate_{t}" for t in topics))))
                except Exception as exc:  # noqa: BLE001 - a lost hint costs latency: workers poll
                    _log.debug("queue.hint_lost", error=exc)  # the next poll finds the rows
                await asyncio.sleep(_MIN_GAP_SECONDS)
        finally:
            self._sender = None

    async def _listen(self) -> None:
        while True:
            connection: Any = None
            seconds = _RECONNECT_SECONDS
            try:
                connection = await self._database.dedicated()
                if not await self._database.hears(connection):
                    raise NoSession(OTHER_DATABASE)
                lost = asyncio.Event()
                connection.add_termination_listener(lambda _, lost=lost: lost.set())
                for topic in TOPICS:
                    await connection.add_listener(f"tidegate_{topic}", self._received)
                for wake in self._wakes.values():  # there may be work that was announced before we listened
                    wake.set()
                while not await is_set(lost, _ALIVE_SECONDS):
                    await connection.execute(f"listen tidegate_{TOPICS[0]}")  # only to see if the server answers
                _log.warning("queue.listener_lost")
            except NoSession as exc:  # workers continue to poll
                _log.warning("queue.listener_deaf", error=exc)
                seconds = _POOLING_SECONDS
            except Exception as exc:  # noqa: BLE001 - workers continue to poll
                _log.warning("queue.listener_unavailable", error=exc)
            finally:
                if connection is not None and not connection.is_closed():
                    connection.terminate()
            await asyncio.sleep(seconds)

    def _received(self, _: object, __: int, channel: str, ___: str) -> None:
        for topic in TOPICS:
            if channel == f"tidegate_{topic}":
                self._wakes[topic].set()
