"""The workflows that chaos runs.

Each step writes to a sink of plain files when it begins and when it ends: so what really happened is known apart from
what the database says.
"""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from chaos.records import Mark
from chaos.traffic import KEYED
from tidegate import Breaker, Context, NonRetryable, Retry, Tidegate, clock

app = Tidegate()

SINK = Path(os.environ.get("CHAOS_SINK", "."))
AGAIN = Retry(max_attempts=8, base="300ms", factor=2, cap="2s")
NAP_MS = 800
# So long that a worker that was frozen for its lease wakes up while another one is at the same step.
LONG_SECONDS = 2.5
_fd: int | None = None


def _move_clock(seconds: float) -> None:
    """Have a wrong wall clock where libfaketime is not to be had: every reader of it in this process."""
    wall, wall_ns = time.time, time.time_ns
    time.time = lambda: wall() + seconds
    time.time_ns = lambda: wall_ns() + round(seconds * 1e9)
    clock.utc_now = lambda: datetime.fromtimestamp(wall() + seconds, UTC)


if "CHAOS_CLOCK_OFFSET" in os.environ:
    _move_clock(float(os.environ["CHAOS_CLOCK_OFFSET"]))


def mark(ctx: Context, workflow: str, step: str, what: str) -> None:
    """One line, in one write, in this process's own file: a kill cuts off at most the last."""
    global _fd
    if _fd is None:
        _fd = os.open(SINK / f"{os.getpid()}.jsonl", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    event = ctx.event
    made = Mark(
        at=time.monotonic(),
        pid=os.getpid(),
        run=str(ctx.run_id),
        event=str(event.id) if event else "",
        workflow=workflow,
        step=step,
        key=ctx.idempotency_key,
        what=what,
        generation=ctx._execution.run.claim_generation,
        subject=event.payload.get("order", "") if event and workflow in KEYED else "",
    )
    os.write(_fd, msgspec.json.encode(made) + b"\n")


async def effect(ctx: Context, workflow: str, step: str, *, seconds: float = 0.0, fails: int = 0) -> str:
    """Run a step with a side effect that takes a while and fails the first times."""

    async def work() -> str:
        mark(ctx, workflow, step, "began")
        await asyncio.sleep(seconds)
        if _is_to_fail(ctx, step, fails):
            mark(ctx, workflow, step, "failed")
            raise ConnectionError("as planned")
        mark(ctx, workflow, step, "ended")
        return step

    return await ctx.step(step, work, retry=AGAIN)


def _is_to_fail(ctx: Context, step: str, fails: int) -> bool:
    """Each try takes one of the planned failures, whichever process it runs in."""
    for n in range(fails):
        try:
            os.close(os.open(SINK / f"{ctx.run_id}.{step}.{n}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        return True
    return False


@app.workflow(on="chaos.plain")
async def plain(ctx: Context, **_: Any) -> str:
    await effect(ctx, "plain", "only")
    return "done"


@app.workflow(on="chaos.steps")
async def steps(ctx: Context, fails: int = 0, **_: Any) -> str:
    await effect(ctx, "steps", "first")
    await effect(ctx, "steps", "second", seconds=0.02, fails=fails)
    await effect(ctx, "steps", "third")
    return "done"


@app.workflow(on="chaos.nap")
async def nap(ctx: Context, **_: Any) -> str:
    await effect(ctx, "nap", "before")
    await ctx.sleep(f"{NAP_MS}ms", name="nap")
    await effect(ctx, "nap", "after")
    return "done"


@app.workflow(on="chaos.long")
async def long(ctx: Context, **_: Any) -> str:
    await effect(ctx, "long", "only", seconds=LONG_SECONDS)
    return "done"


@app.workflow(on="chaos.throttled", throttle="20/s")
async def throttled(ctx: Context, **_: Any) -> str:
    await effect(ctx, "throttled", "only")
    return "done"


@app.workflow(on="chaos.narrow", max_concurrency=2, concurrency_key="{{ event.payload.customer }}")
async def narrow(ctx: Context, **_: Any) -> str:
    await effect(ctx, "narrow", "only", seconds=0.05)
    return "done"


@app.workflow(on="chaos.keyed", idempotency_key="{{ event.payload.order }}", idempotency_window="1h")
async def keyed(ctx: Context, **_: Any) -> str:
    await effect(ctx, "keyed", "only")
    return "done"


@app.workflow(on="chaos.keyed", idempotency_key="{{ event.payload.order }}", idempotency_window="1h", max_concurrency=2)
async def keyed_narrow(ctx: Context, **_: Any) -> str:
    await effect(ctx, "keyed_narrow", "only", seconds=0.02)
    return "done"


@app.workflow(on="chaos.keyed")
async def each(ctx: Context, **_: Any) -> str:
    await effect(ctx, "each", "only")
    return "done"


@app.workflow(on="chaos.fan")
async def fan_free(ctx: Context, **_: Any) -> str:
    await effect(ctx, "fan_free", "only")
    return "done"


@app.workflow(on="chaos.fan", max_concurrency=3)
async def fan_narrow(ctx: Context, **_: Any) -> str:
    await effect(ctx, "fan_narrow", "first", seconds=0.02)
    await effect(ctx, "fan_narrow", "second")
    return "done"


@app.workflow(on="chaos.fan", throttle="15/s")
async def fan_throttled(ctx: Context, **_: Any) -> str:
    await effect(ctx, "fan_throttled", "only")
    return "done"


@app.workflow(on="chaos.limited", source="limited")
async def limited(ctx: Context, **_: Any) -> str:
    await effect(ctx, "limited", "only")
    return "done"


@app.workflow(on="chaos.paused", source="pausable")
async def paused(ctx: Context, **_: Any) -> str:
    await effect(ctx, "paused", "only")
    return "done"


@app.workflow(on="chaos.stopped")
async def stopped(ctx: Context, **_: Any) -> str:
    await effect(ctx, "stopped", "only")
    return "done"


@app.workflow(on="chaos.broken", breaker=Breaker(threshold=3, window="5s", pause="1s"))
async def broken(ctx: Context, is_bad: bool = True, **_: Any) -> str:
    if is_bad:
        raise NonRetryable("as planned")
    return "done"
