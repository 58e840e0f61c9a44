"""What one commit costs here: a row inserted and flushed to disk, one after the other."""

from __future__ import annotations

import time

import asyncpg

from bench.latency import Latency, latency
from bench.stage import Stage


async def measure(stage: Stage, commits: int) -> Latency:
    """The latency of single-row insert commits on one connection."""
    async with stage.database() as url:
        connection = await asyncpg.connect(url, server_settings={"synchronous_commit": "on"})
        try:
            await connection.execute("create table bench_commit (number bigint primary key)")
            statement = await connection.prepare("insert into bench_commit values ($1)")
            taken_ms = []
            for number in range(commits):
                started_at = time.monotonic()
                await statement.fetch(number)
                taken_ms.append((time.monotonic() - started_at) * 1000)
            return latency(taken_ms)
        finally:
            await connection.close()


def lines(found: Latency) -> list[tuple[str, str]]:
    """The figure for people."""
    return [("one commit", f"p50 {found.p50_ms:.2f} ms, p99 {found.p99_ms:.2f} ms")]
