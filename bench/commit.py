"""What one commit costs here: a row inserted and flushed to disk, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import asyncpg

from bench.latency import Latency, latency
from bench.stage import Stage

_TABLE = "create table bench_commit (number bigint primary key)"
_INSERT = "insert into bench_commit values ($1)"
_FLUSHED = {"synchronous_commit": "on"}


async def measure(stage: Stage, commits: int) -> Latency:
    """The latency of single-row insert commits on one connection."""
    async with stage.database() as url:
        connection = await asyncpg.connect(url, server_settings=_FLUSHED)
        try:
            await connection.execute(_TABLE)
            statement = await connection.prepare(_INSERT)
            taken_ms = []
            for number in range(commits):
                started_at = time.monotonic()
                await statement.fetch(number)
                taken_ms.append((time.monotonic() - started_at) * 1000)
            return latency(taken_ms)
        finally:
            await connection.close()


async def measure_many(stage: Stage, commits: int, connections: int) -> tuple[float, Latency]:
    """Commits a second, and how long each takes, when so many connections each wait for theirs."""
    left, taken_ms = iter(range(commits)), []

    async def insert_all(statement: Any) -> None:
        for number in left:
            began_at = time.monotonic()
            await statement.fetch(number)
            taken_ms.append((time.monotonic() - began_at) * 1000)

    async with stage.database() as url, contextlib.AsyncExitStack() as stack:
        statements = []
        for n in range(connections):
            connection = await asyncpg.connect(url, server_settings=_FLUSHED)
            stack.push_async_callback(connection.close)
            if n == 0:
                await connection.execute(_TABLE)
            statements.append(await connection.prepare(_INSERT))
        started_at = time.monotonic()
        await asyncio.gather(*map(insert_all, statements))
        return round(commits / (time.monotonic() - started_at), 1), latency(taken_ms)


def lines(found: Latency) -> list[tuple[str, str]]:
    """The figure for people."""
    return [("one commit", f"p50 {found.p50_ms:.2f} ms, p99 {found.p99_ms:.2f} ms")]
