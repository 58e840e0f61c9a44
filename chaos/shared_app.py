"""The workflows of `chaos.shared`: three share budgets, two collect events in windows; each writes what it did, and
when, to plain files, apart from what the database says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from tidegate import Batch, Budget, Context, Tidegate

app = Tidegate()


class Limits(NamedTuple):
    """What a budget allows of each key: so much in any interval, and so many runs at once."""

    rate: int | None
    interval_ms: int
    concurrency: int | None
    is_keyed: bool
    has_cost: bool


class Collecting(NamedTuple):
    """What a window of a workflow may have at most: events, and time from the first to the last and between two."""

    size: int
    whole_ms: int
    gap_ms: int


BUDGETS = {
    "openai": Limits(30, 1000, None, is_keyed=False, has_cost=True),
    "tenant": Limits(8, 1000, 2, is_keyed=True, has_cost=False),
    "gpu": Limits(None, 0, 3, is_keyed=False, has_cost=False),
}
USES = {
    "ask": ("openai", "tenant"),
    "draw": ("gpu", "openai"),
    "serve": ("gpu", "tenant"),
    "store": ("gpu",),
    "digest": (),
}
WINDOWS = {"store": Collecting(10, 1000, 1000), "digest": Collecting(1000, 2000, 400)}

openai = Budget("openai", "30/s", cost="event.payload.tokens")
tenant = Budget("tenant", "8/s", concurrency=2, key="{{ event.payload.tenant }}")
gpu = Budget("gpu", concurrency=3)


class Mark(msgspec.Struct, frozen=True):
    """An execution of a run has begun (with its events, in order), or has ended; `at` is monotonic."""

    what: str
    workflow: str
    run: str
    execution: str
    at: float
    events: list[str] = []


_fd: int | None = None


def _write(mark: Mark) -> None:
    """One line, in one write, in this process's own file."""
    global _fd
    if _fd is None:
        _fd = os.open(Path(os.environ["CHAOS_SINK"]) / f"{os.getpid()}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(_fd, msgspec.json.encode(mark) + b"\n")


def marks(sink: Path) -> list[Mark]:
    """All that was done, in order."""
    lines = [line for file in sink.glob("*.jsonl") for line in file.read_bytes().splitlines()]
    return sorted((msgspec.json.decode(line, type=Mark) for line in lines), key=lambda one: one.at)


@contextlib.contextmanager
def executing(workflow: str, ctx: Context) -> Iterator[None]:
    """Marks the begin of an execution, and its end if it comes to that: not if it is suspended or killed."""
    execution, run = uuid.uuid4().hex, str(ctx.run_id)
    events = [str(event.id) for event in ctx.events]
    _write(Mark("begin", workflow, run, execution, time.monotonic(), events))
    yield
    _write(Mark("end", workflow, run, execution, time.monotonic()))


@app.workflow(on="shared.ask", budgets=[openai, tenant])
async def ask(ctx: Context, ms: int) -> None:
    with executing("ask", ctx):
        await asyncio.sleep(ms / 1000)


@app.workflow(on="shared.draw", budgets=["openai", gpu])
async def draw(ctx: Context, ms: int) -> None:
    with executing("draw", ctx):
        await ctx.step("draw", asyncio.sleep, ms / 1000)


@app.workflow(on="shared.serve", budgets=["tenant", "gpu"])
async def serve(ctx: Context, ms: int) -> None:
    with executing("serve", ctx):
        await asyncio.sleep(ms / 1000)
        if ms % 3 == 0:
            await ctx.sleep("150ms")  # it holds its slots while it sleeps


@app.workflow(on="shared.row", batch=Batch(10, "1s"), key="{{ event.payload.tenant }}", budgets=["gpu"])
async def store(ctx: Context, ms: int) -> None:
    with executing("store", ctx):
        await asyncio.sleep(ms / 1000)


@app.workflow(on="shared.change", debounce="400ms", max_wait="2s", key="{{ event.payload.tenant }}")
async def digest(ctx: Context) -> None:
    with executing("digest", ctx):
        await ctx.step("write", asyncio.sleep, 0.01)
