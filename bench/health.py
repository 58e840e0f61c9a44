"""What a look at the cluster costs the database: one snapshot and one scrape, beside a long history and a long line.

A statement's time is what the server took to execute it, as EXPLAIN ANALYZE tells. Others on the machine make it
longer, so the CPU of the server's process for the same calls stands beside it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import asyncpg
import msgspec

from bench import history, neighbours
from bench.stage import Stage
from tidegate.flow.look import health
from tidegate.model.health import HEALTH

# Before a prepared statement keeps its plan, the server makes one for each of the first five calls.
WARM_UP = 6
_TICK_MS = 10


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """One way to look: the sum of its statements' times, the median and the least of all turns, and their CPU."""

    statements: int
    database_ms: float
    least_ms: float
    cpu_ms: float | None


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The snapshot and the scrape of one state of the tables."""

    snapshot: Look
    scrape: Look


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """As the rows were written, and after the vacuum that follows by itself."""

    events: int
    retries: int
    turns: int
    written: State
    settled: State
    neighbours: float | None


class Timed:
    """A connection that adds up how long the server takes to execute what it is asked."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.statements = 0
        self.ms = 0.0

    async def fetch(self, query: str, *args: Any) -> Any:
        await self._time(query, args)
        return await self._connection.fetch(query, *args)

    async def fetchrow(self, query: str, *args: Any) -> Any:
        await self._time(query, args)
        return await self._connection.fetchrow(query, *args)

    async def fetchval(self, query: str, *args: Any) -> Any:
        await self._time(query, args)
        return await self._connection.fetchval(query, *args)

    async def execute(self, query: str, *args: Any) -> Any:
        await self._time(query, args)
        return await self._connection.execute(query, *args)

    async def _time(self, query: str, args: tuple[Any, ...]) -> None:
        found = await self._connection.fetchval(f"explain (analyze, timing off, format json) {query}", *args)
        self.statements += 1
        self.ms += msgspec.json.decode(found)[0]["Execution Time"]


async def measure(stage: Stage, events: int, days: int, retries: int, turns: int) -> Health:
    """A history of so many finished events over so many days, and so many retries that wait."""
    url = await history.database(stage, events=events, retries=retries, days=days)
    connection = await asyncpg.connect(url, server_settings={"jit": "off", "timezone": "UTC"}, command_timeout=900)
    try:
        with neighbours.watched() as others:
            written = await _state(connection, turns)
            await history.settle(connection)
            settled = await _state(connection, turns)
    finally:
        await connection.close()
    return Health(
        events=events, retries=retries, turns=turns, written=written, settled=settled, neighbours=others.cores
    )


def lines(found: Health) -> list[tuple[str, str]]:
    """The figure for people."""
    return [
        (f"health beside {found.events:,} events", f"{_words(found.settled)}; {found.retries:,} wait"),
        ("  just written, not yet vacuumed", _words(found.written)),
        *neighbours.disturbed("health", [found.neighbours]),
    ]


async def _state(connection: Any, turns: int) -> State:
    return State(
        snapshot=await _look(connection, lambda given: health.snapshot(given, HEALTH), turns),
        scrape=await _look(connection, lambda given: health.shared_state(given, HEALTH), turns),
    )


async def _look(connection: Any, call: Callable[[Any], Awaitable[Any]], turns: int) -> Look:
    for _ in range(WARM_UP):
        await call(connection)
    process = await connection.fetchval("select pg_backend_pid()")
    before = _cpu_ms(process)
    for _ in range(turns):
        await call(connection)
    after = _cpu_ms(process)
    taken = [Timed(connection) for _ in range(turns)]
    for timed in taken:
        await call(timed)
    return Look(
        statements=taken[0].statements,
        database_ms=round(median(timed.ms for timed in taken), 1),
        least_ms=round(min(timed.ms for timed in taken), 1),
        cpu_ms=None if before is None or after is None else round((after - before) / turns, 1),
    )


def _words(state: State) -> str:
    def one(name: str, look: Look) -> str:
        cpu = "" if look.cpu_ms is None else f", CPU {look.cpu_ms:.0f}"
        return f"{name} {look.database_ms:.0f} ms (least {look.least_ms:.0f}{cpu})"

    return f"{one('snapshot', state.snapshot)}, {one('scrape', state.scrape)}"


def _cpu_ms(process: int) -> float | None:
    """The CPU that a server's process has taken; None where /proc does not tell."""
    try:
        text = Path(f"/proc/{process}/stat").read_text(encoding="ascii")
    except OSError:
        return None
    return sum(map(int, text.rpartition(")")[2].split()[11:13])) * _TICK_MS
