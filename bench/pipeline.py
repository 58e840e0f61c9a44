"""From publish to run: batches of 100 over HTTP, until every event's run exists."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import asyncpg

from bench import neighbours, workload
from bench.client import Job
from bench.stage import Stage, publish
from headgate.flow import control
from headgate.model.source import RateLimit
from headgate.store.db import Database

BATCH = 100
CONNECTIONS = 8
WARM_UP = 1000
# Long enough for any machine: a worker that fails must not make the benchmark wait for ever.
STALLED_SECONDS = 60

# An event leaves the inbox in the transaction that creates its run, so once all are accepted, empty means done.
_IS_DONE = "select not exists (select from headgate.event_inbox)"
_RUNS = "select count(*) from headgate.workflow_runs"


class Rate(NamedTuple):
    """Events per second; the CPU that all our processes, Postgres and the load generator included, took for each; and
    the cores that others used. The last two are None where /proc does not tell."""

    per_second: float
    cpu_us: float | None
    neighbours: float | None


async def measure(
    stage: Stage,
    events: int,
    prepare: Callable[[str], Awaitable[None]] | None = None,
    *,
    runs_per_event: int = 1,
    warm_up: int = WARM_UP,
) -> Rate:
    """From the first request to the last run. The worker creates runs and executes none.

    `prepare` is given the database's address before the worker starts.
    """
    async with stage.database() as url, stage.api(url) as port:
        if prepare is not None:
            await prepare(url)
        with stage.worker(url, "nothing"):
            watcher = await asyncpg.connect(url)
            try:
                publish(Job(port=port, first=0, events=warm_up, batch=BATCH, connections=CONNECTIONS))
                await _drained(watcher)
                with neighbours.watched() as others:
                    sent = publish(Job(port=port, first=warm_up, events=events, batch=BATCH, connections=CONNECTIONS))
                    await _drained(watcher)
                    ended_at = time.monotonic()
                found, expected = await watcher.fetchval(_RUNS), (warm_up + events) * runs_per_event
                if found != expected:
                    raise RuntimeError(f"{warm_up + events} events were accepted, but {found} runs exist")
            finally:
                await watcher.close()
    cpu_us = None if others.our_seconds is None else round(others.our_seconds / events * 1_000_000, 1)
    return Rate(round(events / (ended_at - sent.started_at), 1), cpu_us, others.cores)


async def set_limit(url: str, limit: RateLimit) -> None:
    """A limit for the source of every event."""
    database = Database(url, "bench", size=1)
    try:
        await control.set_limit(database, workload.SOURCE, limit, "bench")
    finally:
        await database.close()


async def _drained(watcher: asyncpg.Connection) -> None:
    try:
        async with asyncio.timeout(STALLED_SECONDS):
            while not await watcher.fetchval(_IS_DONE):  # noqa: ASYNC110 - the event is in the database
                await asyncio.sleep(0.01)
    except TimeoutError as exc:
        raise RuntimeError(f"the worker left events undecided for {STALLED_SECONDS} s") from exc
