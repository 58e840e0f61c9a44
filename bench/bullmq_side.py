"""BullMQ for Python as its own documentation recommends; see `bench.other_side`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bullmq import Queue, Worker

from bench import other_side
from bench.other_side import OtherQueue, Send

QUEUE = "bench"
# Between 5 and 50 no difference was resolved; 100 and 300 took more CPU for a job.
CONCURRENCY = 20


async def install(url: str) -> None:
    """Nothing: a queue is there when it is used."""


async def work(url: str) -> None:
    """Handle jobs, many at a time; it keeps those that are done, as by default."""
    worker = Worker(QUEUE, _nothing, {"connection": url, "concurrency": CONCURRENCY, "autorun": False})
    await worker.run()


def batch(payloads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """It takes objects, and encodes them itself."""
    return [{"name": "nothing", "data": payload} for payload in payloads]


async def connect(url: str, connections: int) -> list[Send]:
    return [Queue(QUEUE, {"connection": url}).addBulk for _ in range(connections)]


async def _nothing(job: Any, token: str) -> None:
    """As little as a job can do."""


if __name__ == "__main__":
    other_side.main(OtherQueue(install, work, batch, connect))
