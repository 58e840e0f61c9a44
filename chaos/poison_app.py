"""The workflow of `chaos.poison`: most of its runs are harmless, some kill the process that executes them.

What a run did is written to plain files, apart from what the database says.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from tidegate import Context, Tidegate

app = Tidegate()

SINK = Path(os.environ.get("CHAOS_SINK", "."))


def mark(n: int, what: str) -> None:
    """One line, in one write, in this process's own file."""
    fd = os.open(SINK / f"{os.getpid()}.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(fd, f"{n} {what}\n".encode())
    os.close(fd)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.workflow(on="poison.work")
async def work(ctx: Context, n: int, seconds: float = 0.0, kind: str = "harmless") -> int:
    """`kind`: harmless, or when it kills: `at once`, `late` (after its time), `in a step` (after a rest)."""
    mark(n, "began")
    if kind == "at once":
        die()
    if kind == "in a step":
        await ctx.sleep("100ms")
        await ctx.step("die", die)
    await asyncio.sleep(seconds)
    if kind == "late":
        die()
    mark(n, "ended")
    return n
