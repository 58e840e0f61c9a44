"""From publish to run: batches of 100 over HTTP, until every event's run exists, or has succeeded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import asyncpg

from bench import neighbours, workload
from bench.client import Job
from bench.rate import Rate
from bench.stage import Stage, prepared, publish
from headgate.flow import control
from headgate.model.source import RateLimit
from headgate.store.db import Database

BATCH = 100
CONNECTIONS = 8
WARM_UP = 1000
# Long enough for any machine: a worker that fails must not make the benchmark wait for ever.
STALLED_SECONDS = 300


class Goal(NamedTuple):
    """The application whose worker runs, whether nothing is left to do, and how many runs got there."""

    application: str
    is_reached: str
    runs: str


# An event leaves the inbox in the transaction that creates its run, so once all are accepted, empty means done.
LAUNCHED = Goal(
    application="nothing",
    is_reached="select not exists (select from headgate.event_inbox)",
    runs="select count(*) from headgate.workflow_runs",
)
SUCCEEDED = Goal(
    application="one_step",
    is_reached="""
select not exists (select from headgate.event_inbox)
   and not exists (select from headgate.workflow_runs where status = 'pending')
   and not exists (select from headgate.workflow_runs where status = 'running')
""",
    runs="select count(*) from headgate.workflow_runs where status = 'succeeded'",
)


async def measure(
    stage: Stage,
    events: int,
    prepare: Callable[[str], Awaitable[None]] | None = None,
    *,
    runs_per_event: int = 1,
    warm_up: int = WARM_UP,
    goal: Goal = LAUNCHED,
) -> Rate:
    """From the first request to the last run that reaches the goal.

    `prepare` is given the database's address before the worker starts.
    """
    async with stage.database() as url, stage.api(url) as port:
        if prepare is not None:
            await prepare(url)
        with stage.worker(url, goal.application):
            # So that to look costs the same at the end as at the beginning: by index.
            watcher = await asyncpg.connect(url, server_settings={"enable_seqscan": "off"})
            try:
                job = partial(Job, port=port, batch=BATCH, connections=CONNECTIONS)
                publish(job(first=0, events=warm_up))
                await reached(watcher, goal.is_reached)
                with prepared(job(first=warm_up, events=events)) as go, neighbours.watched() as others:
                    sent = go()
                    await reached(watcher, goal.is_reached)
                    ended_at = time.monotonic()
                found, expected = await watcher.fetchval(goal.runs), (warm_up + events) * runs_per_event
                if found != expected:
                    raise RuntimeError(f"{warm_up + events} events were accepted, but {found} runs got there")
            finally:
                await watcher.close()
    return Rate(round(events / (ended_at - sent.started_at), 1), others.our_us(events), others.cores)


async def set_limit(url: str, limit: RateLimit) -> None:
    """A limit for the source of every event."""
    database = Database(url, "bench", size=1)
    try:
        await control.set_limit(database, workload.SOURCE, limit, "bench")
    finally:
        await database.close()


async def reached(watcher: asyncpg.Connection, question: str) -> None:
    """Wait until the question is answered with yes."""
    try:
        async with asyncio.timeout(STALLED_SECONDS):
            while not await watcher.fetchval(question):  # noqa: ASYNC110 - the event is in the database
                await asyncio.sleep(0.01)
    except TimeoutError as exc:
        raise RuntimeError(f"the worker left something undone for {STALLED_SECONDS} s") from exc
