"""pgqueuer as its own documentation recommends; see `bench.other_side`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import asyncpg
import msgspec
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from bench import other_side
from bench.other_side import OtherQueue, Send

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


def batch(payloads: Sequence[dict[str, Any]]) -> list[bytes]:
    """It takes bytes."""
    return [msgspec.json.encode(payload) for payload in payloads]


async def connect(url: str, connections: int) -> list[Send]:
    return [partial(_send, Queries(AsyncpgDriver(await asyncpg.connect(url)))) for _ in range(connections)]


async def _send(queries: Any, payloads: Sequence[bytes]) -> None:
    await queries.enqueue([ENTRYPOINT] * len(payloads), list(payloads), [0] * len(payloads))


async def _nothing(job: Any) -> None:
    """As little as a job can do."""


if __name__ == "__main__":
    other_side.main(OtherQueue(install, work, batch, connect))
