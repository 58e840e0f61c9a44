"""The yardsticks: other queues, from the first enqueue until every job is handled. Those on Postgres use the same
server, each in a database of its own; BullMQ has a Redis."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
from redis import asyncio as redis

from bench import bullmq_side, neighbours, pipeline, redis_server
from bench.client import Enqueue
from bench.rate import Rate
from bench.stage import ROOT, Stage, prepared

OTHERS = Path(sys.prefix) / "others" / "bin" / "python"


class Yardstick(NamedTuple):
    """A queue on Postgres: whether nothing is left to do, and how many jobs were handled."""

    package: str
    is_empty: str
    handled: str


PGQUEUER = Yardstick(
    package="pgqueuer",
    # A job leaves the queue when it is logged as handled.
    is_empty="select not exists (select from pgqueuer)",
    handled="select count(*) from pgqueuer_log where status = 'successful'",
)
PROCRASTINATE = Yardstick(
    package="procrastinate",
    is_empty="""
select not exists (select from procrastinate_jobs where status = 'todo')
   and not exists (select from procrastinate_jobs where status = 'doing')
""",
    handled="select count(*) from procrastinate_jobs where status = 'succeeded'",
)


def version(package: str, python: Path = OTHERS) -> str:
    """Which version it is; RuntimeError when it is not installed."""
    if not python.exists():
        raise RuntimeError(f"{package} is not installed in {python.parents[1]}; `make bench` installs it")
    code = f"from importlib.metadata import version; print(version('{package}'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


async def measure(stage: Stage, yardstick: Yardstick, jobs: int, warm_up: int) -> Rate:
    """A queue on Postgres."""
    command = [str(OTHERS), "-m", f"bench.{yardstick.package}_side"]
    async with stage.database() as url:
        subprocess.run([*command, "install", url], cwd=ROOT, check=True)
        # By index, as for Tidegate: the rows that it has handled lie before those that are left.
        watcher = await asyncpg.connect(url, server_settings={"enable_seqscan": "off"})
        try:
            return await _measured(
                stage,
                command,
                url,
                jobs,
                warm_up,
                is_empty=partial(watcher.fetchval, yardstick.is_empty),
                handled=partial(watcher.fetchval, yardstick.handled),
                # Statistics, as the server makes them within minutes: without, a function may keep the plan that it
                # made for an empty table.
                settle=partial(watcher.execute, "vacuum analyze"),
            )
        finally:
            await watcher.close()


async def measure_bullmq(stage: Stage, jobs: int, warm_up: int) -> Rate:
    """BullMQ on a Redis that keeps what it is told."""
    command = [sys.executable, "-m", "bench.bullmq_side"]
    key = f"bull:{bullmq_side.QUEUE}"
    with redis_server.started(stage) as url:
        watcher = redis.Redis.from_url(url)

        async def is_empty() -> bool:
            counts = [await watcher.llen(f"{key}:{state}") for state in ("wait", "active")]
            return counts == [0, 0]

        async def handled() -> int:
            return int(await watcher.zcard(f"{key}:completed"))

        try:
            return await _measured(stage, command, url, jobs, warm_up, is_empty=is_empty, handled=handled)
        finally:
            await watcher.aclose()


async def _measured(
    stage: Stage,
    command: list[str],
    url: str,
    jobs: int,
    warm_up: int,
    *,
    is_empty: Callable[[], Awaitable[bool]],
    handled: Callable[[], Awaitable[int]],
    settle: Callable[[], Awaitable[Any]] | None = None,
) -> Rate:
    """One process enqueues in batches over several connections, another one handles."""
    with stage.program(command[-1], [*command, "work", url], ROOT, os.environ):
        job = partial(Enqueue, url=url, batch=pipeline.BATCH, connections=pipeline.CONNECTIONS)
        with prepared(job(first=0, events=warm_up), [*command, "enqueue"]) as go:
            go()
        await pipeline.until(is_empty)
        if settle is not None:
            await settle()
        again = prepared(job(first=warm_up, events=jobs), [*command, "enqueue"])
        with again as go, neighbours.watched() as others:
            started_at = go().started_at
            await pipeline.until(is_empty)
            ended_at = time.monotonic()
        if (count := await handled()) != warm_up + jobs:
            raise RuntimeError(f"{warm_up + jobs} jobs were enqueued, but {count} handled")
    return Rate(round(jobs / (ended_at - started_at), 1), others.our_us(jobs), others.cores)
