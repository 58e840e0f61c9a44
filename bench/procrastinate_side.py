"""procrastinate as its own documentation recommends; see `bench.other_side`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from procrastinate import App, PsycopgConnector

from bench import other_side
from bench.other_side import OtherQueue, Send

# Its worker takes jobs one by one, each with a round trip and a commit. Five with a pool each gave twice the rate of
# one, at the same CPU for a job; the concurrency is the one that its documentation shows.
WORKERS = 5
CONCURRENCY = 30
CONNECTIONS = 4


async def install(url: str) -> None:
    """Its tables, functions and triggers."""
    async with _app(url, 1).open_async() as app:
        await app.schema_manager.apply_schema_async()


async def work(url: str) -> None:
    """Handle jobs, many at a time; it keeps the rows of those that are done, as by default."""
    await asyncio.gather(*(_work(url) for _ in range(WORKERS)))


async def _work(url: str) -> None:
    async with _app(url, CONNECTIONS).open_async() as app:
        # A signal ends the process at once: nothing is left to do by then, and of several workers in a process only one
        # would hear of it and stop.
        await app.run_worker_async(concurrency=CONCURRENCY, install_signal_handlers=False)


def batch(payloads: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """It takes a task's arguments, and encodes them itself."""
    return [{"order": payload} for payload in payloads]


async def connect(url: str, connections: int) -> list[Send]:
    """The connections are its pool's."""
    app = _app(url, connections)
    await app.open_async()

    async def send(arguments: Sequence[dict[str, Any]]) -> None:
        await app.tasks["nothing"].batch_defer_async(*arguments)

    return [send] * connections


def _app(url: str, connections: int) -> App:
    app = App(connector=PsycopgConnector(conninfo=url, min_size=connections, max_size=connections))
    app.task(name="nothing")(_nothing)
    return app


async def _nothing(order: dict[str, Any]) -> None:
    """As little as a job can do."""


if __name__ == "__main__":
    logging.getLogger("procrastinate").setLevel(logging.ERROR)  # it warns of an App that is made in a main program
    other_side.main(OtherQueue(install, work, batch, connect))
