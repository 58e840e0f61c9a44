"""From publish to run: batches of 100 over HTTP, until every event's run exists, or has succeeded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple

import asyncpg

from bench import neighbours, workload
from bench.client import Job
from bench.rate import Rate
from bench.stage import Stage, prepared, publish
from tidegate.flow import control
from tidegate.model.source import RateLimit
from tidegate.store.db import Database

BATCH = 100
CONNECTIONS = 8
WARM_UP = 1000
# Long enough for any machine: a worker that fails must not make the benchmark wait for ever.
STALLED_SECONDS = 300
# For workers beside a history that is older than they would keep it.
KEEP_ALL = {"TIDEGATE_RETENTION_EVENTS_SECONDS": "0"}


LISTENING = "select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'"


class Numbers(NamedTuple):
    """The number of the first event, how many come before the clock starts, and how many after."""

    first: int
    warm_up: int
    events: int


class Goal(NamedTuple):
    """The application whose worker runs, whether nothing is left to do, and how many runs got there."""

    application: str
    is_reached: str
    runs: str


# An event leaves the inbox in the transaction that creates its run, so once all are accepted, empty means done.
LAUNCHED = Goal(
    application="nothing",
    is_reached="select not exists (select from tidegate.event_inbox)",
    runs="select count(*) from tidegate.workflow_runs",
)
SUCCEEDED = Goal(
    application="one_step",
    is_reached="""
select not exists (select from tidegate.event_inbox)
   and not exists (select from tidegate.workflow_runs where status = 'pending')
   and not exists (select from tidegate.workflow_runs where status = 'running')
""",
    runs="select count(*) from tidegate.workflow_runs where status = 'succeeded'",
)


async def measure(
    stage: Stage,
    events: int,
    prepare: Callable[[str], Awaitable[None]] | None = None,
    *,
    runs_per_event: int = 1,
    warm_up: int = WARM_UP,
    goal: Goal = LAUNCHED,
    workers: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Rate:
    """From the first request to the last run that reaches the goal, in a database of its own.

    `prepare` is given the database's address before the workers start; `environment` is added to that of all processes.
    """
    async with stage.database() as url:
        if prepare is not None:
            await prepare(url)
        return await measure_on(
            stage, url, Numbers(0, warm_up, events), runs_per_event, goal=goal, workers=workers, environment=environment
        )


async def measure_on(
    stage: Stage,
    url: str,
    numbers: Numbers,
    runs_per_event: int = 1,
    *,
    goal: Goal = LAUNCHED,
    workers: int = 1,
    environment: Mapping[str, str] | None = None,
) -> Rate:
    """The same in a database that is there; nothing of the goal's may be left undone in it."""
    first, warm_up, events = numbers
    # So that to look costs the same at the end as at the beginning: by index.
    watcher = await asyncpg.connect(url, server_settings={"enable_seqscan": "off"})
    try:
        before = await watcher.fetchval(goal.runs)
        async with stage.running(url, goal.application, workers, environment) as port:
            if workers > 1:  # one is ready when it has done the warm-up
                await reached(watcher, f"select ({LISTENING}) >= {workers}")
            job = partial(Job, port=port, batch=BATCH, connections=CONNECTIONS)
            publish(job(first=first, events=warm_up))
            await reached(watcher, goal.is_reached)
            with prepared(job(first=first + warm_up, events=events)) as go, neighbours.watched() as others:
                sent = go()
                await reached(watcher, goal.is_reached)
                ended_at = time.monotonic()
            found, expected = await watcher.fetchval(goal.runs) - before, (warm_up + events) * runs_per_event
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
    await until(partial(watcher.fetchval, question))


async def until(is_done: Callable[[], Awaitable[bool]]) -> None:
    """Wait until it is."""
    try:
        async with asyncio.timeout(STALLED_SECONDS):
            while not await is_done():  # noqa: ASYNC110 - what is waited for is in another process
                await asyncio.sleep(0.01)
    except TimeoutError as exc:
        raise RuntimeError(f"the worker left something undone for {STALLED_SECONDS} s") from exc
