"""What the sides of the other queues share, so that each of them says only how that queue is used.

A side is a program that runs without Tidegate: `install URL` creates what the queue needs, `work URL` handles jobs
until ended, and `enqueue` reads an Enqueue as one line of JSON and then talks like `bench.client`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import uvloop

from bench import workload
from bench.client import Enqueue, Report, write_report

Send = Callable[[Any], Awaitable[Any]]


class OtherQueue(NamedTuple):
    """How a queue is used: `batch` makes one call's jobs of their payloads, before the clock starts; `connect` gives
    so many connections, each a function that sends a batch."""

    install: Callable[[str], Awaitable[None]]
    work: Callable[[str], Awaitable[None]]
    batch: Callable[[Sequence[dict[str, Any]]], Any]
    connect: Callable[[str, int], Awaitable[list[Send]]]


def main(queue: OtherQueue) -> None:
    """Do what the command line says."""
    verb, *arguments = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if verb == "install":
            runner.run(_awaited(queue.install(*arguments)))
        elif verb == "work":
            runner.run(_awaited(queue.work(*arguments)))
        else:
            report = runner.run(_enqueue(queue, msgspec.json.decode(sys.stdin.readline(), type=Enqueue)))
            write_report(report)


async def _enqueue(queue: OtherQueue, job: Enqueue) -> Report:
    """Connect, wait for the word, enqueue everything."""
    payloads = [workload.payload(n) for n in range(job.first, job.first + job.events)]
    batches = [queue.batch(payloads[i : i + job.batch]) for i in range(0, job.events, job.batch)]
    connections = await queue.connect(job.url, job.connections)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    left, sent_at, latencies_ms = iter(batches), [], []

    async def send_all(send: Send, batches: Iterator[Any]) -> None:
        for batch in batches:
            began_at = time.monotonic()
            await send(batch)
            sent_at.append(began_at)
            latencies_ms.append((time.monotonic() - began_at) * 1000)

    started_at = time.monotonic()
    await asyncio.gather(*(send_all(send, left) for send in connections))
    return Report(started_at=started_at, ended_at=time.monotonic(), sent_at=sent_at, latencies_ms=latencies_ms)


async def _awaited(work: Awaitable[None]) -> None:
    await work
