"""The workflows that `chaos.order` and `chaos.edits` launch: each writes its number to a sink of plain files."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from tidegate import Context, Tidegate

app = Tidegate()

THROTTLE = (30, 200)
_fd: int | None = None


class Effect(msgspec.Struct, frozen=True):
    """What a run did: its event's number, and when, by the machine's monotonic clock."""

    workflow: str
    n: int
    at: float


def effect(workflow: str, n: int) -> None:
    """One line, in one write, in this process's own file."""
    global _fd
    if _fd is None:
        _fd = os.open(Path(os.environ["CHAOS_SINK"]) / f"{os.getpid()}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(_fd, msgspec.json.encode(Effect(workflow, n, time.monotonic())) + b"\n")


def effects(sink: Path) -> list[Effect]:
    """All that was done, in order."""
    lines = [line for file in sink.glob("*.jsonl") for line in file.read_bytes().splitlines()]
    return sorted((msgspec.json.decode(line, type=Effect) for line in lines), key=lambda one: one.at)


@app.workflow(on="line.throttled", throttle=f"{THROTTLE[0]}/{THROTTLE[1]}ms")
async def throttled(ctx: Context, n: int) -> None:
    effect("throttled", n)


@app.workflow(on="line.single", max_concurrency=1)
async def single(ctx: Context, n: int) -> None:
    effect("single", n)


@app.workflow(on="line.trigger")
async def trigger(ctx: Context, n: int) -> None:
    effect("trigger", n)


@app.workflow(on="line.source")
async def source(ctx: Context, n: int) -> None:
    effect("source", n)
