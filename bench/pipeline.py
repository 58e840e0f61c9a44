"""From publish to run: batches of 100 over HTTP, until every event's run exists."""

from __future__ import annotations

import asyncio
import time

import asyncpg

from bench.client import Job
from bench.stage import Stage, publish

BATCH = 100
CONNECTIONS = 8
WARM_UP = 1000

# An event leaves the inbox in the transaction that creates its run, so once all are accepted, empty means done.
_IS_DONE = "select not exists (select from headgate.event_inbox)"
_RUNS = "select count(*) from headgate.workflow_runs"


async def measure(stage: Stage, events: int) -> float:
    """Events per second from the first request to the last run. The worker creates runs and executes none."""
    async with stage.database() as url, stage.api(url) as port:
        with stage.worker(url, "nothing"):
            watcher = await asyncpg.connect(url)
            try:
                publish(Job(port=port, first=0, events=WARM_UP, batch=BATCH, connections=CONNECTIONS))
                await _drained(watcher)
                sent = publish(Job(port=port, first=WARM_UP, events=events, batch=BATCH, connections=CONNECTIONS))
                await _drained(watcher)
                ended_at = time.monotonic()
                found = await watcher.fetchval(_RUNS)
                if found != WARM_UP + events:
                    raise RuntimeError(f"{WARM_UP + events} events were accepted, but {found} runs exist")
            finally:
                await watcher.close()
    return events / (ended_at - sent.started_at)


async def _drained(watcher: asyncpg.Connection) -> None:
    while not await watcher.fetchval(_IS_DONE):  # noqa: ASYNC110 - the event is in the database
        await asyncio.sleep(0.01)
