"""The yardstick's side: pgqueuer as its own documentation recommends. These programs run in its own environment, where
Headgate is not installed.

`python -m bench.pgqueuer_side install URL` creates its tables, `work URL` handles jobs until ended, and `enqueue` reads
an Enqueue as one line of JSON and then talks like `bench.client`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from typing import Any

import asyncpg
import msgspec
import uvloop
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from bench import workload
from bench.client import Enqueue, Report

ENTRYPOINT = "nothing"
# As many managers as in its own benchmark. Batches of 10 (its default) and 25 are slower; between 50 and 500, and
# between one manager and five, no difference was resolved, and five had the higher medians.
MANAGERS = 5
BATCH = 100


async def install(url: str) -> None:
    """Its tables, all of them logged, with the settings for autovacuum that it recommends."""
    connection = await asyncpg.connect(url)
    queries = Queries(AsyncpgDriver(connection))
    await queries.install()
    await queries.optimize_autovacuum()
    await connection.close()


async def work(url: str) -> None:
    """Handle jobs; each manager has a connection of its own."""
    queues = [PgQueuer(AsyncpgDriver(await asyncpg.connect(url))) for _ in range(MANAGERS)]
    for queue in queues:
        queue.entrypoint(ENTRYPOINT)(_nothing)
    await asyncio.gather(*(queue.run(batch_size=BATCH) for queue in queues))


async def enqueue(job: Enqueue) -> Report:
    """Connect, wait for the word, enqueue everything."""
    payloads = [msgspec.json.encode(workload.payload(n)) for n in range(job.first, job.first + job.events)]
    batches = [payloads[i : i + job.batch] for i in range(0, job.events, job.batch)]
    queues = [Queries(AsyncpgDriver(await asyncpg.connect(job.url))) for _ in range(job.connections)]
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    left, sent_at, latencies_ms = iter(batches), [], []

    async def send(queue: Any, batches: Iterator[list[bytes]]) -> None:
        for batch in batches:
            began_at = time.monotonic()
            await queue.enqueue([ENTRYPOINT] * len(batch), batch, [0] * len(batch))
            sent_at.append(began_at)
            latencies_ms.append((time.monotonic() - began_at) * 1000)

    started_at = time.monotonic()
    await asyncio.gather(*(send(queue, left) for queue in queues))
    return Report(started_at=started_at, ended_at=time.monotonic(), sent_at=sent_at, latencies_ms=latencies_ms)


async def _nothing(job: Any) -> None:
    """As little as a job can do."""


def main() -> None:
    verb, *arguments = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if verb == "install":
            runner.run(install(*arguments))
        elif verb == "work":
            runner.run(work(*arguments))
        else:
            report = runner.run(enqueue(msgspec.json.decode(sys.stdin.readline(), type=Enqueue)))
            sys.stdout.write(msgspec.json.encode(report).decode() + "\n")


if __name__ == "__main__":
    main()
