"""An application whose runs sleep, hang, wait for a slot or begin by themselves; its effects are lines of a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tidegate import Context, Tidegate

app = Tidegate()


def mark(what: str) -> None:
    file = os.open(os.environ["EFFECTS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, f"{what}\n".encode())
    finally:
        os.close(file)


@app.workflow(on="quick")
def quick(ctx: Context, key: str) -> None:
    mark(f"quick {key}")


@app.workflow(on="nap")
async def nap(ctx: Context, key: str) -> None:
    await ctx.step("before", mark, f"before {key}")
    await ctx.sleep("12s")
    await ctx.step("after", mark, f"after {key}")


@app.workflow(on="hang")
def hang(ctx: Context, key: str) -> None:
    mark(f"began {key}")
    while Path(os.environ["HANGS"]).exists():
        time.sleep(0.02)
    mark(f"ended {key}")


@app.workflow(every="1s")
def beat(ctx: Context, scheduled_at: str) -> None:
    mark(f"beat {scheduled_at}")
